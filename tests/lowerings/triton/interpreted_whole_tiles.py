"""Tiles that mask_mod chooses whole, inside of larger blocks, in Triton's interpreter. See test_interpreted.py."""

import pytest
import torch
from support import MODS, Sizes, attention_of, dense_of, judge

from flex_inductor import RunSchedule, create_block_mask
from flex_inductor.lowerings.triton.kernel import KernelCall
from flex_inductor.tools import interpret

SIZES = Sizes(batch=1, heads=2, kv_heads=1, queries=140, keys=150, head_dim=16, value_dim=16)
WIDTH = torch.tensor(70)
ENDS = torch.tensor([90, 1 << 62])
STARTS = torch.tensor([33, 64])
MASKS = {
    "causal": lambda b, h, q, k: q >= k,
    "window": lambda b, h, q, k: (q >= k) & (q - k <= 100),
    "captured window": lambda b, h, q, k: ~(q < k) & (q - k < WIDTH),
    "prefix of a batch": lambda b, h, q, k: (k < ENDS[b]) | (q >= k),
    "a start for each head": lambda b, h, q, k: k + 1 > STARTS[h],
    "chunks": lambda b, h, q, k: (q // 48 >= k // 48) & (k % 5 < 6),
    "band": lambda b, h, q, k: (q - k).abs() < 80,
    "corner": lambda b, h, q, k: torch.minimum(q, k + 3) >= 20,
}
QUICK = ("captured window", "prefix of a batch", "a start for each head", "chunks", "corner")


@pytest.fixture
def sources(monkeypatch):
    """The source of every kernel that is generated."""
    render, found = KernelCall._define, []

    def noting(call, *args):
        found.append(call.render("kernel", ""))
        return render(call, *args)

    monkeypatch.setattr(KernelCall, "_define", noting)
    return found


@pytest.mark.parametrize(
    "mask, mod, form, dynamic",
    [
        *(
            pytest.param(mask, None, "lists", False, marks=() if mask in QUICK else pytest.mark.slow)
            for mask in MASKS
        ),
        pytest.param("window", None, "runs", True, marks=pytest.mark.slow),
        ("window", "alibi", "lists", True),
        pytest.param("chunks", "relative_bias", "runs", False, marks=pytest.mark.slow),
    ],
)
def test_as_right_as_dense_attention(mask, mod, form, dynamic, sources):
    batches, heads = 2 if "batch" in mask else None, 2 if "head" in mask else None
    schedule = create_block_mask(
        MASKS[mask], batches, heads, SIZES.queries, SIZES.keys, "cpu", BLOCK_SIZE=128
    )
    if form == "runs":
        schedule = RunSchedule.from_block_mask(schedule)
    sizes = SIZES._replace(batch=batches or 1, heads=heads or 1)
    build, captures = (MODS[mod].build, MODS[mod].captures(sizes)) if mod else (None, ())
    attend = interpret.compiled(attention_of(build), dynamic=dynamic)
    judge(attend, dense_of(build), sizes.inputs(torch.float32), captures, schedule)
    known = ["    whole = (" in source for source in sources]
    assert known == [mask != "chunks", *[mask != "chunks" and not mod] * 2]
