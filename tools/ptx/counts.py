"""What a launch did, counted by instruction, and added up by family and by source line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from .text import Instruction, Kernel


@dataclass
class Count:
    """Of all warps together."""

    warps: int = 0  # that executed it
    lanes: int = 0
    sectors: int = 0  # of 32 bytes of global memory
    wavefronts: int = 0  # of shared memory
    fewest_wavefronts: int = 0  # if no two lanes met in a bank
    global_bytes: int = 0
    shared_bytes: int = 0
    products: int = 0  # multiplications of tensor cores

    def __add__(self, other: Count) -> Count:
        return Count(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Count)))


@dataclass
class Counts:
    instructions: list[tuple[Instruction, Count]]

    @staticmethod
    def of(kernel: Kernel, numbers: Sequence[int]) -> Counts:
        width = len(fields(Count))
        return Counts(
            [
                (instruction, Count(*numbers[i * width : (i + 1) * width]))
                for i, instruction in enumerate(kernel.instructions)
            ]
        )

    def by(self, key: Callable[[Instruction], str]) -> dict[str, Count]:
        found: dict[str, Count] = {}
        for instruction, count in self.instructions:
            name = key(instruction)
            found[name] = found.get(name, Count()) + count
        return found

    def by_family(self) -> dict[str, Count]:
        return self.by(lambda instruction: instruction.name.split(".")[0])

    def by_source_line(self) -> dict[str, Count]:
        return self.by(lambda instruction: instruction.source)

    @property
    def total(self) -> Count:
        return sum((count for _, count in self.instructions), Count())
