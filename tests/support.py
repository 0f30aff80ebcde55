"""The one judge of outputs and gradients, and the mods, masks and layouts that tests share as data."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flex_inductor import AuxRequest, BlockMask, create_block_mask, decisions, flex_attention
from flex_inductor.mod_ir.arguments import score_dtype
from flex_inductor.reference import reference
from tests.bounds import Bounds, rounding

# The judge.


class Result(NamedTuple):
    """Everything one forward and backward gives."""

    out: Tensor
    lse: Tensor
    max_scores: Tensor
    d_query: Tensor
    d_key: Tensor
    d_value: Tensor
    d_captures: tuple[Tensor | None, ...]

    def named(self) -> dict[str, Tensor]:
        named = dict(zip(self._fields, self[:6], strict=False))
        return named | {f"d_captures[{i}]": t for i, t in enumerate(self.d_captures) if t is not None}


def attention_of(build: Callable | None, scale: float | None = None, attention: Callable = flex_attention):
    """A function of tensors alone, to be called as it is or compiled: `build(*captures)` is the score_mod."""

    def attend(query, key, value, captures, block_mask):
        score_mod = None if build is None else build(*captures)
        aux = AuxRequest(lse=True, max_scores=True)
        out, aux = attention(query, key, value, score_mod, block_mask, scale, enable_gqa=True, return_aux=aux)
        return out, aux.lse, aux.max_scores

    return attend


def dense_of(build: Callable | None, scale: float | None = None):
    """The reference, called as `attention_of(...)` is."""

    def attend(query, key, value, captures, block_mask):
        return reference(query, key, value, None if build is None else build(*captures), block_mask, scale)

    return attend


def run(
    attend: Callable,
    inputs: Sequence[Tensor],
    captures: Sequence[Tensor],
    block_mask: Any,
    *,
    allow_unused: bool = True,
    upstream: torch.dtype | None = None,
    bounds: Bounds | None = None,
) -> Result:
    """Forward and backward with fixed pseudo-random upstream gradients of the output and of the lse.

    These are rounded to the dtype `upstream`, or that of the inputs.
    Tensors that nothing depends on have zeros for their gradient, or are refused.
    """
    query, key, value = (t.detach().requires_grad_() for t in inputs)
    captures = [c.detach().requires_grad_(c.is_floating_point()) for c in captures]
    out, lse, max_scores = attend(query, key, value, tuple(captures), block_mask)
    generator = torch.Generator().manual_seed(1)
    given = [
        torch.randn(t.shape, dtype=torch.float64, generator=generator).to(upstream or query.dtype).to(t)
        for t in (out, lse)
    ]
    if bounds is not None:
        bounds.give_delta(out, *given)
    wanted = [query, key, value, *(c for c in captures if c.requires_grad)]
    # A row without live lanes has lse -inf; its gradient must vanish whatever comes from above.
    grads = torch.autograd.grad((out, lse), wanted, given, allow_unused=allow_unused)
    grads = [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, grads, strict=True)]
    found = iter(grads[3:])
    d_captures = tuple(next(found) if c.requires_grad else None for c in captures)
    return Result(out.detach(), lse.detach(), max_scores.detach(), *grads[:3], d_captures)


def judge(
    attend: Callable,
    dense: Callable,
    inputs: Sequence[Tensor],
    captures: Sequence[Tensor] = (),
    block_mask: BlockMask | None = None,
    constant: Sequence[str] = (),
    by_ratio: bool = True,
    roundings: Mapping[str, Tensor] | None = None,
) -> Result:
    """Assert that each element of what `attend` gives is within its bound of dense attention in fp64.

    `inputs` (query, key, value) have the dtype and layout under test; floating captures are given to
    both in the values they have in that dtype. `constant` are the gradients that `attend` gives none of. `attend` may
    put into `roundings` what its results are rounded beside, by name.
    Bounds of captured gradients are wide, as thousands of lanes add up to one: with `by_ratio` they are also judged by
    the error of dense attention in the same dtype. It is no measure where a gradient is cancellation and little else.
    """
    dtype = inputs[0].dtype
    captures = [c.to(dtype) if c.is_floating_point() else c for c in captures]
    gold, allowed = bounded(
        dtype,
        captures,
        lambda wide, bounds: run(
            dense, [t.double() for t in inputs], wide, block_mask, upstream=dtype, bounds=bounds
        ).named(),
    )
    ours = run(attend, inputs, captures, block_mask)
    assert not any(getattr(ours, name).any() for name in constant)
    ours = ours._replace(**{name: gold[name].to(dtype) for name in constant})
    allowed |= {name: torch.full_like(gold[name], torch.inf) for name in constant}
    allowed |= {name: allowed[name] + more for name, more in (roundings or {}).items()}
    assert_within(ours.named(), gold, allowed)
    if by_ratio and any(c.is_floating_point() for c in captures):
        gold, eager = _exact_and_in_dtype(dense, inputs, captures, block_mask)
        others = {name: gold[name] for name in gold if not name.startswith("d_captures")}
        alone = [name for name in gold if name not in others and gold[name].numel() == 1]
        if alone:  # the error of one number may be small by chance: it is the larger one of two
            turned = _exact_and_in_dtype(dense, [t.flip(2) for t in inputs], captures, block_mask)
            for name in alone:
                errors = [
                    (rounded[name].double() - exact[name]).abs() for exact, rounded in ((gold, eager), turned)
                ]
                eager[name] = gold[name] + torch.maximum(*errors)
        assert_accurate(ours.named() | others, eager | others, gold, dtype)
    for name, like, got in zip("qkv", inputs, ours[3:6], strict=True):
        assert got.dtype == like.dtype, f"gradient of {name}: {got.dtype} instead of {like.dtype}"
    return ours


def _exact_and_in_dtype(dense, inputs, captures, block_mask) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What dense attention gives in fp64, and in the inputs' dtype.

    fp64 gets the gradients from above unrounded: what rounding them does counts among the errors of dense attention.
    """
    wide = [c.double() if c.is_floating_point() else c for c in captures]
    exact = run(dense, [t.double() for t in inputs], wide, block_mask)
    rounded = run(dense, inputs, captures, block_mask)
    return exact.named(), rounded._replace(d_value=exact.d_value, lse=exact.lse).named()


def bounded(
    dtype: torch.dtype,
    captures: Sequence[Tensor],
    dense: Callable[[list[Tensor], Bounds], dict[str, Tensor]],
    rounded: Sequence[Tensor] = (),
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What dense attention gives in fp64, and how far each element of a kernel's results may be off.

    `dense` is called with `captures` in fp64. A kernel may round `rounded`, which `dense` reads, to the dtype.
    """
    bounds, wide = Bounds(dtype), [c.double() if c.is_floating_point() else c for c in captures]
    for tensor in wide:
        if tensor.is_floating_point():
            bounds.give(tensor, 0.0, bounds.unit)
    for tensor in rounded:
        bounds.give(tensor, rounding(tensor, dtype))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # there are many small operations
    try:
        with bounds:
            gold = dense(wide, bounds)
        return gold, {name: bounds.of_result(name, tensor) for name, tensor in gold.items()}
    finally:
        torch.set_num_threads(threads)


def _compared(
    ours: dict[str, Tensor], gold: dict[str, Tensor], wrong: list[str]
) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Name, what came in fp64, what is right, and where that is finite. What is not is judged here."""
    assert ours.keys() == gold.keys()
    for name, want in gold.items():
        got, finite = ours[name].double(), want.isfinite()
        assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)} instead of {tuple(want.shape)}"
        # Infinities and NaN are exact answers: they must be where the gold has them, and nowhere else.
        if not torch.equal(got[~finite].nan_to_num(0.5), want[~finite].nan_to_num(0.5)):
            wrong.append(f"{name}: infinities or NaN differ")
        if got[finite].isfinite().all():
            yield name, got, want, finite
        else:
            wrong.append(f"{name}: {(~got[finite].isfinite()).sum()} elements are not finite")


def assert_within(ours: dict[str, Tensor], gold: dict[str, Tensor], allowed: dict[str, Tensor]) -> None:
    """Each element's error against `gold` is within what is allowed for it."""
    wrong: list[str] = []
    for name, got, want, finite in _compared(ours, gold, wrong):
        error, most = torch.where(finite, (got - want).abs(), 0.0), allowed[name]
        if (off := error > most).any():
            worst = (error / most).nan_to_num(0.0).argmax()
            at = tuple(int(i) for i in torch.unravel_index(worst, error.shape))
            wrong.append(
                f"{name}: error {error[at]:.3g}, bound {most[at]:.3g} at {at} of {tuple(want.shape)}, "
                f"where {want[at]:.6g} is right; {off.sum()} elements are off"
            )
    assert not wrong, "\n".join(wrong)


# What is left to rounding beside the error of dense attention in the same dtype, in units of eps times
# the largest magnitude in the fp64 result. The result itself may be rounded otherwise: one unit of its
# dtype, two where a sum of such follows. Sums in fp32 or fp64 may run in another order: up to 7 units were
# measured over the matrix, and up to 28 in gradients of captured tensors, where thousands of lanes add up
# and mostly cancel, so that the sum is small beside what was summed, in the captures' dtype too where the
# mod itself computes in it (2.3 units measured). A dropped term, a wrong scale or an
# accumulator of too few bits is orders of magnitude above. Gradients that are nothing but cancellation
# (one key, a bias that is the same along a row) are rounding of sums of terms as large as the gradient of value:
# the unit of their sums, not of their results, is never smaller than its.
RESULT_ROUNDINGS, SUM_ROUNDINGS = 2, 16
CAPTURE_RESULT_ROUNDINGS, CAPTURE_SUM_ROUNDINGS = 4, 96


def assert_accurate(
    ours: dict[str, Tensor],
    eager: dict[str, Tensor],
    gold: dict[str, Tensor],
    dtype: torch.dtype,
) -> None:
    """Each tensor's error against `gold` is within the error of `eager` plus rounding: where bounds are wide or none."""
    wrong: list[str] = []
    # The weights of a backward pass are exp(score - lse), with an lse that was rounded: they are as far off, and so
    # are all gradients. Beyond 16 that is most of what rounding does: at 59, 7.6e-6 of the gradient of key was measured
    # in fp32, and 5.3e-6 with no other rounding in the exponent.
    exponent = _largest(gold["lse"]) if "lse" in gold else 0.0
    for name, got, want, finite in _compared(ours, gold, wrong):
        if not finite.any():
            continue
        error = (got - want)[finite].abs().max().item()
        eager_error = (eager[name].double() - want)[finite].abs().nan_to_num(0.0).max().item()
        captured = name.startswith("d_captures")
        results = CAPTURE_RESULT_ROUNDINGS if captured else RESULT_ROUNDINGS
        sums = CAPTURE_SUM_ROUNDINGS if captured else SUM_ROUNDINGS
        own = summed = _largest(want)
        if name.startswith("d_"):
            summed = max(own, _largest(gold["d_value"]))
            sums = max(sums, exponent)
        rounding = results * torch.finfo(ours[name].dtype).eps * own
        rounding += sums * torch.finfo(score_dtype(dtype)).eps * summed
        if error > eager_error + rounding:
            wrong.append(f"{name}: error {error:.3g}, dense eager {eager_error:.3g}, rounding {rounding:.3g}")
    assert not wrong, "\n".join(wrong)


def _largest(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


# Mods.


MADE = 48


def of_converted_positions(table):
    """A score_mod that takes positions for truth values and for numbers of fewer bits; the table has 128 entries."""

    def score_mod(score, b, h, q_idx, kv_idx):
        apart, product = q_idx - kv_idx, q_idx * kv_idx * 30
        score = torch.where(apart.bool(), score, 0.5 * score) + 0.01 * product.to(torch.int8)
        score = score + 0.01 * apart.to(torch.uint8) + 1e-4 * product.to(torch.int16)
        score = score + torch.logical_not(apart) + torch.logical_and(apart, q_idx % 3).to(torch.int32)
        score = score + 1e-9 * (product.long() * 2**31 + kv_idx).int()
        # Of these indices some are negative, and count from the end.
        return score + table[product.to(torch.int8).long()] + table[(product.long() * 2**24).int() // 2**24]

    return score_mod


def makes_tables():
    """A score_mod for two heads and MADE tokens, which captures nothing."""

    def score_mod(score, b, h, q_idx, kv_idx):
        places = torch.arange(3, 3 + 2 * MADE, 2)
        far = (places.flip(0)[q_idx] - torch.arange(MADE)[kv_idx] // 5) * 0.02
        filled = torch.full((2, MADE), 0.5)[h, q_idx] * torch.zeros(2)[h]
        padded = torch.nn.functional.pad(torch.arange(MADE - 9.0), (4, 5), value=7.0)
        far = far + padded[kv_idx] * 0.1
        return score + far + filled + torch.eye(MADE)[q_idx, kv_idx] * torch.ones(MADE)[kv_idx]

    return score_mod


class Sizes(NamedTuple):
    """The shape of one call."""

    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    queries: int = 70
    keys: int = 100
    head_dim: int = 16
    value_dim: int = 24
    kv_batch: int | None = None  # as batch

    def inputs(self, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        kv_batch = self.batch if self.kv_batch is None else self.kv_batch
        shapes = (
            (self.batch, self.heads, self.queries, self.head_dim),
            (kv_batch, self.kv_heads, self.keys, self.head_dim),
            (kv_batch, self.kv_heads, self.keys, self.value_dim),
        )
        return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]


class Mod(NamedTuple):
    """A score_mod: what it captures for a given shape, and the function of one lane."""

    captures: Callable[[Sizes], tuple[Tensor, ...]]
    build: Callable | None


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def _alibi(slopes):
    return lambda score, b, h, q_idx, kv_idx: score - slopes[h] * (q_idx - kv_idx).abs()


def _softcap():
    return lambda score, b, h, q_idx, kv_idx: 2.0 * torch.tanh(score / 2.0)


def _relative_bias(bias):
    middle = bias.size(0) // 2
    return lambda score, b, h, q_idx, kv_idx: score + bias[q_idx - kv_idx + middle]


def _bucketed_bias(table, bucket):
    return lambda score, b, h, q_idx, kv_idx: score + table[h, bucket[q_idx, kv_idx]]


def _position_bias(bias):
    return lambda score, b, h, q_idx, kv_idx: score + bias[q_idx] + bias[kv_idx]


def _learned_temperature(temperature, gate):
    return lambda score, b, h, q_idx, kv_idx: (
        score * temperature.exp() + torch.sigmoid(gate[b, h, q_idx]) * score
    )


def _buckets(sizes: Sizes) -> Tensor:
    return (torch.arange(sizes.queries)[:, None] - torch.arange(sizes.keys)).clamp(-3, 3) + 3


MODS = {
    "plain": Mod(lambda s: (), None),
    "alibi": Mod(lambda s: (torch.linspace(0.01, 0.3, s.heads, dtype=torch.float64),), _alibi),
    "softcap": Mod(lambda s: (), _softcap),
    "relative_bias": Mod(lambda s: (_normal(2 * max(s.queries, s.keys) + 1),), _relative_bias),
    "bucketed_bias": Mod(lambda s: (_normal(s.heads, 7), _buckets(s)), _bucketed_bias),
    "position_bias": Mod(lambda s: (_normal(max(s.queries, s.keys)),), _position_bias),
    "learned_temperature": Mod(
        lambda s: (_normal() * 0.1, _normal(s.batch, s.heads, s.queries)), _learned_temperature
    ),
}


# Masks.


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def sliding_window(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 20)


def prefix(b, h, q_idx, kv_idx):
    return (kv_idx < 9) | (q_idx >= kv_idx)


def per_head(b, h, q_idx, kv_idx):
    return q_idx - kv_idx > 5 * h - 12


def _document(sizes: Sizes):
    document = torch.arange(max(sizes.queries, sizes.keys)) * 3 // max(sizes.queries, sizes.keys)
    return lambda b, h, q_idx, kv_idx: document[q_idx] == document[kv_idx]


def _per_batch(sizes: Sizes):
    lengths = torch.tensor([sizes.keys - sizes.keys // (2 + b) for b in range(sizes.batch)])
    return lambda b, h, q_idx, kv_idx: kv_idx < lengths[b]


def _block_mask(mask_mod: Callable, sizes: Sizes, by_batch=False, by_head=False, block=32) -> BlockMask:
    batch, heads = sizes.batch if by_batch else None, sizes.heads if by_head else None
    device = torch.get_default_device()
    return create_block_mask(
        mask_mod, batch, heads, sizes.queries, sizes.keys, device=device, BLOCK_SIZE=block
    )


def _blocks_only(sizes: Sizes, block: int = 32) -> BlockMask:
    """Every query block sees the first and the last KV block, whole: there is no mask_mod."""
    rows, columns = -(-sizes.queries // block), -(-sizes.keys // block)
    counts = torch.full((1, 1, rows), min(2, columns), dtype=torch.int32)
    order = [columns - 1, *range(columns - 1)]
    indices = torch.tensor(order, dtype=torch.int32).expand(1, 1, rows, columns).contiguous()
    return BlockMask.from_kv_blocks(
        counts, indices, BLOCK_SIZE=block, seq_lengths=(sizes.queries, sizes.keys)
    )


MASKS: dict[str, Callable[[Sizes], BlockMask | None]] = {
    "none": lambda s: None,
    "causal": lambda s: _block_mask(causal, s),
    "sliding_window": lambda s: _block_mask(sliding_window, s, block=16),
    "prefix": lambda s: _block_mask(prefix, s, block=(16, 64)),
    "document": lambda s: _block_mask(_document(s), s),
    "per_batch": lambda s: _block_mask(_per_batch(s), s, by_batch=True, block=(64, 16)),
    "per_head": lambda s: _block_mask(per_head, s, by_head=True, block=128),
    "blocks_only": _blocks_only,
}


# Layouts: the same values, elsewhere in memory.


def _transposed(t: Tensor) -> Tensor:
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def _strided(t: Tensor) -> Tensor:
    padded = t.new_full((t.size(0), t.size(1), 2 * t.size(2), t.size(3)), float("nan"))
    padded[:, :, ::2] = t
    return padded[:, :, ::2]


def _head_dim_slice(t: Tensor) -> Tensor:
    padded = t.new_full((*t.shape[:3], t.size(3) + 5), float("nan"))
    padded[..., 2:-3] = t
    return padded[..., 2:-3]


def _head_dim_stride(t: Tensor) -> Tensor:
    return t.transpose(2, 3).contiguous().transpose(2, 3)


def _expanded(t: Tensor) -> Tensor:
    return t[:, :1].contiguous().expand(t.shape)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "bshd": _transposed,
    "strided": _strided,
    "head_dim_slice": _head_dim_slice,
    "head_dim_stride": _head_dim_stride,
    "expanded": _expanded,  # every head has the values of the first
}


# Routes.


@contextlib.contextmanager
def served_by(*routes: str) -> Iterator[None]:
    """What is compiled inside is served by these routes, in this order; by a single one however often.

    A compiled call falls to another route without a word, and then a test would be of something else.
    """
    decisions(clear=True)
    yield
    found = decisions()
    chosen = [decision.chosen for decision in found]
    expected = list(routes) if len(routes) > 1 else list(routes) * max(1, len(found))
    assert chosen == expected, f"served by {chosen}, not {expected}\n" + "\n\n".join(map(str, found))


def logits(build, query, key, captures, block_mask):
    """Dense scores [B, H, M, N], after score_mod and mask."""
    b, h, m, n = (torch.arange(size) for size in (*query.shape[:3], key.size(2)))
    grid = b.view(-1, 1, 1, 1), h.view(-1, 1, 1), m.view(-1, 1), n
    scores = query @ key.repeat_interleave(query.size(1) // key.size(1), 1).mT * query.size(-1) ** -0.5
    if build is not None:
        scores = build(*captures)(scores, *grid)
    return scores if block_mask is None else scores.masked_fill(~block_mask.mask_mod(*grid), -torch.inf)


def and_sinks(scores, sinks):
    """The scores [B, H, M, N] of each row and its sink, as one row."""
    column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], -1)


def judge_call(case, attend, dense, compile, more=()):
    """Judge `attend` of a build function and a call, for a case: names of a mod and a mask, sizes, dtype.

    `more` are captured tensors behind those of the mod.
    """
    mod, mask, sizes, dtype = case
    build, captures = (None, ()) if mod is None else (MODS[mod].build, MODS[mod].captures(sizes))
    schedule = None if mask == "none" else MASKS[mask](sizes)
    torch._dynamo.reset()  # it counts all partial functions as one, and stops compiling it after some
    run_it = compile(functools.partial(attend, build))
    judge(run_it, functools.partial(dense, build), sizes.inputs(dtype), [*captures, *more], schedule)


class Cube(torch.autograd.Function):
    """A score_mod may bring its own derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad
