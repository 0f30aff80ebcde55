"""Both forms of a schedule, read band by band, against the grid of blocks they stand for."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flex_inductor import create_block_mask
from flex_inductor.masks.lists import lists_from_runs
from flex_inductor.masks.runs import Extent, from_grid
from flex_inductor.masks.schedule import RunSchedule, schedule_parts
from flex_inductor.visits import BlockRuns


@st.composite
def schedules(draw):
    """(grid of kinds [B, H, rows, columns], the two forms of it, lengths in tokens)."""
    batch, heads = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    rows, columns = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    block = draw(st.sampled_from([(1, 1), (2, 3), (4, 2)]))
    lengths = tuple(
        n * size - draw(st.integers(0, size - 1)) for n, size in zip((rows, columns), block, strict=True)
    )
    size = batch * heads * rows * columns
    kinds = draw(st.lists(st.sampled_from([0, 0, 1, 2, 2]), min_size=size, max_size=size))
    grid = torch.tensor(kinds, dtype=torch.int8).view(batch, heads, rows, columns)
    extent = Extent(batch, heads, lengths, block)
    runs = from_grid(grid.flatten(0, 2))
    lists = BlockRuns.of(block, lists_from_runs(runs, (batch, heads), extent, True), of_one=True)
    compact = RunSchedule.from_runs(runs, (batch, heads), extent, lambda b, h, q, kv: q >= kv)
    return grid, (lists, schedule_parts(compact)[0]), lengths


@settings(max_examples=100, deadline=None)
@given(schedules(), st.data())
def test_bands(case, data):
    grid, forms, (queries, keys) = case
    kinds = grid.repeat_interleave(forms[0].q_block, 2).repeat_interleave(forms[0].kv_block, 3)
    ranges = []
    for size in (grid.size(0), grid.size(1), queries, keys):
        start = data.draw(st.integers(0, size - 1))
        ranges.append(slice(start, data.draw(st.integers(start + 1, size))))
    b, h, m, n = ranges
    step = data.draw(st.integers(1, keys))
    rows = kinds[b, h, m, :keys]
    narrow = cut(forms[0], data.draw(st.integers(0, forms[0].kv_runs.size(-1))))
    for schedule in (*forms, narrow):
        band = schedule.bands(queries, keys, None, grid.device).band(b, h, m)
        visited, full = band.lanes(n)
        assert torch.equal(visited, rows[..., n] > 0) and torch.equal(full, rows[..., n] == 2)
        first, last = n.start // schedule.kv_block, -(-n.stop // schedule.kv_block)
        blocks = grid[b, h, m.start // schedule.q_block : -(-m.stop // schedule.q_block), first:last]
        assert band.visits_all(n) == (blocks > 0).all() and band.all_full(n) == (blocks == 2).all()
        tiles = [slice(at, min(at + step, keys)) for at in range(0, keys, step)]
        assert list(band.key_tiles(keys, step)) == [tile for tile in tiles if _visits(band, rows, tile)]


def cut(lists, width):
    """The lists with room for as many entries as are needed, and at least `width`; others hold anything."""
    counts = (lists.kv_offsets, lists.full_kv_offsets)
    width = max(width, *(int(count.max()) for count in counts))
    fields = {}
    for name, count in zip(("kv_runs", "full_kv_runs"), counts, strict=True):
        used = torch.arange(width) < count.unsqueeze(-1)
        fields[name] = torch.where(used, getattr(lists, name)[..., :width], 1000)
    return lists._replace(**fields)


def _visits(band, rows, tile):
    """Whole blocks count: a tile of keys may touch one whose visited part it does not hold."""
    first, last = tile.start // band.kv_block, -(-tile.stop // band.kv_block)
    return bool((rows[..., first * band.kv_block : last * band.kv_block] > 0).any())


def test_runs_are_counted_per_batch_and_head():
    grid = torch.tensor([[0, 2], [1, 1], [2, 0], [0, 0]], dtype=torch.int8)
    extent = Extent(2, 1, (2, 2), (1, 1))
    schedule = RunSchedule.from_runs(from_grid(grid), (2, 1), extent, lambda b, h, q, kv: q >= kv)
    found, _ = schedule_parts(schedule)
    assert found.form == "runs"
    assert found.kv_offsets.tolist() == [[[0, 0, 1]], [[1, 1, 1]]]
    assert found.kv_runs.tolist() == [[0, 2], [0, 0]]  # there are two entries at least
    assert found.full_kv_offsets.tolist() == [[[0, 1, 1]], [[1, 2, 2]]]
    assert found.full_kv_runs.tolist() == [[1, 2], [0, 1]]


@pytest.mark.parametrize("compact", [False, True])
def test_on_a_cpu_calls_read_rows_alone(compact):
    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx % 3 == 0) | (kv_idx < 5)  # no window

    mask = create_block_mask(mask_mod, None, None, 20, 20, "cpu", BLOCK_SIZE=4, compact=compact)
    on_cpu, elsewhere = (schedule_parts(mask.to(device))[0] for device in ("cpu", "meta"))
    assert not on_cpu.lists_queries and elsewhere.lists_queries
    tensors = [sum(isinstance(field, torch.Tensor) for field in each) for each in (on_cpu, elsewhere)]
    assert tensors == [4, 8]
