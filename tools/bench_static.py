"""`flex-inductor bench static`: what kernels ask of a GPU that is not there, ours next to torch's own.

Both are rendered and compiled here, each with the config it would use untuned, and read back from the
binary. An instruction counts once for each thread of the instance that runs it: what a loop's body holds,
times the threads, over the scores that one iteration visits, is its instructions per score.

For sm_100 and gfx942 only our kernels are read, and not modelled: instructions for tensor cores of the one do not say
how much they do, and of the other's pipes too few rates are published.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from flex_inductor.lowerings.triton.configs import STACK_BYTES

from .cases import selected
from .files import to_write
from .generated import GeneratedKernel

LENGTH = 1024
BATCH, HEADS = 2, 8
HEAD_DIMS = (64, 128, 256)
VARIANTS = ("causal", "alibi", "softcap", "document", "bias")
TARGETS = ("sm_90", "sm_80")
ONLY_READ = ("sm_100", "gfx942")
SIDES = ("ours", "torch")
FEWER = 0.85  # of torch's instructions that are not for tensor cores, at most


@dataclass(frozen=True)
class Case:
    variant: str
    head_dim: int
    target: str

    @property
    def title(self) -> str:
        return f"{self.variant} D{self.head_dim} {self.target}"


@dataclass(frozen=True)
class Loop:
    """One iteration of a main loop. What is counted is of one thread."""

    work: str  # forward, dq, dkdv, dk, dv, backward (all at once)
    blocks: str  # partial: mask_mod runs; full: it does not
    instructions: int
    tensor: int
    local: int  # loads and stores of local memory
    scores: float  # visited, for one thread
    area: int  # the scores of the tile
    flops_per_byte: float  # of the tiles that it loads
    repeated: float | None  # how often tensor cores do what has to be done once, where instructions say
    cycles: dict[str, float] = field(default_factory=dict)  # of an iteration, by pipe
    copies: tuple[int, ...] = ()  # that may be under way at each wait
    products: int = 0
    barriers: int = 0


@dataclass(frozen=True)
class Kernel:
    case: Case
    side: str
    kind: str
    config: dict[str, int]
    registers: int
    local_bytes: int
    shared_bytes: int
    fits: bool
    loops: list[Loop]


@dataclass(frozen=True)
class Work:
    """What tensor cores do for one tile: `products` of its area and a head dim."""

    name: str
    products: int
    tile: tuple[str, str]  # the side that stays and the one that is walked


# Torch numbers the tiles of its backward: 1 for keys and values, 2 for queries.
FORWARD = Work("forward", 2, ("BLOCK_M", "BLOCK_N"))
DQ = Work("dq", 3, ("BLOCK_M2", "BLOCK_N2"))
DKDV = Work("dkdv", 4, ("BLOCK_N1", "BLOCK_M1"))
DK = Work("dk", 3, ("BLOCK_N1", "BLOCK_M1"))
DV = Work("dv", 2, ("BLOCK_N1", "BLOCK_M1"))
KINDS: dict[str, tuple[Work, ...]] = {  # of kernels, ours and torch's
    "forward": (FORWARD,),
    "backward_dq": (DQ,),
    "backward_dkdv": (DKDV,),
    "backward_dk": (DK,),
    "backward_dv": (DV,),
    "torch_backward": (DQ, DKDV),
}
PASSES = ("forward", "backward")


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "static", help="what kernels ask of a GPU that is not there, next to torch's", description=__doc__
    )
    targets = (*TARGETS, *ONLY_READ)
    parser.add_argument(
        "--target", choices=targets, nargs="+", default=TARGETS, help=f"default: {' '.join(TARGETS)}"
    )
    parser.add_argument("--only", metavar="TEXT", help="cases whose title contains TEXT")
    parser.add_argument("--json", metavar="FILE", type=to_write, help="write all that was found")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    import torch
    import triton
    from rich.console import Console
    from rich.progress import Progress

    cases = [Case(v, d, t) for t in arguments.target for v in VARIANTS for d in HEAD_DIMS]
    chosen = selected(cases, arguments.only)
    if not chosen:
        return 2
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    kernels: list[Kernel] = []
    missed: list[str] = []
    read_only: list[str] = []
    print(f"torch {versions['torch']}, triton {versions['triton']}, bf16, S{LENGTH}; ours / torch's\n")
    if set(arguments.target) & {*TARGETS}:
        print(HEADER)
    model: list[str] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(chosen))
        for case in chosen:
            progress.update(task, description=case.title)
            found = measure(case)
            kernels += found
            if case.target in ONLY_READ:
                read_only += map(read_line, found)
            else:
                print("\n".join(lines_of(found)), flush=True)
                missed += misses(found)
                model += model_lines_of(found)
            progress.advance(task)
    if model:
        print(
            "\n".join(
                ["\nA model, not a measurement: see flex_inductor/tools/pipes.py\n", MODEL_HEADER, *model]
            )
        )
        goals = "\n".join(["", *(f"- {line}" for line in missed)]) if missed else "none"
        print(f"\nGoals missed: {goals}")
    if read_only:
        print("\n".join(["\nOurs, read and not modelled\n", READ_HEADER, *read_only]))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({**versions, "kernels": [asdict(k) for k in kernels], "missed": missed}, file, indent=2)
    return 0


def measure(case: Case) -> list[Kernel]:
    """Our kernels, then torch's."""
    from torch.nn.attention.flex_attention import flex_attention as torch_flex

    from flex_inductor import flex_attention

    from .inspector import attention_kernels
    from .torch_kernels import torch_kernels

    ours = attention_kernels(*_call(case, flex_attention), target=case.target)
    if case.target in ONLY_READ:
        return [read(case, SIDES[0], kernel) for kernel in ours]
    torchs = torch_kernels(*_call(case, torch_flex), target=case.target)
    return [
        read(case, side, kernel)
        for side, kernels in zip(SIDES, (ours, torchs), strict=True)
        for kernel in kernels
    ]


def _call(case: Case, attention: Callable) -> list[Any]:
    """A function that calls `attention`, and its arguments: all inputs need gradients, as does the bias."""
    import torch

    from flex_inductor import create_block_mask

    length = LENGTH
    document = torch.arange(length) // 300
    slopes = torch.exp2(-torch.arange(1.0, HEADS + 1))
    masks: dict[str, Callable] = {
        "document": lambda b, h, q, k: (document[q] == document[k]) & (q >= k),
    }
    mask_mod = masks.get(case.variant, lambda b, h, q, k: q >= k)
    mask = create_block_mask(mask_mod, None, None, length, length, "cpu")

    def attend(bias: Any, query: Any, key: Any, value: Any) -> Any:
        mods: dict[str, Callable] = {
            "alibi": lambda s, b, h, q, k: s + slopes[h] * (k - q),
            "softcap": lambda s, b, h, q, k: 20.0 * torch.tanh(s / 20.0),
            "bias": lambda s, b, h, q, k: s + bias[q - k + length],
        }
        return attention(query, key, value, score_mod=mods.get(case.variant), block_mask=mask)

    shape = (BATCH, HEADS, length, case.head_dim)
    inputs = [torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    return [attend, torch.randn(2 * length, requires_grad=True), *inputs]


def read(case: Case, side: str, kernel: GeneratedKernel) -> Kernel:
    """Compile a kernel and read its binary."""
    from flex_inductor.lowerings.triton.configs import known_device

    from . import amdgcn
    from .resources import compile_untuned, machine_code
    from .sass import main_loops

    config, compiled, found = compile_untuned(kernel, case.target)
    blocks = {name: int(size) for name, size in _BLOCKS.findall(kernel.source)} | config
    kind = _kind(kernel)
    amd = case.target.startswith("gfx")
    code = amdgcn.instructions(compiled.asm["amdgcn"]) if amd else machine_code(compiled)
    loops = [count(loop, KINDS[kind], blocks, case.head_dim, case.target) for loop in main_loops(code)]
    return Kernel(
        case,
        side,
        kind,
        blocks,
        found.registers,
        found.spill_bytes,
        found.shared_bytes,
        found.shared_bytes <= known_device(case.target).shared_bytes,
        list(_named(loops)),
    )


_BLOCKS = re.compile(r"^\s*(BLOCK_[MN]\d?)\s*:\s*tl\.constexpr = (\d+)", re.MULTILINE)


def _kind(kernel: GeneratedKernel) -> str:
    from .inspector import kind

    return kind(kernel) or ("torch_backward" if "backward" in kernel.name else "forward")


def count(
    loop: Sequence[Any], possible: Sequence[Work], blocks: dict[str, int], head_dim: int, target: str
) -> Loop:
    """A loop that visits one tile in an iteration: neither Triton nor ptxas unrolls loops like these."""
    from flex_inductor.lowerings.triton.configs import known_device

    from . import amdgcn, pipes
    from .sass import LOCAL_MEMORY, TENSOR_CORE, multiply_adds

    tensor = [i for i in loop if i.matches(TENSOR_CORE)]
    # sm_100's instructions do not say how much they do.
    done = None if target == "sm_100" else sum(map(multiply_adds, tensor)) * blocks["num_warps"]

    def sides(work: Work) -> tuple[int, int]:
        stays, walked = (blocks.get(side, blocks.get(side.rstrip("12"), 0)) for side in work.tile)
        return stays, walked

    def needed(work: Work) -> int:
        return work.products * math.prod(sides(work)) * head_dim

    fitting = [work for work in possible if done is None or needed(work) <= done]
    if not fitting:
        raise ValueError(f"{done} multiplications are too few for a tile of {blocks}")
    work = max(fitting, key=needed)
    stays, walked = sides(work)
    return Loop(
        work.name,
        "",
        len(loop),
        len(tensor),
        sum(i.matches(LOCAL_MEMORY) for i in loop),
        stays * walked / (blocks["num_warps"] * known_device(target).warp),
        stays * walked,
        work.products * stays / 2,  # two tiles of `walked` rows are loaded, of 2 bytes an element
        None if done is None else done / needed(work),
        pipes.cycles(loop, blocks["num_warps"], target) if target in pipes.CARDS else {},
        *(amdgcn if target.startswith("gfx") else pipes).overlap(loop),
    )


def _named(loops: Sequence[Loop]) -> Iterator[Loop]:
    """Of the loops for the same work the first visits partial blocks, as in the source."""
    seen: set[str] = set()
    for loop in loops:
        yield Loop(**{**asdict(loop), "blocks": "full" if loop.work in seen else "partial"})
        seen.add(loop.work)


@dataclass(frozen=True)
class Sum:
    """One side's instructions per score."""

    all: float
    tensor: float

    @property
    def other(self) -> float:
        return self.all - self.tensor


def per_score(kernels: Sequence[Kernel], blocks: str) -> Sum:
    loops = [loop for kernel in kernels for loop in kernel.loops if loop.blocks == blocks]
    return Sum(sum(i.instructions / i.scores for i in loops), sum(i.tensor / i.scores for i in loops))


def of(found: Sequence[Kernel], side: str, kind: str) -> list[Kernel]:
    """The kernels of one side for a pass."""
    return [kernel for kernel in found if kernel.side == side and kind in kernel.kind]


def misses(found: Sequence[Kernel]) -> list[str]:
    """Where our kernels for one case are not what this project set itself."""
    missed = []
    for kind in PASSES:
        ours, torchs = of(found, "ours", kind), of(found, "torch", kind)
        title = f"{found[0].case.title} {kind}"
        for kernel in ours:
            if not kernel.fits:
                missed.append(f"{title}: {kernel.shared_bytes} bytes of shared memory are too many")
            if kernel.local_bytes > STACK_BYTES:
                missed.append(f"{title}: {kernel.local_bytes} bytes of local memory")
            missed += [
                f"{title}: {loop.local} local loads and stores in a {loop.work} loop"
                for loop in kernel.loops
                if loop.local
            ]
        for blocks in ("partial", "full"):
            mine, theirs = per_score(ours, blocks), per_score(torchs, blocks)
            if mine.all > theirs.all:
                missed.append(
                    f"{title}, {blocks} blocks: {mine.all:.2f} instructions per score, torch's {theirs.all:.2f}"
                )
            fewer = FEWER if (kind, blocks) != ("forward", "full") else math.inf
            if mine.other > fewer * theirs.other:
                ratio = mine.other / theirs.other
                missed.append(
                    f"{title}, {blocks} blocks: {ratio:.2f} of torch's that are not for tensor cores"
                )
        for loop in [loop for kernel in ours for loop in kernel.loops]:
            same = [i.flops_per_byte for k in torchs for i in k.loops if i.work == loop.work]
            if same and loop.flops_per_byte < min(same) and loop.blocks == "partial":
                missed.append(
                    f"{title}: {loop.flops_per_byte:g} flops for a byte loaded in {loop.work}, torch's {min(same):g}"
                )
    return missed


HEADER = """\
| case | kernels | tiles, warps, stages | registers | local bytes | in loops | shared KiB | partial: per score \
| not tensor | ratio | full: per score | not tensor | ratio | flops/byte | repeated |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def lines_of(found: Sequence[Kernel]) -> list[str]:
    """Rows of the table: the forward, the backward."""
    rows = []
    for kind in PASSES:
        sides = [of(found, side, kind) for side in SIDES]

        def each(show: Callable[[Kernel], str], sides: Any = sides) -> str:
            return " / ".join(", ".join(dict.fromkeys(map(show, kernels))) or "-" for kernels in sides)

        cells = [
            found[0].case.title,
            kind,
            each(tiles_of),
            each(lambda kernel: str(kernel.registers)),
            each(lambda kernel: str(kernel.local_bytes)),
            each(lambda kernel: str(sum(loop.local for loop in kernel.loops))),
            each(lambda kernel: f"{kernel.shared_bytes / 1024:.0f}{'' if kernel.fits else ' (too many)'}"),
        ]
        for blocks in ("partial", "full"):
            mine, theirs = (per_score(kernels, blocks) for kernels in sides)
            cells += [
                f"{mine.all:.2f} / {theirs.all:.2f}",
                f"{mine.other:.2f} / {theirs.other:.2f}",
                f"{mine.other / theirs.other:.2f}" if theirs.other else "-",
            ]
        for show in ("flops_per_byte", "repeated"):
            cells.append(each(lambda kernel, show=show: of_loops(kernel, show)))  # type: ignore[misc]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


MODEL_HEADER = """\
| case | kernels | busiest pipes: cycles for 1024 scores | TFLOP/s at most | in step | copies ahead | products ahead \
| barriers |
| --- | --- | --- | --- | --- | --- | --- | --- |"""


def model_lines_of(found: Sequence[Kernel]) -> list[str]:
    """Rows of the model's table, about full blocks: see pipes.py."""
    from .pipes import busiest

    rows = []
    for kind, products in zip(PASSES, (2, 5), strict=True):
        sides = [
            [loop for k in of(found, side, kind) for loop in k.loops if loop.blocks == "full"]
            for side in SIDES
        ]
        bounds = [(_bound(loops, products, found[0].case), loops) for loops in sides if loops]

        def each(show: Callable[[Any, Any], str], bounds: Any = bounds) -> str:
            return " / ".join(show(*side) for side in bounds)

        cells = [
            found[0].case.title,
            kind,
            each(lambda side, _: busiest({pipe: count * 1024 for pipe, count in side[0].items()})),
            each(lambda side, _: f"{side[1].at_most / 1e12:.0f}"),
            each(lambda side, _: f"{side[1].in_step / 1e12:.0f}"),
            each(lambda _, loops: ", ".join(" ".join(map(str, loop.copies)) or "-" for loop in loops)),
            each(lambda _, loops: ", ".join(str(loop.products) for loop in loops)),
            each(lambda _, loops: ", ".join(str(loop.barriers) for loop in loops)),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


READ_HEADER = """\
| case | kernel | tile, warps, stages | registers | local bytes | in loops | shared KiB | per score: partial | full \
| for tensor cores, a tile | copies ahead | barriers |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def read_line(kernel: Kernel) -> str:
    """A row of the table of what is only read; the last three columns are about full blocks."""
    by_blocks = {loop.blocks: loop for loop in kernel.loops}
    full = by_blocks.get("full", kernel.loops[0])
    cells = [
        kernel.case.title,
        kernel.kind,
        tiles_of(kernel),
        str(kernel.registers),
        str(kernel.local_bytes),
        str(sum(loop.local for loop in kernel.loops)),
        f"{kernel.shared_bytes / 1024:.0f}{'' if kernel.fits else ' (too many)'}",
        *(f"{loop.instructions / loop.scores:.1f}" for loop in (by_blocks["partial"], full)),
        str(full.tensor),
        " ".join(map(str, full.copies)) or "-",
        str(full.barriers),
    ]
    return f"| {' | '.join(cells)} |"


def _bound(loops: Sequence[Loop], products: int, case: Case) -> tuple[dict[str, float], Any]:
    """Cycles for each score, all loops of a pass together, and what they allow for."""
    from .pipes import PIPES, bound

    by_pipe = {pipe: sum(loop.cycles[pipe] / loop.area for loop in loops) for pipe in PIPES}
    return by_pipe, bound(by_pipe, 2 * products * case.head_dim, case.target)


def of_loops(kernel: Kernel, field: str) -> str:
    return ", ".join(dict.fromkeys(f"{getattr(loop, field):.3g}" for loop in kernel.loops))


def tiles_of(kernel: Kernel) -> str:
    tiles = [
        f"{kernel.config[m]}x{kernel.config[m.replace('M', 'N')]}"
        for m in ("BLOCK_M", "BLOCK_M1", "BLOCK_M2")
        if m in kernel.config
    ]
    return f"{' '.join(tiles)} {kernel.config['num_warps']}w {kernel.config['num_stages']}s"
