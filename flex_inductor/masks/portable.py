"""mask_mods in a form that another process can read, a graph where pickle cannot name one, and keys of them."""

from __future__ import annotations

import copyreg
import ctypes
import hashlib
import pickle
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ..errors import FlexError
from ..kept import Kept
from ..mod_ir import serialise
from ..mod_ir.arguments import MASK_LANES
from ..mod_ir.capture import lift
from ..mod_ir.checks import lane_graph


class PortableMask:
    """A mask_mod as text, and the tensors that it captures."""

    def __init__(self, text: str, captures: tuple[Tensor, ...]):
        self.text, self.captures = text, captures
        self.function = _functions.once(text, lambda: _function(text, captures))

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.function(b, h, q_idx, kv_idx, *self.captures)

    def __reduce__(self) -> tuple[Any, ...]:
        return PortableMask, (self.text, self.captures)


# One for each text: masks that differ in their tensors share compiled code.
_functions: Kept[Callable] = Kept(512)


def _function(text: str, captures: tuple[Tensor, ...]) -> Callable:
    """As torch.fx has it, which Dynamo can trace."""
    (graph,) = serialise.fields(serialise.load(text), "graph")
    query = torch.empty(0, device=captures[0].device if captures else None)
    return lane_graph(serialise.graph_function(graph), "mask_mod", query, captures)


def portable(mask_mod: Any, like: Tensor) -> Any:
    """`mask_mod`, or its graph if it is a closure or a lambda; `like` is on the device of the call."""
    with suppress(pickle.PicklingError, AttributeError, TypeError):
        pickle.dumps(mask_mod)
        return mask_mod
    return PortableMask(*_read(mask_mod, like))


def digest(mask_mod: Callable, like: Tensor) -> bytes:
    """A key that is the same in any process for masks that compute the same from the same values."""
    text, captures = _read(mask_mod, like)
    found = hashlib.sha256(text.encode())
    for capture in captures:
        found.update(f"{capture.dtype} {[*capture.shape]}".encode())
        found.update(bytes_of(capture))
    return found.digest()


def bytes_of(tensor: Tensor) -> bytes:
    """Its numbers, without numpy, which need not be there."""
    there = tensor.detach().cpu().contiguous()
    return ctypes.string_at(there.data_ptr(), there.nbytes) if there.nbytes else b""


def _read(mask_mod: Callable, like: Tensor) -> tuple[str, tuple[Tensor, ...]]:
    """The graph as text, and what it captures."""
    query = torch.empty(0, device=like.device)
    lifted, captures = lift(mask_mod, MASK_LANES, query)
    graph = lane_graph(lifted, "mask_mod", query, captures)
    return serialise.dump({"graph": serialise.graph_data(graph)}), tuple(captures)


def _reduce(block_mask: BlockMask) -> Any:
    """torch's own class, whose mask_mod pickle cannot name if it is a closure, as those of this library are."""
    reduced: Any = object.__reduce_ex__(block_mask, 2)
    make, given, state, *rest = reduced
    with suppress(FlexError):  # pickle then says itself that it cannot name the function
        state = {**state, "mask_mod": portable(block_mask.mask_mod, block_mask.kv_num_blocks)}
    return make, given, state, *rest


copyreg.pickle(BlockMask, _reduce)
