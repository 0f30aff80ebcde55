"""Run generated Triton kernels on the CPU, by Triton's interpreter.

    python -m flex_inductor.tools.interpret script.py [args]

runs the script in an environment where `flex_inductor.tools.interpret.run(fn, *args)` compiles `fn`
through Inductor and executes its Triton kernels on CPU tensors, autograd included.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

from . import errors
from .environment import compiled_on_cpu

COMMAND = "python -m flex_inductor.tools.interpret script.py [args]"


def run(fn: Callable, *args: Any, **kwargs: Any) -> Any:
    """`fn(*args)`, its graphs compiled with Triton kernels that the interpreter executes.

    The outputs are those of the compiled function: `backward()` on them runs interpreted kernels too.
    """
    return compiled(fn)(*args, **kwargs)


def compiled(fn: Callable, **options: Any) -> Callable:
    """`torch.compile(fn, backend="flex_inductor", **options)`, to be run by the interpreter."""
    check_environment()
    return compiled_on_cpu(fn, _load, **options)


def check_environment() -> None:
    """Refuse where Triton was imported without its interpreter."""
    interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    if interpreting and "triton" in sys.modules:
        import triton

        interpreting = type(triton.jit(lambda: None)).__name__ == "InterpretedFunction"
    if not interpreting:
        raise errors.no_interpreter(COMMAND)


def _load(name: str, source: str) -> Any:
    """In place of Inductor's autotuner: the interpreter runs the first config."""
    from flex_inductor.tools.generated import load

    kernel = load(name, source)
    prepare(kernel.fn.fn.__globals__)
    config = kernel.configs[0]
    chosen = {n: config[n] for n in kernel.constexprs if n in config}

    def run(*args: Any, stream: Any = None, **_: Any) -> None:
        if "tl.dot" in kernel.source and "*bf16" in kernel.triton_meta["signature"].values():
            check_bf16_dot()
        sizes, given = kernel.launch(config, args)
        if 0 not in sizes:
            kernel.fn[sizes](**given, **chosen)

    return types.SimpleNamespace(config=config, run=run)


def prepare(namespace: dict[str, Any]) -> None:
    """Replace what only a GPU's compiler has, so that the interpreter can run a module with kernels."""
    import triton

    check_environment()
    _let_numbers_be_indices()
    _keep_conditions()
    _patch_the_language_once()
    namespace["libdevice"] = _Libdevice()
    for same in (each_alone, rounded_product, reciprocal, _in_place, _add_in_place):
        namespace[same.__name__] = triton.jit(types.FunctionType(same.__code__, namespace))


# In place of assembly, by its names.


def each_alone(x: Any) -> Any:
    return x


def rounded_product(x: Any, y: Any) -> Any:
    return x * y


def reciprocal(x: Any) -> Any:
    return 1.0 / x


def _in_place(pointers: Any, in_range: Any) -> Any:
    return tl.load(pointers, mask=in_range != 0, other=float("nan")).to(tl.float32)  # type: ignore[name-defined]  # noqa: F821


def _add_in_place(pointers: Any, values: Any, live: Any) -> None:
    tl.atomic_add(pointers, values, mask=live != 0, sem="relaxed")  # type: ignore[name-defined]  # noqa: F821


@functools.cache
def _let_numbers_be_indices() -> None:
    """Triton 3.6's interpreter turns arrays with one element into numbers, which numpy 2.4 refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_index


@functools.cache
def _patch_the_language_once() -> None:
    """Triton's interpreter replaces its language by functions of numpy, again for each function that a kernel calls.

    Functions that share the language's modules need it only once in a launch.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch, Scope = interpreter._patch_lang, interpreter._LangPatchScope
    patched: set[tuple[bool, ...]] = set()

    class Launch(Scope):  # type: ignore[misc, valid-type]
        def restore(self) -> None:
            patched.clear()
            super().restore()

    def patch_once(fn: Any) -> Any:
        seen = {id(value) for value in fn.__globals__.values()}
        modules = tuple(id(module) in seen for module in (tl, tl.core))
        if modules in patched:
            return Scope()
        patched.add(modules)
        return patch(fn)

    interpreter._LangPatchScope, interpreter._patch_lang = Launch, patch_once


@functools.cache
def _keep_conditions() -> None:
    """Triton's interpreter gives the result of `a < b` the type of `a`, and makes floats of it when it fills a tile."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    fill = InterpreterBuilder.create_splat

    def create_splat(builder: Any, kind: Any, number: Any) -> Any:
        is_condition = number.data.dtype == bool
        return fill(builder, kind, TensorHandle(number.data, tl.int1) if is_condition else number)

    InterpreterBuilder.create_splat = create_splat


class _Libdevice:
    """torch's functions in place of the device's mathematical library, which the interpreter lacks."""

    def __getattr__(self, name: str) -> Callable:
        import torch
        import triton.language as tl
        from triton.runtime.interpreter import TensorHandle

        function = getattr(torch, _OTHER_NAMES.get(name, name), None) or getattr(torch.special, name)

        def on_tiles(*arguments: Any) -> Any:
            first = next(a for a in arguments if isinstance(a, tl.tensor))
            numbers = [
                torch.as_tensor(a.handle.data if isinstance(a, tl.tensor) else a, dtype=None)
                for a in arguments
            ]
            return tl.tensor(TensorHandle(function(*numbers).numpy(), first.dtype), first.type)

        return on_tiles


_OTHER_NAMES = {
    "fast_dividef": "div",
    "fast_expf": "exp",
    "fast_log2f": "log2",
    "fast_logf": "log",
    "llrint": "round",
    "nearbyint": "round",
    "rint": "round",
}


@functools.cache
def _bf16_dot_error() -> float:
    """How far the interpreter's product of two bf16 matrices is from the right one, which is exact here."""
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def product(a, b, c):
        at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
        tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at)))

    a, b = (torch.arange(256, dtype=torch.float32).reshape(16, 16) % n for n in (7, 5))
    c = torch.full((16, 16), float("nan"))
    product[(1,)](a.bfloat16(), b.bfloat16(), c)
    error = (c - a @ b).abs().max().item()
    return error if error == error else float("inf")


def check_bf16_dot() -> None:
    if error := _bf16_dot_error():
        import triton

        raise errors.interpreter_bf16(triton.__version__, error)


def main(argv: Sequence[str]) -> None:
    if not argv:
        raise SystemExit(f"usage: {COMMAND}")
    if os.environ.get("TRITON_INTERPRET") != "1":
        # Triton reads the setting when it is imported, which may have happened already.
        os.environ["TRITON_INTERPRET"] = "1"
        os.execv(sys.executable, [sys.executable, "-m", "flex_inductor.tools.interpret", *argv])
    sys.argv = list(argv)
    sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
