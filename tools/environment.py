"""Inductor with Triton kernels for CPU tensors, on a machine without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock


@contextlib.contextmanager
def triton_on_cpu(load: Callable[[str, str], Any], target: Any = None) -> Iterator[None]:
    """Graphs compiled inside get Triton kernels; `load(name, source)` takes the place of compiling one.

    Nothing compiled inside is cached, and Triton's driver is put back at the end.
    """
    import torch._inductor.graph
    import torch._inductor.scheduler
    from torch._inductor import config
    from torch._inductor.utils import tensor_is_aligned
    from triton import runtime

    with (
        triton_unbuilt(load),
        mock.patch.object(runtime.driver, "_active", driver(target)),
        config.patch({"cpu_backend": "triton", "disable_padding_cpu": False}),  # strides are padded for a GPU
        masks_of_a_gpu(),
        mock.patch.object(torch._inductor.scheduler, "has_triton", lambda: True),
        # Inductor asks this of GPU tensors only; kernels for them load 16 bytes at once.
        mock.patch.object(torch._inductor.graph, "should_assume_input_aligned", tensor_is_aligned),
    ):
        yield


def compiled_on_cpu(
    fn: Callable,
    load: Callable[[str, str], Any],
    target: str | None = None,
    records: bool = True,
    **options: Any,
) -> Callable:
    """`torch.compile(fn, backend="flex_inductor", **options)` with the kernels that `load` gives for CPU tensors.

    They are those of the `target`, or small ones for the interpreter. `records`: decisions are logged and written down.
    """
    import torch

    from flex_inductor.lowerings.observing import Observer, observed_by

    from .resources import gpu_target

    observer = Observer()
    observer.target, observer.records = target, records

    def inner_compile(*args: Any, **kwargs: Any) -> Any:  # of the backward too, when it is first needed
        from torch._inductor.compile_fx import compile_fx_inner

        card = None if target is None else gpu_target(target)
        with triton_on_cpu(load, card), observed_by(observer):
            return compile_fx_inner(*args, **kwargs)

    def backend(module: Any, inputs: Sequence[Any], **given: Any) -> Any:
        from flex_inductor.backend import flex_inductor

        with uncached():  # AOTAutograd would find what was compiled for the CPU before it asks inner_compile
            return flex_inductor(module, list(inputs), inner_compile=inner_compile, **given)

    compiled = torch.compile(fn, backend=backend, **options)

    def call(*args: Any, **kwargs: Any) -> Any:
        with masks_of_a_gpu():
            return compiled(*args, **kwargs)

    return call


def masks_of_a_gpu() -> contextlib.AbstractContextManager[Any]:
    """What is traced inside reads all of a mask on the CPU, as kernels of a GPU do."""
    from flex_inductor.masks import schedule

    return mock.patch.object(schedule, "BY_ROWS", ())


@contextlib.contextmanager
def triton_unbuilt(load: Callable[[str, str], Any]) -> Iterator[None]:
    """Graphs for a GPU that is there, up to their kernels: `load(name, source)` takes the place of compiling one."""
    from torch._inductor.async_compile import AsyncCompile

    with (
        uncached(),
        mock.patch.object(
            AsyncCompile, "triton", lambda _self, name, source, device_str="cuda": load(name, source)
        ),
    ):
        yield


@contextlib.contextmanager
def cpp_unbuilt() -> Iterator[None]:
    """Graphs compiled inside get C++ kernels that nothing compiles, and are not cached. What is timed is built."""
    from torch._inductor.async_compile import AsyncCompile

    build = AsyncCompile.cpp_pybinding

    def pybinding(asked: Any, *args: Any, **kwargs: Any) -> Any:  # asked is tuner.Builder for what is timed
        return None if type(asked) is AsyncCompile else build(asked, *args, **kwargs)

    with (
        uncached(),
        mock.patch.object(AsyncCompile, "cpp_pybinding", pybinding),
        mock.patch.object(AsyncCompile, "cpp", lambda *_args, **_kwargs: None),
    ):
        yield


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """What is compiled inside is neither taken from caches nor put there."""
    import torch._functorch.config as functorch_config
    from torch._inductor import config

    with config.patch({"fx_graph_cache": False}), functorch_config.patch({"enable_autograd_cache": False}):
        yield


def driver(target: Any) -> Any:
    """What Inductor and Triton ask of a driver before a kernel runs."""
    from torch import device
    from triton.backends.compiler import GPUTarget

    # Without a target nothing is compiled, but Inductor asks which backend would do it.
    target = GPUTarget("cuda", 80, 32) if target is None else target
    return SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_current_stream=lambda device=None: 0,
        get_active_torch_device=lambda: device("cpu"),
    )
