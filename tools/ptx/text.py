"""PTX text as typed data: a module's kernels, their parameters, and their instructions in order."""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

SIZES = {f"{kind}{8 * size}": size for size in (1, 2, 4, 8) for kind in "bus"}
SIZES |= {"f16": 2, "bf16": 2, "f32": 4, "f64": 8, "b128": 16, "pred": 1}


@dataclass(frozen=True)
class Register:
    name: str  # `%tid.x` too


@dataclass(frozen=True)
class Number:
    bits: int  # of 64


@dataclass(frozen=True)
class Symbol:
    name: str  # a label, a parameter or a variable


@dataclass(frozen=True)
class Vector:
    parts: tuple[Register | Number | Symbol, ...]


@dataclass(frozen=True)
class Address:
    parts: tuple[Register | Number | Symbol, ...]  # the base; of a tensor map the coordinates too
    offset: int = 0


Operand = Register | Number | Symbol | Vector | Address


@dataclass
class Instruction:
    line: int  # of the text, from 1 on
    name: str  # `add.rn.f32`
    operands: list[Operand]
    guard: str | None = None  # the register that says whether it is executed
    negated: bool = False
    source: str = ""  # `file.py:12`, the line that it was made from
    within: str = ""  # if that is in a function that was inlined: the kernel's own line

    @property
    def family(self) -> str:
        return self.name.split(".")[0]

    @property
    def loads_in_bulk(self) -> bool:
        return "mbarrier::complete_tx" in self.name

    def __str__(self) -> str:
        return f"{self.name} in line {self.line}" + (f", from {self.source}" if self.source else "")


@dataclass
class Parameter:
    name: str
    kind: str  # `u64`
    offset: int
    size: int


@dataclass
class Kernel:
    name: str
    parameters: list[Parameter] = field(default_factory=list)
    threads: int | None = None  # of a block, if it says so
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # the instruction that follows


@dataclass
class Module:
    target: str
    shared: dict[str, int]  # variables in shared memory and their bytes; 0 where the launch says how many
    kernels: dict[str, Kernel]


class SyntaxFault(ValueError):
    """Text that is no PTX, or PTX that nobody has written so far."""


_STATEMENT = re.compile(
    r"""
    (?P<space> \s+ | //[^\n]* | /\*.*?\*/ )
  | (?P<loc> \.loc\b[^\n]* )
  | (?P<label> [$\w]+ ) \s* : (?!:)
  | (?P<brace> [{}] )
  | (?P<directive> \.[^;{]*  (?: \{ [^}]* \} )? ; )
  | (?P<instruction> [@\w][^;]* ; )
    """,
    re.VERBOSE | re.DOTALL,
)


@functools.lru_cache(16)  # a launch asks twice, and the same kernel is launched again
def parse(text: str) -> Module:
    target = re.search(r"^\s*\.target\s+(\w+)", text, re.MULTILINE)
    if target is None:
        raise SyntaxFault("the text has no .target: expected PTX as a compiler writes it")
    # The last text of a .file is its name; before it may come its folder.
    named = re.findall(r'\.file\s+(\d+)\s+(?:"[^"]*"\s+)?"([^"]*)"', text)
    files = {number: name.rpartition("/")[2] for number, name in named}
    shared = {
        name: int(count or 0) * SIZES[kind]
        for kind, name, count in re.findall(r"\.shared(?:\s+\.align\s+\d+)?\s+\.(\w+)\s+(\w+)\[(\d*)\]", text)
    }
    kernels = {}
    for head in re.finditer(r"\.entry\s+([$\w]+)\s*\((.*?)\)([^{;]*)\{", text, re.DOTALL):
        name, parameters, rest = head.groups()
        threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", rest)
        kernel = Kernel(name, _parameters(parameters), int(threads[1]) if threads else None)
        _read_body(kernel, text, head.end(), files)
        kernels[name] = kernel
    return Module(target[1], shared, kernels)


def _parameters(text: str) -> list[Parameter]:
    found, offset = [], 0
    for kind, _align, name, count in re.findall(
        r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)(?:\s+\.ptr(?:\s+\.\w+)?(?:\s+\.align\s+(\d+))?)?\s+([$\w]+)(?:\[(\d+)\])?",
        text,
    ):
        size = SIZES[kind] * int(count or 1)
        alignment = 64 if count else SIZES[kind]
        offset = -(-offset // alignment) * alignment
        found.append(Parameter(name, kind, offset, size))
        offset += size
    return found


def _read_body(kernel: Kernel, text: str, start: int, files: dict[str, str]) -> None:
    line, at, source, within = text.count("\n", 0, start) + 1, start, "", ""
    # By names of the text: what registers and labels inside of braces are called, and where the braces begin.
    scopes: list[dict[str, str]] = [{}]
    labels: list[dict[str, str]] = [{}]
    begins = [0]
    while scopes:
        found = _STATEMENT.match(text, at)
        if found is None:
            raise SyntaxFault(f"line {line} cannot be read: {text[at : at + 60]!r}")
        kind, part = found.lastgroup, found[0]
        if kind == "loc":
            number, row = part.split()[1:3]
            source = within = f"{files.get(number, number)}:{row}"
            # Triton names in a comment what was inlined where, the innermost first.
            for name, outer in re.findall(r"([^\s/\[\]]+):(\d+):\d+", part.partition("//")[2]):
                within = f"{name}:{outer}"
        elif kind == "label":
            name = found["label"] if len(scopes) == 1 else f"{found['label']}@{begins[-1]}"
            labels[-1][found["label"]] = name
            kernel.labels[name] = len(kernel.instructions)
        elif part == "{":
            scopes.append({})
            labels.append({})
            begins.append(len(kernel.instructions))
        elif part == "}":
            scopes.pop()
            _rename_labels(kernel.instructions[begins.pop() :], labels.pop())
        elif kind == "directive":
            if len(scopes) > 1 and part.startswith(".reg"):
                for name, count in re.findall(r"([$%\w]+)(?:<(\d+)>)?", part.split(None, 2)[2]):
                    for each in [f"{name}{i}" for i in range(int(count))] if count else [name]:
                        scopes[-1][each] = f"{each}@{line}"
        elif kind == "instruction":
            kernel.instructions.append(_instruction(part[:-1], line, (source, within), scopes))
        line += part.count("\n")
        at = found.end()


def _rename_labels(instructions: list[Instruction], names: dict[str, str]) -> None:
    for instruction in instructions:
        instruction.operands = [
            Symbol(names.get(operand.name, operand.name)) if isinstance(operand, Symbol) else operand
            for operand in instruction.operands
        ]


def _instruction(text: str, line: int, places: tuple[str, str], scopes: list[dict[str, str]]) -> Instruction:
    guard, negated = None, False
    if text.startswith("@"):
        word, text = text[1:].split(None, 1)
        negated = word.startswith("!")
        guard = _renamed(word.lstrip("!"), scopes)
    name, _, rest = text.strip().replace("\t", " ").replace("\n", " ").partition(" ")
    operands = [_operand(part, scopes, line) for part in _split(rest)]
    return Instruction(line, name, operands, guard, negated, *places)


def _renamed(name: str, scopes: list[dict[str, str]]) -> str:
    return next((names[name] for names in reversed(scopes) if name in names), name)


def _split(text: str) -> Iterator[str]:
    """Between the commas that no bracket holds."""
    depth, start = 0, 0
    for i, character in enumerate(text):
        depth += (character in "[{(") - (character in "]})")
        if character == "," and depth == 0:
            yield text[start:i].strip()
            start = i + 1
    if text[start:].strip():
        yield text[start:].strip()


def _operand(text: str, scopes: list[dict[str, str]], line: int) -> Operand:
    if text.startswith("{"):
        return Vector(tuple(_single(part, scopes, line) for part in _split(text[1:-1])))
    if text.startswith("["):
        parts: list[Register | Number | Symbol] = []
        base, *rest = _split(text[1:-1])
        base, _, offset = base.replace(" ", "").partition("+")
        if base:
            parts.append(_single(base, scopes, line))
        for part in rest:
            found = _operand(part, scopes, line)
            parts += found.parts if isinstance(found, Vector) else [found]  # type: ignore[list-item]
        return Address(tuple(parts), int(offset, 0) if offset else 0)
    if "|" in text:
        return Vector(tuple(_single(part, scopes, line) for part in text.split("|")))
    return _single(text, scopes, line)


def _single(text: str, scopes: list[dict[str, str]], line: int) -> Register | Number | Symbol:
    text = text.strip()
    renamed = _renamed(text, scopes)
    if text.startswith("%") or renamed != text or text == "_":
        return Register(renamed)
    if text[:2] in ("0f", "0F", "0d", "0D"):
        return Number(int(text[2:], 16))
    if re.fullmatch(r"-?\d+\.\d*(e[-+]?\d+)?", text):
        return Number(struct.unpack("<Q", struct.pack("<d", float(text)))[0])
    if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
        return Number(int(text.rstrip("U"), 0) & ((1 << 64) - 1))
    if re.fullmatch(r"!?[$\w.]+", text):
        return Symbol(text)
    raise SyntaxFault(f"line {line}: {text!r} is no operand that is known")
