"""Masks as pytrees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils import _pytree as pytree


def register(
    kind: type, flatten: Callable[[Any], tuple[dict[str, Any], Any]], unflatten: Callable, **context: Any
) -> None:
    """`flatten` gives what is inside by name, and what is not: equal for trees of one form."""

    def named(mask: Any) -> tuple[list[Any], Any]:
        parts, rest = flatten(mask)
        return [(pytree.GetAttrKey(name), part) for name, part in parts.items()], rest

    def unnamed(mask: Any) -> tuple[list[Any], Any]:
        parts, rest = flatten(mask)
        return [*parts.values()], rest

    name = f"flex_inductor.{kind.__name__}"
    pytree.register_pytree_node(
        kind, unnamed, unflatten, flatten_with_keys_fn=named, serialized_type_name=name, **context
    )
