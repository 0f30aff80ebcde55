"""`flex-inductor bench static`: what our kernels ask of a GPU that is not there.

Kernels are compiled here, each with the config that it uses untuned, and read back from the binary. An instruction
counts once for each thread of the instance that runs it: what a loop's body holds, times the threads, over the scores
that one iteration visits, is its instructions per score.

Where `tools/ptx` can execute them, a shorter call of the same kernels is executed and what it did is counted. These are
instructions of PTX, which the assembler makes others of.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from flex_inductor import flex_attention
from flex_inductor.lowerings.triton.configs import AXES, PRODUCTS
from flex_inductor.lowerings.triton.device import known_device
from flex_inductor.lowerings.triton.tables import TABLES

from .call import Call, Made
from .harness import Result

LENGTH = 1024
EXECUTED = 256  # tokens, one batch and head
HEAD_DIMS = (64, 128, 256)
VARIANTS = ("causal", "alibi", "softcap", "documents", "bias", "dropout")
DEFAULT = ("sm_90", "sm_80")
TARGETS = (*DEFAULT, "sm_100", "gfx942")
OF_AXES = dict(zip(AXES, ("forward", "backward_dq"), strict=True))

HELP = "what kernels ask of a GPU that is not there"
OPTIONS: dict[str, Any] = {
    "--target": {
        "choices": TARGETS,
        "nargs": "+",
        "default": DEFAULT,
        "help": f"default: {' '.join(DEFAULT)}",
    },
    "--axis": {"choices": AXES, "help": "an axis to switch on, for the kernel that has it"},
}
COLUMNS = ["kernel", "tile, warps, stages", "registers", "local bytes", "in loops", "shared KiB", "fits"]
COLUMNS += ["per score: partial", "full", "for tensor cores", "copies ahead", "barriers"]
COLUMNS += ["executed: per score", "for 1024 scores: requests", "sectors", "conflicts"]


@dataclass(frozen=True)
class Case:
    variant: str
    head_dim: int
    target: str
    axis: str | None = None

    @property
    def title(self) -> str:
        return " ".join(filter(None, (self.variant, f"D{self.head_dim}", self.target, self.axis)))

    @property
    def options(self) -> dict[str, Any]:
        return {"configs": {OF_AXES[self.axis]: {self.axis: 1}}} if self.axis else {}

    def made(self, length: int, **others: Any) -> tuple[Made, Callable]:
        """A call whose inputs all need gradients, as does the bias."""
        made = Made(Call(self.variant, length, self.head_dim, **others))
        return made, lambda *inputs: flex_attention(*inputs, **made.options)

    def kernels(self) -> list[Any]:
        from ..inspector import attention_kernels

        made, attend = self.made(LENGTH, batch=2)
        return attention_kernels(attend, *made.inputs, target=self.target, options=self.options)

    def executed(self) -> dict[str, Any]:
        """Launches by kernel, where they can be executed."""
        from .. import execute
        from ..inspector import kind

        if self.target.startswith("gfx"):
            return {}
        launches: list[execute.Launch] = []
        made, attend = self.made(EXECUTED, heads=1, kv_heads=1)
        torch._dynamo.reset()
        made.results(execute.compiled(attend, self.target, launches, options=self.options))
        return {kind(launch.kernel): launch for launch in launches}


def cases(arguments: Namespace) -> list[Case]:
    return [Case(v, d, t, arguments.axis) for t in arguments.target for v in VARIANTS for d in HEAD_DIMS]


def measure(case: Case, _: Namespace) -> Iterator[Result]:
    """One row a kernel. What is about copies, barriers and tensor cores is of full tiles."""
    from ..inspector import kind
    from ..resources import compile_untuned

    launches = case.executed()
    for kernel in case.kernels():
        config, _, found = compile_untuned(kernel, case.target)
        shared = found.shared_bytes or 0
        tile, device = (config["BLOCK_M"], config["BLOCK_N"]), known_device(case.target)
        threads = config["num_warps"] * device.warp
        # Of the loops the first visits partial tiles, as in the source.
        partial, full = ([loop.instructions * threads / math.prod(tile) for loop in found.loops] * 2)[:2]
        last, launch = found.loops[-1], launches.get(kind(kernel))
        facts = {
            "registers": found.registers,
            "local_bytes": found.spill_bytes,
            "local_in_loops": sum(loop.local for loop in found.loops),
            "shared_kib": shared / 1024,
            "fits": "yes" if shared <= device.shared_bytes else "no",
            "partial": partial,
            "full": full,
            "tensor": last.tensor,
            "copies": " ".join(map(str, last.copies)) or "-",
            "barriers": last.barriers,
            **(counted(launch, case.head_dim) if launch and launch.config == config else {}),
        }
        shown = f"{tile[0]}x{tile[1]} {config['num_warps']}w {config['num_stages']}s"
        yield Result(case.title, kind(kernel), note=shown, facts=facts)


def counted(launch: Any, head_dim: int) -> dict[str, float]:
    """Instructions of the loops over tiles; the rest is of the whole kernel, which begins to copy before them."""
    from ..inspector import kind

    counts = launch.counts
    code = [instruction for instruction, _ in counts.instructions]
    inside: set[int] = set()
    for i, branch in enumerate(code):
        start = counts.kernel.labels[branch.operands[0].name] if branch.family == "bra" else i + 1
        if any(count.products for _, count in counts.instructions[start : i + 1]):
            inside.update(range(start, i + 1))
    in_loops = sum(counts.instructions[i][1].warps for i in inside)
    total, (_, cost) = counts.total, TABLES[kind(launch.kernel)]
    scores = total.products / (sum(PRODUCTS[cost]) * head_dim)
    return {
        "executed": in_loops * 32 / scores,
        "requests": total.requests * 1024 / scores,
        "sectors": total.sectors * 1024 / scores,
        "conflicts": total.conflicts * 1024 / scores,
    }
