"""What all benches share, and a run of each on one machine; the numbers mean nothing here."""

import contextlib
import json
import re
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flex_inductor.tools import cli
from flex_inductor.tools.bench import compile as bench_compile
from flex_inductor.tools.bench import cpu, masks, peers, peers_features, static, varlen
from flex_inductor.tools.bench.compile import SDPA, Step, kind_of, phases_of
from flex_inductor.tools.bench.harness import OURS, Spread, alternate, check, over
from flex_inductor.tools.bench.workers import Failed

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def run(tmp_path, *command):
    file = tmp_path / "found.json"
    assert cli.main(["bench", *command, "--json", str(file)]) == 0
    return json.loads(file.read_text())["results"]


def assert_ordered(ms):
    assert 0 < ms["low"] <= ms["median"] <= ms["high"]


def test_sides_take_turns_at_coming_first():
    taken = []
    times = alternate({side: lambda side=side: taken.append(side) or len(taken) for side in "abc"}, 3)
    assert "".join(taken) == "abccbaabc"
    assert times == {"a": [1, 6, 7], "b": [2, 5, 8], "c": [3, 4, 9]}


def test_a_slow_side_is_left_out_of_later_rounds():
    times = alternate({"quick": lambda: 1.0, "slow": lambda: 600.0}, 4, most_seconds=1)
    assert times == {"quick": [1.0] * 4, "slow": [600.0] * 2}


def test_half_of_the_values_lie_between():
    spread = Spread.of([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (spread.median, spread.low, spread.high) == (3, 2, 4)
    assert Spread.of([7.0]) == Spread(7, 7, 7)
    assert str(Spread(123.4, 0.01234, 99.95)) == "123 (0.0123 to 100)"


def test_over_ours_is_taken_round_by_round():
    """A machine that is slow for one round is slow for both sides."""
    assert over([2.0, 20.0, 4.0], [1.0, 10.0, 2.0, 5.0]) == Spread(2, 2, 2)


def test_what_rounding_does_not_explain_is_wrong():
    gold = torch.tensor([1.0, -4.0])
    check([gold + 0.1], [gold], torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"wrong: relative error 0\.025, expected below 7\.6e-06"):
        check([gold + 0.1], [gold], torch.float32)
    with pytest.raises(RuntimeError, match="wrong: relative error nan"):
        check([gold * float("nan")], [gold], torch.bfloat16)


@pytest.mark.parametrize(
    "kind", ["compile", "cpu", "distributed", "gpu", "masks", "peers", "static", "varlen"]
)
def test_unknown_case(kind, capsys):
    assert cli.main(["bench", kind, "--only", "nothing like it"]) == 2
    assert capsys.readouterr().err.startswith("no case contains 'nothing like it'; there are\n  ")


@pytest.mark.usefixtures("nothing_is_compiled")
def test_cpu(tmp_path, capsys, monkeypatch):
    call = cpu.Case("causal", 128, heads=2, kv_heads=1, dtype=torch.float32)
    monkeypatch.setattr(cpu, "CASES", (replace(call, aims={OURS: 2}),))
    results = {r["side"]: r for r in run(tmp_path, "cpu", "--rounds", "2")}
    assert list(results) == [OURS, cpu.SDPA, cpu.MASKED, cpu.DENSE, cpu.FLEX]
    refused = results.pop(cpu.FLEX)
    assert refused["ms"] is None and "FlexAttention does not support backward" in refused["note"]
    assert results[OURS]["facts"] == {"ratio": {"median": 1, "low": 1, "high": 1}, "aim": 2}
    for result in results.values():
        assert_ordered(result["ms"])
    assert "over ours" in capsys.readouterr().out


@pytest.mark.usefixtures("nothing_is_compiled")
@pytest.mark.parametrize(
    "variant", ["decode", "window 512", "documents", "alibi", "softcap", "relative bias"]
)
def test_a_side_that_is_wrong_is_not_timed(variant, monkeypatch):
    sides_of = cpu.sides_of

    def one_off(made):
        found = sides_of(made)
        return {OURS: found[OURS], cpu.DENSE: found[cpu.DENSE], "off": lambda *qkv: found[OURS](*qkv) * 1.01}

    monkeypatch.setattr(cpu, "sides_of", one_off)
    call = cpu.Case(variant, 40, 8, heads=2, kv_heads=1, dtype=torch.float32, backward=variant != "decode")
    ours, dense, wrong = cpu.measure(call, Namespace(rounds=1))
    assert (
        ours.ms and dense.ms and wrong.ms is None and wrong.note.startswith("RuntimeError: wrong: relative")
    )


@pytest.mark.usefixtures("nothing_is_compiled")
def test_peers(tmp_path, monkeypatch):
    """Each call on each side that has it, checked against fp64, and the page of all."""
    variants = ("causal", "sinks", "relative bias")
    small = [replace(call, length=40, head_dim=16) for call in peers.CASES if call.variant in variants]
    chosen = [call for call in small if call.dtype == torch.float32]
    monkeypatch.setattr(peers, "CASES", chosen)
    results = run(tmp_path, "peers", "--rounds", "1", "--page", str(tmp_path / "peers.md"))
    served = {(r["case"].split(" D16")[0], r["case"].split()[-1], r["side"]) for r in results if r["ms"]}
    for variant in variants:
        for direction in ("forward", "forward+backward"):
            assert (variant, direction, OURS) in served
            assert ((variant, direction, peers.SDPA) in served) == (variant != "sinks")
        assert ((variant, "forward", cpu.FLEX) in served) == (variant != "sinks")
        assert (variant, "forward+backward", cpu.FLEX) not in served
    page = (tmp_path / "peers.md").read_text()
    assert page.count("| fp32 | forward+backward |") == len(chosen) // 2
    assert "1. torch flex: NotImplementedError: FlexAttention does not support backward on CPU" in page
    assert all(f"| {title} | " in page and f"- **{title}.** " in page for title in peers_features.FEATURES)


def test_each_feature_of_peers_has_a_source():
    for title, claims in peers_features.FEATURES.items():
        assert len(claims) == len(peers_features.PEERS), title
        assert all(claim.says and claim.source for claim in claims), title
        ours = re.findall(r"[\w/]+\.md", claims[0].source)
        assert ours and all((ROOT / file).exists() for file in ours), title


PACKED = varlen.Case("few", (3, 9, 1), head_dim=8)
PAGED = varlen.Case("few", (3, 9, 1), (2, 4), heads=4, kv_heads=2, head_dim=8)


@pytest.mark.usefixtures("nothing_is_compiled")
def test_varlen(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(varlen, "CASES", (PACKED, PAGED))
    results = run(tmp_path, "varlen", "--rounds", "2")
    in_pages = ["pages of 2", "pages of 4", varlen.WHOLE, varlen.SDPA]
    assert [r["side"] for r in results] == [varlen.PACKED, varlen.PADDED, varlen.SDPA, *in_pages]
    assert [round(r["facts"]["pairs"], 3) for r in results[:3]] == [1, 2.67, 2.67]
    for result in results:
        assert_ordered(result["ms"])
    assert "over the first" in capsys.readouterr().out


@pytest.mark.usefixtures("nothing_is_compiled")
@pytest.mark.parametrize("which, case", [("training", PACKED), ("decoding", PAGED)])
def test_packed_sequences_that_are_wrong_are_not_timed(which, case, monkeypatch):
    make = getattr(varlen, which)

    def one_off(case):
        sides, gold = make(case)
        first = next(iter(sides))
        right = sides[first]
        return {**sides, first: replace(right, step=lambda: [t * 1.01 for t in right.step()])}, gold

    monkeypatch.setattr(varlen, which, one_off)
    with pytest.raises(RuntimeError, match="wrong: relative error"):
        varlen.measure(case, Namespace(rounds=1))


@pytest.fixture
def small_masks(monkeypatch):
    """Short masks, built in this process: the way to the numbers is the same."""

    def run(job):
        if job.arguments[-1] == "torch compiled" and job.function is masks.prepare:
            raise Failed("ValueError: no")
        return job.function(*job.arguments)

    causal = next(case for case in masks.CASES if case.title == "causal")
    short = replace(causal, length=300)
    monkeypatch.setattr(masks, "CASES", (short, replace(short, title="runs", compact=True, torch_too=False)))
    monkeypatch.setattr(masks, "Worker", lambda: contextlib.nullcontext(SimpleNamespace(run=run)))
    monkeypatch.setattr(masks, "ROUNDS", 2)


@pytest.mark.usefixtures("small_masks")
def test_masks(capsys, tmp_path):
    *results, refused, runs = run(tmp_path, "masks")
    assert [(r["case"], r["side"]) for r in results] == [("causal", side) for side in masks.SIDES[:2]]
    assert (refused["side"], refused["note"], refused["ms"]) == ("torch compiled", "ValueError: no", None)
    assert (runs["case"], runs["facts"]["most_ms"]) == ("runs", 25)
    for result in (*results, runs):
        assert_ordered(result["ms"])
        assert result["facts"]["best"] <= result["ms"]["low"] and result["facts"]["first_ms"] > 0
    rows = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines() if line[:1] == "|"]
    assert rows == ["case", "---", "causal", "", "", "runs"]


@pytest.mark.usefixtures("small_masks")
def test_json_alone_on_standard_output(capsys):
    cli.main(["bench", "masks", "--no-torch", "--only", "runs", "--json", "-"])
    assert [result["case"] for result in json.loads(capsys.readouterr().out)["results"]] == ["runs"]


@pytest.mark.usefixtures("small_masks")
def test_plots(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(masks, "PLOT_LENGTHS", (256, 512))
    cli.main(["bench", "masks", "--no-torch", "--only", "runs", "--plot", str(tmp_path / "cost.svg")])
    assert (tmp_path / "cost.svg").read_text().count("<path") > 10


@pytest.mark.usefixtures("small_masks")
def test_plot_without_matplotlib_fails_before_anything_is_measured(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["bench", "masks", "--plot", "cost.svg"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.endswith("A picture needs matplotlib: pip install 'flex-inductor[draw]'.\n")


@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_static(target, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(static, "LENGTH", 256)
    monkeypatch.setattr(static, "HEAD_DIMS", (16,))
    results = run(tmp_path, "static", "--target", target, "--only", "causal")
    assert [r["side"] for r in results] == ["forward", "backward_dq", "backward_dkdv"]
    for found in (r["facts"] for r in results):
        assert found["partial"] > found["full"] > 0  # it runs mask_mod
        assert found["tensor"] > 0 and 0 < found["registers"] <= 512
        assert (found["local_in_loops"], found["fits"]) == (0, "yes")
        assert ("executed" in found) == (target == "sm_80")
        if target == "sm_80":  # the assembler makes fewer instructions of PTX, but not by half
            assert found["full"] / 2 < found["executed"] < 2 * found["partial"]
            assert found["sectors"] > found["requests"] > 0 and found["conflicts"] >= 0
    assert f"| causal D16 {target} | forward " in capsys.readouterr().out


def test_compile(tmp_path, capsys, monkeypatch):
    walls = {OURS: iter((9.0, 3.0, 5.0)), SDPA: iter((3.0, 2.0, 4.0))}

    def step(side, case, bf16):
        assert (case.layers, case.warm) == (1, False) and bf16
        kernels = [("Inductor's own", 1.0), ("Inductor's own", 2.0)]
        kernels += [("attention forward", 0.5)] if side == OURS else []
        return Step(next(walls[side]), 1.0, {"Dynamo": 0.25}, kernels)

    monkeypatch.setattr(bench_compile, "in_own_process", step)
    results = run(tmp_path, "compile", "--layers", "1", "--rounds", "3", "--bf16")
    rows = [(r["case"], r["side"], r["ms"]["median"], r["facts"].get("kernels")) for r in results]
    assert rows == [
        ("layers: 1", SDPA, 3000, None),
        ("layers: 1", OURS, 5000, None),
        ("layers: 1, cpu", SDPA, 1000, ""),
        ("layers: 1, cpu", OURS, 1000, ""),
        ("layers: 1, Dynamo", SDPA, 250, ""),
        ("layers: 1, Dynamo", OURS, 250, ""),
        ("layers: 1, C++ compiler, Inductor's own", SDPA, 3000, 2),
        ("layers: 1, C++ compiler, Inductor's own", OURS, 3000, 2),
        ("layers: 1, C++ compiler, attention forward", SDPA, 0, 0),
        ("layers: 1, C++ compiler, attention forward", OURS, 500, 1),
    ]
    assert results[1]["facts"] == {"ratio": {"median": 1.5, "low": 1.375, "high": 2.25}, "at_most": 1.2}
    assert "1.5 (1.38 to 2.25)" in capsys.readouterr().out


def test_a_warm_compilation_finds_its_kernels():
    cold, warm = (
        bench_compile.in_own_process(OURS, bench_compile.Case(1, warm), False) for warm in (False, True)
    )
    assert len(cold.kernels) > 2 and not warm.kernels


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
