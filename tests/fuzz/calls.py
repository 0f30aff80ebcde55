"""How the calls of one program are compiled, and what its tensors hold."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from flex_inductor import decisions
from flex_inductor.backend import flex_inductor
from tests.support import served_by

from .mods import CARD, CARDS, TRITON

DTYPES = {
    "eager": ("float32", "bfloat16"),  # of float64 the right results are in float64 too, and off as much
    "chunked": ("float64",),
    "cpu": ("float32", "bfloat16", "float16"),
    "triton": ("float32", "float16"),  # Triton's interpreter gets products of bfloat16 wrong
    **dict.fromkeys(CARDS, ("float32", "bfloat16", "float16")),
    CARD: ("float32", "bfloat16", "float16", "bfloat16", "float16"),  # fp32 compiles for long
    "sm_100": ("bfloat16", "float16"),  # where Triton multiplies fp32 in TF32, see docs/triton.md
}
LONGEST = {"eager": 40, "chunked": 90, "cpu": 200, **dict.fromkeys(TRITON, 60), CARD: 200}


def drawn(one: Callable[[str, random.Random], Any], route: str, count: int) -> st.SearchStrategy[list]:
    """So many calls of a program, all of one drawn number: hypothesis' own lists are short and much alike."""

    def of(number: int) -> list:
        return [one(route, random.Random(f"{number}-{place}")) for place in range(count)]

    return st.integers(0, 2**32).map(of)


def compiled(route: str, attend: Callable, verify: bool = False) -> Callable:
    """`attend` as the route has it: one function for every shape."""
    torch._dynamo.reset()
    if route == "eager":
        return attend
    if route == "triton":
        from flex_inductor.tools import interpret

        return interpret.compiled(attend, dynamic=True)
    if route == CARD:
        from flex_inductor.tools import on_card

        return on_card.compiled(attend, dynamic=True)
    if route in CARDS:
        from flex_inductor.tools import execute

        return execute.compiled(attend, route, dynamic=True, records=True)
    return torch.compile(
        attend, backend=flex_inductor, fullgraph=True, dynamic=True, options={"verify": verify}
    )


@contextlib.contextmanager
def compilations(route: str, passes: int = 2) -> Iterator[set]:
    """What is called inside is served by this route, and compiled for each of the shapes that are put into the set.

    `passes` are compiled for each: a forward, and a backward unless nothing has a gradient.
    """
    shapes: set = set()
    if route == "eager":
        yield shapes
        return
    # Otherwise torch takes sizes that happen to be equal for the same one, and compiles again once they are not.
    with (
        torch.fx.experimental._config.patch(use_duck_shape=False),
        torch._dynamo.config.patch(recompile_limit=200),  # what is compiled is counted below
        served_by("triton" if route in TRITON else route),
    ):
        yield shapes
        found = len(decisions()) // passes
        assert found <= len(shapes), f"compiled {found} times, expected {len(shapes)} at most"


def exact_in_fp32(score: str | None, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Such that scores are rounded to the same wherever they are computed, where a mod rounds them."""
    rounds = "straight_through(score" in (score or "")
    return [torch.round(4 * t) / 4 for t in inputs] if rounds else inputs
