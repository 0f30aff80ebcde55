"""`flex-inductor bench compile`: what a transformer's first step on a CPU costs, next to Inductor with SDPA.

Each measurement has a process and cache folders of its own, and first compiles one small function: what Inductor finds
out once about a machine and keeps for all graphs is nobody's. Then a step, forward and backward, is timed. The sides
take turns, in the opposite order every second round; shown are medians. Kernels are compiled side by side, and while
others are: seconds of the compiler are not seconds of waiting.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .files import at_least_one, to_write
from .rounds import alternate, over

OURS, SDPA = "ours", "SDPA"
SIDES = (OURS, SDPA)
AIMS = {1: 1.6, 12: 1.25}  # of SDPA's time at most, by layers
BATCH, LENGTH, WIDTH, HEADS = 2, 512, 256, 4


@dataclass(frozen=True)
class Step:
    """One process's first step."""

    wall: float  # seconds, as are all
    cpu: float  # of the process and of what it started
    phases: dict[str, float]  # what the process did, one after another
    kernels: list[tuple[str, float]]  # what the C++ compiler was started for, and how long it ran


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "compile", help="a transformer's cold compilation on CPUs, next to SDPA's", description=__doc__
    )
    parser.add_argument(
        "--layers", type=at_least_one, nargs="+", default=list(AIMS), help="default: 1 and 12"
    )
    parser.add_argument("--rounds", type=at_least_one, default=3, help="how often each side runs (default 3)")
    parser.add_argument("--bf16", action="store_true", help="weights and activations in bfloat16")
    parser.add_argument("--json", metavar="FILE", type=to_write, help="write all that was found")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    found: dict[int, dict[str, list[Step]]] = {}
    for layers in arguments.layers:
        found[layers] = measure(layers, arguments.rounds, arguments.bf16)
        Console().print(table_of(layers, found[layers]))
    if arguments.json:
        steps = {n: {side: [*map(asdict, of)] for side, of in sides.items()} for n, sides in found.items()}
        Path(arguments.json).write_text(json.dumps(steps, indent=2))
    return 0


def measure(layers: int, rounds: int, bf16: bool) -> dict[str, list[Step]]:
    steps: dict[str, list[Step]] = {side: [] for side in SIDES}

    def seconds(side: str) -> float:
        steps[side].append(in_own_process(side, layers, bf16))
        return steps[side][-1].wall

    alternate({side: lambda side=side: seconds(side) for side in SIDES}, rounds)  # type: ignore[misc]
    return steps


def in_own_process(side: str, layers: int, bf16: bool) -> Step:
    command = [sys.executable, "-m", "flex_inductor.tools.bench_compile", side, str(layers), str(int(bf16))]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command, env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}, capture_output=True, text=True
        )
    if done.returncode:
        raise RuntimeError(f"{side} failed:\n{done.stderr}")
    return Step(**json.loads(done.stdout.splitlines()[-1]))


def table_of(layers: int, steps: dict[str, list[Step]]) -> Any:
    from rich.table import Table

    aim = f", aim: {AIMS[layers]:g}x at most" if layers in AIMS else ""
    title = f"layers: {layers}, threads: {torch.get_num_threads()}{aim}"
    table = Table("seconds", *SIDES, "ours over SDPA", title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    for what in ("wall", "cpu"):
        values = {side: [getattr(step, what) for step in steps[side]] for side in SIDES}
        medians = (statistics.median(values[side]) for side in SIDES)
        table.add_row(what, *(f"{median:.2f}" for median in medians), str(over(values[OURS], values[SDPA])))
    table.add_section()
    for phase in steps[OURS][0].phases:
        medians = (statistics.median(step.phases[phase] for step in steps[side]) for side in SIDES)
        table.add_row(phase, *(f"{median:.2f}" for median in medians))
    table.add_section()
    for kind in dict.fromkeys(kind for side in SIDES for kind, _ in steps[side][0].kernels):
        table.add_row(f"C++ compiler, {kind}", *(_compiler(steps[side], kind) for side in SIDES))
    return table


def _compiler(steps: Sequence[Step], kind: str) -> str:
    count = sum(each == kind for each, _ in steps[0].kernels)
    taken = statistics.median(sum(s for each, s in step.kernels if each == kind) for step in steps)
    return f"{count} in {taken:.2f}" if count else ""


class Layer(nn.Module):
    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]):
        super().__init__()
        self.attend = attend
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.before(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.out(self.attend(query, key, value).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


def attention_of(side: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    if side == SDPA:
        return lambda q, k, v: nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    from flex_inductor import create_block_mask, flex_attention
    from flex_inductor.masks import library

    mask = create_block_mask(library.causal(), None, None, LENGTH, LENGTH, device="cpu")
    return lambda q, k, v: flex_attention(q, k, v, block_mask=mask)


def first_step(side: str, layers: int, bf16: bool) -> Step:
    """In this process, whose cache folder is empty."""
    from torch._dynamo.utils import compilation_time_metrics
    from torch._inductor.cpp_builder import CppBuilder

    dtype = torch.bfloat16 if bf16 else torch.float32
    model = nn.Sequential(*(Layer(attention_of(side)) for _ in range(layers))).to(dtype)
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=dtype)
    small = torch.ones(64, requires_grad=True)
    torch.compile(torch.sin)(small).sum().backward()
    kernels: list[tuple[str, float]] = []
    build = CppBuilder.build

    def timed(self: CppBuilder) -> None:
        start = time.perf_counter()
        build(self)
        kernels.append((kind_of(self.get_target_file_path()), time.perf_counter() - start))

    CppBuilder.build = timed  # type: ignore[method-assign]
    compilation_time_metrics.clear()
    compiled = torch.compile(model, backend="flex_inductor" if side == OURS else "inductor")
    start, cpu = time.perf_counter(), cpu_seconds()
    compiled(x).sum().backward()
    wall = time.perf_counter() - start
    phases = phases_of({name: sum(seconds) for name, seconds in compilation_time_metrics.items()}, wall)
    return Step(wall, cpu_seconds() - cpu, phases, kernels)


def cpu_seconds() -> float:
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def phases_of(metrics: dict[str, float], wall: float) -> dict[str, float]:
    """Torch's times, which hold each other, taken apart. What it does not name is among "other"."""

    def seconds(name: str) -> float:
        return metrics.get(name, 0.0)

    # The backward's graph is compiled with the forward's, or when it first runs.
    traced = seconds("create_aot_dispatcher_function") + seconds("backward._backward_impl")
    inductor = seconds("compile_fx_inner")
    run, module = seconds("GraphLowering.run"), seconds("GraphLowering.compile_to_module")
    lowered, rendered = seconds("flex_inductor.lower"), seconds("flex_inductor.render")
    phases = {
        "Dynamo": seconds("_compile.compile_inner") - seconds("OutputGraph.call_user_compiler"),
        "AOTAutograd": traced - inductor,
        "Inductor's passes": inductor - run - module,
        "lowering": run - lowered,
        "lowering of attention": lowered,
        "scheduling, code": seconds("GraphLowering.codegen") - rendered,
        "code of attention": rendered,
        "waiting for kernels": seconds("PyCodeCache.load_by_key_path"),
    }
    return {**phases, "other, running": wall - sum(phases.values())}


def kind_of(library: str) -> str:
    """Which kernels a library holds: ours have a namespace of their own."""
    source = Path(library).with_suffix(".cpp")
    text = source.read_text() if source.exists() else ""
    if "_parts {" not in text:
        return "Inductor's own"
    return "attention backward" if "d_query" in text else "attention forward"


if __name__ == "__main__":
    wanted, layer_count, with_bf16 = sys.argv[1:]
    print(json.dumps(asdict(first_step(wanted, int(layer_count), with_bf16 == "1"))))
