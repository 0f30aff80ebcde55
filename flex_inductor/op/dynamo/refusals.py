"""Errors of ours while Dynamo traces: the user gets them without Dynamo's words around them."""

from __future__ import annotations

from typing import Any

from torch._dynamo.exc import unimplemented

from ... import compat, errors


def check(tx: Any, function: Any, *args: Any) -> None:
    """Refuse what `function(*args)` refuses."""
    try:
        function(*args)
    except errors.FlexError as error:
        refuse(tx, error)


def refuse(tx: Any, error: Exception) -> None:
    """A graph break, after which the same error is raised eagerly; or the error, if no break is allowed."""
    if compat.breaks_are_errors(tx):
        raise compat.out_of_dynamo(tx, error)
    unimplemented(
        gb_type="flex_attention refused the call", context=str(error), explanation=str(error), hints=[]
    )
