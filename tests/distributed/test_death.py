"""A rank that dies in the middle of a call: the others end with an error that names what they waited for."""

import os
import signal
import time

import pytest

from flex_inductor.distributed import exchange, ring
from tests.distributed.cases import Case, on_rank
from tests.distributed.group import groups

RANKS, DYING = 3, 1


def dies(group, method):
    """One rank is killed where it waits for what the others send; these give back how they ended."""

    def killed(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    if group.rank() == DYING:
        ring._Way.end, exchange.waited = killed, killed
    try:
        on_rank(group, Case("none", heads=6, kv_heads=3, length=96), method, "contiguous")
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


@pytest.mark.parametrize("method", ["ring", "cast"])
def test_the_others_end(method):
    with groups() as own:
        assert own.run(rank_of, ranks=RANKS) == [*range(RANKS)]
        pipes = own.pipes[RANKS]
        began = time.monotonic()
        for pipe in pipes:
            pipe.send((dies, (method,)))
        for rank, pipe in enumerate(pipes):
            if rank == DYING:
                with pytest.raises(EOFError):
                    pipe.recv()
                continue
            assert pipe.poll(60)
            fine, ((kind, text), _) = pipe.recv()
            assert fine and kind == "FlexRuntimeError" and "a rank is gone" in text, (kind, text)
        assert time.monotonic() - began < 60


def rank_of(group):
    return group.rank()
