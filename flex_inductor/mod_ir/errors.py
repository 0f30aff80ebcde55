"""The errors about mods: what they take, give, capture and do, and mods as text in compiled and saved graphs."""

from __future__ import annotations

import functools
import inspect
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import (
    SIGNATURES,
    FlexNotImplementedError,
    FlexRuntimeError,
    FlexTypeError,
    FlexValueError,
    described,
    kind_of,
    not_callable,
)


def bad_mod_text(what: str) -> FlexValueError:
    return FlexValueError(
        f"A mod in a compiled or saved graph cannot be read: {what}. Make the graph again with this version of "
        f"flex_inductor, and load no files that you do not trust."
    )


def operator_refused(name: str, why: str, functions: Iterable[str]) -> FlexValueError:
    return FlexValueError(
        f"A mod uses {name[:80]!r}, which {why}. In a compiled or saved graph a mod may use operators that are "
        f"registered with torch, give tensors or numbers, draw no random numbers and write into nothing but what the "
        f"mod itself made, and these functions of numbers: {', '.join(functions)}."
    )


def argument_refused(value: Any) -> FlexValueError:
    return FlexValueError(
        f"A mod gives an operator {kind_of(value)}, which cannot be written into a compiled graph. Expected "
        f"tensors, numbers, text, dtypes, devices, layouts, memory formats, and lists of them."
    )


def constant_refused(name: str, value: Any) -> FlexValueError:
    return FlexValueError(
        f"A mod holds `{name}`, {kind_of(value)}, which cannot be written into a compiled graph. Expected a "
        f"plain dense tensor; capture anything else from outside the mod as one."
    )


def number_in_mod() -> FlexNotImplementedError:
    return FlexNotImplementedError(
        "A mod computes with a number that changes from call to call, such as a length, which torch.export cannot "
        "trace with strict=False. Compute it before the mod (half = length // 2), or export with strict=True."
    )


def differentiable_once() -> FlexNotImplementedError:
    return FlexNotImplementedError(
        "score_mod applies an autograd.Function whose backward is marked once_differentiable, and a derivative of that "
        "backward was asked for (create_graph=True, torch.func.jvp, grad of grad). Write the backward in torch "
        "operations and take the mark away."
    )


def wrong_arity(name: str, mod: Callable, takes: str, expected: int) -> FlexTypeError:
    other = "mask_mod" if name == "score_mod" else "score_mod"
    swapped = takes == str(9 - expected)
    hint = f" It looks like a {other}: were the two swapped?" if swapped else ""
    return FlexTypeError(
        f"{name} must take {expected} arguments, {SIGNATURES[name]}, but {_name_of(mod)} takes {takes}.{hint}"
    )


def score_result(value: Any) -> FlexTypeError:
    hint = " It looks like a mask_mod: pass it through create_block_mask." if _is_bool(value) else ""
    return FlexTypeError(
        f"score_mod must return one floating-point score, a 0-d tensor, but returned {described(value)}."
        f"{hint or _index_hint(value)}"
    )


def mask_result(name: str, value: Any) -> FlexTypeError:
    hint = ""
    if isinstance(value, Tensor):
        hint = " Compare (for example q_idx >= kv_idx) or call .bool()."
    elif isinstance(value, bool):
        hint = " A constant is torch.ones((), dtype=torch.bool), on the device of the indices."
    return FlexTypeError(
        f"{name} must return one bool, a 0-d torch.bool tensor, but returned {described(value)}."
        f"{_index_hint(value) or hint}"
    )


def _index_hint(value: Any) -> str:
    if not isinstance(value, Tensor) or value.dim() == 0:
        return ""
    return " It runs for one score: index what it captures, as in bias[kv_idx], or reduce it before the call."


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool)


def check_mod_result(name: str, value: Any) -> None:
    """`name` is score_mod, or mask_mod and maybe what the function is called."""
    dtype = value.dtype if isinstance(value, Tensor) and value.dim() == 0 else None
    if name == "score_mod" and not (dtype and dtype.is_floating_point):
        raise score_result(value)
    if name != "score_mod" and dtype != torch.bool:
        raise mask_result(name, value)


def check_arity(name: str, mod: Any, lanes: Sequence[str]) -> None:
    """Refuse a mod that cannot be called with one argument for each lane name."""
    if not callable(mod):
        raise not_callable(name, mod)
    try:
        signature = inspect.signature(mod)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*lanes)
    except TypeError:
        required = [
            p
            for p in signature.parameters.values()
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        raise wrong_arity(name, mod, str(len(required)), len(lanes)) from None


def _name_of(mod: Any) -> str:
    if isinstance(mod, functools.partial):
        return f"partial({_name_of(mod.func)})"
    if isinstance(mod, types.FunctionType | types.MethodType):
        return f"`{mod.__qualname__}`"
    return f"`{type(mod).__name__}`"


def cannot_be_called(name: str, lanes: Sequence[str], error: TypeError) -> FlexTypeError:
    return FlexTypeError(f"{name} cannot be called as {', '.join(lanes)}: {error}")


def needs_a_value(name: str, line: Any) -> FlexTypeError:
    return FlexTypeError(
        f"{name} needs the value of a tensor in Python{_at(line)}: for `if`, `and`, `not`, `int()`, `.item()` or the "
        f"index of a list. A mod is traced once for all scores, when tensors have no values. Choose with torch.where, "
        f"join conditions with &, | and ~, index a captured tensor rather than a list, and use 0-d tensors as they are."
    )


def size_from_values(name: str, line: Any) -> FlexTypeError:
    return FlexTypeError(
        f"{name} makes a tensor of a size that depends on values{_at(line)}, as w[w > 0] and torch.unique do. A mod is "
        f"traced once for all scores, when tensors have no values. Make that tensor before the call, or keep the size: "
        f"torch.where(w > 0, w, 0.0)."
    )


def transform_in_mod(name: str) -> FlexNotImplementedError:
    return FlexNotImplementedError(
        f"{name} calls a transform of torch.func. Only torch.vmap in a compiled call is served. Write the computation "
        f"for one score, which has no batch, and derivatives as formulas or in a torch.autograd.Function."
    )


def numpy_array(name: str, line: Any) -> FlexTypeError:
    return FlexTypeError(
        f"{name} computes with a tensor and a NumPy array{_at(line)}. Make the array a tensor before the call: "
        f"torch.from_numpy(array)."
    )


def _at(line: Any) -> str:
    """`line` is a source_lines.Line, if it is known."""
    return f", at {line} ({line.text})" if line else ""


_warned_of_int32: set[str] = set()


def warn_of_int32(mod: str) -> None:
    """Once for each kind of mod."""
    if mod not in _warned_of_int32:
        _warned_of_int32.add(mod)
        warnings.warn(
            f"{mod} computes integers that may leave int32, the dtype of its indices on a GPU. They wrap around there, "
            "as in torch's kernels. Compute in int64, as in kv_idx.long().",
            stacklevel=2,
        )


def number_beyond(mod: str, number: float, dtype: torch.dtype) -> FlexValueError:
    name = str(dtype).removeprefix("torch.")
    if dtype.is_floating_point:
        shown, most = f"{number:g}", f"{torch.finfo(dtype).max:.3g}"
        advice = "Write float('inf') or -float('inf') if that is meant, else a smaller number."
    else:
        shown, most = str(number), f"{torch.iinfo(dtype).min} to {torch.iinfo(dtype).max}"
        advice = (
            "It would wrap around. Compute in int64, as in kv_idx.long() * 3_000_000_000, or with a float."
        )
    return FlexValueError(
        f"{mod} computes in {name} with the number {shown}, which is beyond what {name} holds ({most}). {advice}"
    )


def capture_on_other_device(mod: str, capture: str, device: Any, expected: Any) -> FlexValueError:
    return FlexValueError(
        f"{mod} captures `{capture}`, which is on {device}, but query is on {expected}. "
        f"Move it before the call: {capture} = {capture}.to('{expected}')."
    )


def capture_of_a_part(capture: str, tokens: Any, whole: Any) -> FlexValueError:
    return FlexValueError(
        f"score_mod looks up `{capture}` by positions in the whole sequence, {whole} tokens, but it has {tokens} "
        "entries, as many as this rank has tokens. Do not shard what mods look up, or gather it with unshard()."
    )


def capture_of_inference_mode(mod: str, capture: str) -> FlexRuntimeError:
    return FlexRuntimeError(
        f"{mod} captures `{capture}`, which was made under torch.inference_mode(), so autograd cannot keep it for the "
        f"backward. Make it outside, or capture a copy that is made outside: {capture}.clone()."
    )


def mask_capture_needs_grad(capture: str) -> FlexValueError:
    return FlexValueError(
        f"mask_mod captures `{capture}`, which requires grad, but a mask has no gradient. Use {capture}.detach() "
        f"in the mask, or move what must be learnt into score_mod."
    )


def value_overwritten() -> FlexRuntimeError:
    return FlexRuntimeError(
        "score_mod changes in place a value that its gradient needs as it was. Use the out-of-place form: x = x * 2 "
        "instead of x.mul_(2), or write into a clone."
    )


def capture_mutated(mod: str, capture: str, op: str) -> FlexRuntimeError:
    return FlexRuntimeError(
        f"{mod} changes the captured tensor `{capture}` in place ({op}). It runs once for every score, in any "
        f"order, so it may only read what it captures. Use the out-of-place form, or make the change before the call."
    )


def dtensor_in_compiled_mod(name: str) -> FlexNotImplementedError:
    return FlexNotImplementedError(
        f"{name}: looks up a DTensor, which compiled code does not trace. Look up x.to_local(grad_placements="
        "[Partial()]) where it is Replicate(), and context_parallel's unshard(x.to_local(), dim, partial=True) where "
        "it is sharded along the sequence."
    )


def parameter_mutated(mod: str, line: Any) -> FlexRuntimeError:
    return FlexRuntimeError(
        f"{mod} changes a captured tensor that requires grad in place{_at(line)}. It runs once for every score, in any "
        f"order, so it may only read what it captures. Use the out-of-place form, or make the change before the call."
    )


def hook_in_mod(mod: str) -> FlexNotImplementedError:
    return FlexNotImplementedError(
        f"{mod} registers a hook on a tensor (register_hook), which would run once, while the mod is traced. "
        f"Apply a torch.autograd.Function whose backward changes the gradient."
    )


def function_bound_before(capture: str, function: str) -> FlexRuntimeError:
    return FlexRuntimeError(
        f"A mod passes the captured tensor `{capture}` to a torch.autograd.Function ({function}) by a name that was "
        f"bound before flex_inductor was imported. With this version of torch its gradient cannot be traced. Call the "
        f"Function's own .apply, or import flex_inductor before the module that binds it to a name."
    )


def assigns_outside(mod: str, line: Any) -> FlexRuntimeError:
    return FlexRuntimeError(
        f"{mod} changes something outside of it{_at(line)}. It is traced once for all scores, so it may only read what "
        f"it finds outside. Make the change before the call."
    )


def tensor_in_lane(mod: str, size: int, most: int) -> FlexNotImplementedError:
    return FlexNotImplementedError(
        f"{mod} makes a tensor of {size:,} elements for every score; at most {most:,} are served. Compute it before "
        f"the call for all positions, capture the result as a table, and look single numbers up in {mod}."
    )


def mod_is_random(mod: str, op: str) -> FlexRuntimeError:
    return FlexRuntimeError(
        f"{mod} draws random numbers ({op}). It runs again in the backward and would draw others there. Draw a "
        f"tensor before the call and capture it: noise = torch.rand(heads, keys), then noise[h, kv_idx] in {mod}."
    )


def function_in_compiled_transform(mod: str, function: str) -> FlexRuntimeError:
    return FlexRuntimeError(
        f"{mod} applies the autograd.Function `{function}` inside a torch.func transform that torch.compile traces, "
        f"which would lose its backward. Do not compile the transform, or compile the function without it and call "
        f".backward() on its result."
    )
