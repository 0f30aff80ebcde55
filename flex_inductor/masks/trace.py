"""mask_mod as a short list of steps.

A `MaskProgram` is the FX graph of the function on four 0-d integers, with equal steps merged and,
for each step, the set of indices its value depends on. Captured tensors are constants of the program.
The integers have the dtype that they have in kernels, so that sums and products wrap around as they do there.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_iter, tree_map

from ..errors import number_beyond
from ..mod_ir.arguments import INDEX_DTYPE
from ..mod_ir.checks import number_beyond_in_call
from ..mod_ir.indexing import LaneIndexing
from .errors import FlexError, MaskModError

INDEX_NAMES = ("b", "h", "q", "kv")
aten = torch.ops.aten

# Their value is the same whatever their tensor argument holds.
_VALUE_FREE = {
    aten.new_ones,
    aten.new_zeros,
    aten.new_full,
    aten.ones_like,
    aten.zeros_like,
    aten.full_like,
}


@dataclass(frozen=True)
class Ref:
    """An argument that is the value of an earlier step."""

    step: int


@dataclass(frozen=True)
class Step:
    """One operation on earlier values, or a leaf: an index or a constant tensor."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    reads: frozenset[str]

    @property
    def is_scalar(self) -> bool:
        return self.shape == ()

    @property
    def is_joint(self) -> bool:
        return "q" in self.reads and "kv" in self.reads

    @functools.cached_property
    def refs(self) -> list[int]:
        leaves = tree_flatten((self.args, self.kwargs), is_leaf=lambda x: isinstance(x, Ref))[0]
        return [leaf.step for leaf in leaves if isinstance(leaf, Ref)]


class MaskProgram:
    """The steps of one mask_mod; the first four are the indices b, h, q and kv."""

    def __init__(self, steps: list[Step], output: int, name: str, device: torch.device) -> None:
        self.steps = steps
        self.output = output
        self.name = name
        self.device = device
        self.reads = steps[output].reads

    def needed(self, wanted: Sequence[int]) -> list[int]:
        """The steps that `wanted` are computed from, themselves included, in order."""
        marked = set(wanted)
        for i in range(len(self.steps) - 1, -1, -1):
            if i in marked:
                marked.update(self.steps[i].refs)
        return sorted(marked)

    def function(self, *wanted: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Any]:
        """The value of the `wanted` steps as a function of four 0-d integers, ready for vmap."""
        order = [i for i in self.needed(wanted) if i >= len(INDEX_NAMES)]

        def run(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Any:
            env: dict[int, Any] = {i: index.to(INDEX_DTYPE) for i, index in enumerate((b, h, q, kv))}
            for i in order:
                step = self.steps[i]
                if isinstance(step.target, Tensor):
                    env[i] = step.target
                else:
                    args, kwargs = _resolve((step.args, step.kwargs), env)
                    env[i] = step.target(*args, **kwargs)
            values = tuple(env[i] for i in wanted)
            return values[0] if len(values) == 1 else values

        return run

    def __str__(self) -> str:
        """One line for each step: its value, and the indices that value depends on."""

        def show(arg: Any) -> str:
            if isinstance(arg, Ref):
                return names[arg.step]
            if isinstance(arg, (list, tuple)):
                return "[" + ", ".join(map(show, arg)) + "]"
            return str(arg)

        names = dict(enumerate(INDEX_NAMES))
        lines = [f"{self.name}(b, h, q, kv):"]
        for i in self.needed([self.output]):
            step = self.steps[i]
            if i < len(INDEX_NAMES):
                continue
            names[i] = f"%{i - len(INDEX_NAMES)}"
            if isinstance(step.target, Tensor):
                what = f"captured {str(step.dtype).removeprefix('torch.')}{list(step.shape)}"
            else:
                given = [show(a) for a in step.args] + [f"{k}={show(v)}" for k, v in step.kwargs.items()]
                what = f"{getattr(step.target, '__name__', step.target)}({', '.join(given)})"
            depends = ", ".join(n for n in INDEX_NAMES if n in step.reads) or "nothing"
            lines.append(f"  {names[i]} = {what}  # {depends}")
        lines.append(f"  return {names[self.output]}")
        return "\n".join(lines)


def _resolve(tree: Any, env: dict[int, Any]) -> Any:
    return tree_map(
        lambda x: env[x.step] if isinstance(x, Ref) else x, tree, is_leaf=lambda x: isinstance(x, Ref)
    )


def name_of(mask_mod: Callable) -> str:
    return getattr(mask_mod, "__name__", type(mask_mod).__name__)


def check_signature(mask_mod: Any) -> None:
    """Refuses what cannot be called with exactly (b, h, q_idx, kv_idx)."""
    if not callable(mask_mod):
        raise MaskModError(
            f"mask_mod: expected a function of (b, h, q_idx, kv_idx), got {type(mask_mod).__name__}. "
            "Pass the function itself."
        )
    try:
        signature = inspect.signature(mask_mod)
    except (TypeError, ValueError):
        return
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [
        p.name for p in signature.parameters.values() if p.kind in positional and p.default is p.empty
    ]
    try:
        signature.bind(*INDEX_NAMES)
    except TypeError:
        hint = " Five arguments make a score_mod: pass it as score_mod." if len(required) == 5 else ""
        raise MaskModError(
            f"mask_mod {name_of(mask_mod)}: expected four arguments (b, h, q_idx, kv_idx), "
            f"got {len(required)} ({', '.join(required)}).{hint}"
        ) from None


def trace_mask(mask_mod: Callable, device: torch.device) -> MaskProgram:
    """Traces on every call: a cache could not see a changed Python number in a closure."""
    check_signature(mask_mod)

    def flat(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Any:
        with LaneIndexing():
            return mask_mod(b, h, q, kv)

    with torch.no_grad():
        try:
            recorder = _Recorder(mask_mod, device)
            result = recorder.run(flat)
            if recorder.mutates:
                recorder = _Recorder(mask_mod, device)
                result = recorder.run(torch.func.functionalize(flat))
        except FlexError:
            raise
        except Exception as failure:
            return _untraceable(mask_mod, flat, failure, device)
    return recorder.program(result)


def _untraceable(mask_mod: Callable, flat: Callable, failure: Exception, device: torch.device) -> MaskProgram:
    """The program of a function that cannot be traced: one step, of which only is known what it reads.

    `captured.max().item()` cannot be traced but can be evaluated; `if q_idx > kv_idx:` can do neither.
    """
    four = torch.zeros((4, 1), dtype=INDEX_DTYPE, device=device)
    try:
        value = torch.vmap(flat)(*four)
    except Exception as error:
        text = f"{failure} {error}"
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if "data-dependent" in text or ".item()" in text:
            raise MaskModError(
                f"mask_mod {name_of(mask_mod)}: its control flow depends on the value of an index or of a "
                "captured tensor (`if`, `and`, `or`, `not`, `int()` or `.item()` on a tensor). "
                "Use torch.where, &, | and ~ instead."
            ) from error
        if "device" in text:
            raise MaskModError(
                f"mask_mod {name_of(mask_mod)}: captures a tensor that is not on {device}. "
                f"Move it there, or pass the device= it lives on. ({first_line})"
            ) from error
        raise MaskModError(f"mask_mod {name_of(mask_mod)}: cannot be evaluated: {first_line}") from error
    _check_result(value, mask_mod, (1,))
    leaves = [_index_leaf(name) for name in INDEX_NAMES]
    reads = {"q", "kv"} | {name for name in "bh" if _varies_with(flat, name, device)}
    whole = Step(flat, tuple(Ref(i) for i in range(4)), {}, torch.bool, (), frozenset(reads))
    return MaskProgram([*leaves, whole], len(leaves), name_of(mask_mod), device)


def _varies_with(flat: Callable, name: str, device: torch.device) -> bool:
    """Whether the value depends on an index: along others vmap's result has stride 0."""
    lanes = [
        torch.zeros(2 if name == index else (), dtype=INDEX_DTYPE, device=device) for index in INDEX_NAMES
    ]
    return (
        torch.vmap(flat, tuple(0 if name == index else None for index in INDEX_NAMES))(*lanes).stride(0) != 0
    )


def _check_result(value: Any, mask_mod: Callable, shape: tuple[int, ...] = ()) -> None:
    name = name_of(mask_mod)
    if not isinstance(value, Tensor):
        raise MaskModError(
            f"mask_mod {name}: expected one boolean tensor as the result, got {type(value).__name__}. "
            "A constant mask is torch.ones((), dtype=torch.bool), on the indices' device."
        )
    if value.dtype != torch.bool:
        raise MaskModError(
            f"mask_mod {name}: expected a torch.bool result, got {value.dtype}. "
            "Compare (`!= 0`), or pass a function that returns scores as score_mod."
        )
    if tuple(value.shape) != shape:
        raise MaskModError(
            f"mask_mod {name}: expected one value for one (b, h, q_idx, kv_idx), got a tensor of shape "
            f"{tuple(value.shape[len(shape) :])}. Index captured tensors down to a single element."
        )


def _index_leaf(name: str) -> Step:
    return Step(name, (), {}, INDEX_DTYPE, (), frozenset([name]))


class _Recorder(TorchDispatchMode):
    """Runs a mask once on zeros and keeps the operations as steps; a step equal to an earlier one becomes that one."""

    def __init__(self, mask_mod: Callable, device: torch.device) -> None:
        super().__init__()
        self.mask_mod, self.device = mask_mod, device
        self.steps = [_index_leaf(name) for name in INDEX_NAMES]
        self.known: dict[Any, int] = {}
        self.values: dict[int, tuple[Tensor, int]] = {}  # by id: the tensor, which stays alive, and its step
        self.mutates = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch.compiler.disable would import Dynamo, which takes a second. `in_graph` tells Dynamo once it is loaded.
        return False

    def run(self, flat: Callable) -> Any:
        indices = [torch.zeros((), dtype=INDEX_DTYPE, device=self.device) for _ in INDEX_NAMES]
        for step, index in enumerate(indices):
            self.values[id(index)] = (index, step)
        with self:
            return flat(*indices)

    def program(self, result: Any) -> MaskProgram:
        _check_result(result, self.mask_mod)
        return MaskProgram(self.steps, self._step_of(result), name_of(self.mask_mod), self.device)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = name_of(self.mask_mod)
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise MaskModError(
                f"mask_mod {name}: draws random numbers ({func}). Draw them once outside, and capture the tensor."
            )
        if func._schema.is_mutable:
            self._refuse_captured_mutation(func, args)
            self.mutates = True
            return func(*args, **kwargs)
        refs: Any = tree_map(lambda x: Ref(self._step_of(x)) if isinstance(x, Tensor) else x, (args, kwargs))
        if func is aten._local_scalar_dense.default and not self._is_constant(refs[0][0].step):
            raise _NeedsValue(".item() of what is not a constant")
        result = func(*args, **kwargs)
        if beyond := number_beyond_in_call(func, args, kwargs, list(tree_iter((args, kwargs, result)))):
            raise number_beyond(f"mask_mod {name}", *beyond)
        self._record(func, refs[0], refs[1], result)
        return result

    def _step_of(self, tensor: Tensor) -> int:
        """The step that made a tensor; a tensor that no step has made is a capture."""
        if id(tensor) not in self.values:
            _check_device(tensor, self.mask_mod, self.device)
            leaf = Step(tensor, (), {}, tensor.dtype, tuple(tensor.shape), frozenset())
            self.values[id(tensor)] = (tensor, self._add(leaf, None))
        return self.values[id(tensor)][1]

    def _is_constant(self, step: int) -> bool:
        """Whether the value is made of literals alone."""
        found = self.steps[step]
        if isinstance(found.target, Tensor):
            return False
        return not found.reads and all(map(self._is_constant, found.refs))

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if isinstance(result, Tensor):
            self.values[id(result)] = (result, self._add(*_step(func, args, kwargs, result, self.steps)))
        elif isinstance(result, (tuple, list)):
            whole = self._add(*_step(func, args, kwargs, None, self.steps))
            for i, part in enumerate(result):
                if isinstance(part, Tensor):
                    taken = _step(operator.getitem, (Ref(whole), i), {}, part, self.steps)
                    self.values[id(part)] = (part, self._add(*taken))

    def _add(self, step: Step, key: Any) -> int:
        if key is not None and key in self.known:
            return self.known[key]
        self.steps.append(step)
        if key is not None:
            self.known[key] = len(self.steps) - 1
        return len(self.steps) - 1

    def _refuse_captured_mutation(self, func: Any, args: Any) -> None:
        if isinstance(args[0], Tensor) and id(args[0]) not in self.values:
            raise MaskModError(
                f"mask_mod {name_of(self.mask_mod)}: writes into a captured tensor ({func}). "
                "Compute a new value instead: a mask is evaluated in no particular order."
            )


class _NeedsValue(Exception):
    pass


def _step(target: Any, args: Any, kwargs: Any, value: Tensor | None, steps: list[Step]) -> tuple[Step, Any]:
    """A step, and a key that equal steps share; None if there is no such key."""
    dtype, shape = (None, (-1,)) if value is None else (value.dtype, tuple(value.shape))
    step = Step(target, tuple(args), dict(kwargs), dtype, shape, frozenset())
    if getattr(target, "overloadpacket", None) not in _VALUE_FREE:
        reads = frozenset().union(*(steps[i].reads for i in step.refs))
        step = replace(step, reads=reads)
    leaves, spec = tree_flatten((step.args, step.kwargs), is_leaf=lambda x: isinstance(x, Ref))
    # 1, 1.0 and True are equal as keys but not as arguments.
    key = (target, str(spec), tuple((type(leaf), leaf) for leaf in leaves))
    try:
        hash(key)
    except TypeError:
        return step, None
    return step, key


def _check_device(value: Tensor, mask_mod: Callable, device: torch.device) -> None:
    """torch lets a 0-d CPU tensor meet tensors of any device."""
    if value.device != device and not (value.dim() == 0 and value.device.type == "cpu"):
        raise MaskModError(
            f"mask_mod {name_of(mask_mod)}: captures a {value.dtype} tensor of shape {tuple(value.shape)} "
            f"on {value.device}, but the mask is built on {device}. Move it there, or pass "
            f"device={str(value.device)!r}."
        )
