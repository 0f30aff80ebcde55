"""A model of time: what the executed instructions would take on a card. Nothing in it was measured.

One warp of average length is played. An instruction issues when its operands are there and its unit is free; between
barriers, branches and waits whichever is ready goes first, as an assembler would order them. Loads come from the L2
cache. Beside it the work of every unit is added up for all warps of a multiprocessor, and the bytes of all tensors for
memory. The longest of these times is the kernel's. The model does not see warps wait for each other at barriers, nor
how the assembler changes the instructions. There is no model of sm_100: its products and tensor memory work behind the
warps' backs, and their latencies were measured by few, for single shapes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from .ptx.counts import Count, Counts
from .ptx.text import Address, Instruction, Register, Vector


@dataclass(frozen=True)
class Card:
    name: str
    multiprocessors: int
    gigahertz: float
    gigabytes: float  # a second, of memory
    products: int  # of 16-bit numbers, a cycle and multiprocessor
    floats: int  # in fp32, a cycle and multiprocessor
    shared: int  # cycles until a load is there
    cached: int  # from the L2 cache


# Makers' figures. Latencies as in Luo et al., who compare these three cards (arXiv:2402.13499); not checked against it.
CARDS = {
    "sm_80": Card("A100", 108, 1.41, 2039, 1024, 64, 29, 262),
    "sm_89": Card("RTX 4090", 128, 2.52, 1008, 256, 128, 30, 273),
    "sm_90": Card("H100", 132, 1.83, 3350, 2048, 128, 29, 263),
}

QUARTERS = 4  # schedulers of a multiprocessor, each with its own units
L2_BYTES = 64  # a cycle and multiprocessor: assumed
# Operations a cycle and multiprocessor, and cycles until a result is there. The 4 cycles of dependent additions in fp32
# are of Abdelkhalik et al. (arXiv:2208.11174), who measured an A100; the other numbers are assumed to be of the order
# of theirs, and those of tensor cores of those of Sun et al. (arXiv:2206.02874).
LANES = {"integers": 64, "special functions": 16, "conversions": 64}
LATENCIES = {"integers": 4, "floats": 4, "special functions": 18, "conversions": 6, "tensor cores": 33}
OF_16_BITS = {"tf32": 0.5, "f64": 1 / 16, "e4m3": 2, "e5m2": 2, "s8": 2, "u8": 2}  # by kind of product

_SPECIAL = ("ex2", "lg2", "rcp", "sqrt", "rsqrt", "sin", "cos", "tanh", "div")
_FLOATS = ("f32", "f16", "bf16", "f16x2", "bf16x2", "f64")
_FREE = ("mov", "ld.param", "bra", "ret", "exit")  # the assembler renames registers; branches cost an issue
_ORDERED = (
    *("bar", "fence", "membar", "mbarrier", "bra", "ret", "exit", "griddepcontrol"),
    *(f"{of}.{what}" for of in ("cp.async", "cp.async.bulk", "wgmma") for what in ("commit", "wait")),
    "wgmma.fence",
)
_WITHOUT_RESULT = ("st", "red", "cp", "prefetch", "wgmma", *_ORDERED)
PASSES = 4  # through a loop: the last one finds what earlier ones left under way


@dataclass
class Time:
    """Of a launch, in cycles of a multiprocessor unless they are seconds."""

    card: Card
    bounds: dict[str, float]  # of each unit, of memory, and "latency": warps one after the other
    spent: list[float]  # by an average warp at each instruction: waiting for it and issuing it
    stalls: dict[str, float]  # by an average warp waiting, by what it waits for

    @property
    def bound(self) -> str:
        return max(self.bounds, key=lambda name: self.bounds[name])

    @property
    def seconds(self) -> float:
        return self.bounds[self.bound] / (self.card.gigahertz * 1e9)


def unit_of(name: str) -> str:
    """What executes an instruction; "" for those that take nothing."""
    family, *parts = name.split(".")
    if name.startswith(_FREE):
        return ""
    if family in ("mma", "wgmma", "tcgen05"):
        return "tensor cores"
    if family in ("ldmatrix", "stmatrix", "shfl"):
        return "shared memory"
    if family in ("ld", "st", "atom", "red"):
        return "shared memory" if any(p.startswith("shared") for p in parts) else "global memory"
    if family == "cp":
        return "global memory"
    if family in _SPECIAL:
        return "special functions"
    if family == "cvt":
        return "conversions"
    return "floats" if family not in ("setp", "selp", "min", "max") and parts[-1] in _FLOATS else "integers"


def work(card: Card, instruction: Instruction, count: Count) -> float:
    """Cycles of a multiprocessor's unit."""
    unit = unit_of(instruction.name)
    if unit == "tensor cores":
        parts = instruction.name.split(".")
        rate = next((OF_16_BITS[part] for part in parts if part in OF_16_BITS), 1)
        return count.products / (rate * card.products)
    if unit == "global memory":
        return count.sectors * 32 / L2_BYTES
    if unit == "shared memory":
        return count.wavefronts or count.warps
    return 32 * count.warps / (card.floats if unit == "floats" else LANES.get(unit, math.inf))


def time(counts: Counts, together: int) -> Time | None:
    """With room for so many blocks on a multiprocessor at once. None where no card's figures are known."""
    card = CARDS.get(counts.target.rstrip("a"))
    if card is None:
        return None
    warp = _Warp(card, counts)
    warps = counts.blocks * counts.warps
    share = math.ceil(counts.blocks / card.multiprocessors) / counts.blocks  # of the busiest multiprocessor
    bounds: dict[str, float] = defaultdict(float)
    spent, stalls = [], defaultdict[str, float](float)
    for i, (instruction, count) in enumerate(counts.instructions):
        bounds[unit_of(instruction.name)] += share * work(card, instruction, count)
        bounds["issue"] += share * count.warps / QUARTERS if unit_of(instruction.name) else 0
        waited, why, issued = warp.spent.get(i, (0.0, "", 0.0))
        executed = count.warps / warps
        spent.append(executed * (waited + issued))
        stalls[why] += executed * waited
    for nothing in (bounds, stalls):
        nothing.pop("", None)
    bounds["memory"] = counts.tensor_bytes / card.gigabytes * card.gigahertz
    rounds = math.ceil(counts.blocks / card.multiprocessors / max(together, 1))
    bounds["latency"] = rounds * sum(spent)
    return Time(card, dict(bounds), spent, dict(stalls))


class _Warp:
    """One that goes through all that was executed, in the text's order, and through loops a few times."""

    def __init__(self, card: Card, counts: Counts):
        self.card, self.counts = card, counts
        self.now = 0.0
        self.ready: dict[str, tuple[float, str]] = {}  # when a register is there, and which unit gives it
        self.free: dict[str, float] = defaultdict(float)  # units
        self.open: dict[str, float] = defaultdict(float)  # when what is not committed yet ends
        self.groups: dict[str, list[float]] = defaultdict(list)
        # At the last pass: waiting, for what, and issuing.
        self.spent: dict[int, tuple[float, str, float]] = {}
        starts = {*counts.kernel.labels.values()}
        window: list[int] = []
        for i in self._path():
            ordered = counts.instructions[i][0].name.startswith(_ORDERED)
            if (ordered or i in starts) and window:
                self._play(window)
                window = []
            if ordered:
                self._pass(i)
            else:
                window.append(i)
        self._play(window)

    def _path(self) -> Iterator[int]:
        left: dict[int, int] = {}
        i, code = 0, self.counts.instructions
        while i < len(code):
            count = code[i][1]
            if count.warps:
                yield i
            back = self._goes_back(i) if count.lanes else None
            if back is not None and left.setdefault(i, PASSES - 1):
                left[i] -= 1
                i = back
                continue
            left.pop(i, None)
            i += 1

    def _goes_back(self, i: int) -> int | None:
        """Where a branch begins another round. A loop around a wait is the wait."""
        instruction, _ = self.counts.instructions[i]
        if instruction.family != "bra":
            return None
        target = self.counts.kernel.labels[instruction.operands[0].name]  # type: ignore[union-attr]
        body = [other.name for other, _ in self.counts.instructions[target:i]]
        waits = len(body) < 8 and any(name.startswith("mbarrier.try_wait") for name in body)
        return target if target <= i and not waits else None

    def _play(self, window: list[int]) -> None:
        """Issue them, the first that can go first."""
        makers: dict[str, int] = {}
        users: dict[int, list[int]] = defaultdict(list)
        missing: dict[int, int] = defaultdict(int)
        for i in window:
            instruction = self.counts.instructions[i][0]
            for register in {*_read(instruction)} & makers.keys():
                users[makers[register]].append(i)
                missing[i] += 1
            makers |= dict.fromkeys(_written(instruction), i)
        able = [(self._operands(i)[0], i) for i in window if not missing[i]]
        heapify(able)
        while able:
            known, i = heappop(able)
            at = max(self._operands(i)[0], self.free[unit_of(self.counts.instructions[i][0].name)], self.now)
            if at > known and able and able[0][0] < at:
                heappush(able, (at, i))
                continue
            self._issue(i)
            for user in users[i]:
                missing[user] -= 1
                if not missing[user]:
                    heappush(able, (self._operands(user)[0], user))

    def _operands(self, i: int) -> tuple[float, str]:
        registers = _read(self.counts.instructions[i][0])
        return max((self.ready.get(register, (0.0, "")) for register in registers), default=(0.0, ""))

    def _issue(self, i: int) -> None:
        instruction, count = self.counts.instructions[i]
        unit, (known, why) = unit_of(instruction.name), self._operands(i)
        if not unit:
            self.ready |= dict.fromkeys(_written(instruction), (known, why))
            self.spent[i] = (0.0, "", 0.0)
            return
        own = unit not in ("shared memory", "global memory")
        busy = work(self.card, instruction, count) / count.warps * (QUARTERS if own else 1)
        at = max(self.now, known, self.free[unit])
        self.spent[i] = (at - self.now, why if known >= self.free[unit] else unit, 1.0)
        self.now, self.free[unit] = at + 1, at + busy
        memory = {"shared memory": self.card.shared, "global memory": self.card.cached}
        end = at + max(busy, {**LATENCIES, **memory}[unit])
        self.ready |= dict.fromkeys(_written(instruction), (end, unit))
        if instruction.family in ("cp", "wgmma"):
            kind = _kind(instruction)
            self.open[kind] = max(self.open[kind], end)
            if kind == "bulk" and instruction.loads_in_bulk:
                self.groups[kind].append(end)

    def _pass(self, i: int) -> None:
        """What nothing moves across: wait where it says so."""
        instruction = self.counts.instructions[i][0]
        kind, name, until, why = _kind(instruction), instruction.name, *self._operands(i)
        if "commit_group" in name:
            self.groups[kind].append(self.open.pop(kind, 0.0))
        elif ".wait" in name:
            left = int(getattr(instruction.operands[0], "bits", 0)) if instruction.operands else 0
            groups = self.groups[kind]
            done = [groups.pop(0) for _ in range(len(groups) - left)]
            until, why = max(done, default=0.0), "tensor cores" if kind == "wgmma" else "copies"
        elif "try_wait" in name and self.groups["bulk"]:
            until, why = self.groups["bulk"].pop(0), "copies"
        waited = max(until - self.now, 0.0)
        self.spent[i] = (waited, why if waited else "", 1.0)
        self.now += waited + 1


def _kind(instruction: Instruction) -> str:
    return "bulk" if "bulk" in instruction.name else instruction.family


def _written(instruction: Instruction) -> list[str]:
    if instruction.name.startswith(_WITHOUT_RESULT) or not instruction.operands:
        return []
    return _registers(instruction.operands[0])


def _read(instruction: Instruction) -> list[str]:
    first = 0 if instruction.name.startswith(_WITHOUT_RESULT) and instruction.family != "wgmma" else 1
    found = [name for operand in instruction.operands[first:] for name in _registers(operand)]
    return [*found, instruction.guard] if instruction.guard else found


def _registers(operand: object) -> list[str]:
    parts = operand.parts if isinstance(operand, (Vector, Address)) else (operand,)
    return [part.name for part in parts if isinstance(part, Register)]
