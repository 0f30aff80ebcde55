"""Which mods compute their integers in int64: those of which int32 may not hold them."""

import pytest
import torch

import flex_inductor
from flex_inductor import Sequences, create_block_mask, flex_attention, varlen_attention
from flex_inductor.mod_ir.arguments import MASK_LANES
from flex_inductor.mod_ir.capture import lift
from flex_inductor.mod_ir.checks import lane_graph
from flex_inductor.mod_ir.widths import Sizes, graph_may_leave_int32, rounded
from flex_inductor.reference import reference

TABLE = torch.zeros(100)
STARTS = torch.arange(4, dtype=torch.int32)
IDS = torch.arange(100)
SIZES = Sizes(4, 16, 1 << 15, 1 << 15)

NARROW = {
    "causal": lambda b, h, q, kv: q >= kv,
    "window": lambda b, h, q, kv: (q - kv).abs() < 4096,
    "documents": lambda b, h, q, kv: (IDS[q] == IDS[kv]) & (q >= kv),
    "starts": lambda b, h, q, kv: q + STARTS[b] - 7 >= kv,
    "ends": lambda b, h, q, kv: kv < STARTS[b] + STARTS[b + 1],
    "relative bias": lambda b, h, q, kv: TABLE[q - kv + 4096] > 0,
    "batch and head": lambda b, h, q, kv: TABLE[b * 16 + h] > 0,
    "flat pairs": lambda b, h, q, kv: TABLE[q * 32_768 + kv] > 0,
    "slopes": lambda b, h, q, kv: TABLE[h] * (q - kv) > 1e12,
    "chunks": lambda b, h, q, kv: q // 128 == kv // 128,
    "remainders": lambda b, h, q, kv: (q * 10_000 + kv) % 1000 * 1000 > 5,
    "bits": lambda b, h, q, kv: (q ^ kv) * 8 > (q & 255) << 4,
    "where": lambda b, h, q, kv: torch.where(q > kv, q, kv - 5) * 50_000 > 9,
    "clamped": lambda b, h, q, kv: (q - kv).clamp(-8, 8) * 100_000_000 > 0,
    "captures alone": lambda b, h, q, kv: STARTS[2] * 1_000_000 > kv,
    "64 bits": lambda b, h, q, kv: q.long() * 3_000_000_000 > kv,
    "floats": lambda b, h, q, kv: q.float() * 1e20 > kv,
}
WIDE = {
    "product": lambda b, h, q, kv: q * 100_000_000 > kv * 1000,
    "square": lambda b, h, q, kv: (q - kv) ** 2 * 4 > 0,
    "flat pairs of two batches": lambda b, h, q, kv: TABLE[b * 2**30 + q * 2**15 + kv] > 0,
    "sum": lambda b, h, q, kv: q + (2**31 - 1) > kv,
    "negated": lambda b, h, q, kv: -(q - (2**31 - 1) - 1) > kv,
    "shift": lambda b, h, q, kv: q << 20 > kv,
    "shift by an index": lambda b, h, q, kv: q << kv > 0,
    "captures": lambda b, h, q, kv: (q + STARTS[b]) * 100 > kv,
    "one side": lambda b, h, q, kv: (q >= kv) & (kv * 10_000_000 >= 0),
    "in a branch": lambda b, h, q, kv: torch.where(q > kv, q * 70_000, kv) > 9,
}


@pytest.mark.parametrize("name", [*NARROW, *WIDE])
def test_what_may_leave_32_bits(name):
    query = torch.zeros(1, 1, 1, 1)
    mod, captures = lift({**NARROW, **WIDE}[name], MASK_LANES, query)
    graph = lane_graph(mod, "mask_mod", query, captures)
    assert graph_may_leave_int32(graph, MASK_LANES, SIZES) == (name in WIDE)


def test_sizes_are_decided_alike_up_to_a_power_of_two():
    assert [rounded(size) for size in (0, 1, 2, 3, 4096, 4097)] == [1, 1, 2, 4, 4096, 8192]


def test_a_known_call_that_grows_is_decided_again():
    """`q * 2_000_000` leaves int32 from 1,075 queries on."""

    def score_mod(score, b, h, q, kv):
        return score + (q * 2_000_000 > kv) * 1.0

    for length in (600, 1000, 1100, 1200):
        inputs = [torch.randn(1, 1, length, 4) for _ in range(3)]
        torch.testing.assert_close(flex_attention(*inputs, score_mod), reference(*inputs, score_mod)[0])


def test_packed_sequences():
    sequences = Sequences.from_lengths([70, 130])
    query, key, value = (torch.randn(200, 1, 4) for _ in range(3))

    def far(b, h, q, kv):
        return q * 30_000_000 >= kv * 20_000_000

    out = varlen_attention(query, key, value, sequences, block_mask=sequences.mask(far))
    for start, stop in ((0, 70), (70, 200)):
        own = [t[start:stop].transpose(0, 1)[None] for t in (query, key, value)]
        mask = create_block_mask(far, None, None, stop - start, stop - start, "cpu", 16)
        torch.testing.assert_close(out[start:stop], reference(*own, None, mask)[0][0].transpose(0, 1))


def test_compiled_calls_follow_lengths_that_change_and_say_so():
    """One kernel while int32 holds what is computed, and one in int64 with a note. Short lengths count as 1,024."""

    def attend(query, key, value):
        return flex_attention(
            query, key, value, lambda score, b, h, q, kv: score + (q * 2_000_000 > kv) * 1.0
        )

    flex_inductor.decisions(clear=True)
    compiled = torch.compile(attend, backend="flex_inductor", fullgraph=True, dynamic=True)
    for length in (40, 90, 1100, 1200):
        inputs = [torch.randn(1, 1, length, 16) for _ in range(3)]
        torch.testing.assert_close(compiled(*inputs), attend(*inputs))
    notes = [d.notes for d in flex_inductor.decisions() if d.chosen == "cpu"]
    assert [len(note) for note in notes] == [0, 1] and "its indices are int64" in notes[1][0]


def test_a_warning_where_indices_stay_narrow(monkeypatch):
    """Once, on devices whose kernels compute as torch's do."""
    monkeypatch.setattr(flex_inductor.mod_ir.errors, "_warned_of_int32", set())
    with pytest.warns(
        UserWarning, match=r"mask_mod computes integers that may leave int32.* kv_idx.long\(\)"
    ) as seen:
        flex_inductor.mod_ir.errors.warn_of_int32("mask_mod")
        flex_inductor.mod_ir.errors.warn_of_int32("mask_mod")
    assert len(seen) == 1
