"""Finding what a Python mod captures, so that captured tensors become inputs of the op.

Dynamo does this for compiled calls. Without it the mod is run once on fake 0-d tensors, and every
tensor it uses that it did not make itself is a capture.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter, tree_map_only

from .. import errors
from ..places import line_raising
from .tracing import LaneIndexing, apart_from_surrounding_trace, example_lanes


class LiftedMod:
    """A mod as a function of its lanes and of the tensors it captures."""

    def __init__(self, mod: Callable, captures: Sequence[Tensor]):
        self.mod = mod
        self._ids = [id(capture) for capture in captures]
        self._kept_alive = tuple(captures)

    @property
    def names(self) -> tuple[str, ...]:
        """What the mod's author calls the captures."""
        known = dict(names_in(self.mod))
        return tuple(known.get(capture, f"capture_{i}") for i, capture in enumerate(self._ids))

    def __call__(self, *args: Any) -> Tensor:
        lanes, captures = args[: len(args) - len(self._ids)], args[len(args) - len(self._ids) :]
        given = dict(zip(self._ids, captures, strict=True))
        with _Exchange(lambda tensor: given.get(id(tensor), tensor)):
            result = self.mod(*lanes)
        return given.get(id(result), result)  # a mod may return what it captures


class _Exchange(TorchFunctionMode):
    """Torch functions called inside get `instead_of(tensor)` for every tensor they are called with."""

    def __init__(self, instead_of: Callable[[Tensor], Any]):
        super().__init__()
        self.instead_of = instead_of
        self.thread = threading.get_ident()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(Tensor, self.instead_of, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __enter__(self) -> Any:
        _apply_lock.acquire()
        self.torchs_apply = Function.__dict__["apply"]

        def apply(function, *args, **kwargs):
            if threading.get_ident() == self.thread:
                args = tree_map_only(Tensor, self.instead_of, args)
            return self.torchs_apply.__func__(function, *args, **kwargs)

        # No torch function sees the tensors that autograd.Function.apply takes.
        Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        Function.apply = self.torchs_apply  # type: ignore[method-assign]
        _apply_lock.release()


_apply_lock = threading.RLock()


class _Record(_Exchange):
    """Collects the tensors that are computed with and that nothing inside has made."""

    def __init__(self, fake_mode: FakeTensorMode, query: Tensor, made: Sequence[Tensor]):
        super().__init__(self.capture)
        self.fake_mode = fake_mode
        self.device = query.device
        self.made = {id(tensor): tensor for tensor in made}
        self.captures: dict[int, Tensor] = {}
        self.stand_ins: dict[int, Tensor] = {}

    def capture(self, tensor: Tensor) -> Tensor:
        if id(tensor) in self.made:
            return tensor
        self.captures[id(tensor)] = tensor
        return self.stand_in(tensor)

    def stand_in(self, tensor: Tensor) -> Tensor:
        if id(tensor) in self.made:
            return tensor
        if id(tensor) not in self.stand_ins:
            with temporarily_clear_interpreter_stack(), self.fake_mode:
                # On the query's device, so that a capture that is elsewhere can be named in an error.
                self.stand_ins[id(tensor)] = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device
                )
        return self.stand_ins[id(tensor)]

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(
            *tree_map_only(Tensor, self.stand_in, args), **tree_map_only(Tensor, self.stand_in, kwargs)
        )
        made = [tensor for tensor in tree_iter(result) if isinstance(tensor, Tensor)]
        # Whoever asks for a shape or a dtype computes with no tensor; `t[i] = x` gives None and does.
        if made or result is None:
            tree_map_only(Tensor, self.capture, (args, kwargs))
        self.made.update((id(tensor), tensor) for tensor in made)
        return result


def lift(mod: Callable, lane_names: Sequence[str], query: Tensor) -> tuple[LiftedMod, tuple[Tensor, ...]]:
    """`mod` as a function of lanes and captures, and the captures."""
    with apart_from_surrounding_trace(), torch.no_grad():
        fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        with fake_mode:
            lanes = example_lanes(query, lane_names)
        record = _Record(fake_mode, query, lanes)
        try:
            with fake_mode, LaneIndexing(), record:
                result = mod(*lanes)
        except DataDependentOutputException as error:
            name = "score_mod" if "score" in lane_names else "mask_mod"
            raise errors.needs_a_value(name, line_raising(error)) from None
        if isinstance(result, Tensor):
            record.capture(result)
    captures = tuple(record.captures.values())
    return LiftedMod(mod, captures), captures


def names_in(mod: Any, seen: tuple = ()) -> Iterator[tuple[int, str]]:
    """Pairs of (id, name) for the tensors that `mod` reaches by a name."""
    if any(mod is other for other in seen):
        return
    seen = (*seen, mod)
    if isinstance(mod, functools.partial):
        yield from names_in(mod.func, seen)
        for i, argument in enumerate(mod.args):
            yield from _names_of(f"partial argument {i}", argument)
        for name, argument in mod.keywords.items():
            yield from _names_of(name, argument)
    elif isinstance(mod, types.MethodType):
        yield from _names_of("self", mod.__self__)
        yield from names_in(mod.__func__, seen)
    elif isinstance(mod, types.FunctionType):
        variables = inspect.getclosurevars(mod)
        defaults = {name: p.default for name, p in inspect.signature(mod).parameters.items()}
        for name, value in {**variables.globals, **variables.nonlocals, **defaults}.items():
            yield from _names_of(name, value)
            for inner in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(inner, (types.FunctionType, types.MethodType, functools.partial)):
                    yield from names_in(inner, seen)
    else:
        yield from _names_of("self", mod)


def _names_of(name: str, value: Any) -> Iterator[tuple[int, str]]:
    """The same for a variable: a tensor, a container of tensors, or an object that has some."""
    if isinstance(value, Tensor):
        yield id(value), name
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _names_of(f"{name}[{i}]", item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _names_of(f"{name}[{key!r}]", item)
    elif not isinstance(value, (type, types.ModuleType)):
        if isinstance(value, torch.nn.Module):
            yield from (
                (id(p), f"{name}.{at}") for at, p in (*value.named_parameters(), *value.named_buffers())
            )
        for at, attribute in getattr(value, "__dict__", {}).items():
            if isinstance(attribute, Tensor):
                yield id(attribute), f"{name}.{at}"
