"""The printed report."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from flex_inductor.lowerings.decision import config_text

from .calls import ModFacts
from .cost import Cost
from .model import Call, Kernel

WIDTH = 110


def page(report: Any, kernels: Sequence[Kernel] | None = None) -> str:
    """A Report as text, with these kernels or all, and the call's own part of each source."""
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    counts = f"{_counted(report.calls, 'attention call')}, {_counted(report.kernels, 'kernel')}"
    lines = [f"{counts} for {report.target} ({versions})"]
    for plan in report.plans:
        lines += ["", f"== {plan.call}", *_indented(decision_lines(plan), 3)]
    for call in report.calls:
        lines += ["", *_call(call, same_as(report.calls, call))]
    for kernel in report.kernels if kernels is None else kernels:
        lines += ["", *_kernel(kernel, [str(call.number) for call in report.calls if kernel in call.kernels])]
    return "\n".join(lines)


def _counted(found: Sequence[Any], what: str) -> str:
    return f"{len(found)} {what}" + ("" if len(found) == 1 else "s")


def _call(call: Call, earlier: Call | None) -> Iterator[str]:
    facts = call.facts
    where = f"{facts.where}: {facts.where.text}" if facts.where else "made by the caller of inspect"
    yield f"== call {call.number}, {where}"
    names = ", ".join(kernel.name for kernel in call.kernels)
    kernels = f"   kernels   {names or 'none: torch operations, a chunk at a time'}"
    if earlier is not None:
        yield f"   as call {earlier.number}"
        if earlier.kernels != call.kernels:
            yield kernels
        return
    for tensor in facts.tensors:
        yield f"   {tensor}"
    for name, mod in (("score_mod", facts.score_mod), ("mask_mod", facts.mask_mod)):
        if mod is not None:
            yield from _mod(name, mod)
    for direction, lowered in call.lowered.items():
        yield ""
        yield f"   {direction}"
        yield from _indented(decision_lines(lowered.decision), 6)
    for text in call.graphs.values():
        yield ""
        yield from _indented(text.splitlines(), 3)
    yield from ("", f"   schedule  {call.schedule or facts.no_mask}")
    if call.schedule is not None:
        yield from _indented([line.rstrip() for line in call.schedule.picture.splitlines()], 13)
    for direction, cost in call.cost().items():
        yield f"   {direction:9} {cost_text(cost)}"
    yield kernels


def same_as(calls: Sequence[Call], call: Call) -> Call | None:
    """An earlier call like this one in all but its kernels and where it is written."""
    first = next(other for other in calls if _facts(other) == _facts(call))
    return None if first is call else first


def _facts(call: Call) -> tuple:
    facts = call.facts
    decisions = [(direction, lowered.decision) for direction, lowered in call.lowered.items()]
    return (facts.tensors, facts.score_mod, facts.mask_mod, decisions, call.graphs, str(call.schedule))


def _mod(name: str, mod: ModFacts) -> Iterator[str]:
    where = f", {mod.where}" if mod.where else ""
    yield f"   {name} {mod.name or 'without operations'}{where}"
    width = max((len(str(line)) for line in mod.lines), default=0)
    for line in mod.lines:
        yield f"      {line!s:{width}} | {line.text}"
    for capture in mod.captures:
        yield f"      captures {capture}"


def decision_lines(decision: Any) -> list[str]:
    """The decision without what is said elsewhere: the call, and the kernels' configs."""
    return str(decision._replace(kernels=())).splitlines()[1:]


def cost_text(cost: Cost) -> str:
    text = f"{_scaled(cost.flops, 'FLOP')}, {_scaled(cost.bytes, 'B')}"
    if cost.seconds is None:
        return f"{text}; no peak known for this dtype on {cost.device}"
    text += f"; at least {_scaled(cost.seconds, 's')} on {cost.device}, bound by {cost.bound}"
    if cost.measured is None or cost.share is None:
        return text
    return f"{text}; {_scaled(cost.measured, 's')} when timed, of which that is {100 * cost.share:.2g}%"


def _scaled(value: float, unit: str) -> str:
    """Three digits and a prefix."""
    prefixes = zip(range(15, -9, -3), "PTGMk mu", strict=True)
    power, prefix = next(((power, p) for power, p in prefixes if value >= 10**power), (-9, "n"))
    return f"{value / 10**power:.3g} {prefix.strip()}{unit}"


def _kernel(kernel: Kernel, users: Sequence[str]) -> Iterator[str]:
    yield f"== {kernel.name}: {kernel.kind} of call{'s' if len(users) > 1 else ''} {', '.join(users)}"
    yield f"   config    {config_text(kernel.config)}"
    if kernel.choice is not None:
        yield f"             {kernel.choice.why}"
        for other, remark in kernel.choice.others:
            yield f"             not {other}: {remark}"
    yield f"   built by  {kernel.built_with}"
    for name, text in {**uses(kernel), **_instructions(kernel)}.items():
        yield from textwrap.wrap(text, WIDTH, initial_indent=f"   {name:9} ", subsequent_indent=" " * 13)
    yield ""
    yield from _indented(excerpt(kernel), 3)


def uses(kernel: Kernel) -> dict[str, str]:
    """Registers, memory and what they allow for; nothing for kernels whose compiler was not asked."""
    found = kernel.resources
    if found.registers is None:
        return {}
    spilled = f"{found.registers} registers, {found.spill_bytes} bytes spilled"
    lines = {"uses": f"{spilled}, {found.shared_bytes} bytes of shared memory"}
    if (busy := kernel.occupancy) is not None:
        lines["occupancy"] = (
            f"instances on a multiprocessor at once: {busy.instances}, limited by {busy.limit}"
        )
    return lines


def _instructions(kernel: Kernel) -> dict[str, str]:
    found = kernel.resources.instructions
    if found is None:
        return {}
    classes = sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))
    lines = {"has": "instructions by class: " + ", ".join(f"{name} {count}" for name, count in classes)}
    if loops := kernel.resources.loops:
        each = ", ".join(str(loop.instructions) for loop in loops)
        lines["loops"] = f"instructions of a tile, for each loop: {each}"
    return lines


def excerpt(kernel: Kernel) -> list[str]:
    """The part of a source that is the call's own: the kernel's function, or of a long one what its mods became."""
    lines = kernel.source.splitlines()
    if kernel.target != "cpu":
        start = next(i for i, line in enumerate(lines) if line.startswith(f"def {kernel.name}("))
        return [line for line in lines[start:] if line.strip()]
    bodies = re.findall(
        r"^  const auto ((?:full|partial)_\w+) = (.*?)^  };", kernel.source, re.MULTILINE | re.DOTALL
    )
    found = []
    for name, body in bodies:
        if "TILE_ROWS" in body:
            found += [f"{name}:", *("    " + line for line in _statements(body))]
    return [*found, f"({len(lines)} lines in all, in Kernel.source and with --source-only)"]


def _statements(body: str) -> list[str]:
    """One pass of the loop over whole vectors; the shorter one at the end of a row is the same."""
    whole = body.partition("if(C10_UNLIKELY")[0]
    for long, short in _SHORTER:
        whole = re.sub(long, short, whole)
    return [line.strip() for line in whole.splitlines() if re.search(r"^ +(auto tmp|for|\w+\.store)", line)]


_SHORTER = (
    (r"static_cast<int64_t>\(([^()]*)\)", r"\1"),
    (r"at::vec::Vectorized<float>", "Vec"),
    (r"at::vec::Vectorized<int32_t>", "Ints"),
    (r"(?<=\d)L\b", ""),
)


def _indented(lines: Any, by: int) -> Iterator[str]:
    for line in lines:
        yield " " * by + line if line else ""
