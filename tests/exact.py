"""Calls whose every product and sum is a number of their dtype, and what they give, without exp or softmax.

Scores of a row are either so steep that the last key it sees has all the weight ("last"), or equal, and then rows count
that see a power of two of keys ("even"). Numbers are small and whole. Queries and keys share only the dimension
that makes scores steep, so whole gradients of both are there though scores are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flex_inductor import AuxRequest
from tests.support import LAYOUTS, Sizes

SCALE = 0.25
STEP = 128.0  # from the score of a key to the next: exp(-STEP) is 0 in fp32
UNIT = 2.0**-16  # of gradients, where at most 128 keys are seen
ALL = AuxRequest(lse=True, max_scores=True)


class Exact(NamedTuple):
    """A call of dense tensors, what comes from above, and which keys each row sees."""

    tensors: list[Tensor]  # query, key, value, and a table that score_mod adds: STEP * kv_idx, or zeros
    above: list[Tensor]  # gradients of the output and of the logsumexp
    visible: Tensor
    kind: str

    def expected(self) -> dict[str, Tensor]:
        """In fp64."""
        query, key, value, table = (t.double() for t in self.tensors)
        d_out, d_lse = (t.double() for t in self.above)
        shape = (*query.shape[:3], key.size(2))
        group, visible = query.size(1) // key.size(1), self.visible.expand(shape)
        key, value = (t.expand(len(query), -1, -1, -1).repeat_interleave(group, 1) for t in (key, value))
        scores = query @ key.mT * SCALE + table
        peak = scores.masked_fill(~visible, -torch.inf).amax(-1)
        weights = (visible & (scores == peak.unsqueeze(-1))).double()
        seen = weights.sum(-1, True)
        weights = weights / seen.clamp(min=1)
        out, d_weights = weights @ value, d_out @ value.mT
        d_scores = weights * (d_weights - (out * d_out).sum(-1, True) + d_lse.unsqueeze(-1))

        def of_kv(gradient: Tensor, like: Tensor) -> Tensor:
            gradient = gradient.unflatten(1, (-1, group)).sum(2)
            return gradient.sum(0, True) if len(like) < len(gradient) else gradient

        return {
            "out": out * self.counts().unsqueeze(-1),
            "max_scores": peak,
            "lse": peak + seen.squeeze(-1).log(),
            "d_query": d_scores @ key * SCALE,
            "d_key": of_kv(d_scores.mT @ query * SCALE, self.tensors[1]),
            "d_value": of_kv(weights.mT @ d_out, self.tensors[2]),
            "d_table": d_scores.sum((0, 1, 2)),
        }

    def counts(self) -> Tensor:
        """Rows whose weights are powers of two."""
        query, key = self.tensors[:2]
        seen = self.visible.expand(*query.shape[:3], key.size(2)).sum(-1)
        return (seen & (seen - 1)) == 0 if self.kind == "even" else torch.ones_like(seen, dtype=torch.bool)


def exact(
    kind: str,
    by: str,
    sizes: Sizes,
    dtype: torch.dtype,
    visible: Tensor,
    layout: str = "contiguous",
    positions=None,
) -> Exact:
    """Scores are made steep by "table" or by "keys", at the `positions` of keys."""
    generator = torch.Generator().manual_seed(0)
    drawn = lambda *shape: torch.randint(-1, 2, shape, generator=generator).to(dtype)  # noqa: E731
    query, key, value = (drawn(*t.shape) for t in sizes.inputs(dtype))
    half = sizes.head_dim // 2
    query[..., :half], key[..., half:] = 0, 0
    places = (torch.arange(sizes.keys) if positions is None else positions).to(dtype)
    steep = kind == "last"
    query[..., 0] = 1 if steep and by == "keys" else 0
    key[..., 0] = places * (STEP / SCALE) if steep and by == "keys" else key[..., 0]
    table = STEP * places if steep and by == "table" else torch.zeros_like(places)
    tensors = [*(LAYOUTS[layout](t) for t in (query, key, value)), table]
    rows = (sizes.batch, sizes.heads, sizes.queries)
    call = Exact(tensors, [drawn(*rows, sizes.value_dim), drawn(*rows).float()], visible, kind)
    if kind == "even":  # one number in each row, so that gradients of scores have 8 bits, as bf16 has
        column = torch.randint(0, sizes.value_dim, (*rows, 1), generator=generator)
        only = torch.zeros_like(call.above[0]).scatter(-1, column, 1) * call.counts().unsqueeze(-1)
        call.above[:] = [only, torch.zeros_like(call.above[1])]
    return call


def visible_by(mask_mod: Callable | None, sizes: Sizes) -> Tensor:
    if mask_mod is None:
        return torch.ones(1, 1, sizes.queries, sizes.keys, dtype=torch.bool)
    b, h, m, n = (torch.arange(size) for size in (sizes.batch, sizes.heads, sizes.queries, sizes.keys))
    return mask_mod(b.view(-1, 1, 1, 1), h.view(-1, 1, 1), m.view(-1, 1), n)


def add(table: Tensor) -> Callable:
    return lambda score, b, h, q_idx, kv_idx: score + table[kv_idx]


def assert_exact(
    call: Exact, attend: Callable, gradients: Sequence[str] = ("d_query", "d_key", "d_value", "d_table")
) -> None:
    """`attend` of the tensors gives out, lse and max_scores, whose bits and those of `gradients` are right."""
    tensors = [t.detach().requires_grad_() for t in call.tensors]
    assert_bits(call, results(attend, tensors, call.above, gradients))


def results(
    attend: Callable, tensors: Sequence[Tensor], above: Sequence[Tensor], gradients: Sequence[str]
) -> dict[str, Tensor]:
    """What `attend` gives of the tensors, and the gradients of these names."""
    found = dict(zip(("out", "lse", "max_scores"), attend(*tensors), strict=True))
    if gradients:
        named = dict(zip(("d_query", "d_key", "d_value", "d_table"), tensors, strict=True))
        grads = torch.autograd.grad((found["out"], found["lse"]), [named[name] for name in gradients], above)
        found |= dict(zip(gradients, grads, strict=True))
    return {name: t.detach() for name, t in found.items()}


def assert_bits(call: Exact, found: dict[str, Tensor]) -> None:
    """The bits of what was found are right.

    Weights of a backward are exp(score - lse), and the logarithm of a power of two is not a number of fp32. Where they
    are not 0 and 1, gradients in fp32 must be right once rounded to the multiples of UNIT, of which they are all
    multiples, and others be the right ones rounded.
    """
    want = call.expected()
    wrong = []
    for name, got in found.items():
        got, right = got.double(), want[name]
        rounded = call.kind == "even" and (name == "lse" or name.startswith("d_"))
        assert rounded or torch.equal(right.to(found[name].dtype).double(), right), f"{name} is not exact"
        if name == "out":
            got = got * call.counts().unsqueeze(-1)
        if name == "lse" and rounded:
            same = torch.isclose(got, right, rtol=1e-6, atol=1e-6)
        elif rounded and found[name].dtype == torch.float32:
            same = ((got / UNIT).round() * UNIT == right) & ((got - right).abs() < UNIT / 4)
        elif rounded:
            same = (got - right).abs() <= right.abs() * (
                torch.finfo(found[name].dtype).eps / 2 + UNIT
            ) + UNIT / 4
        else:
            same = got == right
        if not same.all():
            at = tuple((~same).nonzero()[0].tolist())
            wrong.append(
                f"{name}: {got[at]} instead of {right[at]} at {at}, {(~same).sum()} of {same.numel()} are off"
            )
    assert not wrong, "\n".join(wrong)
