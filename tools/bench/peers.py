"""`flex-inductor bench peers`: calls that users compare, here and with others, on this CPU.

All sides of a case take turns in one process, in the opposite order every second round; the page has their medians.
Before it is timed, each side is checked against uncompiled attention in fp64. `--page` writes a page with these
times, and with what each library has by its own sources (peers_features.py).
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention
from torch.nn.functional import scaled_dot_product_attention

from flex_inductor import RunSchedule, flex_attention
from flex_inductor.masks.draw import tile_shares
from flex_inductor.reference import over_lanes

from ..options import file
from .call import Made
from .cpu import FLEX, Case
from .harness import (
    OURS,
    PLOT,
    Result,
    alternate,
    check,
    in_one_line,
    machine,
    milliseconds,
    results_of,
    rounds,
)
from .peers_features import FEATURES, PEERS

SDPA = "SDPA"

HELP = "calls that users compare, here and with others, and what each library has"
OPTIONS = {**rounds(8), **PLOT, "--page": file("write a page in Markdown")}
COLUMNS = ("side", "ms", "over ours")

LENGTH = 2048
VARIANTS = ("causal", "alibi", "softcap", "window 512", "documents", "GQA 8:2", "sinks", "relative bias")
CASES = tuple(
    Case(variant, LENGTH, kv_heads=2 if variant == "GQA 8:2" else 8, dtype=dtype, backward=backward)
    for variant in VARIANTS
    for dtype in (torch.float32, torch.bfloat16)
    for backward in (False, True)
)


class Refused(Exception):
    """A side has no way to say this call."""


def measure(case: Case, arguments: Namespace) -> list[Result]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    made = _made(case)
    gold = made.gold()
    ready: dict[str, Callable[[], float]] = {}
    refused: dict[str, str] = {}
    for side, make in {OURS: _ours, FLEX: _torch_flex, SDPA: _sdpa}.items():
        try:
            step = partial(made.results, make(made))
            check(step(), gold, case.dtype)
            ready[side] = partial(milliseconds, step)
        except (Refused, RuntimeError, torch._dynamo.exc.TorchDynamoException) as error:
            if side == OURS:
                raise
            refused[side] = str(error) if isinstance(error, Refused) else in_one_line(error)
    return results_of(case.title, alternate(ready, arguments.rounds), refused=refused)


def _made(case: Case) -> Made:
    made = Made(case)
    if case.variant == "sinks":
        sinks = torch.randn(case.heads, requires_grad=True)
        made.options["sinks"], made.captures = sinks, (sinks,)
    return made


def _ours(made: Made) -> Callable:
    from flex_inductor.backend import flex_inductor

    return torch.compile(partial(flex_attention, **made.options), backend=flex_inductor, dynamic=False)


def _torch_flex(made: Made) -> Callable:
    if "sinks" in made.options:
        raise Refused("it has no sinks, and gives no logsumexp on CPU to add them to")
    return torch.compile(partial(torch_flex_attention, **made.options), dynamic=False)


def _sdpa(made: Made) -> Callable:
    """With what a user would give it: is_causal, a table of flags, or a table of what is added to scores."""
    attend: Callable = partial(scaled_dot_product_attention, enable_gqa=made.call.gqa)
    variant, (query, key, _) = made.call.variant, made.inputs
    if variant in ("softcap", "sinks"):
        raise Refused(f"it has no {variant}, and no mods")
    if made.options["score_mod"] is None:
        causal = variant in ("causal", "GQA 8:2")
        return partial(attend, **({"is_causal": True} if causal else {"attn_mask": made.allowed()}))
    forbidden, indices = ~made.allowed(), made._indices()
    nothing = torch.zeros(*query.shape[:3], key.size(2))

    def added() -> Tensor:
        if variant == "relative bias":  # as one writes it without mods: one lookup, with its gradient
            (table,) = made.captures
            bias = table[:, indices[2][:, None] - indices[3] + key.size(2) - 1][None]
        else:
            bias = over_lanes(made.options["score_mod"], (0,))(nothing, *indices)
        return bias.masked_fill(forbidden, -torch.inf).to(query.dtype)

    if made.captures:  # learnt, so another table in each step
        return lambda *qkv: attend(*qkv, attn_mask=added())
    table = added()
    return lambda *qkv: attend(*qkv, attn_mask=table)


def page(results: Sequence[Result], arguments: Namespace) -> str:
    command = f"flex-inductor bench peers --rounds {arguments.rounds} --page FILE"
    return "\n".join(
        [
            "# Peers side by side",
            "",
            f"Written by `{command}` on {time.strftime('%Y-%m-%d')}: {', '.join(machine().values())}.",
            "",
            "## Times",
            "",
            f"Milliseconds of one attention call on this CPU, B1 H8 S{LENGTH} D64: medians of {arguments.rounds} "
            "rounds in turns, and in brackets how many times as long as ours. All were compared with fp64 first. "
            "SDPA has a table of flags or of numbers where it has no argument for a mask or a bias. "
            "FlashAttention, MagiAttention and cuDNN have no code for CPUs.",
            "",
            *_times(results),
            "",
            "## Features",
            "",
            "As each library's own sources and pages have them, not as tried here; ours are tested.",
            "",
            *_features(),
            "",
        ]
    )


def _times(results: Sequence[Result]) -> Iterator[str]:
    cases = {case.title: case for case in CASES}
    found = {(result.case, result.side): result for result in results}
    reasons: list[str] = []
    sides = (OURS, FLEX, SDPA)
    yield f"| call | dtype | direction | {' | '.join(sides)} |"
    yield "| --- " * (3 + len(sides)) + "|"
    for title in dict.fromkeys(result.case for result in results):
        *_, dtype, direction = title.split()
        cells = [_cell(found[title, side], reasons) for side in sides]
        yield f"| {cases[title].variant} | {dtype} | {direction} | {' | '.join(cells)} |"
    yield ""
    for number, reason in enumerate(reasons, 1):
        yield f"{number}. {reason}"


def _cell(result: Result, reasons: list[str]) -> str:
    if result.ms is None:
        reason = f"{result.side}: {result.note}"
        if reason not in reasons:
            reasons.append(reason)
        return f"no ({reasons.index(reason) + 1})"
    ratio = result.facts["ratio"].median
    return f"{result.ms.median:.1f}" + ("" if result.side == OURS else f" ({ratio:.2f})")


def _features() -> Iterator[str]:
    yield f"| | {' | '.join(f'{name} {version}' for name, version in PEERS.items())} |"
    yield "| --- " * (1 + len(PEERS)) + "|"
    for title, claims in FEATURES.items():
        yield f"| {title} | {' | '.join(claim.says for claim in claims)} |"
    yield ""
    yield "### Where that stands"
    yield ""
    for title, claims in FEATURES.items():
        sources = "; ".join(f"{name}: {claim.source}" for name, claim in zip(PEERS, claims, strict=True))
        yield f"- **{title}.** {sources}"


def plot(axis: Any, results: Sequence[Result], _: Namespace) -> None:
    """The forwards in fp32 as bars of milliseconds, beside the tiles of the documents' mask."""
    figure = axis.figure
    figure.set_layout_engine("none")
    figure.set_size_inches(10, 4)
    figure.set_facecolor("white")
    beside, axis_of_times = figure.add_axes((0.06, 0.14, 0.3, 0.72)), axis
    made = Made(next(case for case in CASES if case.variant == "documents"))
    partial_, full = tile_shares(RunSchedule.from_block_mask(made.options["block_mask"]))
    beside.imshow(full + 0.4 * partial_, cmap="Blues", vmin=0, vmax=1.3)
    beside.set(title="documents: what is visited, in tiles", xlabel="keys / 128", ylabel="queries / 128")
    shown = [(r.case, r.side, r.ms.median) for r in results if r.ms and r.case.endswith("fp32 forward")]
    cases = [*dict.fromkeys(title for title, *_ in shown)]
    names = [next(case.variant for case in CASES if case.title == title) for title in cases]
    for i, side in enumerate((OURS, FLEX, SDPA)):
        bars = {cases.index(title) + 0.27 * i: ms for title, of, ms in shown if of == side}
        axis_of_times.barh([*bars], [*bars.values()], 0.25, label=side)
    axis_of_times.set_position((0.5, 0.14, 0.47, 0.72))
    axis_of_times.set(title=f"forward, fp32, S{LENGTH}, this CPU", xlabel="milliseconds, less is better")
    axis_of_times.set_yticks([i + 0.27 for i in range(len(cases))], names)
    axis_of_times.invert_yaxis()
