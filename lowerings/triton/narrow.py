"""Keys and values of 8 bits: how a kernel widens them, and where it multiplies by their scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._inductor.lowering import lowerings
from torch._inductor.virtualized import V

from ..buffers import realized
from ..call import LoweredCall
from ..problem import AttentionProblem, dtype_name
from .configs import LARGEST_TILE
from .device import current_device
from .kernel import Tensor

aten = torch.ops.aten

_FORMATS = {torch.float8_e4m3fn: "float8e4nv", torch.float8_e5m2: "float8e5"}


class Narrow(NamedTuple):
    """In the form of templates."""

    format: str  # Triton's name
    wide: str  # of the query
    by_bits: bool  # whether the card has no conversion
    register: str | None  # of assembly; the interpreter has none
    rows_from_memory: int  # from how many queries in a tile on products read keys from shared memory
    key: Tensor  # what multiplies keys, [B or 1, K, N]
    value: Tensor
    key_by_head: bool  # whether one number serves all keys of a head
    value_by_head: bool
    scales_values: bool  # whether numbers for each value multiply it, not its weights


def _in_memory(scale: Any, problem: AttentionProblem) -> Any:
    """Kernels get a number on the CPU by its value, which has no address."""
    if not V.graph.is_unspec_arg(scale.get_name()):
        return scale
    size, number = scale.get_size(), scale
    for _ in size:
        number = lowerings[aten.select](number, 0, 0)
    zero = lowerings[aten.full]([1] * len(size), 0.0, dtype=torch.float32, device=problem.device)
    return realized(lowerings[aten.expand](realized(lowerings[aten.add](zero, number)), size))


def of(problem: AttentionProblem, call: LoweredCall, tensor: Callable[..., Tensor]) -> Narrow | None:
    if not call.inputs.kv_scales:
        return None
    device = current_device(problem.device)
    key, value = (
        tensor(f"scales_of_{name}", _in_memory(realized(scale), problem))
        for name, scale in zip(("keys", "values"), call.inputs.kv_scales, strict=True)
    )
    mapped = problem.map_tiles is not None
    key_by_head, value_by_head = (
        scale.stride[2] == "0" and (not mapped or scale.size[0] == "1" or scale.stride[0] == "0")
        for scale in (key, value)
    )
    return Narrow(
        format=_FORMATS[problem.kv_dtype],
        wide=dtype_name(problem.dtype),
        by_bits=problem.kv_dtype == torch.float8_e4m3fn and not device.converts_e4m3,
        register={"amd": "v", "interpreter": None}.get(device.family, "r"),
        rows_from_memory=64 if device.shared_operands else LARGEST_TILE + 1,
        key=key,
        value=value,
        key_by_head=key_by_head,
        value_by_head=value_by_head,
        # Weights times small scales would leave float16's range.
        scales_values=not value_by_head and problem.dtype == torch.float16,
    )
