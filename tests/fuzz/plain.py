"""Random calls of flex_attention against the fp64 reference.

What needs a kernel of its own is a Program, mods as text; what does not is Values, and a program is called with several
of them.
"""

from __future__ import annotations

import functools
import random
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from flex_inductor import AuxRequest, create_block_mask, flex_attention
from flex_inductor.reference import reference
from flex_inductor.verify.dropout import factors
from tests.bounds import may_be_off
from tests.support import LAYOUTS, Sizes, judge

from .calls import DTYPES, LONGEST, compilations, compiled, drawn, exact_in_fp32
from .doors import DOORS, applies_functions, names_batches
from .mods import MASKS, SCORES, capture, mask_mod_of, named_in, score_mod_of


class Program(NamedTuple):
    """What needs a kernel of its own."""

    score: str | None = None
    mask: str | None = None
    dtype: str = "float32"
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 16
    value_dim: int = 16
    layouts: tuple[str, str, str] = ("contiguous", "contiguous", "contiguous")
    block: int | tuple[int, int] = 16
    compact: bool = False
    one_kv_batch: bool = False
    sinks: bool = False
    dropout: float = 0.0
    entropy: bool = False  # instead of the logsumexp
    door: str = ""


class Values(NamedTuple):
    """What changes from call to call of one kernel."""

    batch: int = 2
    queries: int = 20
    keys: int = 20
    scale: float = 0.25
    magnitude: float = 1.0
    shift: float = 0.5
    seed: int = 0


@st.composite
def programs(draw, route: str) -> Program:
    kv_heads = draw(st.integers(1, 2))
    dims = st.sampled_from([1, 3, 8, 16, 24, 33])
    blocks = st.sampled_from([16, 32, (16, 64), (64, 16), 128])
    dtype = draw(st.sampled_from(DTYPES[route]))
    entropy = draw(st.booleans())
    score, mask = draw(SCORES[route] | SCORES[route] | st.none()), draw(MASKS | MASKS | st.none())
    program = Program(
        score,
        mask,
        dtype,
        kv_heads * draw(st.integers(1, 3)),
        kv_heads,
        draw(dims),
        draw(dims),
        draw(st.tuples(*[st.sampled_from(list(LAYOUTS))] * 3)),
        draw(blocks if route != "eager" else blocks | st.tuples(st.integers(1, 24), st.integers(1, 24))),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from([0.0, 0.0, 0.3])),
        entropy,
    )
    door = draw(st.sampled_from(["", "", "", *(DOORS if route == "eager" else ["vmap"])]))
    if door == "vmap":
        if names_batches(score, mask) or (route != "eager" and applies_functions(score)):
            return program
        program = program._replace(one_kv_batch=False, dropout=0.0)  # whose bits are those of a batch
    return program._replace(door=door)


def random_values(route: str, draws: random.Random) -> Values:
    # Most are short, since judging long ones takes most of the time.
    queries, keys = (draws.randint(2, draws.choice([40, 40, LONGEST[route]])) for _ in range(2))
    return Values(
        draws.randint(2, 3), queries, keys, draws.choice([0.25, 1.0, -0.5]), draws.choice([1.0, 0.1, 3.0]),
        draws.choice([0.5, -1.5, 0.25]), draws.randint(0, 1000),
    )  # fmt: skip


several_values = functools.partial(drawn, random_values)


# A case.


def inputs_of(program: Program, values: Values, sizes: Sizes) -> list[Tensor]:
    inputs = [t.double() for t in sizes.inputs(getattr(torch, program.dtype), values.seed)]
    inputs[:2] = [t * values.magnitude**0.5 for t in inputs[:2]]
    inputs[:2] = exact_in_fp32(program.score, inputs[:2])
    inputs = [t.to(getattr(torch, program.dtype)) for t in inputs]
    return [LAYOUTS[name](t) for name, t in zip(program.layouts, inputs, strict=True)]


def sizes_of(program: Program, values: Values) -> Sizes:
    return Sizes(
        values.batch, program.heads, program.kv_heads, values.queries, values.keys, program.head_dim,
        program.value_dim, 1 if program.one_kv_batch else None,
    )  # fmt: skip


def captures_and_mask(program: Program, values: Values, sizes: Sizes) -> tuple[list[Tensor], Any]:
    generator = torch.Generator().manual_seed(values.seed)
    captures = [capture(name, sizes, generator) for name in named_in(program.score)]
    captures += [torch.randn(program.heads, generator=generator)] * program.sinks
    mask_mod = mask_mod_of(program.mask)(sizes, generator)
    if mask_mod is None:
        return captures, None
    grid = None if program.door == "vmap" else sizes.batch, sizes.heads, sizes.queries, sizes.keys
    return captures, create_block_mask(mask_mod, *grid, "cpu", program.block, compact=program.compact)


def _shapes_to_torch(mask) -> tuple:
    """The sizes of a schedule's tensors, as torch compiles for them: 0, 1, and any other."""
    tensors = () if mask is None else (t for t in vars(mask).values() if isinstance(t, Tensor))
    return tuple(min(n, 2) for tensor in tensors for n in tensor.shape)


STATE = torch.tensor(77), torch.tensor(5)


def ours(program: Program, score_mod):
    def attend(scale, shift, query, key, value, captures, block_mask):
        *own, sinks = captures if program.sinks else (*captures, None)
        build = score_mod(shift)
        out, aux = flex_attention(
            query, key, value, None if build is None else build(*own), block_mask, scale, enable_gqa=True,
            return_aux=AuxRequest(lse=True, max_scores=True, entropy=program.entropy),
            sinks=sinks, dropout_p=program.dropout, rng_state=STATE,
        )  # fmt: skip
        return out, aux.entropy if program.entropy else aux.lse, aux.max_scores

    return attend


def dense(program: Program, build, scale: float):
    """From the weights that the reference gives values of which each is one key's."""

    def attend(query, key, value, captures, block_mask):
        *own, sinks = captures if program.sinks else (*captures, None)
        each = torch.eye(key.size(2), dtype=value.dtype).expand(*key.shape[:2], -1, -1)
        weights, lse, max_scores = reference(
            query, key, each, None if build is None else build(*own), block_mask, scale, sinks
        )
        columns = weights
        if sinks is not None:
            of_sinks = (sinks.to(lse.dtype).view(-1, 1) - lse).exp()
            columns = torch.cat([weights, of_sinks.unsqueeze(-1)], -1)
        # A kernel may flush a tiny weight to zero, of which the logarithm has no bound, or count it.
        large = columns > 1e-35
        logs = may_be_off(columns.where(large, 1.0).log(), torch.where(large, 0.0, 90.0))
        of_rows = -(columns * logs).sum(-1) if program.entropy else lse
        if program.dropout:
            given = torch.tensor([*map(int, STATE), 0, round(program.dropout * 65536)])
            sizes = zip(("b", "h", "q_idx", "kv_idx"), weights.shape, strict=True)
            kept = factors(given, {name: torch.arange(size) for name, size in sizes})
            weights = weights * kept.to(weights.dtype)
        value = value.repeat_interleave(query.size(1) // value.size(1), 1)
        return weights.to(value.dtype) @ value, of_rows, max_scores

    return attend


def check(route: str, program: Program, several: list[Values], verify: bool = False) -> None:
    """Judge the calls of one program, and that the route served them and compiled no more than it must."""
    score_mod = score_mod_of(program.score)
    attend = compiled(route, DOORS[program.door](ours(program, score_mod)), verify)
    with compilations(route) as shapes:
        for values in several:
            sizes = sizes_of(program, values)
            captures, mask = captures_and_mask(program, values, sizes)
            shapes.add(_shapes_to_torch(mask))
            judge(
                lambda *call, scale=values.scale, shift=values.shift: attend(scale, shift, *call),
                dense(program, score_mod(values.shift), values.scale),
                inputs_of(program, values, sizes),
                captures,
                mask,
                by_ratio=False,
            )
