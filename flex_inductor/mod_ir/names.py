"""The names that a mod's author gave its captures."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx


class WrappedMod:
    """A mod that one of the op's rules has wrapped; its captures are inputs of the op already."""

    def __init__(self, fn: Callable, names: Sequence[str]):
        self.fn, self.names = fn, tuple(names)

    def __call__(self, *args: Any) -> Any:
        return self.fn(*args)


CAPTURE_NAME = "flex_inductor_capture"  # the key in a placeholder's meta, set by Dynamo's rule


def capture_names(mod: Any, count: int) -> tuple[str, ...]:
    """The author's names of the last `count` arguments of `mod`."""
    if isinstance(mod, fx.GraphModule):
        nodes = mod.graph.find_nodes(op="placeholder")
        return tuple(
            node.meta.get(CAPTURE_NAME) or readable_name(node.name) for node in nodes[len(nodes) - count :]
        )
    return getattr(mod, "names", ()) or tuple(f"capture_{i}" for i in range(count))


def readable_name(placeholder: str) -> str:
    """`bias` from Dynamo's l_bias_, `self.table` from l_self_parameters_table_."""
    name = re.sub(r"^[lg]_(.*?)_*$", r"\1", placeholder.lower() if placeholder[:2] == "L_" else placeholder)
    return re.sub(r"_*(parameters|buffers|modules)_+", ".", name)
