"""What lines of blocks visit under bounds, against the blocks of the dense mask; and kernels that follow them."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from flex_inductor import create_block_mask, decisions
from flex_inductor.flash import flash_attn_func
from flex_inductor.kept import Kept
from flex_inductor.masks.window_schedule import bounds_of
from flex_inductor.op import Inputs, attention
from flex_inductor.op.eager import kernels
from flex_inductor.options import call_options
from flex_inductor.visits import Bounds
from flex_inductor.visits.bounds import Line, SequenceEntry
from flex_inductor.visits.text import CPP, TRITON, walks
from flex_inductor.visits.window import Window
from tests.marks import slow_but
from tests.support import Sizes, attention_of, dense_of, judge

WINDOWS = [
    *(Window(*w) for w in itertools.product((math.inf, 5, 20), (math.inf, 0, 15), (0, 7, 16, 20))),
    *(Window(-3), Window(20, -5), Window(math.inf, -1), Window(-5, 13)),
    *(Window(right=right, prefix=prefix) for right in (0, -7, 9) for prefix in (1, 16, 21, 500)),
]
GAPS = [Window(3, -5), Window(math.inf, -15, 20), Window(-3, math.inf, 7)]
LENGTHS = ((1, 70), (30, 30), (51, 10), (16, 32), (5, 1), (33, 64))
BLOCKS = ((16, 16), (16, 8))


class OnNumbers:
    """What expressions need beside operators, on numbers."""

    least, most = staticmethod(min), staticmethod(max)

    def either(self, condition, x, y):
        return x if condition else y

    def named(self, name, value):
        return value

    def looked_up(self, table, place, column):
        return int(table[0, place, column])


def line_of(bounds, side, number, queries, keys):
    """Where the runs of a plain call's line begin and end."""
    return bounds.ends(side, bounds.line(side, number, queries, keys, OnNumbers()), OnNumbers())


class Words:
    """How the text of a test's kernel speaks of its line."""

    def __init__(self, language, queries="M", keys="N"):
        self.language, self.sizes = language, (queries, keys)

    def argument(self, name, tensor):
        return name

    def document(self, table):
        return "table({}, {})".format

    def entry(self, table):
        return "table[{}]".format

    def number(self):
        return "row"

    def lengths(self):
        return self.sizes

    def tile(self, side):
        return "index", "count"


def text_of(bounds, side, words, mapped=False):
    """The lines that compute, and where partial and full runs begin and end."""
    partial, full = walks(bounds, side, True, mapped, words)
    return partial.lines, partial.ends, full.ends


def value_of(text, known):
    """What such a text amounts to."""
    lines, *ends = text
    for name, value in lines:
        known[name] = Machine(eval(value, {"tl": tl}, known))
    return tuple([eval(place, {}, known) for place in part] for part in ends)


def blocks_of(
    window: Window, queries: int, keys: int, shift: int, block: tuple[int, int], same: bool | Tensor = True
) -> Tensor:
    """The kind of each block: 0 for one of which nothing is seen, 2 for one that is seen whole."""
    lanes = torch.arange(queries)[:, None], torch.arange(keys)
    live = window.mask_mod(shift)(None, None, *lanes).expand(queries, keys) & same
    rows, columns = (-(-n // size) for n, size in zip((queries, keys), block, strict=True))
    padded = torch.zeros(rows * block[0], columns * block[1], dtype=torch.bool)
    padded[:queries, :keys] = live
    tiles = padded.unflatten(1, (columns, block[1])).unflatten(0, (rows, block[0])).transpose(1, 2).flatten(2)
    return tiles.any(-1).long() + tiles.all(-1).long()


def kinds_in(found: tuple[list[int], list[int]], blocks: int) -> Tensor:
    """The same of a line, from where its runs begin and end."""
    kinds = torch.zeros(blocks, dtype=torch.long)
    for kind, places in enumerate(found, 1):
        assert places == sorted(places) and len(places) % 2 == 0 and places[0] >= 0
        for start, stop in zip(places[::2], places[1::2], strict=True):
            assert stop <= blocks and not kinds[start:stop].any()
            kinds[start:stop] = kind
    return kinds


@pytest.mark.parametrize("queries, keys", LENGTHS)
def test_lines_visit_the_blocks_of_the_mask(queries, keys):
    for window, at_end, block in itertools.product((*WINDOWS, *GAPS), (False, True), BLOCKS):
        shift = keys - queries if at_end else 0
        bounds = bounds_of(window, block, None if at_end else 0)
        kinds = blocks_of(window, queries, keys, shift, block)
        for side, lines in (("keys", kinds), ("queries", kinds.T)):
            for i, expected in enumerate(lines):
                found = kinds_in(line_of(bounds, side, i, queries, keys), len(expected))
                more = torch.where(expected == 0, 1, expected) if window in GAPS else expected
                assert ((found == expected) | (found == more)).all(), (window, at_end, block, i)


def table_of(ends: list[int]) -> Tensor:
    """Of the documents that end there."""
    lines = [[begin, end] for begin, end in itertools.pairwise([0, *ends]) for _ in range(end - begin)]
    return torch.tensor([lines], dtype=torch.int32)


DOCUMENTS = [[70], [16, 32, 70], [1, 2, 40, 41, 64, 69, 70]]
BESIDE = [Window(), Window(right=0), Window(5, 0), Window(20, 3), Window(0, math.inf, 7)]


@pytest.mark.parametrize("ends_of_documents", DOCUMENTS)
def test_lines_visit_the_blocks_of_documents(ends_of_documents):
    table = table_of(ends_of_documents)
    document = torch.bucketize(torch.arange(70), torch.tensor(ends_of_documents), right=True)
    for window, block, (queries, keys) in itertools.product(BESIDE, BLOCKS, LENGTHS):
        bounds = bounds_of(window._replace(documents=table), block, 0)
        same = document[:queries, None] == document[:keys]
        kinds = blocks_of(window, queries, keys, 0, block, same)
        for side, lines in (("keys", kinds), ("queries", kinds.T)):
            for i, expected in enumerate(lines):
                found = kinds_in(line_of(bounds, side, i, queries, keys), len(expected))
                assert torch.equal(found, expected), (window, block, queries, keys, i)


class tl:
    """Triton's operations on numbers, as machines divide."""

    minimum, maximum = min, max

    @staticmethod
    def where(condition, x, y):
        return x if condition else y


class Machine(int):
    """Divides towards 0, as machines do."""

    def __floordiv__(self, other):
        assert self >= 0, "kernels divide only what is not negative"
        return Machine(int(self) // int(other))

    def __mod__(self, other):
        return Machine(math.fmod(self, other))

    def __and__(self, other):
        return Machine(int(self) & int(other))

    def __add__(self, other):
        return Machine(int(self) + int(other))

    def __sub__(self, other):
        return Machine(int(self) - int(other))

    def __mul__(self, other):
        return Machine(int(self) * int(other))

    __radd__, __rmul__ = __add__, __mul__

    def __rsub__(self, other):
        return Machine(int(other) - int(self))


def test_kernels_say_the_same():
    """In Triton's words, with sizes as numbers and as names, and the window's numbers in either way."""
    for window, (queries, keys), side in itertools.product(WINDOWS, LENGTHS, ("keys", "queries")):
        bounds = bounds_of(window, (16, 8), None)
        tensors = {n: torch.empty(1) for n in ("left", "right", "chunk", "prefix") if getattr(bounds, n)}
        sizes = {"M": Machine(queries), "N": Machine(keys)}
        texts = [
            text_of(bounds, side, Words(TRITON, str(queries), str(keys))),
            text_of(bounds._replace(**tensors), side, Words(TRITON)),
        ]
        for text, row in itertools.product(texts, range(-(-(queries if side == "keys" else keys) // 16))):
            known = {**sizes, "row": Machine(row), **{n: Machine(getattr(bounds, n)) for n in tensors}}
            expected = line_of(bounds, side, row, queries, keys)
            assert value_of(text, known) == expected, (window, queries, keys, side, row)


def test_kernels_say_the_same_of_documents():
    for ends_of_documents, window, (queries, keys) in itertools.product(DOCUMENTS, BESIDE, LENGTHS):
        table = table_of(ends_of_documents)
        bounds = bounds_of(window._replace(documents=table), (16, 8), 0)
        for side in ("keys", "queries"):
            text = text_of(bounds, side, Words(TRITON))
            for row in range(-(-(queries if side == "keys" else keys) // (16 if side == "keys" else 8))):
                known = {"M": Machine(queries), "N": Machine(keys), "row": Machine(row)}
                known["table"] = lambda place, column, table=table: Machine(table[0, place, column])
                expected = line_of(bounds, side, row, queries, keys)
                assert value_of(text, known) == expected, (window, queries, keys, side, row)


def test_kernels_say_the_same_of_sequences():
    """Whose tiles come after those of others."""
    for at, (window, (queries, keys)) in enumerate(itertools.product(WINDOWS[::2], LENGTHS)):
        bounds = bounds_of(window, (16, 8), None)
        bounds = bounds._replace(sequence_table=torch.empty(0, 4), scattered=at % 2 == 0)
        tensors = {n: torch.empty(1) for n in ("left", "right", "chunk", "prefix") if getattr(bounds, n)}
        table = SequenceEntry(3, keys, 5, queries)
        for given, side in itertools.product((bounds, bounds._replace(**tensors)), ("keys", "queries")):
            text = text_of(given, side, Words(TRITON), mapped=True)
            block, length, shift = (16, queries, keys - queries) if side == "keys" else (8, keys, 0)
            for start in range(0, length, block):
                index, count = start + shift, min(block, length - start)
                known = {"index": index, "count": count, "table": table}
                known |= {n: getattr(bounds, n) for n in tensors}
                known = {n: v if n == "table" else Machine(v) for n, v in known.items()}
                expected = bounds.ends(side, Line(index, count, table), OnNumbers())
                assert value_of(text, known) == expected, (window, queries, keys, side, start)


def test_text_is_short():
    lines, *ends = text_of(bounds_of(Window(right=0), (128, 128), None), "keys", Words(CPP))
    assert lines == [
        ("least", "(row * 128) + (N - M)"),
        ("tokens", "std::min<int64_t>(M - (row * 128), 128)"),
        ("most", "(least + tokens) - 1"),
        ("end", "std::min<int64_t>(std::max<int64_t>(most + 1, 0), N)"),
        ("stop", "(tokens > 0 ? (end + 127) / 128 : 0)"),
        ("full_stop", "(tokens == 128 ? std::min<int64_t>(std::max<int64_t>(least + 1, 0), N) / 128 : 0)"),
    ]
    assert ends == [["full_stop", "stop"], ["0", "full_stop"]]


def test_far_ends_are_none():
    """At the end of int32 they would turn around."""
    far = bounds_of(Window(2**31 - 1, 1 << 30, 1 << 40), (128, 128), None)
    assert far == Bounds(128, 128, None, None, 1 << 30, None)


def test_bands_by_batch():
    bounds = Bounds(16, 8, torch.tensor([5]), 3, 0, torch.tensor([0, 20, -7]))
    for b in (slice(0, 3), slice(1, 3)):
        band = bounds.bands(40, 60, None, bounds.left.device).band(b, slice(0, 2), slice(20, 40))
        for i, shift in enumerate((0, 20, -7)[b]):
            expected = blocks_of(Window(5, 3), 40, 60, shift, (16, 8))[1:]
            assert torch.equal(band.visited[i, 0], expected > 0) and torch.equal(
                band.full[i, 0], expected == 2
            )


def attend(query, key, value, numbers, block_mask):
    """A call whose window is data, moved for each batch. `block_mask` is for the dense call."""
    left, right, chunk, shift, prefix = numbers

    def mask_mod(b, h, q_idx, kv_idx):
        place = q_idx + shift[b]
        seen = (kv_idx >= place - left) & (kv_idx <= place + right) & (place // chunk == kv_idx // chunk)
        return seen | (kv_idx < prefix)

    bounds = Bounds(16, 32, *(number.view(-1) for number in numbers))
    return attention(query, key, value, None, mask_mod, 0.25, Inputs(schedule=bounds), OPTIONS)


OPTIONS = call_options(None, lse=True, max_scores=True)
FAR = 1 << 20
CASES = [
    (Window(20, 0, FAR), 0, (70, 100)),
    (Window(0, 9, FAR), -30, (130, 50)),
    (Window(300, 15, FAR), 25, (90, 75)),
    (Window(3, -5, FAR), 10, (40, 64)),
    (Window(FAR, 0, 20), -40, (90, 50)),
    (Window(40, FAR, 16), 30, (70, 100)),
    (Window(FAR, 0, FAR, 45), -20, (70, 100)),
]


def dense_mask(window, shifts):
    return lambda b, h, q_idx, kv_idx: window.mask_mod(shifts[b])(b, h, q_idx, kv_idx)


def judged(attend, cases):
    for window, shift, (queries, keys) in cases:
        shifts = torch.tensor([shift, shift + 23], dtype=torch.int32)
        left, right, chunk, prefix = (torch.tensor(n, dtype=torch.int32) for n in window[:4])
        mask = create_block_mask(dense_mask(window, shifts), 2, None, queries, keys, "cpu", 16)
        numbers = (left, right, chunk, shifts, prefix)
        inputs = Sizes(2, 2, 1, queries, keys).inputs(torch.float32)
        judge(attend, dense_of(None), inputs, numbers, mask)


def test_eager():
    judged(attend, CASES)


@pytest.mark.parametrize("route", ["chunked", "cpu"])
def test_compiled_once_for_all_windows(route):
    torch._dynamo.reset()
    compiled = torch.compile(
        attend, backend="flex_inductor", fullgraph=True, dynamic=True, options={"route": route}
    )
    decisions(clear=True)
    judged(compiled, CASES)
    found = decisions(clear=True)
    assert [(d.chosen, d.call.endswith("blocks 16x32 in bounds")) for d in found] == [(route, True)] * 2


COMPACT = {  # of the numbers some are absent, which is no number that changes
    "causal": lambda b, h, q_idx, kv_idx: q_idx >= kv_idx,
    "window": lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx <= 9),
    "chunks": lambda b, h, q_idx, kv_idx: q_idx // 12 == kv_idx // 12,
    "prefix": lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) | (kv_idx < 9),
}


@pytest.mark.parametrize("mask", slow_but(COMPACT, "window", "prefix"))
def test_schedules_as_arguments_whose_numbers_may_all_change(mask):
    torch._dynamo.reset()
    decisions(clear=True)
    compiled = torch.compile(
        attention_of(None), backend="flex_inductor", fullgraph=True, dynamic=True, options={"route": "cpu"}
    )
    for queries, keys in ((40, 20), (17, 2), (33, 64)):
        schedule = create_block_mask(COMPACT[mask], None, None, queries, keys, "cpu", 16, compact=True)
        judge(compiled, dense_of(None), Sizes(2, 2, 1, queries, keys).inputs(torch.float32), (), schedule)
        assert all(d.chosen == "cpu" and d.call.endswith(" in bounds") for d in decisions(clear=True))


def documents_of(*lengths: list[int]) -> Tensor:
    """The document of each position, for each batch."""
    return torch.stack([torch.arange(len(n)).repeat_interleave(torch.tensor(n)) for n in lengths])


SERVED = [
    (None, None),
    ("chunked", True),
    ("cpu", None),
    ("cpu", True),
]  # a route, and whether lengths may change


@pytest.mark.parametrize("served", slow_but(SERVED, SERVED[0], SERVED[3]), ids=str)
def test_other_documents_do_not_compile_again(served):
    """Of each batch its own. Others need no other kernels, nor do other lengths after the second."""
    route, dynamic = served
    torch._dynamo.reset()
    attend = attention_of(None)
    if route:
        options = {"route": route}
        attend = torch.compile(
            attend, backend="flex_inductor", fullgraph=True, dynamic=dynamic, options=options
        )
    counts = []
    decisions(clear=True)
    for lengths in (([70], [1, 2, 50, 17]), ([35, 35], [69, 1]), ([40, 80], [110, 10]), ([9, 90], [33] * 3)):
        ids = documents_of(*lengths)
        tokens = ids.size(1)
        mask_mod = lambda b, h, q, kv, ids=ids: (q >= kv) & (ids[b, q] == ids[b, kv])  # noqa: E731
        schedule = create_block_mask(mask_mod, 2, None, tokens, tokens, "cpu", (16, 32), compact=True)
        judge(attend, dense_of(None), Sizes(2, 2, 1, tokens, tokens).inputs(torch.float32), (), schedule)
        counts.append(len(decisions()))
    found = decisions(clear=True)
    assert all(d.chosen == route and d.call.endswith("blocks 16x32 in bounds") for d in found)
    assert bool(found) == bool(route) and counts[-1] == counts[-2] == 2 * (1 if dynamic else 2) * bool(route)


@pytest.mark.parametrize("queries", [1, 5])
def test_few_queries_see_documents(queries):
    """As at the end of a prompt: these are the first rows of the ids."""
    torch._dynamo.reset()
    attend = torch.compile(
        attention_of(None), backend="flex_inductor", fullgraph=True, options={"route": "cpu"}
    )
    ids = documents_of([3, 297], [1, 250, 49])
    mask_mod = lambda b, h, q, kv: ids[b, q] == ids[b, kv]  # noqa: E731
    schedule = create_block_mask(mask_mod, 2, None, queries, 300, "cpu", 32, compact=True)
    decisions(clear=True)
    with torch.no_grad():
        inputs = [t.detach() for t in Sizes(2, 4, 2, queries, 300).inputs(torch.float32)]
        found = attend(*inputs, (), schedule)[0]
        expected = dense_of(None)(*inputs, (), schedule)[0]
    torch.testing.assert_close(found, expected)
    assert decisions(clear=True)[-1].call.endswith("blocks 32x32 in bounds")


def test_numbers_of_examples():
    """Under vmap each example may have its own, or all the same."""
    q, k, v = (torch.randn(3, 2, 2, length, 8) for length in (40, 50, 50))
    rights = torch.tensor([[0], [30], [-5]], dtype=torch.int32)

    def attend(q, k, v, right):
        bounds = Bounds(16, 16, None, right, 0, 0)
        mask_mod = lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + right[0]  # noqa: E731
        return attention(q, k, v, None, mask_mod, 0.3, Inputs(schedule=bounds))[0]

    for dim in (0, None):
        given = rights if dim == 0 else rights[1]
        found = torch.func.vmap(attend, in_dims=(0, 0, 0, dim))(q, k, v, given)
        each = [attend(*one, right) for *one, right in zip(q, k, v, given.expand(3, 1), strict=True)]
        torch.testing.assert_close(found, torch.stack(each))


def test_eager_calls_of_other_lengths_are_of_one_class(monkeypatch):
    classes = Kept(8)
    monkeypatch.setattr(kernels, "LEAST", 1)
    monkeypatch.setattr(kernels, "_computed", classes)
    with torch.no_grad():
        for keys in (50, 70, 61):
            q, k = (torch.randn(1, length, 2, 8) for length in (3, keys))
            flash_attn_func(q, k, k, causal=True, window_size=(40, 0))
    assert len(classes) == 1
