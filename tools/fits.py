"""What the config that an untuned call gets takes of every card, compiled for cards that are not there.

python -m flex_inductor.tools.fits --out docs/fits.md    (or `make fits`)
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flex_inductor import Sequences, create_block_mask, flex_attention, varlen_attention
from flex_inductor.lowerings.triton.device import known_device
from flex_inductor.masks import causal

from .inspector import inspect
from .resources import TARGETS, compile_for

HEAD_DIMS = (16, 32, 64, 96, 128, 192, 256)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LENGTH, HEADS, KV_HEADS = 1000, 4, 2  # no tile divides the length
PAGE = 16


class Fit(NamedTuple):
    """One kernel of a call, or "chunked" where none serves it."""

    card: str
    door: str
    dtype: str
    head_dim: int
    kernel: str
    shared_bytes: int = 0
    registers: int = 0
    spill_bytes: int = 0

    @property
    def room(self) -> int:
        """Bytes of shared memory that are left."""
        return known_device(self.card).shared_bytes - self.shared_bytes

    @property
    def of_call(self) -> str:
        return f"{self.door} D{self.head_dim} {self.dtype}"


def plain(head_dim: int, dtype: torch.dtype) -> tuple[Callable, list[torch.Tensor]]:
    mask = create_block_mask(causal(), None, None, LENGTH, LENGTH, "cpu")
    q, k, v = (
        torch.zeros(1, heads, LENGTH, head_dim, dtype=dtype, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    return lambda q, k, v: flex_attention(q, k, v, block_mask=mask, enable_gqa=True), [q, k, v]


def captured(head_dim: int, dtype: torch.dtype) -> tuple[Callable, list[torch.Tensor]]:
    """Documents with hidden keys, and a bias that is learnt for every distance."""
    document, hidden = torch.arange(LENGTH) // 100, torch.arange(LENGTH) % 7

    def same_document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (document[q_idx] == document[kv_idx]) & (hidden[kv_idx] > 0)

    mask = create_block_mask(same_document, None, None, LENGTH, LENGTH, "cpu")

    def attend(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return flex_attention(
            q, k, v, lambda s, b, h, m, n: s + bias[h, m - n + LENGTH], mask, enable_gqa=True
        )

    _, tensors = plain(head_dim, dtype)
    return attend, [*tensors, torch.zeros(HEADS, 2 * LENGTH, requires_grad=True)]


def decode(head_dim: int, dtype: torch.dtype) -> tuple[Callable, list[torch.Tensor]]:
    shapes = (2, HEADS, 1, head_dim), *[(2, KV_HEADS, 8 * LENGTH, head_dim)] * 2
    tensors = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    return lambda q, k, v: flex_attention(q, k, v, enable_gqa=True), tensors


def packed(head_dim: int, dtype: torch.dtype) -> tuple[Callable, list[torch.Tensor]]:
    sequences = Sequences.from_lengths([300, 500, LENGTH - 800])
    mask = sequences.mask(causal())
    tensors = [
        torch.zeros(LENGTH, heads, head_dim, dtype=dtype, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    return lambda q, k, v: varlen_attention(q, k, v, sequences, block_mask=mask, enable_gqa=True), tensors


def _paged(queries: int, head_dim: int, dtype: torch.dtype) -> tuple[Callable, list[torch.Tensor]]:
    pages = -(-LENGTH // PAGE)
    offsets, used, places = (
        torch.tensor(numbers, dtype=torch.int32)
        for numbers in ([0, queries, 2 * queries], [LENGTH // 2, LENGTH], [*range(2 * pages)])
    )
    sequences = Sequences(offsets, used_k=used, pages=places.view(2, pages), page_size=PAGE)
    mask = sequences.mask(causal())
    shapes = (2 * queries, HEADS, head_dim), *[(2 * pages, PAGE, KV_HEADS, head_dim)] * 2
    tensors = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    return lambda q, k, v: varlen_attention(q, k, v, sequences, block_mask=mask, enable_gqa=True), tensors


def paged(head_dim: int, dtype: torch.dtype) -> tuple[Callable, list[torch.Tensor]]:
    return _paged(LENGTH // 4, head_dim, dtype)


def paged_decode(head_dim: int, dtype: torch.dtype) -> tuple[Callable, list[torch.Tensor]]:
    return _paged(1, head_dim, dtype)


DOORS = {door.__name__: door for door in (plain, captured, decode, packed, paged, paged_decode)}


def fits(card: str, door: str, dtype: str, head_dim: int) -> list[Fit]:
    """What the kernels of one call take: forward, and backward where it has one."""
    torch._dynamo.reset()
    attend, tensors = DOORS[door](head_dim, DTYPES[dtype])
    (call,) = inspect(attend, *tensors, target=card).calls
    found = [
        Fit(card, door, dtype, head_dim, "chunked")
        for lowered in call.lowered.values()
        if lowered.decision.chosen != "triton"
    ]
    for kernel in call.kernels:
        used, made = kernel.resources, kernel.made.triton
        assert made is not None
        shared = used.shared_bytes or 0
        if kernel.config != made.configs[0]:  # which is loaded first, and left because it spills
            shared = max(shared, compile_for(made, made.configs[0], card).metadata.shared)
        numbers = (shared, used.registers or 0, used.spill_bytes or 0)
        found.append(Fit(card, door, dtype, head_dim, kernel.kind, *numbers))
    return found


PREFACE = """# What kernels take of cards

`make fits` compiles what untuned calls get for every card and writes this page;
`python -m flex_inductor.tools.fits --cards sm_90 --out docs/fits.md` writes one card's part anew. Shared memory is that
of one instance, registers and local memory those of a thread. Each number is the largest of all calls (those of
`tools/fits.py`). fp32 is without TF32. Compilers give the numbers, not cards.
"""


def page(found: Sequence[Fit], before: str = "") -> str:
    """The worst of each kernel on each card, and the calls that no kernel serves. Cards that are only in the page
    `before` keep their part."""
    parts = {part.split(":")[0]: part for part in before.split("\n## ")[1:]}
    for card in dict.fromkeys(fit.card for fit in found):
        parts[card] = _part(card, [fit for fit in found if fit.card == card])
    ordered = sorted(parts, key=TARGETS.index)
    return "\n## ".join([PREFACE, *(parts[card] for card in ordered)])


def _part(card: str, found: Sequence[Fit]) -> str:
    lines = [
        f"{card}: {known_device(card).shared_bytes:,} bytes of shared memory",
        "",
        f"Head dims {_all(found, 'head_dim')}; {_all(found, 'dtype')}; {_all(found, 'door')}.",
        "",
        "| kernel | calls | shared memory | registers | local bytes |",
        "| --- | --- | --- | --- | --- |",
    ]
    kernels = defaultdict(list)
    for fit in found:
        kernels[fit.kernel].append(fit)
    chunked = kernels.pop("chunked", [])
    for kernel, of in sorted(kernels.items()):
        most = max(of, key=lambda fit: fit.shared_bytes)
        spilling = sum(fit.spill_bytes > known_device(fit.card).few_spilled for fit in of)
        spill = max(of, key=lambda fit: fit.spill_bytes)
        local = f"{spill.spill_bytes} ({spill.of_call}; {spilling} of {len(of)} spill)" if spilling else "0"
        cells = [f"{most.shared_bytes:,} ({most.of_call})", str(max(fit.registers for fit in of)), local]
        lines.append(f"| {kernel} | {len(of)} | {' | '.join(cells)} |")
    if chunked:
        served = ", ".join(sorted({fit.of_call for fit in chunked}))
        lines += ["", f"In chunks, because no kernel serves them: {served}."]
    return "\n".join(lines) + "\n"


def _all(found: Sequence[Fit], field: str) -> str:
    return ", ".join(map(str, dict.fromkeys(getattr(fit, field) for fit in found)))


def _fits(case: tuple[str, str, str, int]) -> list[Fit]:
    torch.set_num_threads(1)
    return fits(*case)


def main(argv: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m flex_inductor.tools.fits", description=__doc__)
    parser.add_argument("--cards", nargs="+", choices=TARGETS, default=TARGETS)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=[*DTYPES])
    parser.add_argument("--head-dims", nargs="+", type=int, default=HEAD_DIMS)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--out", help="the page to write; parts of other cards stay")
    given = parser.parse_args(None if argv is None else [*argv])
    cases = [*itertools.product(given.cards, DOORS, given.dtypes, given.head_dims)]
    with ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn")) as pool:
        found = [fit for each in pool.map(_fits, cases, chunksize=4) for fit in each]
    if given.out:
        out = Path(given.out)
        out.write_text(page(found, out.read_text() if out.exists() else ""))
    else:
        print(page(found))
    without_room = [fit for fit in found if fit.room < 0]
    for fit in without_room:
        print(f"{fit.card}: {fit.kernel}, {fit.of_call}: {-fit.room} bytes too many", file=sys.stderr)
    return 1 if without_room else 0


if __name__ == "__main__":
    raise SystemExit(main())
