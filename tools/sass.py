"""Machine code, as nvdisasm and Triton's compiler for AMD print it: instructions, and the loops that hold the work."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

TENSOR_CORE = r"[HIDBQ]MMA|[HIDBQ]GMMA|OMMA|UTC\w*MMA|v_s?mfma|v_wmma"
LOCAL_MEMORY = r"LDL|STL|scratch_"


class Instruction(NamedTuple):
    address: int
    guarded: bool  # runs under a predicate
    operation: str
    target: int | None = None  # the address a branch goes to
    operands: str = ""

    def matches(self, pattern: str) -> bool:
        return re.match(pattern, self.operation) is not None


_INSTRUCTION = re.compile(
    r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)([^;]*)"
    r"|^\s+()((?:v|s|ds|global|buffer|flat|scratch)_\w+)([^;]*)"
)
_LABEL = re.compile(r"^\s*([.$\w]+):")
_BRANCH = re.compile(r"BRA|s_c?branch")
# What ends a basic block.
_ENDS = ("BRA", "BRX", "JMP", "EXIT", "RET", "s_branch", "s_cbranch", "s_endpgm", "s_setpc")


def instructions(text: str) -> list[Instruction]:
    """A kernel's instructions, numbered in order: AMD's text has no addresses."""
    labels: dict[str, int] = {}
    found: list[Instruction] = []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(found)
        elif match := _INSTRUCTION.search(line):
            guard, operation, operands = match.groups()[:3] if match[2] else match.groups()[3:]
            # A branch under a predicate among its operands (BRA.U UP0, ...; BRA P0, ...) may not be taken.
            guarded = (
                bool(guard) or operation.startswith("s_cbranch") or bool(re.match(r"\s+!?U?P\d", operands))
            )
            found.append(Instruction(len(found), guarded, operation, operands=operands))
    return [i._replace(target=_target(i, labels)) for i in found]


def _target(branch: Instruction, labels: dict[str, int]) -> int | None:
    names = re.findall(r"[.$\w]+", branch.operands) if _BRANCH.match(branch.operation) else []
    return labels.get(names[-1]) if names else None


@dataclass(frozen=True)
class Loop:
    """What one thread runs in an iteration, which is one tile: neither Triton nor ptxas unrolls loops like these."""

    instructions: int
    tensor: int  # for tensor cores
    local: int  # loads and stores of local memory
    copies: tuple[int, ...]  # of tiles, that may be under way at each wait for one
    barriers: int

    @classmethod
    def of(cls, code: Sequence[Instruction]) -> Loop:
        """On AMD's cards copies are loads to registers."""
        waits = [
            re.search(r"vmcnt\((\d+)\)" if i.operation == "s_waitcnt" else r",\s*(0x[0-9a-f]+)", i.operands)
            for i in code
            if i.matches(r"DEPBAR\.LE|s_waitcnt")
        ]
        return cls(
            len(code),
            sum(i.matches(TENSOR_CORE) for i in code),
            sum(i.matches(LOCAL_MEMORY) for i in code),
            tuple(int(wait[1], 0) for wait in waits if wait),
            sum(i.matches(r"BAR\.SYNC|s_barrier") for i in code),
        )


def main_loops(code: Sequence[Instruction]) -> list[list[Instruction]]:
    """The innermost loops with work for tensor cores, in order of address."""
    working = [loop for loop in loops(code) if any(i.matches(TENSOR_CORE) for i in loop)]
    return [
        loop for loop in working if not any(other is not loop and set(other) < set(loop) for other in working)
    ]


def loops(code: Sequence[Instruction]) -> list[list[Instruction]]:
    """The loops: for each block that is jumped back to, all blocks between it and the jump."""
    blocks, after = _blocks(code)
    before: dict[int, set[int]] = {start: set() for start in blocks}
    for start, successors in after.items():
        for successor in successors:
            before[successor].add(start)
    found = []
    for head in blocks:
        # A jump to earlier code is no loop if that code can be reached without its head.
        around = _reached(code[0].address, after, {head})
        ends = [start for start in before[head] if start not in around]
        if ends:
            inside = {head}.union(*(_reached(end, before, {head}) for end in ends))
            found.append([i for start in blocks if start in inside for i in blocks[start]])
    return found


def _blocks(code: Sequence[Instruction]) -> tuple[dict[int, list[Instruction]], dict[int, set[int]]]:
    """Basic blocks by address, and the blocks that may follow each."""
    starts = {code[0].address, *(i.target for i in code if i.target is not None)}
    blocks: dict[int, list[Instruction]] = {}
    opened = True
    for instruction in code:
        if opened or instruction.address in starts:
            blocks[start := instruction.address] = []
        blocks[start].append(instruction)
        opened = instruction.operation.startswith(_ENDS)
    after: dict[int, set[int]] = {}
    for start, following in zip(blocks, [*list(blocks)[1:], None], strict=True):
        last = blocks[start][-1]
        leaves = last.operation.startswith(_ENDS) and not last.guarded
        after[start] = {place for place in (last.target, None if leaves else following) if place is not None}
    return blocks, after


def _reached(start: int, ways: dict[int, set[int]], closed: set[int]) -> set[int]:
    found: set[int] = set()
    ahead = [start]
    while ahead:
        here = ahead.pop()
        if here not in found and here not in closed:
            found.add(here)
            ahead += ways[here]
    return found
