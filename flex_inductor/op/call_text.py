"""A call's mods and inputs as text and a list of tensors, for torch ops that take no graphs and no bundles.

The text is data, as in `mod_ir/serialise.py`: tensors are named by their place in the list.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..mod_ir import serialise
from ..mod_ir.program import LaneProgram
from ..mod_ir.split import Programs
from ..visits import KINDS, TileMap
from .call import Inputs
from .ring import Ring

_BUNDLES: dict[str, type] = {**KINDS, "tile_map": TileMap, "ring": Ring}
_NAME_OF_BUNDLE = {bundle: name for name, bundle in _BUNDLES.items()}


class Call(NamedTuple):
    """The arguments of such an op beside query, key, value and its own tensors."""

    inputs: Inputs
    mods: Programs
    texts: dict[str, str | None]  # the same mods as text, by name
    scale: float
    wants: tuple[str, ...]

    @property
    def wanted_captures(self) -> list[bool]:
        """Which of score_mod's captures get a gradient."""
        joint = self.mods.joint
        return [*joint.gradients] if joint else [False] * len(self.inputs.score_captures)


def dump(inputs: Inputs, mods: Programs, scale: float, wants: Sequence[str] = ()) -> tuple[str, list[Any]]:
    data, tensors = inputs_data(inputs)
    texts = {name: program and program.to_text() for name, program in mods._asdict().items()}
    return serialise.dump({"inputs": data, "mods": texts, "scale": scale, "wants": list(wants)}), tensors


def load(text: str, tensors: Sequence[Tensor] | None) -> Call:
    read = _read(text)
    return read._replace(inputs=inputs_from(read.inputs, tensors))


@functools.lru_cache(maxsize=1024)
def _read(text: str) -> Call:
    data, mods, scale, wants = serialise.fields(serialise.load(text), "inputs", "mods", "scale", "wants")
    texts = serialise.fields(mods, *Programs._fields)
    serialise.expect(all(t is None or isinstance(t, str) for t in texts), f"mods are {str(mods)[:80]}")
    serialise.expect(type(scale) is float, f"the scale is {str(scale)[:80]}")
    serialise.expect(
        isinstance(wants, list) and all(isinstance(name, str) for name in wants),
        f"gradients are {str(wants)[:80]}",
    )
    programs = Programs(*(None if t is None else LaneProgram.from_text(t) for t in texts))
    return Call(data, programs, mods, scale, tuple(wants))


def inputs_data(inputs: Inputs) -> tuple[dict[str, Any], list[Any]]:
    """Those that the call has as data, and their tensors."""
    tensors: list[Any] = []

    def data(value: Any) -> Any:
        if type(value) in _NAME_OF_BUNDLE:
            return {"bundle": _NAME_OF_BUNDLE[type(value)], "fields": [*map(data, value)]}
        if isinstance(value, (tuple, list)):
            return [*map(data, value)]
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, int) or getattr(value, "is_Integer", False):
            return int(value)
        tensors.append(value)
        return {"tensor": len(tensors) - 1}

    found = {name: data(getattr(inputs, name)) for name in inputs.given()}
    return found, tensors


def inputs_from(data: Any, tensors: Sequence[Tensor] | None) -> Inputs:
    """The inputs that `inputs_data` gave these data for."""
    given = tensors or ()  # packaged code leaves out an empty list

    def value(data: Any) -> Any:
        if isinstance(data, list):
            return tuple(map(value, data))
        if not isinstance(data, dict):
            return data
        if "tensor" in data:
            place = data["tensor"]
            serialise.expect(
                type(place) is int and 0 <= place < len(given), f"there is no tensor {str(place)[:80]}"
            )
            return given[place]
        name, fields = serialise.fields(data, "bundle", "fields")
        bundle: Any = _BUNDLES.get(name) if isinstance(name, str) else None
        fits = bundle is not None and isinstance(fields, list) and len(fields) == len(bundle._fields)
        serialise.expect(fits, f"there is no {str(name)[:80]} with {str(fields)[:80]}")
        return bundle(*map(value, fields))

    known = isinstance(data, dict) and data.keys() <= {*Inputs._fields}
    serialise.expect(known, f"inputs are {str(data)[:80]}")
    return Inputs(**{name: value(field) for name, field in data.items()})
