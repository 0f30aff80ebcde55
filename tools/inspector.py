"""flex_inductor.inspect: the kernels that a function's attention calls become, for a device that need not be there."""

from __future__ import annotations

import contextlib
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

from flex_inductor import errors

from .environment import triton_on_cpu
from .generated import GeneratedKernel, load
from .resources import TARGETS, Resources, compile_for, gpu_target, resources


@dataclass(frozen=True)
class Kernel:
    """One kernel, with the config that is used unless it is tuned."""

    name: str
    kind: str  # forward, backward_dq, backward_dkdv
    source: str
    config: dict[str, int]
    resources: Resources


@dataclass(frozen=True)
class Report:
    target: str
    kernels: list[Kernel]


def inspect(fn: Callable, *args: Any, target: str = "sm_90", **kwargs: Any) -> Report:
    """The attention kernels of `fn(*args)`, compiled for `target`.

    `args` are CPU tensors with the shapes and dtypes in question; the backward's kernels are there when
    one of them, or a captured tensor, requires a gradient. `fn` is traced afresh and not run.
    """
    if target not in TARGETS:
        raise errors.bad_option("flex_inductor.inspect", "target", target, f"one of {', '.join(TARGETS)}")
    found = []
    for kernel in attention_kernels(fn, *args, target=target, **kwargs):
        config = kernel.configs[0]
        compiled = compile_for(kernel, config, target)
        found.append(Kernel(kernel.name, kind(kernel), kernel.source, config, resources(compiled, target)))
    return Report(target, found)


def attention_kernels(fn: Callable, *args: Any, target: str, **kwargs: Any) -> list[GeneratedKernel]:
    """Every distinct attention kernel that Inductor generates for `fn(*args)`, not compiled."""
    sources: dict[str, str] = {}

    def keep(name: str, source: str) -> None:
        sources.setdefault(source.replace(name, ""), name)
        sources_by_name.setdefault(name, source)

    sources_by_name: dict[str, str] = {}
    with _traced_afresh(), _target(target), triton_on_cpu(keep, gpu_target(target)):
        _compile_only(fn, args, kwargs)
    kernels = [load(name, sources_by_name[name]) for name in sources.values()]
    return [kernel for kernel in kernels if kind(kernel)]


def kind(kernel: GeneratedKernel) -> str:
    return kernel.inductor_meta.get("flex_inductor", {}).get("kind", "")


class _Compiled(Exception):
    """Raised where the compiled function would run."""


def _compile_only(fn: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    import torch
    import torch._functorch.config as functorch_config

    from flex_inductor.backend import flex_inductor

    def backend(module: Any, inputs: Sequence[Any]) -> Callable:
        with functorch_config.patch({"force_non_lazy_backward_lowering": True}):
            flex_inductor(module, list(inputs))

        def stop(*_: Any) -> None:
            raise _Compiled

        return stop

    inner = getattr(fn, "_torchdynamo_orig_callable", fn)

    def call(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    # Dynamo keeps what it compiled with a function's code: this copy's goes when the function does.
    fresh = types.FunctionType(call.__code__.replace(), globals(), call.__name__, None, call.__closure__)
    with contextlib.suppress(_Compiled):
        torch.compile(fresh, backend=backend, fullgraph=True)(*args, **kwargs)


@contextlib.contextmanager
def _traced_afresh() -> Iterator[None]:
    """What others see of Dynamo, Inductor and our decisions is afterwards what it was."""
    from torch._dynamo.utils import counters
    from torch._inductor import metrics

    from flex_inductor.lowerings import decision

    before = {name: Counter(counts) for name, counts in counters.items()}
    generated = metrics.generated_kernel_count
    with mock.patch.object(decision, "_recent", decision._recent.copy()):
        try:
            yield
        finally:
            counters.clear()
            counters.update(before)
            metrics.generated_kernel_count = generated


@contextlib.contextmanager
def _target(target: str) -> Iterator[None]:
    from flex_inductor.lowerings.triton import configs

    with mock.patch.object(configs, "target", target):
        yield
