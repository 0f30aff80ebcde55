"""What a line of blocks visits, as the text of a kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from .bounds import NUMBERS, Bounds, Line, SequenceEntry
from .runs import BlockRuns, Table


class Language(NamedTuple):
    """How C++ or Triton spells what differs between them."""

    least: str
    most: str
    either: str
    divided: str


CPP = Language("std::min<int64_t>({}, {})", "std::max<int64_t>({}, {})", "({} ? {} : {})", "/")
TRITON = Language("tl.minimum({}, {})", "tl.maximum({}, {})", "tl.where({}, {}, {})", "//")


class Term:
    """An integer as text. Operations with numbers keep it short."""

    def __init__(self, text: str, language: Language, closed: bool = True):
        self.text, self.language = text, language
        self.closed = closed  # whether it needs no parentheses

    def __str__(self) -> str:
        return self.text if self.closed else f"({self.text})"

    def _with(self, left: Any, sign: str, right: Any) -> Term:
        return Term(f"{left} {sign} {right}", self.language, False)

    def __add__(self, other: Any) -> Any:
        if type(other) is int and other < 0:
            return self - -other
        return self if _is(other, 0) else self._with(self, "+", other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        if type(other) is int and other < 0:
            return self + -other
        return self if _is(other, 0) else self._with(self, "-", other)

    def __rsub__(self, other: Any) -> Term:
        return self._with(other, "-", self)

    def __mul__(self, other: int) -> Any:
        return 0 if other == 0 else self if other == 1 else self._with(self, "*", other)

    def __floordiv__(self, other: int) -> Term:
        return self if other == 1 else self._with(self, self.language.divided, other)

    def __mod__(self, other: Any) -> Any:
        """At least 0 for negative numbers too: a kernel's own remainder may be negative there."""
        if type(other) is int and other & (other - 1) == 0:
            return self._with(self, "&", other - 1)
        inside = self._with(self, "%", other) + other
        return self._with(inside, "%", other)

    def __lt__(self, other: Any) -> Term:
        return self._with(self, "<", other)

    def __gt__(self, other: Any) -> Term:
        return self._with(self, ">", other)

    def __eq__(self, other: Any) -> Any:
        return self._with(self, "==", other)


def _is(value: Any, number: int) -> bool:
    return type(value) is int and value == number


class _OnText:
    """Arithmetic on terms and numbers, which keeps the lines of what is named."""

    def __init__(self, language: Language):
        self.language = language
        self.lines: list[tuple[str, str]] = []

    def _call(self, form: str, *parts: Any) -> Term:
        texts = [part.text if isinstance(part, Term) else str(part) for part in parts]
        return Term(form.format(*texts), self.language)

    def least(self, x: Any, y: Any) -> Any:
        return min(x, y) if type(x) is type(y) is int else self._call(self.language.least, x, y)

    def most(self, x: Any, y: Any) -> Any:
        return max(x, y) if type(x) is type(y) is int else self._call(self.language.most, x, y)

    def either(self, condition: Any, x: Any, y: Any) -> Any:
        if isinstance(condition, bool):
            return x if condition else y
        return self._call(self.language.either, condition, x, y)

    def looked_up(self, table: Callable[[str, int], str], place: Any, column: int) -> Term:
        return Term(table(str(place), column), self.language)

    def named(self, name: str, value: Any) -> Any:
        if not isinstance(value, Term):
            return value
        self.lines.append((name, value.text))
        return Term(name, self.language)


class Walk(NamedTuple):
    """One pass over blocks: those of one kind that a schedule names, or all without a schedule."""

    title: str
    masked: bool  # whether mask_mod decides in these blocks
    name: str = "all"  # "partial" or "full"
    form: str | None = None  # the schedule's
    # Of lists and runs: their table, as arguments of the kernel.
    offsets: Any = None
    runs: Any = None
    all_rows: bool = False  # whether every tile is known to have all its rows, as a map's full ones
    # Of bounds: the tensors that are read first, by name; lines that compute; where runs begin and end, in turn.
    numbers: Mapping[str, Any] = {}
    lines: Sequence[tuple[str, str]] = ()
    ends: Sequence[str] = ()


class Kernel(Protocol):
    """How a kernel of one language names what it holds."""

    @property
    def language(self) -> Language: ...

    def argument(self, name: str, tensor: Any) -> Any:
        """The tensor as an argument of the kernel with this name."""
        ...

    def document(self, table: Any) -> Callable[[str, int], str]:
        """Text that reads a column of the table of documents at a position."""
        ...

    def entry(self, table: Any) -> Callable[[int], str]:
        """Text that reads a column of the table of sequences, for the tile's sequence."""
        ...

    def number(self) -> str:
        """The line, among the schedule's."""
        ...

    def lengths(self) -> tuple[str, str]:
        """How many queries and keys the call has."""
        ...

    def tile(self, side: str) -> tuple[str, str]:
        """With a map: the index of the line's first token, and how many it has. It visits `side`."""
        ...


def walks(schedule: Any, side: str, masked: bool, mapped: bool, kernel: Kernel) -> list[Walk]:
    """Passes over what one line of a schedule visits of `side`, "keys" or "queries"."""
    if schedule is None:
        return [Walk(f"All {side}.", masked)]
    found = _in_tables if isinstance(schedule, BlockRuns) else _in_bounds
    return found(schedule, side, masked, mapped, kernel)


# What kernels call a table.
_TABLES = {"lists": ("counts", "indices"), "runs": ("offsets", "runs")}


def _in_tables(schedule: BlockRuns, side: str, masked: bool, mapped: bool, kernel: Kernel) -> list[Walk]:
    def table(prefix: str, tensors: Table) -> list[Any]:
        names = _TABLES[schedule.form]
        return [kernel.argument(prefix + name, t) for name, t in zip(names, tensors, strict=True)]

    partial, full = schedule.side(side)
    title = f"Blocks of {side} where mask_mod decides." if masked else f"Listed blocks of {side}."
    found = [Walk(title, masked, "partial", schedule.form, *table("", partial))]
    if full is not None:
        title = f"Full blocks of {side}."
        found.append(
            Walk(title, False, "full", schedule.form, *table("full_", full))._replace(all_rows=mapped)
        )
    return found


def _in_bounds(bounds: Bounds, side: str, masked: bool, mapped: bool, kernel: Kernel) -> list[Walk]:
    """The second pass reuses what the first has computed."""
    language = kernel.language
    tensors = {name: getattr(bounds, name) for name in NUMBERS if is_tensor(getattr(bounds, name))}
    known: dict[str, Any] = {
        name: Term(name, language) if name in tensors else _constant(getattr(bounds, name))
        for name in NUMBERS
    }
    known |= {name: int(getattr(bounds, name)) for name in ("q_block", "kv_block")}
    documents: Any = None if bounds.documents is None else kernel.document(bounds.documents)
    written = bounds._replace(documents=documents, **known)
    on = _OnText(language)
    line = _line_of_map(bounds, side, kernel, on) if mapped else _line(written, side, kernel, on)
    partial, full = ([*map(str, ends)] for ends in written.ends(side, line, on))
    # `left_of_batch`, not `left`: in Triton's loops a name keeps its type.
    numbers = {name: kernel.argument(f"{name}_of_batch", tensor) for name, tensor in tensors.items()}
    title = f"Blocks of {side} where mask_mod decides." if masked else f"Blocks of {side} that are not full."
    return [
        Walk(title, masked, "partial", "bounds", numbers=numbers, lines=on.lines, ends=partial),
        Walk(f"Full blocks of {side}.", False, "full", "bounds", all_rows=mapped, ends=full),
    ]


def _line(written: Bounds, side: str, kernel: Kernel, on: _OnText) -> Line:
    def number(text: str) -> Any:
        return int(text) if text.isdigit() else Term(text, kernel.language, text.isidentifier())

    queries, keys = kernel.lengths()
    return written.line(side, number(kernel.number()), number(queries), number(keys), on)


def _line_of_map(bounds: Bounds, side: str, kernel: Kernel, on: _OnText) -> Line:
    entry, language = kernel.entry(bounds.sequence_table), kernel.language
    read = ("key_tile", "keys") if side == "keys" else ("keys", "query_tile", "queries")
    fields = {
        name: on.named(name, Term(entry(column), language)) if name in read else None
        for column, name in enumerate(SequenceEntry._fields)
    }
    index, tokens = kernel.tile(side)
    return Line(Term(index, language), Term(tokens, language), SequenceEntry(**fields))


def _constant(number: Any) -> int | None:
    return None if number is None else int(number)


def is_tensor(field: Any) -> bool:
    """Whether it is a tensor, in a graph or not, rather than a number."""
    return not (field is None or isinstance(field, int) or getattr(field, "is_Integer", False))
