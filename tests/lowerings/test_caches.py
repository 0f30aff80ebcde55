"""Compiled code is found again by another process, and never when the code that made it has changed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import json, sys, torch, flex_inductor
from flex_inductor.lowerings import record_file
from torch._dynamo.utils import counters
torch._inductor.config.fx_graph_cache = True
torch._functorch.config.enable_autograd_cache = True
bias = torch.randn(20, requires_grad=True)
qkv = [torch.randn(1, 2, 20, 4, requires_grad=True) for _ in range(3)]
mod = lambda s, b, h, q_idx, kv_idx: s + bias[kv_idx]
attend = torch.compile(lambda q, k, v: flex_inductor.flex_attention(q, k, v, mod), backend=sys.argv[1])
attend(*qkv).sum().backward()
hits = {f"{k} {n}": v for k in ("inductor", "aot_autograd") for n, v in counters[k].items() if "cache_" in n}
kept = json.loads(record_file.path().read_text())["compilations"]
print(json.dumps({"hits": hits, "routes": [d.chosen for d in flex_inductor.decisions()], "kept": kept}))
"""


def run(root, cache, backend="flex_inductor"):
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, backend],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
        },
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("flex_inductor", "lowerings", "templates", "tools"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def test_what_another_process_finds(checkout, tmp_path):
    first = run(checkout, tmp_path)
    assert first["hits"]["inductor fxgraph_cache_miss"] == 2
    second = run(checkout, tmp_path)
    assert second["hits"] == {"inductor fxgraph_cache_hit": 2, "aot_autograd autograd_cache_hit": 1}
    assert second["routes"] == first["routes"] == ["cpu", "cpu"]
    assert second["kept"] == first["kept"]
    assert list(first["kept"][0]["calls"][0]["decisions"]) == ["forward", "backward"]

    assert run(checkout, tmp_path, "inductor")["hits"]["inductor fxgraph_cache_hit"] == 2

    (checkout / "templates" / "new.jinja").write_text("a template")
    changed = run(checkout, tmp_path)
    assert changed["hits"]["inductor fxgraph_cache_miss"] == 2
    assert "aot_autograd autograd_cache_hit" not in changed["hits"]
