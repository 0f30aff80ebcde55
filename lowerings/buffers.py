"""What kernels read and write, as Inductor's buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import ir


def realized(value: Any) -> Any:
    """`value` as a buffer, or a view of one, with fixed strides."""
    value = ir.ExternKernel.realize_input(value)
    ir.as_storage_and_layout(value, freeze=True)
    return ir.TensorBox(value)


def layout_of(fake: torch.Tensor) -> tuple[list[Any], list[Any]]:
    """Size and stride of what an op's fake rule returned."""

    def plain(size: Any) -> Any:
        return size.node.expr if isinstance(size, torch.SymInt) else size

    return [*map(plain, fake.shape)], [*map(plain, fake.stride())]
