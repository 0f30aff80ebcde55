"""torch.func.vmap: the vmapped dimension becomes part of the batch.

With N examples of batch B, lane `b` runs over N * B: it is row `b % B` of example `b // B`. Tensors of
the call are laid out so, and mods are wrapped so that they see their own example's captures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters

from .. import errors
from ..mod_ir.arguments import INDEX_DTYPE, JOINT_LANES, MASK_LANES, SCORE_LANES
from ..mod_ir.checks import lane_graph
from ..mod_ir.names import WrappedMod, capture_names
from ..mod_ir.trace import trace_value
from ..softmax.errors import dropout_in_vmap
from .call import AttentionCall, BackwardCall, Inputs, wanted_gradients

aten = torch.ops.aten


def in_vmap() -> bool:
    """Whether torch.func.vmap is around, also for a transform such as jacrev."""
    return any(level.key() == TransformType.Vmap for level in retrieve_all_functorch_interpreters())


def fold_forward(
    call: AttentionCall, joint: fx.GraphModule | None, score_mod: Callable | None, dims: Any, examples: int
) -> tuple[AttentionCall, fx.GraphModule | None, Callable | None, Callable[[Tensor], Tensor]]:
    """The call on all examples at once, its joint graph, `score_mod`, and what separates an output into examples."""
    fold = _Fold(examples, call.query, dims.query)
    mods = _FoldedMods(fold, call.inputs, dims.inputs)
    query = fold.tensor(call.query, dims.query)
    folded = call._replace(
        query=query,
        key=fold.tensor(call.key, dims.key),
        value=fold.tensor(call.value, dims.value),
        score_mod=mods.score.graph(call.score_mod, "score_mod", query),
        mask_mod=mods.mask.graph(call.mask_mod, "mask_mod", query),
        inputs=mods.inputs,
    )
    return folded, mods.score.joint(joint, query), mods.score.mod(score_mod, SCORE_LANES), fold.separate


def fold_backward(
    call: BackwardCall, score_mod: Callable | None, dims: Any, examples: int
) -> tuple[BackwardCall, Callable | None, Callable[[Sequence[Any]], tuple]]:
    """The backward call on all examples at once, `score_mod`, and what separates its gradients into examples."""
    fold = _Fold(examples, call.query, dims.query)
    captures = len(call.inputs.score_captures)
    mods = _FoldedMods(fold, call.inputs, dims.inputs, separate=wanted_gradients(call.joint, captures))
    query, *others = fold.tensors(call[:7], dims[:7])
    folded = call._replace(
        **dict(zip(BackwardCall._fields, (query, *others), strict=False)),
        score_mod=mods.score.graph(call.score_mod, "score_mod", query),
        joint=mods.score.joint(call.joint, query),
        mask_mod=mods.mask.graph(call.mask_mod, "mask_mod", query),
        inputs=mods.inputs,
    )

    def separate(grads: Sequence[Any]) -> tuple:
        *d_qkv, d_captures = grads
        inputs = zip(
            d_qkv, (call.query, call.key, call.value), (dims.query, dims.key, dims.value), strict=True
        )
        d_qkv = [fold.gradient(grad, tensor, dim) for grad, tensor, dim in inputs]
        return *d_qkv, *d_captures[:captures]

    return folded, mods.score.mod(score_mod, SCORE_LANES), separate


class _FoldedMods:
    """Both mods on their captures of all examples, and the call's inputs with these."""

    def __init__(self, fold: _Fold, inputs: Inputs, dims: Any, separate: Sequence[bool] = ()):
        if inputs.tile_map is not None:
            raise errors.sequences_in_vmap()
        if inputs.dropout is not None:
            raise dropout_in_vmap()
        if not {*inputs.given()} <= _FOLDED:
            raise errors.planned_in_vmap()
        self.score = _FoldedMod(fold, inputs.score_captures, dims.score_captures, separate)
        self.mask = _FoldedMod(fold, inputs.mask_captures, dims.mask_captures)
        schedule = fold.schedule(inputs.schedule, dims.schedule)
        self.inputs = Inputs(self.score.captures, self.mask.captures, schedule, partial=inputs.partial)
        if inputs.sinks is not None:
            self.inputs = self.inputs._replace(sinks=fold.rows(inputs.sinks, dims.sinks))
        if inputs.kv_scales:
            scales = map(fold.tensor, inputs.kv_scales, dims.kv_scales)
            self.inputs = self.inputs._replace(kv_scales=tuple(scales))
        if inputs.grad_entropy is not None:
            self.inputs = self.inputs._replace(
                grad_entropy=fold.tensor(inputs.grad_entropy, dims.grad_entropy)
            )


_FOLDED = {"score_captures", "mask_captures", "schedule", "partial", "sinks", "kv_scales", "grad_entropy"}


class _Fold:
    """N examples of batch B as one batch of N * B."""

    def __init__(self, examples: int, query: Tensor, query_dim: int | None):
        self.examples = examples
        self.batch = _examples_first(query, query_dim, examples).size(1)
        self.device = query.device

    def tensor(self, tensor: Tensor, dim: int | None) -> Tensor:
        """[N, B or 1, ...], with N at `dim` or absent, as [N * B, ...]."""
        tensor = _examples_first(tensor, dim, self.examples)
        rest = tensor.shape[2:]
        return tensor.expand(self.examples, self.batch, *rest).reshape(self.examples * self.batch, *rest)

    def rows(self, tensor: Tensor, dim: int | None) -> Tensor:
        """The same, but for one row that all examples share."""
        return tensor if dim is None and tensor.size(0) == 1 else self.tensor(tensor, dim)

    def tensors(self, given: Iterable[Any], dims: Iterable[Any]) -> list[Any]:
        """The same for all that are tensors."""
        pairs = zip(given, dims, strict=True)
        return [self.tensor(x, dim) if isinstance(x, Tensor) else x for x, dim in pairs]

    def separate(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (self.examples, self.batch))

    def gradient(self, grad: Tensor | None, tensor: Tensor, dim: int | None) -> Tensor | None:
        """The gradient of `tensor` for each example, from that of `self.tensor(tensor, dim)`."""
        if grad is None:
            return None
        grad = self.separate(grad)
        shared = _examples_first(tensor, dim, self.examples).size(1) != self.batch
        return grad.sum(1, keepdim=True) if shared else grad

    def schedule(self, schedule: Any, dims: Any) -> Any:
        if schedule is None:
            return None
        of_tensors = [dim for x, dim in zip(schedule, dims, strict=True) if isinstance(x, Tensor)]
        if schedule.grids[0] == 1 and all(dim is None for dim in of_tensors):
            return schedule  # the same for every example and batch
        if schedule.form != "runs":
            return type(schedule)(*self.tensors(schedule, dims))
        pairs = zip(schedule.tables, dims.tables, strict=True)
        return schedule.with_tables(
            table if table.offsets is None else self._runs(*table, *at) for table, at in pairs
        )

    def _runs(
        self, offsets: Tensor, runs: Tensor, offsets_dim: int | None, runs_dim: int | None
    ) -> tuple[Tensor, Tensor]:
        offsets = _examples_first(offsets, offsets_dim, self.examples)
        if runs_dim is not None:
            runs = runs.movedim(runs_dim, 0)
            example = torch.arange(self.examples, dtype=offsets.dtype, device=offsets.device)
            offsets = offsets + example.view(-1, 1, 1, 1) * runs.size(1)
            runs = runs.flatten(0, 1)
        return self.tensor(offsets, 0), runs


class _FoldedMod:
    """The captures of a mod, those that differ between examples as [N, ...], and its graphs on them."""

    def __init__(
        self,
        fold: _Fold,
        captures: Sequence[Tensor],
        dims: Sequence[int | None],
        separate: Sequence[bool] = (),
    ):
        separate = separate or [False] * len(captures)
        self.per_example = [dim is not None or sep for dim, sep in zip(dims, separate, strict=True)]
        self.captures = tuple(
            _examples_first(capture, dim, fold.examples) if per_example else capture
            for capture, dim, per_example in zip(captures, dims, self.per_example, strict=True)
        )
        self.batch = fold.batch
        if isinstance(self.batch, torch.SymInt):  # graphs hold no sizes that change from call to call
            self.captures += (torch.scalar_tensor(self.batch, dtype=torch.int64, device=fold.device),)

    def mod(self, mod: Callable | None, names: Sequence[str]) -> WrappedMod | None:
        if mod is None:
            return None

        def folded(*args):
            lanes, captures, _ = self._of_one_example(names, args)
            return mod(*lanes, *captures)

        capture_count = len(self.per_example)
        return WrappedMod(folded, (*capture_names(mod, capture_count), "batch")[: len(self.captures)])

    def graph(self, mod: Callable | None, field: str, query: Tensor) -> fx.GraphModule | None:
        wrapped = self.mod(mod, SCORE_LANES if field == "score_mod" else MASK_LANES)
        return wrapped and lane_graph(wrapped, field, query, self.captures)

    def joint(self, joint: fx.GraphModule | None, query: Tensor) -> fx.GraphModule | None:
        if joint is None:
            return None

        def folded(*args):
            lanes, captures, example = self._of_one_example(JOINT_LANES, args)
            d_score, *grads = joint(*lanes, *captures)
            grads += [None] * (len(self.captures) - len(grads))
            given = args[len(JOINT_LANES) :]
            per_example = (*self.per_example, False)[: len(given)]
            return d_score, *(
                aten.index_put(capture.new_zeros(capture.shape), [example], grad, True)
                if grad is not None and per_example
                else grad
                for capture, grad, per_example in zip(given, grads, per_example, strict=True)
            )

        return trace_value(folded, JOINT_LANES, query, self.captures)

    def _of_one_example(self, names: Sequence[str], args: Sequence[Tensor]) -> tuple[list, list, Tensor]:
        """A lane's own lanes and captures within its example, and which example that is."""
        lanes, captures = list(args[: len(names)]), args[len(names) :]
        batch = captures[-1] if isinstance(self.batch, torch.SymInt) else self.batch
        b = names.index("b")
        example = (lanes[b] // batch).to(INDEX_DTYPE)
        lanes[b] = (lanes[b] % batch).to(INDEX_DTYPE)
        own = [
            aten.index(capture, [example]) if per_example else capture
            for capture, per_example in zip(captures, self.per_example, strict=False)
        ]
        return lanes, own, example


def _examples_first(tensor: Tensor, dim: int | None, examples: int) -> Tensor:
    return tensor.expand(examples, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
