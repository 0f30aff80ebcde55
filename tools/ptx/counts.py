"""What a launch did, counted by instruction, and added up by family and by source line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from .text import Instruction, Kernel


@dataclass
class Count:
    """How often something was executed, of all warps together.

    Args:
        warps: that executed it.
        lanes: that executed it.
        requests: of global memory.
        sectors: of 32 bytes of it.
        fewest_sectors: if the bytes lay side by side.
        wavefronts: of shared memory.
        fewest_wavefronts: if no two lanes met in a bank.
        global_bytes: read and written.
        shared_bytes: read and written.
        products: multiplications of tensor cores.
        written_bytes: those of global_bytes that are not read.

    Example:
        >>> shared = ptx.Count(warps=1, wavefronts=4, fewest_wavefronts=1)
        >>> both = shared + ptx.Count(warps=2, global_bytes=128)
        >>> both.warps, both.conflicts, both.read_bytes
        (3, 3, 128)
    """

    warps: int = 0
    lanes: int = 0
    requests: int = 0
    sectors: int = 0
    fewest_sectors: int = 0
    wavefronts: int = 0
    fewest_wavefronts: int = 0
    global_bytes: int = 0
    shared_bytes: int = 0
    products: int = 0
    written_bytes: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Count)))

    @property
    def read_bytes(self) -> int:
        """The global_bytes that are read."""
        return self.global_bytes - self.written_bytes

    @property
    def conflicts(self) -> int:
        """Wavefronts of shared memory beyond the fewest."""
        return self.wavefronts - self.fewest_wavefronts


COUNTED = len(fields(Count)) - 1  # by the machine


@dataclass
class Counts:
    """What a launch executed, by instruction, and added up by family and by source line.

    Args:
        kernel: the parsed kernel.
        target: such as "sm_90a".
        blocks: of the launch.
        warps: of a block.
        tensor_bytes: of all tensors given.
        instructions: each with its `Count`.

    Example:
        >>> text = '''
        ... .version 8.0
        ... .target sm_80
        ... .address_size 64
        ... .visible .entry store(.param .u64 store_param_0)
        ... {
        ...     .reg .b64 %rd<3>;
        ...     .reg .b32 %r<2>;
        ...     ld.param.u64 %rd1, [store_param_0];
        ...     mov.u32 %r1, %tid.x;
        ...     mad.wide.u32 %rd2, %r1, 32, %rd1;  // too far apart
        ...     st.global.u32 [%rd2], %r1;
        ...     ret;
        ... }
        ... '''
        >>> counts = ptx.run_text(text, "store", 1, [torch.zeros(256)], num_warps=1)
        >>> store = counts.by_family()["st"]
        >>> store.sectors, store.fewest_sectors
        (32, 4)
        >>> counts.total.warps, list(counts.by_source_line()), len(counts.by(str))
        (5, [''], 5)
    """

    kernel: Kernel
    target: str
    blocks: int
    warps: int
    tensor_bytes: int
    instructions: list[tuple[Instruction, Count]]

    @staticmethod
    def of(
        kernel: Kernel, target: str, blocks: int, warps: int, tensor_bytes: int, numbers: Sequence[int]
    ) -> Counts:
        """Make counts of what the machine counted.

        Args:
            kernel: the parsed kernel.
            target: such as "sm_90a".
            blocks: of the launch.
            warps: of a block.
            tensor_bytes: of all tensors given.
            numbers: of each instruction in turn.

        Example:
            >>> from flex_inductor.tools.ptx.text import Kernel
            >>> ptx.Counts.of(Kernel("empty"), "sm_80", 1, 1, 0, []).total.warps
            0
        """
        found = []
        for i, instruction in enumerate(kernel.instructions):
            count = Count(*numbers[i * COUNTED : (i + 1) * COUNTED])
            if instruction.name.startswith(("st", "red", "cp.async.bulk")) and not instruction.loads_in_bulk:
                count.written_bytes = count.global_bytes
            found.append((instruction, count))
        return Counts(kernel, target, blocks, warps, tensor_bytes, found)

    def by(self, key: Callable[[Instruction], str]) -> dict[str, Count]:
        """Add counts up.

        Args:
            key: a function of an instruction, by whose result they are added up.

        Returns:
            dict: a `Count` for each result.
        """
        found: dict[str, Count] = {}
        for instruction, count in self.instructions:
            name = key(instruction)
            found[name] = found.get(name, Count()) + count
        return found

    def by_family(self) -> dict[str, Count]:
        """Add counts up by the first part of the instructions' names, such as "ld"."""
        return self.by(lambda instruction: instruction.family)

    def by_source_line(self) -> dict[str, Count]:
        """Add counts up by the lines that the instructions were made from, such as "file.py:12"."""
        return self.by(lambda instruction: instruction.source)

    @property
    def total(self) -> Count:
        """The count of all instructions together."""
        return sum((count for _, count in self.instructions), Count())
