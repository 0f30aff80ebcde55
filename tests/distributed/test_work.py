"""What tiles read, and what a layout makes of it, against all pairs of tokens."""

import re

import pytest
import torch

from flex_inductor import FlexError, Sequences, create_block_mask, masks
from flex_inductor.distributed.work import TileWork

from . import dense


def by_head(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 200 * (h + 1))


def by_batch(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx % 3 < kv_idx + b * 500)


def nothing_late(b, h, q_idx, kv_idx):
    """Rows that read nothing at all."""
    return (q_idx >= kv_idx) & (q_idx < 600)


PLANE = {
    "causal": masks.causal(),
    "window": masks.sliding_window(300),
    "documents": masks.document(lengths=dense.RAGGED),
    "whole documents": masks.document(lengths=dense.RAGGED, causal=False),
    "dilated": masks.dilated_window(4, 256),
    "global": masks.global_local(100, 60),
    "rows without keys": nothing_late,
}


def scattered(tiles, ranks, seed=0):
    """Owners in any order; the last rank has nothing."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, ranks - 1, (tiles,), generator=generator).tolist()


def agrees(work, read, ranks=5, mask=0):
    for seed in range(2):
        owner = scattered(work.tiles, ranks, seed)
        found = work.loads(owner, ranks)
        expected = dense.loads(read, owner, ranks)
        for name, values in zip(("work", "read", "received", "sent"), expected, strict=True):
            assert torch.allclose(getattr(found, name)[mask], torch.tensor(values, dtype=torch.float64)), name
        done, reads = work.between(owner, ranks)
        expected_done, expected_reads = dense.between(read, owner, ranks)
        assert torch.allclose(done[mask], expected_done, atol=1e-4)
        assert torch.equal(reads[mask], expected_reads)


@pytest.mark.parametrize("name", PLANE)
@pytest.mark.parametrize("tile", [32, 128])
def test_a_mask_mod(name, tile):
    work = TileWork.of(PLANE[name], dense.LENGTH, tile=tile)
    read = dense.tiles_read(PLANE[name], dense.LENGTH, tile)
    assert torch.equal(work.cost, read[0, 0].sum(1).double())
    agrees(work, read)


def test_no_mask():
    work = TileWork.of(None, 1000)
    assert (work.tiles, work.tile, work.length) == (8, 128, 1000)
    agrees(work, torch.ones(1, 1, 8, 8, dtype=torch.bool))


@pytest.mark.parametrize("mask_mod, sizes", [(by_head, (1, 3)), (by_batch, (2, 1))])
def test_masks_that_differ_by_head_or_batch(mask_mod, sizes):
    """Work is the mean of them, and a tile comes where any of them reads it."""
    schedule = create_block_mask(mask_mod, *sizes, 1000, 1000, "cpu", 64, compact=True)
    assert schedule.grids == sizes
    read = dense.tiles_read(mask_mod, 1000, 64, sizes[1], sizes[0])
    agrees(TileWork.of(schedule), read)
    agrees(TileWork.of(mask_mod, 1000, tile=64, batch=sizes[0], heads=sizes[1]), read)


@pytest.mark.parametrize("separate", [True, False])
def test_block_masks(separate):
    block_mask = create_block_mask(
        PLANE["documents"], 1, 1, dense.LENGTH, dense.LENGTH, "cpu", 64, separate_full_blocks=separate
    )
    agrees(TileWork.of(block_mask), dense.tiles_read(PLANE["documents"], dense.LENGTH, 64))


def test_tiles_of_several_blocks():
    """Four blocks of queries and two of keys: work is that of the blocks visited, in tiles."""
    schedule = create_block_mask(PLANE["documents"], None, None, 1024, 1024, "cpu", (32, 64), compact=True)
    work = TileWork.of(schedule, tile=128)
    blocks = schedule.row_runs()
    assert float(work.cost.sum()) == float((blocks.stop - blocks.start).sum()) / 8
    read = dense.tiles_read(PLANE["documents"], 1024, 128)
    owner = scattered(8, 3)
    _, _, received, sent = dense.loads(read, owner, 3)
    found = work.loads(owner, 3)
    assert found.received[0].tolist() == received and found.sent[0].tolist() == sent
    assert TileWork.of(schedule).tile == 64


def test_sequences():
    sequences = Sequences.from_lengths(dense.RAGGED)
    whole, causal = PLANE["whole documents"], PLANE["documents"]
    agrees(TileWork.of(sequences, tile=64), dense.tiles_read(whole, dense.LENGTH, 64))
    made = sequences.mask(lambda sequence, h, q_idx, kv_idx: q_idx >= kv_idx)
    agrees(TileWork.of(made, tile=64), dense.tiles_read(causal, dense.LENGTH, 64))
    near = sequences.mask(
        lambda s, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < 64 * (h + 1)), heads=2
    )

    def packed(b, h, q_idx, kv_idx):
        return causal(b, h, q_idx, kv_idx) & (q_idx - kv_idx < 64 * (h + 1))

    agrees(TileWork.of(near, tile=64), dense.tiles_read(packed, dense.LENGTH, 64, heads=2))


def test_several_masks_and_their_weights():
    named = {name: PLANE[name] for name in ("documents", "window")}
    work = TileWork.of(named, dense.LENGTH, weights={"window": 3, "documents": 1})
    read = [dense.tiles_read(PLANE[name], dense.LENGTH, 128) for name in named]
    assert torch.equal(work.cost, (read[0] + 3.0 * read[1])[0, 0].sum(1).double())
    agrees(work, read[1], mask=1)
    found = work.loads(scattered(work.tiles, 5), 5)
    busy = found.weights @ found.work
    assert found.imbalance() == float(busy.max() / busy.mean())


@pytest.mark.parametrize("name", PLANE)
def test_the_hull(name):
    work = TileWork.of(PLANE[name], dense.LENGTH)
    read = dense.tiles_read(PLANE[name], dense.LENGTH, 128)[0, 0]
    first, stop = work.hull
    for row, reads in enumerate(read):
        columns = reads.nonzero().flatten().tolist()
        assert (int(first[row]), int(stop[row])) == ((columns[0], columns[-1] + 1) if columns else (row, row))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (({},), "at least one mask, got an empty mapping"),
        ((masks.causal(),), "mask: a mask_mod or None does not say how long the sequence is"),
        ((by_head, 100), "H: got None, but mask_mod by_head reads h"),
        ((lambda q, kv: q >= kv, 100), "mask_mod"),
        ((masks.causal(), -1), "Q_LEN: expected an integer of at least 0, got -1"),
        (({"a": 3}, 100), "a: expected a BlockMask, a RunSchedule, Sequences, a mask_mod or None, got int"),
        (
            (create_block_mask(masks.causal(), None, None, 128, 256, "cpu", compact=True),),
            "mask: expected 128 queries and keys, one length for all masks, got 128 x 256",
        ),
        (({"a": Sequences.from_lengths([50]), "b": None}, 60), "a: expected 60 queries and keys"),
        ((Sequences.from_lengths([5, 5], [6, 6]),), "sequences whose queries and keys are packed alike"),
    ],
)
def test_refused(arguments, message):
    with pytest.raises(FlexError, match=message):
        TileWork.of(*arguments)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"weights": {"b": 1}}, "weights: expected one for each mask (a), got {'b': 1}"),
        ({"weights": [1, 2]}, "weights: expected one for each mask (a)"),
        ({"weights": {"a": -1}}, "weights: a: expected a number above 0"),
        ({"weights": {"a": True}}, "weights: a: expected a number above 0"),
        ({"tile": 100}, "tile: expected a multiple of 128, of all block sizes, got 100"),
        ({"tile": 0}, "tile: expected a multiple of 128"),
    ],
)
def test_options_refused(options, message):
    schedule = create_block_mask(masks.causal(), None, None, 256, 256, "cpu", compact=True)
    with pytest.raises(FlexError, match=re.escape(message)):
        TileWork.of({"a": schedule}, **options)
