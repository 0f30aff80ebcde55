"""How far each element of attention's results may be off: running-error analysis of dense attention in fp64.

Dense attention runs once, forward and backward, under a mode that sees every operation. Beside each number the mode keeps
a bound of its error: what the errors of the operands do to it, and the roundings of a kernel at that place. A kernel
computes in fp32, rounds what it multiplies by inputs to their dtype, keeps the logsumexp for the backward and finds
`delta` from the rounded output. fp64 is analysed as fp32, and what comes out scaled.

Each rounding is as large as it can be. Of many in one sum, the bound is the smaller of two: all with the same sign, or
DEVIATIONS times the root of the sum of their squares (Higham and Mary, 2019). Independent uniform roundings have a root
mean square of 0.58 of the largest, so that is five standard deviations, for every order of summation. Errors of terms
may also have one sign or one share of each term in common, as those of a row's weights do: that counts in full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

UNIT = 2.0**-24  # a rounding in fp32, as a share
DEVIATIONS = 3
LARGE = 1 << 21  # more numbers in a sum: only worst cases, to save time
FUNCTION = 4  # units of exp, tanh and other functions; kernels' own exp has 3
# Units of the exponential whose results become bf16 (docs/cpu.md). A row's sum takes them before they are rounded.
SHORT_EXP = 49
# Of a card's tanh for inputs of 16 bits: 1 - 2 / (1 + exp(2 x)), with a hardware exp that is off by 2 units.
FAST_TANH = 3e-7
UNBOUNDED = 1e300  # products of it and 0 are 0

CONSTANT = {
    "empty_like", "empty_strided", "fill", "full_like", "new_empty", "new_empty_strided", "new_full",
    "new_ones", "new_zeros", "ones_like", "scalar_tensor", "zero", "zeros_like",
}  # fmt: skip
MOVES = {
    "_reshape_copy", "_unsafe_index", "_unsafe_view", "cat", "clone", "constant_pad_nd", "copy",
    "diagonal_backward", "diagonal_scatter", "embedding", "flip", "gather", "index", "index_copy",
    "index_select", "lift_fresh", "lift_fresh_copy", "masked_scatter", "repeat", "roll", "scatter",
    "select_backward", "select_scatter", "slice_backward", "slice_scatter", "stack", "take", "tril", "triu",
    "unfold_backward",
}  # fmt: skip
SUMS = {
    "_unsafe_index_put", "cumsum", "embedding_dense_backward", "index_add", "index_put", "scatter_add",
    "sum",
}  # fmt: skip
PRODUCTS = {"mm", "bmm", "mv", "dot"}
EXACT = {
    "abs", "ceil", "clamp", "clamp_max", "clamp_min", "floor", "fmod", "masked_fill", "maximum", "minimum",
    "neg", "relu", "remainder", "round", "sgn", "sign", "threshold_backward", "trunc", "where",
}  # fmt: skip
COMPARISONS = {"eq", "ge", "gt", "le", "lt", "ne"}
LOGIC = {
    "bitwise_and", "bitwise_not", "bitwise_or", "logical_and", "logical_not", "logical_or", "logical_xor",
}  # fmt: skip
SMOOTH = {"softplus_backward", "elu_backward", "log_sigmoid_backward"}  # torch does not tag them as pointwise
ONCE = {"add", "sub", "rsub", "mul", "div", "_to_copy"}  # are rounded once


def rounding(value: Tensor, dtype: torch.dtype) -> Tensor:
    """What it takes to store `value` in a dtype. Denormals may be flushed where they are too small to matter."""
    info = torch.finfo(dtype)
    floor = info.smallest_normal * (info.eps / 2 if dtype == torch.float16 else 1)
    return value.abs() * (info.eps / 2) + floor


def _chain(terms: Tensor | float) -> Tensor:
    """Of how many roundings of the largest partial sum the error of a sum may consist."""
    terms = torch.as_tensor(terms, dtype=torch.float64)
    return torch.minimum(terms, DEVIATIONS * terms.sqrt())


def _summed(terms: Tensor | float, total: Tensor, magnitudes: Tensor, squares: Tensor) -> Tensor:
    """Of a sum in an order that has nothing to do with its terms.

    The mean square of such a sum's partial sums is a third of its square and a sixth of its terms'. Few terms have more.
    """
    return UNIT * _chain(terms) * torch.minimum(magnitudes, (total.square() / 3 + squares / 2).sqrt())


class Bounds(TorchDispatchMode):
    """Keeps the bounds in a shadow of each storage, so views and what autograd saves have theirs."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype if dtype != torch.float64 else torch.float32
        self.unit = torch.finfo(self.dtype).eps / 2
        self.exp = SHORT_EXP if dtype == torch.bfloat16 else FUNCTION
        self.scale = 1.0 if dtype != torch.float64 else 2.0**-28  # twice: the reference rounds as well
        self.shadows: dict[int, tuple[StorageWeakRef, Tensor, float]] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """The bound of each element; that of a number that was given is 0."""
        found = self._shadow(tensor)
        if found is None:
            return torch.zeros((), dtype=torch.float64).expand(tensor.shape)
        return found[1].as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def give(self, tensor: Tensor, error: Tensor | float, unit: float = UNIT) -> None:
        """`tensor` is off by so much, and what is computed from it alone is rounded to `unit`."""
        storage = tensor.untyped_storage()
        self.shadows = {key: found for key, found in self.shadows.items() if not found[0].expired()}
        if (found := self._shadow(tensor)) is None:
            size = storage.nbytes() // tensor.element_size()
            if isinstance(error, Tensor) and error.numel() == size and error.stride() == tensor.stride():
                self.shadows[storage._cdata] = (StorageWeakRef(storage), error, unit)
                return
            found = (StorageWeakRef(storage), torch.zeros(size, dtype=torch.float64), unit)
            self.shadows[storage._cdata] = found
        view = found[1].as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        view.copy_(torch.as_tensor(error))

    def give_delta(self, out: Tensor, d_out: Tensor, d_lse: Tensor) -> None:
        """A kernel's backward sums gradient * output over each row and takes the lse's gradient away from that."""
        with _disable_current_modes():
            terms, out = d_out * out.detach(), out.detach()
            of_sums = self.of(out) * (UNIT / self.unit)  # rounded weights: see _softmax_backward_data
            errors = d_out.abs() * (of_sums + rounding(out, self.dtype))
            share = errors.sum(-1) / terms.abs().sum(-1).clamp(min=1e-300)
            independent = DEVIATIONS * errors.square().sum(-1).sqrt()
            error = torch.minimum(errors.sum(-1), share * terms.sum(-1).abs() + independent)
            error += _summed(out.size(-1), terms.sum(-1), terms.abs().sum(-1), terms.square().sum(-1))
            self.give(d_lse, error + UNIT * (d_lse.abs() + terms.sum(-1).abs()))

    def of_result(self, name: str, tensor: Tensor) -> Tensor:
        """The bound of a result, as it is stored."""
        of_rows = name in ("lse", "max_scores")
        error = self.of(tensor) + rounding(tensor, torch.float32 if of_rows else self.dtype)
        return error * self.scale

    def _shadow(self, tensor: Tensor) -> tuple[StorageWeakRef, Tensor, float] | None:
        found = self.shadows.get(tensor.untyped_storage()._cdata)
        return None if found is None or found[0].expired() else found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = list(_tensors((*args, *kwargs.values())))
        name = func._schema.name.removeprefix("aten::").removesuffix("_")
        if name in COMPARISONS | LOGIC:
            return self._decided(name, func, args, kwargs)
        if not any(t.is_floating_point() for t in given):
            return func(*args, **kwargs)
        changes = func._schema.is_mutable
        result = None if changes else func(*args, **kwargs)
        if not changes and not (outputs := _made(result, given)):  # a view, or no numbers
            return result
        leaves, spec = pytree.tree_flatten((args, kwargs))
        numbers = [isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in leaves]
        errors = [self.of(leaf) if number else None for leaf, number in zip(leaves, numbers, strict=True)]
        values: list[Any] = leaves
        if changes:
            values = [x.clone() if isinstance(x, Tensor) else x for x in values]
            errors = [None if e is None else e.clone() for e in errors]
            result = func(*args, **kwargs)
            outputs = _made(result, [])
        if not outputs:
            return result
        (y,) = outputs
        if name in CONSTANT:
            if self._shadow(y):
                self.give(y, 0.0)
            return result
        values = [x.double() if number else x for x, number in zip(values, numbers, strict=True)]

        def call(*leaves: Any) -> Tensor:
            leaves = [x.clone() if changes and isinstance(x, Tensor) else x for x in leaves]
            args, kwargs = pytree.tree_unflatten(leaves, spec)
            found = func(*args, **kwargs)
            return found if isinstance(found, Tensor) else found[0]

        # Numbers that a mod makes have no unit, nor have integers that it computes with.
        shadows = [self._shadow(leaf) for leaf, number in zip(leaves, numbers, strict=True) if number]
        unit = min((found[2] for found in shadows if found), default=UNIT)
        if name in MOVES and not any(shadows):
            return result
        rule = self._rule(name, func, y, leaves)
        error = rule(call, values, errors, y.double(), unit)
        if rule != self._moved:
            error = error.nan_to_num(UNBOUNDED, UNBOUNDED).clamp(max=UNBOUNDED)
            error = torch.where(y.isfinite(), error, 0.0)
        self.give(y, error, unit)
        return result

    def _decided(self, name: str, func: Any, args: Sequence, kwargs: dict) -> Any:
        """A comparison, or what is made of some: its shadow is 1 where roundings may decide otherwise."""
        tensors = [x for x in args if isinstance(x, Tensor) and self._shadow(x)]
        if not tensors:
            return func(*args, **kwargs)
        error = sum(self.of(x) for x in tensors)
        unsure = error > 0
        if name in COMPARISONS:
            a, b = (x.double() if isinstance(x, Tensor) else x for x in args)
            unsure = unsure & ((a - b).abs() <= error)
        result = func(*args, **kwargs)
        if self._shadow(result) or unsure.any():
            self.give(result, unsure.double().expand(result.shape))
        return result

    def _rule(self, name: str, func: Any, y: Tensor, leaves: Sequence) -> Callable[..., Tensor]:
        if name == "scatter_add" and leaves[2].size(leaves[1]) == 1:  # vmap's index: no place has two
            return self._moved
        for names, rule in ((MOVES, self._moved), (SUMS, self._sum), (PRODUCTS, self._product)):
            if name in names:
                return rule
        own = getattr(self, f"_{name.removeprefix('_')}", None)
        if own is not None:
            return own
        assert torch.Tag.pointwise in func.tags or name in EXACT | ONCE | SMOOTH, (
            f"tests/bounds.py has no rule for {func}"
        )
        roundings = 0 if name in EXACT else 1 if name in ONCE else FUNCTION
        if name == "_to_copy" and y.dtype == torch.float64:
            roundings = 0

        def pointwise(call: Callable, values: Sequence, errors: Sequence, y: Tensor, unit: float) -> Tensor:
            error = y.abs() * (unit * min(roundings, 1) + UNIT * roundings)
            if name == "tanh" and self.dtype.itemsize == 2:
                error = error + FAST_TANH
            for i, (x, e) in enumerate(zip(values, errors, strict=True)):
                if isinstance(x, Tensor) and x.dtype == torch.bool and self._shadow(leaves[i]):
                    other = call(*values[:i], x ^ (self.of(leaves[i]) > 0), *values[i + 1 :]).double()
                    error = error + (other - y).abs().nan_to_num(UNBOUNDED)
                if e is None:
                    continue
                if roundings == FUNCTION:  # it may round within
                    e = e + UNIT * x.abs().nan_to_num(0.0, 0.0)
                if e.any():
                    ends = [call(*values[:i], x + end, *values[i + 1 :]).double() for end in (e, -e)]
                    error = error + torch.maximum(*((end - y).abs().nan_to_num(UNBOUNDED) for end in ends))
            return error

        return pointwise

    # Rules, each of a call, its values and their errors, its result and the unit it is rounded to.

    def _moved(self, call: Callable, values: Sequence, errors: Sequence, y: Tensor, unit: float) -> Tensor:
        moved = [v if e is None else e for v, e in zip(values, errors, strict=True)]
        if isinstance(moved[-1], float):  # what is padded with
            moved[-1] = 0.0
        return call(*moved)

    def _sum(self, call: Callable, values: Sequence, errors: Sequence, y: Tensor, unit: float) -> Tensor:
        """Errors of lanes hold many roundings, and those of a row may have one sign."""

        def of(change: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
            return call(*(v if e is None else change(v, e) for v, e in zip(values, errors, strict=True)))

        worst = of(lambda v, e: e)
        magnitudes = of(lambda v, e: v.abs())
        if values[0].numel() > LARGE:
            return worst + unit * _chain(values[0].numel() / y.numel()) * magnitudes
        counts = of(lambda v, e: torch.ones_like(e))
        rounded = _summed(counts - 1, y, magnitudes, of(lambda v, e: v.square())) * (unit / UNIT)
        lanes = max((e for e in errors if e is not None), key=Tensor.numel)
        if not lanes.dim() or not lanes.numel():
            return worst + rounded
        of_row = (counts * lanes.size(-1) / lanes.numel()).clamp(1, lanes.size(-1))
        independent = 2 * (of_row * of(lambda v, e: e.square())).sqrt()
        share = worst / magnitudes.clamp(min=1e-300)
        return torch.minimum(worst, torch.hypot(share * y.abs(), independent)) + rounded

    def _product(self, call: Callable, values: Sequence, errors: Sequence, y: Tensor, unit: float) -> Tensor:
        (a, b), (e_a, e_b) = values, errors
        terms = a.size(-1)
        error = _summed(terms, y, call(a.abs(), b.abs()), call(a.square(), b.square())) + UNIT * y.abs()
        if e_a.any():
            e = e_a + rounding(a, self.dtype)
            share = e.sum(-1, True) / a.abs().sum(-1, True).clamp(min=1e-300)
            share = share if y.dim() > 1 else share.squeeze(-1)
            error += _spread(lambda e, c: call(e, c), e, b, share * y.abs())
        if e_b.any():
            e = e_b + rounding(b, self.dtype)
            along = -2 if b.dim() > 1 else -1
            share = e.sum(along, True) / b.abs().sum(along, True).clamp(min=1e-300)
            share = share if y.dim() > 1 else share.squeeze(-1)
            error += _spread(lambda e, c: call(c, e), e, a, share * y.abs())
        return error

    def _mean(self, call: Callable, values: Sequence, errors: Sequence, y: Tensor, unit: float) -> Tensor:
        terms = values[0].numel() / max(y.numel(), 1)
        return self._moved(call, values, errors, y, unit) + unit * (_chain(terms) + 1) * call(
            values[0].abs(), *values[1:]
        )

    def _amax(self, call: Callable, values: Sequence, errors: Sequence, y: Tensor, unit: float) -> Tensor:
        x, e = values[0], errors[0]
        ends = (call(x + e, *values[1:]), call(x - e, *values[1:]))
        return torch.maximum(*((end - y).abs() for end in ends)) + 2 * UNIT * y.abs()

    _amin = _amax

    def _logsumexp(
        self, call: Callable, values: Sequence, errors: Sequence, y: Tensor, unit: float
    ) -> Tensor:
        x, (dim, *_) = values[0], values[1:]
        lse = torch.logsumexp(x, dim, True)
        return self._of_lse(x, errors[0], lse, dim).view_as(y)

    def _of_lse(self, x: Tensor, e: Tensor, lse: Tensor, dim: int) -> Tensor:
        """The error of the logsumexp of rows, as it is kept for the backward."""
        weight = (x - lse).exp().nan_to_num(0.0)
        peak = x.amax(dim, True)
        below = torch.where(x == -torch.inf, 0.0, peak - x)
        one = torch.ones_like(peak)
        rounded = _summed(x.size(dim), one, one, weight.square().sum(dim, True)) + UNIT * self.exp
        return (weight * (e + UNIT * below)).sum(dim, True) + rounded + UNIT * (lse.abs() + 2 * peak.abs())

    def _softmax(self, call: Callable, values: Sequence, errors: Sequence, y: Tensor, unit: float) -> Tensor:
        return y * torch.expm1(self._log_softmax(call, values, errors, y, unit)) + 1e-37

    def _log_softmax(
        self, call: Callable, values: Sequence, errors: Sequence, y: Tensor, unit: float
    ) -> Tensor:
        """The weights of a backward pass: exp(score - lse)."""
        x, dim = values[:2]
        lse = torch.logsumexp(x, dim, True)
        distance = (x - lse).abs()
        return torch.where(
            x == -torch.inf,
            0.0,
            errors[0] + self._of_lse(x, errors[0], lse, dim) + UNIT * (distance + self.exp),
        )

    def _softmax_backward_data(
        self, call: Callable, values: Sequence, errors: Sequence, y: Tensor, unit: float
    ) -> Tensor:
        """weight * (gradient - delta), where delta is found from the output, of which weights are rounded."""
        gradient, weight, dim = values[:3]
        delta = (gradient * weight).sum(dim, True)
        off = (gradient - delta).abs()
        e = rounding(weight, self.dtype) + errors[1]
        of_delta = _spread(lambda e, c: (e * c).sum(dim, True), e, gradient, UNIT * delta.abs())
        return errors[1] * (off + of_delta) + weight * (errors[0] + of_delta + 3 * UNIT * off)

    def _log_softmax_backward_data(
        self, call: Callable, values: Sequence, errors: Sequence, y: Tensor, unit: float
    ) -> Tensor:
        gradient, output, dim = values[:3]
        weight, total = output.exp(), gradient.sum(dim, True).abs()
        of_total = (errors[0] + UNIT * gradient.abs()).sum(dim, True)
        return (
            errors[0]
            + weight * ((errors[1] + 4 * UNIT) * total + of_total)
            + UNIT * (gradient.abs() + y.abs())
        )


def may_be_off(tensor: Tensor, error: Tensor) -> Tensor:
    """`tensor`. Where bounds are kept, a kernel may be off by `error` more there."""
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, Bounds):
            with _disable_current_modes():
                mode.give(tensor, mode.of(tensor) + error / mode.scale)
    return tensor


def _tensors(parts: Sequence) -> Iterator[Tensor]:
    """Those among an operation's arguments or results, lists included."""
    for part in parts:
        if isinstance(part, Tensor):
            yield part
        elif isinstance(part, (list, tuple)):
            yield from _tensors(part)


def _made(result: Any, given: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of numbers in a result that are no views of what was given."""
    storages = {t.untyped_storage()._cdata for t in given}
    found = [y for y in _tensors([result]) if y.is_floating_point()]
    return [y for y in found if y.untyped_storage()._cdata not in storages]


def _spread(product: Callable[[Tensor, Tensor], Tensor], e: Tensor, c: Tensor, shared: Tensor) -> Tensor:
    """Of a sum of errors `e` times `c`."""
    independent = DEVIATIONS * product(e.square(), c.square()).sqrt()
    return torch.minimum(
        product(e, c.abs()), torch.hypot(torch.maximum(product(e, c).abs(), shared), independent)
    )
