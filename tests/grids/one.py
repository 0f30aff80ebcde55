"""Cases of one group, one after the other."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator

import torch

from flex_inductor import set_eager_kernels
from flex_inductor.backend import flex_inductor
from flex_inductor.errors import own_error_in

from .numbers import Numbers
from .suite import Group, hashed
from .work import NotThere, check

# How a group runs, and how many of eight do: compiled; eagerly, in chunks; eagerly, each class of calls in a kernel.
# Dynamo takes a second for each combination of a cache's arguments, and dropout's words take seconds of a call in chunks.
# A window is drawn for each call, and a kernel of its own would be compiled for each.
WAYS = {"compiled": 6, "chunks": 2}
WAYS_OF_CACHES = {"compiled": 1, "chunks": 1, "kernels": 6}
WAYS_OF_WINDOWED_CACHES = {"compiled": 1, "chunks": 7}
WAYS_OF_DROPOUT = {"compiled": 8}

# What is refused by name, as its message begins.
REFUSALS = ("cache_leftpad: expected none with block_table",)


def way_of(group: Group) -> str:
    case = group.suite.case(group.cases()[0])
    ways = WAYS_OF_DROPOUT if case.get("dropout_p") else WAYS
    if group.suite.door == "cached":
        ways = WAYS_OF_WINDOWED_CACHES if case.get("local") else WAYS_OF_CACHES
    return random.Random(hashed("way", group.suite.name, group.number)).choices([*ways], [*ways.values()])[0]


def outcomes(group: Group, numbers: list[int]) -> Iterator[tuple[str, str]]:
    """For each case "ok", "refused" or "failed", and why."""
    door = importlib.import_module(f"{__package__}.{group.suite.door}")
    torch._dynamo.reset()
    attend: Callable | None = None
    way = way_of(group)
    set_eager_kernels("always" if way == "kernels" else "never")
    for number in numbers:
        case = group.suite.case(number)
        try:
            if attend is None:
                call = door.attend(group.suite.constants(case))
                attend = compiled(call) if way == "compiled" else call
            draws = Numbers(f"{group.suite.name}-{number}")
            problems = check(attend, door.work(case, draws), draws)
            yield ("failed", "; ".join(problems)) if problems else ("ok", "")
        except NotThere as lacking:
            yield "refused", str(lacking)
        except Exception as error:
            refusal = own_error_in(error)
            reason = str(refusal or error).strip().split("\n")[0]
            if any(reason.startswith(known) for known in REFUSALS):
                attend = call  # the others are refused too: that takes no compiler
                yield "refused", reason
            else:
                yield "failed", f"{type(error).__name__}: {reason}"


def compiled(call: Callable) -> Callable:
    return torch.compile(call, backend=flex_inductor, fullgraph=True, dynamic=True)


def settings() -> None:
    """Of a process: one thread, a graph for any sizes, and as many graphs as cases need."""
    torch.set_num_threads(1)
    torch.fx.experimental._config.use_duck_shape = False  # else equal sizes are taken for the same one
    torch._dynamo.config.recompile_limit = 10_000
    torch._dynamo.config.accumulated_recompile_limit = 10_000
