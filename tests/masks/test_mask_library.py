"""Each mask and score mod against its definition, written as loops, and against its own picture."""

from __future__ import annotations

import math

import pytest
import torch
from mask_helpers import compare
from torch.nn.attention.flex_attention import create_mask, flex_attention

from flex_inductor import mods
from flex_inductor.errors import FlexValueError
from flex_inductor.masks import library
from flex_inductor.masks.errors import MaskArgumentError
from flex_inductor.masks.library.blockmask import create_block_mask


def drawn(mask_mod, q_len: int, kv_len: int, b: int = 0, batch: int = 1) -> list[str]:
    mask = create_mask(mask_mod, batch, 1, q_len, kv_len, "cpu")[b, 0]
    return ["".join("#" if x else "." for x in row) for row in mask.tolist()]


def picture(function, column: int = 0) -> list[str]:
    """The picture in a docstring: the last paragraph made of # and . only."""
    lines = [line.strip() for line in function.__doc__.splitlines()]
    rows = [line.split() for line in lines if line and set(line) <= set("#. ")]
    return [row[column] for row in rows]


PICTURES = {
    "causal": (library.causal(), 4, 4, 0),
    "sliding_window": (library.sliding_window(2), 4, 6, 0),
    "sliding_window, both sides": (library.sliding_window(2, causal=False), 4, 6, 1),
    "prefix_lm": (library.prefix_lm(2), 4, 4, 0),
    "dilated_window": (library.dilated_window(2, 2), 5, 6, 0),
    "global_local": (library.global_local(2, 1), 5, 6, 0),
    "shared_prefix": (library.shared_prefix(2, 2), 6, 6, 0),
    "tree": (library.tree([-1, 0, 0, 1], 2), 4, 6, 0),
    "ragged": (library.ragged(torch.tensor([3, 2])), 4, 4, 0),
}


@pytest.mark.parametrize("name", PICTURES)
def test_docstring_picture(name):
    mask_mod, q_len, kv_len, column = PICTURES[name]
    shown = picture(getattr(library, name.split(",")[0]), column)
    assert drawn(mask_mod, q_len, kv_len, batch=2) == shown


def test_block_diffusion_picture():
    rows = [line.replace(" ", "") for line in library.block_diffusion.__doc__.splitlines()]
    shown = [row for row in rows if row and set(row) <= set("#.")]
    assert drawn(library.block_diffusion(4, 2), 8, 8) == shown


def test_neighborhood_pictures():
    assert drawn(library.neighborhood(6, 3), 4, 6) == picture(library.neighborhood, 0)
    row = drawn(library.neighborhood((4, 5), 3), 20, 20)[2 * 5 + 2]
    assert [row[i : i + 5] for i in range(0, 20, 5)] == picture(library.neighborhood, 1)


IDS = torch.tensor([0, 0, 1, 2, 2, 2])


@pytest.mark.parametrize(
    "mask_mod",
    [
        library.document(IDS),
        library.document(lengths=[2, 1, 3]),
        library.document(lengths=torch.tensor([2, 1, 3])),
        library.document(cu_seqlens=torch.tensor([0, 2, 3, 6], dtype=torch.int32)),
        library.document(IDS[None]),
    ],
)
def test_documents_from_any_description(mask_mod):
    assert drawn(mask_mod, 6, 6) == ["#.....", "##....", "..#...", "...#..", "...##.", "...###"]


def test_documents_both_ways():
    both = library.document(IDS, causal=False)
    assert drawn(both, 6, 6) == ["##....", "##....", "..#...", "...###", "...###", "...###"]


def test_prefix_and_context_for_each_batch():
    lengths = torch.tensor([0, 3])
    assert drawn(library.prefix_lm(lengths), 3, 4, b=1, batch=2) == ["###.", "###.", "###."]
    assert drawn(library.prefix_lm(lengths), 3, 4, b=0, batch=2) == ["#...", "##..", "###."]
    assert drawn(library.tree([-1, 0], lengths), 2, 6, b=1, batch=2) == ["####..", "#####."]
    assert drawn(library.ragged(lengths, torch.tensor([1, 2])), 4, 3, b=1, batch=2) == ["##."] * 3 + ["..."]


@pytest.mark.parametrize("window", [(3, 2), (1, 4), (4, 5)])
def test_neighborhood_sees_the_nearest_cells_and_always_as_many(window):
    height, width = 4, 5
    mask = create_mask(library.neighborhood((height, width), window), 1, 1, 20, 20, "cpu")[0, 0]
    assert (mask.sum(1) == window[0] * window[1]).all()
    for q in range(20):
        seen = [divmod(k, width) for k in range(20) if mask[q, k]]
        for axis, size in enumerate((height, width)):
            cells = sorted({cell[axis] for cell in seen})
            at = divmod(q, width)[axis]
            start = min(max(at - window[axis] // 2, 0), size - window[axis])
            assert cells == list(range(start, start + window[axis]))


@pytest.mark.parametrize(
    ("shape", "window", "tile"), [((8, 12), (3, 5), (4, 4)), ((4, 6, 4), 3, (2, 3, 2)), (12, 5, 4)]
)
def test_tiled_neighborhood_is_the_same_in_another_order(shape, window, tile):
    order = library.neighborhood_order(shape, tile)
    count = order.numel()
    plain = create_mask(library.neighborhood(shape, window), 1, 1, count, count, "cpu")[0, 0]
    tiled = create_mask(library.neighborhood(shape, window, tile), 1, 1, count, count, "cpu")[0, 0]
    assert sorted(order.tolist()) == list(range(count))
    assert torch.equal(tiled, plain[order][:, order])


def test_tiles_make_fewer_partial_blocks():
    plain, tiled = (
        create_block_mask(library.neighborhood((128, 128), 9, tile), None, None, 16384, 16384, "cpu", 64)
        for tile in (None, (8, 8))
    )
    assert tiled.sparsity() > plain.sparsity()


ALL = {
    "causal": library.causal(),
    "sliding_window": library.sliding_window(70),
    "prefix_lm": library.prefix_lm(100),
    "document": library.document(torch.arange(512) // 77),
    "dilated_window": library.dilated_window(9, 7),
    "global_local": library.global_local(40, 5),
    "block_diffusion": library.block_diffusion(256, 24),
    "neighborhood": library.neighborhood((16, 32), (5, 7)),
    "neighborhood 3-d": library.neighborhood((8, 8, 8), 3, 4),
    "shared_prefix": library.shared_prefix(200, 50),
    "tree": library.tree([-1] + [i // 2 for i in range(499)], 12),
    "ragged": library.ragged(torch.tensor([300, 512])),
}


@pytest.mark.parametrize("name", ALL)
def test_block_mask_equals_torchs(name):
    compare(ALL[name], 2, None, 512, 512, 64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: library.sliding_window(0), "sliding_window: size: expected an integer of at least 1, got 0"),
        (lambda: library.document(), "exactly one of ids, lengths and cu_seqlens, got 0"),
        (lambda: library.document([0, 0, 1]), "ids: expected an integer tensor, got a list"),
        (lambda: library.document(cu_seqlens=[0, 2]), "cu_seqlens: expected an integer tensor, got a list"),
        (lambda: library.document(IDS, lengths=[6]), "exactly one of ids, lengths and cu_seqlens, got 2"),
        (lambda: library.document(lengths=[3, -1]), r"got \[3, -1\]"),
        (lambda: library.document(IDS[None, None]), "ids: expected"),
        (lambda: library.prefix_lm(torch.tensor(3)), r"prefix_lm: prefix: expected .* got shape \(\)"),
        (lambda: library.neighborhood((4, 4), (3, 5)), "window: expected 1 to 4 along axis 1"),
        (
            lambda: library.neighborhood((4, 4), 3, (3, 4)),
            "tile: expected a divisor of 4 along axis 0, got 3",
        ),
        (lambda: library.neighborhood((2, 2, 2, 2), 1), "expected one to three axes"),
        (lambda: library.tree([0]), "expected node 0's parent to come before it"),
        (lambda: library.tree([]), "expected at least one node"),
        (lambda: library.ragged([3]), r"ragged: q_lengths: expected an integer tensor \[batch\], got \[3\]"),
        (
            lambda: library.ragged(torch.ones(2)),
            r"q_lengths: expected an integer tensor \[batch\], got tensor",
        ),
        (
            lambda: library.document(torch.ones(4)),
            "ids: expected an integer tensor, got a tensor .* torch.float32",
        ),
        (lambda: library.document(lengths=[1.5, 2]), r"lengths: expected integers, got \[1.5, 2\]"),
        (lambda: library.document(lengths="two"), "lengths: expected integers, got 'two'"),
        (lambda: library.document(cu_seqlens=IDS + 1), "cu_seqlens: expected ascending ends from 0 on, got"),
        (lambda: library.document(cu_seqlens=torch.tensor(3)), "ascending ends from 0 on, got 3"),
    ],
)
def test_wrong_arguments_of_a_mask(call, message):
    with pytest.raises(MaskArgumentError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mods.softcap(0), "softcap: cap: expected a positive number, got 0"),
        (lambda: mods.alibi([1.0]), "alibi: slopes: expected a 1-d tensor, got list"),
        (lambda: mods.relative_bias(torch.zeros(2, 4)), "expected an odd number of distances"),
        (lambda: mods.relative_bias_2d(torch.zeros(2, 3, 3), 3), r"with width 3, got \(2, 3, 3\)"),
        (lambda: mods.t5_bias(torch.zeros(2, 4)), "expected at least 4 buckets"),
    ],
)
def test_wrong_arguments_of_a_mod(call, message):
    with pytest.raises(FlexValueError, match=message) as error:
        call()
    assert not isinstance(error.value, MaskArgumentError)


def scores(score_mod, heads: int, q_len: int, kv_len: int, score: float = 0.0) -> torch.Tensor:
    """[heads, q_len, kv_len] of the modified score."""
    function = score_mod
    for dims in ((None, None, None, None, 0), (None, None, None, 0, None), (None, None, 0, None, None)):
        function = torch.vmap(function, in_dims=dims)
    ranges = [torch.arange(n) for n in (heads, q_len, kv_len)]
    return function(torch.tensor(score), torch.tensor(0), *ranges)


def test_alibi():
    assert mods.alibi_slopes(4).tolist() == [2**-2, 2**-4, 2**-6, 2**-8]
    assert mods.alibi_slopes(3).tolist() == [2**-4, 2**-8, 2**-2]
    biased = scores(mods.alibi(mods.alibi_slopes(4)), 4, 5, 5)
    assert biased[1, 4, 1].item() == -3 / 16


def test_softcap():
    assert scores(mods.softcap(20.0), 1, 1, 1, 1000.0).item() == pytest.approx(20)
    assert scores(mods.softcap(20.0), 1, 1, 1, 0.1).item() == pytest.approx(0.1, abs=1e-5)


def test_relative_bias_picture():
    numbers = torch.arange(5.0)[None]
    biased = scores(mods.relative_bias(numbers), 1, 4, 4)[0]
    rows = [
        r.split() for r in mods.relative_bias.__doc__.splitlines() if r.strip() and set(r) <= set("01234 ")
    ]
    assert biased.tolist() == [[float(x) for x in row] for row in rows]


def test_relative_bias_2d():
    height, width = 3, 4
    table = torch.randn(2, 2 * height - 1, 2 * width - 1)
    biased = scores(mods.relative_bias_2d(table, width), 2, 12, 12)
    for q in range(12):
        for k in range(12):
            down, right = q // width - k // width, q % width - k % width
            assert torch.equal(biased[:, q, k], table[:, down + height - 1, right + width - 1])


def t5_bucket(relative: int, bidirectional: bool, buckets: int, max_distance: int) -> int:
    found, distance = 0, -relative
    if bidirectional:
        buckets //= 2
        found, distance = (buckets if relative > 0 else 0), abs(relative)
    distance = max(distance, 0)
    exact = buckets // 2
    if distance < exact:
        return found + distance
    far = exact + int(math.log(distance / exact) / math.log(max_distance / exact) * (buckets - exact))
    return found + min(far, buckets - 1)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_buckets(bidirectional):
    table = torch.arange(32.0)[:, None]
    biased = scores(mods.t5_bias(table, bidirectional=bidirectional, max_distance=100), 1, 150, 150)[0]
    for q in range(0, 150, 7):
        for k in range(150):
            assert biased[q, k].item() == t5_bucket(k - q, bidirectional, 32, 100)


def test_sandwich():
    biased = scores(mods.sandwich(4, 30, 16), 4, 30, 30)
    expected = sum(math.cos(7 / 10000 ** (2 * i / 16)) - 1 for i in range(8))
    assert biased[1, 20, 13].item() == pytest.approx(4 * expected, rel=1e-5)
    assert biased[1, 13, 20] == biased[1, 20, 13] and biased[3, 5, 5] == 0


def test_soft_distance_picture():
    assert scores(mods.soft_distance(1, 2.0), 1, 3, 4)[0].tolist() == [
        [0, 0, -2, -4],
        [0, 0, 0, -2],
        [-2, 0, 0, 0],
    ]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "score_mod",
    [
        mods.alibi(mods.alibi_slopes(2)),
        mods.softcap(5.0),
        mods.relative_bias(torch.randn(2, 9)),
        mods.relative_bias_2d(torch.randn(2, 7, 7), 4),
        mods.t5_bias(torch.randn(32, 2)),
        mods.sandwich(2, 16),
        mods.soft_distance(3, 0.5),
    ],
    ids=lambda f: f.__name__,
)
def test_torchs_flex_attention_takes_them(score_mod):
    torch.compiler.reset()  # with another number in its closure, torch's own op is not served from 2.15 on
    q, k, v = torch.randn(3, 1, 2, 16, 8)
    got = flex_attention(q, k, v, score_mod=score_mod)
    plain = q @ k.transpose(-1, -2) / math.sqrt(8)
    changed = torch.empty_like(plain)
    for h in range(2):
        for i in range(16):
            for j in range(16):
                changed[0, h, i, j] = score_mod(plain[0, h, i, j], *map(torch.tensor, (0, h, i, j)))
    torch.testing.assert_close(got, changed.softmax(-1) @ v, atol=1e-5, rtol=1e-4)
