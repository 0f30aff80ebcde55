"""What kernels read and write, as Inductor's buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.virtualized import V


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


def results_read() -> set[int]:
    """Which of the op's results the graph reads, by number. A kernel need not write the others."""
    return {user.args[1] for user in V.graph.current_node.users if len(user.args) > 1}
