"""`flex-inductor bench masks`: what building block masks costs, next to torch's own function.

Each side has a process of its own: imports, then the first call (with a small mask, as a model's first step would
pay it), then the case itself for its peak memory. Then the sides take turns, in the opposite order every second
round; shown are the median over the rounds and the middle half of them.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask as torch_create_block_mask

from flex_inductor.masks import library
from flex_inductor.masks.library.algebra import or_masks
from flex_inductor.masks.library.blockmask import create_block_mask

from .cases import selected
from .files import to_write
from .rounds import Spread, alternate, milliseconds

SIDES = ("ours", "torch eager", "torch compiled")
ROUNDS, MOST_SECONDS = 15, 10
PLOT_LENGTHS = tuple(1 << n for n in range(12, 21))


@dataclass(frozen=True)
class Case:
    name: str
    length: int
    make: Callable[[], Callable]
    most_ms: float
    most_mb: float
    compact: bool = False
    torch_too: bool = False


@dataclass(frozen=True)
class Result:
    case: str
    side: str
    first_ms: float
    ms: Spread
    best_ms: float
    peak_mb: float
    calls: int


def random_documents(length: int, count: int) -> torch.Tensor:
    """Sorted ids of `count` documents with random borders."""
    generator = torch.Generator().manual_seed(0)
    borders = torch.randint(0, length, (count - 1,), generator=generator).sort().values
    return torch.searchsorted(borders, torch.arange(length), right=True)


def documents(length: int, count: int) -> Callable:
    return library.document(random_documents(length, count))


def hashed() -> Callable:
    return lambda b, h, q, kv: ((q.long() * 2654435761) ^ (kv * 40503)) % 1009 < 5


def image(side: int) -> Callable:
    def neighbours(b, h, q, kv):
        return ((q % side - kv % side).abs() <= 6) & ((q // side - kv // side).abs() <= 6)

    return neighbours


def unsorted(count: int) -> Callable:
    """65,536 tokens in no order, of `count` documents at random."""
    generator = torch.Generator().manual_seed(0)
    return library.document(torch.randint(0, count, (65536,), generator=generator), causal=False)


def distinct() -> Callable:
    return library.document(torch.randperm(65536, generator=torch.Generator().manual_seed(0)), causal=False)


CASES = (
    Case("causal", 32768, library.causal, 25, 25, torch_too=True),
    Case("sliding 1024", 32768, lambda: library.sliding_window(1024), 25, 25, torch_too=True),
    Case("causal + 8 documents", 32768, lambda: documents(32768, 8), 25, 25, torch_too=True),
    Case("prefix 4000", 32768, lambda: or_masks(library.causal(), lambda b, h, q, kv: kv < 4000), 25, 25),
    Case("1M causal, compact", 1 << 20, library.causal, 30, 40, compact=True),
    Case(
        "1M causal + 256 documents, compact", 1 << 20, lambda: documents(1 << 20, 256), 60, 50, compact=True
    ),
    Case("600 new documents, compact", 262144, lambda: documents(262144, 600), 30, 50, compact=True),
    Case("600 new documents", 262144, lambda: documents(262144, 600), 70, 120),
    Case("13 x 13 neighbours, 256 x 256", 65536, lambda: image(256), 50, 100),
    Case("13 x 13 neighbours, 250 x 250", 62500, lambda: image(250), 1500, 100),
    Case("hash", 16384, hashed, 700, 100, torch_too=True),
    Case("unsorted ids of 600", 65536, lambda: unsorted(600), 4000, 150),
    Case("unsorted ids of 10,000", 65536, lambda: unsorted(10000), 4000, 150),
    Case("distinct ids", 65536, distinct, 4000, 150),
)


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser("masks", help="the cost of building block masks", description=__doc__)
    parser.add_argument(
        "--json", metavar="FILE", type=to_write, help="write the results ('-': to standard output)"
    )
    parser.add_argument(
        "--plot", metavar="FILE", type=to_write, help="draw cost over length to a .png or .svg file"
    )
    parser.add_argument(
        "--no-torch", action="store_true", help="leave torch's function out (it takes minutes)"
    )
    parser.add_argument("--only", metavar="TEXT", help="cases whose name contains TEXT")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    chosen = selected(CASES, arguments.only, lambda case: case.name)
    if not chosen:
        return 2
    if arguments.plot and find_spec("matplotlib") is None:
        print("--plot needs matplotlib: pip install 'flex-inductor[draw]'", file=sys.stderr)
        return 2
    quiet = arguments.json == "-"
    results = []
    if not quiet:
        print(
            f"{'case':36} {'side':15} {'first':>9} {'median':>26} {'best':>9} {'at most':>9} "
            f"{'peak':>10} {'at most':>9}"
        )
    for case in chosen:
        sides = SIDES if case.torch_too and not arguments.no_torch else SIDES[:1]
        for result in measured(case, sides):
            results.append(result)
            if not quiet:
                print(line_of(case, result), flush=True)
    if arguments.json:
        text = json.dumps([asdict(r) for r in results if isinstance(r, Result)], indent=2)
        if quiet:
            print(text)
        else:
            with open(arguments.json, "w") as file:
                file.write(text + "\n")
    if arguments.plot:
        plot(arguments.plot, with_torch=not arguments.no_torch)
    return 0


def line_of(case: Case, result: Result | str) -> str:
    if isinstance(result, str):
        return f"{case.name:36} {result}"
    limits = (f"{case.most_ms:7.0f}ms", f"{case.most_mb:7.0f}MB") if result.side == SIDES[0] else ("", "")
    return (
        f"{case.name:36} {result.side:15} {result.first_ms:7.0f}ms {result.ms!s:>24}ms "
        f"{result.best_ms:7.1f}ms {limits[0]:>9} "
        f"{result.peak_mb:8.1f}MB {limits[1]:>9}"
    )


class Side:
    """One way to build a case's mask, in this process."""

    def __init__(self, case: Case, side: str):
        functions: dict[str, Callable] = {
            "ours": create_block_mask,
            "torch eager": torch_create_block_mask,
            "torch compiled": torch.compile(torch_create_block_mask),
        }
        options = {"compact": True} if case.compact and side == "ours" else {}
        self.create = functools.partial(functions[side], **options)
        self.case, self.compiled = case, side == "torch compiled"

    def prepare(self) -> tuple[float, float]:
        """Milliseconds of the first call, and MB at the peak of the first of the case's length."""
        if self.compiled:  # it is warm only for the very same call
            self.mask_mod = self.case.make()
            first = self.milliseconds()
        else:
            first = milliseconds(lambda: self.create(library.causal(), None, None, 512, 512, "cpu"))
            self.mask_mod = self.case.make()
        return first, above_start(self.build)

    def build(self) -> Any:
        return self.create(self.mask_mod, None, None, self.case.length, self.case.length, "cpu")

    def milliseconds(self) -> float:
        return milliseconds(self.build)

    def close(self) -> None:
        pass


class OwnProcess:
    """A Side in a process of its own."""

    def __init__(self, case: Case, side: str):
        command = [sys.executable, "-m", "flex_inductor.tools.bench_masks", case.name, side]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def prepare(self) -> tuple[float, float]:
        first, peak = self._answer()
        return first, peak

    def milliseconds(self) -> float:
        self.process.stdin.write("again\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        line = self.process.stdout.readline()
        if not line:
            _, said = self.process.communicate()
            reason = said.strip().splitlines()[-1:] or [f"exit status {self.process.returncode}"]
            raise RuntimeError(reason[0])
        return json.loads(line)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def serve(side: Side) -> None:
    """The other end of an OwnProcess: a line for the first call, then one for each line that comes."""
    print(json.dumps(side.prepare()), flush=True)
    for _ in sys.stdin:
        print(json.dumps(side.milliseconds()), flush=True)


def measured(case: Case, names: Sequence[str]) -> list[Result | str]:
    """The results, or one line for a side that says why it has none."""
    sides = {name: OwnProcess(case, name) for name in names}
    first, failed = {}, []
    try:
        for name, side in sides.items():
            try:
                first[name] = side.prepare()
            except RuntimeError as error:
                failed.append(f"{name}: {error}")
        times = alternate({name: sides[name].milliseconds for name in first}, ROUNDS, MOST_SECONDS)
    finally:
        for side in sides.values():
            side.close()
    return [
        *(
            Result(case.name, name, first[name][0], Spread.of(of), min(of), first[name][1], len(of))
            for name, of in times.items()
        ),
        *failed,
    ]


def above_start(call: Callable[[], Any]) -> float:
    """Peak resident memory during the call above what it was before, in MB (Linux)."""
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the peak
    before = status_mb("VmRSS")
    call()
    return status_mb("VmHWM") - before


def status_mb(field: str) -> float:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith(field))


def plot(path: str, with_torch: bool) -> None:
    """Milliseconds of causal + documents of about 4k tokens, over the length."""
    from matplotlib import pyplot

    compact = functools.partial(create_block_mask, compact=True)
    sides: dict[str, tuple[Callable, int, int]] = {  # function, longest mask, calls
        "BlockMask": (create_block_mask, 1 << 18, 7),
        "compact": (compact, 1 << 20, 7),
        "torch eager": (torch_create_block_mask, 1 << 14 if with_torch else 0, 1),
    }
    series: dict[str, list[tuple[int, float]]] = {name: [] for name in sides}
    for length in PLOT_LENGTHS:
        mask_mod = documents(length, max(1, length // 4096))
        for name, (build, longest, calls) in sides.items():
            if length <= longest:
                call = functools.partial(build, mask_mod, None, None, length, length, "cpu")
                series[name].append((length, statistics.median(milliseconds(call) for _ in range(calls))))
    figure, axis = pyplot.subplots(figsize=(6, 4))
    for name, points in series.items():
        if points:
            axis.plot(*zip(*points, strict=True), marker="o", label=name)
    axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms", title="causal + documents of about 4k")
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    wanted, wanted_side = sys.argv[1:]
    serve(Side(next(case for case in CASES if case.name == wanted), wanted_side))
