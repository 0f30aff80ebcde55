"""Processes that form a group once, and then run whatever function they are told to, all at the same time."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SECONDS = 120  # that ranks wait for each other


class Group:
    """`run(function, *args)` calls function(group, *args) in the first ranks, and gives their results by rank.

    The function is found by its name; its arguments and results are pickled, so tensors go as they are.
    """

    def __init__(self, pipes: list[Any]):
        self.pipes = pipes

    def run(self, function: Callable, *args: Any, ranks: int | None = None) -> list[Any]:
        ranks = len(self.pipes) if ranks is None else ranks
        for pipe in self.pipes[:ranks]:
            pipe.send((function, args, ranks))
        replies = [pipe.recv() for pipe in self.pipes[:ranks]]
        failed = [f"rank {rank}: {text}" for rank, (fine, text) in enumerate(replies) if not fine]
        assert not failed, "\n".join(failed)
        return [result for _, result in replies]


def _serve(rank: int, ranks: int, store: str, pipe: Any) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.multiprocessing.set_sharing_strategy("file_system")
    dist.init_process_group(
        "gloo", f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=SECONDS)
    )
    groups = {n: dist.new_group(range(n)) for n in (1, 2, 4, 8) if n <= ranks}
    while (told := pipe.recv()) is not None:
        function, args, count = told
        try:
            pipe.send((True, function(groups[count], *args)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()


@contextmanager
def processes(ranks: int) -> Iterator[Group]:
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
        yield Group(pipes)
        for pipe, process in zip(pipes, started, strict=True):
            pipe.send(None)
            process.join()
