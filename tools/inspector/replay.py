"""A kernel as a script of its own, with inputs of the right shapes, to edit and run again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import torch

from .arguments import Argument
from .model import Kernel


def save(kernel: Kernel, folder: Path) -> Path:
    """Write the script, and a file with the tensors that say what to visit where there are any."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / f"{kernel.name}.py"
    visited = {
        a.name: _part(kernel.schedule, a) for a in kernel.made.launch.arguments if a.schedule is not None
    }
    known = {name: tensor for name, tensor in visited.items() if tensor is not None}
    if known:
        torch.save(known, script.with_suffix(".pt"))
    template = _environment().get_template("cpp" if kernel.target == "cpu" else "triton")
    script.write_text(
        template.render(
            kernel=kernel,
            arguments=kernel.made.launch.arguments,
            known=known,
            **(_cpp(kernel.source) if kernel.target == "cpu" else _triton(kernel)),
        )
    )
    return script


def _part(schedule: Sequence[Any], argument: Argument) -> torch.Tensor | None:
    tensor = schedule[argument.schedule] if schedule else None
    return None if tensor is None else tensor.detach().cpu().contiguous()


def _cpp(source: str) -> dict[str, Any]:
    signature = re.search(r'extern "C" void kernel\((.*)\)$', source, flags=re.MULTILINE)
    assert signature is not None, "Inductor has given the kernel's function another name"
    pairs = [parameter.rsplit(" ", 1) for parameter in signature[1].split(", ")]
    return {"types": [kind for kind, _ in pairs], "order": [name for _, name in pairs], "stand_in": False}


def _triton(kernel: Kernel) -> dict[str, Any]:
    """The source without Inductor's launcher, and the launch that it would have made."""
    generated = kernel.made.triton
    assert generated is not None
    source = re.sub(r"^@triton_heuristics\..*?^\)\n", "", kernel.source, flags=re.MULTILINE | re.DOTALL)
    source = source.replace(", triton_heuristics", "")
    return {
        "source": source.strip(),
        "constants": generated.constexprs,
        "grid": kernel.made.launch.grid,
        "stand_in": any(argument.dtype is torch.bfloat16 for argument in kernel.made.launch.arguments),
    }


def _environment() -> jinja2.Environment:
    folder = resources.files("flex_inductor.tools.inspector")
    return jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: folder.joinpath(f"replay_{name}.py.jinja").read_text()),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
