"""`flex-inductor bench cpu`: our CPU kernels next to others that compute the same attention.

All sides of a case take turns in one process, in the opposite order every second round. Shown are the median over the
rounds and the middle half of them. Before it is timed, each side is checked against uncompiled attention in fp64.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

from flex_inductor import flex_attention

from .call import Call, Made
from .harness import OURS, PLOT, Result, alternate, check, in_one_line, milliseconds, results_of, rounds

FLEX, SDPA, MASKED, DENSE = "torch flex", "SDPA is_causal", "SDPA mask", "dense eager"
DENSE_BYTES = 3 << 30  # no side may hold more than this in scores

HELP = "the CPU kernels, next to others"
OPTIONS = {**rounds(8), **PLOT}
COLUMNS = ("side", "ms", "over ours", "aim")


@dataclass(frozen=True)
class Case(Call):
    @property
    def title(self) -> str:
        dtype = {torch.float32: "fp32", torch.bfloat16: "bf16"}[self.dtype]
        return f"{super().title} {dtype} {'forward+backward' if self.backward else 'forward'}"


_fp32: dict[str, Any] = {"dtype": torch.float32, "backward": False}
_bf16: dict[str, Any] = {"backward": False}
_train: dict[str, Any] = {"dtype": torch.float32}
_decode: dict[str, Any] = {"heads": 32, "kv_heads": 8, "head_dim": 128}
CASES = (
    Case("causal", 4096, **_fp32, aims={FLEX: 2.2, SDPA: 1.15}),
    Case("causal", 4096, **_bf16, aims={FLEX: 3, SDPA: 1}),
    Case("alibi", 4096, **_fp32, aims={FLEX: 2}),
    Case("softcap", 4096, **_fp32, aims={FLEX: 2}),
    Case("window 512", 16384, **_fp32, aims={FLEX: 1.6}),
    Case("documents", 4096, **_fp32),
    Case("GQA 8:2", 4096, **_fp32, kv_heads=2),
    Case("relative bias", 2048, **_fp32),
    Case("decode", 32768, **_decode, **_fp32, aims={FLEX: 3.5}),
    Case("decode", 32768, **_decode, **_bf16, aims={FLEX: 8}),
    Case("causal", 4096, **_train, aims={SDPA: 1.1, DENSE: 6}),
    Case("causal", 4096, aims={SDPA: 4}),
    Case("window 512", 4096, **_train),
    Case("documents", 4096, **_train),
    Case("alibi", 2048, **_train),
    Case("softcap", 2048, **_train),
    Case("GQA 8:2", 4096, **_train, kv_heads=2),
    Case("relative bias", 2048, **_train, aims={DENSE: 4}),
)


def measure(case: Case, arguments: Namespace) -> list[Result]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    made = Made(case)
    gold = made.gold()
    ready: dict[str, Callable[[], float]] = {}
    refused: dict[str, str] = {}
    for side, attend in sides_of(made).items():
        step = partial(made.results, attend)
        try:
            check(step(), gold, case.dtype)
            ready[side] = partial(milliseconds, step)
        except (RuntimeError, torch._dynamo.exc.TorchDynamoException) as error:
            if side == OURS:
                raise
            refused[side] = in_one_line(error)[:60]
    facts = lambda side, _: {"aim": case.aims.get(side, "")}  # noqa: E731
    return results_of(case.title, alternate(ready, arguments.rounds), facts, refused)


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


def headline(results: list[Result]) -> str:
    """How many times as long as ours the others take, by the median of the cases that they serve."""
    sides = (FLEX, SDPA, MASKED, DENSE)
    ratios = {side: [r.facts["ratio"].median for r in results if r.side == side and r.ms] for side in sides}
    return ", ".join(f"{side} {statistics.median(of):.1f}x ours" for side, of in ratios.items() if of)


def plot(axis: Any, results: list[Result], _: Namespace) -> None:
    """Bars: how many times as long as ours each side takes."""
    shown = [r for r in results if r.ms is not None and r.side != OURS]
    cases, sides = ([*dict.fromkeys(getattr(r, name) for r in shown)] for name in ("case", "side"))
    axis.figure.set_size_inches(8, 0.6 * len(cases) + 1)
    height = 0.8 / max(1, len(sides))
    for i, side in enumerate(sides):
        bars = {cases.index(r.case) + i * height: r.facts["ratio"].median for r in shown if r.side == side}
        axis.barh([*bars], [*bars.values()], height, label=side)
    axis.axvline(1, color="black", linewidth=1)
    axis.set(xscale="log", xlabel="time over ours")
    axis.set_yticks([i + 0.4 for i in range(len(cases))], cases)
    axis.invert_yaxis()
