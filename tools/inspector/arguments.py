"""What a kernel is called with: its tensors' shapes, and which of them say what to visit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import sympy
import torch


class Argument(NamedTuple):
    """A tensor, or a size that changes from call to call."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype | None  # None for a size
    size: int = 0
    written: bool = False
    schedule: int | None = None  # its place in the call's schedule


class Launch(NamedTuple):
    arguments: list[Argument]
    grid: tuple[int, ...] = ()  # of a GPU's kernel


def parts_of(schedule: Sequence[Any]) -> dict[str, int]:
    """From names of Inductor's buffers to their places in the call's schedule."""
    names = [value.maybe_get_name() if hasattr(value, "maybe_get_name") else None for value in schedule]
    return {name: place for place, name in enumerate(names) if name is not None}


def of_triton(operation: Any, parts: dict[str, int]) -> Launch:
    """Of a KernelCall with its first config, in the order of its parameters."""
    given = operation.arguments
    tensors = [_tensor(name, value, parts, name in given.written) for name, value in given.tensors.items()]
    return Launch(
        [*tensors, *_sizes(given.sizes)], tuple(map(_number, operation.grids[operation.configs[0]]))
    )


def of_cpp(kernel: Any, parts: dict[str, int]) -> Launch:
    """Of a rendered C++ kernel. Its tensors are whole buffers; the offsets of views are in the source."""
    from torch._inductor.virtualized import V

    outputs = {output.get_name(): output for output in kernel.outputs.values()}
    inputs = {name: V.graph.get_buffer(name) for name in kernel.args.input_buffers}
    names = {**kernel.args.input_buffers, **kernel.args.output_buffers}
    tensors = [
        _tensor(names[buffer], value, parts, buffer in outputs)
        for buffer, value in {**inputs, **outputs}.items()
    ]
    return Launch([*tensors, *_sizes(kernel.args.sizevars)])


def _tensor(name: str, value: Any, parts: dict[str, int], written: bool) -> Argument:
    shape, stride = (tuple(map(_number, sizes)) for sizes in (value.get_size(), value.get_stride()))
    return Argument(name, shape, stride, value.get_dtype(), 0, written, parts.get(value.get_name()))


def _sizes(sizes: dict[Any, str]) -> Iterator[Argument]:
    for expression, name in sizes.items():
        yield Argument(name, (), (), None, _number(expression))


def _number(size: Any) -> int:
    """A size, or the one at hand where it is dynamic."""
    from torch._inductor.virtualized import V

    return int(V.graph.sizevars.optimization_hint(sympy.sympify(size)))
