"""What a line of blocks visits under bounds, as the text of a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import sympy

from flex_inductor.op.schedule import OfSequence, RowBounds, SequenceBounds


class Language(NamedTuple):
    """How C++ or Triton writes what differs."""

    least: str
    most: str
    either: str
    divided: str


CPP = Language("std::min<int64_t>({}, {})", "std::max<int64_t>({}, {})", "({} ? {} : {})", "/")
TRITON = Language("tl.minimum({}, {})", "tl.maximum({}, {})", "tl.where({}, {}, {})", "//")


class Term:
    """An integer as text. Beside numbers it stays as short as it can be."""

    def __init__(self, text: str, language: Language, whole: bool = True):
        self.text, self.language = text, language
        self.whole = whole  # whether it needs no parentheses

    def __str__(self) -> str:
        return self.text if self.whole else f"({self.text})"

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
        """From 0 on, also of what is negative, where kernels' own would be too."""
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

    __hash__ = None


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


class Ends(NamedTuple):
    """Where the runs of a line begin and end: names and numbers, in turn, and the lines that compute them."""

    numbers: Any  # tensors that are read first, by name
    lines: list[tuple[str, str]]
    partial: list[str]
    full: list[str]


_NUMBERS = ("left", "right", "chunk", "shift", "prefix")


def ends(
    bounds: RowBounds,
    side: str,
    language: Language,
    place: str,
    queries: str,
    keys: str,
    document: Callable[[str, int], str] | None = None,
) -> Ends:
    """Of the line at `place`, which visits blocks of `side`. `document` reads the table of documents, if any."""

    def number(text: str) -> Any:
        return int(text) if text.isdigit() else Term(text, language, text.isidentifier())

    numbers, known = _numbers(bounds, language)
    known = known._replace(documents=document)
    on = _OnText(language)
    line = known.row if side == "keys" else known.column
    return _ends(numbers, on, line(number(place), number(queries), number(keys), on))


def ends_in_sequence(
    bounds: SequenceBounds,
    side: str,
    language: Language,
    index: str,
    tokens: str,
    entry: Callable[[int], str],
) -> Ends:
    """Of a tile with this index and so many tokens. `entry` is a column of the table's line of its sequence."""
    numbers, known = _numbers(bounds, language)
    on = _OnText(language)
    line, read = (
        (known.row, ("key_tile", "keys"))
        if side == "keys"
        else (known.column, ("keys", "query_tile", "queries"))
    )
    of = {
        name: on.named(name, Term(entry(column), language)) if name in read else None
        for column, name in enumerate(OfSequence._fields)
    }
    return _ends(numbers, on, line(Term(index, language), Term(tokens, language), OfSequence(**of), on))


def _numbers(bounds: Any, language: Language) -> tuple[dict[str, Any], Any]:
    """The window's numbers that are tensors, and the bounds with what kernels call them."""
    given = {name: field for name, field in bounds._asdict().items() if name in _NUMBERS}
    numbers = {name: number for name, number in given.items() if is_tensor(number)}
    known = {
        name: Term(name, language) if name in numbers else None if number is None else int(number)
        for name, number in given.items()
    }
    return numbers, bounds._replace(q_block=int(bounds.q_block), kv_block=int(bounds.kv_block), **known)


def _ends(numbers: dict[str, Any], on: _OnText, found: tuple[list[Any], list[Any]]) -> Ends:
    partial, full = found
    return Ends(numbers, on.lines, [*map(str, partial)], [*map(str, full)])


def is_tensor(field: Any) -> bool:
    return field is not None and not isinstance(field, (int, sympy.Integer))
