"""Values of a mod that are slow to compute: once for each value of an index, or for each difference of key and query."""

import re

import pytest
import torch
from torch._inductor import cpp_builder
from torch._inductor.utils import run_and_get_code, run_fw_bw_and_get_code

from flex_inductor import create_block_mask, flex_attention, mods
from flex_inductor.lowerings.cpu import tables
from tests.lowerings.cpu.helpers import fused
from tests.support import Sizes, attention_of, dense_of, judge

WIDTH = 7
SIZES = Sizes(batch=2, heads=4, kv_heads=2, queries=70, keys=90, head_dim=16, value_dim=8)


def near(b, h, q_idx, kv_idx):
    """Within two rows and columns of an image."""
    rows, columns = q_idx // WIDTH - kv_idx // WIDTH, q_idx % WIDTH - kv_idx % WIDTH
    return (rows.abs() <= 2) & (columns.abs() <= 2)


def by_places(table):
    """A bias that reads tables at computed keys, and values of keys in several dtypes."""

    def score_mod(score, b, h, q_idx, kv_idx):
        scaled = score + table[h, kv_idx // 2] * torch.exp(-0.1 * (kv_idx % 5))
        return scaled + (kv_idx // 3 + kv_idx.long() * (kv_idx % 4 == 2)) * 1e-3

    return score_mod


def divisions(coordinate, code):
    body = code[code.index("const auto partial_tile") :]
    return re.findall(
        rf"div_floor_integer\(static_cast<int64_t>\({coordinate} |\({coordinate} [^()]*\) % ", body
    )


@pytest.mark.parametrize("found", [False, True])
def test_indices_are_not_divided_in_lanes(found, monkeypatch):
    if found:
        monkeypatch.setattr(tables, "_SLOW", set())
    mask = create_block_mask(near, None, None, 90, 90, "cpu", BLOCK_SIZE=32)
    attend = fused(lambda *tensors: flex_attention(*tensors, block_mask=mask))
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        _, code = run_and_get_code(attend, *(torch.randn(1, 2, 90, 16) for _ in range(3)))
    assert all(bool(divisions(index, "\n".join(code))) == found for index in ("TILE_Q", "TILE_KV"))


def by_head(score, b, h, q_idx, kv_idx):
    """ALiBi, as it is often written: one number for each head and distance."""
    return score + (kv_idx - q_idx) * torch.exp2(-(h + 1.0))


def by_query(score, b, h, q_idx, kv_idx):
    """Temperatures: numbers for each query, head and batch."""
    return score * torch.log1p(q_idx * 0.1) * torch.exp2(-0.5 * h) + torch.cos(b + 1.0) * score.abs()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("mod", [by_head, by_query])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_functions_of_an_index_are_not_computed_in_lanes(mod, dtype, dynamic):
    def build():
        return mod

    inputs = SIZES.inputs(dtype)
    mask = create_block_mask(causal, None, None, 70, 90, "cpu", BLOCK_SIZE=32)
    attend = fused(attention_of(build), dynamic=dynamic)
    judge(attend, dense_of(build), inputs, [], mask)
    inputs = [given.requires_grad_() for given in inputs]
    _, code = run_fw_bw_and_get_code(lambda: attend(*inputs, (), mask)[0])
    lanes = [text[text.index("TILE_Q") :] for text in code if "TILE_Q" in text]
    assert len(lanes) == 2
    for text in lanes:
        assert not re.search(r"\b(exp2|log1p|cos)\(", text[: text.index("struct Thread")])


def same_chunk(b, h, q_idx, kv_idx):
    """Alone, a division by 16: torch's Inductor computes `torch.arange(90) // 16` for 80 numbers."""
    return q_idx // 16 == kv_idx // 16


@pytest.mark.parametrize(
    "mask_mod, dynamic", [(near, True), (near, False), (same_chunk, True), (same_chunk, False)]
)
def test_results_are_right(mask_mod, dynamic):
    table = torch.randn(4, 45, dtype=torch.float64)
    attend = fused(attention_of(by_places), dynamic=dynamic)
    for keys in (90, 63):
        sizes = SIZES._replace(keys=keys)
        mask = create_block_mask(mask_mod, None, None, sizes.queries, keys, "cpu", BLOCK_SIZE=32)
        judge(attend, dense_of(by_places), sizes.inputs(torch.float32), [table], mask)


def test_one_query_reads_the_same_tables():
    sizes = SIZES._replace(queries=1, keys=200)
    mask = create_block_mask(lambda b, h, q, kv: kv % WIDTH < 3, None, None, 1, 200, "cpu")
    table = torch.randn(4, 9, 79, dtype=torch.float64)  # of an image of 5 rows

    def build(table):
        return mods.relative_bias_2d(table, 40)

    judge(fused(attention_of(build)), dense_of(build), sizes.inputs(torch.float32), [table], mask)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def buckets(table):
    """T5's: the entry follows from the difference by a logarithm. Bounds of its steps do not say that it is in range."""
    return mods.t5_bias(table)


def distances(table):
    """One number for each head and distance. The table has none for what the mask hides."""

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + table[h, q_idx - kv_idx]

    return score_mod


def decays(table):
    """A captured table of both signs, without a head, and slow operations of the difference."""

    def score_mod(score, b, h, q_idx, kv_idx):
        ahead = kv_idx + 100 - q_idx
        return score * table[ahead] + torch.exp(-0.01 * (ahead - 100).abs())

    return score_mod


@pytest.mark.parametrize(
    "mod, shape, mask_mod, dtype",
    [
        (buckets, (32, 4), None, torch.bfloat16),
        (buckets, (32, 4), None, torch.float32),
        (distances, (4, 90), causal, torch.float32),
        (distances, (4, 90), causal, torch.bfloat16),
        (decays, (190,), None, torch.float32),
        (decays, (190,), None, torch.bfloat16),
    ],
)
def test_values_of_the_difference(mod, shape, mask_mod, dtype):
    table = torch.randn(shape, dtype=torch.float64)
    mask = mask_mod and create_block_mask(mask_mod, None, None, 70, 90, "cpu", BLOCK_SIZE=32)
    judge(fused(attention_of(mod)), dense_of(mod), SIZES.inputs(dtype), [table], mask)


def test_lengths_that_change_compute_them_in_lanes():
    attend = fused(attention_of(buckets), dynamic=True)
    for keys in (90, 63):
        judge(
            attend,
            dense_of(buckets),
            SIZES._replace(keys=keys).inputs(torch.float32),
            [torch.randn(32, 4).double()],
            None,
        )


def test_gradients_of_a_difference_are_summed_along_diagonals():
    """One sum for each diagonal of a tile is scattered, and no kernel computes the logarithm."""
    table = torch.randn(32, 4, requires_grad=True)
    query, key, value = (torch.randn(1, 4, 70, 16, requires_grad=True) for _ in range(3))

    def step():
        out = fused(lambda q, k, v: flex_attention(q, k, v, mods.t5_bias(table)))(query, key, value)
        return torch.autograd.grad(out.sum(), [query, table])

    _, code = run_and_get_code(step)
    forward, backward = (text for text in code if "TILE_Q" in text)
    assert all(".log()" not in text[text.index("TILE_Q") :] for text in (forward, backward))
    assert "rows + columns - 1" in backward


def test_tables_round_nothing():
    """What a mod computes of 16-bit captures is in fp32, as it is in lanes."""
    slopes = torch.tensor([0.01, 0.03, 0.3, 0.7], dtype=torch.bfloat16)

    def of_slopes(slopes):
        return lambda score, b, h, q_idx, kv_idx: score + (kv_idx - q_idx) * slopes[h] * slopes[0]

    inputs = SIZES.inputs(torch.float32)
    rounded, exact = (
        fused(attention_of(of_slopes))(*inputs, (given,), None)[0] for given in (slopes, slopes.float())
    )
    torch.testing.assert_close(rounded, exact, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("width, dtype", [(7, torch.float32), (16, torch.float32), (16, torch.bfloat16)])
def test_biases_of_an_image(width, dtype):
    """Lanes read a table backwards, of a row of the image or of two."""
    height = -(-SIZES.keys // width)
    table = torch.randn(4, 2 * height - 1, 2 * width - 1, dtype=torch.float64)

    def build(table):
        return mods.relative_bias_2d(table, width)

    mask = create_block_mask(causal, None, None, 70, 90, "cpu", BLOCK_SIZE=32)
    judge(fused(attention_of(build)), dense_of(build), SIZES.inputs(dtype), [table], mask)


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_places_in_an_image_are_loaded_and_added_to_at_once(compiler, monkeypatch):
    # Inductor puts other pragmas before loops.
    monkeypatch.setattr(cpp_builder, "is_gcc", lambda: compiler == "gcc")
    table = torch.randn(2, 23, 15, requires_grad=True)
    query, key, value = (torch.randn(1, 2, 90, 16, requires_grad=True) for _ in range(3))

    def step():
        out = fused(lambda q, k, v: flex_attention(q, k, v, mods.relative_bias_2d(table, 8)))(
            query, key, value
        )
        return torch.autograd.grad(out.sum(), [query, table])

    with torch._inductor.config.patch(force_disable_caches=True):
        _, code = run_and_get_code(step)
    forward, backward = (text[text.index("TILE_Q") :] for text in code if "TILE_Q" in text)
    assert ("#pragma GCC ivdep" in forward) is (compiler == "gcc")
    assert "look_up(" in forward and "out of bounds" not in forward
    assert "look_up(" in backward and "add_each(" in backward and "out of bounds" not in backward
    assert all(
        re.search(r"(look_up|add_each)\(.*, keys_0, x1, tmp\d+\)", text) for text in (forward, backward)
    )
    # Row and column are one place, of which a table has what is of the key.
    places = [line for text in (forward, backward) for line in text.splitlines() if "look_up(" in line]
    assert not [line for line in places if "Vectorized<int32_t>(" in line]


def offsets(q_idx, kv_idx):
    return q_idx // WIDTH - kv_idx // WIDTH, q_idx % WIDTH - kv_idx % WIDTH


def of_frames(table):
    """Three places with slow values of the key."""

    def score_mod(score, b, h, q_idx, kv_idx):
        frame = q_idx // 30 - kv_idx // 30 + 3
        down, right = (q_idx % 30) // 6 - (kv_idx % 30) // 6 + 4, q_idx % 6 - kv_idx % 6 + 5
        return score + table[h, frame, down, right]

    return score_mod


def transposed(table):
    """Neighbours whose places are not one."""
    turned = table.transpose(1, 2)

    def score_mod(score, b, h, q_idx, kv_idx):
        down, right = offsets(q_idx, kv_idx)
        return score + turned[h, down + 12, right + 6]

    return score_mod


def a_part(table):
    """A view that starts within its memory, with gaps between heads."""
    part = table[:, 2:]

    def score_mod(score, b, h, q_idx, kv_idx):
        down, right = offsets(q_idx, kv_idx)
        return score * part[h, down + 12, right + 6]

    return score_mod


def counted_from_the_end(table):
    """An index of each dimension may be negative."""

    def score_mod(score, b, h, q_idx, kv_idx):
        down, right = offsets(q_idx, kv_idx)
        return score + table[h, down, right]

    return score_mod


def of_the_key(table):
    """Both places are of the key alone, and the values are squared."""

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + table[h, kv_idx // WIDTH, kv_idx % WIDTH].square()

    return score_mod


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "mod, shape",
    [
        (of_frames, (4, 6, 9, 11)),
        (transposed, (4, 13, 25)),
        (a_part, (4, 27, 13)),
        (counted_from_the_end, (4, 25, 13)),
        (of_the_key, (4, 13, 7)),
    ],
)
def test_places_in_several_dimensions(mod, shape, dynamic):
    table = torch.randn(shape, dtype=torch.float64)
    mask = create_block_mask(causal, None, None, 70, 90, "cpu", BLOCK_SIZE=32)
    judge(
        fused(attention_of(mod), dynamic=dynamic), dense_of(mod), SIZES.inputs(torch.float32), [table], mask
    )


def test_a_live_index_out_of_range_raises():
    """A table of all differences would hide it, or raise for what the mask hides."""
    table = torch.randn(4, 60)
    attend = fused(lambda *tensors: flex_attention(*tensors, distances(table), mask, enable_gqa=True))
    mask = create_block_mask(causal, None, None, 70, 90, "cpu")
    with torch.no_grad(), pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        attend(*SIZES.inputs(torch.float32))
