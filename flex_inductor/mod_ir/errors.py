"""The errors about mods as text, in the ops of compiled and saved graphs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..errors import FlexNotImplementedError, FlexValueError


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
        f"A mod gives an operator a {type(value).__name__}, which cannot be written into a compiled graph. Expected "
        f"tensors, numbers, text, dtypes, devices, layouts, memory formats, and lists of them."
    )


def constant_refused(name: str, value: Any) -> FlexValueError:
    return FlexValueError(
        f"A mod holds `{name}`, a {type(value).__name__}, which cannot be written into a compiled graph. Expected a "
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
