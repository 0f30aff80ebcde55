"""The cards that kernels are written for, and what a kernel may take of each."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..observing import observer


class Device(NamedTuple):
    """The limits of a kernel. `arch` is sm_80... or gfx942, or "interpreter"."""

    arch: str
    shared_bytes: int  # that one instance may have
    warp: int = 32
    multiprocessors: int = 132

    @property
    def key(self) -> str:
        """The device that timings are valid for."""
        return f"{self.arch} {self.multiprocessors} multiprocessors {self.shared_bytes >> 10}K shared"

    @property
    def nvidia(self) -> bool:
        return self.arch.startswith("sm_")

    @property
    def few_spilled(self) -> int:
        """Bytes of local memory a thread that are too few to look for another config."""
        # On an H200 kernels with 24 to 64 were a fifth faster than the next ones, which had none.
        return 128 if self.family == "hopper" else 16

    @property
    def describes(self) -> bool:
        """Whether it has tensor descriptors."""
        return self.arch == "interpreter" or (self.nvidia and int(self.arch[3:]) >= 90)

    @property
    def converts_e4m3(self) -> bool:
        return not self.nvidia or int(self.arch[3:]) >= 89

    @property
    def shared_operands(self) -> bool:
        """Whether tensor cores read their operands from shared memory, not from registers."""
        return self.family in ("hopper", "blackwell")

    @property
    def family(self) -> str:
        """The table's row: cards with the same tensor cores and about as much shared memory."""
        if self.arch.startswith("gfx"):
            return "amd"
        if self.arch == "interpreter":
            return "interpreter"
        if self.shared_bytes < 128 * 1024:
            return "consumer"
        return {"8": "ampere", "9": "hopper"}.get(self.arch[3:4] if len(self.arch) == 5 else "", "blackwell")


class Architecture(NamedTuple):
    """What makers say of a card's multiprocessors."""

    shared_kib: int  # that one instance may have
    threads: int  # that a multiprocessor runs at once, at most
    instances: int
    multiprocessors: int  # of one such card


ARCHITECTURES = {
    "sm_75": Architecture(64, 1024, 16, 40),
    "sm_80": Architecture(163, 2048, 32, 108),
    "sm_86": Architecture(99, 1536, 16, 84),
    "sm_87": Architecture(163, 1536, 16, 16),
    "sm_89": Architecture(99, 1536, 24, 128),
    "sm_90": Architecture(227, 2048, 32, 132),
    "sm_100": Architecture(227, 2048, 32, 148),
    "sm_103": Architecture(227, 2048, 32, 160),
    "sm_120": Architecture(99, 1536, 24, 170),
    "sm_121": Architecture(99, 1536, 24, 48),
    "gfx942": Architecture(64, 2048, 32, 304),
    "gfx950": Architecture(160, 2048, 32, 256),
}


def known_device(arch: str) -> Device:
    """The device of an architecture name, for one that may not be there."""
    amd = arch.startswith("gfx")
    known = ARCHITECTURES.get(arch) or ARCHITECTURES["gfx942" if amd else "sm_89"]
    return Device(arch, known.shared_kib << 10, 64 if amd else 32, known.multiprocessors)


def current_device(device: torch.device) -> Device:
    target = observer().target
    if target is not None:
        return known_device(target)
    if device.type == "cpu":
        return Device("interpreter", 1 << 30, multiprocessors=8)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        arch = properties.gcnArchName.split(":")[0]
        found = known_device(arch)._replace(warp=properties.warp_size)
        shared = 0 if arch in ARCHITECTURES else getattr(properties, "shared_memory_per_block", 0)
    else:
        found = known_device(f"sm_{properties.major}{properties.minor}")
        shared = getattr(properties, "shared_memory_per_block_optin", 0)
    found = found._replace(multiprocessors=properties.multi_processor_count)
    return found._replace(shared_bytes=shared) if shared else found
