"""create_block_mask inside a compiled or exported function, without a graph break.

mask_mod is traced into a graph and what it captures is lifted, so a new value of a capture needs no new
compile. What remains in the surrounding graph is one custom op from captures to index lists, which AOTAutograd
and Inductor treat like any other: its lengths, and so its shapes, are known, only the values are computed.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from .. import compat
from ..mod_ir import serialise
from ..mod_ir.apart import apart_from_surrounding_trace
from ..mod_ir.arguments import INDEX_DTYPE, MASK_LANES
from ..mod_ir.capture import lift
from ..mod_ir.indexing import LaneIndexing
from ..mod_ir.trace import fake_like, numbers_known
from ..mod_ir.tracer import Tracer
from ..op.library import define
from .analysis.tiles import analysed
from .lists import lists_from_runs
from .ordinary import ordinary_tensors
from .runs import Extent

# Lists whose length changes have room for at least this many tiles: if a size may be 1, torch compiles a second time
# and refuses to export.
LEAST_ROOM = 2
TENSOR, INTEGER, FLOAT = "tif"  # what a capture is; a float comes as a tensor


def _dispatch_of_a_new_thread() -> tuple[Any, Any]:
    """The dispatch keys that a fresh thread has on and off; where this is imported they may have been changed."""
    found: list[Any] = []
    keys = (torch._C._dispatch_tls_local_include_set, torch._C._dispatch_tls_local_exclude_set)
    thread = threading.Thread(target=lambda: found.extend(read() for read in keys))
    thread.start()
    thread.join()
    return found[0], found[1]


_PLAIN_DISPATCH = _dispatch_of_a_new_thread()


class _BlockLists(HigherOrderOperator):
    """Dynamo replaces it by `block_lists`. It runs as it is if the graph broke at the mask_mod."""

    def __init__(self) -> None:
        super().__init__("flex_inductor_block_lists")

    def __call__(
        self,
        mask_mod: Callable,
        like: Tensor,
        sizes: list[int],
        tiles: list[int],
        separate_full_blocks: bool,
        unstated: str,
    ) -> Any:
        return _lists(mask_mod, _extent(sizes), tiles, like.device, separate_full_blocks, unstated)


traced_block_lists = _BlockLists()


def _block_lists(
    like: Tensor,
    mask_mod: str,
    tensors: Sequence[Tensor] | None,
    numbers: Sequence[int] | None,
    sizes: Sequence[int],
    room: Sequence[int],
    separate_full_blocks: bool,
    unstated: str,
) -> list[Tensor]:
    """The eight (or four) tensors of a BlockMask; `sizes` are B, H, Q_LEN, KV_LEN and the block sizes.

    They have `room` for that many rows and columns of tiles.
    """
    traced, kinds = _mask_from(mask_mod)
    # Packaged code gives None for an empty list.
    given, integers = iter(tensors or ()), iter(numbers or ())
    captures: list[Any] = [next(integers if kind == INTEGER else given) for kind in kinds]
    captures = [c.item() if kind == FLOAT else c for c, kind in zip(captures, kinds, strict=True)]

    def bound(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return traced(b, h, q_idx, kv_idx, *captures)

    bound.__name__ = "mask_mod"
    extent = _extent(sizes)
    # The op may run inside a dispatch mode, where vmap and tracing do not work.
    with _disable_current_modes(), torch._C._ForceDispatchKeyGuard(*_PLAIN_DISPATCH):
        return _lists(bound, extent, room, like.device, separate_full_blocks, unstated)


@ordinary_tensors
def _lists(
    mask_mod: Callable,
    extent: Extent,
    room: Sequence[int],
    device: torch.device,
    separate_full_blocks: bool,
    unstated: str,
) -> list[Tensor]:
    runs, grids = analysed(mask_mod, extent, device, unstated)
    lists = [x for x in lists_from_runs(runs, grids, extent, separate_full_blocks) if x is not None]
    shapes = _list_shapes(extent, room, separate_full_blocks)
    # A custom op's outputs have the strides its fake promises.
    return [_padded(x, shape).contiguous() for x, shape in zip(lists, shapes, strict=True)]


def _fake_block_lists(like, mask_mod, tensors, numbers, sizes, room, separate_full_blocks, unstated):
    shapes = _list_shapes(_extent(sizes), room, separate_full_blocks)
    return [like.new_empty(shape, dtype=torch.int32) for shape in shapes]


define(
    "block_lists",
    "(Tensor like, str mask_mod, Tensor[] tensors, SymInt[] numbers, SymInt[] sizes, SymInt[] room, "
    "bool separate_full_blocks, str unstated) -> Tensor[]",
    _block_lists,
    _fake_block_lists,
)


def _list_shapes(extent: Extent, room: Sequence[int], separate_full_blocks: bool) -> list[tuple[int, ...]]:
    rows, columns = room
    pairs = [[(rows,), (rows, columns)], [(columns,), (columns, rows)]]
    shapes = [shape for pair in pairs for shape in pair * (2 if separate_full_blocks else 1)]
    return [(extent.batch, extent.heads, *shape) for shape in shapes]


def _padded(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    padding = [n for size, wanted in zip(tensor.shape, shape, strict=True) for n in (wanted - size, 0)]
    return torch.nn.functional.pad(tensor, padding[::-1]) if any(padding) else tensor


def lists_in_trace(
    mask_mod: Callable,
    like: Tensor,
    sizes: Sequence[int],
    tiles: Sequence[int],
    separate_full_blocks: bool,
    unstated: str,
) -> list[Tensor]:
    """The result of `block_lists` under a tracer other than Dynamo."""
    mod, captures = lift(mask_mod, MASK_LANES, like)
    kinds = "".join(map(_kind_of, captures))
    tensors = [
        torch.scalar_tensor(c, dtype=torch.float64, device=like.device) if kind == FLOAT else c
        for c, kind in zip(captures, kinds, strict=True)
        if kind != INTEGER
    ]
    numbers = [c for c, kind in zip(captures, kinds, strict=True) if kind == INTEGER]
    text = _mask_text(mod, like, captures, kinds)
    room = [torch.sym_max(n, LEAST_ROOM) if isinstance(n, torch.SymInt) else n for n in tiles]
    return torch.ops.flex_inductor.block_lists(
        like, text, tensors, numbers, sizes, room, separate_full_blocks, unstated
    )


def _mask_text(mask_mod: Callable, like: Tensor, captures: Sequence[Any], kinds: str) -> str:
    """A mask of (b, h, q_idx, kv_idx, *captures) as text."""

    def flat(*args: Any) -> Any:
        with LaneIndexing():
            value = mask_mod(*args)
        return value[0] if isinstance(value, (tuple, list)) else value

    with apart_from_surrounding_trace():
        fake_mode = detect_fake_mode([like, *captures]) or FakeTensorMode(allow_non_fake_inputs=True)
        with fake_mode, numbers_known():
            lanes = [torch.zeros((), dtype=INDEX_DTYPE, device=like.device) for _ in MASK_LANES]
            given = [fake_like(capture, fake_mode) for capture in captures]
            tracer = Tracer()
            graph = fx.GraphModule(tracer.root, tracer.trace_call(flat, [*lanes, *given]))
    return serialise.dump({"captures": kinds, "mask": serialise.graph_data(graph)})


@functools.lru_cache(maxsize=1024)
def _mask_from(text: str) -> tuple[Callable, str]:
    kinds, mask = serialise.fields(serialise.load(text), "captures", "mask")
    serialise.expect(
        isinstance(kinds, str) and set(kinds) <= {TENSOR, INTEGER, FLOAT}, f"captures are {str(kinds)[:80]}"
    )
    return serialise.graph_function(mask), kinds


def _extent(sizes: Sequence[int]) -> Extent:
    batch, heads, q_length, kv_length, q_block, kv_block = sizes
    return Extent(batch, heads, (q_length, kv_length), (q_block, kv_block))


def _register() -> None:
    """Teaches Dynamo to trace the mask_mod of `traced_block_lists`."""
    from torch._dynamo import trace_rules
    from torch._dynamo.exc import unimplemented
    from torch._dynamo.variables import higher_order_ops
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.builder import wrap_fx_proxy

    from ..op.dynamo.numbers import changing_numbers, float_to_tensor

    @higher_order_ops.add_hop_context
    class BlockListsVariable(higher_order_ops.TorchHigherOrderOperatorVariable):
        _HOP_NAME = "flex_inductor.masks.traced_block_lists"

        def _call_function(self, tx: Any, args: Any, kwargs: Any) -> VariableTracker:
            mask_mod, like, sizes, tiles, separate_full_blocks, unstated = args
            build = VariableTracker.build
            with higher_order_ops.discard_graph_changes(tx):
                indices = [
                    like.call_method(tx, "new_zeros", [build(tx, [])], {"dtype": build(tx, INDEX_DTYPE)})
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
            if "" in kinds or any(node.op == "get_attr" for node in graph.nodes):
                unimplemented(
                    gb_type="create_block_mask: a capture cannot be lifted",
                    context=str(graph),
                    explanation="mask_mod captures something other than tensors and numbers that changes.",
                    hints=["Capture a tensor instead."],
                )
            examples = [proxy.node.meta["example_value"] for proxy in captures]
            module = fx.GraphModule(torch.nn.Module(), graph)
            call = (
                like.as_proxy(),
                _mask_text(module, like.as_proxy().node.meta["example_value"], examples, "".join(kinds)),
                # The op cannot take a float that changes, so it gets a float64 tensor, which holds the same number.
                [
                    float_to_tensor(tx, like, c, torch.float64)
                    for c, kind in zip(captures, kinds, strict=True)
                    if kind != INTEGER
                ],
                [c for c, kind in zip(captures, kinds, strict=True) if kind == INTEGER],
                sizes.as_proxy(),
                [_room_in_graph(tx, count) for count in tiles.items],
                separate_full_blocks.as_proxy(),
                unstated.as_proxy(),
            )
            target = torch.ops.flex_inductor.block_lists.default
            return wrap_fx_proxy(tx=tx, proxy=tx.output.create_proxy("call_function", target, call, {}))

    compat.register_dynamo_variable(traced_block_lists, BlockListsVariable)
    for name in ("masks.analysis.trace", "mod_ir.recorder"):
        trace_rules.add(f"flex_inductor.{name}")  # runs as it is, also inside a function that Dynamo compiles


def _room_in_graph(tx: Any, tiles: Any) -> Any:
    from torch._dynamo.variables.builder import wrap_fx_proxy
    from torch._dynamo.variables.tensor import SymNodeVariable

    if not isinstance(tiles, SymNodeVariable):
        return tiles.as_proxy()
    proxy = tx.output.create_proxy("call_function", torch.sym_max, (tiles.as_proxy(), LEAST_ROOM), {})
    return wrap_fx_proxy(tx=tx, proxy=proxy).as_proxy()


def _kind_of(capture: Any) -> str:
    """Empty for what is no capture of these kinds."""
    kinds = ((Tensor, TENSOR), (torch.SymInt, INTEGER), (torch.SymFloat, FLOAT))
    return next((kind for known, kind in kinds if isinstance(capture, known)), "")


compat.when_imported("torch._dynamo", lambda _: _register())
