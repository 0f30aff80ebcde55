"""Processes that have imported torch and nothing of ours: forks of one, for to import torch takes longer than most tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SERVER = """
import json, os, sys, traceback
import gc
import {imports}
assert "flex_inductor" not in sys.modules
gc.freeze()  # else a collection copies all that is shared
for line in sys.stdin:
    code, cwd, path, output = json.loads(line)
    if child := os.fork():
        print(os.waitpid(child, 0)[1], flush=True)
        continue
    for stream in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), stream)
    os.chdir(cwd)
    sys.path[:] = ["", *path, *sys.path[1:]]
    status = 0
    try:
        exec(code, {{"__name__": "__main__"}})
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            traceback.print_exc()
            status = 1
    sys.stdout.flush()
    os._exit(status)
"""


class Forks:
    def __init__(self, server: subprocess.Popen):
        self.server = server

    def run(self, code: str, cwd: Path, *path: Path) -> str:
        """What the code prints where it finds modules in `cwd`, in `path` and then where Python does."""
        with tempfile.NamedTemporaryFile("r") as output:
            command = [code, str(cwd), [*map(str, path)], output.name]
            print(json.dumps(command), file=self.server.stdin, flush=True)
            status = self.server.stdout.readline().strip()
            found = output.read().strip()
        assert status == "0", found
        return found


@contextmanager
def forks(imports: str = "torch") -> Iterator[Forks]:
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SERVER.format(imports=imports)],
        env={**os.environ, "PYTHONPATH": ""},
        cwd=os.sep,  # where nothing of ours is found
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        yield Forks(server)
        server.stdin.close()
