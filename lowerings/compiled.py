"""One call compiled without torch.compile: `compiled(call)()`.

One kernel serves a class of calls: the same mods, dtypes, heads, head dims, schedule form, options, layouts and
settings of torch, whatever the lengths. Its graph has only the op, so Inductor's own cache keeps it on disk. Here it is
kept in memory. Any thread may call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import sympy
import torch
from torch import Tensor
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import clear_on_fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._pytree import tree_flatten, tree_unflatten

from flex_inductor.compat import compile_alone
from flex_inductor.kept import Kept
from flex_inductor.mod_ir.apart import apart_from_surrounding_trace
from flex_inductor.op import AttentionCall, BackwardCall, attention, attention_backward
from flex_inductor.op.call import class_of, rows_of, tensors_of
from flex_inductor.op.eager import known

from . import errors

MOST_LAYOUTS = 8  # kernels of one class, for tensors with different layouts

Call = AttentionCall | BackwardCall
Run = Callable[[Sequence[Tensor]], Any]  # a call's results, for all tensors with the same sizes and strides


class Place(NamedTuple):
    """The place of a changing size among the tensors."""

    tensor: int
    what: str  # "size" or "stride"
    dim: int

    def of(self, tensors: Sequence[Tensor]) -> int:
        return getattr(tensors[self.tensor], self.what)(self.dim)


class Kernel(NamedTuple):
    """A compiled call, for all tensors that `fits`."""

    run: Callable[[list[Any]], Sequence[Any]]
    symbols: list[Place]
    fits: Callable[[Sequence[Tensor], Sequence[int]], bool]

    def sizes(self, tensors: Sequence[Tensor]) -> list[int]:
        return [place.of(tensors) for place in self.symbols]


class _Classes(Kept[list[Kernel]]):
    def cache_clear(self) -> None:
        """Lets Inductor clear this cache with its own."""
        self.clear()
        known.forget()


_kernels = _Classes(1024)
clear_on_fresh_cache(_kernels)


def compiled(call: Call, its_class: Any = None) -> Callable[[], Any]:
    """A function with the op's results. Its kernel is already compiled: errors that it raises are the call's."""
    choose, tensors = kernels_of(call, its_class), tensors_of(call)

    def run_known(tensors: Sequence[Tensor]) -> Any:
        chosen = choose(tensors)
        return None if chosen is None else chosen(tensors)

    def run() -> Any:
        results = run_known(tensors)
        known.served(tensors, run_known)
        return results

    return run


def kernels_of(call: Call, its_class: Any = None) -> Callable[[Sequence[Tensor]], Run | None]:
    """A function that chooses the kernel for tensors of a call of this class. None if no kernel fits them."""
    key = class_of(call) if its_class is None else its_class, known.settings()
    kernels = _kernels.once(key, list)
    tensors = tensors_of(call)
    if not _have_one(kernels, tensors):
        with compile_lock:
            if not _have_one(kernels, tensors):
                if len(kernels) >= MOST_LAYOUTS:
                    raise errors.too_many_layouts(MOST_LAYOUTS)
                kernels.append(_compile(call))
    return functools.partial(_choose, kernels, isinstance(call, AttentionCall))


def _have_one(kernels: list[Kernel], tensors: Sequence[Tensor]) -> bool:
    return any(kernel.fits(tensors, kernel.sizes(tensors)) for kernel in kernels)


def _choose(kernels: list[Kernel], is_forward: bool, tensors: Sequence[Tensor]) -> Run | None:
    for kernel in kernels:
        sizes = kernel.sizes(tensors)
        if kernel.fits(tensors, sizes):
            return functools.partial(_run, kernel, sizes, is_forward)
    return None


def _run(kernel: Kernel, sizes: Sequence[int], is_forward: bool, tensors: Sequence[Tensor]) -> Any:
    try:
        results = kernel.run([*sizes, *tensors])
    except RuntimeError as error:
        if "index out of bounds" not in str(error):
            raise
        raise errors.index_out_of_bounds(error) from error  # what operations in chunks raise
    return tuple(results) if is_forward else (*results[:3], tuple(results[3:]))


def _compile(call: Call) -> Kernel:
    leaves, spec = tree_flatten(call)
    tensors = tensors_of(call)
    env = ShapeEnv(duck_shape=False)
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)  # mods hold constants
    rows = len(rows_of(call))
    fakes = [_fake(mode, i, tensor, i < rows) for i, tensor in enumerate(tensors)]
    symbols, places = _symbols(fakes)
    op = attention if isinstance(call, AttentionCall) else attention_backward

    def flat(*given: Any) -> list[Any]:
        found = iter(given[len(symbols) :])
        filled = [next(found) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return _flat(op(*tree_unflatten(filled, spec)))

    with apart_from_surrounding_trace(), torch.no_grad(), mode:
        # Lowerings expect the parts of mods outside of lanes as Inductor decomposes them.
        module = make_fx(flat, select_decomp_table())(*symbols, *fakes)
    with torch.no_grad(), tracing(TracingContext(mode)), compile_alone():
        run: Any = compile_fx_inner(module, [*symbols, *fakes], is_inference=True)
    guards: Any = compile(env.produce_guards_expression(symbols) or "True", "<guards>", "eval")
    layout = _layout_test(fakes, symbols)

    def fits(tensors: Sequence[Tensor], sizes: Sequence[int]) -> bool:
        return layout(tensors, sizes) and bool(env.evaluate_guards_expression(guards, sizes))

    return Kernel(run, places, fits)


def _fake(mode: FakeTensorMode, i: int, tensor: Tensor, is_rows: bool) -> Any:
    """`tensor` with lengths that may change; heads and head dims are the kernel's."""
    fixed = (1, 3) if is_rows else ()
    sizes = [DimDynamic.STATIC if dim in fixed else DimDynamic.DYNAMIC for dim in range(tensor.dim())]
    context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
    return mode.from_tensor(tensor.detach(), source=ConstantSource(f"tensor_{i}"), symbolic_context=context)


def _symbols(fakes: Sequence[Any]) -> tuple[list[Any], list[Place]]:
    """The sizes and strides that are symbols of their own, each with a place where it is found."""
    symbols, places, known = [], [], set()
    for i, fake in enumerate(fakes):
        for what, values in (("size", fake.size()), ("stride", fake.stride())):
            for dim, value in enumerate(values):
                if (
                    isinstance(value, torch.SymInt)
                    and (symbol := value.node.expr).is_symbol
                    and symbol not in known
                ):
                    known.add(symbol)
                    symbols.append(value)
                    places.append(Place(i, what, dim))
    return symbols, places


def _layout_test(
    fakes: Sequence[Any], symbols: Sequence[Any]
) -> Callable[[Sequence[Tensor], Sequence[int]], bool]:
    """Whether tensors have the sizes and strides that the kernel was made for, given the values of its symbols."""
    names = {symbol.node.expr: sympy.Symbol(f"sizes[{i}]") for i, symbol in enumerate(symbols)}
    tests = []
    for i, fake in enumerate(fakes):
        for what, values in (("shape", fake.size()), ("stride()", fake.stride())):
            wanted = [_text(value, names) for value in values]
            if wanted:
                tests.append(f"tensors[{i}].{what} == ({', '.join(wanted)},)")
    return eval(f"lambda tensors, sizes: {' and '.join(tests) or 'True'}")


def _text(value: Any, names: dict[Any, Any]) -> str:
    if not isinstance(value, torch.SymInt):
        return str(int(value))
    expression = value.node.expr
    assert expression.is_polynomial(), "a stride is made of sums and products of sizes"
    return str(expression.xreplace(names))


def _flat(value: Any) -> list[Any]:
    return [leaf for part in value for leaf in _flat(part)] if isinstance(value, tuple) else [value]
