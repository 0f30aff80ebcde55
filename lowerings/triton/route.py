"""The Triton family: kernels for CUDA and ROCm, and on CPU for Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flex_inductor.visits import FORMS

from ..call import LoweredCall
from ..decision import Choice
from ..problem import AttentionProblem, dtype_name
from ..toolchain import missing_for_triton

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class TritonRoute:
    name = "triton"
    serves = frozenset(
        {"score_captures", "mask_captures", "schedule", "tile_map", "scattered", "partial"}
        | {"sinks", "dropout", "in_blocks", "kv_scales", "grad_entropy"}
    )
    forms = frozenset(FORMS)

    def available(self) -> tuple[bool, str]:
        if not torch.cuda.is_available():
            return False, "no CUDA or ROCm device"
        reason = missing_for_triton()
        return (True, "compiled by Triton") if reason is None else (False, reason)

    def can_use(self, problem: AttentionProblem) -> tuple[bool, str]:
        reason = _refusal(problem)
        return (True, "fused Triton kernel") if reason is None else (False, reason)

    def notes(self, problem: AttentionProblem) -> list[str]:
        from ..hints import unused_splits
        from . import decode
        from .backward import kinds as of_keys
        from .fitting import refused_hint, without_effect

        kinds = ("forward",) if problem.direction == "forward" else ("backward_dq", *of_keys(problem))
        refused = [refused_hint(kind, problem) for kind in kinds]
        ignored = without_effect(problem.options.hinted)
        notes = [f"{', '.join(ignored)}: for torch's kernels, without effect here"] if ignored else []
        decodes = problem.direction == "forward" and decode.serves(problem)
        notes += unused_splits(problem, decodes)
        return [*(reason for reason in refused if reason is not None), *notes]

    def lower(self, problem: AttentionProblem, call: LoweredCall) -> tuple[Any, Sequence[Choice]]:
        from . import backward, forward

        return (forward if problem.direction == "forward" else backward).lower(problem, call)


def _refusal(problem: AttentionProblem) -> str | None:
    """Why the family cannot serve a call."""
    from torch._inductor import config

    if problem.device.type == "cpu":
        if config.cpu_backend != "triton":
            return "for GPUs; on CPU only with Triton's interpreter"
    elif problem.device.type != "cuda":
        return f"for CUDA and ROCm, not {problem.device.type}"
    if reason := missing_for_triton():
        return reason
    if problem.dtype not in _DTYPES:
        return f"no {dtype_name(problem.dtype)}; float16, bfloat16 and float32 only"
    if problem.missing:
        return problem.missing
    if 0 in (problem.B, problem.H, problem.M, problem.N, problem.D, problem.V):
        return "an empty tensor"
    if not all(getattr(size, "is_number", True) for size in (problem.H, problem.K, problem.D, problem.V)):
        return "a number of heads or a head dim that changes from call to call"
    if (
        problem.blocks is not None
        and any(block % 16 for block in (problem.blocks[:1] if problem.scattered else problem.blocks))
        and not _few_in_tiles(problem)
    ):
        return f"schedule blocks of {problem.blocks[0]}x{problem.blocks[1]}, which are not multiples of 16"

    if problem.blocks is not None and {"key", "value"} & set(problem.outputs) and not problem.lists_queries:
        return "a BlockMask made without lists of queries for each KV block (compute_q_blocks=False)"

    from .. import choice
    from ..lanes import first_refusal, programs
    from .configs import Config
    from .fitting import first_choice, refused_config
    from .lanes import refusal
    from .tables import TABLES

    def misfit(kind: str, config: Config) -> str | None:
        return refused_config(kind, config, problem)

    if reason := choice.refusal(problem, {kind: first_choice(kind, problem) for kind in TABLES}, misfit):
        return reason
    if reason := _too_large(problem):
        return reason
    return first_refusal(programs(problem), refusal)


def _too_large(problem: AttentionProblem) -> str | None:
    """The kernel whose smallest tile has no room in shared memory."""
    from . import decode
    from .backward import kinds
    from .configs import no_room
    from .device import current_device
    from .fitting import first_choice, shape_of
    from .tables import TABLES

    if problem.direction == "forward":
        needed = ["decode" if decode.serves(problem) else "forward"]
    else:
        needed = [*(["backward_dq"] if "query" in problem.outputs else []), *kinds(problem)]
    device = current_device(problem.device)
    for kind in needed:
        config, shape = first_choice(kind, problem), shape_of(problem, kind)
        # Found by compiling: AMD's cards hold the tiles of one product at a time.
        least = max(config.block_m, config.block_n) * shape.widest * shape.bytes
        if device.family == "amd" and least <= device.shared_bytes:
            continue
        if reason := no_room(config, TABLES[kind][1], device, shape):
            return f"{kind}: {reason}, and no tile takes less"
    return None


def _few_in_tiles(problem: AttentionProblem) -> bool:
    """Whether a map's tiles hold so few queries that each is one tile of the kernel, whatever its size."""
    from . import decode

    if problem.map_tiles is None or problem.blocks is None or problem.direction != "forward":
        return False
    return (problem.scattered or problem.blocks[1] % 16 == 0) and decode.serves(problem)
