"""The facts of a report: its kernels, its calls, and the whole. What shows them is in report.py."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from flex_inductor.lowerings.decision import Choice, Decision
from flex_inductor.masks import RunSchedule
from flex_inductor.mod_ir.arguments import JOINT_LANES, MASK_LANES, SCORE_LANES

from ..resources import Occupancy, Resources, occupancy
from .calls import CallFacts
from .compiling import Lowered, Source
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
        """How many instances a multiprocessor runs at once; None where that is not known."""
        return occupancy(self.resources, self.config.get("num_warps", 4), self.target)


@dataclass(frozen=True, eq=False)
class Call:
    """One attention call: what its author wrote, what was decided, what it became."""

    number: int
    facts: CallFacts
    lowered: dict[str, Lowered]  # forward, and backward where something needs a gradient
    kernels: Sequence[Kernel]
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
        # A mask's tokens are not those of a tile's place where tiles lie elsewhere.
        tokens = self.mask_graph is not None and self.facts.values.inputs.tile_map is None
        return None if self.mask is None else facts_of_mask(self.mask, tokens)


@dataclass(frozen=True, eq=False)
class Report:
    """The attention calls of a function."""

    target: str
    calls: Sequence[Call]
    versions: dict[str, str]
    plans: Sequence[Decision] = ()  # how masks were planned for several ranks

    @property
    def kernels(self) -> Sequence[Kernel]:
        """Every distinct kernel over all calls."""
        return list(dict.fromkeys(kernel for call in self.calls for kernel in call.kernels))
