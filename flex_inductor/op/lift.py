"""Finding what a Python mod captures, so that captured tensors become inputs of the op.

Dynamo does this for compiled calls. Without it the mod is run once on fake 0-d tensors, and every
tensor it uses that it did not make itself is a capture.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter, tree_map_only

from .tracing import LaneIndexing, apart_from_surrounding_trace, example_lanes


class LiftedMod:
    """A mod as a function of its lanes and of the tensors it captures."""

    def __init__(self, mod: Callable, captures: Sequence[Tensor], names: Sequence[str]):
        self.mod = mod
        self.names = tuple(names)
        self._ids = [id(capture) for capture in captures]
        self._kept_alive = tuple(captures)

    def __call__(self, *args: Any) -> Tensor:
        lanes, captures = args[: len(args) - len(self._ids)], args[len(args) - len(self._ids) :]
        given = dict(zip(self._ids, captures, strict=True))
        with _Substitute(given):
            return _with_cells(self.mod, given)(*lanes)


class _Substitute(TorchFunctionMode):
    """Hands `given[id(tensor)]` to every torch function that is called with `tensor`."""

    def __init__(self, given: dict[int, Any]):
        super().__init__()
        self.given = given

    def __torch_function__(self, func, types, args=(), kwargs=None):  # noqa: ARG002
        args, kwargs = tree_map_only(Tensor, lambda t: self.given.get(id(t), t), (args, kwargs or {}))
        return func(*args, **kwargs)


class _Record(TorchFunctionMode):
    """Collects the tensors that reach torch functions without being made by one."""

    def __init__(self, fake_mode: FakeTensorMode, made: Sequence[Tensor]):
        super().__init__()
        self.fake_mode = fake_mode
        self.made = {id(tensor): tensor for tensor in made}
        self.captures: dict[int, Tensor] = {}
        self.stand_ins: dict[int, Tensor] = {}

    def stand_in(self, tensor: Tensor) -> Tensor:
        if id(tensor) in self.made:
            return tensor
        if id(tensor) not in self.captures:
            self.captures[id(tensor)] = tensor
            with temporarily_clear_interpreter_stack(), self.fake_mode:
                stand_in = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
                )
            self.stand_ins[id(tensor)] = self.made[id(stand_in)] = stand_in
        return self.stand_ins[id(tensor)]

    def __torch_function__(self, func, types, args=(), kwargs=None):  # noqa: ARG002
        args, kwargs = tree_map_only(Tensor, self.stand_in, (args, kwargs or {}))
        result = func(*args, **kwargs)
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self.made[id(tensor)] = tensor
        return result


def _with_cells(mod: Any, given: dict[int, Any], seen: tuple = ()) -> Any:
    """`mod` with captured tensors in its closure, and in closures it calls, replaced.

    torch.autograd.Function.apply takes its tensors without any torch function seeing them.
    """
    if isinstance(mod, functools.partial):
        args = [given.get(id(a), a) if isinstance(a, Tensor) else a for a in mod.args]
        keywords = {k: given.get(id(a), a) if isinstance(a, Tensor) else a for k, a in mod.keywords.items()}
        return functools.partial(_with_cells(mod.func, given, seen), *args, **keywords)
    if not isinstance(mod, types.FunctionType) or mod.__closure__ is None or mod in seen:
        return mod

    def replaced(cell: types.CellType) -> types.CellType:
        try:
            content = cell.cell_contents
        except ValueError:
            return cell
        if isinstance(content, Tensor):
            return types.CellType(given.get(id(content), content))
        if isinstance(content, (types.FunctionType, functools.partial)):
            return types.CellType(_with_cells(content, given, (*seen, mod)))
        return cell

    closure = tuple(replaced(cell) for cell in mod.__closure__)
    copy = types.FunctionType(mod.__code__, mod.__globals__, mod.__name__, mod.__defaults__, closure)
    copy.__kwdefaults__ = mod.__kwdefaults__
    return copy


def lift(mod: Callable, lane_names: Sequence[str], query: Tensor) -> tuple[LiftedMod, tuple[Tensor, ...]]:
    """`mod` as a function of lanes and captures, and the captures."""
    with apart_from_surrounding_trace(), torch.no_grad():
        fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        with fake_mode:
            lanes = example_lanes(query, lane_names)
        record = _Record(fake_mode, lanes)
        on_stand_ins = _with_cells(mod, _ClosureStandIns(record))
        with fake_mode, LaneIndexing(), record:
            on_stand_ins(*lanes)
    captures = tuple(record.captures.values())
    known = dict(_named_tensors(mod))
    names = [known.get(id(capture), f"capture_{i}") for i, capture in enumerate(captures)]
    return LiftedMod(mod, captures, names), captures


class _ClosureStandIns(dict):
    """Closure tensors seen by `_with_cells`, recorded when the mod is rebuilt."""

    def __init__(self, record: _Record):
        super().__init__()
        self.record = record

    def get(self, key, default=None):
        return self.record.stand_in(default)


def _named_tensors(mod: Any, seen: tuple = ()) -> Iterator[tuple[int, str]]:
    """Pairs of (id, name) for the tensors that `mod` reaches by a name a person would know."""
    if mod in seen:
        return
    seen = (*seen, mod)
    if isinstance(mod, functools.partial):
        yield from _named_tensors(mod.func, seen)
        for i, argument in enumerate(mod.args):
            yield id(argument), f"partial argument {i}"
        for name, argument in mod.keywords.items():
            yield id(argument), name
    elif isinstance(mod, types.MethodType):
        yield from ((id(value), f"self.{name}") for name, value in _attributes(mod.__self__))
        yield from _named_tensors(mod.__func__, seen)
    elif isinstance(mod, types.FunctionType):
        inner = inspect.getclosurevars(mod)
        for name, value in {**inner.globals, **inner.nonlocals}.items():
            yield id(value), name
            if isinstance(value, torch.nn.Module):
                yield from ((id(attribute), f"{name}.{at}") for at, attribute in _attributes(value))
            elif isinstance(value, (types.FunctionType, functools.partial)):
                yield from _named_tensors(value, seen)
    elif callable(mod):
        yield from ((id(value), f"self.{name}") for name, value in _attributes(mod))


def _attributes(owner: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(owner, torch.nn.Module):
        yield from owner.named_parameters()
        yield from owner.named_buffers()
    yield from getattr(owner, "__dict__", {}).items()
