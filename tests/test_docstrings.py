"""Every public name is described, with its arguments and an example, and the examples run."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

import flex_inductor
from flex_inductor.errors import FlexError

PACKAGE = Path(flex_inductor.__file__).parent
PREFIX = "flex_inductor"
MODULES = ("", ".flash", ".laws", ".sequences", ".tools.inspector", ".tools.ptx")
# What functions return, in modules without __all__.
RETURNED = {
    ".distributed.context": ("ContextParallel",),
    ".lowerings.decision": ("Choice", "Decision"),
    ".tools.trace_mod": ("ModTrace", "Step"),
}
# These compile: kernels, and once on a machine the one that executes PTX.
REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
PRELUDE = re.findall(r"```python\n(.*?)```", (REFERENCE / "index.md").read_text(), re.DOTALL)[0]

Node = ast.FunctionDef | ast.ClassDef


class Public(NamedTuple):
    """A function, a class or a method, as its source has it."""

    module: str
    name: str
    node: Node
    owner: Node | None = None

    @property
    def docstring(self) -> str:
        return ast.get_docstring(self.node) or ""

    @property
    def parameters(self) -> set[str]:
        node = self.node
        if isinstance(node, ast.ClassDef):
            made = [
                child
                for child in node.body
                if isinstance(child, ast.FunctionDef) and child.name == "__init__"
            ]
            if not made:
                return set(_fields(node)) if _has_fields(node) else set()
            node = made[0]
        given = node.args
        every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
        return {argument.arg for argument in every if argument is not None} - {"self", "cls"}

    @property
    def described(self) -> set[str]:
        """The names in Args."""
        part = re.search(r"^Args:\n((?:(?:    .*)?\n)*)", self.docstring + "\n", re.MULTILINE)
        lines = re.findall(r"^    (\w[\w, ]*): ", part[1], re.MULTILINE) if part else []
        return {name for line in lines for name in line.split(", ")}

    @property
    def is_property(self) -> bool:
        return any("property" in ast.unparse(decorator) for decorator in self.node.decorator_list)

    @property
    def has_example(self) -> bool:
        of_owner = self.owner is not None and f".{self.node.name}(" in (ast.get_docstring(self.owner) or "")
        return ">>> " in self.docstring or of_owner or self.is_property

    def methods(self) -> Iterator[Public]:
        if isinstance(self.node, ast.ClassDef):
            for child in self.node.body:
                if isinstance(child, ast.FunctionDef) and not child.name.startswith("_"):
                    yield Public(self.module, f"{self.name}.{child.name}", child, self.node)


def _has_fields(node: ast.ClassDef) -> bool:
    said = [ast.unparse(part) for part in (*node.bases, *node.decorator_list)]
    return any(part.startswith(("NamedTuple", "dataclass")) for part in said)


def _fields(node: ast.ClassDef) -> Iterator[str]:
    for child in node.body:
        if isinstance(child, ast.AnnAssign) and "init=False" not in ast.unparse(child):
            yield ast.unparse(child.target)


def _source(file: str | Path, name: str) -> Node:
    body = ast.parse(Path(file).read_text()).body
    (found,) = (n for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name)
    return found


def _of_value(value: Any) -> Public:
    value = inspect.unwrap(value)
    file = sys.modules[value.__module__].__file__
    assert file is not None
    return Public(value.__module__, value.__qualname__, _source(file, value.__qualname__))


def _exported(module: ModuleType) -> Iterator[Any]:
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.ismodule(value):
            yield from _exported(value)
        elif inspect.isroutine(value) or inspect.isclass(value):
            yield value


def _integrations() -> Iterator[Public]:
    """Read, not imported: each needs a framework."""
    for file in sorted((PACKAGE / "integrations").glob("*.py")):
        for statement in ast.parse(file.read_text()).body:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
                for name in ast.literal_eval(statement.value):
                    yield Public(f"{PREFIX}.integrations.{file.stem}", name, _source(file, name))


def _errors() -> Iterator[type]:
    for file in PACKAGE.rglob("errors.py"):
        importlib.import_module(".".join((PREFIX, *file.relative_to(PACKAGE).with_suffix("").parts)))
    found = [FlexError]
    for error in found:
        found += [kind for kind in error.__subclasses__() if kind.__module__.endswith(".errors")]
    return iter(found)


def _all() -> tuple[dict[str, Public], list[str]]:
    """What is ours, and the names of what is torch's."""
    values = [value for name in MODULES for value in _exported(importlib.import_module(PREFIX + name))]
    for name, classes in RETURNED.items():
        values += [getattr(importlib.import_module(PREFIX + name), kind) for kind in classes]
    values += _errors()
    torchs = [value.__name__ for value in values if value.__module__.startswith("torch.")]
    ours = [_of_value(value) for value in values if not value.__module__.startswith("torch.")]
    ours += _integrations()
    ours += [method for public in ours for method in public.methods()]
    return {
        f"{public.module.removeprefix(PREFIX)}.{public.name}".lstrip("."): public for public in ours
    }, torchs


PUBLIC, TORCHS = _all()
RUN = [name for name, public in PUBLIC.items() if ">>> " in public.docstring]


@pytest.mark.parametrize("name", PUBLIC)
def test_it_is_described(name):
    public = PUBLIC[name]
    assert public.docstring, f"{name} has no docstring"
    assert public.described == public.parameters, f"Args of {name} are not its arguments"
    assert public.has_example, f"{name} has no example"


@pytest.mark.parametrize("name", RUN)
def test_its_example_runs(name, monkeypatch):
    public = PUBLIC[name]
    parts = public.module.split(".")
    if parts[1] == "integrations":
        pytest.importorskip(parts[2])
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda *args, **kwargs: None
    )  # examples are on CPUs
    names: dict[str, Any] = {}
    exec(PRELUDE, names)
    test = doctest.DocTestParser().get_doctest(public.docstring, names, name, None, 0)
    said = io.StringIO()
    doctest.DocTestRunner().run(test, out=said.write)
    assert not said.getvalue(), said.getvalue()


def test_what_is_torchs_is_on_the_pages():
    pages = "\n".join(page.read_text() for page in REFERENCE.glob("*.md"))
    assert TORCHS and not [name for name in TORCHS if f"`{name}`" not in pages]
