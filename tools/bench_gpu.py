"""`flex-inductor bench gpu`: our kernels, torch's flex_attention and SDPA on this machine's card."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

LENGTHS = (2048, 4096, 8192, 16384)
HEAD_DIMS = (64, 128, 256)
VARIANTS = ("causal", "window", "documents", "alibi", "bias", "decode")
ROUNDS = 20
TOKENS = 16384  # in a batch, so that every length does comparable work


@dataclass(frozen=True)
class Case:
    """Tensors of one measurement, and how much work it is."""

    variant: str
    head_dim: int
    length: int
    inputs: tuple[Any, Any, Any]
    score_mod: Callable | None
    block_mask: Any
    pairs: float  # (query, key) pairs that the mask leaves, over batch and heads

    def flops(self, backward: bool) -> float:
        return self.pairs * self.head_dim * 4 * (2.5 if backward else 1.0)


def register(kinds: argparse._SubParsersAction) -> None:
    parser = kinds.add_parser("gpu", help="attention kernels on this machine's card, next to torch's")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--head-dims", type=int, nargs="+", default=HEAD_DIMS)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import torch
    import triton

    name = torch.cuda.get_device_name() if args.device == "cuda" else args.device
    print(f"{name}, torch {torch.__version__}, triton {triton.__version__}, {time.strftime('%Y-%m-%d')}\n")
    print("| variant | D | length | pass | ours TFLOP/s | torch flex | SDPA | ours / torch flex |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for variant in args.variants:
        for head_dim in args.head_dims:
            for length in args.lengths:
                for row in _rows(_case(variant, head_dim, length, args.device)):
                    print(f"| {' | '.join(row)} |", flush=True)
    return 0


def _case(variant: str, head_dim: int, length: int, device: str) -> Case:
    import torch

    from flex_inductor import create_block_mask

    heads, kv_heads, queries = (64, 8, 1) if variant == "decode" else (16, 16, length)
    batch = max(1, TOKENS // length)
    shapes = ((batch, heads, queries), (batch, kv_heads, length), (batch, kv_heads, length))
    dtype = torch.bfloat16
    inputs = tuple(
        torch.randn(*shape, head_dim, dtype=dtype, device=device, requires_grad=variant != "decode")
        for shape in shapes
    )
    document = torch.arange(length, device=device) * 8 // length
    bias = torch.randn(2 * length, device=device, requires_grad=True)
    slopes = torch.exp2(-torch.arange(1, heads + 1, device=device) / 2)
    masks: dict[str, Callable] = {
        "window": lambda b, h, q, k: (q >= k) & (q - k < 1024),
        "documents": lambda b, h, q, k: (document[q] == document[k]) & (q >= k),
    }
    mods: dict[str, Callable] = {
        "alibi": lambda s, b, h, q, k: s + slopes[h] * (k - q),
        "bias": lambda s, b, h, q, k: s + bias[q - k + length],
    }
    mask_mod = None if variant == "decode" else masks.get(variant, lambda b, h, q, k: q >= k)
    mask = mask_mod and create_block_mask(mask_mod, None, None, queries, length, device=device)
    share = {"window": min(1.0, 2048 / length), "documents": 1 / 8}.get(variant, 1.0)
    pairs = batch * heads * queries * length * (1.0 if mask is None else share / 2)
    score_mod = mods.get(variant)
    return Case(variant, head_dim, length, inputs, score_mod, mask, pairs)  # type: ignore[arg-type]


def _rows(case: Case) -> Iterator[list[str]]:
    import torch
    from torch.nn.attention.flex_attention import flex_attention as torch_flex

    import flex_inductor

    def ours(q, k, v):
        return flex_inductor.flex_attention(q, k, v, case.score_mod, case.block_mask, enable_gqa=True)

    def theirs(q, k, v):
        return torch_flex(q, k, v, case.score_mod, case.block_mask, enable_gqa=True)

    def sdpa(q, k, v):
        causal = case.variant != "decode"
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    torch._dynamo.reset()
    contenders: dict[str, Callable] = {
        "ours": torch.compile(ours, backend="flex_inductor"),
        "torch flex": torch.compile(theirs),
    }
    if case.variant in ("causal", "decode"):
        contenders["SDPA"] = sdpa
    seconds = {name: _measure(attend, case) for name, attend in contenders.items()}
    for i, name in enumerate(("forward",) if case.variant == "decode" else ("forward", "backward")):
        rates = {
            who: case.flops(i == 1) / times[i] / 1e12 if times else 0.0 for who, times in seconds.items()
        }
        ratio = f"{rates['ours'] / rates['torch flex']:.2f}" if rates["torch flex"] else "-"
        shown = [f"{rates[who]:.1f}" if rates.get(who) else "-" for who in ("ours", "torch flex", "SDPA")]
        yield [case.variant, str(case.head_dim), str(case.length), name, *shown, ratio]


def _measure(attend: Callable, case: Case) -> tuple[float, ...] | None:
    """Median seconds of the forward, and of the backward where there is one; None if it fails, which is said."""
    try:
        out = attend(*case.inputs)
        forward = _median(lambda: attend(*case.inputs), out.device)
        if not out.requires_grad:
            return (forward,)
        upstream = out.detach().clone()
        backward = _median(lambda: out.backward(upstream, retain_graph=True), out.device)
    except Exception as error:  # one contender that fails leaves the others to be measured
        print(f"<!-- {case.variant} D{case.head_dim} {case.length}: {type(error).__name__}: {error} -->")
        return None
    return forward, backward


def _median(call: Callable[[], Any], device: Any) -> float:
    import torch

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    seconds = []
    for round_ in range(ROUNDS + 3):
        wait()
        start = time.perf_counter()
        call()
        wait()
        if round_ >= 3:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
