"""The backward in one pass, in Triton's interpreter. See test_interpreted.py."""

import pytest
import torch
from support import MASKS, MODS, Sizes, attention_of, dense_of, judge

from flex_inductor import RunSchedule, decisions, flex_attention
from flex_inductor.lowerings.triton import backward
from flex_inductor.tools import interpret

OPTIONS = {"configs": {"backward_onepass": {}}}
BY_DESCRIPTORS = {"configs": {"backward_onepass": {"descriptors": 1}}}
CASES = {
    "plain": ("plain", "none", Sizes(batch=1, queries=40, keys=50)),
    "lane": ("relative_bias", "sliding_window", Sizes(batch=1)),
    "lane, by head": ("bucketed_bias", "per_head", Sizes(batch=1)),
    "row and column": ("position_bias", "per_batch", Sizes(queries=40)),
    "once and column": ("learned_temperature", "document", Sizes(queries=40, keys=50)),
    "one KV batch": ("alibi", "causal", Sizes(queries=40, keys=50, kv_batch=1)),
}
QUICK = ("lane", "row and column", "once and column")


@pytest.mark.parametrize(
    "case, group",
    [
        pytest.param(case, group, marks=() if case in QUICK else pytest.mark.slow)
        for case, group in [
            *((case, i % 2 == 0) for i, case in enumerate(CASES)),
            ("plain", False),
            ("row and column", True),
        ]
    ],
)
def test_as_right_as_dense_attention(case, group, kinds, monkeypatch):
    """An instance for each head, or one for a group of them."""
    monkeypatch.setattr(backward, "ENOUGH_INSTANCES", 1 if group else 1 << 30)
    mod, mask, sizes = CASES[case]
    build, captures, mask = MODS[mod].build, MODS[mod].captures(sizes), MASKS[mask](sizes)
    attend = interpret.compiled(attention_of(build), options=OPTIONS)
    judge(attend, dense_of(build), sizes.inputs(torch.float32), captures, mask)
    assert kinds == ["forward", "backward_onepass"]


@pytest.mark.parametrize("options", [OPTIONS, BY_DESCRIPTORS], ids=["by lanes", "by descriptors"])
def test_over_runs(options, kinds):
    sizes = Sizes(batch=1, head_dim=24)
    runs = RunSchedule.from_block_mask(MASKS["prefix"](sizes))
    attend = interpret.compiled(attention_of(None), options=options)
    judge(attend, dense_of(None), sizes.inputs(torch.float16), (), runs)
    assert kinds == ["forward", "backward_onepass"]


def test_two_passes_where_keys_need_no_gradient(kinds):
    q, k, v = Sizes(batch=1, queries=20, keys=20).inputs(torch.float32)
    q.requires_grad_()
    out = interpret.compiled(flex_attention, options=OPTIONS)(q, k, v, enable_gqa=True)
    (got,) = torch.autograd.grad(out.sum(), q)
    (want,) = torch.autograd.grad(flex_attention(q, k, v, enable_gqa=True).sum(), q)
    torch.testing.assert_close(got, want)
    assert kinds == ["forward", "backward_dq"]
    assert decisions()[-1].kernels[0].kernel == "backward_dq"
