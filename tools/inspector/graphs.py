"""Traced mods as text for people: one operation a line, and the line of the mod it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from .lines import mod_line

# What is the same for every operation of a mod, or says where memory lies.
_LEFT_OUT = ("device", "layout", "pin_memory", "memory_format")


def graph_text(module: fx.GraphModule, name: str, lanes: Sequence[str], captures: Sequence[str]) -> str:
    """The graph as a Python function of `lanes` and `captures`."""
    names: dict[fx.Node, str] = {}
    arguments = iter([*lanes, *captures])
    lines: list[tuple[str, str]] = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            names[node] = next(arguments, node.name)
        elif node.op == "output":
            lines.append((f"    return {_text(node.args[0], names)}", ""))
        else:
            names[node] = node.name
            where = mod_line(node)
            lines.append((f"    {node.name} = {_call(node, names)}", str(where or "")))
    width = max(len(text) for text, _ in lines)
    head = f"def {name}({', '.join([*lanes, *captures])}):"
    return "\n".join([head, *(f"{text:{width}}  # {where}" if where else text for text, where in lines)])


def _call(node: fx.Node, names: dict[fx.Node, str]) -> str:
    target: Any = node.target
    if node.op == "get_attr":
        return str(target)
    if isinstance(target, torch._ops.OpOverload):
        called = str(target.overloadpacket)
    else:
        called = getattr(target, "__name__", str(target))
    arguments = [_text(argument, names) for argument in node.args]
    arguments += [
        f"{key}={_text(value, names)}" for key, value in node.kwargs.items() if key not in _LEFT_OUT
    ]
    return f"{called}({', '.join(arguments)})"


def _text(value: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        inner = ", ".join(_text(item, names) for item in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    return str(value).removeprefix("torch.")
