"""Processes that form a group once, and then run whatever function they are told to, all at the same time."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from tests import cells

SECONDS = 120  # that ranks wait for each other


class Groups:
    """`run(function, *args)` calls function(group, *args) in so many ranks, and gives their results by rank.

    The function is found by its name; its arguments and results are pickled, so tensors go as they are. Each number of
    ranks has processes of its own: whoever makes further groups needs all of a world's.
    """

    def __init__(self, started: ExitStack):
        self.started = started
        self.pipes: dict[int, list[Any]] = {}

    def run(self, function: Callable, *args: Any, ranks: int = 4) -> list[Any]:
        if ranks not in self.pipes:
            self.pipes[ranks] = self.started.enter_context(_world(ranks))
        pipes = self.pipes[ranks]
        for pipe in pipes:
            pipe.send((function, args))
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(2 * SECONDS):
                del self.pipes[ranks]  # a late answer would be taken for one to the next call
                raise AssertionError(f"rank {rank} does not answer")
        replies = [pipe.recv() for pipe in pipes]
        failed = [f"rank {rank}: {text}" for rank, (fine, text) in enumerate(replies) if not fine]
        assert not failed, "\n".join(failed)
        for _, (_, found) in replies:
            cells.add(found)
        return [result for _, (result, _) in replies]


@contextmanager
def groups() -> Iterator[Groups]:
    with ExitStack() as started:
        yield Groups(started)


def _serve(rank: int, ranks: int, store: str, pipe: Any) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    cells.watch()
    torch.set_num_threads(1)
    torch.multiprocessing.set_sharing_strategy("file_system")
    dist.init_process_group(
        "gloo", f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=SECONDS)
    )
    while (told := pipe.recv()) is not None:
        function, args = told
        try:
            cells.begin()
            result = function(dist.group.WORLD, *args)
            pipe.send((True, (result, cells.served())))
        except Exception:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()


@contextmanager
def _world(ranks: int) -> Iterator[list[Any]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "flex_inductor.distributed.context"])
    with tempfile.TemporaryDirectory() as folder:
        pipes, started = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, ranks, f"{folder}/store", theirs), daemon=True
            )
            process.start()
            pipes.append(ours)
            started.append(process)
        yield pipes
        for pipe in pipes:
            with suppress(OSError):  # that rank is dead
                pipe.send(None)
        for process in started:
            process.join(SECONDS)
            process.kill()
