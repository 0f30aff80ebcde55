"""The backend around attention: everything else is Inductor's, and the decision is where people look."""

import os
import re
import subprocess
import sys

import pytest
import torch
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._inductor.utils import run_and_get_code
from torch.utils.checkpoint import checkpoint

from flex_inductor import FlexError, flex_attention, mods, upward
from flex_inductor.backend import attention_nodes
from flex_inductor.errors import FlexNotImplementedError, FlexRuntimeError, FlexTypeError, FlexValueError
from flex_inductor.lowerings import registry
from flex_inductor.lowerings.registry import decide
from flex_inductor.op import AttentionCall
from flex_inductor.options import split_options
from flex_inductor.tuning import tell_tuner


def without_attention(x):
    return torch.softmax(x @ x.T, -1).relu() + 1


def code_of(backend, **kwargs):
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        _, (code,) = run_and_get_code(
            torch.compile(without_attention, backend=backend, **kwargs), torch.ones(8, 8)
        )
    return re.sub(r"(# AOT ID: .*|/\S+|0x\w+)", "", code)  # what differs between any two compilations


@pytest.mark.parametrize(
    "kwargs", [{}, {"mode": "max-autotune-no-cudagraphs"}, {"options": {"epilogue_fusion": False}}]
)
def test_graph_without_attention_is_inductors(kwargs):
    assert code_of("flex_inductor", **kwargs) == code_of("inductor", **kwargs)


def test_inductors_options_arrive():
    """With size asserts off, Inductor leaves assert_size_stride calls out."""
    asserting = code_of("flex_inductor", options={"size_asserts": True})
    silent = code_of("flex_inductor", options={"size_asserts": False})
    assert "assert_size_stride(arg0_1" in asserting
    assert "assert_size_stride(arg0_1" not in silent


SCRIPT = """
import torch, flex_inductor
attend = torch.compile(flex_inductor.flex_attention, backend="flex_inductor", options={"route": "chunked"})
attend(*(torch.randn(1, 3, 27, 4) for _ in range(3)))
"""


def test_options_are_spelled_as_inductor_allows():
    _, inductors = split_options({"max-autotune": True, "verify": True})
    assert inductors == {"max_autotune": True}


def test_the_tuner_is_told_of_calls_inside_of_checkpoints(monkeypatch):
    found = []

    def look(module, inputs):
        calls = attention_nodes(module)
        tell_tuner(module, calls, inputs)
        found.extend(AttentionCall.read(*call.args).options for call in calls)
        return module

    def attend(query):
        outer = flex_attention(query, query, query)
        return checkpoint(flex_attention, outer, outer, outer, use_reentrant=False)

    monkeypatch.setattr(upward, "imported_tuning", lambda: "a file")
    torch.compile(attend, backend=look, fullgraph=True)(torch.randn(1, 1, 4, 8, requires_grad=True))
    assert [options.imported for options in found] == ["a file", "a file"]


def test_torch_logs_and_structured_trace_carry_the_decision(tmp_path):
    places = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "TORCH_TRACE": str(tmp_path / "trace")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        env=os.environ | places | {"TORCH_LOGS": "flex_inductor"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "chosen:   chunked" in done.stderr
    (trace,) = (tmp_path / "trace").iterdir()
    text = trace.read_text()
    assert '"name": "flex_inductor_decision"' in text
    assert "chosen:   chunked" in text


def test_eager_and_plain_inductor_serve_the_op_too():
    qkv = [torch.randn(1, 2, 24, 8) for _ in range(3)]
    expected = flex_attention(*qkv)
    for backend in ("eager", "aot_eager", "inductor"):
        torch._dynamo.reset()
        compiled = torch.compile(flex_attention, backend=backend, fullgraph=True)
        torch.testing.assert_close(compiled(*qkv), expected)


SCALE = 0.5


def test_calls_look_at_what_changes_and_not_at_our_constants(monkeypatch):
    """Dynamo would have each call look at some 170 functions, classes and constants of this package."""
    monkeypatch.setattr(mods, "_shift_of_test", None, raising=False)  # which removes it afterwards
    exec("def _shift_of_test():\n    return _shift_by_test", vars(mods))

    def scaled(query, key, value):
        return flex_attention(query, key, value, scale=SCALE) + mods._shift_of_test()

    torch._dynamo.reset()
    inputs = [torch.randn(1, 2, 19, 4) for _ in range(3)]
    compiled = torch.compile(scaled, backend="flex_inductor", options={"route": "chunked"})
    for scale, shift in ((0.5, 0.0), (2.0, 0.0), (2.0, 1.0)):
        monkeypatch.setitem(globals(), "SCALE", scale)
        monkeypatch.setattr(mods, "_shift_by_test", shift, raising=False)
        torch.testing.assert_close(compiled(*inputs), scaled(*inputs))
    for entry in _debug_get_cache_entry_list(scaled):
        looked_at = set(re.findall(r"__import_flex_inductor\w*'\]\.([\w.]+)", str(entry.guard_manager)))
        assert looked_at == {"compat", "compat.failed_when_imported", "_shift_by_test"}


def test_a_refusal_is_the_decision_and_not_a_stack_of_frames():
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, backend="flex_inductor", options={"route": "triton"})
    with pytest.raises(FlexError) as refused:
        compiled(*(torch.randn(1, 2, 24, 8) for _ in range(3)))
    assert str(refused.value).startswith(
        "route 'triton' was asked for and cannot serve this call.\n"
        "call:     forward float32 on cpu, B1 H2 M24 N24 D8\n"
        "chosen:   none\n"
        "rejected: triton: for GPUs; on CPU only with Triton's interpreter\n"
    )
    assert not [entry for entry in refused.traceback if "torch/_inductor" in str(entry.path)]


@pytest.mark.parametrize(
    "kind, direction, dynamic",
    [
        (FlexValueError, "forward", False),
        (FlexTypeError, "backward", False),
        (FlexNotImplementedError, "backward", True),  # compiles when it runs
        (FlexRuntimeError, "forward", True),
    ],
)
def test_an_error_of_ours_is_raised_as_it_is(kind, direction, dynamic, monkeypatch):
    def refuse(problem, routes):
        if problem.direction == direction:
            raise kind("our words")
        return decide(problem, routes)

    torch._dynamo.reset()
    monkeypatch.setattr(registry, "decide", refuse)
    compiled = torch.compile(flex_attention, backend="flex_inductor", dynamic=dynamic)
    inputs = [torch.randn(1, 2, 24, 8, requires_grad=True) for _ in range(3)]
    with torch._inductor.config.patch(force_disable_caches=True), pytest.raises(kind) as raised:
        compiled(*inputs).sum().backward()
    assert type(raised.value) is kind and str(raised.value) == "our words"
