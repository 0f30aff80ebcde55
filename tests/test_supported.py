"""Versions of torch that were not tested, and machines that lack what compiling needs."""

import re
import sys
from pathlib import Path

import pytest
import torch

from flex_inductor import FlexError, flex_attention
from flex_inductor.lowerings import toolchain
from flex_inductor.tools.resources import gpu_target
from tests.forks import forks
from tests.op.calls import qkv

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def python():
    with forks() as new:
        yield lambda code: new.run(code, ROOT)


def versions(version: str, before: str = "") -> str:
    """The start of a script that finds this version of torch, in which `before` was run."""
    return f"""
import warnings
import torch
torch.__version__ = torch.torch_version.TorchVersion({version!r})
{before}
"""


CALLS = """
import logging
logging.disable(logging.WARNING)  # torch 2.11 warns where one compilation is inside another
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import flex_inductor
    import flex_inductor.masks
print([str(warning.message) for warning in said])
query = torch.randn(1, 2, 20, 8, dtype=torch.float64)

def attend(query):
    return flex_inductor.flex_attention(query, query, query)

compiled = (torch.compile(attend, backend="flex_inductor", fullgraph=whole) for whole in (True, False))
for call in (attend, *compiled):
    try:
        print("right" if torch.allclose(call(query), (query @ query.mT / 8**0.5).softmax(-1) @ query) else "wrong")
    except Exception as error:
        print(str(error).replace("\\n", " "))
"""
RANGE = "tested with torch 2.11 to 2.15"
CURE = r"pip install 'torch>=2.11,<2.16'"


def test_a_newer_torch_is_named_once_and_served(python):
    said, *results = python(versions("2.16.0a0+git123") + CALLS).splitlines()
    assert said.count(RANGE) == 1 and "2.16.0a0+git123" in said and CURE in said
    assert results == ["right"] * 3


@pytest.mark.parametrize("version", ["2.11.0", "2.15.1+cu132"])
def test_nothing_is_said_of_tested_ones(python, version):
    assert python(versions(version) + CALLS.partition("query =")[0]) == "[]"


BROKEN = {
    "import torch.fx.experimental.proxy_tensor as t; t.track_tensor_tree = None": (
        "the self-check of eager calls fails: TypeError",
        "the self-check of compiled calls fails: ",
    ),
    "import torch._dynamo.variables.higher_order_ops as t; del t.speculate_subgraph": (
        "right",
        "its part in Dynamo or Inductor fails: ImportError: cannot import name 'speculate_subgraph'",
    ),
    "import torch._inductor.compile_fx, torch._inductor.lowering as t; t.register_lowering = None": (
        "right",
        "its part in Dynamo or Inductor fails: TypeError: 'NoneType' object is not callable",
    ),
    "import torch._inductor.compile_fx as t; del t.compile_fx_inner": (
        "right",
        "its import fails: ImportError: cannot import name 'compile_fx_inner'",
    ),
}


@pytest.mark.parametrize("broken", BROKEN, ids=["tracing", "dynamo", "inductor", "backend"])
def test_what_a_newer_torch_breaks_is_refused_by_name(python, broken):
    _, *results = python(versions("2.99.0", broken) + CALLS).splitlines()
    eager, compiled = BROKEN[broken]
    for result, expected in zip(results, (eager, compiled, compiled), strict=True):
        assert expected in result
        assert expected == "right" or (RANGE in result and "With 2.99.0 " in result and CURE in result)


def test_an_import_that_fails_with_a_newer_torch(python):
    lacks = "import torch.nn.attention.flex_attention as t; del t.FlexKernelOptions"
    code = """
try:
    import flex_inductor
except ImportError as error:
    print(error)
"""
    found = python(versions("2.99.0", lacks) + code)
    assert (
        re.search(r"With 2\.99\.0 its import fails: AttributeError: .*FlexKernelOptions", found)
        and CURE in found
    )


def test_a_torch_that_is_too_old(python):
    code = """
try:
    import flex_inductor
except ImportError as error:
    print(error)
"""
    assert python(versions("2.10.1") + code) == (
        f"flex_inductor needs torch 2.11 to 2.15, and found 2.10.1. Install another: {CURE}"
    )


def test_no_compiler():
    from torch._inductor import config

    with config.patch({"cpp.cxx": ("/no/such/g++",)}), pytest.raises(RuntimeError) as refused:
        torch.compile(lambda *qkv: flex_attention(*qkv).sin(), backend="flex_inductor")(*qkv())
    assert str(refused.value).startswith(
        "A graph with attention cannot be compiled here: no C++ compiler ('/no/such/g++' does not run): install one "
        "(apt install g++), or set CXX to its path."
    )


def test_a_torch_without_headers(monkeypatch, tmp_path):
    toolchain.missing_headers.cache_clear()
    monkeypatch.setattr(toolchain.torch, "__file__", str(tmp_path / "__init__.py"))
    try:
        reason = toolchain.missing_for_cpp()
    finally:
        monkeypatch.undo()
        toolchain.missing_headers.cache_clear()
    assert f"{tmp_path}/include/ATen/cpu/vec/vec.h is missing" in reason
    assert "pip install --force-reinstall torch==" in reason


@pytest.mark.parametrize(
    "needed, installed, reason",
    [
        (["triton==3.9.0; platform_system == 'Linux'"], "3.9.0", None),
        (["triton~=3.9.0; platform_system == 'Linux'"], "3.9.1", None),
        (["sympy>=1.13"], "3.7.1", None),  # builds for CPUs need none
        (
            ["triton~=3.9.0"],
            "3.7.1",
            r"triton 3\.7\.1 does not fit torch .* \(pip install 'triton~=3\.9\.0'\)",
        ),
        (["triton==3.9.0"], None, r"triton is not installed \(pip install 'triton==3\.9\.0'\)"),
        (None, None, r"triton is not installed \(pip install triton\)"),
    ],
)
def test_triton_that_is_missing_or_does_not_fit(monkeypatch, needed, installed, reason):
    def version(name):
        if installed is None:
            raise toolchain.PackageNotFoundError
        return installed

    monkeypatch.setattr(toolchain, "requires", lambda name: needed)
    monkeypatch.setattr(toolchain, "version", version)
    monkeypatch.setattr(toolchain, "packages_distributions", dict)
    found = missing_for_triton()
    assert found is None if reason is None else re.fullmatch(reason, found)


def missing_for_triton():
    """Anew."""
    caches = toolchain.missing_for_triton, toolchain.version_of
    for cached in caches:
        cached.cache_clear()
    try:
        return toolchain.missing_for_triton()
    finally:
        for cached in caches:
            cached.cache_clear()


@pytest.mark.parametrize("name", ["triton-rocm", "pytorch-triton-rocm", "pytorch-triton", "triton-windows"])
def test_triton_under_other_names(monkeypatch, name):
    installed = "3.9.1"

    def version(asked):
        if asked != name:
            raise toolchain.PackageNotFoundError
        return installed

    monkeypatch.setattr(toolchain, "requires", lambda _: [f'{name}==3.9.1+git5; platform_system == "Linux"'])
    monkeypatch.setattr(toolchain, "version", version)
    monkeypatch.setattr(toolchain, "packages_distributions", lambda: {"triton": [name]})
    assert missing_for_triton() is None
    installed = "3.7.1"
    assert f"(pip install '{name}==3.9.1')" in missing_for_triton()


def test_kernels_for_a_target_without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton.backends.compiler", None)
    with pytest.raises(
        FlexError, match=r"Kernels for sm_90 are compiled by triton: .*triton\.backends\.compiler"
    ):
        gpu_target("sm_90")
