"""Cases of one group, one after the other."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator

import torch

from flex_inductor import set_eager_kernels
from flex_inductor.backend import flex_inductor
from flex_inductor.errors import FlexError, own_error_in

from .numbers import Numbers
from .suite import Group, hashed
from .work import NotThere, check

# Of so many groups one runs without torch.compile, in chunks. Dropout's random words take seconds of that.
EAGER, EAGER_WITH_DROPOUT = 4, 32

# What is refused by name, as its message begins.
REFUSALS = (
    "cache_batch_idx: expected none with block_table",
    "cache_leftpad: expected none with block_table",
)


def is_eager(group: Group) -> bool:
    case = group.suite.case(group.cases()[0])
    one_of = EAGER_WITH_DROPOUT if case.get("dropout_p") else EAGER
    return hashed("eager", group.suite.name, group.number) % one_of == 0


def outcomes(group: Group, numbers: list[int]) -> Iterator[tuple[str, str]]:
    """For each case "ok", "refused" or "failed", and why."""
    door = importlib.import_module(f"{__package__}.{group.suite.door}")
    torch._dynamo.reset()
    attend: Callable | None = None
    eager = is_eager(group)
    for number in numbers:
        case = group.suite.case(number)
        try:
            if attend is None:
                call = door.attend(group.suite.constants(case))
                attend = call if eager else compiled(call)
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
    set_eager_kernels("never")
    torch.fx.experimental._config.use_duck_shape = False  # else equal sizes are taken for the same one
    torch._dynamo.config.recompile_limit = 10_000
    torch._dynamo.config.accumulated_recompile_limit = 10_000
