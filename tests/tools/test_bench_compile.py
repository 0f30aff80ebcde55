"""What the table of compile times is made of, without the compiling."""

import json
import subprocess

import pytest

from flex_inductor.tools import bench_compile, cli
from flex_inductor.tools.bench_compile import OURS, SDPA, Step, kind_of, phases_of


def test_a_run(tmp_path, capsys, monkeypatch):
    walls = {OURS: iter((9.0, 3.0, 5.0)), SDPA: iter((3.0, 2.0, 4.0))}

    def step(side, layers, bf16):
        assert layers == 1 and bf16
        kernels = [("Inductor's own", 1.0), ("Inductor's own", 2.0)]
        kernels += [("attention forward", 0.5)] if side == OURS else []
        return Step(next(walls[side]), 1.0, {"Dynamo": 0.25}, kernels)

    monkeypatch.setattr(bench_compile, "in_own_process", step)
    file = tmp_path / "found.json"
    command = ["bench", "compile", "--layers", "1", "--rounds", "3", "--bf16", "--json", str(file)]
    assert cli.main(command) == 0
    lines = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    assert ["wall", "5.00", "3.00", "1.5", "(1.38", "to", "2.25)"] in lines
    assert ["Dynamo", "0.25", "0.25"] in lines
    assert ["C++", "compiler,", "Inductor's", "own", "2", "in", "3.00", "2", "in", "3.00"] in lines
    assert ["C++", "compiler,", "attention", "forward", "1", "in", "0.50"] in lines
    assert [step["wall"] for step in json.loads(file.read_text())["1"][OURS]] == [9.0, 3.0, 5.0]


@pytest.mark.parametrize("backward_later", [True, False])
def test_times_that_hold_each_other_are_taken_apart(backward_later):
    metrics = {
        "_compile.compile_inner": 10.0,
        "OutputGraph.call_user_compiler": 9.0,
        "create_aot_dispatcher_function": 8.0,
        "compile_fx_inner": 6.0,
        "GraphLowering.run": 1.0,
        "flex_inductor.lower": 0.25,
        "GraphLowering.compile_to_module": 4.0,
        "GraphLowering.codegen": 1.5,
        "flex_inductor.render": 0.5,
        "PyCodeCache.load_by_key_path": 2.25,
    }
    if backward_later:
        metrics |= {"backward._backward_impl": 5.0, "compile_fx_inner": 11.0}
    assert phases_of(metrics, 12.0 + 5 * backward_later) == {
        "Dynamo": 1.0,
        "AOTAutograd": 2.0,
        "Inductor's passes": 1.0 + 5 * backward_later,
        "lowering": 0.75,
        "lowering of attention": 0.25,
        "scheduling, code": 1.0,
        "code of attention": 0.5,
        "waiting for kernels": 2.25,
        "other, running": 3.25,
    }


def test_kernels_are_told_apart_by_their_source(tmp_path):
    texts = {
        "attention forward": "namespace kernel_parts {",
        "attention backward": "namespace kernel_parts { float* d_query",
        "Inductor's own": "void kernel() {}",
    }
    for i, (kind, text) in enumerate(texts.items()):
        (tmp_path / f"{i}.main.cpp").write_text(text)
        assert kind_of(str(tmp_path / f"{i}.main.so")) == kind


def test_what_a_process_said_is_told_when_it_fails(monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "no compiler")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(RuntimeError, match="SDPA failed:\nno compiler"):
        bench_compile.in_own_process(SDPA, 1, False)
