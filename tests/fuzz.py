"""Random calls against the fp64 reference: `make fuzz MINUTES=30`, or a few of them in `make test`.

A case is plain data. What needs a kernel of its own is a Program, mods as text; what does not is Values, and a
program is called with several of them. A failure prints a case as small as hypothesis finds:
`check("cpu", Program(...), [Values(...)])` runs it again.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import time
import traceback
from typing import NamedTuple

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

from flex_inductor import RunSchedule, create_block_mask, decisions
from flex_inductor.backend import flex_inductor
from tests.support import LAYOUTS, Sizes, attention_of, dense_of, judge, served_by

ROUTES = ("chunked", "cpu", "triton")
DTYPES = {
    "eager": ("float64", "float32", "bfloat16"),
    "chunked": ("float64",),
    "cpu": ("float32", "bfloat16", "float16"),
    "triton": ("float32", "float16"),  # Triton's interpreter gets products of bfloat16 wrong
}
LONGEST = {"eager": 40, "chunked": 90, "cpu": 200, "triton": 60}
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


# ---- What mods call -------------------------------------------------------------------------------


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
    """The same value, with a bounded gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-0.2, 0.2)  # not by much: what is cut off takes no rounding errors with it


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
    runs: bool = False
    one_kv_batch: bool = False


class Values(NamedTuple):
    """What changes from call to call of one kernel."""

    batch: int = 2
    queries: int = 20
    keys: int = 20
    scale: float = 0.25
    magnitude: float = 1.0
    shift: float = 0.5
    seed: int = 0


# ---- Mods as text ---------------------------------------------------------------------------------


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
    ),
    max_leaves=3,
)
CONDITIONS = _joined("({0} {1} {2})", INDICES, st.sampled_from([">=", "<", "==", "!="]), INDICES)
# What runs once is exact, or in fp32. Rounded to 16 bits it would be most of every side's error, of which a single
# one is luck: exp(2.5) may be off by 0.004, and so may a logsumexp of it, unless dense attention rounds that back.
LOOKUPS = st.one_of(
    _joined("few[{0} % 5]", INDICES),
    _joined("few[{0} % 5 - 5]", INDICES),
    _joined("table[{0} % 3, {1} % 4]", INDICES, INDICES),
    _joined("table[{0} % 3][{1} % 4]", INDICES, INDICES),
    st.sampled_from(["number", "by_head[h]", "by_query[q_idx]", "by_key[kv_idx]", "(by_key * 2)[kv_idx]"]),
    st.sampled_from(["wide(by_key).exp()[kv_idx]", "by_key[order[kv_idx]]", "few[codes[kv_idx % 6]]"]),
    st.sampled_from(["straight_through(by_query[q_idx])", "by_key[order[kv_idx]] * shift"]).map(
        "({})".format
    ),
    _joined("by_key[{0} % by_key.size(0)]", INDICES),
)
# Products have a bounded factor: what an error of a score grows to stays small.


def _scores(*parts: str) -> st.SearchStrategy[str]:
    """`parts`: what is called on two scores."""
    finite = st.recursive(
        st.sampled_from(["score", "score", "score * 0.5 + 1", "straight_through(score)", "(score - shift)"])
        | LOOKUPS,
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
    route: _scores("in_place") if route in ("cpu", "triton") else _scores("in_place", "by_parts")
    for route in ("eager", *ROUTES)
}
MASKS = st.recursive(
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


@st.composite
def programs(draw, route: str) -> Program:
    kv_heads = draw(st.integers(1, 2))
    dims = st.sampled_from([1, 3, 8, 16, 24, 33])
    blocks = st.sampled_from([16, 32, (16, 64), (64, 16), 128])
    return Program(
        draw(SCORES[route] | SCORES[route] | st.none()),
        draw(MASKS | MASKS | st.none()),
        draw(st.sampled_from(DTYPES[route])),
        kv_heads * draw(st.integers(1, 3)),
        kv_heads,
        draw(dims),
        draw(dims),
        draw(st.tuples(*[st.sampled_from(list(LAYOUTS))] * 3)),
        draw(blocks if route != "eager" else blocks | st.tuples(st.integers(1, 24), st.integers(1, 24))),
        draw(st.booleans()),
        draw(st.booleans()),
    )


def several_values(route: str, most: int) -> st.SearchStrategy[list[Values]]:
    length = st.integers(2, LONGEST[route])
    # Triton's backward has exp2(score * log2(e) - lse * log2(e)), where dense attention subtracts first. In fp32 an
    # exponent beyond 64 is off by 4e-6, and so is each weight: as much as all else together.
    magnitudes = [1.0, 0.1] if route == "triton" else [1.0, 0.1, 3.0]
    values = st.builds(
        Values, st.integers(2, 3), length, length, st.sampled_from([0.25, 1.0, -0.5]),
        st.sampled_from(magnitudes), st.sampled_from([0.5, -1.5, 0.25]), st.integers(0, 1000),
    )  # fmt: skip
    return st.lists(values, min_size=1, max_size=most)


# ---- A case ---------------------------------------------------------------------------------------


def _named_in(text: str | None) -> list[str]:
    return [name for name in (*CAPTURES, *INDEX_CAPTURES) if re.search(rf"\b{name}\b", text or "")]


def _capture(name: str, sizes: Sizes, generator: torch.Generator) -> Tensor:
    if name in INDEX_CAPTURES:
        return INDEX_CAPTURES[name](sizes, generator)
    shape = [getattr(sizes, n) if isinstance(n, str) else n for n in CAPTURES[name]]
    return torch.randn(shape, generator=generator).double()


def _inputs(program: Program, values: Values, sizes: Sizes) -> list[Tensor]:
    inputs = [t.double() for t in sizes.inputs(getattr(torch, program.dtype), values.seed)]
    inputs[:2] = [t * values.magnitude**0.5 for t in inputs[:2]]
    if "straight_through(score" in (program.score or ""):
        # Such scores are exact in fp32: wherever they are computed, they are rounded to the same.
        inputs[:2] = [torch.round(4 * t) / 4 for t in inputs[:2]]
    inputs = [t.to(getattr(torch, program.dtype)) for t in inputs]
    return [LAYOUTS[name](t) for name, t in zip(program.layouts, inputs, strict=True)]


def _mask(program: Program, sizes: Sizes, make_mask, generator: torch.Generator):
    if make_mask is None:
        return None
    longest = max(sizes.queries, sizes.keys)
    document = torch.randint(0, 3, (longest,), generator=generator).cumsum(0) // 8
    length = torch.randint(0, sizes.keys + 1, (sizes.batch,), generator=generator)
    allowed = torch.rand(sizes.keys, generator=generator) < 0.7
    indices = [make(sizes, generator) for make in INDEX_CAPTURES.values()]
    mask = create_block_mask(
        make_mask(document, length, allowed, *indices), sizes.batch, sizes.heads, sizes.queries, sizes.keys,
        "cpu", program.block,
    )  # fmt: skip
    return RunSchedule.from_block_mask(mask) if program.runs else mask


def _shapes_to_torch(mask) -> tuple:
    """The sizes of a schedule's tensors, as torch compiles for them: 0, 1, and any other."""
    tensors = () if mask is None else (t for t in vars(mask).values() if isinstance(t, Tensor))
    return tuple(min(n, 2) for tensor in tensors for n in tensor.shape)


def check(route: str, program: Program, several: list[Values], verify: bool = False) -> None:
    """Judge the calls of one program, and that the route served them and compiled no more than it must."""
    used = _named_in(program.score)
    lane = "score, b, h, q_idx, kv_idx"
    with_shift = program.score and eval(
        f"lambda shift: lambda {', '.join(used)}: lambda {lane}: {program.score}", NAMES
    )
    data = ", ".join(["document", "length", "allowed", *INDEX_CAPTURES])
    make_mask = program.mask and eval(f"lambda {data}: lambda b, h, q_idx, kv_idx: {program.mask}", NAMES)

    def attend(scale, shift, *call):
        return attention_of(with_shift and with_shift(shift), scale)(*call)

    if route == "triton":
        from flex_inductor.tools import interpret

        attend = interpret.compiled(attend, dynamic=True)
    elif route != "eager":
        options = {"verify": verify}
        attend = torch.compile(attend, backend=flex_inductor, fullgraph=True, dynamic=True, options=options)
    torch._dynamo.reset()
    # Otherwise torch takes sizes that happen to be equal for the same one, and compiles again once they are not.
    duck_shapes = torch.fx.experimental._config.patch(use_duck_shape=False)
    shapes = set()
    with duck_shapes, served_by(route) if route != "eager" else contextlib.nullcontext():
        for values in several:
            kv_batch = 1 if program.one_kv_batch else None
            sizes = Sizes(
                values.batch, program.heads, program.kv_heads, values.queries, values.keys, program.head_dim,
                program.value_dim, kv_batch,
            )  # fmt: skip
            generator = torch.Generator().manual_seed(values.seed)
            captures = [_capture(name, sizes, generator) for name in used]
            mask = _mask(program, sizes, make_mask, generator)
            shapes.add(_shapes_to_torch(mask))
            judge(
                lambda *call, scale=values.scale, shift=values.shift: attend(scale, shift, *call),
                dense_of(with_shift and with_shift(values.shift), values.scale),
                _inputs(program, values, sizes),
                captures,
                mask,
            )
    if route != "eager":
        found = len(decisions()) // 2
        assert found <= len(shapes), f"compiled {found} times, expected {len(shapes)} at most"


# ---- How many -------------------------------------------------------------------------------------


def a_fixed_few(examples: int):
    """The same cases every time, and none smaller of one that fails: `make fuzz` looks for those."""
    return settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def fuzz(route: str, first_seed: int, minutes: float) -> int:
    """Cases until the time is up or one fails: 0 or 1."""
    end = time.monotonic() + 60 * minutes
    count = 0
    for number in range(first_seed, sys.maxsize):

        @seed(number)
        @settings(
            max_examples=10,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )
        @given(program=programs(route), several=several_values(route, 6))
        def cases(program, several):
            nonlocal count
            count += 1
            check(route, program, several)

        try:
            cases()
        except Exception:
            traceback.print_exc()
            print(f"{route}: seed {number} fails: python -m tests.fuzz --route {route} --seed {number}")
            return 1
        if time.monotonic() > end:
            print(f"{route}: {count} programs from seed {first_seed} on, all right", flush=True)
            return 0
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument(
        "--route", choices=["eager", *ROUTES], help="default: all, each in a process of its own"
    )
    parser.add_argument(
        "--seed", type=int, default=int.from_bytes(os.urandom(3), "big"), help="the first one"
    )
    given = parser.parse_args()
    if given.route:
        return fuzz(given.route, given.seed, given.minutes)
    print(f"seed {given.seed}", flush=True)
    again = [sys.executable, "-W", "ignore", "-m", "tests.fuzz", "--minutes", str(given.minutes)]
    processes = [
        subprocess.Popen(
            [*again, "--seed", str(given.seed), "--route", route],
            env=os.environ | ({"TRITON_INTERPRET": "1"} if route == "triton" else {}),
        )
        for route in ("eager", *ROUTES)
    ]
    return max(process.wait() for process in processes)


if __name__ == "__main__":
    raise SystemExit(main())
