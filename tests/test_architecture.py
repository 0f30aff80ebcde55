"""Who imports whom: no circles, and arrows that run one way. An import in a function or for types alone counts."""

import ast
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# What a part of flex_inductor may import of the others; the rest is free, but for circles.
MAY_IMPORT = {
    "errors": (),
    "supported": (),
    "compat": ("supported",),
    "kept": (),
    "reference": (),
    "mods": ("errors",),
    "mod_ir": ("errors", "compat", "kept"),
    "visits": (),
    "verify": ("op", "visits", "mod_ir", "errors", "compat"),
    "softmax": ("errors",),
    "op": (
        "softmax",
        "visits",
        "mod_ir",
        "errors",
        "supported",
        "compat",
        "kept",
        "options",
        "upward",
    ),
    "masks": ("op", "visits", "mod_ir", "kept", "errors", "compat"),
    "sequences": ("softmax", "attention", "checks", "masks", "op", "visits", "errors", "kept", "options"),
    "integrations": (
        "softmax",
        "attention",
        "checks",
        "distributed",
        "masks",
        "mods",
        "op",
        "sequences",
        "visits",
        "mod_ir",
        "reference",
        "errors",
        "kept",
        "options",
    ),
    "laws": ("take_over", "reference", "op", "mod_ir", "errors", "compat", "options"),
    "distributed": (
        "attention",
        "checks",
        "softmax",
        "sequences",
        "masks",
        "op",
        "visits",
        "mod_ir",
        "errors",
        "compat",
        "kept",
        "options",
        "upward",
    ),
    "checks": ("softmax", "masks", "op", "errors", "compat", "options"),
    "attention": ("checks", "softmax", "masks", "op", "compat", "options", "upward"),
}
# Where the name of what is imported is computed: the user's modules, torch's, and upward.py, which reaches up.
COMPUTES_NAMES = {
    "flex_inductor.compat",
    "flex_inductor.integrations.vllm",
    "flex_inductor.upward",
    "flex_inductor.tools.cli",
    "flex_inductor.tools.users_code",
}


def imports(source: str, module: str, *, package: bool) -> set[str]:
    """The full name of everything that a module imports, "?" for one that is computed."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            around = module.split(".")[: len(module.split(".")) + package - node.level] if node.level else []
            base = ".".join([*around, *([node.module] if node.module else [])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            name = ast.unparse(node.args[0]).replace("{__name__}", module).removeprefix("f")
            found.add("?" if "{" in name or not name.startswith("'") else ast.literal_eval(name))
    return found


def read() -> dict[str, set[str]]:
    found = {}
    for folder, prefix in (
        ("flex_inductor", ""),
        ("lowerings", "flex_inductor."),
        ("tools", "flex_inductor."),
    ):
        for path in (ROOT / folder).rglob("*.py"):
            name = prefix + ".".join(path.relative_to(ROOT).with_suffix("").parts)
            package = path.name == "__init__.py"
            name = name.removesuffix(".__init__")
            found[name] = imports(path.read_text(), name, package=package)
    return found


IMPORTS = read()


def module_of(name: str) -> str:
    """The module of ours that has the name, or nothing."""
    while name and name not in IMPORTS:
        name = name.rpartition(".")[0]
    return name


# The same among our modules alone.
OURS = {module: {module_of(name) for name in names} - {module, ""} for module, names in IMPORTS.items()}


def part(module: str) -> str:
    """flex_inductor's part that a module belongs to; "" for the package itself."""
    return [*module.split("."), ""][1]


@pytest.mark.parametrize(
    "line, name",
    [
        ("import flex_inductor.op.call", "flex_inductor.op.call"),
        ("from flex_inductor import op", "flex_inductor.op"),
        ("from . import tables", "flex_inductor.masks.tables"),
        ("from ..op import call", "flex_inductor.op.call"),
        ("def late():\n    from ..op.call import read", "flex_inductor.op.call.read"),
        ("if TYPE_CHECKING:\n    from .. import op", "flex_inductor.op"),
        ("importlib.import_module('flex_inductor.op')", "flex_inductor.op"),
        ("run(lambda: import_module(f'{__name__}.x'))", "flex_inductor.masks.runs.x"),
        ("import_module(f'flex_inductor.{name}')", "?"),
        ("__import__(name)", "?"),
    ],
)
def test_every_form_of_import_is_seen(line, name):
    assert imports(line, "flex_inductor.masks.runs", package=False) == {name}


def test_a_package_is_its_own_folder():
    assert imports("from .runs import x", "flex_inductor.masks", package=True) == {
        "flex_inductor.masks.runs.x"
    }


def test_no_circle():
    try:
        TopologicalSorter(OURS).prepare()
    except CycleError as error:
        pytest.fail("a circle of imports: " + " -> ".join(reversed(error.args[1])))


def test_names_are_computed_in_few_places():
    assert {module for module, names in IMPORTS.items() if "?" in names} == COMPUTES_NAMES


@pytest.mark.parametrize(
    "layer, above",
    [("", ("lowerings", "tools")), ("lowerings", ("tools",))],
    ids=["flex_inductor", "lowerings"],
)
def test_nothing_below_imports_what_is_above(layer, above):
    """tools -> lowerings -> flex_inductor. upward.py computes the names of what it reaches up to."""
    members = {module for module in OURS if (part(module) == layer if layer else part(module) not in above)}
    assert len(members) > 20
    assert {(m, other) for m in members for other in OURS[m] if part(other) in above} == set()


@pytest.mark.parametrize("family, other", [("cpu", "triton"), ("triton", "cpu")])
def test_families_of_kernels_do_not_know_each_other(family, other):
    """What they share is in the modules beside them, such as lowerings/lanes.py."""
    members = {module for module in OURS if module.startswith(f"flex_inductor.lowerings.{family}")}
    assert len(members) > 5
    assert not [m for m in members for name in OURS[m] if name.startswith(f"flex_inductor.lowerings.{other}")]


@pytest.mark.parametrize("name", MAY_IMPORT)
def test_parts_import_what_is_below_them(name):
    members = {module for module in OURS if part(module) == name}
    assert members
    imported = {
        (m, other) for m in members for other in OURS[m] if part(other) not in (name, *MAY_IMPORT[name])
    }
    assert imported == set()


def test_mods_know_nothing_of_inductor():
    found = [(m, name) for m, names in IMPORTS.items() if part(m) == "mod_ir" for name in names]
    assert found and not [pair for pair in found if f"{pair[1]}.".startswith("torch._inductor.")]


def test_the_reference_imports_torch_alone():
    roots = {name.partition(".")[0] for name in IMPORTS["flex_inductor.reference"]}
    assert roots - sys.stdlib_module_names == {"torch"}
