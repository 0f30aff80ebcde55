"""What this machine can do at best: products a second by instruction set, and bytes read from memory."""

from __future__ import annotations

import ctypes
import functools
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flex_inductor.errors import FlexRuntimeError

ROUNDS = 2_000_000
READ = 256 << 20  # bytes for each thread, more than caches hold
AHEAD = (0, 512, 1024, 2048, 4096, 8192)  # bytes between what is read and what is prefetched
EARLY = (0, 8, 32)  # pages between what is read and what the system looks up
PAGES_AT_ONCE = 4  # of keys, before as many of values


class Unit(NamedTuple):
    """Instructions that multiply, and what one round of their loop computes."""

    name: str
    loop: str
    needs: tuple[str, ...]  # flags in /proc/cpuinfo
    dtype: torch.dtype
    flops: int  # of a round
    capability: str  # torch's word for these instructions; it takes AMX for a part of AVX-512
    most: str  # and oneDNN's

    @property
    def environment(self) -> dict[str, str]:
        """Has a process that starts with it use no wider instructions."""
        mkl = self.capability.upper()
        return {
            "ATEN_CPU_CAPABILITY": self.capability,
            "ONEDNN_MAX_CPU_ISA": self.most,
            "MKL_ENABLE_INSTRUCTIONS": mkl,
        }


UNITS = (
    Unit("AVX2 fp32", "fma_256", ("avx2", "fma"), torch.float32, 12 * 8 * 2, "avx2", "AVX2"),
    Unit("AVX-512 fp32", "fma_512", ("avx512f",), torch.float32, 12 * 16 * 2, "avx512", "AVX512_CORE"),
    Unit(
        "AVX-512 bf16",
        "bf16_512",
        ("avx512_bf16",),
        torch.bfloat16,
        12 * 32 * 2,
        "avx512",
        "AVX512_CORE_BF16",
    ),
    Unit(
        "AMX bf16",
        "amx_bf16",
        ("amx_bf16",),
        torch.bfloat16,
        4 * 16 * 16 * 32 * 2,
        "avx512",
        "AVX512_CORE_AMX",
    ),
)


@functools.cache
def _loops() -> Any:
    from torch._inductor.codecache import CppCodeCache

    if not {"avx2", "fma"} <= flags():
        raise FlexRuntimeError("bench: the loops that measure this machine's best need x86 with AVX2.")
    return CppCodeCache.load((Path(__file__).parent / "loops.cpp").read_text())


@functools.cache
def flags() -> frozenset[str]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return frozenset(next((line.split() for line in lines if line.startswith("flags")), []))


def units() -> list[Unit]:
    """Those that this machine has."""
    return [unit for unit in UNITS if flags().issuperset(unit.needs)]


def peak(unit: Unit, rounds: int = 5) -> float:
    """Operations a second, of all threads together, at best."""
    loop = getattr(_loops(), unit.loop)
    threads = torch.get_num_threads()
    step = _in_threads(lambda _: loop(ctypes.c_int64(ROUNDS)))
    return threads * ROUNDS * unit.flops / min(_seconds(step) for _ in range(rounds))


@functools.cache
def gemm_size(dtype: torch.dtype) -> int:
    """The largest size whose product takes less than half a second: bf16 is slow without instructions for it."""
    for size in (2048, 1024, 512):
        smaller = gemm_step(dtype, size // 4)
        if min(_seconds(smaller) for _ in range(3)) * 4**3 < 0.5:
            return size
    return 256


def gemm_step(dtype: torch.dtype, size: int) -> Callable[[], Any]:
    """torch's product of two square matrices."""
    a, b = (torch.randn(size, size, dtype=dtype) for _ in range(2))
    return lambda: a @ b


def reading(rounds: int = 5) -> dict[str, float]:
    """Bytes a second that all threads together read from memory, at best, by how."""
    size = torch.get_num_threads() * READ
    return {how: size / min(_seconds(read) for _ in range(rounds + 1)) for how, read in ways(size).items()}


def reader(size: int) -> Callable[[], Any]:
    """The fastest way to read as many bytes."""
    found = ways(size)
    for read in found.values():
        read()
    return min(found.values(), key=lambda read: min(_seconds(read) for _ in range(3)))


def ways(size: int) -> dict[str, Callable[[], Any]]:
    """Ways in which all threads together read as many bytes."""
    threads = torch.get_num_threads()
    part = size // threads // 512 * 512
    source = torch.ones(threads * part // 4)
    target = torch.empty_like(source)
    sums = stream()

    def at(tensor: torch.Tensor, thread: int) -> int:
        return tensor.data_ptr() + thread * part

    def streamed(ahead: int, thread: int) -> float:
        return sums(at(source, thread), part, ahead)

    found: dict[str, Callable[[], Any]] = {
        "plain sum": source.sum,
        "memcpy, its reads": _in_threads(lambda i: ctypes.memmove(at(target, i), at(source, i), part)),
    }
    for ahead in AHEAD:
        how = f"stream, {ahead} bytes ahead" if ahead else "stream, no prefetch"
        found[how] = _in_threads(partial(streamed, ahead))
    return found


def stream() -> Callable[[int, int, int], float]:
    """Sums the floats at an address: bytes, a multiple of 512, and how many bytes ahead lines are fetched."""
    function = _loops().stream
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64), ctypes.c_float
    return function


def page_reader(keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor) -> Callable[[], Any]:
    """The fastest way to read pages of keys and of values in this order, some of each in turns, as decoding reads them.

    Args:
        keys: [pages, ...], whose pages have a multiple of 512 bytes.
        values: the same.
        pages: int32, all of which are read.
    """
    found = [
        _in_threads(partial(_read_pages, keys, values, pages, ahead, early))
        for ahead, early in itertools.product(AHEAD, EARLY)
    ]
    return min(found, key=lambda read: min(_seconds(read) for _ in range(3)))


def _read_pages(
    keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor, ahead: int, early: int, thread: int
) -> float:
    function = _loops().read_pages
    function.argtypes = (*[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 5)
    function.restype = ctypes.c_float
    own = pages.tensor_split(torch.get_num_threads())[thread]
    size = keys[0].nbytes
    return function(
        keys.data_ptr(), values.data_ptr(), own.data_ptr(), own.numel(), size, PAGES_AT_ONCE, ahead, early
    )


def _in_threads(work: Callable[[int], Any]) -> Callable[[], Any]:
    """Has as many threads as torch has run `work(its number)`."""
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads)
    return lambda: [*pool.map(work, range(threads))]


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
