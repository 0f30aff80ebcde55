"""What each page of the gallery shows of its mod: a check against fp64, a picture, and times on this CPU.

A page calls `show.attention(...)` once, last. Sphinx-gallery puts the result's HTML on the page, and `scraper` makes
the thumbnail. `noting()` runs a page for its arguments alone, without computing anything.
"""

from __future__ import annotations

import html
import math
import platform
import statistics
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pictures
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.functional import scaled_dot_product_attention

from flex_inductor import AuxRequest, BlockMask, RunSchedule, create_block_mask, flex_attention
from flex_inductor.masks.draw import tile_shares

ROUNDS = 5
OURS, DENSE, TORCH = "flex_inductor, compiled", "dense", "torch's flex_attention, compiled"


@dataclass
class Case:
    """The arguments of `attention`."""

    mask: Callable | None = None
    score: Callable | None = None
    caption: str = ""
    length: int | tuple[int, int] = 1024  # or queries and keys
    batch: int = 1
    heads: int = 2
    head_dim: int = 64
    library: Callable | None = None  # the library's function for the score, or else for the mask
    # Sizes of the picture, and what the mod's names mean there.
    small: dict[str, Any] = field(default_factory=dict)
    at: Sequence[tuple[int, int]] = ((0, 0),)  # batches and heads that are drawn
    softmax: dict[str, Any] = field(default_factory=dict)  # arguments of flex_attention beside the mods
    block: int = 128  # of tiles
    kept: Tensor | None = None  # [batch, heads, queries, keys] of the picture: which pairs dropout leaves
    lacking: str = ""  # why torch's flex_attention has no time

    @property
    def lengths(self) -> tuple[int, int]:
        return (self.length, self.length) if isinstance(self.length, int) else self.length


_noted: list[Case] | None = None


@contextmanager
def noting() -> Iterator[list[Case]]:
    """Meanwhile `attention` only adds its arguments to this list."""
    global _noted
    _noted = []
    try:
        yield _noted
    finally:
        _noted = None


def attention(**arguments: Any) -> Shown | None:
    """Checks, draws and times a call; `Case` says what the arguments are."""
    case = Case(**arguments)
    if _noted is not None:
        _noted.append(case)
        return None
    torch.set_num_threads(1)
    torch.compiler.reset()  # the pages of one process share this file's code, and Dynamo's limit of versions of it
    shown = Shown(case)
    with torch.no_grad():
        shown.measure()
    global _last
    _last = shown
    return shown


class Shown:
    """One call: what its page shows."""

    def __init__(self, case: Case) -> None:
        # Dynamo finds the globals of __main__ by that name, and every page of a process has another __main__.
        case = replace(case, mask=with_names(case.mask), score=with_names(case.score))
        self.case = case
        q_len, kv_len = case.lengths
        self.block_mask: BlockMask | None = None
        if case.mask is not None:
            self.block_mask = create_block_mask(
                case.mask, case.batch, case.heads, q_len, kv_len, device="cpu", BLOCK_SIZE=case.block
            )
        self.times: dict[str, float] = {}
        self.errors: tuple[float, float] = (math.nan, math.nan)
        self.drawn = small_pictures(case)

    def measure(self) -> None:
        case, (q_len, kv_len) = self.case, self.case.lengths
        torch.manual_seed(0)
        query = torch.randn(case.batch, case.heads, q_len, case.head_dim)
        key, value = (torch.randn(case.batch, case.heads, kv_len, case.head_dim) for _ in range(2))
        inputs = query, key, value

        def ours(query, key, value):
            return flex_attention(query, key, value, case.score, self.block_mask, **case.softmax)

        def theirs(query, key, value):
            return torch_flex.flex_attention(query, key, value, case.score, self.block_mask)

        sides = {OURS: torch.compile(ours, backend="flex_inductor", fullgraph=True), DENSE: self.dense_side()}
        if not case.lacking:
            sides[TORCH] = torch.compile(theirs, fullgraph=True)
        self.check({name: side(*inputs) for name, side in sides.items()}, inputs)
        times: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(ROUNDS):
            for name, side in sides.items():
                start = time.perf_counter()
                side(*inputs)
                times[name].append(time.perf_counter() - start)
        self.times = {name: 1e3 * statistics.median(found) for name, found in times.items()}

    def check(self, outs: dict[str, Tensor], inputs: tuple[Tensor, Tensor, Tensor]) -> None:
        """Our error is at most dense attention's in fp32, and rounding; the other sides compute the same."""
        kept, ours = self.kept(*inputs), outs[OURS]
        exact = dense(self.case, *(tensor.double() for tensor in inputs), kept=kept)
        error, dense_error = (
            (found - exact).abs().max().item() for found in (ours, dense(self.case, *inputs, kept=kept))
        )
        rounding = 18 * torch.finfo(ours.dtype).eps * exact.abs().max().item()
        if not error <= dense_error + rounding:
            raise AssertionError(
                f"error {error:.3g}, dense attention's {dense_error:.3g}, rounding {rounding:.3g}"
            )
        for name, out in outs.items():
            # What sees nothing may be NaN there. Dropout of the dense side draws other numbers.
            if kept is None and not torch.allclose(out.nan_to_num(0.0), ours, atol=1e-4):
                raise AssertionError(f"{name} computes something else")
        if self.case.library is not None:
            check_same(self.case)
        self.errors = error, dense_error

    def kept(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
        """What dropout leaves of each weight."""
        if "dropout_p" not in self.case.softmax:
            return None
        request = AuxRequest(dropout_mask=True)
        _, aux = flex_attention(
            query, key, value, self.case.score, self.block_mask, return_aux=request, **self.case.softmax
        )
        return aux.dropout_mask / (1 - round(self.case.softmax["dropout_p"] * 65536) / 65536)

    def dense_side(self) -> Callable:
        """The fastest way to say the same in torch without flex_attention, its tables made beforehand."""
        case = self.case
        bias = None if case.score is None else added(case)
        seen = None if case.mask is None else table(case.mask, case.batch, case.heads, *case.lengths)
        if "sinks" in case.softmax or (case.score is not None and bias is None):
            self.dense_name = "softmax of all scores, in torch"
            return lambda query, key, value: dense(case, query, key, value, seen=seen)
        self.dense_name = "scaled_dot_product_attention, a table of the " + (
            "mask" if bias is None else "bias"
        )
        if bias is not None and seen is not None:
            bias = torch.where(seen, bias, -math.inf)
        dropout = case.softmax.get("dropout_p", 0.0)
        mask = seen if bias is None else bias
        return lambda query, key, value: scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout
        )

    # What the page shows.

    def _repr_html_(self) -> str:
        panels, (q_len, kv_len) = list(self.drawn), self.case.lengths
        if self.block_mask is not None:
            title = f"{q_len} queries, {kv_len} keys, tiles of {self.case.block}"
            if self.case.batch > 1:
                title = f"batch {self.case.at[0][0]}, {title}"
            panels.insert(0, pictures.tiles(*self.shares(), title, self.case.caption))
        figure = pictures.figure([panel.svg for panel in panels], self.case.caption, bool(self.block_mask))
        return f'<div class="shown">{figure}{self.facts()}{self.table()}</div>'

    def facts(self) -> str:
        lines = []
        if self.block_mask is not None:
            lines.append(("Sparsity", self.counts()))
        error, dense_error = self.errors
        lines.append(("Error", f"{error:.1e} against fp64; dense attention in fp32 {dense_error:.1e}"))
        q_len, kv_len = self.case.lengths
        sizes = f"B{self.case.batch} H{self.case.heads} D{self.case.head_dim}, {q_len} queries, {kv_len} keys, fp32"
        lines.append(("Timed", f"{sizes}, forward, one thread of {processor()}, torch {torch.__version__}"))
        items = "".join(f"<dt>{name}</dt><dd>{html.escape(text)}</dd>" for name, text in lines)
        return f"<dl>{items}</dl>"

    def shares(self) -> tuple[Tensor, Tensor]:
        """Which tiles are partial, and which are full."""
        return tile_shares(RunSchedule.from_block_mask(self.block_mask), *self.case.at[0])

    def counts(self) -> str:
        partial, full = self.shares()
        counts = {"full": int(full.sum()), "partial": int(partial.sum())}
        counts["empty"] = full.numel() - sum(counts.values())
        tiles = ", ".join(f"{count} {name}" for name, count in counts.items())
        return f"{counts['empty'] / full.numel():.0%} of the tiles are not visited: {tiles}"

    def table(self) -> str:
        longest, ours = max(self.times.values()), self.times[OURS]
        rows = []
        for name, ms in self.times.items():
            bar = f'<i class="{"ours" if name == OURS else "other"}" style="width:{100 * ms / longest:.1f}%"></i>'
            label = self.dense_name if name == DENSE else name
            rows.append(
                f'<tr><th scope="row">{html.escape(label)}</th><td>{ms:.2f} ms</td><td>{ms / ours:.2f}</td>'
                f'<td class="bar">{bar}</td></tr>'
            )
        if self.case.lacking:
            why = html.escape(self.case.lacking)
            rows.append(f'<tr><th scope="row">{html.escape(TORCH)}</th><td colspan="3">{why}</td></tr>')
        head = '<tr><th scope="col">Side</th><th scope="col">Median</th><th scope="col">Ours is 1</th><td></td></tr>'
        return f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"


# Dense attention, and tables of mods.


def dense(
    case: Case,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kept: Tensor | None = None,
    seen: Tensor | None = None,
) -> Tensor:
    """The definition, with every score in memory, in the inputs' dtype."""
    places = lanes(*query.shape[:3], key.size(2))
    score = query @ key.mT / math.sqrt(query.size(-1))
    if case.score is not None:
        score = case.score(score, *places)
    if case.mask is not None:
        score = torch.where(case.mask(*places) if seen is None else seen, score, -math.inf)
    peak = score.amax(-1, keepdim=True).clamp(min=-1e30)  # finite where a row sees nothing
    weight = torch.exp(score - peak)
    total = weight.sum(-1, keepdim=True)
    if "sinks" in case.softmax:
        total = total + torch.exp(case.softmax["sinks"].to(score.dtype)[:, None, None] - peak)
    weight = weight / total.clamp(min=torch.finfo(score.dtype).tiny)
    return (weight if kept is None else weight * kept) @ value


def lanes(batch: int, heads: int, q_len: int, kv_len: int) -> tuple[Tensor, ...]:
    """b, h, q_idx and kv_idx of all lanes, which broadcast."""
    shapes = ((-1, 1, 1, 1), (-1, 1, 1), (-1, 1), (-1,))
    return tuple(
        torch.arange(n).view(shape) for n, shape in zip((batch, heads, q_len, kv_len), shapes, strict=True)
    )


def table(mask: Callable, batch: int, heads: int, q_len: int, kv_len: int) -> Tensor:
    """The mask of every lane; one head or batch where it is the same for all."""
    found = torch.as_tensor(mask(*lanes(batch, heads, q_len, kv_len)))
    return found.broadcast_to(torch.broadcast_shapes(found.shape, (1, 1, q_len, kv_len)))


def added(
    case: Case, sizes: tuple[int, int, int, int] | None = None, score: Callable | None = None
) -> Tensor | None:
    """The bias of a score_mod that only adds one."""
    batch, heads, q_len, kv_len = sizes or (case.batch, case.heads, *case.lengths)
    score, places = score or case.score, lanes(batch, heads, q_len, kv_len)
    bias, ones = (score(torch.full((1, 1, q_len, kv_len), x), *places) for x in (0.0, 1.0))
    return bias if torch.allclose(ones - bias, torch.ones(()), atol=1e-4) else None


def check_same(case: Case) -> None:
    """The library's function says what the page's does."""
    sizes = (case.batch, case.heads, *case.lengths)
    if case.score is None:
        same = torch.equal(*(table(mask, *sizes) for mask in (case.mask, case.library)))
    else:
        score = torch.randn(1, 1, *case.lengths)
        same = torch.allclose(*(mod(score, *lanes(*sizes)) for mod in (case.score, case.library)))
    if not same:
        raise AssertionError(f"{case.library.__name__} of the library is another function than the page's")


# Pictures of a small case.


def small_pictures(case: Case) -> list[pictures.Panel]:
    """The tokens that each query sees, and the bias or the curve of a score_mod."""
    small = dict(case.small)
    length, tile = small.pop("length", 48), small.pop("tile", 8)
    q_len, kv_len = (length, length) if isinstance(length, int) else length
    sizes = case.batch, case.heads, q_len, kv_len
    mask, score = (with_names(mod, small) for mod in (case.mask, case.score))
    seen = None if mask is None else table(mask, *sizes).expand(sizes)
    if case.kept is not None:
        seen = seen & case.kept
    bias = None if score is None else added(case, sizes, score)
    panels = []
    for b, h in case.at:
        which = [f"batch {b}"] * (case.batch > 1) + [f"head {h}"] * (len(case.at) > 1 and case.batch == 1)
        where = ", ".join([*which, f"{q_len} queries", f"{kv_len} keys"])
        if bias is not None:
            visible = None if seen is None else seen[b, h]
            panels.append(pictures.heat(bias.expand(sizes)[b, h], visible, where, case.caption))
        elif seen is not None:
            panels.append(pictures.tokens(seen[b, h], tile, where, case.caption))
    if score is not None and bias is None:
        scores, nowhere = torch.linspace(-100, 100, 101), [torch.zeros((), dtype=torch.int64)] * 4
        panels.append(pictures.curve(scores, score(scores, *nowhere), "new score by score", case.caption))
    return panels


def with_names(mod: Callable | None, names: dict[str, Any] | None = None) -> Callable | None:
    """The function with globals of its own, some of them others, which belong to no module."""
    if mod is None:
        return None
    own, names = {name: value for name, value in mod.__globals__.items() if name != "__name__"}, names or {}
    if unknown := names.keys() - own.keys():
        raise NameError(f"small: expected names of the page, got {sorted(unknown)}")
    return types.FunctionType(mod.__code__, own | names, mod.__name__, closure=mod.__closure__)


def processor() -> str:
    """What the machine calls its processor."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


# Sphinx-gallery.

_last: Shown | None = None


def scraper(block: tuple, variables: dict[str, Any], settings: dict[str, Any]) -> str:
    """The thumbnail of what was shown last, which is no picture of the page."""
    global _last
    if _last is not None:
        _last.drawn[0].thumbnail.save(next(variables["image_path_iterator"]))
        _last = None
    return ""


def _get_sg_image_scraper() -> Callable:
    return scraper
