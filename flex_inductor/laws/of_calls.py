"""Laws of each call of flex_attention, whatever the function around it does.

visible  flags [B, H, M, N]: the pairs that the call computes
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from . import errors
from .calls import Call, of_each_kind
from .compare import KEYS, OUT, Moved, moved, noise_like, numbered, rounding, spread, upstream
from .report import Law, NotApplicable, Note

KINDS = 8  # of calls that are looked at
ROWS = 8  # of queries, for each of which all that it does not see is filled with NaN
SHIFT = 1.5  # of the largest logsumexp: scores are then rounded as those of twice their size
LARGE = 1024  # scores up to here are rounded with the weights that they make, larger ones should not be
POISON = (torch.nan, torch.inf, -torch.inf)


def laws_of(calls: Sequence[Call], none: str) -> dict[str, Law]:
    """By name; `none` says why there are no calls."""
    return {
        "masked": of_all(
            calls, none, masked, f"{ROWS} rows of each head, with NaN and Inf in all that they do not see."
        ),
        "shift": of_all(calls, none, shift, "A constant added to all scores."),
        "permutation": of_all(
            calls, none, permutation, "Keys in another order, with their scores and their mask."
        ),
        "schedule": of_all(
            calls, none, schedule, "Every pair, by mask_mod and by the blocks that are visited."
        ),
    }


def of_all(calls: Sequence[Call], none: str, law: Callable[[Call], Iterator[str]], looked_at: str) -> Law:
    """A law of each call as one of all."""

    def run() -> tuple[str, Sequence[str]]:
        kinds = of_each_kind(calls)
        if not kinds:
            raise NotApplicable(none)
        texts: list[str] = []
        left: list[Note] = []
        for call in kinds[:KINDS]:
            try:
                texts += [type(text)(f"{call.name}: {text}") for text in law(call)]
            except NotApplicable as error:
                left.append(Note(f"{call.name}: {error}"))
        if len(left) == min(len(kinds), KINDS):
            raise NotApplicable("; ".join(left))
        if len(kinds) > KINDS:
            left.append(Note(f"{len(kinds) - KINDS} more kinds of calls"))
        return f"{looked_at} {errors.counted(len(calls), len(kinds))}", [*texts, *left]

    return run


@torch.no_grad()
def masked(call: Call) -> Iterator[str]:
    """What a row does not see may hold anything."""
    _plain(call)
    seen = call.visible & ~call.weightless
    if seen.all():
        raise NotApplicable(errors.NOTHING_MASKED)
    out, lse = call.run()
    tried: list[Tensor] = []
    for row in spread(call.sizes[2], ROWS):
        # [B, K, N]: a key is filled if no head that shares it sees it in this row
        filled = ~seen[:, :, row].unflatten(1, (-1, call.group)).any(2)
        if not filled.any() or any(torch.equal(filled, other) for other in tried):
            continue
        tried.append(filled)
        key, value = (_poisoned(tensor, filled) for tensor in (call.key, call.value))
        free = ~(seen & filled.repeat_interleave(call.group, 1).unsqueeze(2)).any(-1)
        found_out, found_lse = call.run(key=key, value=value)
        by_mod = bool((call.weightless & filled.repeat_interleave(call.group, 1).unsqueeze(2)).any())
        if at := moved(found_out, out, free.unsqueeze(-1), rounding(call.value), OUT):
            yield errors.masked("out", at, _keys(filled, at, call.group), by_mod)
            return
        if at := moved(found_lse, lse, free, axes=OUT):
            yield errors.masked("lse", at, _keys(filled, at, call.group), by_mod)
            return
    yield from _unseen_gradients(call, seen)


@torch.enable_grad()
def _unseen_gradients(call: Call, seen: Tensor) -> Iterator[str]:
    """A key that no row sees changes no gradient."""
    filled = ~seen.any(2).unflatten(1, (-1, call.group)).any(2)
    if not filled.any():
        return
    wanted = _gradients(call, call.key, call.value)
    found = _gradients(call, *(_poisoned(tensor, filled) for tensor in (call.key, call.value)))
    by_mod = bool(call.weightless.any())
    for name, got, want in zip(("d query", "d key", "d value"), found, wanted, strict=True):
        if at := moved(got, want, axes=OUT if name == "d query" else KEYS):
            group = call.group if name == "d query" else 1
            yield errors.masked(name, at, _keys(filled, at, group), by_mod)
            return


def _gradients(call: Call, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    tensors = [tensor.detach().clone().requires_grad_() for tensor in (call.query, key, value)]
    out, _ = call.run(**dict(zip(("query", "key", "value"), tensors, strict=True)))
    return torch.autograd.grad(out, tensors, upstream(out))


def _poisoned(tensor: Tensor, filled: Tensor) -> Tensor:
    numbers = torch.tensor(POISON, dtype=tensor.dtype)[torch.arange(tensor.size(2)) % len(POISON)]
    return torch.where(filled.unsqueeze(-1), numbers[:, None], tensor)


def _keys(filled: Tensor, at: Moved, group: int) -> str:
    """The keys that were filled for the batch and head of an element."""
    return numbered(filled[at.at[0], at.at[1] // group].nonzero().flatten().tolist())


@torch.no_grad()
def shift(call: Call) -> Iterator[str]:
    """A constant on all scores is on the logsumexp, and nowhere else."""
    _plain(call)
    mod = call.score_mod

    def score_mod(score: Tensor, *lanes: Tensor) -> Tensor:
        return (score if mod is None else mod(score, *lanes)) + constant

    out, lse = call.run()
    largest = float(lse[lse.isfinite()].abs().max()) if lse.isfinite().any() else 0.0
    constant = 1.7 + SHIFT * largest
    sinks = None if call.sinks is None else call.sinks + constant
    found_out, found_lse = call.run(score_mod=score_mod, sinks=sinks)
    eps = torch.finfo(torch.float64 if out.dtype == torch.float64 else torch.float32).eps
    of_weights = 4 * eps * min(constant, LARGE) * float(call.value.abs().max())
    if at := moved(found_out, out, None, rounding(call.value) + of_weights, OUT):
        yield errors.shift("out", constant, at, largest)
    elif at := moved(found_lse, lse + constant, axes=OUT):
        yield errors.shift("lse", constant, at, largest)


@torch.no_grad()
def permutation(call: Call) -> Iterator[str]:
    """The order of keys means nothing but by the indices that mods see."""
    _plain(call)
    mod, keys = call.score_mod, call.sizes[3]
    if keys < 2:
        raise NotApplicable(errors.ONE_KEY)
    order = torch.randperm(keys, generator=torch.Generator().manual_seed(1))
    place = order.int()  # of each key in the caller's order: mods see indices of this dtype

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        assert mod is not None
        return mod(score, b, h, q_idx, place[kv_idx])

    out, lse = call.run()
    found_out, found_lse = call.run(
        key=call.key[:, :, order],
        value=call.value[:, :, order],
        score_mod=None if mod is None else score_mod,
        table=call.visible[..., order],
    )
    if at := moved(found_out, out, None, rounding(call.value), OUT):
        yield errors.permutation("out", at)
    elif at := moved(found_lse, lse, axes=OUT):
        yield errors.permutation("lse", at)


@torch.no_grad()
def schedule(call: Call) -> Iterator[str]:
    """Blocks that are visited hold every pair that mask_mod lets through, and whole ones no other."""
    _plain(call)
    given = call.given.inputs.schedule
    if given is None:
        raise NotApplicable(errors.NO_SCHEDULE)
    if call.mask_mod is None:
        raise NotApplicable(errors.NO_MASK_MOD)
    allowed, visited, full = call.masked
    blocks = (given.q_block, given.kv_block)
    for wrong, text in (
        (allowed & ~visited, errors.left_out),
        (full & ~allowed, errors.not_masked),
    ):
        if wrong.any():
            pair = tuple(int(i) for i in wrong.nonzero()[0])
            shared = [
                name
                for dim, (name, grid) in enumerate(zip("BH", given.grids, strict=True))
                if grid < allowed.size(dim)
                and not torch.equal(allowed, allowed.narrow(dim, 0, 1).expand_as(allowed))
            ]
            yield text(pair, blocks, int(wrong.sum()), shared)


@torch.no_grad()
def alone_and_in_company(call: Call) -> Iterator[str]:
    """A batch entry gives the same by itself and among others."""
    _plain(call)
    out, lse = call.run()
    generator = torch.Generator().manual_seed(1)
    for b in spread(call.sizes[0], 3):
        for company in ([b], [None, b, None]) if call.sizes[0] > 1 else ([None, b, None],):
            at = company.index(b)
            query, key, value = (
                torch.stack([noise_like(t[b], generator) if own is None else t[own] for own in company])
                for t in (call.query, call.key, call.value)
            )
            found = call.run(query=query, key=key, value=value, **_only(call, b))
            for name, got, want, most in (
                ("out", found[0][at], out[b], rounding(call.value)),
                ("lse", found[1][at], lse[b], None),
            ):
                if moves := moved(got.unsqueeze(0), want.unsqueeze(0), None, most, OUT):
                    moves = moves._replace(at=(b, *moves.at[1:]))
                    yield errors.batch(name, moves, len(company))
                    return


def _only(call: Call, entry: int) -> dict[str, object]:
    """The mods of one batch entry, for all."""
    mod, table = call.score_mod, call.visible[entry]

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        assert mod is not None
        return mod(score, torch.full_like(b, entry), h, q_idx, kv_idx)

    sinks = call.sinks
    return {
        "score_mod": None if mod is None else score_mod,
        "table": table.unsqueeze(0).expand(3, -1, -1, -1) if call.is_masked else None,
        "sinks": sinks if sinks is None or sinks.size(0) == 1 else sinks[entry, None],
    }


def _plain(call: Call) -> None:
    if reason := call.not_plain:
        raise NotApplicable(reason)
