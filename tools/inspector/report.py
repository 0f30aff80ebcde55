"""What `flex_inductor.inspect` returns."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import fx

from flex_inductor.lowerings.decision import Choice
from flex_inductor.masks import RunSchedule
from flex_inductor.mod_ir.arguments import JOINT_LANES, MASK_LANES, SCORE_LANES

from ..resources import Occupancy, Resources, occupancy
from .calls import CallFacts
from .compiling import Lowered, Source
from .cost import Cost, cost_of
from .graphs import graph_text
from .mask import MaskFacts, facts_of_mask


@dataclass(frozen=True, eq=False)
class Kernel:
    """One kernel, with the config that is used unless it is tuned."""

    made: Source = field(repr=False)  # as Inductor would build it
    target: str
    config: dict[str, Any]
    choice: Choice | None  # why that config, and the others; None for a kernel that has only one
    resources: Resources
    built_with: str  # the compiler, and for which vectors
    schedule: Sequence[Any] = field(repr=False)  # of the first call that has it, None where it is not known

    @property
    def name(self) -> str:
        return self.made.name

    @property
    def kind(self) -> str:
        """forward, decode, combine, backward_dq, backward_dkdv; on CPU forward, decode, backward."""
        return self.made.kind

    @property
    def source(self) -> str:
        """With comments that name the lines of the mods."""
        return self.made.noted

    @property
    def occupancy(self) -> Occupancy | None:
        """How many programs a multiprocessor runs at once; None where that is not known."""
        return occupancy(self.resources, self.config.get("num_warps", 4), self.target)

    def save(self, folder: str | Path) -> Path:
        """Write a script into `folder` that runs this kernel on random inputs, to edit and run again; its path.

        Its GPU kernels run on a GPU where there is one, else by Triton's interpreter. What the call's mask
        visits is beside it in a file; captured whole numbers are zeros.
        """
        from .replay import save

        return save(self, Path(folder))

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.kind,
            "config": self.config,
            "choice": self.choice and self.choice._asdict(),
            "resources": asdict(self.resources),
            "occupancy": self.occupancy and self.occupancy._asdict(),
            "built_with": self.built_with,
            "source": self.source,
        }


@dataclass(frozen=True, eq=False)
class Call:
    """One attention call: what its author wrote, what was decided, what it became."""

    number: int
    facts: CallFacts
    lowered: dict[str, Lowered]  # forward, and backward where something needs a gradient
    kernels: list[Kernel]
    target: str

    @property
    def problem(self) -> Any:
        return self.lowered["forward"].problem

    @property
    def decision(self) -> Any:
        return self.lowered["forward"].decision

    @property
    def mask(self) -> RunSchedule | None:
        return self.facts.mask

    @property
    def score_mod_graph(self) -> fx.GraphModule | None:
        return self.lowered["forward"].graphs.get("score_mod")

    @property
    def mask_graph(self) -> fx.GraphModule | None:
        return self.lowered["forward"].graphs.get("mask_mod")

    @property
    def joint_graph(self) -> fx.GraphModule | None:
        return self.lowered["backward"].graphs.get("joint") if "backward" in self.lowered else None

    @functools.cached_property
    def graphs(self) -> dict[str, str]:
        """The graphs as text, by name."""
        mods = {"score_mod": self.facts.score_mod, "mask_mod": self.facts.mask_mod}
        captures = {name: [c.name for c in mod.captures] for name, mod in mods.items() if mod}
        found = {}
        for name, graph, lanes in (
            ("score_mod", self.score_mod_graph, SCORE_LANES),
            ("joint", self.joint_graph, JOINT_LANES),
            ("mask_mod", self.mask_graph, MASK_LANES),
        ):
            if graph is not None:
                known = captures.get("mask_mod" if name == "mask_mod" else "score_mod", ())
                found[name] = graph_text(graph, name, lanes, known)
        return found

    @functools.cached_property
    def schedule(self) -> MaskFacts | None:
        return None if self.mask is None else facts_of_mask(self.mask, self.mask_graph is not None)

    def cost(self, device: str | None = None) -> dict[str, Cost]:
        """For each direction what it takes at least, on a card of cost.DEVICES or on this machine's CPU."""
        return {direction: cost_of(self, direction, device) for direction in self.lowered}

    def to_dict(self) -> dict[str, Any]:
        facts = self.facts
        mods = {"score_mod": facts.score_mod, "mask_mod": facts.mask_mod}
        return {
            "where": None if facts.where is None else facts.where._asdict(),
            "tensors": [asdict(tensor) for tensor in facts.tensors],
            **{
                name: mod
                and {
                    "name": mod.name,
                    "lines": [line._asdict() for line in mod.lines],
                    "captures": [asdict(capture) for capture in mod.captures],
                }
                for name, mod in mods.items()
            },
            "decisions": {name: low.decision._asdict() for name, low in self.lowered.items()},
            "graphs": self.graphs,
            "schedule": None if self.schedule is None else self.schedule.to_dict(),
            "cost": {name: {**cost._asdict(), "share": cost.share} for name, cost in self.cost().items()},
            "kernels": [kernel.name for kernel in self.kernels],
        }


@dataclass(frozen=True, eq=False)
class Report:
    """The attention calls of a function. `print(report)` is a page; see docs/inspector.md."""

    target: str
    calls: list[Call]
    versions: dict[str, str]

    @property
    def kernels(self) -> list[Kernel]:
        """Every distinct kernel over all calls."""
        return list(dict.fromkeys(kernel for call in self.calls for kernel in call.kernels))

    def __str__(self) -> str:
        from .page import page

        return page(self)

    def to_dict(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "versions": self.versions,
            "calls": [call.to_dict() for call in self.calls],
            "kernels": [kernel.to_dict() for kernel in self.kernels],
        }

    def to_json(self, path: str | Path) -> None:
        """Write what is known as JSON; `flex-inductor inspect --against` reads it."""
        import json

        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    def to_html(self, path: str | Path) -> None:
        """Write the report as one file that a browser shows without a network."""
        from .webpage import webpage

        Path(path).write_text(webpage(self))
