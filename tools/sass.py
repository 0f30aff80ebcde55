"""NVIDIA machine code as nvdisasm prints it: instructions, and the loops that hold a kernel's work."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

TENSOR_CORE = r"[HIDBQ]MMA|[HIDBQ]GMMA|OMMA|UTC\w*MMA|v_s?mfma"
LOCAL_MEMORY = r"LDL|STL|scratch_"


class Instruction(NamedTuple):
    address: int
    guarded: bool  # runs under a predicate
    operation: str
    target: int | None = None  # the address a branch goes to
    operands: str = ""

    def matches(self, pattern: str) -> bool:
        return re.match(pattern, self.operation) is not None


_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)([^;]*)")
_LABEL = re.compile(r"^\s*([.$\w]+):\s*$")


def instructions(text: str) -> list[Instruction]:
    """Everything between a kernel's first label and its end, in order of address."""
    labels: dict[str, int] = {}
    waiting: list[str] = []
    found: list[Instruction] = []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            waiting.append(label[1])
        elif match := _INSTRUCTION.search(line):
            address, guard, operation, operands = match.groups()
            labels.update(dict.fromkeys(waiting, int(address, 16)))
            waiting.clear()
            found.append(Instruction(int(address, 16), bool(guard), operation, operands=operands))

    def target(instruction: Instruction) -> int | None:
        name = (
            re.search(r"`\(([.$\w]+)\)", instruction.operands)
            if instruction.operation.startswith("BRA")
            else None
        )
        # A branch under a predicate among its operands (BRA.U UP0, ...; BRA P0, ...) may not be taken.
        return None if name is None else labels.get(name[1])

    return [
        i._replace(target=target(i), guarded=i.guarded or bool(re.match(r"\s+!?U?P\d", i.operands)))
        for i in found
    ]


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
        after[start] = {last.target, None if leaves else following} - {None}
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


# Of a basic block, on NVIDIA's cards and AMD's.
_ENDS = ("BRA", "BRX", "JMP", "EXIT", "RET", "s_branch", "s_cbranch", "s_endpgm", "s_setpc")


_SHAPE = re.compile(r"(\d+)x(\d+)x(\d+)")


def multiply_adds(instruction: Instruction) -> int:
    """Of one tensor-core instruction for a 16-bit type or tf32, by all threads of one warp."""
    kind = instruction.operation.split(".")[0]
    if kind == "HGMMA" or kind.startswith("v_mfma"):  # the former by the four warps of a group
        m, n, k = map(int, _SHAPE.search(instruction.operation).groups())
        return m * n * k // (4 if kind == "HGMMA" else 1)
    if kind == "HMMA":
        m, n, k = {"16816": (16, 8, 16), "1688": (16, 8, 8), "1684": (16, 8, 4)}[
            instruction.operation.split(".")[1]
        ]
        return m * n * k
    raise ValueError(f"how much work {instruction.operation} is, is not known")
