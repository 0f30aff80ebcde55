"""What a compiled kernel needs of a device: registers, memory and instructions, read from the binary."""

from __future__ import annotations

import re
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from flex_inductor.lowerings.toolchain import missing_for_triton
from flex_inductor.lowerings.triton import assembler
from flex_inductor.lowerings.triton.device import ARCHITECTURES, known_device
from flex_inductor.lowerings.triton.in_place import adds_twice

from .errors import no_triton
from .generated import GeneratedKernel
from .sass import LOCAL_MEMORY, TENSOR_CORE, Instruction, Loop, instructions, main_loops

TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950")


@dataclass
class Resources:
    """Per thread, but for shared memory, which is per instance. None where `reasons` says why: of kernels for a CPU."""

    registers: int | None = None
    spill_bytes: int | None = None  # local memory: what did not fit into registers, and arrays on the stack
    shared_bytes: int | None = None
    reasons: dict[str, str] = field(default_factory=dict)
    binary: Any = field(default=None, repr=False)  # Triton's compiled kernel, read once somebody asks

    @cached_property
    def _code(self) -> list[Instruction]:
        return machine_code(self.binary) if self.binary else []

    @cached_property
    def instructions(self) -> dict[str, int] | None:
        """Of the whole kernel, by class."""
        if self.binary is None:
            return None
        classes = _AMD if "amdgcn" in self.binary.asm else _NVIDIA
        found = (next((name for name, of in classes.items() if i.matches(of)), "other") for i in self._code)
        return dict(Counter(found))

    @cached_property
    def loops(self) -> list[Loop]:
        """With work for tensor cores."""
        return [Loop.of(loop) for loop in main_loops(self._code)] if self.binary else []

    def _asdict(self) -> dict[str, Any]:
        names = ("registers", "spill_bytes", "shared_bytes", "instructions", "reasons", "loops")
        return {name: getattr(self, name) for name in names}


class Occupancy(NamedTuple):
    instances: int  # that a multiprocessor runs at once
    limit: str  # what keeps it from more


def occupancy(found: Resources, warps: int, target: str) -> Occupancy | None:
    """None where the resources or the device are not known."""
    if target not in ARCHITECTURES or found.registers is None or found.shared_bytes is None:
        return None
    device, most = known_device(target), ARCHITECTURES[target]
    threads = warps * device.warp
    registers = -(-max(found.registers, 1) // 8) * 8  # they are allocated in eights
    reserved = 1024 if device.nvidia else 0  # bytes of shared memory, for each instance
    limits = {
        "registers": (1 << (16 if device.nvidia else 17)) // (registers * threads),
        "shared memory": (device.shared_bytes + reserved) // (found.shared_bytes + reserved or 1),
        "threads": most.threads // threads,
        "instances": most.instances,
    }
    limit = min(limits, key=lambda name: limits[name])
    return Occupancy(limits[limit], limit)


def gpu_target(target: str) -> Any:
    try:
        from triton.backends.compiler import GPUTarget
    except ImportError as error:
        raise no_triton(target, missing_for_triton() or str(error)) from error
    if target.startswith("gfx"):
        return GPUTarget("hip", target, 64)
    return GPUTarget("cuda", int(target.removeprefix("sm_")), 32)


def compile_for(kernel: GeneratedKernel, config: dict[str, int], target: str) -> Any:
    """The kernel with one of its configs, compiled for a device that need not be there."""
    import triton
    from triton.compiler import ASTSource

    assembler.use_newest()
    names = kernel.fn.arg_names
    constants = {**kernel.triton_meta.get("constants", {}), **config}
    signature = kernel.triton_meta["signature"]
    source = ASTSource(
        kernel.fn,
        {name: signature.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items() if name in names},
        kernel.triton_meta["configs"][0],
    )
    for step in ("hash", "make_ir"):
        setattr(source, step, _alone(getattr(source, step)))
    options = {name: config[name] for name in ("num_warps", "num_stages") if name in config}
    return triton.compile(source, target=gpu_target(target), options=options)


def compile_untuned(kernel: GeneratedKernel, target: str) -> tuple[dict[str, int], Any, Resources]:
    """Without timing: the config that a card of this kind would use, the kernel and what it needs."""
    best: tuple[dict[str, int], Any, Resources] | None = None
    for config in (kernel.configs[0], *kernel.better):
        compiled = compile_for(kernel, config, target)
        if adds_twice(config, compiled):
            config = {**config, "COALESCED": 1}
            compiled = compile_for(kernel, config, target)
        found = resources(compiled)
        if best is None or (found.spill_bytes or 0) < (best[2].spill_bytes or 0):
            best = config, compiled, found
        if (best[2].spill_bytes or 0) <= known_device(target).few_spilled:
            break
    assert best is not None
    return best


_parsing = threading.Lock()


def _alone(parse: Callable) -> Callable:
    """One thread at a time: CPython 3.11 counts the depth of syntax trees over all threads."""

    def alone(*args: Any, **kwargs: Any) -> Any:
        with _parsing:
            return parse(*args, **kwargs)

    return alone


def resources(compiled: Any) -> Resources:
    return Resources(*_used(compiled), compiled.metadata.shared, binary=compiled)


def machine_code(compiled: Any) -> list[Instruction]:
    return instructions(compiled.asm.get("amdgcn") or _of_binary(compiled, "nvdisasm", "-c"))


def _used(compiled: Any) -> tuple[int, int]:
    """Registers and bytes of local memory."""
    amd = compiled.asm.get("amdgcn")
    names = r"\.(vgpr_count|agpr_count|private_segment_fixed_size)" if amd else r"\b(REG|STACK|LOCAL)"
    text = amd or _of_binary(compiled, "cuobjdump", "-res-usage")
    found = {name: int(value) for name, value in re.findall(rf"{names}:\s*(\d+)", text)}
    if amd:
        return max(found["vgpr_count"], found.get("agpr_count", 0)), found["private_segment_fixed_size"]
    return found["REG"], found["STACK"] + found["LOCAL"]


def _of_binary(compiled: Any, tool: str, *options: str) -> str:
    """The output of one of CUDA's tools, which come with Triton, on a kernel."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        return subprocess.run([path, *options, cubin], capture_output=True, text=True, check=True).stdout


# The first pattern that matches an operation's start names its class.
_NVIDIA = {
    "tensor": TENSOR_CORE,
    "local": LOCAL_MEMORY,
    "global": r"LDG|STG|RED|ATOM(?!S)|LD\b|ST\b|LDGSTS|UTMA|UBLKCP",
    "shared": r"LDS|STS|STSM|LDTM|STTM|ATOMS|UTCCP",
    "special": r"MUFU",
    "float": r"F(ADD|MUL|FMA|MNMX|SET|SETP|SEL|CHK)|H(ADD|MUL|FMA|MNMX|SET)|D(ADD|MUL|FMA|SETP)",
    "convert": r"F2|I2|FRND",
    "integer": r"U?I(ADD|MAD|SETP|MNMX|ABS|DP)|U?LOP|U?LEA|U?SHF|U?SH[LR]|VI|U?POPC|U?BMSK|U?SGXT|U?FLO",
    "move": r"U?MOV|U?SEL|U?PRMT|SHFL|R2|S2|CS2R|U?P2|U?PLOP|VOTE|LDC|ULDC|UMOV|REDUX|LDCU|MATCH|U?R2UR",
    "control": r"BRA|BSSY|BSYNC|EXIT|RET|CALL|BAR|DEPBAR|LDGDEPBAR|WARP|SYNC|NOP|YIELD|MEMBAR|ERRBAR|FENCE|BPT|JMP",
}
_AMD = {
    "tensor": r"v_mfma|v_smfma|v_wmma",
    "local": r"scratch_",
    "global": r"global_|buffer_|flat_",
    "shared": r"ds_",
    "special": r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_",
    "convert": r"v_cvt",
    "float": r"v_(pk_)?(add|sub|mul|fma|fmac|max|min|div|cmp\w*)_f|v_max3_f",
    "move": r"v_mov|v_accvgpr|s_mov|v_readfirstlane|v_perm|v_cndmask|s_load",
    "control": r"s_(branch|cbranch|waitcnt|barrier|endpgm|nop|setprio|cselect)",
    "integer": r"v_|s_",
}
