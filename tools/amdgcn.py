"""AMD's assembly, as Triton's compiler writes it: instructions, of which sass.py finds the loops."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .pipes import Overlap
from .sass import Instruction

_INSTRUCTION = re.compile(r"^\s+((?:v|s|ds|global|buffer|flat|scratch)_\w+)([^;]*)")
_LABEL = re.compile(r"^(\.L\w+):")


def instructions(text: str) -> list[Instruction]:
    """A kernel's instructions. Their addresses are their places: the text has no others."""
    labels: dict[str, int] = {}
    found: list[Instruction] = []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(found)
        elif match := _INSTRUCTION.match(line):
            conditional = match[1].startswith("s_cbranch")
            found.append(Instruction(len(found), conditional, match[1], operands=match[2]))
    return [
        i._replace(target=labels.get(i.operands.strip())) if "branch" in i.operation else i for i in found
    ]


def overlap(loop: Sequence[Instruction]) -> Overlap:
    """Loads from memory, to registers, that may be under way at each wait for one."""
    waits = (re.search(r"vmcnt\((\d+)\)", i.operands) for i in loop if i.operation == "s_waitcnt")
    return Overlap(
        tuple(int(wait[1]) for wait in waits if wait), 0, sum(i.operation == "s_barrier" for i in loop)
    )
