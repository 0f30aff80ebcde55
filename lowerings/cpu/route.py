"""The route for CPUs: what it takes, and which kernel serves a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flex_inductor.softmax import COLUMN_SUMS
from flex_inductor.visits import FORMS

from ..call import LoweredCall
from ..decision import Choice
from ..hints import unused_hints, unused_splits, wide_indices
from ..problem import AttentionProblem, dtype_name
from ..toolchain import missing_for_cpp

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class CpuRoute:
    name = "cpu"
    serves = frozenset(
        {"score_captures", "mask_captures", "schedule", "tile_map", "scattered", "partial"}
        | {"sinks", "dropout", "in_blocks", "kv_scales", "grad_entropy", COLUMN_SUMS}
    )
    forms = frozenset(FORMS)

    def available(self) -> tuple[bool, str]:
        from torch._inductor import config
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.cpu_vec_isa import pick_vec_isa
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        if config.cpu_backend != "cpp":
            return False, f"Inductor's backend for CPUs is set to {config.cpu_backend!r}"
        if reason := missing_for_cpp():
            return False, reason
        if any(letter.isspace() for letter in cache_dir()):
            return False, (
                f"the cache folder {cache_dir()!r} has a space in its name, at which torch cuts the compiler's command "
                f"line: set TORCHINDUCTOR_CACHE_DIR to a folder without one"
            )
        isa = pick_vec_isa()
        if not isa:
            return False, "no vector instructions that torch knows"
        return True, f"compiled with {get_cpp_compiler()} for {isa}"

    def can_use(self, problem: AttentionProblem) -> tuple[bool, str]:
        if problem.device.type != "cpu":
            return False, f"for CPUs, not {problem.device.type}"
        if problem.dtype not in DTYPES:
            names = ", ".join(dtype_name(dtype) for dtype in DTYPES)
            return False, f"no {dtype_name(problem.dtype)}; {names} only"
        if problem.missing:
            return False, problem.missing
        if any(size == 0 for _, shape in (*problem.score_captures, *problem.mask_captures) for size in shape):
            return False, "a captured tensor has no elements to look up"
        usable, why = self.available()
        if not usable:
            return False, why
        from .. import choice
        from ..lanes import first_refusal
        from .call import programs
        from .configs import TABLES, misfit
        from .forward import is_decode
        from .lanes import refusal

        if COLUMN_SUMS in problem.outputs and not is_decode(problem):
            return False, f"{COLUMN_SUMS} beside the output only by the kernel for few queries"
        if reason := choice.refusal(problem, {kernel: table[0] for kernel, table in TABLES.items()}, misfit):
            return False, reason
        if reason := first_refusal(programs(problem), refusal):
            return False, reason
        return True, f"fused C++ {problem.direction}"

    def notes(self, problem: AttentionProblem) -> list[str]:
        from .forward import is_decode

        return [
            *wide_indices(problem),
            *unused_hints(problem),
            *unused_splits(problem, is_decode(problem)),
        ]

    def lower(self, problem: AttentionProblem, call: LoweredCall) -> tuple[Any, Sequence[Choice]]:
        from . import backward, forward

        lower = forward.lower if problem.direction == "forward" else backward.lower
        return lower(problem, call)
