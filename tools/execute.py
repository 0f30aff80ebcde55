"""Run generated Triton kernels on the CPU as a card would: compiled for it, instruction by instruction.

    flex_inductor.tools.execute.run(fn, *args, target="sm_90")

compiles `fn` through Inductor and Triton, and executes its kernels on CPU tensors by `tools/ptx/`, autograd included.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NamedTuple

from . import ptx
from .environment import compiled_on_cpu
from .generated import GeneratedKernel, load
from .resources import Resources, compile_untuned


class Launch(NamedTuple):
    kernel: GeneratedKernel
    config: dict[str, int]
    resources: Resources
    counts: ptx.Counts


def run(fn: Callable, *args: Any, target: str, **kwargs: Any) -> Any:
    """`fn(*args)`. The outputs are those of the compiled function: `backward()` on them executes kernels too."""
    return compiled(fn, target)(*args, **kwargs)


def compiled(
    fn: Callable,
    target: str,
    launches: list[Launch] | None = None,
    dynamic: bool | None = None,
    options: dict[str, Any] | None = None,
    records: bool = False,
    **checks: Any,
) -> Callable:
    """`torch.compile(fn, backend="flex_inductor")`, to be executed with the options `checks` of `ptx.run_text`.

    `launches` gets every kernel and its counts; `dynamic` and `options` are those of torch.compile. `records`: see
    `environment.compiled_on_cpu`.
    """
    load = loader(target, launches, **checks)
    return compiled_on_cpu(fn, load, target, records, dynamic=dynamic, options=options)


def loader(target: str, launches: list[Launch] | None = None, **checks: Any) -> Callable[[str, str], Any]:
    """What takes the place of compiling a kernel: see `environment.triton_on_cpu`."""

    def executed(name: str, source: str) -> Any:
        """In place of Inductor's autotuner: the config that a card would start with."""
        kernel = load(name, source)
        config, binary, found = compile_untuned(kernel, target)

        def run(*args: Any, stream: Any = None, **_: Any) -> None:
            sizes, given = kernel.launch(config, args)
            if 0 in sizes:
                return
            taken = [value for name, value in given.items() if name not in kernel.constexprs]
            # Triton leaves out some fences between cp.async and products, as CUTLASS does, and a loop without a step
            # reads tensor memory in vain: NaN in a result would show it.
            counts = ptx.run_compiled(binary, sizes, taken, **{"fences": "stores", "poison": True, **checks})
            if launches is not None:
                launches.append(Launch(kernel, config, found, counts))

        return types.SimpleNamespace(config=config, run=run)

    return executed
