"""The package as a user gets it: the wheel, the source checkout, the console script."""

import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

import flex_inductor
from flex_inductor import compat, fingerprint
from flex_inductor.tools import cli
from tests.forks import forks

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"flex_inductor": "", "lowerings": "lowerings", "templates": "templates", "tools": "tools"}
BUILD_WHEEL = "from setuptools import build_meta; build_meta.build_wheel('dist')"


@pytest.fixture(scope="module")
def python():
    with forks() as new:
        yield new.run


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy, so that an editable install of this checkout cannot stand in for what is tested."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, copy)
    (copy / "templates" / "cpu").mkdir(exist_ok=True)
    (copy / "templates" / "cpu" / "probe.jinja").touch()
    return copy


@pytest.fixture(scope="module")
def installed(checkout, tmp_path_factory):
    """The wheel, unpacked as an installer does."""
    site = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, "-c", BUILD_WHEEL], cwd=checkout, capture_output=True, check=True)
    (wheel,) = checkout.glob("dist/*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def test_wheel_ships_every_source_and_template(installed):
    missing = {
        installed_path
        for folder, place in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".jinja", ".h", ".cpp", ".typed")
        and not (
            installed_path := installed / "flex_inductor" / place / path.relative_to(ROOT / folder)
        ).exists()
    }
    assert not missing, "list new subpackages in pyproject.toml"
    assert (installed / "flex_inductor/templates/cpu/probe.jinja").exists()


def test_wheel_metadata(installed):
    (dist_info,) = installed.glob("*.dist-info")
    metadata = PathDistribution(dist_info)
    assert metadata.version == flex_inductor.__version__
    entry_points = {(point.group, point.name): point.value for point in metadata.entry_points}
    assert entry_points == {
        ("torch_dynamo_backends", "flex_inductor"): "flex_inductor.backend:flex_inductor",
        ("console_scripts", "flex-inductor"): "flex_inductor.tools.cli:main",
        ("vllm.general_plugins", "flex_inductor"): "flex_inductor.integrations.vllm_plugin:load",
    }


def test_dynamo_lists_the_backend_without_an_import(python, installed, tmp_path):
    code = """
import sys, torch
print("flex_inductor" in torch._dynamo.list_backends(), "flex_inductor" in sys.modules)
"""
    assert python(code, tmp_path, installed) == "True False"


WHERE = "import flex_inductor.lowerings as m, flex_inductor.tools.cli; print(m.__file__)"
SHOW_VERSION = """
import runpy, sys
sys.argv[1:] = ["--version"]
runpy.run_module("flex_inductor.tools.cli", run_name="__main__")
"""


def test_wheel_is_used_away_from_the_checkout(python, installed, tmp_path):
    assert Path(python(WHERE, tmp_path, installed)).is_relative_to(installed)


@pytest.mark.parametrize("beside_wheel", [False, True], ids=["no wheel", "beside a wheel"])
def test_checkout_is_used_from_its_root(beside_wheel, python, checkout, installed):
    path = [installed] if beside_wheel else []
    assert python(WHERE, checkout, *path) == str(checkout / "lowerings/__init__.py")
    assert python(SHOW_VERSION, checkout, *path) == f"flex_inductor {flex_inductor.__version__}"


def test_a_checkout_offers_no_other_folder(python, checkout):
    code = "import flex_inductor; from importlib.util import find_spec; print([find_spec(f'flex_inductor.{n}') for n in"
    assert python(f"{code} ('tests', 'flex_inductor', 'docs')])", checkout) == "[None, None, None]"


def test_import_is_quick_and_leaves_the_compiler_alone(python, tmp_path):
    """With bytecode, as installed packages have: to compile our source takes longer than to import it.

    torch's own flex_attention imports sympy from 2.14 on, which takes as long.
    """
    code = f"""
import time, sys, torch.nn.attention.flex_attention
sys.dont_write_bytecode, sys.pycache_prefix = False, {str(tmp_path)!r}
start = time.process_time()
import flex_inductor
print(time.process_time() - start, "torch._inductor" in sys.modules)
"""
    runs = [python(code, ROOT).split() for _ in range(4)]
    assert min(float(seconds) for seconds, _ in runs) < 0.3
    assert {inductor for _, inductor in runs} == {"False"}


@pytest.mark.parametrize("compact", [False, True])
def test_a_first_mask_imports_nothing(python, compact):
    """Masks are made for each step, in processes that may compile nothing."""
    code = f"""
import sys, flex_inductor
before = set(sys.modules)
masks = flex_inductor.masks
for mask in (masks.sliding_window(100), masks.document(lengths=[300, 700]), masks.dilated_window(9, 3)):
    flex_inductor.create_block_mask(mask, 1, 1, 1000, 1000, "cpu", compact={compact})
print([name for name in set(sys.modules) - before if name.split(".")[0] in ("sympy", "torch")])
"""
    assert python(code, ROOT) == "[]"


@pytest.mark.parametrize("looked_for", [False, True])
def test_what_waits_for_a_module_runs_once_when_it_is_imported(tmp_path, monkeypatch, looked_for):
    (tmp_path / "waited_for.py").write_text("value = 1")
    monkeypatch.syspath_prepend(tmp_path)
    seen, finders = [], list(sys.meta_path)
    compat.when_imported("waited_for", lambda module: seen.append(module.value))
    if looked_for:  # as libraries do that ask what is installed
        assert importlib.util.find_spec("waited_for") is not None
    assert not seen
    module = importlib.import_module("waited_for")
    compat.when_imported("waited_for", lambda module: seen.append(module.value + 1))
    assert seen == [1, 2]
    assert sys.meta_path == finders
    assert type(module.__loader__).__module__ != compat.__name__
    del sys.modules["waited_for"]


def test_cli_version_adds_no_heavy_import(python):
    code = """
import sys, flex_inductor
before = set(sys.modules)
from flex_inductor.tools import cli
try:
    cli.main(["--version"])
except SystemExit:
    print(*{name.split(".")[0] for name in set(sys.modules) - before} & {"torch", "triton", "rich", "sympy"})
"""
    assert python(code, ROOT) == f"flex_inductor {flex_inductor.__version__}"


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["env", "--nonsense"]])
def test_cli_bad_usage_is_one_line_and_status_2(argv, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(argv)
    assert exit_.value.code == 2
    assert re.fullmatch(
        r"flex-inductor( env)?: .+ \(see flex-inductor( env)? --help\)\n", capsys.readouterr().err
    )


def test_the_fingerprint_is_of_all_code_that_makes_kernels(tmp_path):
    folder, file = tmp_path / "folder", tmp_path / "file.py"
    folder.mkdir()
    found = set()
    for path in (folder / "a.py", file, folder / "b.jinja", file):
        path.write_text(f"{len(found)}")
        found.add(fingerprint.fingerprint([folder, *([file] if file.exists() else [])]))
    assert len(found) == 4
    code = fingerprint._generating_code()
    assert Path(fingerprint.__file__).parent / "visits" in code
    assert not any(place.name in ("laws", "verify") for place in code)


WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None  # torch warns, and goes on
import torch
from flex_inductor import flex_attention
query = torch.randn(1, 1, 20, 16, requires_grad=True)
options = {"verify": True}
run = torch.compile(lambda q: flex_attention(q, q, q, dropout_p=0.3), backend="flex_inductor", options=options)
run(query).sum().backward()
print(bool(query.grad.isfinite().all()))
"""


def test_numpy_is_not_needed():
    """pip installs torch without it."""
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_NUMPY]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr
