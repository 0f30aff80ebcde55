"""What `flex_inductor.inspect` returns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flex_inductor.lowerings.decision import Decision

from .model import Call, Kernel, plain
from .page import page


@dataclass(frozen=True, eq=False)
class Report:
    """The attention calls of a function. `print(report)` is a page; see docs/inspector.md."""

    target: str
    calls: Sequence[Call]
    versions: dict[str, str]
    plans: Sequence[Decision] = ()  # how masks were planned for several ranks

    @property
    def kernels(self) -> Sequence[Kernel]:
        """Every distinct kernel over all calls."""
        return list(dict.fromkeys(kernel for call in self.calls for kernel in call.kernels))

    def __str__(self) -> str:
        return page(self)

    def to_dict(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "versions": self.versions,
            "plans": plain(self.plans),
            "calls": [call.to_dict() for call in self.calls],
            "kernels": [kernel.to_dict() for kernel in self.kernels],
        }

    def to_json(self, path: str | Path) -> None:
        """Write what is known as JSON; `flex-inductor inspect --against` reads it."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    def to_html(self, path: str | Path) -> None:
        """Write the report as one file that a browser shows without a network."""
        from .webpage import webpage  # brings pygments, for web pages alone

        Path(path).write_text(webpage(self))
