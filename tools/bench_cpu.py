"""`flex-inductor bench cpu`: our CPU kernels next to others that compute the same attention.

All sides of a case take turns in one process, in the opposite order every second round, so that other load hits
them alike. Shown are the median over the rounds and the middle half of them. Before
it is timed, each side is checked on one KV head against dense attention in fp64.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

from flex_inductor import create_block_mask, flex_attention, mods
from flex_inductor.masks import library
from flex_inductor.reference import over_lanes

from .cases import selected
from .files import to_write
from .rounds import Spread, alternate, milliseconds, over

OURS, FLEX, SDPA, MASKED, DENSE = "ours", "torch flex", "SDPA is_causal", "SDPA mask", "dense eager"
DENSE_BYTES = 3 << 30  # no side may hold more than this in scores
SAMPLED_ROWS = 64


@dataclass(frozen=True)
class Case:
    """One call. `at_least` holds the ratios that are aimed at, by side: its time over ours."""

    name: str
    length: int
    mask: Callable[[int], Callable] | None = None
    score: Callable[[int, int], tuple[Callable, tuple[Tensor, ...]]] | None = None
    dtype: torch.dtype = torch.float32
    backward: bool = False
    queries: int | None = None
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    at_least: dict[str, float] = field(default_factory=dict)

    @property
    def title(self) -> str:
        dtype = {torch.float32: "fp32", torch.bfloat16: "bf16"}[self.dtype]
        return f"{self.name} {dtype} S{self.length} {'forward+backward' if self.backward else 'forward'}"


@dataclass(frozen=True)
class Result:
    case: str
    side: str
    ms: Spread | None  # None where the side cannot serve
    ratio: Spread | None  # its time over ours
    at_least: float | None
    note: str = ""


def _causal(length: int) -> Callable:
    return library.causal()


def _window(length: int) -> Callable:
    return library.sliding_window(512)


def _documents(length: int) -> Callable:
    generator = torch.Generator().manual_seed(0)
    borders = torch.randint(0, length, (7,), generator=generator).sort().values
    return library.document(torch.searchsorted(borders, torch.arange(length), right=True))


def _alibi(heads: int, length: int) -> tuple[Callable, tuple[Tensor, ...]]:
    return mods.alibi(mods.alibi_slopes(heads)), ()


def _softcap(heads: int, length: int) -> tuple[Callable, tuple[Tensor, ...]]:
    return mods.softcap(20.0), ()


def _relative(heads: int, length: int) -> tuple[Callable, tuple[Tensor, ...]]:
    table = torch.zeros(heads, 2 * length - 1).uniform_(-1, 1).requires_grad_()
    return mods.relative_bias(table), (table,)


_bf16: dict[str, Any] = {"dtype": torch.bfloat16}
_train: dict[str, Any] = {"backward": True}
_decode: dict[str, Any] = {"queries": 1, "heads": 32, "kv_heads": 8, "head_dim": 128}
CASES = (
    Case("causal", 4096, _causal, at_least={FLEX: 2.2, SDPA: 1.15}),
    Case("causal", 4096, _causal, **_bf16, at_least={FLEX: 3, SDPA: 1}),
    Case("ALiBi", 4096, _causal, _alibi, at_least={FLEX: 2}),
    Case("softcap", 4096, _causal, _softcap, at_least={FLEX: 2}),
    Case("window 512", 16384, _window, at_least={FLEX: 1.6}),
    Case("documents", 4096, _documents),
    Case("GQA 8:2", 4096, _causal, kv_heads=2),
    Case("relative bias", 2048, _causal, _relative),
    Case("decode", 32768, **_decode, at_least={FLEX: 3.5}),
    Case("decode", 32768, **_decode, **_bf16, at_least={FLEX: 8}),
    Case("causal", 4096, _causal, **_train, at_least={SDPA: 1.1, DENSE: 6}),
    Case("causal", 4096, _causal, **_train, **_bf16, at_least={SDPA: 4}),
    Case("window 512", 4096, _window, **_train),
    Case("documents", 4096, _documents, **_train),
    Case("ALiBi", 2048, _causal, _alibi, **_train),
    Case("softcap", 2048, _causal, _softcap, **_train),
    Case("GQA 8:2", 4096, _causal, kv_heads=2, **_train),
    Case("relative bias", 2048, _causal, _relative, **_train, at_least={DENSE: 4}),
)


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser("cpu", help="the CPU kernels, next to others", description=__doc__)
    parser.add_argument("--json", metavar="FILE", type=to_write, help="write the results")
    parser.add_argument(
        "--plot", metavar="FILE", type=to_write, help="draw the ratios to a .png or .svg file"
    )
    parser.add_argument("--only", metavar="TEXT", help="cases whose title contains TEXT")
    parser.add_argument("--rounds", type=int, default=8, help="how often each side runs (default 8)")
    parser.add_argument("--threads", type=int, help="threads to use (default: torch's)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import Progress

    chosen = selected(CASES, arguments.only)
    if not chosen:
        return 2
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    results: list[Result] = []
    console = Console()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(chosen))
        for case in chosen:
            progress.update(task, description=case.title)
            results += measure(case, arguments.rounds)
            progress.advance(task)
    console.print(table_of(results))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"machine": machine(), "results": [asdict(r) for r in results]}, file, indent=2)
    if arguments.plot:
        plot(arguments.plot, results)
    return 0


def machine() -> dict[str, Any]:
    from .env import cpu_name

    return {
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }


def measure(case: Case, rounds: int) -> list[Result]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    query, key, value, grad = _tensors(case)
    score_mod, captures = case.score(case.heads, case.length) if case.score else (None, ())
    mask_mod = case.mask(case.length) if case.mask else None
    wanted = (query, key, value, *captures) if case.backward else ()
    gold = None
    calls: dict[str, partial] = {}
    notes: dict[str, str] = {}
    for side, attend in _sides(case, query, key, score_mod, mask_mod).items():
        call = partial(_step, attend, query, key, value, grad, wanted)
        try:
            gold = gold or _gold(case, query, key, value, grad, score_mod, mask_mod, captures)
            _check(case, side, call, gold)
            calls[side] = call
        except (RuntimeError, torch._dynamo.exc.TorchDynamoException) as error:
            if side == OURS:
                raise
            notes[side] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"[:60]
    times = alternate({side: partial(milliseconds, call) for side, call in calls.items()}, rounds)
    measured = [
        Result(case.title, side, Spread.of(found), over(found, times[OURS]), case.at_least.get(side))
        for side, found in times.items()
    ]
    refused = [Result(case.title, side, None, None, case.at_least.get(side), notes[side]) for side in notes]
    return measured + refused


def _tensors(case: Case) -> list[Tensor]:
    queries = case.queries or case.length
    shapes = [
        (1, heads, length, case.head_dim)
        for heads, length in (
            (case.heads, queries),
            (case.kv_heads, case.length),
            (case.kv_heads, case.length),
            (case.heads, queries),
        )
    ]
    tensors = [torch.randn(shape, dtype=case.dtype) for shape in shapes]
    return [*(t.requires_grad_(case.backward) for t in tensors[:3]), tensors[3]]


def _sides(
    case: Case, query: Tensor, key: Tensor, score_mod: Any, mask_mod: Any
) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    from flex_inductor.backend import flex_inductor

    block_mask = mask_mod and create_block_mask(
        mask_mod, None, None, query.size(2), key.size(2), device="cpu"
    )
    options = {"score_mod": score_mod, "block_mask": block_mask, "enable_gqa": case.heads != case.kv_heads}
    ours = torch.compile(partial(flex_attention, **options), backend=flex_inductor, dynamic=False)
    flex = torch.compile(partial(torch_flex_attention, **options), dynamic=False)
    sides: dict[str, Callable] = {OURS: ours, FLEX: flex}
    gqa = {"enable_gqa": options["enable_gqa"]}
    sdpa = torch.nn.functional.scaled_dot_product_attention
    if case.score is None and case.mask in (None, _causal):
        sides[SDPA] = partial(sdpa, is_causal=case.mask is _causal, **gqa)
    if query.size(2) * key.size(2) * case.heads * 4 * (4 if case.backward else 2) > DENSE_BYTES:
        return sides
    if mask_mod is not None and case.score is None:
        allowed = over_lanes(mask_mod, ())(*_indices(query, key))[:, :1]  # the masks here ask for no head
        sides[MASKED] = partial(sdpa, attn_mask=allowed.contiguous(), **gqa)
    sides[DENSE] = partial(dense, score_mod=score_mod, mask_mod=mask_mod)
    return sides


def _step(attend: Callable, query: Tensor, key: Tensor, value: Tensor, grad: Tensor, wanted: Any) -> Any:
    if not wanted:
        with torch.no_grad():
            return (attend(query, key, value),)
    out = attend(query, key, value)
    return out, *torch.autograd.grad(out, wanted, grad)


def _indices(query: Tensor, key: Tensor) -> list[Tensor]:
    return [torch.arange(size) for size in (*query.shape[:3], key.size(2))]


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any,
    mask_mod: Any,
    rows: Tensor | None = None,
    first_head: int = 0,
) -> Tensor:
    """Attention as one would write it without any kernel; `rows` are the queries' places if not all are there."""
    b, h, m, n = _indices(query, key)
    h, m = h + first_head, m if rows is None else rows
    key, value = (t.repeat_interleave(query.size(1) // t.size(1), 1) for t in (key, value))
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.size(-1))
    if score_mod is not None:
        scores = over_lanes(score_mod, (0,))(scores, b, h, m, n)
    if mask_mod is not None:
        scores = torch.where(over_lanes(mask_mod, ())(b, h, m, n), scores, -math.inf)
    return scores.softmax(-1).to(value.dtype) @ value


def _gold(
    case: Case,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
    score_mod: Any,
    mask_mod: Any,
    captures: tuple[Tensor, ...],
) -> tuple[Tensor, ...]:
    """The last KV head's output (sampled where only that is wanted) and gradients, in fp64."""
    group = case.heads // case.kv_heads
    first = case.heads - group
    q, k, v = (t[:, -n:].detach().double() for t, n in ((query, group), (key, 1), (value, 1)))
    if not case.backward:
        rows = _sampled(query)
        return (dense(q[:, :, rows], k, v, score_mod, mask_mod, rows, first),)
    wanted = [*(t.requires_grad_() for t in (q, k, v)), *captures]
    out = dense(q, k, v, score_mod, mask_mod, None, first)
    return out.detach(), *torch.autograd.grad(out, wanted, grad[:, -group:].double())


def _sampled(query: Tensor) -> Tensor:
    return torch.linspace(0, query.size(2) - 1, min(SAMPLED_ROWS, query.size(2))).long()


def _check(case: Case, side: str, call: partial, gold: tuple[Tensor, ...]) -> None:
    group = case.heads // case.kv_heads
    if case.backward:
        attend, query, key, value, grad, wanted = call.args
        of_group = torch.zeros_like(grad)
        of_group[:, -group:] = grad[:, -group:]
        out, d_query, d_key, d_value, *captured = _step(attend, query, key, value, of_group, wanted)
        found = [out[:, -group:], d_query[:, -group:], d_key[:, -1:], d_value[:, -1:], *captured]
    else:
        (out,) = call()
        found = [out[:, -group:, _sampled(call.args[1])]]
    for got, want in zip(found, gold, strict=True):
        error = (got.double() - want.double()).abs().max() / want.abs().max()
        bound = (
            64 * torch.finfo(case.dtype).eps
            if case.dtype is torch.float32
            else 8 * torch.finfo(case.dtype).eps
        )
        if not error < bound:
            raise RuntimeError(f"{side} is wrong: relative error {error:.2g}, expected below {bound:.2g}")


def table_of(results: list[Result]) -> Any:
    from rich.table import Table

    facts = machine()
    table = Table(
        title=f"{facts['cpu']}, {facts['vectors']}, {facts['threads']} threads, torch {facts['torch']}"
    )
    for column, justify in (
        ("case", "left"),
        ("side", "left"),
        ("ms", "right"),
        ("over ours", "right"),
        ("aim", "right"),
    ):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    last = None
    for result in results:
        if result.case != last and last is not None:
            table.add_section()
        ms = result.note if result.ms is None else str(result.ms)
        ratio = "" if result.ratio is None or result.side == OURS else str(result.ratio)
        aim = f"{result.at_least:g}x" if result.at_least else ""
        table.add_row(result.case if result.case != last else "", result.side, ms, ratio, aim)
        last = result.case
    return table


def plot(path: str, results: list[Result]) -> None:
    """Bars: how many times as long as ours each side takes."""
    from matplotlib import pyplot

    shown = [r for r in results if r.ratio is not None and r.side != OURS]
    cases = list(dict.fromkeys(r.case for r in shown))
    sides = list(dict.fromkeys(r.side for r in shown))
    figure, axis = pyplot.subplots(figsize=(8, 0.6 * len(cases) + 1))
    height = 0.8 / max(1, len(sides))
    for i, side in enumerate(sides):
        of_side = [r for r in shown if r.side == side]
        places = [cases.index(r.case) + i * height for r in of_side]
        axis.barh(places, [r.ratio.median for r in of_side], height, label=side)
    axis.axvline(1, color="black", linewidth=1)
    axis.set(
        xscale="log", xlabel="time over ours", yticks=[i + 0.4 for i in range(len(cases))], yticklabels=cases
    )
    axis.invert_yaxis()
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
