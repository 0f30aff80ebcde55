"""Keys in the rows of a cache and in pages, against the same keys packed."""

import pytest
import torch
from support import served_by

import flex_inductor
from flex_inductor import Sequences, decisions, masks, varlen_attention
from flex_inductor.errors import FlexError
from flex_inductor.op import Inputs
from tests.tile_maps import as_runs, assert_runs_are_pieces

HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 8, 4
QUERIES, KEYS = [1, 7, 0, 20], [40, 7, 9, 33]


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def every_second(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx) % 2 == 0


def bias_of(table):
    return lambda score, b, h, q_idx, kv_idx: score + table[b, h, q_idx - kv_idx + 50]


def drawn(dtype=torch.float64):
    """Packed queries, keys and values."""
    generator = torch.Generator().manual_seed(0)
    shapes = (sum(QUERIES), HEADS, DIM), (sum(KEYS), KV_HEADS, DIM), (sum(KEYS), KV_HEADS, VALUE_DIM)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def in_rows(packed, rows, pads, length):
    """A cache with NaN wherever no token is."""
    cache = packed.new_full((max(rows) + 2, length, *packed.shape[1:]), torch.nan)
    for row, pad, part in zip(rows, pads, packed.split(KEYS), strict=True):
        cache[row, pad : pad + len(part)] = part
    return cache


def in_pages(packed, size, pages):
    """The same as a pool, in which pages[n] are those of sequence n."""
    pool = packed.new_full(
        (1 + max(max(own, default=0) for own in pages), size, *packed.shape[1:]), torch.nan
    )
    for own, part in zip(pages, packed.split(KEYS), strict=True):
        for place, chunk in zip(own, part.split(size), strict=False):
            pool[place, : len(chunk)] = chunk
    return pool


def shuffled_pages(size):
    needed = [-(-length // size) for length in KEYS]
    order = iter(torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(1)).tolist())
    return [[next(order) for _ in range(count)] for count in needed]


def table_of(pages):
    """What lies behind the used part may be anything."""
    width = max(map(len, pages)) + 1
    return int32([own + [-7] * (width - len(own)) for own in pages])


def offsets(lengths):
    return torch.nn.functional.pad(int32(lengths).cumsum(0), (1, 0)).to(torch.int32)


def rows_case():
    rows, pads = [3, 0, 5, 1], [4, 0, 2, 1]
    used = int32([n + pad for n, pad in zip(KEYS, pads, strict=True)])
    sequences = Sequences(
        offsets(QUERIES), used_k=used, left_pad_k=int32(pads), cache_rows=int32(rows), max_k=50
    )
    return sequences, lambda packed: in_rows(packed, rows, pads, 50)


def pages_case(size):
    pages = shuffled_pages(size)
    sequences = Sequences(offsets(QUERIES), used_k=int32(KEYS), pages=table_of(pages), page_size=size)
    return sequences, lambda packed: in_pages(packed, size, pages)


CASES = {"rows": rows_case, **{f"pages of {n}": (lambda n=n: pages_case(n)) for n in (1, 16, 64, 256)}}


@pytest.mark.parametrize("mask_mod", [None, causal, every_second], ids=["none", "causal", "analysed"])
@pytest.mark.parametrize("case", CASES)
def test_eager(case, mask_mod):
    sequences, stored = CASES[case]()
    q, k, v = drawn()
    q.requires_grad_()
    table = torch.randn(4, HEADS, 100, dtype=torch.float64, requires_grad=True)
    packed = Sequences(offsets(QUERIES), offsets(KEYS))
    results = []
    for keys, values, where in ((stored(k), stored(v), sequences), (k, v, packed)):
        mask = where.mask(mask_mod)
        out, lse = varlen_attention(
            q, keys, values, where, bias_of(table), mask, enable_gqa=True, return_lse=True
        )
        loss = out.sin().sum() + lse.cos().sum()
        results.append((out, lse, *torch.autograd.grad(loss, (q, table))))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_kernels(dtype):
    """One kernel for each size of pages, whatever the table says."""
    compiled = torch.compile(varlen_attention, backend="flex_inductor", fullgraph=True, dynamic=True)
    q, k, v = drawn(dtype)
    packed = Sequences(offsets(QUERIES), offsets(KEYS))
    want = varlen_attention(
        q.double(), k.double(), v.double(), packed, None, packed.mask(causal), enable_gqa=True
    )
    made = []
    with served_by("cpu"), torch.no_grad():
        cases = ("rows", "pages of 16", "pages of 1") if dtype == torch.float32 else ("pages of 16",)
        for case in (*cases, *cases):
            sequences, stored = CASES[case]()
            given = (q, stored(k), stored(v), sequences)
            out = compiled(*given, None, sequences.mask(causal), enable_gqa=True)
            close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
            torch.testing.assert_close(out.double(), want, **close)
            made.append(len(decisions()))
    assert made == [*range(1, len(cases) + 1), *[len(cases)] * len(cases)]
    assert all(d.call.endswith(" in bounds where a map says") for d in decisions())


@pytest.mark.parametrize(
    "mask_mod",
    [None, causal, masks.sliding_window(420), every_second],
    ids=["none", "causal", "window", "analysed"],
)
@pytest.mark.parametrize("size", [None, 16, 48, 256])
def test_runs_are_pieces_of_memory(size, mask_mod):
    """Packed, and in pages of several sizes; full runs of pages are as long as kernels take at once."""
    queries, keys = [1, 300, 0, 128], [900, 300, 9, 515]
    if size is None:
        sequences = Sequences.from_lengths(queries, keys)
    else:
        pages = torch.randperm(240).view(4, 60).int()
        sequences = Sequences(offsets(queries), used_k=int32(keys), pages=pages, page_size=size)
    for block_size in (None, (16, 16)):
        mask = sequences.mask(mask_mod, block_size=block_size)
        inputs = Inputs(schedule=mask.schedule, tile_map=mask.tile_map, scattered=size is not None)
        assert_runs_are_pieces(inputs)
        runs = as_runs(mask.schedule, mask.tile_map)
        assert runs.full_kv_runs.diff().sum() > 0 or mask_mod is every_second


def test_the_inspector_shows_which_tiles_of_pages_are_visited():
    pages = torch.arange(12).view(2, 6).int()
    sequences = Sequences(int32([0, 3, 4]), used_k=int32([40, 70]), pages=pages, page_size=16)
    given, mask = (torch.randn(4, HEADS, DIM), torch.randn(12, 16, HEADS, DIM)), sequences.mask(causal)
    report = flex_inductor.inspect(
        lambda q, k: varlen_attention(q, k, k, sequences, None, mask),
        *given,
        target="cpu",
        options={"route": "chunked"},
    )
    shown = report.calls[0].schedule
    assert (shown.full, shown.partial, shown.shape) == (0, 3 + 5, (32, 192))


def test_sequences_may_share_pages():
    """The first page is a prompt that both continue."""
    q, k, v = torch.randn(2, HEADS, DIM), torch.randn(3, 4, KV_HEADS, DIM), torch.randn(3, 4, KV_HEADS, DIM)
    sequences = Sequences(int32([0, 1, 2]), used_k=int32([7, 6]), pages=int32([[2, 0], [2, 1]]), page_size=4)
    out = varlen_attention(q, k, v, sequences, enable_gqa=True)
    for n, (pages, used) in enumerate((([2, 0], 7), ([2, 1], 6))):
        own = [x[pages].flatten(0, 1)[:used] for x in (k, v)]
        alone = varlen_attention(q[n : n + 1], *own, Sequences.from_lengths([1], [used]), enable_gqa=True)
        torch.testing.assert_close(out[n : n + 1], alone)


@pytest.mark.parametrize("compiled", [False, True])
def test_whatever_is_copied_in_later_is_read_within_the_cache(compiled):
    attend = torch.compile(varlen_attention, backend="flex_inductor") if compiled else varlen_attention
    q, k = torch.randn(2, HEADS, DIM), torch.randn(3, 4, KV_HEADS, DIM)
    sequences = Sequences(int32([0, 1, 2]), used_k=int32([7, 6]), pages=int32([[2, 0], [2, 1]]), page_size=4)
    sequences.used_k.copy_(int32([900, -3]))
    sequences.pages.copy_(int32([[99, -5], [2, -5]]))
    out = attend(q, k, k, sequences, None, sequences.mask(causal), enable_gqa=True)
    assert out.isfinite().all() and not out[1].any()


BAD = {
    "size alone": ({"page_size": 4}, "^page_size: expected a positive integer with pages"),
    "no size": ({"pages": int32([[0]])}, "^page_size: expected a positive integer with pages"),
    "size 0": ({"pages": int32([[0]]), "page_size": 0}, "^page_size: expected a positive"),
    "table dtype": ({"pages": torch.tensor([[0]]), "page_size": 4}, r"^pages: expected an int32 tensor \[sequences"),
    "table count": ({"pages": int32([[0], [0]]), "page_size": 4}, r"^pages: expected .* for 1 sequences"),
    "overflow": ({"pages": int32([[0]]), "page_size": 4}, "^used_k: sequence 0 uses 5 tokens of a room of 4"),
    "negative page": ({"pages": int32([[0, -1]]), "page_size": 4}, "^pages: sequence 0 uses page 1 of its table"),
    "padded pages": ({"pages": int32([[0, 1]]), "page_size": 4, "left_pad_k": int32([1])}, "^left_pad_k: expected none with pages"),
    "rows of pages": ({"pages": int32([[0, 1]]), "page_size": 4, "cache_rows": int32([1])}, "^cache_rows: expected none with pages"),
    "too much padding": ({"left_pad_k": int32([6])}, "^left_pad_k: sequence 0 has 6 tokens of padding and used_k is 5"),
    "negative row": ({"cache_rows": int32([-1])}, "^cache_rows: of sequence 0 is negative"),
    "packed": ({"cu_k": int32([0, 9]), "cache_rows": int32([0])}, "^cache_rows: is for keys in a cache"),
    "max": ({"max_k": 4}, "^max_k: is 4, and the longest sequence has 5"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_wrong_sequences(case):
    arguments, text = BAD[case]
    with pytest.raises(FlexError, match=text):
        Sequences(int32([0, 1]), used_k=int32([5]), **arguments)


def test_wrong_calls():
    q = torch.randn(1, HEADS, DIM)
    rows = Sequences(int32([0, 1]), used_k=int32([5]))
    paged = Sequences(int32([0, 1]), used_k=int32([5]), pages=int32([[0, 1]]), page_size=4)
    for sequences, shape, text in (
        (rows, (5, HEADS, DIM), r"^key: expected \[rows, length, heads, head_dim\] for these sequences"),
        (paged, (5, HEADS, DIM), r"^key: expected \[pages, page_size, heads, head_dim\]"),
        (rows, (1, 4, HEADS, DIM), "^key: its rows have 4 tokens, and max_k is 5"),
        (paged, (3, 8, HEADS, DIM), "^key: its pages have 8 tokens, and page_size is 4"),
        (rows, (0, 5, HEADS, DIM), r"^key: expected \[rows, length"),
    ):
        cache = torch.randn(shape)
        with pytest.raises(FlexError, match=text):
            varlen_attention(q, cache, cache, sequences)
    cache = torch.randn(3, 5, HEADS, DIM, requires_grad=True)
    with pytest.raises(FlexError, match=r"^key: requires grad and lies in a cache"):
        varlen_attention(q, cache, cache, rows)
    with pytest.raises(FlexError, match=r"^block_size: a block of 8 keys would span pages of 4"):
        paged.mask(block_size=(1, 8))
