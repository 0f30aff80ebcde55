"""The kinds of measurement that go on the page of `flex-inductor bench`, and the page; the numbers mean nothing here."""

import contextlib
import json
import os
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._inductor.cpu_vec_isa import valid_vec_isa_list

from flex_inductor.lowerings.cpu.call import has_amx
from flex_inductor.tools import cli
from flex_inductor.tools.bench import bias, decode, loops, memory, peak, shares, small, threads, varlen

needs_avx2 = pytest.mark.skipif(not {"avx2", "fma"} <= loops.flags(), reason="the loops are written for AVX2")


@pytest.fixture
def nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(loops, "gemm_size", lambda dtype: 64)


def run(tmp_path, *command):
    file = tmp_path / "found.json"
    assert cli.main(["bench", *command, "--json", str(file)]) == 0
    return json.loads(file.read_text())["results"]


SHORT = shares.Case(32, 16, 8, heads=4, kv_heads=2)


def test_only_visible_pairs_count():
    assert SHORT.flops(training=False) == 4 * (32 * 33 / 2) * 2 * (16 + 8)
    assert SHORT.flops(training=True) == 4 * (32 * 33 / 2) * 2 * (4 * 16 + 3 * 8)
    assert SHORT.title == "fp32 S32 H4:2 D16 V8"


@pytest.mark.usefixtures("nothing_is_compiled")
def test_shares(tmp_path, monkeypatch):
    monkeypatch.setattr(shares, "CASES", (SHORT,))
    product, forward, training = run(tmp_path, "shares", "--rounds", "1", "--plot", str(tmp_path / "a.svg"))
    assert [product["side"], forward["side"], training["side"]] == ["fp32 product", *shares.STEPS]
    assert product["facts"]["share"]["median"] == 1
    rate = SHORT.flops(training=True) / training["ms"]["median"] / 1e6
    assert training["facts"]["rate"]["median"] == pytest.approx(rate)
    share = rate / product["facts"]["rate"]["median"]
    assert training["facts"]["share"]["median"] == pytest.approx(share)
    assert (tmp_path / "a.svg").read_text().count("<path") > 5


@pytest.mark.usefixtures("nothing_is_compiled")
def test_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(threads, "CASES", (SHORT,))
    before = torch.get_num_threads()
    results = run(tmp_path, "threads", "--rounds", "1")
    assert [r["case"] for r in results[::3]] == [f"{SHORT.title} {step}" for step in shares.STEPS]
    assert results[0]["side"].startswith("1 thread on 1 of ") and torch.get_num_threads() == before


@pytest.mark.usefixtures("nothing_is_compiled")
def test_bias(tmp_path, monkeypatch):
    monkeypatch.setattr(bias, "CASES", (bias.Case(36, torch.float32),))
    results = run(tmp_path, "bias", "--rounds", "1")
    assert [(r["side"], r["facts"]["at_most"]) for r in results] == [
        ("causal", ""),
        ("T5", 1.1),
        ("Swin", 1.1),
        ("Toeplitz", 1.1),
    ]


def test_small(tmp_path, monkeypatch):
    """The time of the kernels is a part of the call's."""
    monkeypatch.setattr(small, "CASES", (replace(SHORT, backward=False),))
    (forward,) = run(tmp_path, "small", "--rounds", "3")
    assert 0 < forward["facts"]["kernel"]["median"] < forward["ms"]["median"]
    assert forward["facts"]["ratio"]["low"] > 1


@needs_avx2
@pytest.mark.usefixtures("nothing_is_compiled")
@pytest.mark.parametrize("options", [[], ["--busy"]])
def test_decode(options, tmp_path, monkeypatch):
    monkeypatch.setattr(decode, "CASES", (varlen.Case("few", (300, 900), (16,), 4, 2, 16),))
    found = run(tmp_path, "decode", "--rounds", "1", *options)
    whole = found[2]
    assert [r["side"] for r in found] == [decode.READING, "pages of 16", varlen.WHOLE, *decode.BARE]
    size = 1200 * 2 * 16 * 2 * 4
    assert whole["facts"]["rate"]["median"] == pytest.approx(size / whole["ms"]["median"] / 1e6)


@needs_avx2
def test_loops_do_what_they_are_timed_for():
    """A stream reads everything: its sum is that of what it is given."""
    source = torch.arange(1024, dtype=torch.float32)
    for ahead in loops.AHEAD:
        assert loops.stream()(source.data_ptr(), 4096, ahead) == source.sum()
    assert {"AVX2 fp32"} <= {unit.name for unit in loops.units()}


@needs_avx2
@pytest.mark.parametrize("ahead", loops.AHEAD)
@pytest.mark.parametrize("count", [1, 4, 11])
def test_the_bare_loop_reads_each_page_once(count, ahead):
    keys, values = (torch.randint(9, (13, 4, 64)).float() for _ in range(2))
    pages = torch.randperm(13)[:count].int()
    read = sum(
        loops._read_pages(keys, values, pages, ahead, 8 if ahead else 0, thread)
        for thread in range(torch.get_num_threads())
    )
    assert read == (keys + values)[pages.long()].sum()


def test_what_is_compiled_without_amx_has_a_cache_of_its_own():
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR"), valid_vec_isa_list()[:]
    with peak.without_amx():
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] != before[0]
        assert not has_amx()
    assert (os.environ.get("TORCHINDUCTOR_CACHE_DIR"), valid_vec_isa_list()) == before


@needs_avx2
@pytest.mark.usefixtures("nothing_is_compiled")
def test_peak(tmp_path, monkeypatch):
    here = SimpleNamespace(run=lambda job: job.function(*job.arguments))
    monkeypatch.setattr(peak, "Worker", lambda: contextlib.nullcontext(here))
    monkeypatch.setattr(peak, "CALLS", (SHORT,))
    monkeypatch.setattr(peak, "without_amx", contextlib.nullcontext)
    monkeypatch.setattr(loops, "ROUNDS", 1000)
    monkeypatch.setattr(loops, "READ", 1 << 16)
    *_, memory_case = peak.cases(None)
    found = run(tmp_path, "peak", "--only", "AVX2", "--rounds", "1")
    assert [r["side"] for r in found] == ["loop", "product", *(f"{step} D16 V8" for step in shares.STEPS)]
    assert found[0]["facts"]["share"]["median"] == pytest.approx(1)
    read = run(tmp_path, "peak", "--only", memory_case.title, "--rounds", "1")
    assert max(r["facts"]["share"] for r in read) == 1 and len(read) == 2 + len(loops.AHEAD)


def test_memory(tmp_path, monkeypatch):
    class Measured:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def run(self, job):
            assert job.arguments[1:] == (2, 64)
            return 80.0 if job.arguments[0] == "ours" else 100.0

    monkeypatch.setattr(memory, "Worker", Measured)
    results = run(tmp_path, "memory", "--layers", "2", "--length", "64")
    assert [r["facts"] for r in results] == [{"MB": 100, "ratio": 1}, {"MB": 80, "ratio": 0.8}]


def test_page(tmp_path, monkeypatch, capsys):
    """Results that are there are drawn; a kind that fails is named and left out."""
    found = {
        "machine": {"cpu": "a <CPU>"},
        "date": "2026-11-26",
        "options": {},
        "results": [
            {
                "case": "S32",
                "side": side,
                "ms": spread,
                "note": "",
                "facts": {"rate": spread, "share": spread},
            }
            for side, spread in zip(("fp32 product", *shares.STEPS), SPREADS, strict=True)
        ],
    }
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "shares.json").write_text(json.dumps(found))
    monkeypatch.setattr(subprocess, "run", lambda command: subprocess.CompletedProcess(command, 1))
    out = tmp_path / "bench.html"
    command = ["bench", "--out", str(out), "--results", str(folder), "--kinds", "shares", "small"]
    assert cli.main(command) == 1
    assert "small failed: it is not on the page" in capsys.readouterr().err
    page = out.read_text()
    assert 'id="shares"' in page and 'id="small"' not in page and "<svg" in page and "a &lt;CPU&gt;" in page
    assert "worst share: 0.25, S32 forward" in page


SPREADS = [{"median": m, "low": m, "high": m} for m in (1.0, 0.25, 0.5)]
