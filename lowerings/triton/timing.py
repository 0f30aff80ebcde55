"""Keeps the config that Inductor's autotuner finds fastest, at a kernel's first call, for other processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from flex_inductor import fingerprint

from .. import winners
from .configs import launched_with


class _Keep(NamedTuple):
    """Called by the autotuner with the winner. It is pickled with the kernel."""

    problem: str
    device: str
    before: Callable | None  # what Inductor does with the winner itself

    def __call__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        if self.before is not None:
            self.before(config, *args, **kwargs)
        found = launched_with(config)._asdict()
        winners.keep(winners.Winner(self.problem, self.device, fingerprint.FINGERPRINT, found, []))


def keep_winner(problem: str, device: str) -> Callable[[Any], Any]:
    """Decorates a kernel of generated code that has several configs."""

    def decorate(kernel: Any) -> Any:
        kernel.save_cache_hook = _Keep(problem, device, getattr(kernel, "save_cache_hook", None))
        return kernel

    return decorate
