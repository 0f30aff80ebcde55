"""What is true of every framework: with it, its integration is ready; without it, the error says what to install."""

import importlib
import sys
import warnings

import pytest

from flex_inductor.integrations import check_version

FRAMEWORKS = ["diffusers", "onnx", "torchtitan", "transformers", "vllm"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_ready(framework):
    pytest.importorskip(framework)
    importlib.import_module(f"flex_inductor.integrations.{framework}")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_without_it_says_what_to_install(framework, monkeypatch):
    monkeypatch.setitem(sys.modules, framework, None)  # as where it is not installed
    monkeypatch.delitem(sys.modules, f"flex_inductor.integrations.{framework}", raising=False)
    with pytest.raises(ImportError, match=rf"Install flex_inductor\[{framework}\]"):
        importlib.import_module(f"flex_inductor.integrations.{framework}")


@pytest.mark.parametrize("version, warned", [("5.24.1", False), ("5.25.0", True), ("5.2.4", True)])
def test_other_versions_warn(version, warned):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        check_version("transformers", version, "5.24")
    assert [f"transformers {version}: " in str(w.message) for w in seen] == [True] * warned
