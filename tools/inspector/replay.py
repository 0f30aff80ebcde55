"""A kernel as a script of its own, with inputs of the right shapes, to edit and run again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import torch

from .compiling import Source


def save(made: Source, target: str, config: dict[str, Any], schedule: Sequence[Any], folder: Path) -> Path:
    """Write the script, and a file with the tensors of the schedule that say what to visit, where they are known."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / f"{made.name}.py"
    parts = {
        a.name: schedule[a.schedule] for a in made.launch.arguments if a.schedule is not None and schedule
    }
    known = {name: part.detach().cpu().contiguous() for name, part in parts.items() if part is not None}
    if known:
        torch.save(known, script.with_suffix(".pt"))
    language, given = ("cpp", _cpp(made)) if target == "cpu" else ("triton", _triton(made))
    template = templates().get_template(f"replay_{language}.py.jinja")
    names = {"kernel": made, "target": target, "config": config, "arguments": made.launch.arguments}
    script.write_text(template.render(**names, known=known, **given))
    return script


def _cpp(made: Source) -> dict[str, Any]:
    signature = re.search(r'extern "C" void kernel\((.*)\)$', made.noted, flags=re.MULTILINE)
    assert signature is not None, "Inductor has given the kernel's function another name"
    pairs = [parameter.rsplit(" ", 1) for parameter in signature[1].split(", ")]
    return {"types": [kind for kind, _ in pairs], "order": [name for _, name in pairs], "stand_in": False}


def _triton(made: Source) -> dict[str, Any]:
    """The source without Inductor's launcher, and the launch that it would have made."""
    assert made.triton is not None
    source = re.sub(r"^@triton_heuristics\..*?^\)\n", "", made.noted, flags=re.MULTILINE | re.DOTALL)
    source = source.replace(", triton_heuristics", "")
    return {
        "source": source.strip(),
        "constants": made.triton.constexprs,
        "grid": made.launch.grid,
        "stand_in": any(argument.dtype is torch.bfloat16 for argument in made.launch.arguments),
    }


def templates(**options: Any) -> jinja2.Environment:
    """The templates of this folder."""
    loader = jinja2.PackageLoader("flex_inductor.tools.inspector", "")
    spaces: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    return jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, **spaces, **options)
