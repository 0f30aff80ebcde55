"""FX graphs as text and back. The text is data: reading it imports nothing and runs no code from it.

    {"inputs": 5,
     "constants": [["torch.float32", [2], "cpu", "<bytes in base64>"]],
     "steps": [["aten::sub.Tensor", [{"value": 3}, {"value": 4}], {}], ...],
     "output": [{"value": 6}]}

Values are counted: inputs first, then constants, then what each step gives. An operator is one that torch's
dispatcher has already; `_why_refused` says which of those a mod may use.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from . import errors
from .apart import apart_from_surrounding_trace
from .writes import arguments_of

FORMAT = 2
DEPTH = 4  # how deeply lists may be nested in an argument

# Python's functions that may compute with sizes.
_FUNCTIONS: dict[str, Callable] = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module, names in (
        (operator, "add sub mul truediv floordiv mod pow neg pos abs and_ or_ eq ne lt le gt ge getitem"),
        (math, "ceil floor trunc"),
        (torch, "sym_int sym_float sym_max sym_min sym_not sym_ite"),
    )
    for name in names.split()
}
_NAME_OF_FUNCTION = {function: name for name, function in _FUNCTIONS.items()}
# dtypes, layouts and memory formats, under the names that they print as.
_WORDS = {
    str(v): v for v in vars(torch).values() if isinstance(v, (torch.dtype, torch.layout, torch.memory_format))
}
_DATA = {"Tensor", "int", "float", "complex", "bool", "number", "str", "Device"}
_OPERATOR_NAME = re.compile(r"\w+::\w+(\.\w+)?", flags=re.ASCII)
_SHARES_MEMORY_UNSAID = {torch.ops.aten._unsafe_view.default}


def dump(data: dict[str, Any]) -> str:
    """`data`, with graphs as `graph_data` gives them, as text; equal graphs give equal text."""
    return json.dumps({"format": FORMAT, **data}, separators=(",", ":"))


def load(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise errors.bad_mod_text(str(error) or type(error).__name__) from None
    expect(isinstance(data, dict), "it is not a table of names and values")
    found = data.get("format")
    expect(found == FORMAT, f"it has format {found!r}, and this version reads format {FORMAT}")
    return data


def expect(condition: bool, what: str) -> None:
    if not condition:
        raise errors.bad_mod_text(what)


# Writing.


def graph_data(module: fx.GraphModule) -> dict[str, Any]:
    nodes = module.graph.nodes
    inputs = [node for node in nodes if node.op == "placeholder"]
    held = [node for node in nodes if node.op == "get_attr"]
    called = [node for node in nodes if node.op not in ("placeholder", "get_attr", "output")]
    numbers = {node: i for i, node in enumerate((*inputs, *held, *called))}
    (output,) = (node.args[0] for node in nodes if node.op == "output")
    return {
        "inputs": len(inputs),
        "constants": [_constant_data(operator.attrgetter(node.target)(module), node.target) for node in held],
        "steps": [
            [
                _name_of(node),
                _argument_data(list(node.args), numbers),
                {name: _argument_data(value, numbers) for name, value in node.kwargs.items()},
            ]
            for node in called
        ],
        "output": _argument_data(output, numbers),
    }


_keys: WeakKeyDictionary[fx.GraphModule, str] = WeakKeyDictionary()


def graph_key(module: fx.GraphModule) -> str:
    """A short key, the same for equal graphs; computed once for each graph."""
    if module not in _keys:
        _keys[module] = hashlib.sha256(dump(graph_data(module)).encode()).hexdigest()
    return _keys[module]


def _name_of(node: fx.Node) -> str:
    target: Any = node.target
    if node.op == "call_function" and isinstance(target, OpOverload):
        name = target.name()
        _operator(name)
        return name
    if node.op == "call_function" and target in _NAME_OF_FUNCTION:
        return _NAME_OF_FUNCTION[target]
    raise errors.operator_refused(str(target), "is not an operator registered with torch", _FUNCTIONS)


def _argument_data(value: Any, numbers: dict[fx.Node, int]) -> Any:
    if isinstance(value, fx.Node):
        return {"value": numbers[value]}
    if isinstance(value, (list, tuple)):
        return [_argument_data(item, numbers) for item in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is complex:
        return {"complex": [value.real, value.imag]}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if str(value) in _WORDS:
        return {"torch": str(value)}
    raise errors.argument_refused(value)


def _constant_data(constant: Any, name: str) -> list[Any]:
    plain = type(constant) in (Tensor, torch.nn.Parameter) and constant.layout == torch.strided
    if not plain or constant.is_quantized:
        raise errors.constant_refused(name, constant)
    with apart_from_surrounding_trace():  # export keeps values from being read
        flat = constant.detach().resolve_conj().resolve_neg().cpu().reshape(-1)
        content = bytes(flat.view(torch.uint8).tolist())
    text = base64.b64encode(content).decode()
    return [str(constant.dtype), list(constant.shape), str(constant.device), text]


# Operators.


@functools.cache
def _operator(name: str) -> Callable:
    """The registered operator or the function of this name, if a mod may use it."""
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    if not _is_registered(name):
        raise errors.operator_refused(name, "is not an operator registered with torch", _FUNCTIONS)
    space, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    found = getattr(getattr(getattr(torch.ops, space), packet), overload or "default")
    assert isinstance(found, OpOverload) and found.name() == name, f"torch.ops has no operator {name}"
    if why := _why_refused(found):
        raise errors.operator_refused(name, why, _FUNCTIONS)
    return found


def _is_registered(name: str) -> bool:
    try:
        return _OPERATOR_NAME.fullmatch(name) is not None and torch._C._dispatch_has_kernel(name)
    except RuntimeError:  # not a valid name of an operator
        return False


def _why_refused(op: OpOverload) -> str | None:
    """Why a mod may not use the operator, by its schema and tags; None if it may."""
    takes = [_kind(argument) for argument in op._schema.arguments]
    gives = [_kind(result) for result in op._schema.returns]
    if torch.Tag.nondeterministic_seeded in op.tags:
        return "draws random numbers"
    if not gives or not set(gives) <= _DATA - {"str", "Device"}:
        return "does not give tensors or numbers"
    needed = [kind for kind, a in zip(takes, op._schema.arguments, strict=True) if not a.has_default_value()]
    if other := [kind for kind in needed if kind not in _DATA]:
        return f"takes a {other[0]}, which is not data"
    if "str" in takes and "Tensor" not in takes:
        return "takes text and no tensor, such as the name of a file"
    return None


def _kind(argument: Any) -> str:
    """The type of an argument or a result, or of the items of a list."""
    return re.sub(r"(Optional|List)\[|\]", "", str(argument.type))


# Reading.


class _Value(int):
    """Stands for the value of this number."""


class _Operation(NamedTuple):
    call: Callable
    args: list[Any]
    kwargs: dict[str, Any]
    last: list[int]  # the values that no later step needs


class GraphFunction:
    """A graph that was read: called with its inputs, gives its outputs."""

    def __init__(self, inputs: int, constants: Sequence[Tensor], steps: Sequence[_Operation], output: Any):
        self.inputs, self.constants, self.steps, self.output = inputs, constants, steps, output

    def __call__(self, *inputs: Any) -> Any:
        if len(inputs) != self.inputs:
            raise errors.bad_mod_text(f"its graph takes {self.inputs} inputs and was given {len(inputs)}")
        values = [*inputs, *self.constants]
        for step in self.steps:
            kwargs = {name: _filled(value, values) for name, value in step.kwargs.items()}
            values.append(step.call(*[_filled(value, values) for value in step.args], **kwargs))
            for number in step.last:
                values[number] = None
        result = _filled(self.output, values)
        return tuple(result) if type(result) is list else result


def _filled(argument: Any, values: Sequence[Any]) -> Any:
    if type(argument) is _Value:
        return values[argument]
    return [_filled(item, values) for item in argument] if type(argument) is list else argument


def graph_function(data: Any) -> GraphFunction:
    """The function that `graph_data` gave `data` for."""
    inputs, constants, steps, output = fields(data, "inputs", "constants", "steps", "output")
    expect(is_count(inputs), f"a graph has {inputs!r} inputs")
    expect(isinstance(constants, list) and isinstance(steps, list), "a graph's parts are not lists")
    with apart_from_surrounding_trace():  # what was read is kept for calls outside of it
        held = [_constant(constant) for constant in constants]
    own = [False] * (inputs + len(held))  # whether a step made the value's memory
    read = []
    for step in steps:
        expect(isinstance(step, list) and len(step) == 3, f"a step is {str(step)[:80]}")
        name, args, kwargs = step
        expect(isinstance(name, str), f"an operator is {str(name)[:80]}")
        expect(isinstance(args, list) and isinstance(kwargs, dict), f"{name} has no list of arguments")
        call = _operator(name)
        args = _argument(args, len(own))
        kwargs = {key: _argument(value, len(own)) for key, value in kwargs.items()}
        own.append(_made_here(name, call, args, kwargs, own))
        read.append(_Operation(call, args, kwargs, []))
    result = _argument(output, len(own))
    first = inputs + len(held)
    last = {
        number: i for i, step in enumerate(read) for number in _values_in([step.args, *step.kwargs.values()])
    }
    for number in set(last) - set(_values_in(result)):
        read[last[number]].last.append(number)
    unused = set(range(first, len(own))) - set(last) - set(_values_in(result))
    for number in unused:
        read[number - first].last.append(number)
    return GraphFunction(inputs, held, read, result)


def fields(data: Any, *names: str) -> list[Any]:
    """The values under these names, which must be all there are."""
    found = set(data) - {"format"} if isinstance(data, dict) else None
    expect(found == set(names), f"expected {', '.join(names)}, found {str(data)[:80]}")
    return [data[name] for name in names]


def is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _argument(data: Any, known: int, depth: int = 0) -> Any:
    if data is None or type(data) in (bool, int, float, str):
        return data
    if isinstance(data, list):
        expect(depth < DEPTH, f"lists go more than {DEPTH} deep into each other")
        return [_argument(item, known, depth + 1) for item in data]
    expect(isinstance(data, dict) and len(data) == 1, f"an argument is {str(data)[:80]}")
    ((kind, content),) = data.items()
    if kind == "value" and is_count(content) and content < known:
        return _Value(content)
    if kind == "torch" and isinstance(content, str) and content in _WORDS:
        return _WORDS[content]
    if kind == "device":
        return _device(content)
    if kind == "complex" and isinstance(content, list) and [type(part) for part in content] == [float, float]:
        return complex(*content)
    raise errors.bad_mod_text(f"an argument is {str(data)[:80]}")


def _device(name: Any) -> torch.device:
    try:
        return torch.device(name if isinstance(name, str) else "")
    except RuntimeError:
        raise errors.bad_mod_text(f"a device is {str(name)[:80]}") from None


def _constant(data: Any) -> Tensor:
    expect(isinstance(data, list) and len(data) == 4, f"a constant is {str(data)[:80]}")
    word, shape, device, text = data
    dtype: Any = _WORDS.get(word) if isinstance(word, str) else None
    expect(isinstance(dtype, torch.dtype), f"the dtype of a constant is {str(word)[:80]}")
    expect(
        isinstance(shape, list) and all(map(is_count, shape)), f"the shape of a constant is {str(shape)[:80]}"
    )
    try:
        content = bytearray(base64.b64decode(text, validate=True))
    except (ValueError, TypeError):
        raise errors.bad_mod_text("a constant's bytes are not in base64") from None
    expect(
        len(content) == math.prod(shape) * dtype.itemsize,
        f"a constant of shape {shape} has {len(content)} bytes",
    )
    if not content:
        return torch.empty(shape, dtype=dtype, device=_device(device))
    flat = torch.frombuffer(content, dtype=torch.uint8)
    flat = flat != 0 if dtype is torch.bool else flat.view(dtype)  # a bool of any other byte is none
    return flat.reshape(shape).to(_device(device), copy=True)


def _made_here(name: str, call: Callable, args: list[Any], kwargs: dict[str, Any], own: list[bool]) -> bool:
    """Whether the graph made the memory of a step's result. Only such memory may be written to."""
    if not isinstance(call, OpOverload):
        operands = [*args, *kwargs.values()]
        expect(
            not any(type(operand) in (str, list) for operand in operands), f"{name} is given text or a list"
        )
        return all(own[number] for number in _values_in(operands))
    shared = []
    for argument, value in arguments_of(call, args, kwargs):
        mine = all(own[number] for number in _values_in(value))
        if argument.alias_info is not None and argument.alias_info.is_write and not mine:
            raise errors.operator_refused(name, "writes into what the mod was given", _FUNCTIONS)
        if argument.alias_info is not None or call in _SHARES_MEMORY_UNSAID:
            shared.append(mine)
    return all(shared)


def _values_in(argument: Any) -> Iterator[int]:
    if type(argument) is _Value:
        yield argument
    elif isinstance(argument, list):
        for item in argument:
            yield from _values_in(item)
