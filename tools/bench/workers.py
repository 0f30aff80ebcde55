"""Runs functions in processes of their own: one that crashes or takes too long loses only its own result."""

from __future__ import annotations

import math
import multiprocessing
import queue
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from .harness import in_one_line


class Failed(Exception):
    """A job that gave no result, and why in one line."""


class Late(Failed):
    """A job that had not begun or ended by the deadline."""


class Deadline:
    def __init__(self, minutes: float = math.inf):
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


class Workers:
    """`count` processes, started when they are first needed. After a failure a new one takes the place of the old."""

    def __init__(self, count: int = 1):
        self.count = count
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._all = [_Worker() for _ in range(count)]
        for worker in self._all:
            self._idle.put(worker)

    def run(self, job: Job, deadline: Deadline | None = None) -> Any:
        """What the job returns. Raises Failed."""
        worker = self._idle.get()
        try:
            return worker.run(job, deadline or Deadline())
        finally:
            self._idle.put(worker)

    def run_all(self, jobs: Iterable[Job], deadline: Deadline) -> Iterator[tuple[Job, Any]]:
        """Each job with its result or its Failed, as they come in."""
        with ThreadPoolExecutor(self.count) as threads:
            waiting = {threads.submit(self.run, job, deadline): job for job in jobs}
            for done in as_completed(waiting):
                error = done.exception()
                if error is not None and not isinstance(error, Failed):
                    raise error
                yield waiting[done], error or done.result()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: Any) -> None:
        for worker in self._all:
            worker.stop()


class _Worker:
    def __init__(self) -> None:
        self.process: Any = None
        self.pipe: Any = None

    def run(self, job: Job, deadline: Deadline) -> Any:
        if deadline.left <= 0:
            raise Late("no time left")
        if self.process is None:
            self._start()
        try:
            self.pipe.send((job.function, job.arguments))
            if not self.pipe.poll(min(job.limit, max(deadline.left, 0))):
                late = Late("no time left") if deadline.left <= 0 else None
                raise late or Failed(f"took longer than {job.limit:g} s")
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


def _serve(pipe: Connection) -> None:
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, function(*arguments))
        except Exception as error:
            answer = (False, in_one_line(error))
        pipe.send(answer)
