"""The first call of a kernel of generated code: it chooses the config.

The fastest config is kept. If one cannot be compiled, or the card lacks shared memory or registers for it, the next one
that should fit is tried. Only compiling shows how many registers a config takes. If it needs much local memory, the
next two are compiled as well, and the one that needs least is taken. Only compiling shows layouts, too: if they rule
out additions in place, Triton's own replace them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch._inductor.runtime.triton_compat import PTXASError
from torch._inductor.runtime.triton_heuristics import CachingAutotuner, config_from_dict, config_to_dict

from flex_inductor import fingerprint

from .. import errors, winners
from . import assembler
from .configs import describe, launched_with
from .device import known_device
from .in_place import adds_twice

log = logging.getLogger("flex_inductor")

BETTER = 2  # configs to try if the first takes more


def or_next(
    kind: str,
    spare: Sequence[dict[str, int]],
    asked_for: bool,
    timed_as: tuple[str, str] | None = None,
) -> Callable[[Any], Any]:
    """Decorates a kernel of generated code: if its config cannot run, its autotuner tries the `spare` ones in order.

    A config that takes local memory is also compared with the next ones, unless the user `asked_for` it. Of several
    configs the fastest is kept for this class of problems and device.
    """

    def decorate(kernel: Any) -> Any:
        if type(kernel) is CachingAutotuner:
            kernel.__class__ = WithSpare
        elif isinstance(kernel, CachingAutotuner):  # one for debugging, which does not look at layouts
            for config in kernel.configs:
                config.kwargs.update(dict.fromkeys({"COALESCED"} & config.kwargs.keys(), 1))
        kernel.kind, kernel.spare, kernel.tried = kind, [*spare], []
        kernel.better = [] if asked_for else [*spare[:BETTER]]
        if timed_as is not None:
            kernel.save_cache_hook = _Keep(*timed_as, getattr(kernel, "save_cache_hook", None))
        return kernel

    return decorate


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


class CompilerGaveUp(PTXASError):
    """A pass of Triton failed. Inductor tries the next config after errors of the assembler, but not after this."""

    def __str__(self) -> str:
        return self.args[0]


class WithSpare(CachingAutotuner):
    """Inductor's autotuner, which gives up when none of its configs can be compiled or loaded."""

    kind: str
    spare: list[dict[str, int]]
    better: list[dict[str, int]]
    tried: list[tuple[str, str]]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        # Descriptors take memory from Triton's allocator, which each thread has to set. Inductor sets it only at a
        # kernel's first call.
        if "DESCRIPTORS" in self.inductor_meta["declared_constexpr_names"]:
            triton.set_allocator(self._scratch)
        return super().run(*args, **kwargs)

    def _scratch(self, size: int, alignment: int, stream: int | None) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int8, device=self.device_props.type)

    def _precompile_config(self, config: Any) -> Any:
        if self.device_props.type == "cuda":
            assembler.use_newest()
        try:
            result = super()._precompile_config(config)
        except RuntimeError as error:
            if type(error) is not RuntimeError:
                raise
            raise CompilerGaveUp(str(error)) from error
        if adds_twice(config.kwargs, result.kernel):
            log.info("%s: %s: threads share scores, additions are coalesced", self.kind, _text(config))
            plain = {**config_to_dict(config), "COALESCED": 1}
            return self._precompile_config(config_from_dict(plain))
        return result

    def _precompile_worker(self) -> None:
        while True:
            trying = [*(self.configs or ())]
            try:
                return super()._precompile_worker()
            except RuntimeError as error:
                self._next(trying, error)

    def _make_launchers(self) -> None:
        self._launch_what_fits()
        best = self.launchers, self.compile_results
        few = known_device(_arch(self.device_props.cc)).few_spilled
        while len(self.launchers) == 1 and self.better and _local_bytes(best[0][0]) > few:
            config = config_from_dict(self.better.pop(0))
            log.info(
                "%s: %s: %d bytes of local memory; next: %s",
                self.kind,
                _text(best[0][0].config),
                _local_bytes(best[0][0]),
                _text(config),
            )
            other = self._loaded(config)
            if other[0]:
                best = min(best, other, key=lambda it: _local_bytes(it[0][0]))
            self.launchers, self.compile_results = best

    def _loaded(self, config: Any) -> tuple[list[Any], list[Any]]:
        """The launcher and the binary of another config, if it can run."""
        self.launchers, self.compile_results, self.configs = [], [], [config]
        self._load_source()
        try:
            super()._precompile_worker()
            super()._make_launchers()
        except RuntimeError as error:
            log.info("%s: %s: %s", self.kind, _text(config), error)
            return [], []
        return self.launchers, self.compile_results

    def _launch_what_fits(self) -> None:
        while True:
            trying = [result.config for result in self.compile_results]
            try:
                return super()._make_launchers()
            except RuntimeError as error:
                self._next(trying, error)
                self._load_source()
                self._precompile_worker()

    def _next(self, trying: Sequence[Any], error: RuntimeError) -> None:
        """Go on to the next config."""
        if not str(error).startswith("No valid triton configs"):
            raise error
        reason = str(error).removeprefix("No valid triton configs. ").partition("\n")[0]
        self.tried += [(_text(config), reason) for config in trying]
        if not self.spare:
            raise errors.out_of_resources(self.kind, self.tried) from error
        self.compile_results, self.configs = [], [config_from_dict(self.spare.pop(0))]
        log.warning("%s: %s: %s; next: %s", self.kind, *self.tried[-1], _text(self.configs[0]))

    def _load_source(self) -> None:
        """A kernel that another process compiled comes without its function: load it."""
        if self.fn.fn is None:
            self.fn = self._reload_kernel().fn


def _local_bytes(launcher: Any) -> int:
    return 4 * (launcher.n_spills or 0)


def _arch(cc: Any) -> str:
    """From 90 to sm_90; AMD's are named as they are."""
    return f"sm_{cc}" if isinstance(cc, int) else str(cc)


def _text(config: Any) -> str:
    return describe(launched_with(config))
