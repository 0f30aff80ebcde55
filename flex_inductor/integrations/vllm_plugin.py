"""What vLLM calls in each of its processes. Without being asked, it does nothing and imports nothing."""

import os

from . import ASK_VLLM


def load() -> None:
    if os.environ.get(ASK_VLLM, "0") not in ("", "0"):
        from .vllm import register

        register()
