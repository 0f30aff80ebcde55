"""Torch's own flex kernels for a CUDA device that is not there; torch may be built without CUDA.

The call is traced on CPU. Then the graphs that AOTAutograd made of it are moved to CUDA on paper, and plain Inductor
writes the text of their kernels.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from flex_inductor.lowerings.triton.configs import known_device

from .environment import Driver
from .generated import GeneratedKernel, kernels_in
from .resources import gpu_target


class _Rendered(BaseException):  # Inductor wraps every Exception
    """Raised where the generated module would be loaded, or run."""


def torch_kernels(fn: Callable, *args: Any, target: str) -> list[GeneratedKernel]:
    """The kernels of torch's templates in `fn(*args)`, forward and backward, with their default configs."""
    import torch
    import torch._functorch.config as functorch_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch.nn.attention import flex_attention as torch_flex

    modules: list[str] = []

    def inner_compile(module: Any, inputs: Any, **options: Any) -> Any:
        _say_cuda(module, inputs)
        with _cuda(target, modules.append), contextlib.suppress(_Rendered):
            compile_fx_inner(module, inputs, **options)
        return _stop

    def backend(module: Any, inputs: Sequence[Any]) -> Any:
        with functorch_config.patch(
            {"force_non_lazy_backward_lowering": True, "enable_autograd_cache": False}
        ):
            return compile_fx(module, list(inputs), inner_compile=inner_compile)

    torch._dynamo.reset()
    # On CPU torch refuses gradients.
    with mock.patch.object(torch_flex, "_validate_device", lambda *_: None), contextlib.suppress(_Rendered):
        torch.compile(fn, backend=backend, fullgraph=True)(*args)
    torch._dynamo.reset()
    with _no_device_needed():
        kernels = [kernel for module in modules for kernel in kernels_in(module)]
    return [kernel for kernel in kernels if kernel.heuristic == "template"]


def _stop(*_: Any) -> Any:
    raise _Rendered


_stop._boxed_call = True  # type: ignore[attr-defined]


def _say_cuda(module: Any, inputs: Sequence[Any]) -> None:
    import torch
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._pytree import tree_map_only

    device = torch.device("cuda", 0)

    def move(tensor: FakeTensor) -> None:
        tensor.fake_device = device

    for graph_module in module.modules():
        for node in graph_module.graph.nodes:
            tree_map_only(FakeTensor, move, dict(node.meta))
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": device}
            if (
                node.target is torch.ops.higher_order.flex_attention
            ):  # a forward on CPU leaves out the logsumexp
                node.args = tuple(
                    {**a, "OUTPUT_LOGSUMEXP": True} if isinstance(a, dict) else a for a in node.args
                )
    tree_map_only(FakeTensor, move, list(inputs))


@contextlib.contextmanager
def _cuda(target: str, rendered: Callable[[str], Any]) -> Iterator[None]:
    """Inductor finds a CUDA device, and gives each module's text to `rendered` instead of loading it."""
    import torch
    import torch._inductor.scheduler
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering
    from torch._inductor.runtime.hints import DeviceProperties
    from triton.runtime import driver

    hop = importlib.import_module("torch._higher_order_ops.flex_attention")
    device, capability = known_device(target), divmod(int(target.removeprefix("sm_")), 10)
    properties = types.SimpleNamespace(
        name=target,
        major=capability[0],
        minor=capability[1],
        multi_processor_count=device.multiprocessors,
        warp_size=device.warp,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        shared_memory_per_block_optin=device.shared_bytes,
        total_memory=80 << 30,
        L2_cache_size=40 << 20,
    )

    def compile_to_module(graph: Any) -> Any:
        wrapper, _ = graph.codegen()
        rendered(wrapper.value)
        raise _Rendered

    answers: dict[str, Any] = {
        "is_available": True,
        "get_device_properties": properties,
        "get_device_capability": capability,
        "current_device": 0,
        "device_count": 1,
        "_lazy_init": None,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
    }
    patches = [
        mock.patch.object(driver, "_active", Driver(gpu_target(target))),
        *(
            mock.patch.object(torch.cuda, name, lambda *_, answer=answer: answer)
            for name, answer in answers.items()
        ),
        mock.patch.object(CudaInterface, "get_device_properties", staticmethod(lambda *_: properties)),
        mock.patch.object(DeviceProperties, "create", classmethod(DeviceProperties.create.__wrapped__)),
        mock.patch.object(torch.version, "cuda", "12.8"),
        mock.patch.object(torch._inductor.scheduler, "has_triton", lambda: True),
        mock.patch.object(torch._subclasses.fake_tensor, "init_gpu_context", lambda *_: None),
        mock.patch.object(hop, "_permute_strides", functools.partial(_permuted, hop)),
        mock.patch.object(GraphLowering, "compile_to_module", compile_to_module),
        config.patch({"fx_graph_cache": False}),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def _permuted(hop: Any, out: Any, strides: Sequence[int]) -> Any:
    """What torch's function of that name returns, without its copy, for which fake CUDA tensors would need CUDA."""
    from torch._inductor.ir import get_fill_order

    return out.new_empty_strided(out.shape, hop._construct_strides(out.shape, get_fill_order(strides)))


@contextlib.contextmanager
def _no_device_needed() -> Iterator[None]:
    from torch._inductor.runtime import triton_helpers

    with mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None):
        yield
