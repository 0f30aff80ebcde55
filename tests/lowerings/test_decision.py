"""Routes are asked in order; the record of the answer is what every reader of it prints."""

import logging

import expecttest
import pytest
import torch

import flex_inductor
from flex_inductor import create_block_mask, errors, flex_attention
from flex_inductor.lowerings.cpu.route import CpuRoute
from flex_inductor.lowerings.registry import decide
from flex_inductor.options import CallOptions


class Fixed:
    """A route with one answer."""

    serves = frozenset(("score_captures", "schedule"))
    forms = frozenset(("lists",))

    def __init__(self, name, usable, why):
        self.name, self.answer = name, (usable, why)

    def can_use(self, problem):
        return self.answer

    def notes(self, problem):
        return ["BLOCK_M: too large, 32 used"]


class Problem:
    def __init__(self, route=None, inputs=(), schedule="lists"):
        self.schedule, self.outputs = schedule, ()
        self.options, self.inputs = CallOptions(route=route or ""), ("score_captures", *inputs)

    def describe(self):
        return "forward float32 on cpu"


ROUTES = [
    Fixed("fused", False, "float64 is not taken"),
    Fixed("split", True, "few queries"),
    Fixed("last", True, "all"),
]


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def compile_one(**kwargs):
    bias = torch.randn(4, 40, requires_grad=True)
    mask = create_block_mask(causal, None, None, 40, 40, device="cpu", BLOCK_SIZE=16)
    compiled = torch.compile(flex_attention, backend="flex_inductor", **kwargs)
    q, k, v = (torch.randn(2, heads, 40, 8, requires_grad=True) for heads in (4, 2, 2))
    out = compiled(
        q, k, v, lambda s, b, h, q_idx, kv_idx: s + bias[h, kv_idx], mask, enable_gqa=True,
        kernel_options={"BLOCK_M": 64, "num_warps": 4},
    )  # fmt: skip
    out.sum().backward()


class Records(expecttest.TestCase):
    maxDiff = None

    def test_first_usable_route_in_order(self):
        self.assertExpectedInline(
            str(decide(Problem(), ROUTES)[1]),
            """\
call:     forward float32 on cpu
chosen:   split (few queries)
rejected: fused: float64 is not taken
rejected: last: split comes first
note:     BLOCK_M: too large, 32 used""",
        )

    def test_what_no_route_serves(self):
        with self.assertRaises(errors.FlexError) as raised:
            decide(Problem(inputs=("partial",), schedule="runs"), ROUTES)
        self.assertExpectedInline(
            str(raised.exception),
            """\
no route can serve this call, each for its own reason.
call:     forward float32 on cpu
chosen:   none
rejected: fused: does not serve partial, a schedule in runs
rejected: split: does not serve partial, a schedule in runs
rejected: last: does not serve partial, a schedule in runs""",
        )

    def test_demanded_route(self):
        self.assertExpectedInline(
            str(decide(Problem("last"), ROUTES)[1]),
            """\
call:     forward float32 on cpu
chosen:   last (asked for; all)
rejected: fused: float64 is not taken
rejected: split: not asked for; few queries
note:     BLOCK_M: too large, 32 used""",
        )

    def test_demanded_route_never_falls_back(self):
        with pytest.raises(errors.FlexRuntimeError) as raised:
            decide(Problem("fused"), ROUTES)
        self.assertExpectedInline(
            str(raised.value),
            """\
route 'fused' was asked for and cannot serve this call.
call:     forward float32 on cpu
chosen:   none
rejected: fused: float64 is not taken
rejected: split: not asked for; few queries
rejected: last: not asked for; all""",
        )

    def test_record_of_a_compiled_call(self):
        torch._dynamo.reset()
        flex_inductor.decisions(clear=True)
        compile_one(options={"route": "chunked"})
        records = flex_inductor.decisions(clear=True)
        assert flex_inductor.decisions() == []
        self.assertExpectedInline(
            "\n\n".join(map(str, records)),
            """\
call:     forward float32 on cpu, B2 H4:2 M40 N40 D8, score_mod (1 captured), mask_mod, blocks 16x16
chosen:   chunked (asked for; serves every device, dtype, shape and mod, in bounded memory; not fused)
rejected: triton: for GPUs; on CPU only with Triton's interpreter
rejected: cpu: not asked for; fused C++ forward
note:     BLOCK_M, num_warps: for GPU kernels, not used here

call:     backward float32 on cpu, B2 H4:2 M40 N40 D8, score_mod (1 captured), mask_mod, blocks 16x16
chosen:   chunked (asked for; serves every device, dtype, shape and mod, in bounded memory; not fused)
rejected: triton: for GPUs; on CPU only with Triton's interpreter
rejected: cpu: not asked for; fused C++ backward
note:     BLOCK_M, num_warps: for GPU kernels, not used here""",
        )


def test_log_shows_the_decision_of_a_call_compiled_or_from_the_cache(caplog):
    for _ in range(2):
        torch._dynamo.reset()
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="flex_inductor"):
            compiled = torch.compile(flex_attention, backend="flex_inductor", options={"route": "chunked"})
            compiled(*(torch.randn(1, 3, 29, 4) for _ in range(3)))
        assert caplog.text.count("chosen:   chunked") == 1


def test_a_space_in_the_cache_folder_is_the_reason(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{tmp_path}/a folder")
    usable, why = CpuRoute().available()
    assert not usable
    assert why == (
        f"the cache folder '{tmp_path}/a folder' has a space in its name, at which torch cuts the compiler's command "
        "line: set TORCHINDUCTOR_CACHE_DIR to a folder without one"
    )
