"""The record of what a process compiled: what it holds, and that it stays small and whole."""

import json
import multiprocessing

import expecttest
import pytest
import torch

from flex_inductor import flex_attention
from flex_inductor.lowerings import record_file
from flex_inductor.tools import cli
from flex_inductor.tools.inspector.last import page, read

WHEN = {"program": "train.py", "process": 1, "time": "today", "versions": {"torch": "2"}}


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(record_file, "path", lambda: tmp_path / "kept" / "last.json")
    monkeypatch.setattr(record_file, "_compilations", {})


def twice(q, scale):
    once = flex_attention(q, q, q, scale=0.5)
    return flex_attention(once, q, q, lambda score, b, h, q_idx, kv_idx: score * scale)


def compiled(function=twice, route="chunked"):
    return torch.compile(function, backend="flex_inductor", options={"route": route}, dynamic=False)


def queries(length, requires_grad=False):
    return torch.randn(1, 2, length, 16, requires_grad=requires_grad)


class Pages(expecttest.TestCase):
    maxDiff = None

    def test_recompiled_and_refused(self):
        attend = compiled()
        attend(queries(32), torch.tensor(2.0))
        attend(queries(48), torch.tensor(2.0))
        learnt = compiled(lambda q: flex_attention(q, q, q))
        learnt(queries(32, requires_grad=True)).sum().backward()
        with pytest.raises(RuntimeError):
            compiled(lambda q: flex_attention(q, q, q, scale=2.0), "triton")(queries(32))
        text = page({**read(), **WHEN})
        for compilation in read()["compilations"]:
            text = text.replace(f"compilation {compilation['id']}", "compilation N")
        self.assertExpectedInline(
            text,
            """\
train.py, process 1, today (torch 2)

== twice, compilation N
   call 0, test_last.py:26: once = flex_attention(q, q, q, scale=0.5)
      forward
         float32 on cpu, B1 H2 M32 N32 D16
         chosen:   chunked (asked for; serves every device, dtype, shape and mod, in bounded memory; not fused)
         rejected: triton: for GPUs; on CPU only with Triton's interpreter
         rejected: cpu: not asked for; fused C++ forward
   call 1, test_last.py:27: return flex_attention(once, q, q, lambda score, b, h, q_idx, kv_idx: score * scale)
      forward
         float32 on cpu, B1 H2 M32 N32 D16, score_mod (1 captured)
         chosen:   chunked (asked for; serves every device, dtype, shape and mod, in bounded memory; not fused)
         rejected: triton: for GPUs; on CPU only with Triton's interpreter
         rejected: cpu: not asked for; fused C++ forward

== twice, compilation N
   compiled again: tensor 'q' size mismatch at index 2. expected 32, actual 48
   call 0, test_last.py:26: once = flex_attention(q, q, q, scale=0.5)
      forward
         float32 on cpu, B1 H2 M48 N48 D16
         chosen:   chunked (asked for; serves every device, dtype, shape and mod, in bounded memory; not fused)
         rejected: triton: for GPUs; on CPU only with Triton's interpreter
         rejected: cpu: not asked for; fused C++ forward
   call 1, test_last.py:27: return flex_attention(once, q, q, lambda score, b, h, q_idx, kv_idx: score * scale)
      forward
         float32 on cpu, B1 H2 M48 N48 D16, score_mod (1 captured)
         chosen:   chunked (asked for; serves every device, dtype, shape and mod, in bounded memory; not fused)
         rejected: triton: for GPUs; on CPU only with Triton's interpreter
         rejected: cpu: not asked for; fused C++ forward

== <lambda>, compilation N
   call 0, test_last.py:45: learnt = compiled(lambda q: flex_attention(q, q, q))
      forward
         float32 on cpu, B1 H2 M32 N32 D16
         chosen:   chunked (asked for; serves every device, dtype, shape and mod, in bounded memory; not fused)
         rejected: triton: for GPUs; on CPU only with Triton's interpreter
         rejected: cpu: not asked for; fused C++ forward
      backward
         float32 on cpu, B1 H2 M32 N32 D16
         chosen:   chunked (asked for; serves every device, dtype, shape and mod, in bounded memory; not fused)
         rejected: triton: for GPUs; on CPU only with Triton's interpreter
         rejected: cpu: not asked for; fused C++ backward

== <lambda>, compilation N
   call 0, test_last.py:48: compiled(lambda q: flex_attention(q, q, q, scale=2.0), "triton")(queries(32))
   failed: FlexRuntimeError: route 'triton' was asked for and cannot serve this call.
   call:     forward float32 on cpu, B1 H2 M32 N32 D16
   chosen:   none
   rejected: triton: for GPUs; on CPU only with Triton's interpreter
   rejected: cpu: not asked for; fused C++ forward
   rejected: chunked: not asked for; serves every device, dtype, shape and mod, in bounded memory; not fused""",
        )


def test_configs_and_another_command(capsys, tmp_path):
    compiled(route="cpu")(queries(32), torch.tensor(2.0))
    (compilation,) = read()["compilations"]
    for call in compilation["calls"]:
        ((kernel, config, _),) = call["decisions"]["forward"]["kernels"]
        assert kernel == "forward" and config["block_m"] > 0
    assert cli.main(["inspect", "--last"]) == 0
    assert "config:   forward block_m=" in capsys.readouterr().out
    assert cli.main(["inspect", "--last", "--json", str(tmp_path / "copy.json")]) == 0
    assert json.loads((tmp_path / "copy.json").read_text()) == read()


def test_the_line_of_a_guard(tmp_path):
    def attend(q, times):
        return flex_attention(q, q, q) * times

    for times in (2, 3):
        compiled(attend)(queries(32), times)
    guards = [compilation["recompiled"] for compilation in read()["compilations"]]
    assert guards[0] is None and guards[1].startswith("times == 2 (test_last.py:")


def test_bounded(monkeypatch):
    monkeypatch.setattr(record_file, "MOST_COMPILATIONS", 2)
    monkeypatch.setattr(record_file, "MOST_CALLS", 1)
    monkeypatch.setattr(record_file, "MOST_LETTERS", 20)
    attend = compiled()
    for length in (16, 32, 48):
        attend(queries(length), torch.tensor(2.0))
    found = read()["compilations"]
    assert [(len(c["calls"]), c["left_out"]) for c in found] == [(1, 1)] * 2
    assert [c["calls"][0]["decisions"]["forward"]["call"] for c in found] == ["forward float32 on c..."] * 2
    assert "and 1 more" in page(read())


def test_no_folders():
    short = record_file._short(
        "FileNotFoundError: /home/me/project/train.py:3, docs/a.md and 1/0 and a == b/c"
    )
    assert short == "FileNotFoundError: train.py:3, docs/a.md and 1/0 and a == b/c"


def _write_often():
    for _ in range(50):
        record_file._write()


def test_several_processes_leave_whole_files():
    compiled()(queries(32), torch.tensor(2.0))
    expected = read()["compilations"]
    writers = [multiprocessing.get_context("fork").Process(target=_write_often) for _ in range(3)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert read()["compilations"] == expected
    assert [writer.exitcode for writer in writers] == [0] * 3
    assert [path.name for path in record_file.path().parent.iterdir()] == ["last.json"]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "kept").write_text("a file")
    out = compiled()(queries(32), torch.tensor(2.0))
    assert out.isfinite().all()


REFUSED = {
    "no record": (None, [], "there is no record in "),
    "not a record": ("{}", [], "cannot be read ('format'); it is written anew by the next process that "),
    "a function": ("{}", ["train.py:f"], "--last shows what another process compiled: leave train.py:f out"),
    "options of a function": (
        "{}",
        [
            *(f"--{name}=x" for name in ("input", "target", "kernel", "html", "against")),
            *("--no-backward", "--source-only"),
        ],
        "leave --input, --no-backward, --target, --kernel, --source-only, --html, --against out",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line(name, capsys):
    content, argv, message = REFUSED[name]
    if content is not None:
        record_file.path().parent.mkdir()
        record_file.path().write_text(content)
    assert cli.main(["inspect", "--last", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err and captured.err.count("\n") == 1
