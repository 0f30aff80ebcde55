"""create_block_mask: torch's function, without the grid of all (q, kv) pairs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import flex_attention as torch_flex

from ...compat import outside_graphs
from ...mod_ir import errors as mod_errors
from ..analysis.tiles import analysed
from ..analysis.trace import INDEX_NAMES
from ..analysis.window import seen
from ..errors import MaskArgumentError
from ..in_graph import lists_in_trace, traced_block_lists
from ..lists import block_mask_of, lists_from_runs, without_full
from ..ordinary import ordinary_tensors
from ..runs import Extent
from ..schedule import RunSchedule
from ..window_schedule import WindowSchedule, bounds_of

HAS_WRITE_ORDER = hasattr(torch_flex, "_compute_dq_write_order_from_block_mask")


@ordinary_tensors
def create_block_mask(
    mask_mod: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
    *,
    compact: bool = False,
) -> Any:
    """Find the tiles of `mask_mod` that attention has to visit.

    The result equals that of `torch.nn.attention.flex_attention.create_block_mask` with the same arguments, but its
    tensors have stride 0 along batch and heads where the mask does not depend on them. The tiles come from the mask's
    expression, so memory does not grow with Q_LEN x KV_LEN.

    Args:
        mask_mod: `mask_mod(b, h, q_idx, kv_idx)` on 0-d integer tensors returns a 0-d bool tensor.
        B: the number of batches; None for a mask that does not read `b`. With 1, all take the tiles of the first.
        H: the same of heads.
        Q_LEN: the number of queries.
        KV_LEN: the number of keys.
        device: of the result and of what the mask captures; by default the accelerator, or the CPU where there is none.
        BLOCK_SIZE: tokens of a tile, or two numbers for (queries, keys).
        _compile: has no effect.
        separate_full_blocks: False lists full tiles with the partial ones.
        compute_dq_write_order: as in torch, from 2.13 on.
        dq_kv_order: as in torch.
        compact: return a RunSchedule of the same tiles, whose memory grows with the rows.

    Returns:
        BlockMask: or a RunSchedule with `compact`.

    Raises:
        MaskArgumentError: an argument has another form, or None stands for a size that the mask depends on.
        MaskModError: the mask cannot be evaluated, for example beyond the end of a captured tensor.
        FlexTypeError: the mask takes other arguments or returns no bool.

    Example:
        >>> mask = create_block_mask(masks.sliding_window(256), None, None, 1024, 1024)
        >>> mask.kv_num_blocks + mask.full_kv_num_blocks  # tiles that each row of tiles visits
        tensor([[[1, 2, 3, 3, 3, 3, 3, 3]]], dtype=torch.int32)
        >>> long = create_block_mask(masks.causal(), None, None, 1 << 20, 1 << 20, compact=True)
        >>> long.shape
        (1, 1, 1048576, 1048576)
    """
    extent, device = check_arguments(mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE)
    unstated = "".join(name for name, size in (("b", B), ("h", H)) if size is None)
    if _compile:
        warnings.warn(
            "create_block_mask: _compile=True has no effect here: nothing quadratic is left to compile.",
            DeprecationWarning,
            stacklevel=3,
        )
    _check_write_order(compute_dq_write_order, dq_kv_order, compact)
    if compact:
        return _compact(mask_mod, extent, device, separate_full_blocks, unstated)
    if torch.compiler.is_dynamo_compiling() or _values_are_fake():
        sizes = [extent.batch, extent.heads, *extent.lengths, *extent.block]
        like = torch.empty((), device=device)
        traced = traced_block_lists if torch.compiler.is_dynamo_compiling() else lists_in_trace
        lists = list(traced(mask_mod, like, sizes, [*extent.tiles], separate_full_blocks, unstated))
    else:
        runs, grids = analysed(mask_mod, extent, device, unstated)
        lists = lists_from_runs(runs, grids, extent, separate_full_blocks)
    block_mask = block_mask_of(lists, extent, mask_mod)
    if compute_dq_write_order:
        orders = torch_flex._compute_dq_write_order_from_block_mask(block_mask, dq_kv_order=dq_kv_order)
        block_mask.dq_write_order, block_mask.dq_write_order_full = orders
        block_mask.dq_kv_order_spt = dq_kv_order
    return block_mask


def _values_are_fake() -> bool:
    return isinstance(torch.empty(()), FakeTensor)


@outside_graphs
def _compact(
    mask_mod: Callable, extent: Extent, device: torch.device, separate_full_blocks: bool, unstated: str
) -> RunSchedule:
    """A RunSchedule. Not in compiled graphs: the number of runs depends on the values of captures."""
    if _values_are_fake():
        raise MaskArgumentError(
            "compact: got True under FakeTensorMode, where the mask has no values, and how many runs there are "
            "depends on them. Make the schedule outside the mode, or use compact=False."
        )
    known = seen(mask_mod, torch.empty(0, device=device))
    window = known.window_now(None if "b" in unstated else extent.batch, max(extent.lengths))
    if window is not None and separate_full_blocks:
        bounds = bounds_of(window, extent.block, 0)
        return WindowSchedule(bounds, extent, device, mask_mod)
    runs, grids = analysed(mask_mod, extent, device, unstated, known)
    visited = runs if separate_full_blocks else without_full(runs)
    return RunSchedule.from_runs(visited, grids, extent, mask_mod, separate_full_blocks)


def check_arguments(
    mask_mod: Any, B: Any, H: Any, Q_LEN: Any, KV_LEN: Any, device: Any, BLOCK_SIZE: Any
) -> tuple[Extent, torch.device]:
    if not torch.compiler.is_dynamo_compiling():
        mod_errors.check_arity("mask_mod", mask_mod, INDEX_NAMES)
    sizes = {"B": 1 if B is None else B, "H": 1 if H is None else H, "Q_LEN": Q_LEN, "KV_LEN": KV_LEN}
    for name, value in sizes.items():
        least = 1 if name in ("B", "H") else 0
        if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool) or value < least:
            raise MaskArgumentError(
                f"{name}: expected an integer of at least {least}, got {value!r}."
                + (" Pass None for a mask that is the same for all of them." if least else "")
            )
    block = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else BLOCK_SIZE
    if (
        not isinstance(block, (tuple, list))
        or len(block) != 2
        or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in block)
    ):
        raise MaskArgumentError(
            f"BLOCK_SIZE: expected an integer of at least 1, or two of them for (q, kv), got {BLOCK_SIZE!r}."
        )
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    resolved = torch.empty((), device=device).device
    batch, heads, q_length, kv_length = sizes.values()
    return Extent(batch, heads, (q_length, kv_length), (block[0], block[1])), resolved


def _check_write_order(compute_dq_write_order: bool, dq_kv_order: Any, compact: bool) -> None:
    if not isinstance(dq_kv_order, bool):
        raise MaskArgumentError(
            f"dq_kv_order: expected True or False, got {type(dq_kv_order).__name__}. "
            "A tensor order goes to BlockMask.from_kv_blocks."
        )
    if compute_dq_write_order and compact:
        raise MaskArgumentError(
            "compute_dq_write_order: a compact schedule has none: it would be as large as the index lists. "
            "Use compact=False, or leave it False."
        )
    if compute_dq_write_order and not HAS_WRITE_ORDER:
        raise MaskArgumentError(
            f"compute_dq_write_order: torch {torch.__version__} has no write order in its BlockMask. "
            "Leave it False, or use torch 2.13 or later."
        )
