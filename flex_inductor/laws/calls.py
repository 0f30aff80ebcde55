"""The attention calls that a function makes, and each of them made again with something changed."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..mod_ir.capture import LiftedMod
from ..mod_ir.names import capture_names
from ..mod_ir.source_lines import calling_line, frames_in
from ..op import AttentionCall, Inputs, attention
from ..op.prepare import with_score_graph
from ..options import call_options
from ..reference import over_lanes
from ..take_over import take_over
from . import errors
from .compare import is_float

MOST_LANES = 1 << 25  # of a call that is checked: laws look at every pair


@dataclass(eq=False)
class Call:
    """One call, with mods as functions of lanes alone."""

    number: int
    where: str
    query: Tensor
    key: Tensor  # [B, K, N, D], also where the caller has one batch for all
    value: Tensor
    score_mod: Callable | None
    mask_mod: Callable | None
    scale: Any
    given: AttentionCall  # as the op got it

    @classmethod
    def of(cls, number: int, where: str, given: AttentionCall) -> Call:
        query, key, value = (t.detach() for t in (given.query, given.key, given.value))
        key, value = (t.expand(query.size(0), -1, -1, -1) for t in (key, value))
        mods = (
            _of_lanes(given.score_mod, given.inputs.score_captures),
            _of_lanes(given.mask_mod, given.inputs.mask_captures),
        )
        return cls(number, where, query, key, value, *mods, given.scale, given)

    @property
    def name(self) -> str:
        return f"call {self.number}" + (f" ({self.where})" if self.where else "")

    @property
    def kind(self) -> Any:
        """Equal for calls that differ by their values alone, such as those of a model's layers."""
        inputs = tuple(self.given.inputs.given())
        code = getattr(self.score_mod, "__code__", self.score_mod)
        return self.query.shape, self.key.shape, self.query.dtype, code, self.mask_mod, inputs

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Of batches, heads, queries and keys."""
        return (*self.query.shape[:3], self.key.size(2))

    @property
    def captures(self) -> list[tuple[str, Any]]:
        """What score_mod captures, by name."""
        captures = self.given.inputs.score_captures
        return list(zip(capture_names(self.given.score_mod, len(captures)), captures, strict=True))

    @property
    def is_masked(self) -> bool:
        return self.mask_mod is not None or self.given.inputs.schedule is not None

    @property
    def group(self) -> int:
        """How many heads share those of a key."""
        return self.query.size(1) // self.key.size(1)

    @property
    def not_plain(self) -> str:
        """Why the call cannot be made again with other keys, or nothing."""
        inputs = self.given.inputs
        if inputs.tile_map is not None:
            return errors.PACKED
        if inputs.dropout is not None:
            return errors.DROPOUT
        if inputs.ring is not None or inputs.partial:
            return errors.PART
        if inputs.kv_scales:
            return errors.NARROW
        if torch.Size(self.sizes).numel() > MOST_LANES:
            return errors.too_many(self.sizes, MOST_LANES)
        return ""

    @functools.cached_property
    def masked(self) -> tuple[Tensor, Tensor, Tensor]:
        """Flags [B, H, M, N]: what mask_mod lets through, what is in visited blocks, and in full ones."""
        allowed = torch.ones(self.sizes, dtype=torch.bool)
        if self.mask_mod is not None:
            allowed = over_lanes(self.mask_mod, ())(*self._lanes()).expand(self.sizes)
        schedule = self.given.inputs.schedule
        if schedule is None:
            return allowed, torch.ones_like(allowed), torch.zeros_like(allowed)
        b, h, m, n = (slice(0, size) for size in self.sizes)
        bands = schedule.bands(self.sizes[2], self.sizes[3], None, self.query.device)
        visited, full = (t.expand(self.sizes) for t in bands.band(b, h, m).lanes(n))
        return allowed, visited, full

    @functools.cached_property
    def visible(self) -> Tensor:
        """Flags [B, H, M, N]: the pairs that the call computes."""
        allowed, visited, full = self.masked
        return (allowed & visited) | full

    @functools.cached_property
    def weightless(self) -> Tensor:
        """Flags [B, H, M, N]: visible pairs whose score is -inf, so that only score_mod leaves them out."""
        none = torch.zeros(self.sizes, dtype=torch.bool)
        if self.score_mod is None:
            return none
        scores = torch.zeros(self.sizes, dtype=torch.float32)
        try:
            found = over_lanes(self.score_mod, (0,))(scores, *self._lanes())
        except (IndexError, RuntimeError):  # where pairs are masked out, mods may look up any index
            return none
        return (found == -torch.inf) & self.visible

    def _lanes(self) -> Iterator[Tensor]:
        return (torch.arange(size, dtype=torch.int32) for size in self.sizes)

    @property
    def sinks(self) -> Tensor | None:
        sinks = self.given.inputs.sinks
        return None if sinks is None else sinks.detach()

    def run(self, **changed: Any) -> tuple[Tensor, Tensor]:
        """Its output and logsumexp, with some of query, key, value, score_mod, table and sinks changed.

        A `table` of flags [B, H, M, N] takes the place of the mask and the schedule.
        """
        query, key, value, score_mod, sinks = (
            changed.get(name, getattr(self, name)) for name in ("query", "key", "value", "score_mod", "sinks")
        )
        inputs, mask_mod = Inputs(schedule=self.given.inputs.schedule, sinks=sinks), self.mask_mod
        if (table := changed.get("table")) is not None:
            inputs, mask_mod = inputs._replace(schedule=None), looked_up(table)
        options = call_options(None, lse=True, max_scores=False)
        out, lse, _ = attention(query, key, value, score_mod, mask_mod, self.scale, inputs, options)
        return out, lse

    def in_float64(self) -> tuple[list[tuple[str, Tensor]], Callable[..., tuple[Tensor, Tensor]]]:
        """Every tensor that has a gradient, by name, and the call as a function of them."""
        inputs, score_mod = self.given.inputs, self.given.score_mod
        captures = inputs.score_captures
        at = [i for i, capture in enumerate(captures) if is_float(capture)]
        tensors = [(name, getattr(self, name)) for name in ("query", "key", "value")]
        tensors += [(f"captured {self.captures[i][0]}", captures[i]) for i in at]
        tensors += [] if self.sinks is None else [("sinks", self.sinks)]
        if isinstance(score_mod, LiftedMod):  # one that keeps no trace in another dtype
            score_mod = LiftedMod(score_mod.mod, captures)
        options = call_options(None, lse=True, max_scores=False)
        traced: list[Any] = []

        def function(query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
            changed = dict(zip(at, others, strict=False))
            wide = Inputs(
                score_captures=tuple(changed.get(i, capture) for i, capture in enumerate(captures)),
                schedule=inputs.schedule,
                sinks=None if self.sinks is None else others[-1],
            )
            call = AttentionCall(query, key, value, score_mod, self.mask_mod, self.scale, wide, options)
            if not torch.is_grad_enabled():  # the value alone, whose trace serves again
                if not traced:
                    traced.append(with_score_graph(call).score_mod)
                call = call._replace(score_mod=traced[0])
            out, lse, _ = attention(*call)
            return out, lse

        return [(name, tensor.detach().double()) for name, tensor in tensors], function


def looked_up(table: Tensor) -> Callable:
    """The mask_mod of a table of flags."""

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return table[b, h, q_idx, kv_idx]

    return mask_mod


def _of_lanes(mod: Any, captures: Sequence[Any]) -> Callable | None:
    if isinstance(mod, LiftedMod):
        return mod.mod
    if mod is None or not captures:
        return mod
    captures = [c.detach() if isinstance(c, Tensor) else c for c in captures]
    return lambda *lanes: mod(*lanes, *captures)


@dataclass(eq=False)
class _Captures(TorchFunctionMode):
    calls: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is attention:
            line = calling_line(frames_in("".join(traceback.format_stack())))
            self.calls.append(Call.of(len(self.calls), str(line or ""), AttentionCall.read(*args)))
        return func(*args, **(kwargs or {}))


def capture(fn: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, list[Call]]:
    """What `fn` returns, and its calls of flex_attention, ours or torch's."""
    with take_over(), _Captures() as captured:
        result = fn(*args, **kwargs)
    return result, captured.calls


def of_each_kind(calls: Sequence[Call]) -> list[Call]:
    """The first of those that differ by their values alone."""
    found: dict[Any, Call] = {}
    for call in calls:
        found.setdefault(call.kind, call)
    return list(found.values())
