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
    """What `inspect` found of a function. `print(report)` is a page; see docs/inspector.md.

    Args:
        target: "cpu" or a GPU's architecture.
        calls: a `Call` for each attention call.
        versions: of the packages that matter.
        plans: how masks were planned for several ranks.

    Example:
        >>> query = torch.randn(1, 2, 64, 16)
        >>> options = {"route": "chunked"}  # compiles no kernel
        >>> report = flex_inductor.inspect(flex_attention, query, query, query, options=options)
        >>> len(report.calls), report.kernels, sorted(report.to_dict())
        (1, [], ['calls', 'kernels', 'plans', 'target', 'versions'])
    """

    target: str
    calls: Sequence[Call]
    versions: dict[str, str]
    plans: Sequence[Decision] = ()

    @property
    def kernels(self) -> Sequence[Kernel]:
        """Every distinct kernel over all calls."""
        return list(dict.fromkeys(kernel for call in self.calls for kernel in call.kernels))

    def __str__(self) -> str:
        return page(self)

    def to_dict(self) -> dict[str, Any]:
        """Give the report as what JSON can hold."""
        return {
            "target": self.target,
            "versions": self.versions,
            "plans": plain(self.plans),
            "calls": [call.to_dict() for call in self.calls],
            "kernels": [kernel.to_dict() for kernel in self.kernels],
        }

    def to_json(self, path: str | Path) -> None:
        r"""Write what is known as JSON; `flex-inductor inspect --against` reads it.

        Args:
            path: of the file.

        Example:
            >>> import pathlib, tempfile
            >>> query, options = torch.randn(1, 2, 64, 16), {"route": "chunked"}
            >>> report = flex_inductor.inspect(flex_attention, query, query, query, options=options)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = pathlib.Path(folder, "report.json")
            ...     report.to_json(path)
            ...     path.read_text()[:18]
            '{\n "target": "cpu"'
        """
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    def to_html(self, path: str | Path) -> None:
        """Write the report as one file that a browser shows without a network.

        Args:
            path: of the file.

        Example:
            >>> import pathlib, tempfile
            >>> query, options = torch.randn(1, 2, 64, 16), {"route": "chunked"}
            >>> report = flex_inductor.inspect(flex_attention, query, query, query, options=options)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = pathlib.Path(folder, "report.html")
            ...     report.to_html(path)
            ...     path.read_text()[:15]
            '<!DOCTYPE html>'
        """
        from .webpage import webpage  # brings pygments, for web pages alone

        Path(path).write_text(webpage(self))
