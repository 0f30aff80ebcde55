"""Runs against dense grids, and RunSchedule against BlockMask."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mask_helpers import assert_same_block_mask
from torch.nn.attention.flex_attention import create_block_mask as torch_create_block_mask
from torch.utils import _pytree as pytree

from flex_inductor.masks import library, lists
from flex_inductor.masks.errors import MaskArgumentError
from flex_inductor.masks.library.blockmask import create_block_mask
from flex_inductor.masks.library.combine import intersect
from flex_inductor.masks.runs import (
    FULL,
    PARTIAL,
    column_lists,
    covering,
    density,
    from_grid,
    merged,
    overlay,
    to_grid,
    transposed,
)
from flex_inductor.masks.schedule import TENSORS, RunSchedule


@st.composite
def grids(draw, count: int = 1):
    rows, columns = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    size = count * rows * columns
    kinds = draw(st.lists(st.sampled_from([0, 0, 1, 2, 2]), min_size=size, max_size=size))
    return torch.tensor(kinds, dtype=torch.int8).view(count * rows, columns)


@settings(max_examples=60, deadline=None)
@given(grids())
def test_grid_to_runs_and_back(grid):
    runs = from_grid(grid)
    assert torch.equal(to_grid(runs), grid)
    assert torch.equal(runs.tiles().long(), (grid > 0).sum(1))
    again = merged(
        runs.lines, runs.columns, *(x.flip(0) for x in (runs.line, runs.start, runs.stop, runs.kind))
    )
    assert torch.equal(again.start, runs.start) and torch.equal(again.kind, runs.kind)


@settings(max_examples=60, deadline=None)
@given(grids(count=3))
def test_transposed(grid):
    rows = grid.shape[0] // 3
    expected = grid.view(3, rows, -1).transpose(1, 2).reshape(-1, rows)
    flipped = transposed(from_grid(grid), 3)
    assert torch.equal(to_grid(flipped), expected)
    assert flipped.line.numel() == from_grid(expected).line.numel()


@settings(max_examples=60, deadline=None)
@given(grids())
def test_covering_leaves_nothing_out(grid):
    pieces = covering(from_grid(grid))
    assert torch.equal(to_grid(pieces), grid)
    assert (pieces.stop - pieces.start).sum() == grid.numel()


@settings(max_examples=60, deadline=None)
@given(grids(count=2))
def test_overlay(grid):
    half = grid.shape[0] // 2
    line, start, stop, first, second = overlay(from_grid(grid[:half]), from_grid(grid[half:]))
    rebuilt = torch.full_like(grid, -1)
    for i in range(line.numel()):
        rebuilt[line[i], start[i] : stop[i]] = first[i]
        rebuilt[half + line[i], start[i] : stop[i]] = second[i]
    assert torch.equal(rebuilt, grid)


@settings(max_examples=60, deadline=None)
@given(grids(), st.sampled_from([PARTIAL, FULL]), st.sampled_from([1, 20, 1 << 20]))
def test_column_lists_are_a_stable_sort(grid, kind, entries_at_once):
    counts, indices = column_lists(from_grid(grid), kind, entries_at_once)
    chosen = (grid == kind).int()
    assert torch.equal(counts, chosen.sum(1, dtype=torch.int32))
    assert torch.equal(indices.long(), torch.argsort(chosen, dim=1, descending=True, stable=True))


@settings(max_examples=60, deadline=None)
@given(grids(count=2), st.booleans())
def test_few_tiles_are_listed_in_another_way(grid, separate_full_blocks):
    runs = from_grid(grid)
    kinds = (PARTIAL, FULL) if separate_full_blocks else (PARTIAL,)
    tiles = runs.lines // 2, runs.columns
    by_grid, by_runs = (of(runs, (1, 2), tiles, kinds) for of in (lists._from_grid, lists._from_runs))
    torch.testing.assert_close(by_grid, by_runs, rtol=0, atol=0, check_stride=True)


def test_lists_are_views_only_where_they_are_expanded():
    alone, expanded = (create_block_mask(library.causal(), b, 1, 256, 256, device="cpu") for b in (1, 2))
    for name in lists.LISTS:
        assert not getattr(alone, name)._is_view()
        assert getattr(expanded, name).stride(0) == 0


@settings(max_examples=60, deadline=None)
@given(grids(), st.integers(1, 4), st.integers(1, 4))
def test_density(grid, rows, columns):
    rows, columns = min(rows, grid.shape[0]), min(columns, grid.shape[1])
    found = density(from_grid(grid), 0, grid.shape[0], (rows, columns), FULL)
    full = (grid == FULL).double()
    edges = [
        [i * n // cells for i in range(cells + 1)]
        for n, cells in zip(grid.shape, (rows, columns), strict=True)
    ]
    for r in range(rows):
        for c in range(columns):
            part = full[edges[0][r] : edges[0][r + 1], edges[1][c] : edges[1][c + 1]]
            assert found[r, c].item() == pytest.approx(part.mean().item())


DOCUMENTS = torch.arange(1000) // 210
BATCHED = torch.stack([torch.arange(1000) // 150, torch.arange(1000) // 333])
MASKS = {
    "causal": lambda b, h, q, kv: q >= kv,
    "documents": lambda b, h, q, kv: DOCUMENTS[q] == DOCUMENTS[kv],
    "batch": lambda b, h, q, kv: (BATCHED[b, q] == BATCHED[b, kv]) & (q >= kv),
    "heads": lambda b, h, q, kv: q - kv < 90 * h,
    "both": lambda b, h, q, kv: (BATCHED[b, q] == BATCHED[b, kv]) & (q - kv < 90 * h),
    "nothing": lambda b, h, q, kv: kv < 0,
    "checkers": lambda b, h, q, kv: (q // 64 + kv // 64) % 2 == 0,
}


def build(mask: str, compact: bool, **kwargs):
    return create_block_mask(MASKS[mask], 2, 3, 1000, 900, "cpu", (64, 32), compact=compact, **kwargs)


@pytest.mark.parametrize("mask", MASKS)
def test_schedule_and_block_mask_hold_the_same_tiles(mask):
    block_mask, schedule = build(mask, False), build(mask, True)
    assert_same_block_mask(schedule.to_block_mask(), block_mask)
    again = RunSchedule.from_block_mask(block_mask)
    for name in TENSORS:
        assert torch.equal(getattr(again, name), getattr(schedule, name)), name
    assert schedule.shape == block_mask.shape
    assert schedule.sparsity() == pytest.approx(100 * (1 - block_mask.to_dense().double().mean().item()))


@pytest.mark.parametrize("mask", MASKS)
def test_from_torchs_own_block_mask(mask):
    theirs = torch_create_block_mask(MASKS[mask], 2, 3, 1000, 900, "cpu", (64, 32))
    assert_same_block_mask(RunSchedule.from_block_mask(theirs).to_block_mask(), theirs)


@pytest.mark.parametrize("mask", MASKS)
def test_runs_name_each_visited_tile_once(mask):
    """Reads the tensors the way a kernel does."""
    schedule, block_mask = build(mask, True), build(mask, False)
    for b in range(2):
        for h in range(3):
            for side, rows in (("kv", 16), ("full_kv", 16), ("q", 29), ("full_q", 29)):
                offsets, runs = getattr(schedule, f"{side}_offsets"), getattr(schedule, f"{side}_runs")
                offsets = offsets[b % offsets.shape[0], h % offsets.shape[1]].tolist()
                counts = getattr(block_mask, f"{side}_num_blocks")[b, h]
                indices = getattr(block_mask, f"{side}_indices")[b, h]
                assert len(offsets) == rows + 1
                for row in range(rows):
                    tiles = [
                        t for s, e in runs[offsets[row] : offsets[row + 1]].tolist() for t in range(s, e)
                    ]
                    assert tiles == indices[row, : counts[row]].tolist()


def test_dimensions_the_mask_ignores_are_not_kept():
    assert {m: build(m, True).grids for m in MASKS} == {
        "causal": (1, 1),
        "documents": (1, 1),
        "batch": (2, 1),
        "heads": (1, 3),
        "both": (2, 3),
        "nothing": (1, 1),
        "checkers": (1, 1),
    }


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    "index", [1, (0, 2), (slice(None), slice(1, 3)), (1, 1, slice(3, 9)), (0, 0, -1)], ids=str
)
def test_slice_is_the_schedule_of_the_shifted_mask(mask, index):
    part = build(mask, True)[index]
    batch, heads, q_len, kv_len = part.shape
    direct = create_block_mask(part.mask_mod, batch, heads, q_len, kv_len, "cpu", (64, 32), compact=True)
    assert_same_block_mask(part.to_block_mask(), direct.to_block_mask())


def test_slice_shifts_the_mask():
    part = build("causal", True)[:, :, 3:5]
    assert part.shape == (2, 3, 128, 900)
    at = [torch.tensor(x) for x in (0, 0, 0, 3 * 64)]
    assert part.mask_mod(*at) and not part.mask_mod(*at[:3], at[3] + 1)


@pytest.mark.parametrize(
    "index", [2, (0, 3), (0, 0, slice(0, 9, 2)), (0, 0, slice(4, 4)), (0, 0, 0, 0)], ids=str
)
def test_slices_that_are_refused(index):
    with pytest.raises(MaskArgumentError, match="RunSchedule index: expected"):
        build("causal", True)[index]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    "rows, columns",
    [(None, None), ([3, 4, 5], None), ([9, 0, 4], [2, 3, 4, 20, 0, 1]), ([15], [28]), (range(16), range(29))],
    ids=str,
)
def test_cut_is_the_schedule_of_the_gathered_tokens(mask, rows, columns):
    schedule = build(mask, True)
    part = schedule.cut(rows, columns)
    batch, heads, q_len, kv_len = part.shape
    tokens = []
    for chosen, length, block in ((rows, 1000, 64), (columns, 900, 32)):
        tiles = range(-(-length // block)) if chosen is None else chosen
        tokens.append([t for tile in tiles for t in range(tile * block, min((tile + 1) * block, length))])
    assert (q_len, kv_len) == tuple(map(len, tokens))
    q, kv = map(torch.tensor, tokens)

    def gathered(b, h, q_idx, kv_idx):
        return MASKS[mask](b, h, q[q_idx], kv[kv_idx])

    direct = create_block_mask(gathered, batch, heads, q_len, kv_len, "cpu", (64, 32), compact=True)
    assert_same_block_mask(part.to_block_mask(), direct.to_block_mask())
    again = create_block_mask(part.mask_mod, batch, heads, q_len, kv_len, "cpu", (64, 32), compact=True)
    assert_same_block_mask(part.to_block_mask(), again.to_block_mask())


def test_cut_and_slice_together():
    """Heads that share a grid are told apart by the mask alone."""
    part = build("causal", True).cut([3, 1], [0, 1, 2])[1, 2:3]
    assert part.grids == (1, 1) and part.shape == (1, 1, 128, 96)


@pytest.mark.parametrize("rows", [[], [16], [-1], [1, 1], [[1]], [0.5], [True], [15, 0]], ids=str)
def test_cuts_that_are_refused(rows):
    with pytest.raises(
        MaskArgumentError, match=r"RunSchedule.cut: rows: (expected different integers|tile 15 is)"
    ):
        build("causal", True).cut(rows)


def test_without_full_blocks():
    schedule = build("causal", True, separate_full_blocks=False)
    assert not schedule.full_kv_runs.any() and not schedule.full_q_runs.any()
    tiles = create_block_mask(MASKS["causal"], 2, 3, 1000, 900, "cpu", (64, 32), separate_full_blocks=False)
    assert_same_block_mask(schedule.to_block_mask(), tiles)
    assert_same_block_mask(RunSchedule.from_block_mask(tiles).to_block_mask(), tiles)
    assert_same_block_mask(intersect(schedule, schedule).to_block_mask(), intersect(tiles, tiles))
    separate = build("causal", True).to_block_mask()
    assert_same_block_mask(build("causal", True, separate_full_blocks=True).to_block_mask(), separate)
    for part in (schedule[0], schedule.cut([0, 2]), pytree.tree_map(lambda leaf: leaf, schedule)):
        assert part.to_block_mask().full_kv_num_blocks is None


def test_pytree_round_trip_and_move():
    schedule = build("both", True)
    leaves, spec = pytree.tree_flatten(schedule)
    assert len(leaves) == 8
    again = pytree.tree_unflatten(leaves, spec)
    assert again.mask_mod is schedule.mask_mod and torch.equal(again.q_runs, schedule.q_runs)
    assert pytree.tree_flatten(build("both", True))[1] == spec
    assert pytree.tree_flatten(build("causal", True))[1] != spec
    assert schedule.to("meta").kv_runs.device.type == "meta"


def runs_visited(schedule: RunSchedule, scale: torch.Tensor) -> torch.Tensor:
    partial = (schedule.kv_runs[:, 1] - schedule.kv_runs[:, 0]).sum()
    full = (schedule.full_kv_runs[:, 1] - schedule.full_kv_runs[:, 0]).sum()
    return (partial + full) * scale


def made_graphs(masks, **options):
    """How many graphs serve the masks, of 2,048 tokens."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    visited = torch.compile(runs_visited, backend=backend, fullgraph=True, **options)
    for mask_mod in masks:
        schedule = create_block_mask(mask_mod, None, None, 2048, 2048, "cpu", compact=True)
        lists = schedule.to_block_mask()
        expected = lists.kv_num_blocks.sum() + lists.full_kv_num_blocks.sum()
        assert visited(schedule, torch.tensor(2)) == 2 * expected
    return len(graphs)


def test_goes_through_compile_with_changing_lengths():
    widths = (100, 210, 300, 370, 430, 555)
    assert made_graphs(library.document(torch.arange(2048) // width) for width in widths) <= 2


def test_masks_without_partial_or_full_tiles_take_no_other_graph():
    """Documents of every second piece: they have no bounds."""
    pieces = [torch.arange(2048) // width % 2 for width in (200, 128, 3, 256)]  # the first has both
    masks = [lambda b, h, q, kv, ids=ids: ids[q] == ids[kv] for ids in pieces]
    assert made_graphs(masks, dynamic=True) == 1


def test_text():
    schedule = create_block_mask(MASKS["causal"], 1, 1, 640, 640, "cpu", 64, compact=True)
    assert str(schedule) == (
        "RunSchedule(shape=(1, 1, 640, 640), BLOCK_SIZE=(64, 64), sparsity=45.00%, runs: "
        "kv=10, full_kv=9, q=10, full_q=9)\n"
        "▒▒                  \n"
        "██▒▒                \n"
        "████▒▒              \n"
        "██████▒▒            \n"
        "████████▒▒          \n"
        "██████████▒▒        \n"
        "████████████▒▒      \n"
        "██████████████▒▒    \n"
        "████████████████▒▒  \n"
        "██████████████████▒▒"
    )
    assert schedule.picture(cells=2) == "▒▒  \n██▒▒"


def test_picture_never_hides_a_visited_tile():
    one_tile = create_block_mask(
        lambda b, h, q, kv: (q == 0) & (kv == 0), 1, 1, 8192, 8192, "cpu", 64, compact=True
    )
    assert one_tile.picture(cells=2) == "░░  \n    "


@pytest.mark.parametrize("lengths", [(0, 0), (0, 64), (64, 0)])
def test_a_mask_of_no_tokens_is_shown(lengths):
    schedule = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, *lengths, "cpu", 32, compact=True)
    assert str(schedule).startswith(f"RunSchedule(shape=(1, 1, {lengths[0]}, {lengths[1]})")
