"""Compiled code is found again by another process, and never when the code that made it has changed."""

import json
import shutil
from pathlib import Path

import pytest

from tests.forks import forks

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import json, os, torch
os.environ["TORCHINDUCTOR_CACHE_DIR"] = {cache!r}
import flex_inductor
from flex_inductor.lowerings import record_file
from torch._dynamo.utils import counters
torch._inductor.config.fx_graph_cache = True
torch._functorch.config.enable_autograd_cache = True
bias = torch.randn(2, 39, requires_grad=True)
qkv = [torch.randn(1, 2, 20, 4, requires_grad=True) for _ in range(3)]
mod = lambda s, b, h, q_idx, kv_idx: s + bias[h, q_idx - kv_idx + 19]
attend = torch.compile(lambda q, k, v: flex_inductor.flex_attention(q, k, v, mod), **{options})
attend(*qkv).sum().backward()
hits = {{f"{{k}} {{n}}": v for k in ("inductor", "aot_autograd") for n, v in counters[k].items() if "cache_" in n}}
kept = json.loads(record_file.path().read_text())["compilations"]
print(json.dumps({{"hits": hits, "routes": [d.chosen for d in flex_inductor.decisions()], "kept": kept}}))
"""


@pytest.fixture
def checkout(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("flex_inductor", "lowerings", "templates", "tools"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


@pytest.fixture
def run(checkout, tmp_path):
    """Compile and run in a new process."""
    with forks("torch._inductor.compile_fx, torch._inductor.codegen.cpp") as new:

        def run(backend="flex_inductor", **options):
            options |= {"backend": backend}
            found = new.run(SCRIPT.format(cache=str(tmp_path), options=options), checkout)
            return json.loads(found.splitlines()[-1])

        yield run


def test_what_another_process_finds(run, checkout):
    first = run()
    assert first["hits"]["inductor fxgraph_cache_miss"] == 2
    second = run()
    assert second["hits"] == {"inductor fxgraph_cache_hit": 2, "aot_autograd autograd_cache_hit": 1}
    assert second["routes"] == first["routes"] == ["cpu", "cpu"]
    assert second["kept"] == first["kept"]
    assert list(first["kept"][0]["calls"][0]["decisions"]) == ["forward", "backward"]

    assert run("inductor")["hits"]["inductor fxgraph_cache_hit"] == 2

    (checkout / "templates" / "new.jinja").write_text("a template")
    changed = run()
    assert changed["hits"]["inductor fxgraph_cache_miss"] == 2
    assert "aot_autograd autograd_cache_hit" not in changed["hits"]


def test_gradients_of_captures_whose_size_changes_are_found_too(run):
    run(dynamic=True)
    assert run(dynamic=True)["hits"] == {
        "inductor fxgraph_cache_hit": 2,
        "aot_autograd autograd_cache_hit": 1,
    }
