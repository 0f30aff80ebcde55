"""Run generated Triton kernels on this machine's card, called with CPU tensors.

What Triton's interpreter and `execute` run can so be run on a card, by the same tests.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .environment import compiled_on_cpu
from .generated import load
from .resources import compile_untuned

DEVICE = "cuda"


def target() -> str:
    """The name of the card's architecture."""
    return "sm_{}{}".format(*torch.cuda.get_device_capability())


def compiled(fn: Callable, **options: Any) -> Callable:
    """`torch.compile(fn, backend="flex_inductor", **options)` for CPU tensors, with the card's kernels."""
    return compiled_on_cpu(fn, loaded, target(), **options)


def loaded(name: str, source: str) -> Any:
    """In place of Inductor's autotuner: the config that the card starts with."""
    kernel = load(name, source)
    config, binary, _ = compile_untuned(kernel, target())

    def run(*args: Any, stream: Any = None, **_: Any) -> None:
        sizes, given = kernel.launch(config, args)
        if 0 not in sizes:
            launch(binary, sizes, [value for name, value in given.items() if name not in kernel.constexprs])

    return types.SimpleNamespace(config=config, run=run)


def launch(binary: Any, grid: Sequence[int], args: Sequence[Any]) -> None:
    """Run what `triton.compile` returned; `args` are those that are no constants."""
    import triton

    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=DEVICE))
    copies, left = _Copies(), iter(args)
    constants = {at: value for (at, *_), value in binary.src.constants.items()}
    given = [
        constants[i] if kind == "constexpr" else copies.of(next(left))
        for i, kind in enumerate(binary.src.signature.values())
    ]
    binary[(*grid, 1, 1)[:3]](*given)
    copies.take_back()


class _Copies:
    """Tensors on the card, which share memory where those on the CPU do."""

    def __init__(self) -> None:
        self.storages: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in self.storages:
            here = torch.empty(0, dtype=torch.uint8).set_(storage)
            self.storages[storage.data_ptr()] = here, here.to(DEVICE)
        there = self.storages[storage.data_ptr()][1].untyped_storage()
        view = torch.empty(0, dtype=value.dtype, device=DEVICE)
        return view.set_(there, value.storage_offset(), value.size(), value.stride())

    def take_back(self) -> None:
        for here, there in self.storages.values():
            here.copy_(there)
