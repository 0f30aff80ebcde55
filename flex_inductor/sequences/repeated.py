"""varlen_attention of a layer that runs step after step: what its first call found out holds for the others."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kept import Kept
from ..op import AttentionCall, Inputs
from ..op.call import tensors_of
from ..op.eager import kernels, known
from ..options import call_options
from ..softmax import Softmax
from ..visits import Bounds
from ..visits.places import COLUMNS, COUNT, INDEX, ROW
from .attention import as_rows, located
from .mask import SequenceMask


class Step:
    """A mask where a cache lies: made once a step, for all layers with such a cache."""

    def __init__(self, mask: SequenceMask, k_cache: Tensor, v_cache: Tensor):
        self.tile_map, key, _, _ = located(mask, as_rows(k_cache), as_rows(v_cache), {})
        self.in_one_row = key.size(0) != k_cache.size(0)
        self.mask, self.schedule = mask, mask.visits
        self.tensors = [x for part in (self.schedule, self.tile_map) for x in part if isinstance(x, Tensor)]
        constants = [x for x in self.schedule if not isinstance(x, Tensor)]
        # A mod's integers are as wide as these sizes need, and a kernel is made for settings of torch.
        sizes = known.sizes_of_class(self.tile_map.queries.size(0), key.size(0) * key.size(2))
        self.kind = (
            type(self.schedule),
            self.in_one_row,
            sizes,
            known.settings(),
            mask.mask_mod is None,
            *constants,
        )
        self._changing = self._columns() if self._decodes() else None
        self._queries: dict[Any, Tensor] = {}

    def queries(self, like: Tensor) -> Tensor:
        """The buffer into which each layer copies its queries."""
        key = like.shape, like.dtype
        found = self._queries.get(key)
        if found is None:
            tokens = max(like.size(0), 2)  # one row would make other kernels
            found = self._queries[key] = like.new_empty(tokens, *like.shape[1:])
        return found

    def rows(self, cache: Tensor) -> Tensor:
        """A cache, or pages, as kernels read it."""
        if not self.in_one_row:
            return cache.transpose(1, 2)
        return cache.flatten(0, 1).transpose(0, 1).unsqueeze(0)

    def move_to(self, used: Tensor, pages: Tensor) -> bool:
        """Whether this could be made the step of as many sequences, each with one query as before and `used` keys in
        as many `pages`. That changes a few columns of the tables in place."""
        before = self.mask.sequences
        if self._changing is None or pages.shape != before.pages.shape:
            return False
        positions, lengths, each_length, rows, counts, starts = self._changing
        torch.sub(used, 1, out=positions)
        lengths.copy_(used)
        torch.mul(pages, before.page_size, out=rows)
        torch.sub(each_length, starts, out=counts).clamp_(0, before.page_size)
        return True

    def _decodes(self) -> bool:
        """Whether a tile has one query, or a page."""
        sequences, schedule = self.mask.sequences, self.schedule
        one_each = (sequences.max_q, sequences.total_q) == (1, sequences.count)
        return (
            self.in_one_row
            and one_each
            and isinstance(schedule, Bounds)
            and schedule.kv_block == sequences.page_size
        )

    def _columns(self) -> tuple[Tensor, ...]:
        """Those that change from one decoding step to the next, and where pages begin."""
        count, most = self.mask.sequences.pages.shape
        schedule: Any = self.schedule
        keys = self.tile_map.keys.view(count, -1, COLUMNS)[:, :most]
        queries = self.tile_map.queries[:count]
        return (
            queries[:, INDEX],
            schedule.sequence_table[:count, 1],
            schedule.sequence_table[:count, 1:2],
            keys[:, :, ROW],
            keys[:, :, COUNT],
            keys[:1, :, INDEX].clone(),
        )


class _Kind(NamedTuple):
    choose: Callable[[Sequence[Tensor]], Any]
    before: list[Tensor]  # what a kernel is given before the step's tensors
    after: list[Tensor]


class _Known(NamedTuple):
    """What a layer's last call found, for others of its step, cache and size."""

    step: Step
    k_cache: Tensor
    v_cache: Tensor
    shape: torch.Size
    queries: Tensor  # [T, H, D], of which the kernel sees the rows
    run: Callable[[Sequence[Tensor]], Any]
    tensors: list[Tensor]


class Repeated:
    """varlen_attention without gradients, for calls that differ in tensors alone.

    The first call of each kind traces the mods and compiles a kernel; later ones go straight to it. Tensors that the
    mods capture may change in place, but nothing else that they read. All steps have the same mask_mod, beside windows.
    Layers of a step run one after another. Arguments are not checked.
    """

    def __init__(self, score_mod: Callable[..., Tensor] | None, scale: float, sinks: Tensor | None = None):
        self.score_mod, self.scale, self.sinks = score_mod, scale, sinks
        self._kinds: Kept[_Kind] = Kept(256)
        self._last: _Known | None = None

    def __call__(self, query: Tensor, k_cache: Tensor, v_cache: Tensor, step: Step) -> Tensor:
        last = self._last
        if (
            last is None
            or last.step is not step
            or last.k_cache is not k_cache
            or last.v_cache is not v_cache
            or last.shape != query.shape
            or last.queries.dtype != query.dtype
        ):
            last = self._last = self._known(query, k_cache, v_cache, step)
        last.queries.copy_(query)
        out = last.run(last.tensors)[0][0].transpose(0, 1)
        return out if query.size(0) > 1 else out[:1]

    def _known(self, query: Tensor, k_cache: Tensor, v_cache: Tensor, step: Step) -> _Known:
        queries = step.queries(query)
        rows = [queries.transpose(0, 1).unsqueeze(0), step.rows(k_cache), step.rows(v_cache)]
        kind = (*step.kind, known.sizes_of_class(1, queries.size(0)), query.dtype, k_cache.dtype)
        found = self._kinds.get(kind) or self._first(kind, rows, step)
        tensors = [*rows, *found.before, *step.tensors, *found.after]
        run = found.choose(tensors)
        if run is None:  # these have other strides, and so another kernel
            run = self._first(kind, rows, step).choose(tensors)
        return _Known(step, k_cache, v_cache, query.shape, queries, run, tensors)

    @torch.no_grad()
    def _first(self, kind: Any, rows: list[Tensor], step: Step) -> _Kind:
        scattered, softmax = step.mask.sequences.pages is not None, Softmax(self.sinks).inputs(rows[0])
        given = Inputs(schedule=step.schedule, tile_map=step.tile_map, scattered=scattered, **softmax)
        options = call_options(None, lse=False, max_scores=False)
        query, key, value = rows
        asked = AttentionCall(
            query, key, value, self.score_mod, step.mask.mask_mod, self.scale, given, options
        )
        choose, call = kernels.chosen_for(asked)
        captures = [*call.inputs.score_captures, *call.inputs.mask_captures]
        sinks = [] if call.inputs.sinks is None else [call.inputs.sinks]
        wanted, tensors = [*rows, *captures, *step.tensors, *sinks], tensors_of(call)
        assert len(wanted) == len(tensors) and all(map(operator.is_, wanted, tensors))
        found = _Kind(choose, captures, sinks)
        self._kinds.put(kind, found)
        return found
