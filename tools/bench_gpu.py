"""`flex-inductor bench gpu`: our kernels on this machine's card, next to torch's flex_attention and SDPA.

Each side is checked against uncompiled attention in fp32 before it is timed. Sides take turns, in the opposite order
every second round; shown is the median over the rounds, and what half of the rounds lie between. The cases come in
order of importance, and those that do not fit the time given are named and left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

from flex_inductor import create_block_mask, flex_attention
from flex_inductor.masks import library

from . import rounds as in_rounds
from .cases import selected
from .rounds import Spread, alternate, over

OURS, FLEX, FLASH, CUDNN = "ours", "torch flex", "SDPA flash", "SDPA cuDNN"
TOKENS = 16384  # in a batch, so that every length does comparable work
DOCUMENTS = 8
WINDOW = 1024
FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class Case:
    """One call. `aims` holds what is aimed at by pass and side: its time over ours, or "share" of what the card can."""

    variant: str
    head_dim: int
    length: int
    heads: int = 16
    kv_heads: int = 16
    aims: dict[tuple[str, str], float] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.variant} D{self.head_dim} S{self.length}"

    @property
    def decoding(self) -> bool:
        return self.variant == "decode"

    @property
    def pairs(self) -> float:
        """(query, key) pairs that the mask leaves to a head."""
        n = self.length
        if self.decoding:
            return n
        if self.variant == "window":
            return WINDOW * n - WINDOW * (WINDOW - 1) / 2
        parts = DOCUMENTS if self.variant == "documents" else 1
        return n * (n / parts + 1) / 2


def _case(
    variant: str, head_dim: int, length: int, heads: int = 16, kv_heads: int = 16, **aims: dict[str, float]
) -> Case:
    named = {(which, side): aim for which, sides in aims.items() for side, aim in sides.items()}
    return Case(variant, head_dim, length, heads, kv_heads, named)


CASES = (
    _case("causal", 128, 8192, forward={FLEX: 1.5, CUDNN: 0.9}, backward={FLEX: 2, CUDNN: 0.85}),
    _case("documents", 128, 8192, forward={FLEX: 1.8}, backward={FLEX: 2.5}),
    _case("bias", 128, 8192, backward={FLEX: 3}),
    _case("decode", 128, 32768, 64, 8, forward={"share": 0.75}),
    _case("causal", 64, 8192),
    _case("GQA 8:1", 128, 8192, 16, 2),
    _case("alibi", 128, 8192),
    _case("window", 128, 8192),
    _case("causal", 256, 8192),
    _case("causal", 128, 2048),
    _case("causal", 128, 16384),
    _case("bias", 64, 8192),
    _case("documents", 64, 8192),
    _case("alibi", 64, 8192),
    _case("window", 64, 16384),
    _case("decode", 64, 8192, 64, 8),
    _case("GQA 8:1", 64, 16384, 16, 2),
    _case("causal", 64, 2048),
    _case("causal", 256, 2048),
    _case("documents", 256, 8192),
    _case("alibi", 256, 8192),
    _case("bias", 256, 8192),
    _case("causal", 128, 4096),
)


@dataclass(frozen=True)
class Result:
    case: str
    which: str  # forward or backward
    side: str
    ms: Spread | None  # None where the side cannot serve
    ratio: Spread | None  # its time over ours
    rate: float | None  # TFLOP/s; GB/s for decode, which reads
    share: float | None  # of a large matrix product's TFLOP/s, or of a copy's GB/s, on this card
    note: str = ""


def register(kinds: Any) -> None:
    parser = kinds.add_parser("gpu", help="attention kernels on this machine's card", description=__doc__)
    parser.add_argument("--only", metavar="TEXT", help="cases whose title contains TEXT")
    parser.add_argument("--minutes", type=float, default=6.0, help="begin no case after these (default 6)")
    parser.add_argument("--rounds", type=int, default=6, help="how often each side is timed (default 6)")
    parser.add_argument("--max-autotune", action="store_true", help="tune our configs and torch's")
    parser.add_argument("--json", metavar="FILE", help="write the results")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    import torch._functorch.config as functorch_config

    chosen = selected(CASES, arguments.only)
    if not chosen:
        return 2
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print(
            "this machine has no GPU that torch can use; `flex-inductor bench static` needs none",
            file=sys.stderr,
        )
        return 2
    begin = time.monotonic()
    device = torch.device(arguments.device)
    limits = Limits.of(device)
    facts = machine(device, limits)
    print(", ".join(map(str, facts.values())) + "\n")
    print("| case | pass | ours ms | rate | share | " + " | ".join((FLEX, FLASH, CUDNN)) + " | aims |")
    print("| --- " * 9 + "|")
    results: list[Result] = []
    for i, case in enumerate(chosen):
        if time.monotonic() - begin > arguments.minutes * 60:
            print(f"\nNo time left for: {', '.join(left.title for left in chosen[i:])}")
            break
        # A backward that is timed alone runs again and again on what its forward left.
        with functorch_config.patch(donated_buffer=False):
            found = list(measure(case, device, limits, arguments.rounds, arguments.max_autotune))
        results += found
        for line in lines_of(case, found):
            print(line, flush=True)
    for note in dict.fromkeys(f"{r.case}, {r.side}: {r.note}" for r in results if r.note):
        print(f"\n{note}")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"machine": facts, "results": [asdict(r) for r in results]}, file, indent=2)
    return 0


@dataclass(frozen=True)
class Limits:
    """What this card does at most, measured: a matrix product's TFLOP/s, and GB/s that a copy reads and writes."""

    matrix: float
    copy: float

    @classmethod
    def of(cls, device: torch.device) -> Limits:
        n = 8192 if device.type == "cuda" else 512
        square = torch.randn(n, n, dtype=torch.bfloat16, device=device)
        product = 2 * n**3 / milliseconds(lambda: square @ square, device) / 1e9
        much = torch.empty(1 << (30 if device.type == "cuda" else 20), dtype=torch.uint8, device=device)
        copy = 2 * much.numel() / milliseconds(much.clone, device) / 1e6
        return cls(product, copy)


def machine(device: torch.device, limits: Limits) -> dict[str, Any]:
    import triton

    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": f"torch {torch.__version__}",
        "triton": f"triton {triton.__version__}",
        "date": time.strftime("%Y-%m-%d"),
        "matrix": f"matrix product {limits.matrix:.0f} TFLOP/s",
        "copy": f"copy {limits.copy:.0f} GB/s",
    }


def milliseconds(call: Callable[[], Any], device: torch.device) -> float:
    """The median time of one call."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return do_bench(call, warmup=20, rep=80, quantiles=[0.5])
    return statistics.median(in_rounds.milliseconds(call) for _ in range(3))


def measure(case: Case, device: torch.device, limits: Limits, rounds: int, tuned: bool) -> Iterator[Result]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    query, key, value, grad = _tensors(case, device)
    score_mod, captures, mask_mod = _mods(case, device)
    wanted = () if case.decoding else (query, key, value, *captures)
    lengths = query.size(2), key.size(2)
    block_mask = None if case.decoding else create_block_mask(mask_mod, None, None, *lengths, device=device)
    options = {"score_mod": score_mod, "block_mask": block_mask, "enable_gqa": case.heads != case.kv_heads}
    q, k, v = (t.detach().float().requires_grad_(bool(wanted)) for t in (query, key, value))
    of_gold = (q, k, v, *captures) if wanted else ()
    gold = _results(partial(flex_attention, **options), q, k, v, of_gold, grad.float())
    calls: dict[str, dict[str, Callable[[], Any]]] = {FORWARD: {}, BACKWARD: {}}
    notes: dict[str, str] = {}
    for side, attend in _sides(case, device, options, tuned).items():
        try:
            _check(side, _results(attend, query, key, value, wanted, grad), gold)
            out = attend(query, key, value)
        except Exception as error:  # one side that fails leaves the others to be measured
            if side == OURS:
                raise
            notes[side] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"[:100]
            continue
        calls[FORWARD][side] = partial(attend, query, key, value)
        if wanted:
            calls[BACKWARD][side] = partial(
                torch.autograd.grad, out, wanted, grad, retain_graph=True, allow_unused=True
            )
    for which, of_sides in calls.items():
        timers = {side: partial(milliseconds, call, device) for side, call in of_sides.items()}
        times = alternate(timers, rounds)
        for side, found in times.items():
            ms = Spread.of(found)
            rate = _work(case, query, key, which) / ms.median
            share = rate / (limits.copy if case.decoding else limits.matrix)
            yield Result(case.title, which, side, ms, over(found, times[OURS]), rate, share)
        for side, note in notes.items() if of_sides else ():
            yield Result(case.title, which, side, None, None, None, None, note)


def _work(case: Case, query: Tensor, key: Tensor, which: str) -> float:
    """Operations in units that give TFLOP/s over milliseconds; for decode bytes read, for GB/s."""
    if case.decoding:
        return 2 * key.numel() * key.element_size() / 1e6
    products = 2 if which == FORWARD else 5
    return query.size(0) * case.heads * case.pairs * case.head_dim * 2 * products / 1e9


def _tensors(case: Case, device: torch.device) -> list[Tensor]:
    batch = 4 if case.decoding else max(1, TOKENS // case.length)
    queries = 1 if case.decoding else case.length
    sizes = [
        (case.heads, queries),
        (case.kv_heads, case.length),
        (case.kv_heads, case.length),
        (case.heads, queries),
    ]
    tensors = [
        torch.randn(batch, heads, length, case.head_dim, dtype=torch.bfloat16, device=device)
        for heads, length in sizes
    ]
    return [*(t.requires_grad_(not case.decoding) for t in tensors[:3]), tensors[3]]


def _mods(case: Case, device: torch.device) -> tuple[Callable | None, tuple[Tensor, ...], Callable]:
    length = case.length
    slopes = torch.exp2(-torch.arange(1, case.heads + 1, device=device) / 2)
    bias = torch.randn(2 * length, device=device, requires_grad=True)
    document = torch.arange(length, device=device) * DOCUMENTS // length
    scores: dict[str, tuple[Callable, tuple[Tensor, ...]]] = {
        "alibi": (lambda s, b, h, q, k: s + slopes[h] * (k - q), ()),
        "bias": (lambda s, b, h, q, k: s + bias[q - k + length], (bias,)),
    }
    masks: dict[str, Callable] = {
        "window": lambda b, h, q, k: (q >= k) & (q - k < WINDOW),
        "documents": lambda b, h, q, k: (document[q] == document[k]) & (q >= k),
    }
    return *scores.get(case.variant, (None, ())), masks.get(case.variant, library.causal())


def _sides(case: Case, device: torch.device, options: dict[str, Any], tuned: bool) -> dict[str, Callable]:
    from flex_inductor.backend import flex_inductor

    mode = "max-autotune-no-cudagraphs" if tuned else None
    ours = torch.compile(
        partial(flex_attention, **options), backend=partial(flex_inductor, mode=mode), dynamic=False
    )
    flex = torch.compile(partial(torch_flex_attention, **options), mode=mode, dynamic=False)
    sides: dict[str, Callable] = {OURS: ours, FLEX: flex}
    if options["score_mod"] is None and case.variant not in ("window", "documents"):
        for side, backend in ((FLASH, SDPBackend.FLASH_ATTENTION), (CUDNN, SDPBackend.CUDNN_ATTENTION)):
            only = partial(sdpa_kernel, backend) if device.type == "cuda" else nullcontext
            sides[side] = partial(_sdpa, only, not case.decoding, options["enable_gqa"])
    return sides


def _sdpa(only: Callable, causal: bool, gqa: bool, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with only():
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return sdpa(query, key, value, is_causal=causal, enable_gqa=gqa)


def _results(
    attend: Callable, query: Tensor, key: Tensor, value: Tensor, wanted: tuple[Tensor, ...], grad: Tensor
) -> list[Tensor]:
    """The output, and the gradients that are wanted."""
    out = attend(query, key, value)
    return [out.detach(), *(torch.autograd.grad(out, wanted, grad) if wanted else ())]


def _check(side: str, found: list[Tensor], gold: list[Tensor]) -> None:
    bound = 8 * torch.finfo(torch.bfloat16).eps
    for got, want in zip(found, gold, strict=True):
        error = (got.float() - want).abs().max() / want.abs().max()
        if not error < bound:
            raise RuntimeError(f"{side} is wrong: relative error {error:.2g}, expected below {bound:.2g}")


def lines_of(case: Case, results: list[Result]) -> Iterator[str]:
    """Rows of the table: what the other sides take, over ours."""
    for which in dict.fromkeys(r.which for r in results):
        by_side = {r.side: r for r in results if r.which == which}
        ours = by_side[OURS]
        others = [str(r.ratio) if (r := by_side.get(s)) and r.ratio else "" for s in (FLEX, FLASH, CUDNN)]
        unit = "GB/s" if case.decoding else "TFLOP/s"
        aims = ", ".join(f"{side} {aim:g}" for (of, side), aim in case.aims.items() if of == which)
        own = [str(ours.ms), f"{ours.rate:.0f} {unit}", f"{ours.share:.0%}"]
        yield f"| {' | '.join([case.title, which, *own, *others, aims])} |"
