"""Lookups of lanes that lie side by side in a tensor, forwards or backwards: one load for all, one addition for all.

Inductor looks each lane up by itself once an index is a vector, as in `table[q_idx % 8 - kv_idx % 8 + 7]`. In most
vectors such places follow one another. Places are data, so the code asks this of each vector. It asks once for all rows
of a tile where a place is the sum of a number of the row and one of the key. Other vectors are gathered.
"""

from __future__ import annotations

import re
from collections.abc import Set

_LANES = r"static_cast<int64_t>\((?P<width>\d+)\)"
# Places are kept in an array, for one lane after the other.
_ARRAY = re.compile(
    r"auto (?P<array>\w+) =\s*\[&\]\s*\{\s*__at_align__ std::array<(?P<type>int(?:32|64)_t), \d+> tmpbuf;\s*"
    rf"(?P<vector>\w+)\.store\(tmpbuf\.data\(\), {_LANES}\);\s*return tmpbuf;\s*\}}\s*\(\)\s*;"
)
_LOOP = (
    r"\s*(?:#pragma (?:GCC )?unroll \d+\s*)?for \(long (?P<lane>\w+) = 0; (?P=lane) < "
    + _LANES
    + r"; (?P=lane)\+\+\)\s*\{\s*"
)
_LOAD = re.compile(
    rf"\[&\]\s*\{{\s*__at_align__ std::array<(?:float|bool|int(?:32|64)_t), \d+> tmpbuf;{_LOOP}"
    r"tmpbuf\[(?P=lane)\] = (?P<tensor>\w+)\[static_cast<int64_t>\((?P<place>.*)\)\];\s*\}\s*"
    r"return [^;()]*\(tmpbuf\.data\(\)(?:, static_cast<int64_t>\((?P=width)\))?\);\s*\}\s*\(\)\s*;"
)
# Checks of places get a copy of the vector.
_COPY = re.compile(
    rf"\[&\]\s*\{{\s*__at_align__ std::array<(?P<type>\w+), \d+> tmpbuf;{_LOOP}"
    r"tmpbuf\[(?P=lane)\] = static_cast<(?P=type)>\((?P<array>\w+)\[(?P=lane)\]\);\s*\}\s*"
    r"return at::vec::Vectorized(?:N)?<[^<>]*>::loadu\(tmpbuf\.data\(\)\);\s*\}\s*\(\)\s*;"
)
_ADD = re.compile(
    r"\[&\]\s*\{\s*__at_align__ std::array<float, \d+> tmpbuf;\s*"
    r"(?P<value>\w+)\.store\(tmpbuf\.data\(\), static_cast<int64_t>\(\d+\)\);"
    rf"{_LOOP}(?P<tensor>\w+)\[static_cast<int64_t>\((?P<place>.*)\)\] \+= tmpbuf\[(?P=lane)\];\s*\}}\s*\}}\s*\(\)\s*;"
)
_INTS = r"at::vec::Vectorized<int32_t>"
_SUM = re.compile(r"(?P<first>\w+) \+ (?P<second>\w+)")
_OF_ROW = re.compile(rf"{_INTS}\((?P<number>\w+)\)")
_OF_KEY = re.compile(
    rf"{_INTS}::loadu\((?P<table>\w+) \+ static_cast<int64_t>\(TILE_KV \+ (?P<column>\w+)\)\)"
)
_TERM = re.compile(r"(?:\(?(?P<times>-?\d+)L\)?\*)?(?P<array>\w+)\[(?P<lane>\w+)\]")


def with_one_access(code: str, short: Set[str], rows: bool) -> str:
    """Inductor's code with such lookups.

    `short` names the tensors whose places fit 32 bits. With `rows`, the code loops over rows, and over keys within.
    """
    arrays = {found["array"]: found for found in _ARRAY.finditer(code)}
    vectors = {name: _as_int32(found["vector"], found["type"]) for name, found in arrays.items()}
    of_keys: dict[str, str] = {}  # names by table

    def at_once(found: re.Match) -> str:
        place = found["tensor"] in short and _split(found["place"], found["lane"], vectors)
        if not place:
            return found[0]
        shared, own = place
        if rows and (parts := _of_row_and_key(own, found.string[: found.start()])):
            table, column, number = parts
            own = f"{of_keys.setdefault(table, f'keys_{len(of_keys)}')}, {column}, {number}"
        at = f"{found['tensor']} + ({shared}), {own}"
        value = found.groupdict().get("value")
        return f"add_each({value}, {at});" if value else f"look_up({at});"

    def copied(found: re.Match) -> str:
        array = arrays.get(found["array"])
        return f"{array['vector']};" if array and array["type"] == found["type"] else found[0]

    code = _COPY.sub(copied, _ADD.sub(at_once, _LOAD.sub(at_once, code)))
    made = [
        f"const KeyPlaces<TILE_LD / W> {name}({table} + TILE_KV, TILE_COLUMNS);"
        for table, name in of_keys.items()
    ]
    return "\n".join([*made, code])


def _as_int32(vector: str, dtype: str) -> str:
    return f"converted<int32_t,1,int64_t,2>({vector})" if dtype == "int64_t" else vector


def _of_row_and_key(vector: str, before: str) -> tuple[str, str, str] | None:
    """The table of what is of the key in a vector of places, the column in it, and the row's number."""

    def defined(name: str, pattern: re.Pattern) -> re.Match | None:
        """The last definition so far."""
        start = f"auto {name} = "
        at = before.rfind(start) + len(start)
        return pattern.fullmatch(before, at, before.find(";", at)) if at >= len(start) else None

    if not (total := re.fullmatch(r"\w+", vector) and defined(vector, _SUM)):
        return None
    for of_row, of_key in (("first", "second"), ("second", "first")):
        row, key = defined(total[of_row], _OF_ROW), defined(total[of_key], _OF_KEY)
        if row and key:
            return key["table"], key["column"], row["number"]
    return None


def _split(place: str, lane: str, vectors: dict[str, str]) -> tuple[str, str] | None:
    """The part of a place that all lanes share and the sum of vectors that is left; None for anything but sums."""
    shared, own = [], []
    for term in _terms(place):
        if lane not in term:
            shared.append(term)
            continue
        found = _TERM.fullmatch(term)
        if found is None or found["array"] not in vectors:
            return None
        times = f" * at::vec::Vectorized<int32_t>({found['times']})" if found["times"] else ""
        own.append(vectors[found["array"]] + times)
    return (" + ".join(shared) or "0", " + ".join(own)) if own else None


def _terms(text: str) -> list[str]:
    """The parts of a sum, split where no parenthesis is open."""
    found, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0 and text.startswith(" + ", i):
            found.append(text[start:i])
            start = i + 3
    return [*found, text[start:]]
