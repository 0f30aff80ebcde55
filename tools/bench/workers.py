"""Runs functions in processes of their own: one that crashes or takes too long loses only its own result."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import queue
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from .harness import in_one_line

GRACE = 10.0  # seconds until a process that does not end by itself is killed


class Failed(Exception):
    """A job that gave no result, and why in one line."""


class Late(Failed):
    """A job that had not begun or ended by the deadline."""


class Deadline:
    def __init__(self, minutes: float):
        self.end = time.monotonic() + minutes * 60

    @property
    def left(self) -> float:
        """Seconds; below 0 once it has passed."""
        return self.end - time.monotonic()


class Job(NamedTuple):
    """`function(*arguments)`, a function that other processes find by its name, and the seconds it may take."""

    function: Callable
    arguments: tuple = ()
    limit: float = 3600.0


class Worker:
    """A process, started when it is first needed. After a failure a new one takes its place."""

    process: Any = None
    pipe: Any = None

    def run(self, job: Job, deadline: Deadline | None = None) -> Any:
        """What the job returns. Raises Failed."""
        left = math.inf if deadline is None else deadline.left
        if left <= 0:
            raise Late("no time left")
        try:
            if self.process is None:
                self._start()
            self.pipe.send((job.function, job.arguments))
            if not self.pipe.poll(min(job.limit, left)):
                raise (
                    Late("no time left") if left < job.limit else Failed(f"took longer than {job.limit:g} s")
                )
            done, answer = self.pipe.recv()
            if not done:
                raise Failed(answer)
        except Failed:
            self.stop()  # after an error on a card the process may be unable to use it
            raise
        except (EOFError, ConnectionError):
            self.process.join()
            code = self.process.exitcode
            self.stop()
            raise Failed(f"its process ended with exit code {code}") from None
        return answer

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other,), daemon=True)
        self.process.start()
        other.close()

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.pipe.close()
            self.process = None

    def end(self) -> None:
        """Lets the process end by itself: a killed one leaves semaphores behind, which Python warns of."""
        if self.process is not None:
            self.pipe.close()
            self.process.join(GRACE)
        self.stop()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: Any) -> None:
        self.end()


def run_all(workers: Sequence[Worker], jobs: Iterable[Job], deadline: Deadline) -> Iterator[tuple[Job, Any]]:
    """Each job with its result or its Failed, as they come in."""
    idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def answer(job: Job) -> Any:
        worker = idle.get()
        try:
            return worker.run(job, deadline)
        except Failed as failure:
            return failure
        finally:
            idle.put(worker)

    with ThreadPoolExecutor(len(workers)) as threads:
        waiting = {threads.submit(answer, job): job for job in jobs}
        for done in as_completed(waiting):
            yield waiting[done], done.result()


def _serve(pipe: Connection) -> None:
    with contextlib.suppress(EOFError):
        while True:
            function, arguments = pipe.recv()
            try:
                answer = (True, function(*arguments))
            except Exception as error:
                answer = (False, in_one_line(error))
            pipe.send(answer)
