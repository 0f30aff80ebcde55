"""The fused forward on CPUs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from flex_inductor.op.program import LaneProgram, split
from flex_inductor.op.tracing import MASK_LANES, SCORE_LANES

from ..problem import AttentionProblem


class ForwardConfig(NamedTuple):
    """Sizes that the kernel is rendered with."""

    tile_m: int = 128
    tile_n: int = 128
    sub_m: int = 32
    packed_bytes: int = 8 << 20


class CpuForwardRoute:
    name = "cpu_forward"

    def available(self) -> tuple[bool, str]:
        from torch._inductor import config
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.cpu_vec_isa import pick_vec_isa
        from torch._inductor.exc import InvalidCxxCompiler

        if config.cpu_backend != "cpp":
            return False, f"Inductor's backend for CPUs is set to {config.cpu_backend!r}"
        try:
            compiler = get_cpp_compiler()
        except (InvalidCxxCompiler, RuntimeError):
            return False, "no C++ compiler"
        isa = pick_vec_isa()
        return (
            (True, f"compiled with {compiler} for {isa}")
            if isa
            else (False, "no vector instructions that torch knows")
        )

    def can_use(self, problem: AttentionProblem) -> tuple[bool, str]:
        if problem.direction != "forward":
            return False, "forward only"
        if problem.device.type != "cpu":
            return False, f"for CPUs, not {problem.device.type}"
        if problem.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return (
                False,
                f"no {str(problem.dtype).removeprefix('torch.')}; float32, bfloat16 and float16 only",
            )
        usable, why = self.available()
        if not usable:
            return False, why
        from .lanes import refusal

        for field, program in _programs(problem).items():
            if program is not None and (reason := refusal(program, field)):
                return False, reason
        return True, "fused C++ kernel"

    def notes(self, problem: AttentionProblem) -> list[str]:
        from ..chunked import ChunkedRoute

        return ChunkedRoute().notes(problem)

    def lower(self, problem: AttentionProblem, inputs: Any) -> Any:
        from . import lanes, template

        call, config = inputs, ForwardConfig()
        sizes = {"b": problem.B, "h": problem.H, "q_idx": problem.M, "kv_idx": problem.N}
        captures = {"score_mod": call.score_captures, "mask_mod": call.mask_captures}
        mods = {
            field: program and lanes.Lanes(program, captures[field], sizes)
            for field, program in _programs(problem).items()
        }
        score, mask = mods["score_mod"], mods["mask_mod"]
        walks, lists = _walks(problem, call, mask is not None)
        tensors = {
            "query": lanes.realized(call.query),
            "key": lanes.realized(call.key),
            "value": lanes.realized(call.value),
            **{name: lanes.realized(tensor) for name, tensor in lists.items()},
        }
        bodies = {}
        if score is not None:
            bodies["full_tile"] = ("Every lane is live.", lanes.tile_body(score, None))
        if mask is not None:
            bodies["partial_tile"] = ("The mask decides.", lanes.tile_body(score, mask))
        mod_tensors = [tensor for mod in (score, mask) if mod for tensor in mod.tensors]

        def render(kernel: template.TemplateKernel) -> str:
            signature = kernel.signature()
            given = dict(zip(tensors, map(kernel.argument, kernel.tensors[: len(tensors)]), strict=True))
            outputs = {OUTPUTS[i]: kernel.argument(tensor) for i, tensor in kernel.outputs.items()}
            return INCLUDES + template.source("forward.jinja").render(
                **config._asdict(),
                element=template.element_type(kernel.tensors[0]),
                is_bf16=int(problem.dtype == torch.bfloat16),
                signature=signature,
                profile=kernel.maybe_codegen_profile(),
                scale=f"{float(call.scale)!r}f",
                blocks=problem.blocks,
                lane_symbols=[str(symbol) for symbol in lanes.SYMBOLS],
                bodies=[
                    {"name": name, "title": title, "code": lanes.loops(body, kernel.args, kernel.names)}
                    for name, (title, body) in bodies.items()
                ],
                has_full="full_tile" in bodies,
                has_partial="partial_tile" in bodies,
                walks=walks,
                lists={name: given[name] for name in lists},
                query=given["query"],
                key=given["key"],
                value=given["value"],
                outputs=outputs,
            )

        return template.add_node(render, [*tensors.values(), *mod_tensors], _output_layouts())


OUTPUTS = ("out", "lse", "max_scores")
INCLUDES = "#include <torch/csrc/inductor/cpp_prefix.h>\n#include <torch/csrc/inductor/aoti_torch/c/shim.h>\n"


def _programs(problem: AttentionProblem) -> dict[str, LaneProgram | None]:
    return {
        field: None if graph is None else split(graph, lanes, guarded=guarded)
        for field, graph, lanes, guarded in (
            ("score_mod", problem.score_mod, SCORE_LANES, problem.mask_mod is not None),
            ("mask_mod", problem.mask_mod, MASK_LANES, False),
        )
    }


def _walks(
    problem: AttentionProblem, call: Any, masked: bool
) -> tuple[list[tuple[str, str, str]], dict[str, Any]]:
    """(counts, indices, lane function) for each list that is walked, and the lists by name."""
    if problem.blocks is None:
        return [], {}
    lists = dict(
        zip(("kv_counts", "kv_indices", "full_counts", "full_indices"), call.schedule[2:6], strict=True)
    )
    walks = [("kv_counts", "kv_indices", "partial_lanes")]
    if lists["full_counts"] is not None:
        walks.append(("full_counts", "full_indices", "full_lanes"))
    return walks, {name: tensor for name, tensor in lists.items() if tensor is not None}


def _output_layouts() -> list[Any]:
    import sympy
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    def plain(size: Any) -> sympy.Expr:
        return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)

    return [
        ir.FixedLayout(fake.device, fake.dtype, [*map(plain, fake.shape)], [*map(plain, fake.stride())])
        for fake in V.graph.current_node.meta["val"]
    ]
