"""create_block_mask inside a compiled function, without a graph break.

Dynamo traces mask_mod into a graph and lifts what it captures, so a new value of a capture needs no new
compile. What remains in the compiled graph is one custom op from captures to index lists, which AOTAutograd
and Inductor treat like any other: its lengths, and so its shapes, are known, only the values are computed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import _disable_current_modes

from .. import compat
from ..op.tracing import LaneIndexing
from .lists import lists_from_runs
from .tables import Extent

# Traced mask functions of (b, h, q, kv, *captures) by the hash of their code, and what each capture is: a
# tensor, an integer, or a float that comes as a tensor. Dynamo traces in every process, cached kernels or
# not, so a graph that names a function here has always put it here first.
_TRACED: dict[str, tuple[Callable, str]] = {}
TENSOR, INTEGER, FLOAT = "tif"
_PLAIN_DISPATCH = (torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set())


class _BlockLists(HigherOrderOperator):
    """Dynamo puts `block_lists` in its place; it runs as it is where the graph broke at the mask_mod."""

    def __init__(self) -> None:
        super().__init__("flex_inductor_block_lists")

    def __call__(self, mask_mod: Callable, like: Tensor, sizes: list[int], separate_full_blocks: bool) -> Any:
        return _lists_of(mask_mod, like, sizes, separate_full_blocks)


traced_block_lists = _BlockLists()


@torch.library.custom_op("flex_inductor::block_lists", mutates_args=())
def block_lists(
    like: Tensor,
    mask_mod: str,
    tensors: Sequence[Tensor],
    numbers: Sequence[int],
    sizes: Sequence[int],
    separate_full_blocks: bool,
) -> list[Tensor]:
    """The eight (or four) tensors of a BlockMask; `sizes` are B, H, Q_LEN, KV_LEN and the block sizes."""
    traced, kinds = _TRACED[mask_mod]
    given, integers = iter(tensors), iter(numbers)
    captures: list[Any] = [next(integers if kind == INTEGER else given) for kind in kinds]
    captures = [c.item() if kind == FLOAT else c for c, kind in zip(captures, kinds, strict=True)]

    def bound(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        value = traced(b, h, q_idx, kv_idx, *captures)
        return value[0] if isinstance(value, (tuple, list)) else value

    bound.__name__ = "mask_mod"
    # The op may be called from below a dispatch mode, where vmap and make_fx do not work.
    with _disable_current_modes(), torch._C._ForceDispatchKeyGuard(*_PLAIN_DISPATCH):
        return _lists_of(bound, like, sizes, separate_full_blocks)


def _lists_of(
    mask_mod: Callable, like: Tensor, sizes: Sequence[int], separate_full_blocks: bool
) -> list[Tensor]:
    from .blockmask import analysed

    extent = _extent(sizes)
    runs, grids = analysed(mask_mod, extent, like.device)
    lists = lists_from_runs(runs, grids, extent, separate_full_blocks)
    # A custom op's outputs have the strides its fake promises.
    return [x.contiguous() for x in lists if x is not None]


@block_lists.register_fake
def _(like, mask_mod, tensors, numbers, sizes, separate_full_blocks):
    return empty_block_lists(like, sizes, separate_full_blocks)


def empty_block_lists(like: Tensor, sizes: Sequence[int], separate_full_blocks: bool) -> list[Tensor]:
    """The tensors of a BlockMask without their values."""
    extent = _extent(sizes)
    rows, columns = extent.tiles
    leading = (extent.batch, extent.heads)
    pairs = [[(rows,), (rows, columns)], [(columns,), (columns, rows)]]
    shapes = [shape for pair in pairs for shape in pair * (2 if separate_full_blocks else 1)]
    return [like.new_empty((*leading, *shape), dtype=torch.int32) for shape in shapes]


def _extent(sizes: Sequence[int]) -> Extent:
    batch, heads, q_length, kv_length, q_block, kv_block = sizes
    return Extent(batch, heads, (q_length, kv_length), (q_block, kv_block))


def _register() -> None:
    """Teaches Dynamo to trace the mask_mod of `traced_block_lists`."""
    from torch._dynamo.exc import unimplemented
    from torch._dynamo.variables import higher_order_ops
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.builder import wrap_fx_proxy

    from ..op.numbers import changing_numbers, float_to_tensor

    @higher_order_ops.add_hop_context
    class BlockListsVariable(higher_order_ops.TorchHigherOrderOperatorVariable):
        _HOP_NAME = "flex_inductor.masks.traced_block_lists"

        def _call_function(self, tx: Any, args: Any, kwargs: Any) -> VariableTracker:
            mask_mod, like, sizes, separate_full_blocks = args
            build = VariableTracker.build
            with higher_order_ops.discard_graph_changes(tx):
                indices = [
                    like.call_method(tx, "new_zeros", [build(tx, [])], {"dtype": build(tx, torch.int64)})
                    for _ in range(4)
                ]
            with LaneIndexing(), changing_numbers(tx):
                _, graph, lifted = higher_order_ops.speculate_subgraph(
                    tx,
                    mask_mod,
                    indices,
                    {},
                    description="create_block_mask's mask_mod",
                    source_target=self.value,
                    set_subgraph_inputs="flatten_manual",
                )
            captures = list(lifted)
            kinds = [_kind_of(proxy.node.meta["example_value"]) for proxy in captures]
            if None in kinds or any(node.op == "get_attr" for node in graph.nodes):
                unimplemented(
                    gb_type="create_block_mask: a capture cannot be lifted",
                    context=str(graph),
                    explanation="mask_mod captures something other than tensors and numbers that changes.",
                    hints=["Capture a tensor instead."],
                )
            name = _remember(graph, "".join(kinds))
            call = (
                like.as_proxy(),
                name,
                # The op cannot take a float that changes; as a tensor of its own precision it is the same.
                [
                    float_to_tensor(tx, like, c, torch.float64)
                    for c, kind in zip(captures, kinds, strict=True)
                    if kind != INTEGER
                ],
                [c for c, kind in zip(captures, kinds, strict=True) if kind == INTEGER],
                sizes.as_proxy(),
                separate_full_blocks.as_proxy(),
            )
            target = torch.ops.flex_inductor.block_lists.default
            return wrap_fx_proxy(tx=tx, proxy=tx.output.create_proxy("call_function", target, call, {}))

    compat.register_dynamo_variable(traced_block_lists, BlockListsVariable)


def _kind_of(capture: Any) -> str | None:
    kinds = ((Tensor, TENSOR), (torch.SymInt, INTEGER), (torch.SymFloat, FLOAT))
    return next((kind for known, kind in kinds if isinstance(capture, known)), None)


def _remember(graph: fx.Graph, kinds: str) -> str:
    """Registers a traced mask under a name that depends on its code alone."""
    module = fx.GraphModule(torch.nn.Module(), graph)
    name = hashlib.sha256(f"{kinds}\n{module.code}".encode()).hexdigest()
    _TRACED[name] = module, kinds
    return name


compat.when_imported("torch._dynamo", lambda _: _register())
