"""`flex-inductor bench cpu`: our CPU kernels next to others that compute the same attention.

All sides of a case take turns in one process, in the opposite order every second round. Shown are the median over the
rounds and the middle half of them. Before it is timed, each side is checked against uncompiled attention in fp64.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

from flex_inductor import flex_attention

from ..files import to_write
from .call import Call, Made
from .harness import OURS, Result, check, command, in_one_line, milliseconds, run_cases, timed

FLEX, SDPA, MASKED, DENSE = "torch flex", "SDPA is_causal", "SDPA mask", "dense eager"
DENSE_BYTES = 3 << 30  # no side may hold more than this in scores

_fp32: dict[str, Any] = {"dtype": torch.float32, "backward": False}
_bf16: dict[str, Any] = {"backward": False}
_train: dict[str, Any] = {"dtype": torch.float32}
_decode: dict[str, Any] = {"heads": 32, "kv_heads": 8, "head_dim": 128}
CASES = (
    Call("causal", 4096, **_fp32, aims={FLEX: 2.2, SDPA: 1.15}),
    Call("causal", 4096, **_bf16, aims={FLEX: 3, SDPA: 1}),
    Call("alibi", 4096, **_fp32, aims={FLEX: 2}),
    Call("softcap", 4096, **_fp32, aims={FLEX: 2}),
    Call("window 512", 16384, **_fp32, aims={FLEX: 1.6}),
    Call("documents", 4096, **_fp32),
    Call("GQA 8:2", 4096, **_fp32, kv_heads=2),
    Call("relative bias", 2048, **_fp32),
    Call("decode", 32768, **_decode, **_fp32, aims={FLEX: 3.5}),
    Call("decode", 32768, **_decode, **_bf16, aims={FLEX: 8}),
    Call("causal", 4096, **_train, aims={SDPA: 1.1, DENSE: 6}),
    Call("causal", 4096, aims={SDPA: 4}),
    Call("window 512", 4096, **_train),
    Call("documents", 4096, **_train),
    Call("alibi", 2048, **_train),
    Call("softcap", 2048, **_train),
    Call("GQA 8:2", 4096, **_train, kv_heads=2),
    Call("relative bias", 2048, **_train, aims={DENSE: 4}),
)


def register(kinds: Any) -> None:
    parser = command(kinds, "cpu", "the CPU kernels, next to others", __doc__, run, rounds=8)
    parser.add_argument(
        "--plot", metavar="FILE", type=to_write, help="draw the ratios to a .png or .svg file"
    )
    parser.add_argument("--threads", type=int, help="threads to use (default: torch's)")


def run(arguments: argparse.Namespace) -> int:
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    results = run_cases(
        CASES,
        partial(measure, rounds=arguments.rounds),
        arguments,
        ("side", "ms", "over ours", "aim"),
        title_of,
    )
    if results and arguments.plot:
        plot(arguments.plot, results)
    return 0 if results else 2


def title_of(call: Call) -> str:
    dtype = {torch.float32: "fp32", torch.bfloat16: "bf16"}[call.dtype]
    return f"{call.title} {dtype} {'forward+backward' if call.backward else 'forward'}"


def measure(call: Call, rounds: int) -> list[Result]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    made = Made(call)
    gold = made.gold()
    ready: dict[str, Callable[[], float]] = {}
    refused: dict[str, str] = {}
    for side, attend in sides_of(made).items():
        step = partial(made.results, attend)
        try:
            check(step(), gold, call.dtype)
            ready[side] = partial(milliseconds, step)
        except (RuntimeError, torch._dynamo.exc.TorchDynamoException) as error:
            if side == OURS:
                raise
            refused[side] = in_one_line(error)[:60]
    return timed(title_of(call), ready, rounds, lambda side, _: {"aim": call.aims.get(side, "")}, refused)


def sides_of(made: Made) -> dict[str, Callable]:
    from flex_inductor.backend import flex_inductor

    call = made.call
    compiled = partial(torch.compile, dynamic=False)
    sdpa = partial(torch.nn.functional.scaled_dot_product_attention, enable_gqa=call.gqa)
    sides: dict[str, Callable] = {
        OURS: compiled(partial(flex_attention, **made.options), backend=flex_inductor),
        FLEX: compiled(partial(torch_flex_attention, **made.options)),
    }
    plain = made.options["score_mod"] is None
    if plain and (call.decoding or call.variant in ("causal", "GQA 8:2")):
        sides[SDPA] = partial(sdpa, is_causal=not call.decoding)
    query, key, _ = made.inputs
    if query.size(2) * key.size(2) * call.heads * 4 * (4 if call.backward else 2) > DENSE_BYTES:
        return sides
    if plain and made.mask_mod is not None:
        sides[MASKED] = partial(sdpa, attn_mask=made.allowed())
    sides[DENSE] = made.dense
    return sides


def plot(path: str, results: list[Result]) -> None:
    """Bars: how many times as long as ours each side takes."""
    from matplotlib import pyplot

    shown = [r for r in results if r.ms is not None and r.side != OURS]
    cases = list(dict.fromkeys(r.case for r in shown))
    sides = list(dict.fromkeys(r.side for r in shown))
    figure, axis = pyplot.subplots(figsize=(8, 0.6 * len(cases) + 1))
    height = 0.8 / max(1, len(sides))
    for i, side in enumerate(sides):
        of_side = [r for r in shown if r.side == side]
        places = [cases.index(r.case) + i * height for r in of_side]
        axis.barh(places, [r.facts["ratio"].median for r in of_side], height, label=side)
    axis.axvline(1, color="black", linewidth=1)
    ticks = [i + 0.4 for i in range(len(cases))]
    axis.set(xscale="log", xlabel="time over ours", yticks=ticks, yticklabels=cases)
    axis.invert_yaxis()
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
