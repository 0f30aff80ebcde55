"""Writes a lane graph's values: Inductor's Triton printer, with costs and cheaper forms.

For every value the lane axes are known along which it varies, so values that do not change in a kernel's loop are
computed before it. A load whose index may leave the tensor is masked: a dead lane may hold any index, and a live one
with an index out of range reads NaN (0 from integers).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import sympy
import torch
from torch._inductor.codegen.common import CSE, CSEProxy, CSEVariable, Kernel
from torch._inductor.codegen.triton import texpr
from torch._inductor.codegen.triton_utils import should_unwrap_unspec_arg
from torch._inductor.utils import IndentedBuffer, sympy_subs, triton_type
from torch._inductor.virtualized import OpsValue, V
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from .fast_functions import OF_MULTIPLES, OTHERS, Rough
from .kernel import INT_MAX, Arguments, fits_int32

INT_MIN = -INT_MAX - 1

SCORED = "score"  # an axis of all that depends on a score or its gradient


ALONG_A_TILE = frozenset(("q_idx", "kv_idx"))


class Lane(NamedTuple):
    """A lane argument: a variable of the kernel, the axes it varies along, and its least upper bound."""

    name: str
    axes: frozenset[str]
    dtype: torch.dtype
    below: sympy.Expr | None = None  # an index lies in [0, below)
    bounds: ValueRanges | None = None  # of an index instead, where a map says what it is


class Statement(NamedTuple):
    """An assignment, and what it costs."""

    text: str
    name: str
    axes: frozenset[str]  # along which the value varies
    reads: frozenset[str]  # values of other statements, and lanes
    loads: bool = False  # a captured value that Triton's pipeline may copy ahead
    per_score: bool = False  # one for every score that is loaded where the scores are

    @property
    def in_every_lane(self) -> bool:
        return self.axes >= ALONG_A_TILE


def before_the_loop(name: str, expression: str) -> Statement:
    """A statement of a value that is the same in all lanes."""
    return Statement(f"{name} = {expression}", name, frozenset(), frozenset())


class _Written(IndentedBuffer):
    """Takes lines from Inductor's printer as statements, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.statements: dict[str, Statement] = {}
        self.axes: dict[str, frozenset[str]] = {}  # of statements, and of lanes

    def writeline(self, line: Any) -> None:
        name, _, expression = line.partition(" = ")
        reads = self.axes.keys() & re.findall(r"[A-Za-z_]\w*", expression)
        self.axes[name] = frozenset().union(*(self.axes[read] for read in reads))
        self.statements[name] = Statement(line, name, self.axes[name], frozenset(reads))


def dtype_of(variable: CSEVariable) -> torch.dtype:
    assert variable.dtype is not None, "all that kernels make has a dtype"
    return variable.dtype


class LaneKernel(Kernel):
    """The state behind Inductor's printer: names, statements, and names of tensors."""

    def __init__(
        self,
        arguments: Arguments,
        prefix: str,
        device: torch.device,
        approximate: bool,
        nvidia: bool,
        beside: LaneKernel | None,
    ):
        super().__init__(increase_kernel_count=False)
        self.cse: CSE = CSE(name_prefix=prefix)
        self.compute = self.written = _Written()
        self.axes = self.written.axes
        self.arguments, self.device = arguments, device
        self.approximate, self.nvidia = approximate, nvidia
        self.beside = beside
        self.uses_mantissas = False  # `as_mantissa`
        self.rough = approximate  # whether what is written now may be
        self.rounds = False  # whether products that are written now must be rounded before they are added
        self.functions = Rough(nvidia)
        self.below: dict[str, sympy.Expr] = {}
        self.constants: dict[str, Any] = {}
        self.sums: dict[str, tuple[str, CSEVariable, CSEVariable]] = {}  # of integers, and differences
        self.multiples: dict[str, tuple[str, float]] = {}  # products with a number -> what it multiplies, it
        self.made: dict[str, tuple[str, Any]] = {}  # the operation and operands of every value
        self.checks: dict[str, str] = {}  # index variables -> the comparison that keeps them in range

    @property
    def mantissas(self) -> bool:
        """Whether there are indices as floats by their bits, here or beside."""
        return self.uses_mantissas or (self.beside is not None and self.beside.mantissas)

    def variable(self, lane: Lane) -> CSEVariable:
        bounds = ValueRanges.unknown()
        if lane.below is not None:
            last = lane.below - 1
            bounds = lane.bounds or ValueRanges(0, last if last.is_Integer else int_oo)
            self.below[lane.name] = lane.below
        self.axes[lane.name] = lane.axes
        return CSEVariable(lane.name, bounds, lane.dtype, ())

    def new(self, text: str, dtype: torch.dtype, bounds: ValueRanges | None = None) -> CSEVariable:
        bounds = ValueRanges.unknown() if bounds is None else bounds
        return self.cse.generate(self.compute, text, bounds=bounds, dtype=dtype, shape=())

    def loading(self, text: str, dtype: torch.dtype, per_score: bool) -> CSEVariable:
        """A statement that loads a captured value."""
        found, statements = self.new(text, dtype), self.written.statements
        statements[str(found)] = statements[str(found)]._replace(loads=not per_score, per_score=per_score)
        return found

    def text(self, expression: sympy.Expr, wide: bool = False) -> str:
        """An index expression in Triton, in 64 bits if `wide`."""
        lanes = sorted(s.name for s in expression.free_symbols if s.name in self.axes)
        sizes = [s for s in expression.free_symbols if s.name not in self.axes]
        names = {s: sympy.Symbol(self.arguments.size(s), integer=True) for s in sizes}
        text = texpr(sympy_subs(expression, names))
        for name in lanes if wide else ():
            text = re.sub(rf"\b{name}\b", f"{name}.to(tl.int64)", text)
        return text


def _comparison(name: str) -> Callable[[Any, CSEVariable, CSEVariable], CSEVariable]:
    def compare(self: LaneOps, x: CSEVariable, y: CSEVariable) -> CSEVariable:
        x, y = self.narrowed(x, y)
        return self._default(name, (self.alone(x, y), self.alone(y, x)), {})

    return compare


def _exact_in_fp32(x: CSEVariable) -> bool:
    return x.bounds.lower >= -(2**24) and x.bounds.upper <= 2**24


def _in_a_mantissa(x: CSEVariable) -> bool:
    return x.dtype == torch.int32 and x.bounds.lower >= 0 and x.bounds.upper < 2**23


def _fits(found: ValueRanges, dtype: torch.dtype) -> bool:
    """Whether no number of this range wraps around."""
    if found.is_bool or dtype == torch.bool or dtype.is_floating_point:
        return True
    info = torch.iinfo(dtype)
    return bool(found.lower >= info.min and found.upper <= info.max)


_BOUNDED = {"add", "sub", "mul", "neg", "abs", "minimum", "maximum", "where", "constant", "to_dtype"}


class LaneOps(CSEProxy):
    kernel: LaneKernel

    def _default(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = super()._default(name, args, kwargs)
        self.kernel.made.setdefault(str(found), (name, args))
        return found

    def _bound_variable(self, name: str, *args: Any, **kwargs: Any) -> ValueRanges:
        """Ranges of indices: an index that cannot leave its tensor needs no check."""
        variables = [a for a in args if isinstance(a, CSEVariable)]
        if name not in _BOUNDED or kwargs.get("use_compute_types") is False:
            return ValueRanges.unknown()
        if any(v.dtype is None or v.dtype.is_floating_point for v in variables):
            return ValueRanges.unknown()
        if name == "constant" and not isinstance(args[0], int):
            return ValueRanges.unknown()
        bounds = [a.bounds if isinstance(a, CSEVariable) else a for a in args]
        found = getattr(self.vr_analysis, name)(*bounds)
        own: list[Any] = [args[1]] if name in ("to_dtype", "constant") else [v.dtype for v in variables]
        return found if _fits(found, functools.reduce(torch.promote_types, own)) else ValueRanges.unknown()

    def indirect_indexing(
        self, var: CSEVariable, size: Any, check: bool = True, wrap_neg: bool = True
    ) -> sympy.Symbol:
        kernel, size = self.kernel, sympy.sympify(size)
        low = var.bounds.lower >= 0
        below = kernel.below.get(str(var))
        if below is not None:
            high = V.graph.sizevars.statically_known_leq(below, size)
        else:
            high = size.is_Integer and var.bounds.upper < size
        limit = kernel.text(size)
        if not low:
            var = kernel.new(f"tl.where({var} < 0, {var} + {limit}, {var})", dtype_of(var))
        compared = var if low and high else self.alone(var)
        comparisons = ([] if low else [f"({compared} >= 0)"]) + ([] if high else [f"({compared} < {limit})"])
        known = str(kernel.new(" & ".join(comparisons), torch.bool)) if comparisons else None
        if var.dtype == torch.int64 and fits_int32(size):
            var = kernel.new(f"{var}.to(tl.int32)", torch.int32)
        if known is not None:
            kernel.checks[str(var)] = known
        return sympy.Symbol(str(var), integer=True)

    def load(self, name: str, index: sympy.Expr) -> CSEVariable:
        kernel = self.kernel
        dtype = V.graph.get_dtype(name)
        if should_unwrap_unspec_arg(name):  # a 0-d CPU tensor: its value is passed
            return kernel.new(f"{kernel.arguments.captures[name]} + 0", dtype)
        variables = sorted(s.name for s in index.free_symbols if s.name in kernel.axes)
        checks = [kernel.checks[v] for v in variables if v in kernel.checks]
        layout = V.graph.get_buffer(name).get_layout()
        extent = sum(((n - 1) * s for n, s in zip(layout.size, layout.stride, strict=True)), layout.offset)
        pointers = f"{kernel.arguments.captures[name]} + ({kernel.text(index, not fits_int32(extent))})"
        axes = frozenset().union(*(kernel.axes[v] for v in variables))
        if kernel.nvidia and axes >= ALONG_A_TILE and dtype in (torch.float32, torch.float16, torch.bfloat16):
            in_range = f"_in_range({pointers}, {' & '.join(checks)}" if checks else f"({pointers}"
            return kernel.loading(f"per_score{in_range})", torch.float32, per_score=True)
        text = f"tl.load({pointers}"
        if checks:
            other = 'float("nan")' if dtype.is_floating_point else "0"
            text += f", mask={' & '.join(checks)}, other={other}"
        text += ")"
        if dtype == torch.bool:
            text += ".to(tl.int1)"
        elif dtype in (torch.float16, torch.bfloat16):
            text, dtype = f"{text}.to(tl.float32)", torch.float32
        return kernel.loading(text, dtype, per_score=False)

    lt, le, gt, ge, eq, ne = map(_comparison, ("lt", "le", "gt", "ge", "eq", "ne"))  # type: ignore[assignment]

    def alone(self, x: CSEVariable, other: CSEVariable | None = None) -> CSEVariable:
        """`x`, to be compared, with `other` or a number: see `each_alone` in tiles.jinja."""
        if not self.kernel.nvidia or x.dtype != torch.int32 or str(x) in self.kernel.constants:
            return x
        bits = other is not None and self.kernel.mantissas and _in_a_mantissa(x) and _in_a_mantissa(other)
        # The score already has both as mantissas, and these compare like the indices.
        if bits and str(other) not in self.kernel.constants:
            found = self.kernel.new(f"each_alone({x} + 0x4B000000)", x.dtype)
        else:
            found = self.kernel.new(f"each_alone({x})", x.dtype, x.bounds)
        self.kernel.made[str(found)] = ("alone", (x,))
        return found

    def narrowed(self, x: CSEVariable, y: CSEVariable) -> tuple[CSEVariable, CSEVariable]:
        """Operands of a comparison in 32 bits, if one of them is an index or the distance of two."""
        if not x.dtype == y.dtype == torch.int64:
            return x, y
        for one, other in ((x, y), (y, x)):
            operation, operands = self.kernel.made.get(str(one), ("", ()))
            if operation == "to_dtype" and self._is_distance(operands[0]) and not self._in_every_lane(other):
                limited = f"tl.minimum(tl.maximum({other}, {INT_MIN}), {INT_MAX}).to(tl.int32)"
                pair = operands[0], self.kernel.new(limited, torch.int32)
                return pair if one is x else pair[::-1]
        return x, y

    def _is_distance(self, x: Any) -> bool:
        """Whether `x` is an index or a difference of two, so that INT_MIN and INT_MAX can stand for numbers beyond."""
        operation, operands = self.kernel.made.get(str(x), ("", ()))
        if operation == "sub":
            return all(str(operand) in self.kernel.below for operand in operands)
        return str(x) in self.kernel.below

    def _in_every_lane(self, x: CSEVariable) -> bool:
        return self.kernel.axes[str(x)] >= ALONG_A_TILE

    def add(self, x: CSEVariable, y: CSEVariable) -> CSEVariable:
        return self._sum("add", x, y)

    def sub(self, x: CSEVariable, y: CSEVariable) -> CSEVariable:
        return self._sum("sub", x, y)

    def _sum(self, name: str, x: CSEVariable, y: CSEVariable) -> CSEVariable:
        found = self._default(name, (x, y), {})
        if found.dtype == torch.int32:
            self.kernel.sums[str(found)] = (name, x, y)
        return found

    def mul(self, x: CSEVariable, y: CSEVariable) -> CSEVariable:
        if self.kernel.rounds and x.dtype == y.dtype == torch.float32:
            return self.kernel.new(f"rounded_product({x}, {y})", torch.float32)
        found = self._default("mul", (x, y), {})
        for one, other in ((x, y), (y, x)):
            factor = self.kernel.constants.get(str(other), 0)
            if found.dtype == torch.float32 and 2.0**-64 < abs(factor) < 2.0**64:
                self.kernel.multiples[str(found)] = (str(one), factor)
        return found

    def to_dtype(self, x: CSEVariable, dtype: torch.dtype, *args: Any, **kwargs: Any) -> CSEVariable:
        """A sum of integers that fp32 holds exactly is converted summand by summand, most of them outside the loop."""
        name, *parts = self.kernel.sums.get(str(x), ("",))
        if dtype == torch.float32 and name == "sub" and all(map(_in_a_mantissa, parts)):
            return self._default("sub", tuple(map(self._as_mantissa, parts)), {})
        if dtype == torch.float32 and name and all(map(_exact_in_fp32, [x, *parts])):
            return self._default(name, tuple(self.to_dtype(part, dtype) for part in parts), {})
        return self._default("to_dtype", (x, dtype, *args), kwargs)

    def _as_mantissa(self, x: CSEVariable) -> CSEVariable:
        """For a difference: see `as_mantissa` in tiles.jinja."""
        self.kernel.uses_mantissas = True
        return self.kernel.new(f"as_mantissa({x})", torch.float32)

    def constant(self, value: Any, dtype: torch.dtype) -> CSEVariable:
        variable = self._default("constant", (value, dtype), {})
        self.kernel.constants[str(variable)] = value
        return variable

    def truediv(self, x: CSEVariable, y: CSEVariable) -> CSEVariable:
        """Rounded as in eager torch, unless a score is divided: the quotient may be an index."""
        scored = SCORED in self.kernel.axes[str(x)] | self.kernel.axes[str(y)]
        if scored or not x.dtype == y.dtype == torch.float32:
            return self._default("truediv", (x, y), {})
        return self.kernel.new(f"tl.div_rn({x}, {y})", torch.float32)

    def pow(self, x: CSEVariable, y: CSEVariable) -> CSEVariable:
        exponent = self.kernel.constants.get(str(y), 0)
        if not self.kernel.rough or x.dtype != torch.float32 or float(exponent).is_integer():
            return self._default("pow", (x, y), {})
        return self.kernel.new(self.kernel.functions.power(str(x), exponent), torch.float32)

    def masked(self, mask: CSEVariable, body: Callable[[], Any], other: Any) -> CSEVariable:
        """Inductor inlines only code that reads nothing, so `body` may be computed where its value is not used."""
        value = body()
        value = value.value if isinstance(value, OpsValue) else value
        return self._default("where", (mask, value, self.constant(other, value.dtype)), {})

    def index_expr(self, expr: sympy.Expr, dtype: torch.dtype) -> CSEVariable:
        """Positions, as from torch.arange in a mod, or expressions of sizes alone."""
        expr = sympy.sympify(expr)
        text = self.kernel.text(expr, wide=True)
        if not any(symbol.name in self.kernel.axes for symbol in expr.free_symbols):
            text = f"tl.full([], {text}, tl.int64)"
        return self.kernel.new(f"({text}).to({triton_type(dtype)})", dtype)

    value_expr = index_expr


def _roughly(name: str, self: LaneOps, x: CSEVariable) -> CSEVariable:
    kernel = self.kernel
    if not kernel.rough or x.dtype != torch.float32:
        return self._default(name, (x,), {})
    arguments = kernel.multiples.get(str(x), (str(x),)) if name in OF_MULTIPLES else (str(x),)
    return kernel.new(getattr(kernel.functions, name)(*arguments), torch.float32)


for _name in (*OF_MULTIPLES, *OTHERS):
    setattr(LaneOps, _name, functools.partialmethod(functools.partial(_roughly, _name)))
