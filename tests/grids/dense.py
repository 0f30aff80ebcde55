"""Dense attention as its formula has it: what is right, and what rounding to the inputs' dtype makes of it.

One sequence and one head of keys at a time, with the query heads that share it. Inputs of 16 bits are exact in fp32,
in which all is computed for them: that is 2^-16 of what their own rounding is, or less, and faster than fp64, in which
other inputs are. Nothing here is the product's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

INF = float("inf")
FEW = 64  # rows, or keys, of which rounding the output may be most of a gradient's error


class Meaning(NamedTuple):
    """What is the same for all sequences of a call."""

    scale: float
    softcap: float = 0.0
    left: float = INF
    right: float = INF
    chunk: int = 0
    dropout_p: float = 0.0
    rng_state: tuple[int, int] = (0, 0)
    places_are_aligned: bool = False  # whether dropout sees queries where they stand beside the keys
    sinks: Tensor | None = None  # [H]
    score_mod: Callable[..., Tensor] | None = None
    mask_mod: Callable[..., Tensor] | None = None


class Sequence(NamedTuple):
    """One sequence: queries [M, H, D], keys [N, Hk, D], values [N, Hk, V], and what comes from above."""

    number: int
    query: Tensor
    key: Tensor
    value: Tensor
    slopes: Tensor | None = None  # [H], of ALiBi
    upstream: Tensor | None = None  # [M, H, V]; None if no gradient is taken
    upstream_lse: Tensor | None = None  # [H, M]


def dense(sequence: Sequence, meaning: Meaning, kv_head: int, dtype: torch.dtype) -> tuple[dict, dict]:
    """What is right, and what is made in `dtype` with scores in fp32: out, lse, d_query, d_key, d_value.

    Of the heads that share `kv_head`: out [G, M, V], lse [G, M].
    """
    narrow = dtype.itemsize <= 2
    right = _Pass(sequence, meaning, kv_head, torch.float32 if narrow else torch.float64)
    results = right.results(None)
    if narrow:
        return results, right.results(dtype)
    return results, _Pass(sequence, meaning, kv_head, dtype).results(None)


class _Pass:
    """Weights and what they depend on, all in one dtype."""

    def __init__(self, sequence: Sequence, meaning: Meaning, kv_head: int, wide: torch.dtype) -> None:
        self.sequence, self.meaning = sequence, meaning
        group = sequence.query.size(1) // sequence.key.size(1)
        heads = slice(kv_head * group, (kv_head + 1) * group)
        self.query = sequence.query[:, heads].transpose(0, 1).to(wide)  # [G, M, D]
        self.key, self.value = sequence.key[:, kv_head].to(wide), sequence.value[:, kv_head].to(wide)
        (g, m, _), n = self.query.shape, self.key.size(0)
        scores = _product(self.query, self.key.mT).mul_(meaning.scale)
        self.largest = scores.abs().max().item() if scores.numel() else 0.0
        # Where a query stands beside the keys: the last one at the last key.
        at, place = torch.arange(m).add_(n - m).unsqueeze(1), torch.arange(n)
        h = torch.arange(heads.start, heads.stop).view(-1, 1, 1)
        b = torch.tensor(sequence.number)
        self.back = None  # from the gradient of the score that is weighed to that of the product
        if meaning.score_mod is not None:
            scores = self._modified(scores, b, h, at - (n - m), place)
        if meaning.softcap:
            capped = scores.div_(meaning.softcap).tanh_()
            slope = 1 - capped.square()
            self.back = lambda grad: grad.mul_(slope)
            scores = capped.mul_(meaning.softcap)
        if sequence.slopes is not None:
            slopes = sequence.slopes[heads].to(wide).view(-1, 1, 1)
            scores.sub_(slopes * (at - place).abs_())
        hidden = _hidden(meaning, at, place)
        if meaning.mask_mod is not None:
            hidden = ~meaning.mask_mod(b, h, at - (n - m), place)
        if hidden is not None:
            scores.masked_fill_(hidden, -INF)
        peak = scores.amax(-1, keepdim=True) if n else scores.new_full((g, m, 1), -INF)
        sinks = None if meaning.sinks is None else meaning.sinks[heads].to(wide).view(-1, 1, 1)
        if sinks is not None:
            peak = torch.maximum(peak, sinks)
        peak = peak.masked_fill(peak == -INF, 0.0)
        weights = scores.sub_(peak).exp_()
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            of_sink = (sinks - peak).exp()
            total = total + of_sink
        self.lse = total.log().add_(peak).squeeze(-1)
        divisor = torch.where(total == 0, 1.0, total)
        self.weights = weights.div_(divisor)
        self.sink_weights = None if sinks is None else of_sink / divisor
        self.kept = None
        if meaning.dropout_p:
            q_place = at if meaning.places_are_aligned else at - (n - m)
            self.kept = kept(meaning, sequence.number, h, q_place, place).to(wide)
            self.kept *= 65536 / (65536 - round(meaning.dropout_p * 65536))
        self.grad = None
        if sequence.upstream is not None:
            self.grad = sequence.upstream[:, heads].transpose(0, 1).to(wide)
            self.d_weights = _product(self.grad, self.value.mT)
            if self.kept is not None:
                self.d_weights.mul_(self.kept)
        self.grad_lse = None if sequence.upstream_lse is None else sequence.upstream_lse[heads].to(wide)

    def _modified(self, scores: Tensor, *lane: Tensor) -> Tensor:
        leaf = scores.requires_grad_()
        with torch.enable_grad():
            made = self.meaning.score_mod(leaf, *lane).expand(scores.shape)
        self.back = lambda grad: torch.autograd.grad(made, leaf, grad, retain_graph=True)[0]
        return made.detach().clone()

    def results(self, dtype: torch.dtype | None) -> dict[str, Tensor]:
        """With weights and their gradients rounded to `dtype`, and all results."""
        rounded = (lambda t: t) if dtype is None else (lambda t: t.to(dtype))
        weights = self.weights if self.kept is None else self.weights * self.kept
        weights = rounded(weights)
        out = _product(weights, rounded(self.value))
        results = {"out": out, "lse": self.lse}
        if self.grad is None:
            return results
        g, m, _ = self.query.shape
        dots = (self.grad * out).sum(-1, keepdim=True)
        if self.grad_lse is not None:
            dots = dots - self.grad_lse.unsqueeze(-1)
        if min(m, self.key.size(0)) <= FEW:
            # A deviation of `dots`, in roundings of the output, as a backward has it stored.
            off = (self.grad * out).square().sum(-1, keepdim=True).sqrt() * self.meaning.scale
            results["noise_of_d_query"] = (off * _product(self.weights, self.key)).abs()
            terms = (off * self.weights).square().reshape(g * m, -1).mT
            results["noise_of_d_key"] = (terms @ self.query.square().reshape(g * m, -1)).sqrt()
        d_scores = (self.d_weights - dots).mul_(self.weights)
        d_scores = d_scores if self.back is None else self.back(d_scores)
        d_scores = rounded(d_scores.mul_(self.meaning.scale))
        results["d_query"] = _product(d_scores, rounded(self.key))
        results["d_key"] = _matmul(d_scores.reshape(g * m, -1).mT, rounded(self.query).reshape(g * m, -1))
        results["d_value"] = _matmul(weights.reshape(g * m, -1).mT, rounded(self.grad).reshape(g * m, -1))
        if self.sink_weights is not None:
            results["d_sinks"] = -(self.sink_weights * dots).sum((1, 2))
            # What the output's rounding adds up to over rows, in units of its own.
            terms = self.sink_weights.squeeze(-1).square() * (self.grad * out).square().sum(-1)
            results["noise_of_d_sinks"] = terms.sum(1).sqrt()
        return results


def _product(left: Tensor, right: Tensor) -> Tensor:
    """[G, M, K] @ [K, N], as one product of matrices."""
    g, m, k = left.shape
    return _matmul(left.reshape(g * m, k), right).view(g, m, right.size(-1))


def _matmul(left: Tensor, right: Tensor) -> Tensor:
    """Summed up in fp32 and rounded once. On CPUs fp16's own product takes 30 times as long."""
    if left.dtype == torch.float16:
        return (left.float() @ right.float()).half()
    return left @ right


def _hidden(meaning: Meaning, at: Tensor, place: Tensor) -> Tensor | None:
    """Which keys a query must not see [M, N]; None if it sees all."""
    hidden = None
    at, place = at.int(), place.int()
    if meaning.right != INF:
        hidden = place > at + int(meaning.right)
    if meaning.left != INF:
        before = place < at - int(meaning.left)
        hidden = before if hidden is None else hidden.logical_or_(before)
    if meaning.chunk:
        chunks = (t.div(meaning.chunk, rounding_mode="floor") for t in (at, place))
        other = torch.ne(*chunks)
        hidden = other if hidden is None else hidden.logical_or_(other)
    return hidden


# Dropout, as docs/softmax.md has it.


def kept(meaning: Meaning, b: int, h: Tensor, at: Tensor, place: Tensor) -> Tensor:
    """Which weights [G, M, N] are kept. A word serves eight scores: it is made once for them all."""
    dropped = round(meaning.dropout_p * 65536)
    lines, line = torch.unique(at.flatten() & ~8, return_inverse=True)
    columns, column = torch.unique(place & ~24, return_inverse=True)
    seed, offset = meaning.rng_state
    counter = [
        columns % 2**32, lines.view(-1, 1) % 2**32, (h * 2**21 + b) % 2**32, torch.tensor(offset % 2**32),
    ]  # fmt: skip
    words = torch.stack(_philox([t.expand(h.numel(), lines.numel(), columns.numel()) for t in counter], seed))
    halves = torch.stack([words % 2**16, words // 2**16]) >= dropped  # [half, word, h, line, column]
    at = at.flatten()
    chosen = halves[
        (place & 16).div(16, rounding_mode="floor").expand(at.numel(), -1),
        (at & 8).unsqueeze(1) // 4 + (place & 8) // 8,
        :,
        line.unsqueeze(1),
        column,
    ]
    return chosen.permute(2, 0, 1)


def _philox(words: list[Any], seed: int) -> list[Any]:
    keys = [seed % 2**32, (seed >> 32) % 2**32]
    for _ in range(7):
        (high_0, low_0), (high_2, low_2) = _words(words[0], 0xD2511F53), _words(words[2], 0xCD9E8D57)
        words = [high_2 ^ words[1] ^ keys[0], low_2, high_0 ^ words[3] ^ keys[1], low_0]
        keys = [(key + step) % 2**32 for key, step in zip(keys, (0x9E3779B9, 0xBB67AE85), strict=True)]
    return words


def _words(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The high and the low word of x * factor, without leaving int64."""
    low = (x & 0xFFFF) * factor
    high = (x >> 16) * factor + (low >> 16)
    return high >> 16, (high & 0xFFFF) << 16 | (low & 0xFFFF)
