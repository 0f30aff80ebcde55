"""A call with a map of its tiles is the plain calls of its parts."""

import pytest
import torch

from flex_inductor import create_block_mask
from flex_inductor.errors import FlexNotImplementedError, FlexValueError
from flex_inductor.masks.schedule import schedule_parts
from flex_inductor.op import attention
from flex_inductor.op.eager import chunked
from flex_inductor.reference import reference
from flex_inductor.visits.places import COUNT, ROW
from tests.tile_maps import Part, packed

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 8, (16, 32)
PARTS = [Part(20, 70), Part(1, 33), Part(48, 32), Part(33, 100, 60, 0), Part(17, 40, 90, 64)]


def tensors(rows, keys, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, HEADS, rows, DIM), (1, KV_HEADS, keys, DIM), (1, KV_HEADS, keys, DIM))
    return [torch.randn(s, dtype=dtype, generator=generator, requires_grad=True) for s in shapes]


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def bias_of(table):
    def score_mod(score, b, h, q_idx, kv_idx):
        return score + table[b, h, q_idx - kv_idx + 128]

    return score_mod


def shifted(score_mod, part, sequence, head):
    def mod(score, b, h, q_idx, kv_idx):
        return score_mod(score, b + sequence, h + head, q_idx + part.first_query, kv_idx + part.first_key)

    return mod


@pytest.mark.parametrize("mask_mod", [causal, None], ids=["causal", "all"])
def test_packed_parts(mask_mod):
    gap, head = 3, 2
    inputs, masks = packed(mask_mod, PARTS, BLOCK, head, gap)
    q, k, v = tensors(*(sum(sizes) + gap * len(PARTS) for sizes in list(zip(*PARTS, strict=True))[:2]))
    table = torch.randn(len(PARTS), HEADS + head, 400, dtype=torch.float64, requires_grad=True)
    score_mod = bias_of(table)
    out, lse, _ = attention(q, k, v, score_mod, mask_mod, 0.3, inputs)
    grads = torch.autograd.grad((out.sin().sum() + lse.nan_to_num(0, 0, 0).cos().sum()), (q, k, v, table))

    loss, at, used = 0.0, [0, 0], torch.zeros(q.size(2), dtype=torch.bool)
    for sequence, (part, mask) in enumerate(zip(PARTS, masks, strict=True)):
        rows, keys = slice(at[0], at[0] + part.queries), slice(at[1], at[1] + part.keys)
        mod = shifted(score_mod, part, sequence, head)
        want, want_lse, _ = reference(q[:, :, rows], k[:, :, keys], v[:, :, keys], mod, mask, 0.3)
        torch.testing.assert_close(out[:, :, rows], want)
        torch.testing.assert_close(lse[:, :, rows], want_lse)
        loss = loss + want.sin().sum() + want_lse.nan_to_num(0, 0, 0).cos().sum()
        used[rows] = True
        at = [rows.stop + gap, keys.stop + gap]
    assert not out[:, :, ~used].any() and (lse[:, :, ~used] == -torch.inf).all()
    loss = loss + lse[:, :, ~used].detach().nan_to_num(0, 0, 0).cos().sum()
    for got, expected in zip(grads, torch.autograd.grad(loss, (q, k, v, table)), strict=True):
        torch.testing.assert_close(got, expected)


def test_pages():
    """Keys of a sequence that lie apart, in another batch, and backwards."""
    inputs, (mask,) = packed(causal, [Part(40, 96, 56)], (16, 16), scattered=True)
    q, k, v = tensors(40, 96)
    order = torch.tensor([4, 2, 0, 5, 3, 1])
    pages = [t.unflatten(2, (6, 16)) for t in (k, v)]
    stored = [torch.stack([torch.zeros_like(p), p[:, :, order.argsort()]]).flatten(3, 4)[:, 0] for p in pages]
    keys = inputs.tile_map.keys.clone()
    keys[:, 0], keys[:, ROW] = 1, order * 16
    inputs = inputs._replace(tile_map=inputs.tile_map._replace(keys=keys))
    out, lse, _ = attention(q, *stored, None, causal, 0.3, inputs)
    want, want_lse, _ = reference(q, k, v, None, mask, 0.3)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)


def test_nothing_but_what_tiles_hold_is_read():
    inputs, _ = packed(None, [Part(20, 70)], BLOCK)
    q, k, v = tensors(20, 128)
    counts = inputs.tile_map.keys[:, COUNT]
    assert counts.tolist() == [32, 32, 6]
    spoilt = [t.detach().clone() for t in (k, v)]
    for t in spoilt:
        t[:, :, 70:] = torch.nan
    out, lse, _ = attention(q, *spoilt, None, None, 0.3, inputs)
    want, want_lse, _ = reference(q, k[:, :, :70], v[:, :, :70], None, None, 0.3)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)


def test_a_map_needs_a_schedule():
    inputs, _ = packed(None, [Part(20, 70)], BLOCK)
    with pytest.raises(
        FlexValueError, match=r"^tile_map is given without a schedule; expected one whose rows"
    ):
        attention(*tensors(20, 70), None, None, 0.3, inputs._replace(schedule=None))
    listed = create_block_mask(causal, 1, 1, 20, 70, "cpu", BLOCK)
    with pytest.raises(
        FlexValueError,
        match=r"^tile_map is given with a schedule of lists; expected BlockRuns of runs for rows",
    ):
        attention(*tensors(20, 70), None, None, 0.3, inputs._replace(schedule=schedule_parts(listed)[0]))


@pytest.mark.parametrize("side, what", [("queries", "row"), ("keys", "column")])
def test_a_map_of_other_tiles_than_the_schedules(side, what):
    inputs, _ = packed(None, [Part(20, 70)], BLOCK)
    lines = getattr(inputs.tile_map, side)
    for wrong in (lines[:-1], lines[:, :-1], lines.long()):
        text = rf"^tile_map.{side} is torch.int\d\d of shape .*a line for each {what} of the schedule\.$"
        with pytest.raises(FlexValueError, match=text):
            attention(
                *tensors(20, 70),
                None,
                None,
                0.3,
                inputs._replace(tile_map=inputs.tile_map._replace(**{side: wrong})),
            )


def test_what_is_not_served_is_refused_by_name(monkeypatch):
    inputs, _ = packed(None, [Part(20, 70)], BLOCK)
    monkeypatch.setattr(chunked, "SERVES", ("schedule", "scattered"))
    text = (
        r"^inputs.tile_map cannot be used by the code that computes this call; expected no inputs but schedule, "
        r"scattered. Leave inputs.tile_map out.$"
    )
    with pytest.raises(FlexNotImplementedError, match=text):
        attention(*tensors(20, 70), None, None, 0.3, inputs)
