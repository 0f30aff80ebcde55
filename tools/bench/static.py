"""`flex-inductor bench static`: what our kernels ask of a GPU that is not there.

Kernels are compiled here, each with the config that it uses untuned, and read back from the binary. An instruction
counts once for each thread of the instance that runs it: what a loop's body holds, times the threads, over the scores
that one iteration visits, is its instructions per score.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flex_inductor import flex_attention
from flex_inductor.lowerings.triton.configs import known_device

from .call import Call, Made
from .harness import Result

LENGTH = 1024
HEAD_DIMS = (64, 128, 256)
VARIANTS = ("causal", "alibi", "softcap", "documents", "bias", "dropout")
DEFAULT = ("sm_90", "sm_80")
TARGETS = (*DEFAULT, "sm_100", "gfx942")

HELP = "what kernels ask of a GPU that is not there"
OPTIONS: dict[str, Any] = {
    "--target": {
        "choices": TARGETS,
        "nargs": "+",
        "default": DEFAULT,
        "help": f"default: {' '.join(DEFAULT)}",
    }
}
COLUMNS = ["kernel", "tile, warps, stages", "registers", "local bytes", "in loops", "shared KiB", "fits"]
COLUMNS += ["per score: partial", "full", "for tensor cores", "copies ahead", "barriers"]


@dataclass(frozen=True)
class Case:
    variant: str
    head_dim: int
    target: str

    @property
    def title(self) -> str:
        return f"{self.variant} D{self.head_dim} {self.target}"

    def kernels(self) -> list[Any]:
        """Of a call whose inputs all need gradients, as does the bias."""
        from ..inspector import attention_kernels

        made = Made(Call(self.variant, LENGTH, self.head_dim, batch=2))

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return flex_attention(query, key, value, **made.options)

        return attention_kernels(attend, *made.inputs, target=self.target)


def cases(arguments: Namespace) -> list[Case]:
    return [Case(v, d, t) for t in arguments.target for v in VARIANTS for d in HEAD_DIMS]


def measure(case: Case, _: Namespace) -> Iterator[Result]:
    """One row a kernel; the last three columns are about full tiles."""
    from ..inspector import kind
    from ..resources import compile_untuned

    for kernel in case.kernels():
        config, _, found = compile_untuned(kernel, case.target)
        shared = found.shared_bytes or 0
        tile, device = (config["BLOCK_M"], config["BLOCK_N"]), known_device(case.target)
        threads = config["num_warps"] * device.warp
        # Of the loops the first visits partial tiles, as in the source.
        partial, full = ([loop.instructions * threads / math.prod(tile) for loop in found.loops] * 2)[:2]
        last = found.loops[-1]
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
        }
        shown = f"{tile[0]}x{tile[1]} {config['num_warps']}w {config['num_stages']}s"
        yield Result(case.title, kind(kernel), note=shown, facts=facts)
