"""Packed sequences against one dense call for each."""

import io
import itertools

import pytest
import torch
from support import judge, served_by

from flex_inductor import AuxRequest, Sequences, decisions, masks, varlen_attention
from flex_inductor.errors import FlexError, FlexValueError
from flex_inductor.lowerings.cpu import forward
from flex_inductor.masks.analysis import window as window_module
from flex_inductor.masks.analysis.trace import trace_mask
from flex_inductor.reference import reference
from flex_inductor.sequences.mask import _by_analysis
from flex_inductor.visits import Bounds
from flex_inductor.visits.places import COUNT, ROW
from tests.tile_maps import as_runs

HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 8, 4
ALL = AuxRequest(lse=True, max_scores=True)
ALIGNED = ([64, 128], [64, 128])
LENGTHS = {  # of queries and keys
    "mixed": ([5, 0, 50, 1, 17], [5, 3, 50, 64, 40]),
    "one": ([45], [45]),
    "decode": ([1, 1, 1], [40, 69, 7]),
    "longer queries": ([20, 7, 3], [10, 0, 2]),
    "aligned": ALIGNED,
}


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def window(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx <= 20)


def around(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx).abs() < 20


def prefix(b, h, q_idx, kv_idx):
    return (kv_idx < 15) | (q_idx >= kv_idx)


def by_sequence_and_head(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx + h) & (b != 2)


MASKS = {
    "none": None,
    "causal": causal,
    "window": window,
    "around": around,
    "prefix": prefix,
    "mixed": by_sequence_and_head,
}


def bias_of(table):
    return lambda score, b, h, q_idx, kv_idx: score + table[b, h, q_idx - kv_idx + 200]


def positions_of(table):
    """Those of queries are below 0 where a sequence has more queries than keys."""

    def score_mod(score, b, h, q_idx, kv_idx):
        score = score + table[b, h, q_idx - kv_idx + 200] + table[b, h, q_idx]
        return score + 0.002 * kv_idx * (q_idx // 3 + q_idx % 5 + q_idx.abs())

    return score_mod


def alibi(score, b, h, q_idx, kv_idx):
    return score - (h + 1) * 0.1 * (q_idx - kv_idx).abs()


def tensors(lengths, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    rows, keys = map(sum, lengths)
    shapes = (rows, HEADS, DIM), (keys, KV_HEADS, DIM), (keys, KV_HEADS, VALUE_DIM)
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]


def packed(sequences, mask_mod, build, compiled=None, block_size=None):
    """The call, in the layout of the judge: [1, H, T, D]."""
    mask = sequences.mask(mask_mod, heads=HEADS, block_size=block_size)

    def attend(q, k, v, captures, _):
        given = (x.squeeze(0).transpose(0, 1) for x in (q, k, v))
        mod = build(*captures) if build and captures else build
        out, aux = (compiled or varlen_attention)(
            *given, sequences, mod, mask, enable_gqa=True, return_aux=ALL
        )
        return out.transpose(0, 1)[None], aux.lse[None], aux.max_scores[None]

    return attend


def alone(lengths, mask_mod, build):
    """Each sequence by itself."""

    def attend(q, k, v, captures, _):
        mod = build(*captures) if build and captures else build
        parts, row, key = [], 0, 0
        for sequence, (queries, keys) in enumerate(zip(*lengths, strict=True)):
            shift = keys - queries

            def both(score, b, h, q_idx, kv_idx, at=sequence, shift=shift):
                if mod is not None:
                    score = mod(score, b + at, h, q_idx + shift, kv_idx)
                if mask_mod is None:
                    return score
                return torch.where(mask_mod(b + at, h, q_idx + shift, kv_idx), score, -torch.inf)

            rows, at = slice(row, row + queries), slice(key, key + keys)
            row, key = rows.stop, at.stop
            if not queries or not keys:  # which vmap cannot do
                empty = q.new_full((1, HEADS, queries), -torch.inf)
                parts.append((q.new_zeros(1, HEADS, queries, VALUE_DIM), empty, empty))
                continue
            parts.append(reference(q[:, :, rows], k[:, :, at], v[:, :, at], both))
        return tuple(torch.cat(found, 2) for found in zip(*parts, strict=True))

    return attend


def as_batch(given):
    return [x.transpose(0, 1)[None] for x in given]


MODS = {"plain": None, "alibi": alibi, "bias": bias_of}


def cases():
    """All, of which each pair of lengths and mask is not slow with one mod."""
    for (x, lengths), (y, mask), (z, mod) in itertools.product(*map(enumerate, (LENGTHS, MASKS, MODS))):
        marks = () if (x + y) % len(MODS) == z else pytest.mark.slow
        yield pytest.param(lengths, mask, mod, marks=marks)


@pytest.mark.parametrize("lengths, mask, mod", [*cases()])
def test_eager(lengths, mask, mod):
    build, lengths, mask_mod = MODS[mod], LENGTHS[lengths], MASKS[mask]
    sequences = Sequences.from_lengths(*lengths)
    table = torch.randn(5, HEADS, 400, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    captures = (table,) if build is bias_of else ()
    block_size = (16, 32) if mask != "causal" else None
    ours = packed(sequences, mask_mod, build, block_size=block_size)
    judge(ours, alone(lengths, mask_mod, build), as_batch(tensors(lengths)), captures)


@pytest.mark.parametrize("mask, dtype", [("around", torch.float32), ("mixed", torch.bfloat16)], ids=str)
def test_fused_kernels_for_any_lengths(mask, dtype):
    """One forward and one backward, compiled for two batches and good for all others."""
    dynamic = None if mask == "around" else True
    compiled = torch.compile(varlen_attention, backend="flex_inductor", fullgraph=True, dynamic=dynamic)
    table = torch.randn(5, HEADS, 400, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    made = []
    with served_by("cpu"):
        for lengths in (LENGTHS["mixed"], ALIGNED, ([30, 2, 60], [70, 2, 40]), LENGTHS["one"]):
            sequences = Sequences.from_lengths(*lengths)
            ours = packed(sequences, MASKS[mask], positions_of, compiled)
            dense = alone(lengths, MASKS[mask], positions_of)
            judge(ours, dense, as_batch(tensors(lengths, dtype)), (table,))
            made.append(len(decisions()))
    assert made[1] == made[-1], made
    form = "bounds" if mask == "around" else "runs"
    assert all(d.call.endswith(f" in {form} where a map says") for d in decisions())


def test_windows_of_other_sizes_do_not_compile_again():
    options = {"route": "chunked"}
    compiled = torch.compile(varlen_attention, backend="flex_inductor", fullgraph=True, options=options)
    sequences, given, made = Sequences.from_lengths([30, 7]), tensors(([37], [37])), []
    decisions(clear=True)
    for size in (9, 20, 35, 3):
        mask = sequences.mask(masks.sliding_window(size))
        out = compiled(*given, sequences, None, mask, enable_gqa=True)
        want = varlen_attention(*given, sequences, None, mask, enable_gqa=True)
        torch.testing.assert_close(out, want)
        made.append(len(decisions()))
    assert made == [1, 2, 2, 2] and isinstance(mask.schedule, Bounds)


def chunks(b, h, q_idx, kv_idx):
    return q_idx // 12 == kv_idx // 12


def window_in_chunks(b, h, q_idx, kv_idx):
    return window(b, h, q_idx, kv_idx) & (q_idx // 24 == kv_idx // 24)


CLOSED = {name: MASKS[name] for name in ("none", "causal", "window", "around", "prefix")}
CLOSED |= {"chunks": chunks, "window in chunks": window_in_chunks}


@pytest.mark.parametrize("mask", CLOSED)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_closed_forms_visit_what_the_analysis_finds(lengths, mask):
    sequences = Sequences.from_lengths(*LENGTHS[lengths])
    mask_mod = CLOSED[mask] or (lambda b, h, q_idx, kv_idx: q_idx == q_idx)
    closed = sequences.mask(mask_mod if mask != "none" else None, block_size=(8, 16))
    assert isinstance(closed.schedule, Bounds)
    places = sequences.places
    tiles = [side.tiles(block) for side, block in zip(places, (8, 16), strict=True)]
    analysed = _by_analysis(*tiles, sequences, [side.lengths for side in places], mask_mod, 1)
    for rows in ("kv", "full_kv", "q", "full_q"):
        assert _spelt_out(as_runs(closed.schedule, closed.tile_map), rows) == _spelt_out(analysed, rows)


def _spelt_out(schedule, side):
    """The tiles of each line."""
    offsets = getattr(schedule, f"{side}_offsets").flatten().tolist()
    runs = getattr(schedule, f"{side}_runs").tolist()
    return [
        [tile for start, stop in runs[a:b] for tile in range(start, stop)]
        for a, b in itertools.pairwise(offsets)
    ]


def test_a_closed_form_reads_nothing_on_the_host():
    sequences = Sequences.from_lengths([5, 30], [9, 30])

    class NoReads(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func._schema.name
            assert name not in ("aten::_local_scalar_dense", "aten::nonzero"), name
            return func(*args, **(kwargs or {}))

    with NoReads():
        for mask_mod in CLOSED.values():
            sequences.mask(mask_mod)
        with pytest.raises(AssertionError):
            sequences.mask(lambda b, h, q_idx, kv_idx: kv_idx % 8 < q_idx)


def test_a_mask_is_traced_once(monkeypatch):
    """Its function runs each time, and what it reads may have changed."""
    sequences, traced = Sequences.from_lengths([5, 300]), []
    monkeypatch.setattr(window_module, "trace_mask", lambda *args: traced.append(1) or trace_mask(*args))
    reads: dict = {}

    def changing(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx <= reads["size"]) & (q_idx >= kv_idx)

    def captures(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx + reads["table"][b]

    # The second is analysed: it is traced within its sequences too.
    for size, moved, count in ((7, 0, 3), (7, 100, 0), (150, 0, 1), (7, 0, 0)):
        reads.update(size=size, table=torch.tensor([0, moved]))
        traced.clear()
        made = [(mask_mod, sequences.mask(mask_mod)) for mask_mod in (changing, captures)]
        assert len(traced) == count
        for mask_mod, closed in made:
            tiles = [side.tiles(128) for side in sequences.places]
            lengths = [side.lengths for side in sequences.places]
            analysed = _by_analysis(*tiles, sequences, lengths, mask_mod, 1)
            for rows in ("kv", "full_kv", "q", "full_q"):
                found = as_runs(closed.schedule, closed.tile_map)
                assert _spelt_out(found, rows) == _spelt_out(analysed, rows)


def test_lengths_may_be_refreshed_in_place():
    sequences = Sequences(torch.tensor([0, 30, 40], dtype=torch.int32), max_q=40, max_k=40)
    q, k, v = tensors(([40], [40]))
    for lengths in ([30, 10], [3, 37], [0, 40], [17, 20]):
        sequences.cu_q.copy_(torch.tensor([0, lengths[0], sum(lengths)]))
        out = varlen_attention(q, k, v, sequences, None, sequences.mask(causal), enable_gqa=True)
        used = sum(lengths)
        want = alone((lengths, lengths), causal, None)(*as_batch(x[:used] for x in (q, k, v)), (), None)[0]
        torch.testing.assert_close(out[:used], want[0].transpose(0, 1))
        assert not out[used:].any()


GARBAGE = (
    [0, 38, 99],
    [0, 38, 99999],
    [0, 2**31 - 1, 5],
    [0, -(2**31), 2**31 - 1],
    [0, 30, 10],
    [-9, -5, -1],
)


@pytest.mark.parametrize("mask_mod", [None, causal, prefix, window_in_chunks])
@pytest.mark.parametrize("refreshed", GARBAGE, ids=str)
def test_no_offsets_lead_out_of_the_tensors(refreshed, mask_mod):
    """Nobody may check what is copied in later."""
    sequences = Sequences(torch.tensor([0, 30, 40], dtype=torch.int32), max_q=64, max_k=64)
    q, k, v = tensors(([40], [40]))
    sequences.cu_q.copy_(torch.tensor(refreshed))
    mask = sequences.mask(mask_mod, block_size=8)
    for lines in mask.tile_map:
        row, count = lines[:, ROW], lines[:, COUNT]
        assert (count >= 0).all() and (row[count > 0] >= 0).all() and ((row + count)[count > 0] <= 40).all()
    queries, keys = (lines.size(0) for lines in mask.tile_map)
    runs = as_runs(mask.schedule, mask.tile_map)
    for side, others in (("kv", keys), ("full_kv", keys), ("q", queries), ("full_q", queries)):
        ends = getattr(runs, f"{side}_runs")
        assert ((ends >= 0) & (ends <= others)).all() and (ends.diff() >= 0).all()
    out = varlen_attention(q, k, v, sequences, None, mask, enable_gqa=True)
    assert out.isfinite().all()


def test_used_lengths_beyond_the_tokens():
    used = torch.tensor([30, 10], dtype=torch.int32)
    offsets = torch.tensor([0, 30, 40], dtype=torch.int32)
    sequences = Sequences(offsets, offsets, used_k=used)
    q, k, v = tensors(([40], [40]))
    for refreshed in ([2**31 - 1, 10**9], [40, 40], [-3, 99]):
        used.copy_(torch.tensor(refreshed))
        mask = sequences.mask(block_size=8)
        assert varlen_attention(q, k, v, sequences, None, mask, enable_gqa=True).isfinite().all()


@pytest.mark.parametrize("mask_mod", [causal, prefix])
def test_what_inference_mode_makes_also_trains(mask_mod):
    with torch.inference_mode():
        sequences = Sequences.from_lengths([5, 9])
        mask = sequences.mask(mask_mod)
    q, k, v = (x.requires_grad_() for x in tensors(([14], [14])))
    out = varlen_attention(q, k, v, sequences, None, mask, enable_gqa=True)
    assert torch.autograd.grad(out.sum(), q)[0].any()


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    """A mask is an input of a program, or held by one that is saved."""

    class Layer(torch.nn.Module):
        def forward(self, q, k, v, sequences, mask=None):
            return varlen_attention(q, k, v, sequences, None, mask, enable_gqa=True)

    given = tensors(([14], [14]))
    sequences, other = (Sequences.from_lengths(lengths, device="cpu") for lengths in ([5, 9], [9, 5]))
    program = torch.export.export(Layer(), (*given, sequences, sequences.mask(causal)), strict=strict)
    ours = program.module()(*given, other, other.mask(causal))
    torch.testing.assert_close(
        ours, varlen_attention(*given, other, None, other.mask(causal), enable_gqa=True)
    )
    bounds = {"max_q": 12, "max_k": 12, "total_q": 14, "total_k": 14}
    few = Sequences.from_lengths([2, 3], device="cpu")
    first, then = (Sequences.unchecked(s.cu_q, s.cu_k, **bounds) for s in (sequences, few))
    saved = io.BytesIO()
    torch.export.save(torch.export.export(Layer(), (*given, first), strict=strict), saved)
    saved.seek(0)
    loaded = torch.export.load(saved).module()
    for made, packed, tokens in ((first, sequences, 14), (then, few, 5)):
        expected = varlen_attention(*(t[:tokens] for t in given), packed, enable_gqa=True)
        torch.testing.assert_close(loaded(*given, made)[:tokens], expected)


def test_used_lengths_leave_the_rest_out():
    room, used = ([20, 40], [24, 50]), ([13, 0], [24, 31])
    cu = [torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32) for lengths in room]
    sequences = Sequences(
        *cu, used_q=torch.tensor(used[0], dtype=torch.int32), used_k=torch.tensor(used[1], dtype=torch.int32)
    )
    q, k, v = tensors(room)
    for tensor in (k, v):
        tensor[24 + 31 :] = torch.nan
    out = varlen_attention(q, k, v, sequences, None, sequences.mask(causal), enable_gqa=True)
    want = alone(([13], [24]), causal, None)(*as_batch((q[:13], k[:24], v[:24])), (), None)[0]
    torch.testing.assert_close(out[:13], want[0].transpose(0, 1))
    assert not out[13:].any()


def test_a_sequences_bits_do_not_depend_on_its_neighbours(monkeypatch):
    """Nor on the waves in which the forward packs them: the first two, the third, the fourth."""
    monkeypatch.setattr(forward, "PACKED_BYTES", 128 * 4 * (DIM + 32))
    compiled = torch.compile(varlen_attention, backend="flex_inductor", dynamic=True)
    lengths = [50, 7, 330, 20]
    given = [x.requires_grad_() for x in tensors((lengths, lengths), torch.float32)]

    def run(at, lengths, attend=compiled):
        sequences = Sequences.from_lengths(lengths, torch.tensor(lengths), device="cpu")
        q, k, v = (x[at].detach().requires_grad_() for x in given)
        mask = sequences.mask(causal, block_size=(16, 64))  # so the third has two parts in the backward
        out, lse = attend(q, k, v, sequences, alibi, mask, enable_gqa=True, return_lse=True)
        return out, lse.T, *torch.autograd.grad(out.sin().sum() + lse.cos().sum(), (q, k, v))

    with served_by("cpu"), torch._inductor.config.patch(force_disable_caches=True):
        together = run(slice(None), lengths)
        for n, length in enumerate(lengths):
            at = slice(sum(lengths[:n]), sum(lengths[: n + 1]))
            for found, whole in zip(run(at, [length]), together, strict=True):
                assert torch.equal(found, whole[at])
    torch.testing.assert_close(together, run(slice(None), lengths, varlen_attention), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("lengths", [([0, 0], [0, 0]), ([], []), ([0, 0], [5, 0]), ([3], [0])])
def test_nothing_to_see(lengths):
    given = [x.requires_grad_() for x in tensors(lengths)]
    sequences = Sequences.from_lengths(*lengths)
    masks = (None, sequences.mask(prefix))
    (out, lse), masked = (
        varlen_attention(*given, sequences, None, mask, enable_gqa=True, return_lse=True) for mask in masks
    )
    assert torch.equal(masked[0], out) and torch.equal(masked[1], lse)
    assert out.shape == (sum(lengths[0]), HEADS, VALUE_DIM) and not out.any() and (lse == -torch.inf).all()
    assert not any(grad.any() for grad in torch.autograd.grad(out.sum() + lse.clamp(0).sum(), given))


def test_a_mask_is_asked_about_positions_that_there_are():
    """A table has an entry for each, however long other sequences are."""
    lengths = ([15, 1], [16, 9])
    document = torch.arange(16) // 5
    given = tensors(lengths)
    offsets = (Sequences.from_lengths(*lengths).cu_q, Sequences.from_lengths(*lengths).cu_k)
    sequences = Sequences(*offsets, max_q=20, max_k=30)
    same = lambda b, h, q_idx, kv_idx: document[q_idx] == document[kv_idx]  # noqa: E731
    out = varlen_attention(*given, sequences, None, sequences.mask(same), enable_gqa=True)
    want = alone(lengths, same, None)(*as_batch(given), (), None)[0]
    torch.testing.assert_close(out, want[0].transpose(0, 1))

    def short(b, h, q_idx, kv_idx):
        return document[:9][q_idx] == 0

    with pytest.raises(
        FlexError, match=r"^mask_mod short: fails at some b < 2, h < 1, q < 20, kv < 30: index"
    ):
        sequences.mask(short)


def test_a_mask_made_by_other_sequences():
    given = tensors(([5, 4], [5, 4]))
    sequences, other = Sequences.from_lengths([5, 4]), Sequences.from_lengths([4, 5])
    shorter = Sequences(sequences.cu_q, sequences.cu_k, used_k=torch.tensor([5, 1], dtype=torch.int32))
    for mask in (other.mask(causal), shorter.mask(causal)):
        with pytest.raises(FlexValueError, match=r"^block_mask: was made by other sequences than these"):
            varlen_attention(*given, sequences, None, mask, enable_gqa=True)


def test_inside_a_graph():
    sequences = Sequences.from_lengths([5, 40])
    given = tensors(([5, 40], [5, 40]), torch.float32)
    plain = torch.compile(
        lambda *args: varlen_attention(*args, enable_gqa=True), backend="aot_eager", fullgraph=True
    )
    torch.testing.assert_close(plain(*given, sequences), varlen_attention(*given, sequences, enable_gqa=True))

    def makes_one(q, k, v, sequences):
        return varlen_attention(q, k, v, sequences, None, sequences.mask(causal), enable_gqa=True)

    with pytest.raises(FlexError, match=r"^mask_mod: sequences.mask was called inside a compiled graph"):
        torch.compile(makes_one, backend="flex_inductor", fullgraph=True)(*given, sequences)


def test_wrong_calls():
    q, k, v = tensors(([5, 4], [5, 4]))
    sequences = Sequences.from_lengths([5, 4])
    for args, text in (
        (
            (q[None], k, v, sequences),
            r"^query: expected \[tokens, heads, head_dim\], got shape \[1, 9, 4, 8\]",
        ),
        (
            (q[:8], k, v, sequences),
            "^query: has 8 tokens, and the offsets end at 9; expected at least as many",
        ),
        ((q, k, v, sequences.cu_q), "^sequences: expected a flex_inductor.Sequences, got Tensor"),
        ((q, k, v, sequences, None, sequences.cu_q), "^block_mask: expected what sequences.mask"),
        ((q, k, v.float(), sequences), "dtype"),
    ):
        with pytest.raises(FlexError, match=text):
            varlen_attention(*args, enable_gqa=True)
    with pytest.raises(FlexError, match=r"^query has 4 heads and key has 2|enable_gqa"):
        varlen_attention(q, k, v, sequences)
    with pytest.raises(FlexError, match=r"^mask_mod by_sequence_and_head: reads h, but no number of heads"):
        sequences.mask(by_sequence_and_head)
    for heads in (1, 2, 8):
        mask = sequences.mask(by_sequence_and_head, heads=heads)
        with pytest.raises(FlexError, match=rf"^block_mask: was made for {heads} heads, and query has 4"):
            varlen_attention(q, k, v, sequences, None, mask, enable_gqa=True)
    for heads in (0, -1, "4", 1.5, True):
        with pytest.raises(FlexError, match=r"^heads: expected the number of query heads, got"):
            sequences.mask(by_sequence_and_head, heads=heads)
    for size in (0, (16,), (16, -1), 1.5, True):
        with pytest.raises(FlexError, match=r"^block_size: expected a positive integer or a pair"):
            sequences.mask(causal, block_size=size)


@pytest.mark.parametrize("queries", [[300, 40], [1, 1]], ids=["many", "few"])
def test_positions_in_the_middle_of_a_tile(queries):
    """A window begins there, and so do chunks of keys for one query."""
    keys = [300, 40]
    sequences = Sequences.from_lengths(queries, keys)
    query = torch.randn(sum(queries), 2, 16)
    key = torch.randn(sum(keys), 2, 16)
    mask = sequences.mask(lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < 150))

    def call(query, key):
        def alibi(score, b, h, q_idx, kv_idx):
            return score - 0.05 * (q_idx - kv_idx)

        return varlen_attention(query, key, key, sequences, alibi, mask)

    with served_by("cpu"):
        got = torch.compile(call, backend="flex_inductor", dynamic=False)(query, key)
    torch.testing.assert_close(got, call(query, key))
