"""Finding what a Python mod captures, so that captured tensors become inputs of the op.

Dynamo does this for compiled calls. Without it the mod runs once on fake 0-d tensors. Every tensor that it uses and has
not made is a capture. While an export traces, a number that changes is one too.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_iter, tree_map_only

from .. import compat
from . import errors
from .apart import apart_from_surrounding_trace, function_modes, inside
from .arguments import example_lanes
from .indexing import LaneIndexing
from .replay import Recording, Rerun, Traces, is_alone, keep, may_rerun, not_replayable, replayed
from .source_lines import line_raising

_CAPTURED = (Tensor, torch.SymInt, torch.SymFloat)
_REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]


def _identity(value: Any) -> Any:
    """A key for one capture. Arithmetic gives a new object each time for one and the same changing number."""
    return id(value) if isinstance(value, Tensor) else value.node.expr


class LiftedMod:
    """A mod as a function of its lanes and captures."""

    def __init__(self, mod: Callable, captures: Sequence[Any], traces: Traces | None = None):
        self.mod = mod
        self._ids = [_identity(capture) for capture in captures]
        self._kept_alive = tuple(captures)
        self.traces = traces
        self._modes = function_modes()
        self._last_run: Any = None

    def graph(self, what: Any, trace: Callable[[], fx.GraphModule]) -> fx.GraphModule:
        """The result of `trace` for this mod, kept for other calls with the same run."""
        if self.traces is None:
            return trace()
        graph = self.traces.graphs.get(what)
        if graph is None:
            graph = trace()
            if self._last_run == self.traces.run:
                self.traces.graphs[what] = graph
            else:  # the mod has not repeated its run
                self.traces = None
        return graph

    def as_it_ran(self) -> LiftedMod | Rerun:
        """The mod for later, without its tensors and its Python where its run is recorded."""
        if self.traces is None or self._modes or not may_rerun(self.traces):
            return self
        return Rerun(self.traces)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that the mod's author gave the captures."""
        known = dict(names_in(self.mod))
        return tuple(known.get(capture, f"capture_{i}") for i, capture in enumerate(self._ids))

    def __call__(self, *args: Any) -> Tensor:
        lanes, captures = args[: len(args) - len(self._ids)], args[len(args) - len(self._ids) :]
        given = dict(zip(self._ids, captures, strict=True))
        exchange = _Exchange(lambda value: given.get(_identity(value), value))
        with inside(self._modes), exchange, Recording(lanes) as run:
            result = self.mod(*lanes)
        # A mod may return what it captures.
        exchanged = given.get(_identity(result), result) if isinstance(result, _CAPTURED) else result
        if isinstance(exchanged, Tensor) and self._applies_functions(exchanged):
            run.give_up()
        self._last_run = run.ended(result)
        return exchanged

    def _applies_functions(self, result: Tensor) -> bool:
        """Whether an autograd.Function was applied, even by a name bound before `_exchanged` was installed."""
        captures = zip(self._kept_alive, self.names, strict=True)
        own = [(c if c.grad_fn is None else c.grad_fn, name) for c, name in captures if isinstance(c, Tensor)]
        found, seen = False, set()
        waiting: list[tuple[Any, Any]] = [(result.grad_fn, None)]
        while waiting:
            node, user = waiting.pop()
            if node is None or node in seen:
                continue
            source = getattr(node, "variable", node)  # a leaf has a node that adds up its gradient
            for name in (name for known, name in own if known is source):
                raise errors.function_bound_before(name, user.name())
            seen.add(node)
            found |= isinstance(node, BackwardCFunction)
            waiting += [(before, node) for before, _ in node.next_functions]
        return found


class _Exchange(TorchFunctionMode):
    """Passes `instead_of(tensor)` for each tensor to the torch functions called inside."""

    def __init__(self, instead_of: Callable[[Any], Any]):
        super().__init__()
        self.instead_of = instead_of

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func == _REQUIRES_GRAD and self.instead_of(args[0]) is not args[0]:
            # Ask the mod's own tensor: stand-ins require a gradient in one trace and none in the other.
            return func(*args)
        given, named = tree_map_only(_CAPTURED, self.instead_of, (args, kwargs or {}))
        return _returned(func(*given, **named), given, args)


def _returned(result: Any, given: Sequence[Any], args: Sequence[Any]) -> Any:
    """The mod's own tensor if a function returned its stand-in, as `module.buffer += 1` does."""
    same = (arg for arg, instead in zip(args, given, strict=True) if instead is result)
    return next(same, result) if isinstance(result, Tensor) else result


def _exchanged(args: tuple) -> tuple:
    """The same exchange for arguments of autograd.Functions in this thread, which no torch function mode sees."""
    not_replayable()
    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(mode, _Exchange):
            args = tree_map_only(Tensor, mode.instead_of, args)
    return args


compat.change_function_arguments(_exchanged)


class _Record(_Exchange):
    """Collects the tensors that the mod computes with and has not made."""

    def __init__(self, fake_mode: FakeTensorMode, query: Tensor, name: str):
        super().__init__(self.capture)
        self.fake_mode, self.name = fake_mode, name
        self.device = query.device
        self.results: dict[int, Tensor] = {}
        self.captures: dict[Any, Any] = {}
        self.stand_ins: dict[int, Tensor] = {}

    def capture(self, value: Any) -> Any:
        if self.made_inside(value):
            return value
        if torch._C._functorch.peek_interpreter_stack() and torch._C._functorch.is_batchedtensor(value):
            raise errors.transform_in_mod(self.name)
        self.captures[_identity(value)] = value
        return self.stand_in(value) if isinstance(value, Tensor) else value

    def made_inside(self, value: Any) -> bool:
        """Whether the mod made it: it has this fake mode, or was recorded as a result, as functorch's wrappers are."""
        return id(value) in self.results or getattr(value, "fake_mode", None) is self.fake_mode

    def stand_in(self, tensor: Tensor) -> Tensor:
        if self.made_inside(tensor):
            return tensor
        if id(tensor) not in self.stand_ins:
            with temporarily_clear_interpreter_stack(), self.fake_mode:
                # On the query's device, so that an error can name a capture on another one.
                self.stand_ins[id(tensor)] = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device
                )
        return self.stand_ins[id(tensor)]

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func == _REQUIRES_GRAD and not self.made_inside(args[0]):
            return func(*args)
        if func is Tensor.register_hook:
            raise errors.hook_in_mod(self.name)
        given = tree_map_only(Tensor, self.stand_in, args)
        result = _returned(func(*given, **tree_map_only(Tensor, self.stand_in, kwargs)), given, args)
        made = [tensor for tensor in tree_iter(result) if isinstance(tensor, Tensor)]
        # Reading a shape or a dtype is no computation. `t[i] = x` is one, though it returns None.
        if made or result is None:
            tree_map_only(_CAPTURED, self.capture, (args, kwargs))
        self.results.update((id(tensor), tensor) for tensor in made)
        return result


def lift(mod: Callable, lane_names: Sequence[str], query: Tensor) -> tuple[LiftedMod, tuple]:
    """`mod` as a function of lanes and captures, and the captures."""
    if known := replayed(mod, lane_names, query):
        return LiftedMod(mod, known.captures, known.traces), known.captures
    name = "score_mod" if "score" in lane_names else "mask_mod"
    errors.check_arity(name, mod, lane_names)
    keeps = is_alone(query)
    with apart_from_surrounding_trace(), torch.enable_grad():
        fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        with fake_mode:
            lanes = example_lanes(query, lane_names)
        record = _Record(fake_mode, query, name)
        try:
            with fake_mode, LaneIndexing(), record, Recording(lanes) as run:
                result = mod(*lanes)
        except DataDependentOutputException as error:
            raise errors.needs_a_value(name, line_raising(error)) from None
        except DynamicOutputShapeException as error:
            raise errors.size_from_values(name, line_raising(error)) from None
        except RuntimeError as error:
            if ".numpy() is not supported" in str(error):
                raise errors.numpy_array(name, line_raising(error)) from None
            if "saved tensor hooks" in str(error):  # of torch.func.grad and the like
                raise errors.transform_in_mod(name) from None
            raise
        if isinstance(result, Tensor):
            record.capture(result)
    captures = tuple(record.captures.values())
    run.ended(result)
    return LiftedMod(mod, captures, keep(run, lane_names, query) if keeps else None), captures


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
        try:
            variables = inspect.getclosurevars(mod)
        except ValueError:  # a variable of the function around it has no value yet
            return
        defaults = {name: p.default for name, p in inspect.signature(mod).parameters.items()}
        for name, value in {**variables.globals, **variables.nonlocals, **defaults}.items():
            yield from _names_of(name, value)
            for inner in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(inner, (types.FunctionType, types.MethodType, functools.partial)):
                    yield from names_in(inner, seen)
    else:
        yield from _names_of("self", mod)


def _names_of(name: str, value: Any, around: tuple = ()) -> Iterator[tuple[int, str]]:
    """The same for one variable: a tensor, a container of tensors, or an object with tensors."""
    if isinstance(value, Tensor):
        yield id(value), name
    elif isinstance(value, (list, tuple, dict)):
        if any(value is other for other in around):
            return
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if not isinstance(item, (int, float, str)):
                yield from _names_of(f"{name}[{key!r}]", item, (*around, value))
    elif not isinstance(value, (type, types.ModuleType)):
        if isinstance(value, torch.nn.Module):
            yield from (
                (id(p), f"{name}.{at}") for at, p in (*value.named_parameters(), *value.named_buffers())
            )
        for at, attribute in getattr(value, "__dict__", {}).items():
            if isinstance(attribute, Tensor):
                yield id(attribute), f"{name}.{at}"
