"""What Dynamo knows of its variables, in Python: a fake tensor of a tensor."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.exc import Unsupported
from torch._dynamo.variables import functions
from torch._dynamo.variables.lists import ListVariable, TupleVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

from ... import compat
from ..call import AttentionCall
from .numbers import NUMBERS


class Unknown(Exception):
    """Dynamo does not know enough of a variable."""


def example_of(variable: Any) -> Any:
    with contextlib.suppress(NotImplementedError, AttributeError, Unsupported):
        proxy = variable.as_proxy()
        return proxy.node.meta["example_value"] if isinstance(proxy, fx.Proxy) else proxy
    return variable


def python_function(variable: Any) -> Any:
    """The callable that Dynamo's variable stands for, or one of the same signature; None if unknown."""
    if isinstance(variable, functions.FunctoolsPartialVariable):
        inner = python_function(variable.func)
        given = dict.fromkeys(variable.keywords)
        return inner and functools.partial(inner, *(None for _ in variable.args), **given)
    if isinstance(variable, functions.UserMethodVariable):
        return types.MethodType(variable.fn, getattr(compat.bound_to(variable), "value", variable))
    if isinstance(variable, functions.NestedUserFunctionVariable):
        code = variable.get_code()
        closure = tuple(types.CellType(None) for _ in code.co_freevars)
        defaults = tuple(None for _ in variable.defaults.items) if variable.defaults else None  # type: ignore[attr-defined]
        return types.FunctionType(code, {}, code.co_name, defaults, closure)
    return getattr(variable, "fn", None)


class Known:
    """Turns Dynamo's variables into Python values, and results made of those into variables."""

    def __init__(self, tx: Any, symbols: bool = True):
        self.tx, self.symbols = tx, symbols  # symbols: whether sizes may be symbols
        self.read: dict[int, tuple[Any, Any]] = {}  # by ids: values, and their variables

    def value(self, variable: Any) -> Any:
        variable = variable.realize()
        value = self._value(variable)
        if value is not None and type(value) not in _NUMBERS_AND_TEXT:
            self.read[id(value)] = value, variable
        return value

    def _value(self, variable: Any) -> Any:
        if type(variable) in (TensorVariable, SymNodeVariable):
            example = example_of(variable)
            return example if self.symbols else in_numbers(example)
        if variable.is_python_constant():
            return variable.as_python_constant()
        if hasattr(variable, "tuple_cls"):
            return variable.tuple_cls(*map(self.value, variable.items))
        if type(variable) in (ListVariable, TupleVariable):
            return variable.python_type()(map(self.value, variable.items))
        if (function := python_function(variable)) is not None:
            return function
        if isinstance(variable, UserDefinedObjectVariable):
            attribute = functools.partial(compat.dynamo_attribute, self.tx, variable)
            return _object(variable.python_type(), lambda name: self.value(attribute(name)))
        raise Unknown

    def variable(self, value: Any) -> Any:
        """Of a value that consists of values read before and of constants."""
        if id(value) in self.read:
            return self.read[id(value)][1]
        if isinstance(value, AttentionCall):
            value = value.wire()  # Dynamo makes NamedTuples by tracing
        if type(value) is tuple:
            return TupleVariable([*map(self.variable, value)])
        if type(value) is dict:
            made = compat.dynamo_constant(self.tx, {})
            for item in value.items():
                made.call_method(self.tx, "__setitem__", [*map(self.variable, item)], {})
            return made
        if value is None or type(value) in _NUMBERS_AND_TEXT:
            return compat.dynamo_constant(self.tx, value)
        raise Unknown


_NUMBERS_AND_TEXT = (bool, int, float, str)


def in_numbers(value: Any) -> Any:
    """A fake tensor or a symbol with a number in the place of each symbol, for the text of an error."""
    if isinstance(value, NUMBERS):
        return value if value.node.hint is None else value.node.hint
    if not isinstance(value, Tensor):
        return value
    sizes = [in_numbers(size) if isinstance(size, NUMBERS) else size for size in value.shape]
    return torch.empty(sizes, dtype=value.dtype, device=value.device, requires_grad=value.requires_grad)


def _object(kind: type, attribute: Callable[[str], Any]) -> Any:
    """An object of this kind. Dynamo is asked for its attributes when they are read."""
    try:
        made: Any = object.__new__(_kind_that_asks(kind))
    except TypeError as error:  # of a kind that is not Python's alone
        raise Unknown from error
    vars(made)["_attribute"] = attribute
    return made


@functools.lru_cache(maxsize=64)
def _kind_that_asks(kind: type) -> type:
    return type(kind)(
        kind.__name__, (kind,), {"__getattr__": lambda self, name: vars(self)["_attribute"](name)}
    )
