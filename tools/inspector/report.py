"""What `flex_inductor.inspect` returns: a report's facts, with what shows them."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from . import model, replay
from .cost import Cost, costs_of
from .page import page


def plain(value: Any) -> Any:
    """Dataclasses and named tuples as dicts."""
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


class Kernel(model.Kernel):
    def save(self, folder: str | Path) -> Path:
        """Write a script into `folder` that runs this kernel on random inputs, to edit and run again; its path.

        Its GPU kernels run on a GPU where there is one, else by Triton's interpreter. What the call's mask
        visits is beside it in a file; captured whole numbers are zeros.
        """
        return replay.save(self, Path(folder))

    def to_dict(self) -> dict[str, Any]:
        names = ("name", "kind", "config", "choice", "resources", "occupancy", "built_with", "source")
        return {name: plain(getattr(self, name)) for name in names}


class Call(model.Call):
    kernels: list[Kernel]

    def cost(self, device: str | None = None) -> dict[str, Cost]:
        """For each direction what it takes at least, on a card of cost.DEVICES or on this machine's CPU."""
        return costs_of(self, device)

    def to_dict(self) -> dict[str, Any]:
        return {
            **{
                name: plain(getattr(self.facts, name))
                for name in ("where", "tensors", "score_mod", "mask_mod")
            },
            "decisions": {name: plain(lowered.decision) for name, lowered in self.lowered.items()},
            "graphs": self.graphs,
            "schedule": None if self.schedule is None else self.schedule.to_dict(),
            "cost": {name: {**cost._asdict(), "share": cost.share} for name, cost in self.cost().items()},
            "kernels": [kernel.name for kernel in self.kernels],
        }


class Report(model.Report):
    """The attention calls of a function. `print(report)` is a page; see docs/inspector.md."""

    calls: list[Call]
    kernels: list[Kernel]

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
