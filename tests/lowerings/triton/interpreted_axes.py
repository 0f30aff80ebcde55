"""Tensor descriptors, and values for every score, in Triton's interpreter. See test_interpreted.py."""

import pytest
import torch
from support import MASKS, MODS, Sizes, attention_of, dense_of, judge

from flex_inductor import RunSchedule, decisions
from flex_inductor.lowerings.triton.device import Device
from flex_inductor.tools import interpret

CASES = {
    "rows and columns beyond the end": (None, "none", Sizes(batch=1, head_dim=24, value_dim=40)),
    "one KV batch": ("alibi", "causal", Sizes(kv_batch=1, queries=40, keys=50)),
    "runs": (None, "prefix", Sizes(batch=1)),
}


@pytest.mark.parametrize("case", CASES)
def test_descriptors(case):
    mod, mask, sizes = CASES[case]
    build, captures = (MODS[mod].build, MODS[mod].captures(sizes)) if mod else (None, ())
    schedule = MASKS[mask](sizes)
    if case == "runs":
        schedule = RunSchedule.from_block_mask(schedule)
    attend = interpret.compiled(attention_of(build), options={"configs": {"forward": {"descriptors": 1}}})
    decisions(clear=True)
    judge(attend, dense_of(build), sizes.inputs(torch.float32), captures, schedule)
    ((made,), _) = (decision.kernels for decision in decisions()[:2])
    assert made.config["descriptors"] == 1 and made.why == "asked for"


@pytest.mark.parametrize(
    "configs, coalesced",
    [({}, 0), ({"backward_dq": {"coalesced": 1}}, 1)],
    ids=["in place", "through shared memory"],
)
def test_values_for_every_score(configs, coalesced, monkeypatch):
    """The kernels for NVIDIA's cards, with plain twins in place of assembly."""
    monkeypatch.setattr(Device, "nvidia", property(lambda self: True))
    load, found = interpret._load, []

    def noting(name, source):
        kernel = load(name, source)
        found.extend(kernel.config[name] for name in ("COALESCED",) if name in kernel.config)
        return kernel

    monkeypatch.setattr(interpret, "_load", noting)
    sizes, mod = Sizes(batch=1, heads=2, kv_heads=1), MODS["relative_bias"]
    attend = interpret.compiled(attention_of(mod.build), options={"configs": configs})
    judge(
        attend,
        dense_of(mod.build),
        sizes.inputs(torch.float32),
        mod.captures(sizes),
        MASKS["sliding_window"](sizes),
    )
    assert found == [coalesced]
