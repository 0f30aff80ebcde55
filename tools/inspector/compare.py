"""What differs between two saved reports, for refactors and upgrades."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any


def differences(before: dict[str, Any], after: dict[str, Any]) -> str:
    """As text, from the report `before` to the report `after`."""
    lines = [
        *_changed("target", before["target"], after["target"]),
        *_changed_items("", before["versions"], after["versions"]),
    ]
    for number, (old, new) in enumerate(_pairs(before["calls"], after["calls"])):
        lines += _section(f"call {number}", old, new, _call)
    old_kernels, new_kernels = _named(before), _named(after)
    for name in dict.fromkeys([*old_kernels, *new_kernels]):
        lines += _section(f"kernel {name}", old_kernels.get(name), new_kernels.get(name), _kernel)
    return "\n".join(lines) if lines else "no difference"


def _pairs(before: list[Any], after: list[Any]) -> Iterator[tuple[Any, Any]]:
    for i in range(max(len(before), len(after))):
        yield (before[i] if i < len(before) else None), (after[i] if i < len(after) else None)


def _named(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Kernels by kind and number within the kind: their names may change with the graph around them."""
    found: dict[str, dict[str, Any]] = {}
    for kernel in report["kernels"]:
        same = sum(key.startswith(f"{kernel['kind']} ") for key in found)
        found[f"{kernel['kind']} {same}"] = kernel
    return found


def _section(title: str, old: Any, new: Any, compare: Any) -> list[str]:
    if old is None or new is None:
        return [f"{title}: {'new' if old is None else 'gone'}"]
    found = list(compare(old, new))
    return [title, *(f"   {line}" for line in found)] if found else []


def _call(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    for a, b in zip(old["tensors"], new["tensors"], strict=True):
        yield from _changed_items(f"{a['name']} ", a, b)
    for direction in dict.fromkeys([*old["decisions"], *new["decisions"]]):
        a, b = old["decisions"].get(direction), new["decisions"].get(direction)
        if a is None or b is None:
            yield f"{direction}: {'new' if a is None else 'gone'}"
            continue
        for field in ("chosen", "why", "rejected", "notes"):
            yield from _changed(f"{direction} {field}", a[field], b[field])
    for name in dict.fromkeys([*old["graphs"], *new["graphs"]]):
        yield from _text(name, old["graphs"].get(name, ""), new["graphs"].get(name, ""))
    yield from _changed_items("schedule ", old["schedule"] or {}, new["schedule"] or {})


def _kernel(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    yield from _changed_items("config ", old["config"], new["config"])
    flat = [
        {**{k: v for k, v in k_["resources"].items() if k not in ("instructions", "reasons")},
         **(k_["resources"]["instructions"] or {})}
        for k_ in (old, new)
    ]  # fmt: skip
    yield from _changed_items("", *flat)
    yield from _changed("built by", old["built_with"], new["built_with"])
    yield from _text("source", old["source"], new["source"])


def _changed(name: str, old: Any, new: Any) -> Iterator[str]:
    if _plain(old) != _plain(new):
        yield f"{name}: {_plain(old)} -> {_plain(new)}"


def _changed_items(prefix: str, old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    for name in dict.fromkeys([*old, *new]):
        if name == "picture":
            yield from _text(f"{prefix}{name}", old.get(name, ""), new.get(name, ""))
        else:
            yield from _changed(f"{prefix}{name}", old.get(name), new.get(name))


def _plain(value: Any) -> Any:
    """Tuples as the lists that JSON makes of them."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def _text(name: str, old: str, new: str) -> Iterator[str]:
    if old == new:
        return
    yield f"{name}:"
    for line in difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=1):
        if not line.startswith(("---", "+++", "@@")):
            yield f"   {line}"
