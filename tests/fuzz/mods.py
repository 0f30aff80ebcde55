"""Score_mods and mask_mods as text, and what such text may name."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.support import Sizes

CARDS = ("sm_80", "sm_90", "sm_100")  # Triton's kernels compiled for them, executed by tools/ptx
CARD = "card"  # the same on this machine's card
TRITON = ("triton", *CARDS, CARD)
ROUTES = ("chunked", "cpu", "triton", *CARDS)
# What mods capture by name, and its shape; "keys" and "queries" change with the call.
CAPTURES = {
    "number": (),
    "few": (5,),
    "table": (3, 4),
    "by_head": ("heads",),
    "by_query": ("queries",),
    "by_key": ("keys",),
}
INDEX_CAPTURES = {
    "codes": lambda sizes, generator: torch.randint(-5, 5, (6,), generator=generator),
    "narrow": lambda sizes, generator: torch.randint(-128, 128, (7,), generator=generator, dtype=torch.int8),
    "order": lambda sizes, generator: torch.randperm(sizes.keys, generator=generator).int(),
}


# What mods call.


class StraightThrough(torch.autograd.Function):
    """Rounded to halves, with the gradient of the unrounded value."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return torch.round(2 * x) / 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad


class ClampedGradient(torch.autograd.Function):
    """The same value, with a gradient that is bounded below.

    Not on both sides: rounding errors are as large as what was cut off, which would be all that is large.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(min=-0.2)


class Shifted(torch.autograd.Function):
    """A number is added, which needs no gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, number):
        return x + number

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad / 2, None


def wide(tensor):
    """In fp32 where it has 16 bits."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def in_place(x, y):
    """Writes into what it has computed."""
    total = x + y
    total.mul_(0.5)
    total += y
    return total


def by_parts(x, y):
    """Writes into parts of what it has made."""
    both = torch.stack([x, y])
    both[0] += both[1]
    both[1] = torch.tanh(both[0])
    return both.sum()


NAMES = {
    "torch": torch,
    "wide": wide,
    "straight_through": StraightThrough.apply,
    "clamped_gradient": ClampedGradient.apply,
    "shifted": Shifted.apply,
    "in_place": in_place,
    "by_parts": by_parts,
}


# Text.


def _joined(template: str, *parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.tuples(*parts).map(lambda found: template.format(*found))


# Of 8 bits, which wrap.
NARROW = st.recursive(
    st.sampled_from(["narrow[q_idx % 7]", "narrow[kv_idx % 7]"]),
    lambda inner: _joined("({0} {1} {2})", inner, st.sampled_from("+-*"), inner),
    max_leaves=2,
)
INDICES = st.recursive(
    st.one_of(
        st.sampled_from(["q_idx", "kv_idx", "h", "b"] * 2),
        st.sampled_from(
            ["codes[kv_idx % 6]", "codes[q_idx % 6]", "order[kv_idx]", "(order[kv_idx] - q_idx)"]
        ),
        _joined("({0}).long()", NARROW),
    ),
    lambda inner: st.one_of(
        _joined("({0} {1} {2})", inner, st.sampled_from("+-*"), inner),
        _joined("({0} {1} {2})", inner, st.sampled_from(["+", "-", "//"]), st.integers(1, 5).map(str)),
        _joined("torch.{1}({0}, {2})", inner, st.sampled_from(["maximum", "minimum"]), inner),
        _joined("({0}).to(torch.{1}).int()", inner, st.sampled_from(["bool", "int8", "int16", "uint8"])),
    ),
    max_leaves=3,
)
CONDITIONS = st.one_of(
    _joined("({0} {1} {2})", INDICES, st.sampled_from([">=", "<", "==", "!="]), INDICES),
    _joined("({0}).bool()", INDICES),
    _joined("torch.logical_{1}({0}, {2})", INDICES, st.sampled_from(["and", "or", "xor"]), INDICES),
)
# What is computed without a score is exact, or in fp32. Rounded to 16 bits it would be most of every side's error, of
# which a single one is luck: exp(2.5) may be off by 0.004, and so may a logsumexp of it, unless dense attention rounds
# that back; and sigmoid(number), off by as much, may be the other one of a maximum.
LOOKUPS = st.one_of(
    _joined("few[{0} % 5]", INDICES),
    _joined("few[{0} % 5 - 5]", INDICES),
    _joined("table[{0} % 3, {1} % 4]", INDICES, INDICES),
    _joined("table[{0} % 3][{1} % 4]", INDICES, INDICES),
    st.sampled_from(["number", "by_head[h]", "by_query[q_idx]", "by_key[kv_idx]", "(by_key * 2)[kv_idx]"]),
    st.sampled_from(["wide(by_key).exp()[kv_idx]", "by_key[order[kv_idx]]", "few[codes[kv_idx % 6]]"]),
    # What a mod makes itself.
    st.sampled_from(
        [
            "torch.arange(7)[q_idx % 7] * wide(number)",
            "torch.ones(2, 3).cumsum(1)[1, kv_idx % 3] - wide(number)",
        ]
    ).map("({})".format),
    st.sampled_from(
        [
            "(torch.full((9,), 0.5)[q_idx % 9] * wide(number))",
            "(torch.eye(5)[q_idx % 5, kv_idx % 5] + wide(number))",
        ]
    ),
    st.sampled_from(["straight_through(by_query[q_idx])", "wide(by_key[order[kv_idx]]) * shift"]).map(
        "({})".format
    ),
    _joined("by_key[{0} % by_key.size(0)]", INDICES),
)
# Products have a bounded factor: what an error of a score grows to stays small.


def _scores(*parts: str) -> st.SearchStrategy[str]:
    """`parts`: what is called on two scores."""
    of_scores = st.sampled_from(
        ["score", "score", "score * 0.5 + 1", "straight_through(score)", "(score - shift)"]
    )
    finite = st.recursive(
        st.one_of(
            of_scores,
            _joined("({0} {1} {2})", of_scores, st.sampled_from("+-"), LOOKUPS),
            _joined("wide({0})", LOOKUPS),
        ),
        lambda inner: st.one_of(
            _joined("torch.{0}({1})", st.sampled_from(["tanh", "sigmoid", "sin", "neg"]), inner),
            _joined("({0}).clamp(-1, 1)", inner),
            _joined("({0} {1} {2})", inner, st.sampled_from("+-"), inner),
            _joined("({0} * torch.sigmoid({1}))", inner, inner),
            _joined("torch.maximum({0}, {1})", inner, inner),
            _joined("torch.where({0}, {1}, {2})", CONDITIONS, inner, inner),
            # A bound holds for the gradient of one score: what it is of must differ from score to score.
            _joined("clamped_gradient({0} + score)", inner),
            _joined("shifted({0}, shift)", inner),
            _joined("{0}({1}, {2})", st.sampled_from(parts), inner, inner),
        ),
        max_leaves=6,
    )
    # Only as the whole score: 0 times infinity is NaN in the gradient of a product, of a masked lane in dense attention
    # alone, and no weight is that of a score of infinity.
    return finite | finite | _joined("torch.where({0}, {1}, -float('inf'))", CONDITIONS, finite)


# The fused kernels hold no tensors in a lane.
SCORES = {
    route: _scores("in_place") if route in ("cpu", *TRITON) else _scores("in_place", "by_parts")
    for route in ("eager", *ROUTES, CARD)
}
WINDOWS = st.recursive(
    st.one_of(
        _joined("(q_idx - kv_idx {0} {1})", st.sampled_from(["<", ">="]), st.integers(-9, 9)),
        _joined("((q_idx // {0}) == (kv_idx // {0}))", st.integers(1, 9)),
        _joined("(q_idx - kv_idx {0} length[b])", st.sampled_from(["<", ">="])),
        st.just("(document[q_idx] == document[kv_idx])"),
    ),
    lambda inner: (
        _joined("({0} & {1})", inner, inner)
        | _joined("({0} | (kv_idx < {1}))", inner, st.sampled_from(["5", "length[b]"]))
    ),
    max_leaves=3,
)
MASKS = WINDOWS | st.recursive(
    st.one_of(
        CONDITIONS,
        _joined("({0} > {1})", NARROW, st.sampled_from(["0", "kv_idx"])),
        st.sampled_from(["document[q_idx] == document[kv_idx]", "kv_idx < length[b]", "allowed[kv_idx]"]).map(
            "({})".format
        ),
    ),
    lambda inner: _joined("({0} {1} {2})", inner, st.sampled_from("&|^"), inner),
    max_leaves=3,
)


# Text as functions.


def named_in(text: str | None) -> list[str]:
    return [name for name in (*CAPTURES, *INDEX_CAPTURES) if re.search(rf"\b{name}\b", text or "")]


def capture(name: str, sizes: Sizes, generator: torch.Generator) -> Tensor:
    if name in INDEX_CAPTURES:
        return INDEX_CAPTURES[name](sizes, generator)
    shape = [getattr(sizes, n) if isinstance(n, str) else n for n in CAPTURES[name]]
    return torch.randn(shape, generator=generator).double()


def score_mod_of(text: str | None) -> Callable[[float], Any]:
    """From `shift` and what the text captures to a score_mod; None without one."""
    if text is None:
        return lambda shift: None
    lane = "score, b, h, q_idx, kv_idx"
    return eval(f"lambda shift: lambda {', '.join(named_in(text))}: lambda {lane}: {text}", NAMES)


@functools.lru_cache(64)  # torch compiles again for code that is another object
def mask_mod_of(text: str | None) -> Callable[[Sizes, torch.Generator], Any]:
    """From a call's sizes to a mask_mod, of one code for all calls; None without one."""
    if text is None:
        return lambda sizes, generator: None
    names = ", ".join(["document", "length", "allowed", *INDEX_CAPTURES])
    make = eval(f"lambda {names}: lambda b, h, q_idx, kv_idx: {text}", NAMES)

    def mask_mod(sizes: Sizes, generator: torch.Generator) -> Any:
        longest = max(sizes.queries, sizes.keys)
        document = torch.randint(0, 3, (longest,), generator=generator).cumsum(0) // 8
        length = torch.randint(0, sizes.keys + 1, (sizes.batch,), generator=generator)
        allowed = torch.rand(sizes.keys, generator=generator) < 0.7
        return make(
            document, length, allowed, *(index(sizes, generator) for index in INDEX_CAPTURES.values())
        )

    return mask_mod
