"""A call as text and a list of tensors, for torch ops that take no graphs and no bundles.

The text is data, as in `mod_ir/serialise.py`: tensors are named by their place in the list.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor, fx

from ..mod_ir import serialise
from ..mod_ir.program import LaneProgram
from ..mod_ir.split import Programs, SecondPrograms
from ..options import CallOptions, call_options
from ..softmax import MORE
from .call import Inputs


class Graphs(NamedTuple):
    """The mods of one call as FX graphs, or as the functions that are read for them."""

    score: fx.GraphModule | serialise.GraphFunction | None = None
    mask: fx.GraphModule | serialise.GraphFunction | None = None
    joint: fx.GraphModule | serialise.GraphFunction | None = None


Mods = TypeVar("Mods", Programs, SecondPrograms, Graphs)


@dataclasses.dataclass(frozen=True)
class Call(Generic[Mods]):
    """The arguments of such an op beside query, key, value and its own tensors."""

    inputs: Inputs
    mods: Mods
    data: dict[str, Any]  # the same mods as data, by name
    scale: float
    wants: tuple[str, ...]
    options: CallOptions

    @property
    def wanted_captures(self) -> list[bool]:
        """Which of score_mod's captures get a gradient."""
        joint: Any = self.mods.joint
        if joint is None:
            return [False] * len(self.inputs.score_captures)
        if isinstance(joint, LaneProgram):
            return [*joint.gradients]
        return [gradient is not None for gradient in joint.output[1:]]


_NONE = CallOptions()


def dump(
    inputs: Inputs,
    mods: Programs | SecondPrograms | Graphs,
    scale: float,
    wants: Sequence[str] = (),
    options: CallOptions = _NONE,
) -> tuple[str, list[Any]]:
    tensors: list[Any] = []

    def data(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return [*map(data, value)]
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, int) or getattr(value, "is_Integer", False):
            return int(value)
        tensors.append(value)
        return {"tensor": len(tensors) - 1}

    write: Callable[[Any], Any] = serialise.graph_data if isinstance(mods, Graphs) else LaneProgram.to_text
    text = serialise.dump(
        {
            "inputs": {name: data(value) for name, value in inputs.wire().items()},
            "mods": {name: None if mod is None else write(mod) for name, mod in mods._asdict().items()},
            "scale": scale,
            "wants": list(wants),
            "options": {
                "hints": dict(options.hints),
                "lse": options.lse,
                "max_scores": options.max_scores,
                "more": list(options.more),
            },
        }
    )
    return text, tensors


def without_schedule(text: str) -> str:
    """The same call on all blocks. Its captures keep their places."""
    call: Any = serialise.load(text)
    inputs = {name: value for name, value in call["inputs"].items() if name != "schedule"}
    return serialise.dump({**call, "inputs": inputs})


def load(text: str, tensors: Sequence[Tensor] | None, mods: type[Mods]) -> Call[Mods]:
    kind: Any = mods
    read = _read(text, kind)
    # Packaged code has None for [].
    return dataclasses.replace(read, inputs=_inputs(read.inputs, tensors or ()))


@functools.lru_cache(maxsize=1024)
def _read(text: str, kind: Any) -> Any:
    names = ("inputs", "mods", "scale", "wants", "options")
    inputs, mods, scale, wants, options = serialise.fields(serialise.load(text), *names)
    serialise.expect(type(scale) is float, f"the scale is {str(scale)[:80]}")
    serialise.expect(
        isinstance(wants, list) and all(isinstance(name, str) for name in wants),
        f"gradients are {str(wants)[:80]}",
    )
    hints, lse, max_scores, more = serialise.fields(options, "hints", "lse", "max_scores", "more")
    plain = isinstance(hints, dict) and all(type(v) in (bool, int, float, str) for v in hints.values())
    plain = plain and {type(lse), type(max_scores)} == {bool} and isinstance(more, list)
    serialise.expect(plain and all(name in MORE for name in more), f"the options are {str(options)[:80]}")
    read: Any = serialise.graph_function if kind is Graphs else _program
    found = kind(*(None if mod is None else read(mod) for mod in serialise.fields(mods, *kind._fields)))
    of_call = call_options(hints, lse=lse, max_scores=max_scores, more=tuple(more))
    return Call(inputs, found, mods, scale, tuple(wants), of_call)


def _program(data: Any) -> LaneProgram:
    serialise.expect(isinstance(data, str), f"a mod is {str(data)[:80]}")
    return LaneProgram.from_text(data)


def _inputs(data: Any, tensors: Sequence[Tensor]) -> Inputs:
    def value(data: Any) -> Any:
        if isinstance(data, list):
            return tuple(map(value, data))
        if not isinstance(data, dict):
            return data
        (place,) = serialise.fields(data, "tensor")
        known = type(place) is int and 0 <= place < len(tensors)
        serialise.expect(known, f"there is no tensor {str(place)[:80]}")
        return tensors[place]

    known = isinstance(data, dict) and data.keys() <= {*Inputs._fields}
    serialise.expect(known, f"inputs are {str(data)[:80]}")
    return Inputs.read({name: value(field) for name, field in data.items()})
