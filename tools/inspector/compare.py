"""What differs between two saved reports, for refactors and upgrades."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from typing import Any


def differences(before: dict[str, Any], after: dict[str, Any]) -> str:
    """As text, from the report `before` to the report `after`."""
    old, new = map(_sections, (before, after))
    lines = []
    for title in dict.fromkeys([*old, *new]):
        found = list(_changed("", old.get(title), new.get(title)))
        if title not in old or title not in new:
            lines.append(f"{title}: {'new' if title in new else 'gone'}")
        elif title:
            lines += [title, *(f"   {line}" for line in found)] if found else []
        else:
            lines += found
    return "\n".join(lines) or "no difference"


def _sections(report: dict[str, Any]) -> dict[str, Any]:
    """The calls and kernels by title, and the rest. Kernels' names change with the graph around them."""
    report = json.loads(json.dumps(report))  # tuples become lists
    found: dict[str, Any] = {"": {"target": report["target"], **report["versions"]}}
    for number, call in enumerate(report["calls"]):
        found[f"call {number}"] = {
            **{tensor["name"]: tensor for tensor in [*call["tensors"], *_captures(call)]},
            **{name: {**decision, "call": "", "kernels": ()} for name, decision in call["decisions"].items()},
            **call["graphs"],
            "schedule": call["schedule"] or {},
        }
    for number, plan in enumerate(report["plans"]):
        found[f"plan {number}"] = plan
    for kernel in report["kernels"]:
        number = sum(title.startswith(f"kernel {kernel['kind']} ") for title in found)
        kept = ("config", "resources", "built_with", "source")
        found[f"kernel {kernel['kind']} {number}"] = {name: kernel[name] for name in kept}
    return found


def _captures(call: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for mod in ("score_mod", "mask_mod"):
        for capture in call[mod]["captures"] if call[mod] else ():
            yield {**capture, "name": f"{mod} {capture['name']}"}


def _changed(name: str, old: Any, new: Any) -> Iterator[str]:
    if old == new:
        return
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*old, *new]):
            yield from _changed(f"{name} {key}".strip(), old.get(key), new.get(key))
    elif isinstance(old, str) and isinstance(new, str) and "\n" in old + new:
        yield f"{name}:"
        for line in difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=1):
            if not line.startswith(("---", "+++", "@@")):
                yield f"   {line}"
    else:
        yield f"{name}: {old} -> {new}"
