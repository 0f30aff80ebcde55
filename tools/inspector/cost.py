"""The least time a call can take: its matrix products and memory traffic, by a device's peaks."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flex_inductor import errors
from flex_inductor.lowerings import cache_folder
from flex_inductor.op.flops import _backward_flops, _forward_flops

from .calls import CallFacts, TensorFacts
from .compiling import Lowered


class Device(NamedTuple):
    """Peaks as their makers give them, dense: operations a second by dtype, bytes a second of memory."""

    name: str
    flops: dict[str, float]
    bandwidth: float


# 1e12 operations a second in 16 bits and in fp32, with tensor cores where it uses them as tf32, and 1e9 bytes a second.
# The first of a target stands for it.
_PEAKS: dict[str, dict[str, tuple[float, float, float]]] = {
    "sm_80": {"A100": (312, 156, 2039)},
    "sm_86": {"RTX 3090": (71, 35.6, 936), "A10": (125, 62.5, 600)},
    "sm_89": {"RTX 4090": (165, 82.6, 1008), "L40S": (362, 183, 864)},
    "sm_90": {"H100": (989, 494, 3350), "H200": (989, 494, 4800)},
    "sm_100": {"B200": (2250, 1125, 8000)},
    "sm_120": {"RTX 5090": (210, 104.8, 1792)},
    "gfx942": {"MI300X": (1307, 163, 5300)},
    "gfx950": {"MI355X": (2517, 157, 8000)},
}
DEVICES = {
    name: Device(
        name, {"float16": half * 1e12, "bfloat16": half * 1e12, "float32": single * 1e12}, gigabytes * 1e9
    )
    for cards in _PEAKS.values()
    for name, (half, single, gigabytes) in cards.items()
}


class Cost(NamedTuple):
    """Of one direction of a call, over the tiles that its schedule visits."""

    flops: int  # of the matrix products
    bytes: int  # every tensor read or written once
    device: str
    seconds: float | None  # no kernel on the device can be faster; None for a dtype it has no peak for
    bound: str  # "compute" or "memory"
    measured: float | None = None  # seconds, where the configs of its kernels were timed

    @property
    def share(self) -> float | None:
        """The least possible time as a share of the measured one."""
        return None if self.seconds is None or not self.measured else self.seconds / self.measured


def cost_of(
    facts: CallFacts, direction: str, lowered: Lowered, target: str, device: str | None = None
) -> Cost:
    """Of one direction of a call, on a card of DEVICES or on this machine's CPU."""
    forward = direction == "forward"
    flops = int((_forward_flops if forward else _backward_flops)(*_arguments(facts.values, forward)))
    moved = _bytes(facts, forward)
    found = _device(device, target)
    times = [choice.milliseconds for choice in lowered.decision.kernels if device is None]
    measured = sum(times) / 1e3 if times and None not in times else None  # of kernels that were all timed
    dtype = facts.tensors[0].dtype
    if dtype not in found.flops:
        return Cost(flops, moved, found.name, None, "", measured)
    computing, moving = flops / found.flops[dtype], moved / found.bandwidth
    bound = "compute" if computing >= moving else "memory"
    return Cost(flops, moved, found.name, max(computing, moving), bound, measured)


def _arguments(values: Any, forward: bool) -> tuple:
    from flex_inductor.op import BackwardCall

    if forward:
        return values.wire()
    given = dict.fromkeys(BackwardCall._fields)
    known = {name: getattr(values, name) for name in values._fields if name in given}
    return tuple(BackwardCall(**{**given, **known}))


def _bytes(facts: CallFacts, forward: bool) -> int:
    def size(tensors: Iterable[TensorFacts]) -> int:
        known = (t for t in tensors if hasattr(torch, t.dtype))
        return sum(math.prod(t.shape) * getattr(torch, t.dtype).itemsize for t in known)

    query, _, value = facts.tensors
    out = replace(query, shape=(*query.shape[:3], value.shape[-1]))
    captured = size(capture for mod in (facts.score_mod, facts.mask_mod) if mod for capture in mod.captures)
    if forward:
        return size((*facts.tensors, out)) + captured
    # The output and its gradient are read for the rows' sums; gradients are written.
    return 2 * size((*facts.tensors, out)) + 4 * math.prod(query.shape[:3]) + 2 * captured


def _device(name: str | None, target: str) -> Device:
    if name is None:
        return this_cpu(torch.get_num_threads()) if target == "cpu" else _card(target)
    if name not in DEVICES:
        raise errors.bad_argument("cost: device", f"one of {', '.join(DEVICES)}", repr(name))
    return DEVICES[name]


def _card(target: str) -> Device:
    """This machine's card where it is one of the target, without peaks for a target that has none here."""
    here = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    names = sorted(_PEAKS.get(target, ()), key=lambda name: name not in here)
    return DEVICES[names[0]] if names else Device(target, {}, 0.0)


@cache
def this_cpu(threads: int) -> Device:
    """This machine with so many threads, measured once and kept in the cache folder."""
    from ..env import cpu_name

    path = cache_folder.folder() / "cpu_peaks.json"
    key = f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}, {threads} threads, torch {torch.__version__}"
    known = _kept(path)
    if not _are_peaks(known.get(key)):
        known[key] = _measured()
        with contextlib.suppress(OSError):  # measured again the next time
            path.parent.mkdir(parents=True, exist_ok=True)
            with cache_folder.replacing(path) as file:
                json.dump(known, file)
    peaks = known[key]
    return Device(f"this CPU ({threads} threads)", peaks["flops"], peaks["bandwidth"])


def _kept(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _are_peaks(found: Any) -> bool:
    try:
        numbers = [found["bandwidth"], *found["flops"].values()]
        return "float32" in found["flops"] and all(number > 0 for number in numbers)
    except (TypeError, LookupError, AttributeError):
        return False


def _measured() -> dict[str, Any]:
    """Where products of 16-bit numbers are slower than of fp32, kernels convert to fp32, so its peak counts."""
    flops: dict[str, float] = {}
    single = torch.randn(_SIZE, _SIZE)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        a = single.to(dtype)
        reached = 2 * _SIZE**3 / _best(partial(torch.matmul, a, a))
        flops[str(dtype).removeprefix("torch.")] = max(reached, flops.get("float32", 0.0))
    source = torch.empty(1 << 25)
    target = torch.empty_like(source)
    moved = 2 * source.numel() * source.element_size()
    return {"flops": flops, "bandwidth": moved / _best(lambda: target.copy_(source))}


_SIZE = 512  # of matrices: as fast as larger ones here, and quick where 16-bit products are slow


def _best(run: Callable[[], Any]) -> float:
    """The seconds of the fastest of some runs within a quarter of a second."""
    from torch.utils.benchmark import (
        Timer,  # with it come tools to compile extensions, which may write warnings
    )

    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    return min(timer.blocked_autorange(min_run_time=0.25).times)
