"""`flex-inductor profile`: the kernels of a function, executed without a card and counted."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .options import file
from .users_code import Refused, add_inputs, called, running

TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
COLUMNS = ("instructions", "sectors a request", "ideal", "conflicts", "read", "written", "products", "cycles")
MODEL = (
    "Time and cycles are a model's, by published latencies: cycles of an average warp, waiting and issuing. "
    "Nothing was measured on a card."
)


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "profile",
        help="execute a function's kernels without a card, and count",
        description=(
            "Runs a function, and its backward where tensors require a gradient, with the kernels that a card would "
            "get, executed instruction by instruction on this CPU. Prints what they did. Without --input the function "
            "takes nothing and returns (fn, args); with --input it is itself called with those tensors."
        ),
        epilog="Example: flex-inductor profile train.py:attend --input q=1x2x256x64:bf16:grad --target sm_90",
    )
    add = parser.add_argument
    add("function", help="path/to/script.py:function or module:function")
    add_inputs(parser, "q=1x2x256x64:bf16")
    add("--target", choices=TARGETS, required=True, help="the card's architecture")
    add("--json", **file("write the counts as JSON"))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    fn, args, kwargs = called(arguments.function, arguments.input)
    with running(arguments.function), contextlib.redirect_stderr(io.StringIO()):
        kernels = profile(fn, args, kwargs, arguments.target, not arguments.no_backward)
    if not kernels:
        raise Refused(f"{arguments.function} launches no kernels")
    if arguments.json:
        with open(arguments.json, "w") as to:
            note = MODEL if any(kernel["model"] for kernel in kernels) else ""
            json.dump({"target": arguments.target, "note": note, "kernels": kernels}, to, indent=1)
        print(f"written to {arguments.json}")
    else:
        _print(kernels)
    return 0


def profile(
    fn: Callable, args: Sequence[Any], kwargs: dict[str, Any], target: str, backward: bool = True
) -> list[dict[str, Any]]:
    """Of every kernel, in the order of their first launches, what it did in all of them."""
    import torch
    from torch.utils._pytree import tree_iter

    from . import execute
    from .inspector.lines import noted

    launches: list[execute.Launch] = []
    torch._dynamo.reset()
    with noted() as notes, torch.set_grad_enabled(backward and torch.is_grad_enabled()):
        results = execute.compiled(fn, target, launches)(*args, **kwargs)
        wanted = [t for t in tree_iter(results) if isinstance(t, torch.Tensor) and t.requires_grad]
        if wanted:
            torch.autograd.backward(wanted, [torch.ones_like(t) for t in wanted])
    torch._dynamo.reset()
    found: dict[tuple[str, str], list[execute.Launch]] = {}
    for launch in launches:
        found.setdefault((launch.kernel.name, launch.kernel.source), []).append(launch)
    return [_facts(same, target, notes.rows(same[0].kernel.source)) for same in found.values()]


def _facts(launches: Sequence[Any], target: str, rows: dict[int, str]) -> dict[str, Any]:
    from .ptx.counts import Count
    from .resources import occupancy
    from .scoreboard import time

    first = launches[0]
    busy = occupancy(first.resources, first.counts.warps, target)

    def line(instruction: Any) -> str:
        row = instruction.within.rpartition(":")[2]
        return rows.get(int(row), "") if row else ""

    times = [time(launch.counts, busy.instances if busy else 1) for launch in launches]
    tables: dict[str, dict[str, Any]] = {}
    for name, key in (("families", lambda i: i.family), ("lines", line)):
        counts: dict[str, Count] = {}
        cycles: dict[str, float] = {}
        for launch, spent in zip(launches, times, strict=True):
            for of, count in launch.counts.by(key).items():
                counts[of] = counts.get(of, Count()) + count
            for (instruction, _), cycle in zip(
                launch.counts.instructions, spent.spent if spent else [], strict=spent is not None
            ):
                cycles[key(instruction)] = cycles.get(key(instruction), 0.0) + cycle
        counts.pop("", None)  # lines that are of no mod
        ordered = sorted(counts, key=lambda of: -counts[of].warps)
        tables[name] = {of: _row(counts[of], cycles.get(of)) for of in ordered if counts[of].warps}
    total = sum((launch.counts.total for launch in launches), Count())
    model = None
    if times[0] is not None:
        slowest = times[0]
        waits = sorted(slowest.stalls.items(), key=lambda pair: -pair[1])
        model = {
            "card": slowest.card.name,
            "seconds": sum(each.seconds for each in times if each),
            "bound": slowest.bound,
            "bounds": slowest.bounds,
            "stalls": {name: cycles for name, cycles in waits if cycles},
        }
    return {
        "name": first.kernel.name,
        "launches": len(launches),
        "blocks": first.counts.blocks,
        "config": first.config,
        "registers": first.resources.registers,
        "spill_bytes": first.resources.spill_bytes,
        "shared_bytes": first.resources.shared_bytes,
        "total": _row(total, sum(map(sum, (each.spent for each in times if each))) if times[0] else None),
        **tables,
        "model": model,
    }


def _row(count: Any, cycles: float | None) -> dict[str, Any]:
    return {
        "instructions": count.warps,
        "sectors a request": count.sectors / count.requests if count.requests else None,
        "ideal": count.fewest_sectors / count.requests if count.requests else None,
        "conflicts": count.conflicts,
        "read": count.read_bytes,
        "written": count.written_bytes,
        "products": count.products,
        "cycles": cycles,
    }


def _print(kernels: Sequence[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(width=132, highlight=False)  # also into files
    for kernel in kernels:
        for text in _head(kernel):
            console.print(text, markup=False, soft_wrap=True)
        table = Table(box=box.SIMPLE, show_edge=False)
        table.add_column("")
        for name in COLUMNS:
            table.add_column(name, justify="right", no_wrap=True)
        table.add_row("all", *_cells(kernel["total"]), end_section=True)
        for name, row in kernel["families"].items():
            table.add_row(name, *_cells(row))
        if kernel["lines"]:
            table.add_section()
        for name, row in kernel["lines"].items():
            table.add_row(name, *_cells(row))
        console.print(table, "")
    if any(kernel["model"] for kernel in kernels):
        console.print(MODEL, markup=False)


def _head(kernel: dict[str, Any]) -> Iterator[str]:
    from .scoreboard import CARDS

    launches = f", {kernel['launches']} launches" if kernel["launches"] > 1 else ""
    yield f"== {kernel['name']}: {kernel['blocks']} blocks{launches}"
    config = ", ".join(f"{name} {value}" for name, value in kernel["config"].items())
    yield f"   config  {config}"
    spilled = f"{kernel['registers']} registers, {kernel['spill_bytes']} bytes spilled"
    yield f"   uses    {spilled}, {kernel['shared_bytes']} bytes of shared memory"
    model = kernel["model"]
    if model is None:
        yield f"   time    none: there are models of {', '.join(CARDS)} alone"
    else:
        seconds = f"{model['seconds'] * 1e6:.3g} us on {model['card']}"
        yield f"   time    a model: {seconds}, bound by {model['bound']}"
        waits = ", ".join(f"{name} {cycles:.0f}" for name, cycles in model["stalls"].items())
        yield f"   waits   cycles of an average warp: {waits or 'none'}"


def _cells(row: dict[str, Any]) -> list[str]:
    def cell(value: Any) -> str:
        if not value:
            return ""
        return (
            f"{value:.2f}".rstrip("0").rstrip(".")
            if isinstance(value, float) and value < 100
            else f"{value:,.0f}"
        )

    return [cell(row[name]) for name in COLUMNS]
