"""flex_inductor.trace_mod: a mod run in plain Python on a window of real scores, every value shown by line."""

from __future__ import annotations

import itertools
import linecache
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flex_inductor import errors
from flex_inductor.mod_ir import errors as mod_errors
from flex_inductor.mod_ir.arguments import INDEX_DTYPE, MASK_LANES, SCORE_LANES, score_dtype
from flex_inductor.mod_ir.source_lines import Line

MOST_LANES = 1 << 12


def trace_mod(
    mod: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    b: int = 0,
    h: int = 0,
    q_range: tuple[int, int] = (0, 8),
    kv_range: tuple[int, int] = (0, 8),
    *,
    scale: float | None = None,
) -> ModTrace:
    """Run `mod` for queries and keys in two ranges [start, stop), and keep every value that it computes.

    It is called as it is, once for each pair, on 0-d tensors with the values that a kernel would give it: prints and
    breakpoints work.

    Args:
        mod: a score_mod or a mask_mod.
        q: [B, H, M, D].
        k: [B or 1, H, N, D], or fewer heads that divide H.
        b: the batch.
        h: the head.
        q_range: the first query and the one after the last.
        kv_range: the first key and the one after the last.
        scale: 1/sqrt(D) by default.

    Returns:
        ModTrace: `print` it for every value by line of the mod.

    Raises:
        FlexValueError: a number is outside of the tensors, there are more than 4096 pairs, or the tensors do not fit.
        FlexTypeError: the mod takes other arguments or returns something else.

    Example:
        >>> query = torch.zeros(1, 1, 8, 16)
        >>> ranges = {"q_range": (0, 3), "kv_range": (0, 4)}
        >>> flex_inductor.trace_mod(mods.soft_distance(1, 2.0), query, query, **ranges).result
        tensor([[ 0.,  0., -2., -4.],
                [ 0.,  0.,  0., -2.],
                [-2.,  0.,  0.,  0.]], dtype=torch.float64)
    """
    lanes = _lanes_of(mod)
    rows, columns = _window(q, k, b, h, q_range, kv_range)
    raw = _scores(q[b, h, rows], k[min(b, len(k) - 1), h * k.size(1) // q.size(1), columns], scale)
    trace = ModTrace(getattr(mod, "__name__", type(mod).__name__), rows, columns)
    for i, m in enumerate(range(rows.start, rows.stop)):
        for j, n in enumerate(range(columns.start, columns.stop)):
            index = {"b": b, "h": h, "q_idx": m, "kv_idx": n}
            given = {name: torch.tensor(at, dtype=INDEX_DTYPE, device=q.device) for name, at in index.items()}
            recorder = _Recorder(trace, (i, j))
            with torch.no_grad():
                if "score" in lanes:
                    given["score"] = raw[i, j].clone()
                    trace.note("score", None, (i, j), given["score"], "score")
                with recorder:
                    result = mod(*(given[name] for name in lanes))
            mod_errors.check_mod_result("score_mod" if "score" in lanes else "mask_mod", result)
            trace.result[i, j] = result.item()
    return trace


@dataclass
class Step:
    """One operation of the mod.

    Args:
        text: the expression.
        line: where it is in the source, if that is known.
        values: what it gave in each lane of the window, by (row, column).

    Example:
        >>> query = torch.zeros(1, 1, 8, 16)
        >>> ranges = {"q_range": (0, 1), "kv_range": (0, 2)}
        >>> trace = flex_inductor.trace_mod(mods.softcap(2.0), query, query, **ranges)
        >>> first = trace.steps[0]
        >>> first.text, first.values
        ('score', {(0, 0): tensor(0.), (0, 1): tensor(0.)})
    """

    text: str
    line: Line | None
    values: dict[tuple[int, int], Any] = field(default_factory=dict)


class ModTrace:
    r"""What `trace_mod` found. `print` shows every value by line of the mod.

    Args:
        name: of the mod.
        rows: the queries.
        columns: the keys.

    Example:
        >>> query = torch.zeros(1, 1, 8, 16)
        >>> ranges = {"q_range": (0, 2), "kv_range": (0, 2)}
        >>> trace = flex_inductor.trace_mod(masks.causal(), query, query, **ranges)
        >>> print(str(trace).partition("\n")[0])
        causal on queries 0 to 1 (down) and keys 0 to 1 (across)
        >>> trace.result  # [queries, keys]
        tensor([[1., 0.],
                [1., 1.]], dtype=torch.float64)
    """

    def __init__(self, name: str, rows: slice, columns: slice):
        self.name, self.rows, self.columns = name, rows, columns
        self.result = torch.zeros(rows.stop - rows.start, columns.stop - columns.start, dtype=torch.float64)
        self._known: dict[Any, Step] = {}

    @property
    def steps(self) -> list[Step]:
        """The operations in the order in which they ran."""
        return [*self._known.values()]

    def note(self, key: Any, line: Line | None, lane: tuple[int, int], value: Any, text: str) -> None:
        """Keep a value.

        Args:
            key: of the operation.
            line: where it is in the source, if that is known.
            lane: (row, column) in the window.
            value: what it gave.
            text: the expression.

        Example:
            >>> query = torch.zeros(1, 1, 8, 16)
            >>> ranges = {"q_range": (0, 1), "kv_range": (0, 1)}
            >>> trace = flex_inductor.trace_mod(masks.causal(), query, query, **ranges)
            >>> trace.note("mine", None, (0, 0), torch.tensor(7), "a value of mine")
            >>> trace.steps[-1].text
            'a value of mine'
        """
        self._known.setdefault(key, Step(text, line)).values[lane] = value

    def __str__(self) -> str:
        rows, columns = self.rows, self.columns
        lines = [
            f"{self.name} on queries {rows.start} to {rows.stop - 1} (down) and keys {columns.start} to "
            f"{columns.stop - 1} (across)"
        ]
        last = None
        for step in self.steps:
            if step.line is not None and step.line != last:
                lines += ["", f"{step.line}  {step.line.text}"]
                last = step.line
            lines += self._grid(step)
        return "\n".join(lines)

    def _grid(self, step: Step) -> Iterator[str]:
        rows, columns = map(range, self.result.shape)
        cells = [[_shown(step.values.get((i, j))) for j in columns] for i in rows]
        by_query = any(row != cells[0] for row in cells)
        by_key = any(cell != row[0] for row in cells for cell in row)
        if not by_query:
            cells = cells[:1]
        if not by_key:  # queries side by side
            cells = [[row[0] for row in cells]]
        if not by_query and not by_key:
            yield f"    {step.text} = {cells[0][0]}"
            return
        along = "" if by_query and by_key else f", for each {'query' if by_query else 'key'}"
        yield f"    {step.text} ={along}"
        width = max(len(cell) for row in cells for cell in row)
        for row in cells:
            yield "      " + " ".join(f"{cell:>{width}}" for cell in row)


def _shown(value: Any) -> str:
    if not isinstance(value, Tensor):
        return "-" if value is None else str(value)
    if value.dim():
        return f"[{', '.join(map(str, value.shape))}]"
    number = value.item()
    return f"{number:.4g}" if isinstance(number, float) else str(number)


class _Recorder(TorchFunctionMode):
    """Notes what torch functions give, by the place in the user's code that calls them."""

    def __init__(self, trace: ModTrace, lane: tuple[int, int]):
        super().__init__()
        self.trace, self.lane = trace, lane
        self.met: Counter[Any] = Counter()  # how often each place has run: in a loop, many times

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        frame = _users_frame(sys._getframe(1))
        if isinstance(result, Tensor) and frame is not None and getattr(func, "__name__", "") != "__get__":
            key = (frame.f_code, frame.f_lasti)
            self.met[key] += 1
            path, number = frame.f_code.co_filename, frame.f_lineno
            line = Line(
                Path(path).name, number, frame.f_code.co_name, linecache.getline(path, number).strip()
            )
            text = _expression(frame) or getattr(func, "__name__", str(func))
            self.trace.note((*key, self.met[key]), line, self.lane, result, text)
        return result


_TORCH = str(Path(torch.__file__).parent)


def _users_frame(frame: FrameType | None) -> FrameType | None:
    """The frame that called torch; None if that is a debugger's or this file's."""
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename == __file__:
        return None
    return None if Path(frame.f_code.co_filename).name in ("pdb.py", "bdb.py", "<stdin>") else frame


def _expression(frame: FrameType) -> str:
    """The part of a line that is being evaluated, where Python knows it (from 3.11 on)."""
    code: Any = frame.f_code
    if not hasattr(code, "co_positions"):
        return ""
    start, end, first, last = next(itertools.islice(code.co_positions(), frame.f_lasti // 2, None))
    if start is None or start != end or first is None:
        return ""
    return linecache.getline(code.co_filename, start).encode()[first:last].decode().strip()


def _lanes_of(mod: Any) -> tuple[str, ...]:
    """A mask_mod's arguments if `mod` can be called with them, else a score_mod's."""
    try:
        mod_errors.check_arity("mask_mod", mod, MASK_LANES)
        return MASK_LANES
    except errors.FlexError:
        mod_errors.check_arity("score_mod", mod, SCORE_LANES)
        return SCORE_LANES


def _window(
    q: Tensor, k: Tensor, b: int, h: int, q_range: tuple[int, int], kv_range: tuple[int, int]
) -> tuple[slice, slice]:
    bad = errors.bad_argument
    for name, tensor in (("q", q), ("k", k)):
        if not isinstance(tensor, Tensor) or tensor.dim() != 4:
            raise bad(f"trace_mod: {name}", "a tensor of 4 dimensions", errors.described(tensor))
    if q.size(-1) != k.size(-1):
        raise errors.head_dims_differ(q, k)
    for name, index, size in (("b", b, q.size(0)), ("h", h, q.size(1))):
        if not 0 <= index < size:
            raise bad(f"trace_mod: {name}", f"0 to {size - 1}", index)
    found = []
    for name, (start, stop), size in (("q_range", q_range, q.size(2)), ("kv_range", kv_range, k.size(2))):
        if not 0 <= start < min(stop, size):
            raise bad(f"trace_mod: {name}", f"(start, stop) within 0 to {size}", (start, stop))
        found.append(slice(start, min(stop, size)))
    if math.prod(span.stop - span.start for span in found) > MOST_LANES:
        raise bad("trace_mod: q_range", f"at most {MOST_LANES} pairs of query and key", q_range)
    return found[0], found[1]


def _scores(q: Tensor, k: Tensor, scale: float | None) -> Tensor:
    """As kernels give them to score_mod: scaled, and wider than 16 bits."""
    dtype = score_dtype(q.dtype)
    return (q.detach().to(dtype) @ k.detach().to(dtype).T) * (
        1 / math.sqrt(q.size(-1)) if scale is None else scale
    )
