"""Generated Triton kernels that walk runs, against the same kernels over block lists. See test_interpreted.py."""

import pytest
import torch
from marks import slow_but
from support import MASKS, MODS, Sizes, attention_of, dense_of, judge, run

from flex_inductor import RunSchedule, create_block_mask, decisions, flex_attention
from flex_inductor.tools import interpret

MOD = MODS["relative_bias"]


def nothing_for_the_first_rows(sizes):
    """Whole rows and columns of blocks visit nothing; the last rows have two runs."""
    return create_block_mask(
        lambda b, h, q, kv: (q >= 20) & (kv < 80) & ((kv < 20) | (kv > q - 16)),
        None,
        None,
        sizes.queries,
        sizes.keys,
        "cpu",
        16,
    )


CASES = {
    "one run a row": (Sizes(batch=1, heads=2, kv_heads=1), MASKS["document"]),
    "for each batch": (Sizes(heads=2, kv_heads=1), MASKS["per_batch"]),
    "for each head": (Sizes(batch=1), MASKS["per_head"]),
    "empty rows": (Sizes(batch=1, heads=2, kv_heads=1), nothing_for_the_first_rows),
    "no mask_mod": (Sizes(batch=1, heads=2, kv_heads=1, queries=64, keys=128), MASKS["blocks_only"]),
    "few queries": (Sizes(heads=2, kv_heads=1, queries=3, keys=300), MASKS["per_batch"]),
    "few queries, several runs": (
        Sizes(batch=1, heads=2, queries=20, keys=500),
        lambda s: create_block_mask(
            lambda b, h, q, kv: (kv % 200 < q + 30) & (kv > 200 * h), None, s.heads, s.queries, s.keys, "cpu", 32
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", slow_but(CASES, "empty rows", "few queries, several runs"))
def test_runs_give_what_lists_give(case, kinds):
    sizes, mask = CASES[case][0], CASES[case][1](CASES[case][0])
    runs = RunSchedule.from_block_mask(mask)
    attend = interpret.compiled(attention_of(MOD.build), dynamic=False)
    decisions(clear=True)
    inputs, captures = sizes.inputs(torch.float32), MOD.captures(sizes)
    found = judge(attend, dense_of(MOD.build), inputs, captures, runs).named()
    assert [(d.chosen, d.call.endswith(" in runs")) for d in decisions()] == [("triton", True)] * 2
    assert ("decode" in kinds) == case.startswith("few queries")
    if "no mask_mod" not in case:  # its lists are not in order
        for name, expected in run(attend, inputs, [c.float() for c in captures], mask).named().items():
            assert torch.equal(found[name], expected), name


def test_other_runs_do_not_compile_again():
    attend = interpret.compiled(lambda q, k, v, schedule: flex_attention(q, k, v, block_mask=schedule))
    counts = []
    decisions(clear=True)
    for width, length in ((40, 100), (30, 100), (50, 120), (35, 80)):
        ids = torch.arange(length) // width % 2  # which is no window
        mask = create_block_mask(
            lambda b, h, q, kv, ids=ids: ids[q] == ids[kv], None, None, length, length, "cpu", 16, compact=True
        )  # fmt: skip
        q, k, v = (torch.randn(1, 2, length, 16) for _ in range(3))
        torch.testing.assert_close(attend(q, k, v, mask), flex_attention(q, k, v, block_mask=mask))
        counts.append(len(decisions()))
    assert counts[-1] == counts[2] and {d.chosen for d in decisions()} == {"triton"}
