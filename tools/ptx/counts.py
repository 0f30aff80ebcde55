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
    requests: int = 0  # of global memory
    sectors: int = 0  # of 32 bytes of it
    fewest_sectors: int = 0  # if the bytes lay side by side
    wavefronts: int = 0  # of shared memory
    fewest_wavefronts: int = 0  # if no two lanes met in a bank
    global_bytes: int = 0
    shared_bytes: int = 0
    products: int = 0  # multiplications of tensor cores
    written_bytes: int = 0  # those of global_bytes that are not read

    def __add__(self, other: Count) -> Count:
        return Count(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Count)))

    @property
    def read_bytes(self) -> int:
        return self.global_bytes - self.written_bytes

    @property
    def conflicts(self) -> int:
        return self.wavefronts - self.fewest_wavefronts


COUNTED = len(fields(Count)) - 1  # by the machine


@dataclass
class Counts:
    kernel: Kernel
    target: str  # "sm_90a"
    blocks: int
    warps: int  # of a block
    tensor_bytes: int  # of all tensors given
    instructions: list[tuple[Instruction, Count]]

    @staticmethod
    def of(
        kernel: Kernel, target: str, blocks: int, warps: int, tensor_bytes: int, numbers: Sequence[int]
    ) -> Counts:
        found = []
        for i, instruction in enumerate(kernel.instructions):
            count = Count(*numbers[i * COUNTED : (i + 1) * COUNTED])
            if instruction.name.startswith(("st", "red", "cp.async.bulk")) and not instruction.loads_in_bulk:
                count.written_bytes = count.global_bytes
            found.append((instruction, count))
        return Counts(kernel, target, blocks, warps, tensor_bytes, found)

    def by(self, key: Callable[[Instruction], str]) -> dict[str, Count]:
        found: dict[str, Count] = {}
        for instruction, count in self.instructions:
            name = key(instruction)
            found[name] = found.get(name, Count()) + count
        return found

    def by_family(self) -> dict[str, Count]:
        return self.by(lambda instruction: instruction.family)

    def by_source_line(self) -> dict[str, Count]:
        return self.by(lambda instruction: instruction.source)

    @property
    def total(self) -> Count:
        return sum((count for _, count in self.instructions), Count())
