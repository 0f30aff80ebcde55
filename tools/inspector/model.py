"""The facts of a report: its kernels and its calls."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from torch import fx

from flex_inductor.lowerings.decision import Choice
from flex_inductor.masks import RunSchedule
from flex_inductor.mod_ir.arguments import JOINT_LANES, MASK_LANES, SCORE_LANES

from ..resources import Occupancy, Resources, occupancy
from . import replay
from .calls import CallFacts
from .compiling import Lowered, Source
from .cost import Cost, cost_of
from .graphs import graph_text
from .mask import MaskFacts


def plain(value: Any) -> Any:
    """Dataclasses and named tuples as dicts."""
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


@dataclass(frozen=True, eq=False)
class Kernel:
    """One kernel of a report, with the config that is used unless it is tuned.

    Args:
        made: the source, as Inductor would build it.
        target: "cpu" or a GPU's architecture.
        config: its sizes, by name.
        choice: why that config, and the others; None for a kernel that has only one.
        resources: registers, memory and instructions of the binary.
        built_with: the compiler, and for which vectors.
        schedule: what the first call that has it visits, None where it is not known.

    Example:
        >>> import tempfile
        >>> query = torch.randn(1, 2, 64, 16)
        >>> report = flex_inductor.inspect(flex_attention, query, query, query, target="cpu")
        >>> kernel = report.kernels[0]
        >>> kernel.kind, "float" in kernel.source, kernel.occupancy
        ('forward', True, None)
        >>> sorted(kernel.to_dict())[:3]
        ['built_with', 'choice', 'config']
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     script = kernel.save(folder)
        ...     script.suffix, script.exists()
        ('.py', True)
    """

    made: Source = field(repr=False)
    target: str
    config: dict[str, Any]
    choice: Choice | None
    resources: Resources
    built_with: str
    schedule: Sequence[Any] = field(repr=False)

    @property
    def name(self) -> str:
        """The name of the function in its source."""
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

    def save(self, folder: str | Path) -> Path:
        """Write a script that runs this kernel on random inputs, to edit and run again.

        Its GPU kernels run on a GPU where there is one, else by Triton's interpreter. What the call's mask visits is
        beside it in a file; captured whole numbers are zeros.

        Args:
            folder: where it is written.

        Returns:
            Path: of the script.
        """
        return replay.save(self.made, self.target, self.config, self.schedule, Path(folder))

    def to_dict(self) -> dict[str, Any]:
        """Give what is known as what JSON can hold."""
        names = ("name", "kind", "config", "choice", "resources", "occupancy", "built_with", "source")
        return {name: plain(getattr(self, name)) for name in names}


@dataclass(frozen=True, eq=False)
class Call:
    """One attention call of a report: what its author wrote, what was decided, what it became.

    Args:
        number: its place among the calls of the graph.
        facts: its line, tensors and mods.
        lowered: "forward", and "backward" where something needs a gradient.
        kernels: those that it runs.
        target: "cpu" or a GPU's architecture.

    Example:
        >>> query, options = torch.randn(1, 2, 64, 16, requires_grad=True), {"route": "chunked"}
        >>> def attend(query):
        ...     return flex_attention(query, query, query, mods.softcap(20.0))
        >>> call = flex_inductor.inspect(attend, query, options=options).calls[0]
        >>> sorted(call.lowered), sorted(call.graphs), call.mask
        (['backward', 'forward'], ['joint', 'score_mod'], None)
        >>> call.cost()["forward"].share, sorted(call.to_dict())[:3]
        (None, ['cost', 'decisions', 'graphs'])
    """

    number: int
    facts: CallFacts
    lowered: dict[str, Lowered]
    kernels: Sequence[Kernel]
    target: str

    @property
    def problem(self) -> Any:
        """What the routes were asked to serve."""
        return self.lowered["forward"].problem

    @property
    def decision(self) -> Any:
        """Which route serves the forward, and why: a `Decision`."""
        return self.lowered["forward"].decision

    @property
    def mask(self) -> RunSchedule | None:
        """The blocks that it visits, or None for all."""
        return self.facts.mask

    @property
    def score_mod_graph(self) -> fx.GraphModule | None:
        """The score_mod as an FX graph, or None."""
        return self.lowered["forward"].graphs.get("score_mod")

    @property
    def mask_graph(self) -> fx.GraphModule | None:
        """The mask_mod as an FX graph, or None."""
        return self.lowered["forward"].graphs.get("mask_mod")

    @property
    def joint_graph(self) -> fx.GraphModule | None:
        """The score_mod with its gradient as an FX graph, or None."""
        return self.lowered["backward"].graphs.get("joint") if "backward" in self.lowered else None

    @functools.cached_property
    def graphs(self) -> dict[str, str]:
        """The graphs as text, by name."""
        mods = {"score_mod": self.facts.score_mod, "mask_mod": self.facts.mask_mod}
        captures = {name: [c.name for c in mod.captures] for name, mod in mods.items() if mod}
        graphs = {
            "score_mod": (self.score_mod_graph, SCORE_LANES, captures.get("score_mod", ())),
            "joint": (self.joint_graph, JOINT_LANES, captures.get("score_mod", ())),
            "mask_mod": (self.mask_graph, MASK_LANES, captures.get("mask_mod", ())),
        }
        return {name: graph_text(of[0], name, *of[1:]) for name, of in graphs.items() if of[0] is not None}

    @functools.cached_property
    def schedule(self) -> MaskFacts | None:
        """The facts of its mask, such as tiles and sparsity; None without a mask."""
        # With a map, tiles lie elsewhere than the mask's tokens.
        tokens = self.mask_graph is not None and self.facts.values.inputs.tile_map is None
        return None if self.mask is None else MaskFacts(self.mask, tokens)

    def cost(self, device: str | None = None) -> dict[str, Cost]:
        """Say for each direction what it takes at least.

        Args:
            device: a card of `flex_inductor.tools.inspector.cost.DEVICES`; the target by default.

        Returns:
            dict: a `Cost` for "forward" and "backward".
        """
        return {
            name: cost_of(self.facts, name, one, self.target, device) for name, one in self.lowered.items()
        }

    def to_dict(self) -> dict[str, Any]:
        """Give what is known as what JSON can hold."""
        facts = ("where", "tensors", "score_mod", "mask_mod")
        return {
            **{name: plain(getattr(self.facts, name)) for name in facts},
            "decisions": {name: plain(lowered.decision) for name, lowered in self.lowered.items()},
            "graphs": self.graphs,
            "schedule": None if self.schedule is None else self.schedule.to_dict(),
            "cost": {name: {**cost._asdict(), "share": cost.share} for name, cost in self.cost().items()},
            "kernels": [kernel.name for kernel in self.kernels],
        }
