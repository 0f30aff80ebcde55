"""What is kept for later processes: disks that are full, processes that die, files that something else wrote."""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

from flex_inductor import fingerprint
from flex_inductor.lowerings import cache_folder, record_file, winners
from flex_inductor.tools import cli
from flex_inductor.tools.inspector import cost

WINNER = winners.Winner("forward", "cpu", fingerprint.FINGERPRINT, {"block_m": 64}, [[{"block_m": 64}, 1.5]])


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cost, "_measured", lambda: {"flops": {"float32": 2.0}, "bandwidth": 1.0})


def peaks():
    return cost.this_cpu.__wrapped__(torch.get_num_threads())


WRITERS = {
    "a tuning result": (lambda: winners.keep(WINNER), lambda: next(winners.folder().glob("*.json"))),
    "what was compiled": (record_file._write, record_file.path),
    "this machine's peaks": (peaks, lambda: cache_folder.folder() / "cpu_peaks.json"),
}


class File:
    """One that fails once it has some letters."""

    def __init__(self, file, error):
        self.file, self.error, self.written = file, error, 0

    def write(self, text):
        self.written += len(text)
        if self.written > 20:
            raise self.error
        return self.file.write(text)


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT], ids=errno.errorcode.get
)
@pytest.mark.parametrize("fails", ["mkdir", "open", "write", "replace"])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_file_that_cannot_be_written(writer, fails, number, monkeypatch):
    """Nothing is raised, the file that was there before stays, and no unfinished one is left."""
    write, path = WRITERS[writer]
    write()
    before = path().read_text()
    path().parent.joinpath("another").touch()
    monkeypatch.setattr(cost, "_measured", lambda: {"flops": {"float32": 3.0}, "bandwidth": 1.0})
    if writer == "this machine's peaks":
        path().write_text("{}")
        before = "{}"
    opened = Path.open

    def fail(self, *args, **kwargs):
        raise OSError(number, os.strerror(number), str(self))

    @contextlib.contextmanager
    def opening(self, *args, **kwargs):
        with opened(self, *args, **kwargs) as file:
            yield File(file, OSError(number, os.strerror(number))) if args == ("x",) else file

    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if fails == "open":
            patch.setattr(
                Path,
                "open",
                lambda self, *args, **kwargs: fail(self) if args == ("x",) else opened(self, *args, **kwargs),
            )
        else:
            patch.setattr(Path, *(("open", opening) if fails == "write" else (fails, fail)))
        write()
    expected = ["the tuning result cannot be kept"] if writer == "a tuning result" else []
    assert [str(each.message)[:32] for each in said] == expected
    assert path().read_text() == before
    assert not [left for left in path().parent.iterdir() if left.name.startswith(".")]


@pytest.mark.parametrize("writer", WRITERS)
def test_a_process_that_is_killed_while_it_writes(writer):
    """Another one finds what is whole, at whatever moment the first one dies."""
    write, path = WRITERS[writer]
    write()
    whole = json.loads(path().read_text()).keys()
    for attempt in range(8):
        if not (child := os.fork()):
            while True:
                cost._are_peaks = lambda found: False  # measured again
                write()
        time.sleep(0.002 + 0.003 * attempt)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert json.loads(path().read_text()).keys() == whole
        write()
        assert winners.find("forward", "cpu") in (None, WINNER)


HOSTILE = {
    "nothing": "",
    "cut": '{"problem": "forward", "dev',
    "a number": "3",
    "a list": "[[]]",
    "null": "null",
    "deep": "[" * 100_000,
    "foreign": '{"format": 1, "flops": 3}',
    "bytes": b"\xff\xfe\x00\x80",
    "other types": '{"format": 1, "versions": 3, "compilations": {"a": 1}}',
}


@pytest.mark.parametrize("content", HOSTILE)
def test_files_of_something_else(content, capsys):
    for write, path in WRITERS.values():
        write()
        written = HOSTILE[content]
        path().write_bytes(written if isinstance(written, bytes) else written.encode())
    with pytest.warns(UserWarning, match="is not a tuning result and is ignored"):
        assert winners.find("forward", "cpu") is None
    assert peaks().bandwidth == 1.0
    assert cli.main(["inspect", "--last"]) == 2
    message = capsys.readouterr().err
    assert "cannot be read" in message and message.count("\n") == 1


@pytest.mark.parametrize(
    "change",
    [
        {"times_ms": [[{"block_m": 64}, "soon"]]},
        {"times_ms": [[{"block_m": 64}]]},
        {"times_ms": 3},
        {"config": {"block_m": [64]}},
        {"config": None},
        {"more": 1},
    ],
    ids=str,
)
def test_a_tuning_result_with_other_types(change):
    winners.keep(WINNER)
    (path,) = winners.folder().glob("*.json")
    path.write_text(json.dumps(WINNER._asdict() | change))
    with pytest.warns(UserWarning, match="is ignored"):
        assert winners.find("forward", "cpu") is None


@pytest.mark.parametrize(
    "content",
    [
        '{"this": 1}',
        '{"KEY": {"flops": {"float32": "fast"}, "bandwidth": 1}}',
        '{"KEY": {"flops": {}}}',
        '{"KEY": {"flops": {"float32": -1}, "bandwidth": 1}}',
    ],
)
def test_peaks_that_are_none(content):
    assert peaks().flops == {"float32": 2.0}
    path = cache_folder.folder() / "cpu_peaks.json"
    (key,) = json.loads(path.read_text())
    path.write_text(content.replace("KEY", key))
    assert peaks().flops == {"float32": 2.0}
    assert json.loads(path.read_text())[key]["bandwidth"] == 1.0


TUNED = """
import torch, flex_inductor
from flex_inductor.lowerings import winners
query = torch.randn(1, 2, 64, 16)
attend = torch.compile(flex_inductor.flex_attention, backend="flex_inductor", options={"max_autotune": True})
out = attend(query, query, query)
torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(query, query, query))
(decision,) = flex_inductor.decisions()
print(decision.kernels[0].why.partition(":")[0], len([*winners.folder().iterdir()]))
"""


def test_two_processes_that_tune_at_once():
    command = [sys.executable, "-W", "ignore", "-c", TUNED]
    # A compiled graph from torch's caches would bring its decision along.
    environment = os.environ | {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}

    def start():
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

    first, second = start(), start()
    said = [process.communicate()[0].strip() for process in (first, second)]
    assert first.returncode == second.returncode == 0
    assert "fastest when timed 1" in said
    assert {*said} <= {"fastest when timed 1", "fastest when timed before 1"}
    assert start().communicate()[0].strip() == "fastest when timed before 1"
