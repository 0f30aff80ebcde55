import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch._inductor import config as inductor_config

from flex_inductor.tools import cli, env


class StubRoute:
    def __init__(self, name, usable, reason):
        self.name, self.answer = name, (usable, reason)

    def available(self):
        return self.answer


@pytest.fixture
def stub_routes(monkeypatch):
    module = ModuleType("flex_inductor.lowerings.registry")
    module.ROUTES = (StubRoute("fast", False, "no such card"), StubRoute("chunked", True, "runs anywhere"))
    monkeypatch.setitem(sys.modules, module.__name__, module)


def facts_of(argv, capsys):
    assert cli.main(["env", "--json", *argv]) == 0
    sections = json.loads(capsys.readouterr().out)
    return {title: {fact["name"]: fact for fact in facts} for title, facts in sections.items()}


def test_real_routes_are_listed_with_reasons(capsys):
    routes = facts_of([], capsys)["routes"]
    assert any(route["ok"] for route in routes.values()), "the fallback serves every machine"
    assert all(route["text"] for route in routes.values())


def test_json(stub_routes, capsys):
    sections = facts_of([], capsys)
    assert sections["versions"]["torch"]["text"].split("+")[0] == torch.__version__.split("+")[0]
    assert sections["cpu"]["vectors"]["text"] == torch.backends.cpu.get_cpu_capability()
    assert sections["compilers"]["C++ compiler"]["ok"] is True
    assert sections["compilers"]["Python headers"]["ok"] is True
    assert sections["routes"] == {
        "fast": {"name": "fast", "text": "no such card", "ok": False},
        "chunked": {"name": "chunked", "text": "runs anywhere", "ok": True},
    }


def test_page(stub_routes, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert cli.main(["env"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["routes"] in lines
    assert ["fast", "no", "no", "such", "card"] in lines
    assert ["chunked", "yes", "runs", "anywhere"] in lines


def fake_compiler(folder, script):
    path = folder / "c++"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_missing_compiler():
    with inductor_config.patch({"cpp.cxx": ("no-such-compiler",)}):
        fact = env.cpp_compiler()
    assert fact.ok is False
    assert "no-such-compiler" in fact.text


def test_compiler_that_starts_but_cannot_compile(tmp_path):
    compiler = fake_compiler(
        tmp_path, '[ "$1" = --version ] && echo fake 1.0 || { echo "no cc1plus" >&2; exit 1; }'
    )
    with inductor_config.patch({"cpp.cxx": (compiler,)}):
        assert env.cpp_compiler() == env.Fact("C++ compiler", "no cc1plus", ok=False)


def test_missing_python_headers(monkeypatch, tmp_path):
    monkeypatch.setattr(env.sysconfig, "get_path", lambda name: str(tmp_path))
    fact = env.python_headers()
    assert fact.ok is False
    assert f"{tmp_path}/Python.h is missing" in fact.text


def test_no_driver_says_why(monkeypatch):
    def init():
        raise RuntimeError("Found no driver.\nInstall one.")

    def current_accelerator(check_available=False):
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    monkeypatch.setattr(torch.cuda, "init", init)
    assert list(env.devices()) == [
        env.Fact("accelerator", "torch is built for cuda, but: Found no driver.", ok=False)
    ]


@pytest.mark.parametrize(
    ("cuda", "hip", "software"),
    [("13.0", None, "CUDA 13.0, sm_90"), (None, "7.0", "ROCm 7.0, gfx942")],
)
def test_device_line(monkeypatch, cuda, hip, software):
    properties = SimpleNamespace(name="Card", major=9, minor=0, gcnArchName="gfx942", total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert env.describe_device("cuda", 0) == f"Card, {software}, 80 GiB"
