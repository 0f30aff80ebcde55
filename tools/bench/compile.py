"""`flex-inductor bench compile`: what a transformer's first step on a CPU costs, next to Inductor with SDPA.

Each measurement has a process and cache folders of its own; if it is warm, a process before it has filled them. It
first compiles one small function: what Inductor finds out once about a machine and keeps for all graphs is nobody's.
Then a step, forward and backward, is timed. The sides take turns, in the opposite order every second round; then comes
what a step consists of. Kernels are compiled side by side, and while others are: seconds of the compiler are not
seconds of waiting.
"""

from __future__ import annotations

import gc
import os
import resource
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from ..options import at_least_one
from .harness import OURS, Result, Spread, alternate, milliseconds, results_of, rounds
from .workers import Job, Worker

HELP = "a transformer's compilation on CPUs, cold or warm, next to SDPA's"
COLUMNS = ("side", "ms", "over SDPA", "at most", "kernels")
SDPA = "SDPA"
SIDES = (SDPA, OURS)
COLD_AIM, WARM_AIM = 1.2, 1.05  # of SDPA's time at most
OPTIONS: dict[str, Any] = {
    **rounds(3),
    "--layers": {"type": at_least_one, "nargs": "+", "default": [1, 6, 12], "help": "default: 1, 6 and 12"},
    "--warm": {"action": "store_true", "help": "in caches on disk that another process has filled"},
    "--bf16": {"action": "store_true", "help": "weights and activations in bfloat16"},
}
BATCH, LENGTH, WIDTH, HEADS = 2, 512, 256, 4


@dataclass(frozen=True)
class Step:
    """One process's first step."""

    wall: float  # seconds, as are all
    cpu: float  # of the process and of what it started
    phases: dict[str, float]  # what the process did, one after another
    kernels: list[tuple[str, float]]  # what the C++ compiler was started for, and how long it ran


class Case(NamedTuple):
    layers: int
    warm: bool

    @property
    def title(self) -> str:
        return f"layers: {self.layers}" + ", warm" * self.warm


def cases(arguments: Namespace) -> list[Case]:
    return [Case(layers, arguments.warm) for layers in arguments.layers]


def measure(case: Case, arguments: Namespace) -> Iterator[Result]:
    steps: dict[str, list[Step]] = {side: [] for side in SIDES}

    def wall(side: str) -> float:
        steps[side].append(in_own_process(side, case, arguments.bf16))
        return steps[side][-1].wall * 1e3

    def aim(side: str, _: list[float]) -> dict[str, Any]:
        return {"at_most": (WARM_AIM if case.warm else COLD_AIM) if side == OURS else ""}

    times = alternate({side: partial(wall, side) for side in SIDES}, arguments.rounds)
    yield from results_of(case.title, times, aim)
    parts = {side: [*map(parts_of, steps[side])] for side in SIDES}
    for what in dict.fromkeys(what for side in reversed(SIDES) for what in parts[side][0]):
        for side in SIDES:
            found = [part.get(what, (0.0, 0)) for part in parts[side]]
            facts = {"ratio": "", "at_most": "", "kernels": found[0][1]}
            spread = Spread.of([seconds * 1e3 for seconds, _ in found])
            yield Result(f"{case.title}, {what}", side, spread, facts=facts)


def headline(results: list[Result]) -> str:
    ours = [r for r in results if r.side == OURS and "at_most" in r.facts and "kernels" not in r.facts]
    return ", ".join(f"{r.case}: {r.facts['ratio'].median:.2f} of SDPA's time" for r in ours)


def parts_of(step: Step) -> dict[str, tuple[float, Any]]:
    """Seconds of what a step consists of, and of the compiler how often it ran."""
    kernels: dict[str, list[float]] = {}
    for kind, seconds in step.kernels:
        kernels.setdefault(f"C++ compiler, {kind}", []).append(seconds)
    phases = {phase: (seconds, "") for phase, seconds in {"cpu": step.cpu, **step.phases}.items()}
    return {**phases, **{kind: (sum(taken), len(taken)) for kind, taken in kernels.items()}}


def in_own_process(side: str, case: Case, bf16: bool) -> Step:
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(1 + case.warm):
            with Worker() as worker:
                step = worker.run(Job(first_step, (side, case.layers, bf16, folder)))
    return step


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


def attention_of(side: str, length: int = LENGTH) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    if side == SDPA:
        return lambda q, k, v: nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    from flex_inductor import create_block_mask, flex_attention
    from flex_inductor.masks import library

    mask = create_block_mask(library.causal(), None, None, length, length, device="cpu")
    return lambda q, k, v: flex_attention(q, k, v, block_mask=mask)


def first_step(side: str, layers: int, bf16: bool, folder: str) -> Step:
    """In this process, which has compiled nothing, with this cache folder."""
    from torch._dynamo.utils import compilation_time_metrics
    from torch._inductor.cpp_builder import CppBuilder

    dtype = torch.bfloat16 if bf16 else torch.float32
    attend = attention_of(side)  # one mask for all layers
    model = nn.Sequential(*(Layer(attend) for _ in range(layers))).to(dtype)
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=dtype)
    small = torch.ones(64, requires_grad=True)
    kernels: list[tuple[str, float]] = []
    build = CppBuilder.build

    def timed(self: CppBuilder) -> None:
        seconds = milliseconds(partial(build, self)) / 1e3
        kernels.append((kind_of(self.get_target_file_path()), seconds))

    with (
        mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": folder}),
        mock.patch.object(CppBuilder, "build", timed),
    ):
        # A function of its own: sizes that differ from this one's would make those of the model change.
        torch.compile(lambda x: x.sin())(small).sum().backward()
        kernels.clear()
        compilation_time_metrics.clear()
        gc.collect()  # what importing left would be collected within the step, once or twice by chance
        compiled = torch.compile(model, backend="flex_inductor" if side == OURS else "inductor")
        cpu = cpu_seconds()
        wall = milliseconds(lambda: compiled(x).sum().backward()) / 1e3
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
