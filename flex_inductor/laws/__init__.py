"""Laws that attention keeps, on a user's own function or model: `check` and `check_model` (docs/check.md)."""

from .functions import check
from .models import check_model
from .report import Report, Result

__all__ = ["Report", "Result", "check", "check_model"]
