"""Every bit of calls that need no rounding: a wrong head, place or bound of a mask is off by a whole number."""

from contextlib import contextmanager, nullcontext

import pytest
import torch

from flex_inductor import Sequences, create_block_mask, flex_attention, varlen_attention
from flex_inductor.backend import flex_inductor
from flex_inductor.op.eager import tiles
from tests.exact import ALL, SCALE, add, assert_exact, exact, visible_by
from tests.support import Sizes, served_by

DOCUMENT = torch.tensor([8, 16, 3, 37, 1, 64, 50]).repeat_interleave(torch.tensor([8, 16, 3, 37, 1, 64, 50]))
MASKS = {
    "none": None,
    "causal": lambda b, h, q_idx, kv_idx: q_idx >= kv_idx,
    "window": lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < 16),
    "document": lambda b, h, q_idx, kv_idx: DOCUMENT[q_idx] == DOCUMENT[kv_idx],
    "prefix": lambda b, h, q_idx, kv_idx: (kv_idx < 32) | (q_idx >= kv_idx),
    "per head": lambda b, h, q_idx, kv_idx: (q_idx - kv_idx > 8 * h - 16) & (kv_idx < 100 - 30 * b),
}
SIZES = Sizes(batch=2, heads=4, kv_heads=2, queries=70, keys=128, head_dim=16, value_dim=24)
UNEVEN = SIZES._replace(queries=101, keys=77, head_dim=10, value_dim=6)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles along queries, keys, heads and batches."""
    monkeypatch.setattr(tiles, "MAX_CHUNK_KEYS", 48)
    monkeypatch.setattr(tiles, "MAX_CHUNK_QUERIES", 40)
    monkeypatch.setattr(tiles, "CHUNK_ELEMENTS", 5000)


def attend_to(mask, use_table):
    def attend(query, key, value, table):
        mod = add(table) if use_table else None
        out, aux = flex_attention(query, key, value, mod, mask, SCALE, enable_gqa=True, return_aux=ALL)
        return out, aux.lse, aux.max_scores

    return attend


def eagerly(attend):
    return attend


@contextmanager
def compiled_for(route):
    """Compiles, and asserts the route."""

    def compiled(attend):
        torch._dynamo.reset()
        options = {"route": route}
        return torch.compile(attend, backend=flex_inductor, fullgraph=True, dynamic=False, options=options)

    with served_by(route):
        yield compiled


WAYS = {"eager": lambda: nullcontext(eagerly), "cpu": lambda: compiled_for("cpu")}


def check(run, kind, by, mask, sizes, dtype, layout="contiguous"):
    """`run(attend)` is how it runs."""
    mask_mod = MASKS[mask]
    call = exact(kind, by, sizes, DTYPES[dtype], visible_by(mask_mod, sizes), layout)
    blocks = None
    if mask_mod is not None:
        per = (sizes.batch, sizes.heads) if mask == "per head" else (None, None)
        blocks = create_block_mask(mask_mod, *per, sizes.queries, sizes.keys, "cpu", BLOCK_SIZE=32)
    gradients = ("d_query", "d_key", "d_value", "d_table")[: 4 if by == "table" else 3]
    assert_exact(call, run(attend_to(blocks, by == "table")), gradients)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind, by", [("last", "table"), ("last", "keys"), ("even", "table")])
@pytest.mark.parametrize("mask", MASKS)
def test_eager(mask, kind, by, dtype):
    check(eagerly, kind, by, mask, SIZES, dtype)


@pytest.mark.parametrize("layout", ["bshd", "strided", "head_dim_slice", "head_dim_stride"])
@pytest.mark.parametrize("kind", ["last", "even"])
def test_layouts_and_lengths(kind, layout):
    check(eagerly, kind, "table", "window", UNEVEN, "fp32", layout)


COMPILED = {  # route, how, mask, sizes, dtype, layout
    "causal": ("cpu", "last", "table", "causal", SIZES, "fp32", "contiguous"),
    "few": ("cpu", "even", "table", "prefix", SIZES._replace(queries=3), "fp32", "head_dim_stride"),
    "window": ("cpu", "even", "keys", "window", SIZES, "bf16", "bshd"),
    "uneven": ("cpu", "last", "keys", "per head", UNEVEN, "fp16", "strided"),
    "document": ("cpu", "even", "table", "document", SIZES, "fp32", "head_dim_slice"),
    "prefix": ("cpu", "last", "table", "prefix", SIZES, "bf16", "contiguous"),
    "per head": ("cpu", "even", "table", "per head", SIZES, "fp16", "bshd"),
    "none": ("cpu", "even", "keys", "none", UNEVEN._replace(keys=64), "fp32", "strided"),
    "few, bf16": ("cpu", "last", "keys", "none", SIZES._replace(queries=2), "bf16", "contiguous"),
    "few, fp16": ("cpu", "last", "table", "causal", SIZES._replace(queries=3), "fp16", "strided"),
    "one KV batch": ("cpu", "last", "table", "causal", SIZES._replace(kv_batch=1), "fp32", "contiguous"),
    "chunked": ("chunked", "last", "table", "window", SIZES, "bf16", "contiguous"),
}


@pytest.mark.parametrize("case", COMPILED)
def test_compiled(case):
    route, *of = COMPILED[case]
    with compiled_for(route) as run:
        check(run, *of)


# Packed and paged.

QUERIES, KEYS = [5, 0, 33, 1, 17], [5, 3, 64, 40, 16]
TOKENS = Sizes(1, 4, 2, sum(QUERIES), sum(KEYS), 16, 24)
PAGE = 16


def packed(kind, by, dtype, mask):
    """All sequences as one call, with the sequence and the position of each token."""
    sequence, position = ([torch.cat([f(n, s) for s, n in enumerate(side)]) for side in (QUERIES, KEYS)] for f in (
        lambda n, s: torch.full((n,), s), lambda n, s: torch.arange(n)))  # fmt: skip
    shift = torch.tensor(KEYS) - torch.tensor(QUERIES)
    rows = (position[0] + shift[sequence[0]])[:, None]
    visible = (sequence[0][:, None] == sequence[1]) & MASKS[mask](0, 0, rows, position[1])
    return exact(kind, by, TOKENS, DTYPES[dtype], visible[None, None], positions=position[1]), position[1]


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def attend_to_sequences(sequences, mask, table):
    def attend(query, key, value, _):
        mod = None if table is None else add(table)
        out, aux = varlen_attention(
            query, key, value, sequences, mod, mask, SCALE, enable_gqa=True, return_aux=ALL
        )
        return out.transpose(0, 1)[None], aux.lse[None], aux.max_scores[None]

    return attend


def tokens(tensor):
    return tensor.squeeze(0).transpose(0, 1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind, mask", [("last", "causal"), ("even", "window")])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_packed(kind, mask, dtype, way):
    with WAYS[way]() as run:
        check_packed(run, kind, mask, dtype)


def check_packed(run, kind, mask, dtype):
    call, _ = packed(kind, "keys", dtype, mask)
    sequences = Sequences.from_lengths(QUERIES, KEYS)
    attend = run(attend_to_sequences(sequences, sequences.mask(MASKS[mask], heads=4), None))
    assert_exact(
        call, lambda q, k, v, t: attend(tokens(q), tokens(k), tokens(v), t), ("d_query", "d_key", "d_value")
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind, mask", [("last", "causal"), ("even", "window")])
def test_paged(kind, mask, way):
    with WAYS[way]() as run:
        check_paged(run, kind, mask)


def check_paged(run, kind, mask):
    call, positions = packed(kind, "table", "fp32", mask)
    needed = [-(-n // PAGE) for n in KEYS]
    order = torch.randperm(sum(needed) + 2, generator=torch.Generator().manual_seed(3))[: sum(needed)]
    table, start = torch.full((len(KEYS), max(needed)), -5), 0
    for sequence, count in enumerate(needed):
        table[sequence, :count] = order[start : start + count]
        start += count
    owner = torch.repeat_interleave(torch.arange(len(KEYS)), torch.tensor(KEYS))
    slots = table[owner, positions // PAGE] * PAGE + positions % PAGE
    sequences = Sequences(
        offsets(QUERIES), used_k=torch.tensor(KEYS).int(), pages=table.int(), page_size=PAGE
    )

    def in_pages(tensor):
        pages = tensor.new_full(((sum(needed) + 2) * PAGE, *tensor.shape[1::2]), torch.nan)
        return pages.index_copy(0, slots, tokens(tensor)).unflatten(0, (-1, PAGE))

    of_positions = call.tensors[3].new_zeros(max(KEYS)).index_copy(0, positions, call.tensors[3])
    attend = run(attend_to_sequences(sequences, sequences.mask(MASKS[mask], heads=4), of_positions))
    with torch.no_grad():
        assert_exact(call, lambda q, k, v, t: attend(tokens(q), in_pages(k), in_pages(v), t), ())
