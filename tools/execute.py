"""Run generated Triton kernels on the CPU as a card would: compiled for it, instruction by instruction.

    flex_inductor.tools.execute.run(fn, *args, target="sm_90")

compiles `fn` through Inductor and Triton, and executes the PTX of its kernels on CPU tensors, autograd included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .environment import triton_on_cpu, uncached


def run(fn: Callable, *args: Any, target: str, **kwargs: Any) -> Any:
    """`fn(*args)`. The outputs are those of the compiled function: `backward()` on them executes kernels too."""
    return compiled(fn, target)(*args, **kwargs)


def compiled(fn: Callable, target: str, checks: dict[str, Any] | None = None, **options: Any) -> Callable:
    """`torch.compile(fn, backend="flex_inductor", **options)`, to be executed. `checks` are options of ptx.run_text."""
    import torch

    from .resources import gpu_target

    def load(name: str, source: str) -> _Executed:
        from .generated import load

        return _Executed(load(name, source), target, checks or {})

    def inner_compile(*args: Any, **kwargs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx_inner

        with triton_on_cpu(load, gpu_target(target)):
            return compile_fx_inner(*args, **kwargs)

    def backend(module: Any, inputs: Sequence[Any], **given: Any) -> Any:
        from flex_inductor.backend import flex_inductor

        with uncached():
            return flex_inductor(module, list(inputs), inner_compile=inner_compile, **given)

    return torch.compile(fn, backend=backend, **options)


class _Executed:
    """Replaces Inductor's autotuner: the machine runs the config that a card would start with."""

    launches: list[tuple[str, Any]] = []

    def __init__(self, kernel: Any, target: str, checks: dict[str, Any]):
        self.kernel, self.target, self.checks = kernel, target, checks
        self.built: tuple[dict[str, int], Any] | None = None

    def run(self, *args: Any, stream: Any = None, **_: Any) -> None:
        from torch._inductor.runtime.triton_heuristics import GridExpr

        from . import ptx
        from .resources import compile_untuned

        kernel = self.kernel
        if self.built is None:
            self.built = compile_untuned(kernel, self.target)[:2]
        config, binary = self.built
        signature, constants = kernel.triton_meta["signature"], kernel.triton_meta.get("constants", {})
        passed = [
            n for n in kernel.fn.arg_names if signature.get(n, "constexpr") != "constexpr" or n in constants
        ]
        extra = kernel.inductor_meta.get("extra_launcher_args", [])
        given = dict(zip([*passed, *extra], args, strict=True))
        sizes = GridExpr.from_meta(kernel.inductor_meta, config, mode="python").eval_slow({**given, **config})
        if 0 in sizes:
            return
        taken = [given[n] for n in passed if signature.get(n, "constexpr") != "constexpr"]
        open(f"/tmp/last-{kernel.name}.ptx","w").write(binary.asm["ptx"]); print(config)
        counts = ptx.run_compiled(binary, sizes, taken, **self.checks)
        self.launches.append((kernel.name, counts))


def tensors(values: Sequence[Any]) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor)]
