"""A kernel as numbers, for the machine: registers and constants are slots, labels are places."""

from __future__ import annotations

from dataclasses import dataclass, field

from .text import Address, Instruction, Kernel, Module, Number, Operand, Register, Symbol, SyntaxFault, Vector

SHARED_BASE = 1024  # as in machine/memory.h

# Registers that are given, and the axis that follows their names.
_SPECIAL = {
    f"%{name}.{axis}": (name, i)
    for name in ("tid", "ntid", "ctaid", "nctaid", "cluster_ctaid", "cluster_nctaid")
    for i, axis in enumerate("xyz")
} | {
    f"%{name}": (name, 0)
    for name in (
        *("laneid", "warpid", "lanemask_lt", "dynamic_smem_size", "total_smem_size", "clock", "clock64"),
        *("globaltimer", "smid", "cluster_ctarank", "cluster_nctarank"),
    )
}


@dataclass
class Program:
    code: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    constants: list[int] = field(default_factory=list)
    specials: list[int] = field(default_factory=list)
    slots: dict[str, int] = field(default_factory=dict)


def encode(module: Module, kernel: Kernel, parameters: int) -> Program:
    """`parameters` is the address of the kernel's parameters, for those that it does not load, but names."""
    return _Encoder(module, kernel, parameters).program


class _Encoder:
    def __init__(self, module: Module, kernel: Kernel, parameters: int):
        self.program = Program()
        self.kernel, self.parameters = kernel, parameters
        self.names: dict[str, int] = {}
        self.constants: dict[int, int] = {}
        self.symbols = {parameter.name: parameter.offset for parameter in kernel.parameters}
        offset = SHARED_BASE
        for name, size in sorted(module.shared.items(), key=lambda item: item[1] == 0):
            self.symbols[name] = offset
            offset += -(-size // 128) * 128
        for instruction in kernel.instructions:
            self._instruction(instruction)

    def _instruction(self, instruction: Instruction) -> None:
        name, operands, target = instruction.name, list(instruction.operands), -1
        if instruction.family == "bra":
            (label,) = operands
            if not isinstance(label, Symbol) or label.name not in self.kernel.labels:
                raise SyntaxFault(f"line {instruction.line}: branches to {label}, which is no label")
            operands, target = [], self.kernel.labels[label.name]
        if name.startswith("cvta.param"):  # names of parameters are offsets, which fit 32 bits
            name, operands = "add.u64", [*operands, Number(self.parameters)]
        is_predicate = name.endswith(".pred")
        self.program.code += [
            self._name(name),
            instruction.line,
            instruction.guard is not None,
            instruction.negated,
            self._register(instruction.guard) if instruction.guard else 0,
            target,
            len(operands),
        ]
        for operand in operands:
            self._operand(operand, is_predicate)

    def _operand(self, operand: Operand, is_predicate: bool) -> None:
        parts = operand.parts if isinstance(operand, (Vector, Address)) else (operand,)
        offset = operand.offset if isinstance(operand, Address) else 0
        slots = []
        for part in parts:
            if isinstance(operand, Address) and isinstance(part, Symbol):
                offset += self._symbol(part.name)
            elif isinstance(part, Register):
                slots.append(self._register(part.name))
            elif isinstance(part, Number):
                slots.append(self._constant(int(part.bits != 0) if is_predicate else part.bits))
            else:
                slots.append(self._constant(self._symbol(part.name)))
        self.program.code += [offset, isinstance(operand, Address), len(slots), *slots]

    def _name(self, name: str) -> int:
        if name not in self.names:
            self.names[name] = len(self.program.names)
            self.program.names.append(name)
        return self.names[name]

    def _register(self, name: str) -> int:
        slots = self.program.slots
        if name not in slots:
            slots[name] = len(slots)
            if name in _SPECIAL:
                special, axis = _SPECIAL[name]
                self.program.specials += [slots[name], self._name(special), axis]
        return slots[name]

    def _constant(self, bits: int) -> int:
        if bits not in self.constants:
            self.constants[bits] = len(self.program.constants)
            self.program.constants.append(bits)
        return -1 - self.constants[bits]

    def _symbol(self, name: str) -> int:
        return self.symbols.get(name, 0)  # what else has a name are texts of assertions
