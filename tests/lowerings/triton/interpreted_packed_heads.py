"""Query heads packed into one tile, by Triton's interpreter. See test_interpreted.py."""

import pytest
import torch
from marks import slow_but
from support import MASKS, MODS, Sizes, attention_of, dense_of, judge, served_by

from flex_inductor import RunSchedule, decisions
from flex_inductor.tools import interpret

GROUP = Sizes(batch=1, heads=8, kv_heads=1, queries=16, keys=70)
CASES = {  # score_mod, sizes, mask, dtype, rows of a tile
    "all rows in use": ("position_bias", GROUP, "document", torch.float32, 128),
    "odd queries": ("alibi", GROUP._replace(queries=13), "causal", torch.float16, 128),
    "few keys": ("softcap", GROUP._replace(kv_heads=2, queries=3, keys=20), "sliding_window", torch.float16, 16),
    "a schedule for each head": ("alibi", GROUP._replace(heads=2, queries=9), "per_head", torch.float32, 16),
    "one KV batch": ("alibi", GROUP._replace(batch=2, kv_batch=1, queries=2), "per_batch", torch.float32, 16),
    "wide heads": ("alibi", GROUP._replace(heads=4, queries=5, head_dim=130), "causal", torch.float32, 32),
}  # fmt: skip
QUICK = [("all rows in use", "lists"), ("a schedule for each head", "lists"), ("odd queries", "runs")]


@pytest.mark.parametrize(
    "call", slow_but([*((case, "lists") for case in CASES), ("odd queries", "runs")], *QUICK), ids=str
)
def test_as_right_as_dense_attention(call, kinds):
    case, form = call
    mod, sizes, mask, dtype, rows = CASES[case]
    captures, schedule = MODS[mod].captures(sizes), MASKS[mask](sizes)
    if form == "runs":
        schedule = RunSchedule.from_block_mask(schedule)
    with served_by("triton", "triton"):
        attend = interpret.compiled(attention_of(MODS[mod].build), dynamic=False)
        judge(attend, dense_of(MODS[mod].build), sizes.inputs(dtype), captures, schedule)
    assert kinds[0] == "decode" and "combine" not in kinds
    assert decisions()[0].kernels[0].config["block_m"] == rows
