"""The config that a kernel is made with: the one asked for, the fastest when timed, or the first that fits."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import sympy
import torch
from torch._inductor import config as inductor_config
from torch._inductor.virtualized import V

from flex_inductor import compat, fingerprint

from . import winners
from .decision import Choice, config_text
from .problem import AttentionProblem, dtype_name

Config = TypeVar("Config", bound=Any)  # a NamedTuple of whole numbers

WORTH_CHANGING = 0.03  # timings that differ by less are the same


def demanded(problem: AttentionProblem, kernel: str) -> dict[str, int] | None:
    """A kernel's entry in the backend's option `configs`; {} if it is only named, None if not."""
    configs = dict(problem.options.configs)
    return dict(configs[kernel]) if kernel in configs else None


def refusal(
    problem: AttentionProblem,
    kernels: dict[str, Any],
    misfit: Callable[[str, Any], str | None],
) -> str | None:
    """Why a route cannot make the kernels that `configs` names, given its `kernels` and their default configs."""
    for kernel, fields in problem.options.configs:
        if kernel not in kernels:
            return f"has no kernel {kernel!r} to configure, only {', '.join(kernels) or 'none'}"
        config = kernels[kernel]
        unknown = [name for name, _ in fields if name not in config._fields]
        if unknown:
            return f"configs[{kernel!r}] has no {unknown[0]!r}, only {', '.join(config._fields)}"
        reason = misfit(kernel, config._replace(**dict(fields)))
        if reason:
            return f"configs[{kernel!r}]: {reason}"
    return None


def choose(
    problem: AttentionProblem,
    kernel: str,
    fitting: Sequence[Config],
    rejected: Sequence[tuple[Config, str]],
    device: str,
    time: Callable[[Sequence[Config]], list[float]] | None,
    estimate: Callable[[Any], str],
    more: Sequence[Config] = (),
) -> tuple[list[Config], Choice]:
    """One of `fitting`, best first, unless another is demanded, and the record of it for the decision.

    `time` gives seconds, and is called when tuning; without it all of `fitting` and `more` are returned, to be timed
    later. `estimate` says what a config takes.
    """
    left_out = tuple(_line(config, reason) for config, reason in rejected)
    others: tuple[tuple[str, str], ...] = ()
    times: dict[Config, float] = {}
    wanted = demanded(problem, kernel)
    if wanted is not None:
        chosen, why = [fitting[0]._replace(**wanted)], "asked for"
    elif not inductor_config.max_autotune or len(fitting) == 1:
        chosen, why = [fitting[0]], f"first of {len(fitting)} that fit; not timed"
        others = (*(_line(c, f"not timed; {estimate(c)}") for c in fitting[1:]), *left_out)
    else:
        key = problem_class(problem, kernel)
        chosen, why, times = _tuned(key, device, [*fitting, *more], time)
        others = tuple(
            _line(c, _text(times[c]) if c in times else f"not timed; {estimate(c)}")
            for c in fitting
            if c != chosen[0]
        )
        others += left_out
    return chosen, Choice(kernel, chosen[0]._asdict(), why, others, times.get(chosen[0]))


def _tuned(
    key: str, device: str, fitting: Sequence[Config], time: Callable[[Sequence[Config]], list[float]] | None
) -> tuple[list[Config], str, dict[Config, float]]:
    """The winner, why it is chosen, and the milliseconds that each config took."""
    known = winners.find(key, device)
    by_sizes = {tuple(config._asdict().items()): config for config in fitting}
    why = "fastest when timed before"
    if known is None or tuple(known.config.items()) not in by_sizes:
        if time is None:
            return [*fitting], f"first of {len(fitting)} that fit; to be timed at the first call", {}
        try:
            seconds = time(fitting)
        except RuntimeError as error:  # the mod fails on made-up inputs
            return [fitting[0]], f"first that fits; not timed: {error}", {}
        known = _winner(key, device, fitting, seconds)
        winners.keep(known)
        why = "fastest when timed"
    config = by_sizes[tuple(known.config.items())]
    timed = ((by_sizes.get(tuple(sizes.items())), ms) for sizes, ms in known.times_ms)
    times = {each: ms for each, ms in timed if each is not None}
    return [config], f"{why}: {_text(times[config])}" if config in times else why, times


def _text(milliseconds: float) -> str:
    return f"{milliseconds:.3g} ms"


def _winner(key: str, device: str, fitting: Sequence[Config], seconds: Sequence[float]) -> winners.Winner:
    """The fastest, or the first where that is as good as the fastest."""
    best = min(range(len(fitting)), key=seconds.__getitem__)
    best = 0 if seconds[0] <= seconds[best] * (1 + WORTH_CHANGING) else best
    times = [(config._asdict(), round(s * 1e3, 4)) for config, s in zip(fitting, seconds, strict=True)]
    return winners.Winner(key, device, fingerprint.FINGERPRINT, fitting[best]._asdict(), times)


def _line(config: Any, remark: str) -> tuple[str, str]:
    return config_text(config._asdict()), remark


_TIMED_APART = (
    "scattered",
    "dropout",
    "sinks",
    "partial",
    "kv_scales",
    "grad_entropy",
)  # inputs that change kernels


def problem_class(problem: AttentionProblem, kernel: str) -> str:
    """What decides the fastest config, in a line: lengths to a power of two, mods by a hash of their text."""
    p = problem
    dims = f"D{p.D}/{p.V} " + " ".join(f"{name}{_bucket(getattr(p, name))}" for name in ("B", "M", "N"))
    blocks = "" if p.blocks is None else f" {p.schedule} of {p.blocks[0]}x{p.blocks[1]}"
    blocks += "" if p.map_tiles is None else " mapped " + ":".join(str(_bucket(n)) for n in p.map_tiles)
    more = "".join(f" {name}" for name in _TIMED_APART if name in p.inputs)
    more += "" if p.aligned else " unaligned"
    more += " tf32" if p.dtype == torch.float32 and p.device.type == "cuda" and compat.allows_tf32() else ""
    visited = "".join(f" {share:.3g}" for share in p.options.visited or ())
    outputs = ",".join(p.outputs)
    mods = hashlib.sha256(p.programs.text().encode()).hexdigest()[:16]
    dtypes = dict.fromkeys((p.dtype, p.kv_dtype))
    dtype = "/".join(map(dtype_name, dtypes))
    return f"{kernel} {dtype} H{p.H}:{p.K} {dims}{blocks}{more}{visited} [{outputs}] mods {mods}"


def size_hint(size: Any) -> int:
    """A size, or its approximate value if it changes."""
    if isinstance(size, int | sympy.Integer):
        return int(size)
    return int(V.graph.sizevars.optimization_hint(sympy.sympify(size), fallback=1024))


def _bucket(size: Any) -> int:
    return 1 << max(size_hint(size) - 1, 0).bit_length()
