"""Traces of mods that are kept between calls.

A mod is Python: what it computes may depend on closures, globals, attributes, or the time of day. No key can list
all that. So the mod itself runs on every call, but its torch functions do not: `replayed` looks each of them up among
those that earlier runs called at that point with such arguments, and hands out what they returned then. A run that
ends where an earlier one ended has made the same calls with the same numbers, so the same graphs belong to it.

A run that cannot be described in full is not kept: the mod is then traced on each call.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch._C import DisableTorchFunction
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from ..kept import Kept
from .apart import apart_from_surrounding_trace
from .arguments import SCORE_LANES

MOST_POINTS = 1 << 16  # kept for all mods
MOST_TRACES = 512  # each holds a quarter of a megabyte


class Known(NamedTuple):
    """A tensor by its place in a run: lanes first, then captures and results in the order in which they appear."""

    place: int


class Point:
    """One point in the runs of mods, after the same calls."""

    __slots__ = ("result",)

    def __init__(self, result: Any = None):
        self.result = result  # of the last call; before the first the lanes


class Traces:
    """The graphs of all runs that are the same."""

    def __init__(self, run: Sequence[Any]):
        self.run = run
        self.graphs: dict[Any, Any] = {}


class Replayed(NamedTuple):
    """What is known of a mod's run without computing anything."""

    captures: tuple[Tensor, ...]
    traces: Traces


class Unchanging:
    """A mod that is known to call the same torch functions always, so it need not run again.

    Mods that differ only in their captures share `kept`: traces by what surrounds the call.
    """

    def __init__(self, mod: Callable[..., Any], captures: tuple[Tensor, ...], kept: dict[Any, Traces]):
        self.mod, self.captures, self.kept = mod, captures, kept

    def __call__(self, *lanes: Tensor) -> Any:
        return self.mod(*lanes)


class Rerun:
    """A score_mod as it ran once, on other tensors. The mod may have changed since, and its tensors may be gone."""

    def __init__(self, traces: Traces):
        self.traces = traces

    def graph(self, what: Any, trace: Callable[[], Any]) -> Any:
        if what not in self.traces.graphs:
            self.traces.graphs[what] = trace()
        return self.traces.graphs[what]

    def __call__(self, *args: Any) -> Any:
        met, captures = [*args[: len(SCORE_LANES)]], iter(args[len(SCORE_LANES) :])

        def value(key: Any) -> Any:
            kind = key[0]
            if type(key) is Known:
                return met[key.place]
            if type(kind) is Known:  # a capture, where the run first meets it
                met.append(next(captures))
                return met[-1]
            if kind is dict:
                return {name: value(entry) for name, entry in key[1:]}
            if kind is slice:
                return slice(*map(value, key[1:]))
            if kind in (tuple, list, torch.Size):
                return kind(map(value, key[1:]))
            return float(key[1]) if kind is float else key[1]

        *calls, end = self.traces.run
        for (func, given, named, switched), returned in calls:
            with torch.set_grad_enabled(switched is None or switched[0]):
                result = func(*value(given), **(value(named) if named else {}))
            if isinstance(returned, int):
                met.append(result)
        return value(end)


def may_rerun(traces: Traces) -> bool:
    """Whether the run switched nothing but whether gradients are recorded."""
    switched = (call[3] for call, _ in traces.run[:-1])
    return all(switches is None or switches[1:] == _switches()[1:] for switches in switched)


# By the point before and the call; the first by what surrounds the run.
_points: Kept[Point] = Kept(MOST_POINTS)
_ends: Kept[Traces] = Kept(MOST_TRACES)  # by the last point and what the mod returns


class _NotKept(BaseException):
    """The run cannot be described, or is not a kept one. A BaseException, so that few mods catch it by accident."""


class _Undescribed(Exception):
    pass


_PLAIN = (Tensor, torch.nn.Parameter)
_CONSTANTS = (
    bool,
    int,
    str,
    bytes,
    type(None),
    type(Ellipsis),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)

# Called in every run, and never recorded: their results follow from what the key says of a tensor. The settings that
# they switch are recorded with each call.
_ALWAYS_CALLED = frozenset(
    {
        torch._C._set_grad_enabled,
        *(getattr(Tensor, name).__get__ for name in (
            "shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_cpu", "itemsize",
        )),
        Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.element_size,
        Tensor.is_floating_point, Tensor.is_complex, Tensor.is_signed, Tensor.is_contiguous,
        torch.is_floating_point, torch.is_complex, torch.is_tensor, torch.numel,
    }
)  # fmt: skip


class _Run(TorchFunctionMode):
    """What a mod has called so far, each call described by constants and by places of tensors."""

    def __init__(self, lanes: Sequence[Tensor]):
        super().__init__()
        self.places: dict[int, int] = {}
        self.met: list[Tensor] = []  # kept alive, so that no two have one id
        self.captures: list[Tensor] = []
        self.switches = _switches()
        for lane in lanes:
            self.place(lane)

    def place(self, tensor: Tensor) -> int:
        self.places[id(tensor)] = len(self.met)
        self.met.append(tensor)
        return len(self.met) - 1

    def called(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple:
        switches = _switches()
        switched = None if switches == self.switches else switches  # by the mod itself
        return func, self.described(args), self.described(kwargs) if kwargs else (), switched

    def described(self, value: Any) -> Any:
        """A key for `value`; raises _Undescribed where there is none."""
        kind = type(value)
        if isinstance(value, Tensor):
            place = self.places.get(id(value))
            return Known(place) if place is not None else self.captured(value)
        if kind in _CONSTANTS:
            return kind, value
        if kind is float:
            return kind, repr(value)  # tells 0.0 from -0.0, and NaN equals itself
        if kind in (tuple, list, torch.Size):
            return kind, *map(self.described, value)
        if kind is dict:
            return kind, *((name, self.described(entry)) for name, entry in value.items())
        if kind is slice:
            return kind, self.described(value.start), self.described(value.stop), self.described(value.step)
        raise _Undescribed

    def captured(self, tensor: Tensor) -> Any:
        """A tensor that the mod did not make; the first time, described by all that a trace sees of it."""
        with DisableTorchFunction():
            if (
                type(tensor) not in _PLAIN
                or tensor.layout != torch.strided
                or is_functorch_wrapped_tensor(tensor)
            ):
                raise _Undescribed
            self.captures.append(tensor)
            seen = (tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.requires_grad)
            return Known(self.place(tensor)), *seen, tensor.is_inference()


class Recording(_Run):
    """A run that computes and can be kept."""

    def __init__(self, lanes: Sequence[Tensor]):
        self.forms: list[Any] = []  # of what has been met
        super().__init__(lanes)
        self.lanes = tuple(lanes)
        # Each call and what it returned; None once that cannot be described.
        self.calls: list[tuple[Any, Any]] | None = []
        self.whole: tuple[Any, ...] | None = None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        calls = self.calls
        if calls is None or func in _ALWAYS_CALLED:
            return func(*args, **kwargs)
        if _is_custom(func):  # its derivative is Python code that no torch function sees
            self.give_up()
            return func(*args, **kwargs)
        try:
            key = self.called(func, args, kwargs)
        except _Undescribed:
            self.give_up()
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        self.returned(calls, key, result)
        return result

    def place(self, tensor: Tensor) -> int:
        self.forms.append(_form(tensor))
        return super().place(tensor)

    def returned(self, calls: list[tuple[Any, Any]], key: Any, result: Any) -> None:
        if isinstance(result, Tensor):
            place = self.places.get(id(result))
            if place is not None and self.forms[place] != _form(result):
                return self.give_up()  # a replay would show the last form from the first call on
            calls.append((key, self.place(result) if place is None else Known(place)))
        elif key[0] is Tensor.__setitem__:
            calls.append((key, None))
        else:
            self.give_up()

    def give_up(self) -> None:
        self.calls = None

    def ended(self, result: Any) -> tuple[Any, ...] | None:
        """Call when the mod has returned `result`. Gives what tells this run from others."""
        if self.calls is not None:
            try:
                self.whole = (*self.calls, self.described(result))
            except _Undescribed:
                self.give_up()
        return self.whole


class _Replay(_Run):
    """A run that computes nothing."""

    def __init__(self, lanes: Sequence[Tensor], start: Point):
        super().__init__(lanes)
        self.at = start

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _ALWAYS_CALLED:
            return func(*args, **kwargs)
        try:
            step = _points.get((self.at, self.called(func, args, kwargs)))
        except (_Undescribed, TypeError):
            step = None
        if step is None:
            self.give_up()
        self.at = step
        if isinstance(step.result, Known):
            return self.met[step.result.place]
        if step.result is not None:
            self.place(step.result)
        return step.result

    def give_up(self) -> NoReturn:
        self.at = Point()  # should the mod catch this, nothing that it does then is known
        raise _NotKept


def replayed(mod: Callable, lanes: Sequence[str], query: Tensor) -> Replayed | None:
    """What is known of the run of `mod` with these lanes; None where it has to run for real."""
    if not is_alone(query):
        return None
    surroundings = _surroundings(lanes, query)
    if isinstance(mod, Unchanging) and (traces := mod.kept.get(surroundings)):
        return Replayed(mod.captures, traces)
    start = _points.get(surroundings)
    if start is None:
        return None
    around = apart_from_surrounding_trace() if any(_switches()[2:]) else contextlib.nullcontext()
    try:
        with around, torch.enable_grad(), _Replay(start.result, start) as run:
            result = mod(*start.result)
        traces = _ends.get((run.at, run.described(result)))
    except (Exception, _NotKept):  # the run for real meets the same error
        return None
    if traces is None:
        return None
    if isinstance(mod, Unchanging):
        mod.kept[surroundings] = traces
    return Replayed(tuple(run.captures), traces)


def keep(recorded: Recording, lanes: Sequence[str], query: Tensor) -> Traces | None:
    """From now on, runs that are the same as this one are known."""
    if recorded.whole is None:
        return None
    *calls, end = recorded.whole
    at = _points.once(_surroundings(lanes, query), functools.partial(Point, recorded.lanes))
    for key, result in calls:
        returned = recorded.met[result] if isinstance(result, int) else result
        at = _points.once((at, key), functools.partial(Point, returned))
    return _ends.once((at, end), functools.partial(Traces, recorded.whole))


def not_replayable() -> None:
    """Called where a mod does what no torch function sees. Its run is not kept."""
    for mode in _get_current_function_mode_stack():
        if isinstance(mode, (Recording, _Replay)):
            mode.give_up()


def _switches() -> tuple[Any, ...]:
    """Settings that change what a torch function returns, beside its arguments. The last ones are off while mods are
    traced."""
    return (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
    )


def _form(tensor: Tensor) -> tuple[Any, ...]:
    """Facts that a mod may read from a tensor without a recorded call."""
    with DisableTorchFunction():
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def _is_custom(func: Any) -> bool:
    """Whether the operator is not torch's own."""
    return isinstance(func, (OpOverload, OpOverloadPacket)) and not str(func).startswith(("aten.", "prims."))


def is_alone(query: Tensor) -> bool:
    """Whether nothing around the call sees what mods call, except a default device."""
    return type(query) in _PLAIN and not (
        _len_torch_dispatch_stack()
        or retrieve_all_functorch_interpreters()
        or any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())
    )


def _surroundings(lanes: Sequence[str], query: Tensor) -> Any:
    devices = tuple(getattr(mode, "device", None) for mode in _get_current_function_mode_stack())
    settings = (torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled())
    return tuple(lanes), query.dtype, query.device, settings, devices
