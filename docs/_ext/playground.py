"""The playground's page, and what it takes from the gallery: each mask's source, sizes and captured values."""

from __future__ import annotations

import ast
import inspect
import json
import runpy
import textwrap
import types
from pathlib import Path
from typing import Any

import show
import torch

MADE = "made/static"  # becomes a part of _static


def gallery(folder: Path) -> list[dict[str, Any]]:
    """The masks of the gallery's pages, in the order of their paths."""
    found = []
    for path in sorted(folder.glob("*/*.py")):
        with show.noting() as cases:
            runpy.run_path(str(path))
        found += [entry(path, case) for case in cases if written_in(path, case.mask)]
    return found


def written_in(path: Path, mask: Any) -> bool:
    """Not one of the library's, whose source is not on the page."""
    return mask is not None and Path(mask.__code__.co_filename) == path


def entry(path: Path, case: show.Case) -> dict[str, Any]:
    title = ast.get_docstring(ast.parse(path.read_text())).splitlines()[0]
    queries, keys = case.lengths
    return {
        "name": path.stem,
        "title": title,
        "source": textwrap.dedent(inspect.getsource(case.mask)),
        "names": {name: exported(case.mask.__globals__[name]) for name in captured(case.mask)},
        "queries": queries,
        "keys": keys,
        "batch": case.batch,
        "heads": case.heads,
        "headDim": case.head_dim,
        "tile": case.block,
    }


def captured(mask: types.FunctionType) -> list[str]:
    """The numbers and tensors that it reads from its page."""
    names = inspect.getclosurevars(mask).globals
    return sorted(name for name, value in names.items() if not isinstance(value, types.ModuleType))


def exported(value: Any) -> Any:
    """A number, or a table as its shape and runs of equal entries."""
    if isinstance(value, int):
        return value
    if not isinstance(value, torch.Tensor) or value.is_floating_point():
        raise TypeError(f"playground: expected integers and tensors of integers or booleans, got {value!r}")
    entries, counts = torch.unique_consecutive(value.flatten().int(), return_counts=True)
    return {
        "shape": list(value.shape),
        "truth": value.dtype is torch.bool,
        "runs": torch.stack([entries, counts], 1).flatten().tolist(),
    }


def write(app: Any, config: Any) -> None:
    """gallery.js, which the page loads as a script: browsers read no other files beside a page of file://."""
    here = Path(app.srcdir).resolve()
    text = f"const GALLERY = {json.dumps(gallery(here / 'gallery'), separators=(',', ':'))};\n"
    to = here / MADE / "playground" / "gallery.js"
    to.parent.mkdir(parents=True, exist_ok=True)
    if not to.exists() or to.read_text() != text:
        to.write_text(text)
    config.html_static_path.append(MADE)


def setup(app: Any) -> dict[str, bool]:
    app.connect("config-inited", write)
    for name in ("gallery.css", "playground.css"):
        app.add_css_file(f"playground/{name}")
    return {"parallel_read_safe": True, "parallel_write_safe": True}
