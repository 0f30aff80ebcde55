"""Runs kernels on CPU tensors: `run` of Triton's, `run_text` of PTX."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .counts import COUNTED, Counts
from .machine import Found, machine
from .program import encode
from .text import Kernel, Parameter, parse

WHEN = ("late", "early", "random")


class Fault(RuntimeError):
    """A check of the machine that fired: see the table of kinds in tools/ptx/README.md.

    Args:
        kind: its name, such as "out_of_bounds" or "race".
        text: the message, with the instruction, the block, the warp, the lane and the address.
        line: of the PTX text.

    Example:
        >>> text = '''
        ... .version 8.0
        ... .target sm_80
        ... .address_size 64
        ... .visible .entry store(.param .u64 store_param_0)
        ... {
        ...     .reg .b64 %rd<2>;
        ...     .reg .b32 %r<2>;
        ...     ld.param.u64 %rd1, [store_param_0];
        ...     mov.u32 %r1, 7;
        ...     st.global.u32 [%rd1+64], %r1;
        ...     ret;
        ... }
        ... '''
        >>> try:
        ...     ptx.run_text(text, "store", 1, [torch.zeros(16)], num_warps=1)
        ... except ptx.Fault as fault:
        ...     print(fault.kind, fault.line, text.splitlines()[fault.line - 1].strip())
        out_of_bounds 11 st.global.u32 [%rd1+64], %r1;
    """

    def __init__(self, kind: str, text: str, line: int):
        super().__init__(text)
        self.kind, self.line = kind, line


class TensorMap(NamedTuple):
    """An argument that tells bulk copies of a tensor, as the driver would make it.

    Args:
        tensor: up to five dimensions, the last one without holes.
        box: the sizes of a copy.
        swizzle: 0 to 3, of rows of 16 << swizzle bytes.

    Example:
        >>> ptx.TensorMap(torch.zeros(100, 64), (32, 16)).swizzle
        0
    """

    tensor: Tensor
    box: Sequence[int]
    swizzle: int = 0

    def _packed(self) -> bytes:
        given = self.tensor.shape, self.tensor.stride()[:-1], tuple(self.box)
        if not 1 <= len(given[0]) == len(given[2]) <= 5 or self.tensor.stride(-1) != 1:
            raise ValueError(
                f"TensorMap: expected 1 to 5 dimensions, the last with stride 1, and a box of as many: {given}"
            )
        size, stride, box = ([*of[::-1], 0, 0, 0, 0, 0] for of in given)
        width = self.tensor.itemsize
        numbers = [self.tensor.data_ptr(), *(n * width for n in stride[:4]), *size[:5], *box[:5], *[1] * 5]
        about = self.tensor.dim() - 1, {1: 0, 2: 1, 4: 2, 8: 4}[width], self.swizzle, 0
        return struct.pack("<5Q15I4B", *numbers, *about).ljust(128, b"\0")


def run_text(
    text: str,
    name: str,
    grid: Sequence[int] | int,
    args: Sequence[Any],
    *,
    num_warps: int,
    shared_bytes: int = 0,
    seed: int = 0,
    when: str = "late",
    approximations: str = "exact",
    unwritten: Sequence[Tensor] = (),
    most_steps: int = 1 << 40,
    fences: str = "all",
    poison: bool = False,
) -> Counts:
    """Run the kernel `name` of a PTX text on the CPU, and write into the tensors given.

    Args:
        text: PTX, as a compiler writes it.
        name: of one of its kernels.
        grid: how many blocks, up to three numbers.
        args: its parameters: CPU tensors, numbers, bytes, or tensor maps.
        num_warps: of a block.
        shared_bytes: of shared memory that the launch adds.
        seed: which warps take turns when.
        when: asynchronous copies and products end "late", at the last legal moment, "early", or at "random".
        approximations: "exact", or "worst": off by as much as the ISA's document allows.
        unwritten: those of `args` whose values the kernel must not read before it wrote them.
        most_steps: instructions, of all warps, after which it counts as hanging.
        fences: "all" that the ISA asks for, or "stores": without a fence.proxy.async, products may then read what
            cp.async wrote, as Triton's loops may.
        poison: tensor memory that nobody wrote may be read, and is NaN. Triton's loops without a step read it.

    Returns:
        Counts: what was executed.

    Raises:
        Fault: a check fired.
        ValueError: an argument does not fit the text.

    Example:
        >>> text = '''
        ... .version 8.0
        ... .target sm_80
        ... .address_size 64
        ... .visible .entry twice(.param .u64 twice_param_0)
        ... {
        ...     .reg .b32 %r<2>;
        ...     .reg .b64 %rd<3>;
        ...     .reg .f32 %f<3>;
        ...     ld.param.u64 %rd1, [twice_param_0];
        ...     mov.u32 %r1, %tid.x;
        ...     mad.wide.u32 %rd2, %r1, 4, %rd1;
        ...     ld.global.f32 %f1, [%rd2];
        ...     add.f32 %f2, %f1, %f1;
        ...     st.global.f32 [%rd2], %f2;
        ...     ret;
        ... }
        ... '''
        >>> numbers = torch.arange(32.0)
        >>> counts = ptx.run_text(text, "twice", 1, [numbers], num_warps=1)
        >>> numbers[:4], counts.total.read_bytes
        (tensor([0., 2., 4., 6.]), 128)
    """
    if when not in WHEN:
        raise ValueError(f"when: expected one of {', '.join(WHEN)}, got {when!r}")
    if fences not in ("all", "stores"):
        raise ValueError(f"fences: expected all or stores, got {fences!r}")
    module = parse(text)
    if name not in module.kernels:
        raise ValueError(f"name: expected one of {', '.join(module.kernels)}, got {name!r}")
    kernel = module.kernels[name]
    parameters = _parameters(kernel, args)
    program = encode(module, kernel, parameters.data_ptr())
    sizes = [*([grid] if isinstance(grid, int) else grid), 1, 1, 1][:3]
    shared = sum(module.shared.values()) + shared_bytes
    tensors = [a.tensor if isinstance(a, TensorMap) else a for a in args]
    allocations = _allocations([*tensors, parameters], unwritten)
    head = [
        *sizes,
        32 * num_warps,
        shared,
        len(program.slots),
        seed,
        WHEN.index(when),
        approximations == "worst",
        most_steps,
        fences == "all",
        poison,
        len(kernel.instructions),
        len(program.constants),
        parameters.numel(),
        len(program.specials) // 3,
        len(allocations) // 3,
    ]
    numbers = (ctypes.c_int64 * (COUNTED * len(kernel.instructions)))()
    found = Found()
    stopped = machine().run_launch(
        _integers(head),
        _integers(program.code),
        (ctypes.c_char_p * len(program.names))(*(part.encode() for part in program.names)),
        (ctypes.c_uint64 * len(program.constants))(*program.constants),
        ctypes.c_void_p(parameters.data_ptr()),
        _integers(program.specials),
        _integers(allocations),
        numbers,
        ctypes.byref(found),
    )
    if stopped:
        raise _fault(kernel, found)
    tensor_bytes = sum(allocations[1::3]) - parameters.numel()
    return Counts.of(kernel, module.target, math.prod(sizes), num_warps, tensor_bytes, list(numbers))


def _integers(values: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(values))(*values)


def _parameters(kernel: Kernel, args: Sequence[Any]) -> Tensor:
    if len(args) != len(kernel.parameters):
        raise ValueError(
            f"args: {kernel.name} has {len(kernel.parameters)} parameters, got {len(args)} arguments"
        )
    last = kernel.parameters[-1] if kernel.parameters else Parameter("", "", 0, 0)
    found = bytearray(last.offset + last.size)
    for parameter, value in zip(kernel.parameters, args, strict=True):
        found[parameter.offset : parameter.offset + parameter.size] = _bytes_of(value, parameter)
    return torch.tensor(list(found), dtype=torch.uint8)


def _bytes_of(value: Any, parameter: Parameter) -> bytes:
    if isinstance(value, TensorMap):
        value = value._packed()
    if isinstance(value, Tensor):
        if value.device.type != "cpu":
            raise ValueError(f"args: expected CPU tensors, got one on {value.device} for {parameter.name}")
        value = value.data_ptr()
    if isinstance(value, bytes) and len(value) == parameter.size:
        return value
    if isinstance(value, bytes):
        raise ValueError(f"args: expected {parameter.size} bytes for {parameter.name}, got {len(value)}")
    if isinstance(value, float):
        return struct.pack({"f32": "<f", "b32": "<f"}.get(parameter.kind, "<d"), value)
    return (int(value) & ((1 << 8 * parameter.size) - 1)).to_bytes(parameter.size, "little")


def _allocations(args: Sequence[Any], unwritten: Sequence[Tensor]) -> list[int]:
    """The tensors' addresses, sizes and whether they hold values; those that overlap are one."""
    new = {tensor.data_ptr() for tensor in unwritten}
    spans = []
    for tensor in args:
        if isinstance(tensor, Tensor) and tensor.numel():
            last = sum(
                (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
            )
            first = tensor.data_ptr()
            spans.append((first, first + (last + 1) * tensor.element_size(), first not in new))
    joined: list[tuple[int, int, bool]] = []
    for first, stop, written in sorted(spans):
        if joined and first < joined[-1][1]:
            before = joined.pop()
            first, stop, written = before[0], max(stop, before[1]), written or before[2]
        joined.append((first, stop, written))
    return [value for first, stop, written in joined for value in (first, stop - first, int(written))]


def _fault(kernel: Kernel, found: Found) -> Fault:
    kind, text, line = found.kind.decode(), found.text.decode(), found.line
    instruction = next((i for i in kernel.instructions if i.line == line), None)
    places = {"block": found.block, "warp": found.warp, "lane": found.lane}
    place = ", ".join(f"{name} {number}" for name, number in places.items() if number >= 0)
    at = f", address {found.address:#x}" if found.address else ""
    return Fault(kind, f"{kernel.name}: {kind}: {text}. {place}{at}: {instruction or f'line {line}'}", line)


def run(
    kernel: Any,
    grid: Sequence[int] | int | Callable[[dict[str, Any]], Sequence[int]],
    *args: Any,
    target: str,
    num_warps: int = 4,
    num_stages: int = 3,
    **others: Any,
) -> Counts:
    """Compile one of Triton's kernels for a card, and run it on the CPU.

    Args:
        kernel: a function under `triton.jit`.
        grid: how many blocks, up to three numbers, or a function that gives them from the arguments.
        args: its arguments: CPU tensors, numbers, and Triton's TensorDescriptors from sm_90 on.
        target: such as "sm_90".
        num_warps: of a block.
        num_stages: of its loops.
        others: the kernel's constants, and options of `run_text`.

    Returns:
        Counts: what was executed.

    Raises:
        Fault: a check fired.

    Example:
        >>> import triton, triton.language as tl
        >>> @triton.jit
        ... def twice(numbers, COUNT: tl.constexpr):
        ...     at = numbers + tl.arange(0, COUNT)
        ...     tl.store(at, 2 * tl.load(at))
        >>> numbers = torch.arange(64.0)
        >>> counts = ptx.run(twice, 1, numbers, COUNT=64, target="sm_90")
        >>> numbers[:4], counts.target
        (tensor([0., 2., 4., 6.]), 'sm_90a')
    """
    constexprs = {name: value for name, value in others.items() if name in kernel.arg_names}
    options = {name: value for name, value in others.items() if name not in constexprs}
    compiled, given = compiled_for(kernel, args, target, num_warps, num_stages, constexprs)
    named = dict(zip(kernel.arg_names, args, strict=False)) | constexprs
    return run_compiled(compiled, grid(named) if callable(grid) else grid, given, **options)


def run_compiled(compiled: Any, grid: Sequence[int] | int, args: Sequence[Any], **options: Any) -> Counts:
    """Run what `triton.compile` returned.

    Args:
        compiled: of one kernel.
        grid: how many blocks, up to three numbers.
        args: the arguments that are no constants.
        options: those of `run_text`.

    Returns:
        Counts: what was executed.

    Raises:
        Fault: a check fired.

    Example:
        >>> import triton, triton.language as tl
        >>> from triton.backends.compiler import GPUTarget
        >>> from triton.compiler import ASTSource
        >>> @triton.jit
        ... def twice(numbers):
        ...     at = numbers + tl.arange(0, 64)
        ...     tl.store(at, 2 * tl.load(at))
        >>> source = ASTSource(twice, {"numbers": "*fp32"})
        >>> compiled = triton.compile(source, target=GPUTarget("cuda", 80, 32))
        >>> numbers = torch.arange(64.0)
        >>> counts = ptx.run_compiled(compiled, 1, [numbers])
        >>> numbers[-1]
        tensor(126.)
    """
    metadata = compiled.metadata
    text = compiled.asm["ptx"]
    module = parse(text)
    (name,) = module.kernels
    described = iter(getattr(metadata, "tensordesc_meta", None) or ())
    args = [part for value in args for part in _parts_of(value, described)]
    missing = len(module.kernels[name].parameters) - len(args)
    scratch: list[Any] = [0] * missing  # of the launch and of the profiler, which Triton appends
    if missing and getattr(metadata, "global_scratch_size", 0):
        sizes = [*([grid] if isinstance(grid, int) else grid)]
        blocks = math.prod(sizes)
        scratch[0] = torch.empty(metadata.global_scratch_size * blocks, dtype=torch.uint8)
    warps = (module.kernels[name].threads or 32 * metadata.num_warps) // 32
    return run_text(
        text, name, grid, [*args, *scratch], num_warps=warps, shared_bytes=metadata.shared, **options
    )


def _parts_of(value: Any, described: Iterator[Any]) -> list[Any]:
    """What Triton's launcher makes of an argument."""
    if not hasattr(value, "block_shape"):
        return [value]
    meta = next(described, None)
    if meta is None:
        raise ValueError("args: expected no TensorDescriptor: the target has no tensor maps")
    tensor = value.base.as_strided(value.shape, value.strides)
    return [TensorMap(tensor, meta["block_size"], meta["swizzle"]), *value.shape, *value.strides]


def compiled_for(
    kernel: Any,
    args: Sequence[Any],
    target: str,
    num_warps: int,
    num_stages: int,
    constexprs: dict[str, Any],
) -> tuple[Any, list[Any]]:
    """The compiled kernel, and those of the arguments that it takes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    given: list[Any] = []
    values = dict(zip(kernel.arg_names, args, strict=False)) | constexprs
    for i, name in enumerate(kernel.arg_names):
        value = values[name]
        kind = "constexpr" if name in constexprs else _kind_of(value)
        signature[name] = kind
        if kind == "constexpr":
            constants[(i,)] = value
            continue
        given.append(value)
        if isinstance(value, Tensor) or (isinstance(value, int) and not isinstance(value, bool)):
            number = value.data_ptr() if isinstance(value, Tensor) else value
            if number % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    gpu = GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
    return triton.compile(source, target=gpu, options=options), given


def _kind_of(value: Any) -> str:
    if hasattr(value, "block_shape"):
        return f"tensordesc<{_kind_of(value.base)[1:]}{list(value.block_shape)}>"
    if isinstance(value, Tensor):
        name = str(value.dtype).removeprefix("torch.")
        for long, short in (("bfloat", "bf"), ("float", "fp"), ("uint", "u"), ("int", "i"), ("bool", "i1")):
            name = name.replace(long, short)
        return f"*{name}"
    if value is None or (isinstance(value, int) and value == 1):
        return "constexpr"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
