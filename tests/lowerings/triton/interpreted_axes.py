"""Tensor descriptors, persistent instances and specialized warps, in Triton's interpreter. See test_interpreted.py."""

import dataclasses

import pytest
import torch
from marks import slow_but
from support import MASKS, MODS, Sizes, attention_of, dense_of, judge
from torch._inductor.utils import run_and_get_code

from flex_inductor import RunSchedule, create_block_mask, decisions
from flex_inductor.lowerings.triton import persistent
from flex_inductor.lowerings.triton.configs import Device
from flex_inductor.tools import interpret

BOTH = {"descriptors": 1, "persistent": 1}
CASES = {
    "rows and columns beyond the end": (BOTH, None, "none", Sizes(batch=1, head_dim=24, value_dim=40)),
    "one head at a time": (BOTH, "relative_bias", "sliding_window", Sizes(heads=2, kv_heads=1)),
    "by head": ({"persistent": 1}, "bucketed_bias", "per_head", Sizes(batch=1)),
    "one KV batch": (BOTH, "alibi", "causal", Sizes(kv_batch=1, queries=40, keys=50)),
    "queries too": (BOTH | {"held": 1}, "alibi", "causal", Sizes(batch=1, head_dim=24)),
    "some warps load": ({"descriptors": 1, "specialized": 1}, "alibi", "causal", Sizes(batch=1)),
}


def options(axes):
    described = {axis: axes.get(axis, 0) for axis in ("descriptors", "specialized")}
    return {"configs": {"forward": axes, "backward_dq": described, "backward_dkdv": described}}


def check(kinds, axes):
    assert kinds == ["forward", "backward_dq", "backward_dkdv"]
    *_, made = [
        kernel for decision in decisions() for kernel in decision.kernels if kernel.kernel == "forward"
    ]
    assert axes.items() <= made.config.items() and made.why == "asked for"


@pytest.mark.parametrize("case", CASES)
def test_as_right_as_dense_attention(case, kinds, monkeypatch):
    axes, mod, mask, sizes = CASES[case]
    if case == "one head at a time":
        monkeypatch.setattr(persistent, "CACHED_BYTES", 1)
    build, captures = (MODS[mod].build, MODS[mod].captures(sizes)) if mod else (None, ())
    attend = interpret.compiled(attention_of(build), options=options(axes))
    judge(attend, dense_of(build), sizes.inputs(torch.float32), captures, MASKS[mask](sizes))
    check(kinds, axes)


@pytest.fixture
def orders(monkeypatch):
    """In which order kernels are told to take rows."""
    run, found = interpret._Interpreted.run, []

    def noting(self, *args, **kwargs):
        names = self.kernel.fn.arg_names
        found.extend(args[i].clone() for i, name in enumerate(names) if name == "order")
        run(self, *args, **kwargs)

    monkeypatch.setattr(interpret._Interpreted, "run", noting)
    return found


def middle(b, h, q_idx, kv_idx):
    """The rows in the middle have most to do, others in the second head."""
    return ((q_idx - 90 - 50 * h).abs() < 40) | (kv_idx < 20 + q_idx // 8)


def two_heads(form):
    """A schedule whose rows visit different numbers of blocks, and how many each visits."""
    schedule = create_block_mask(middle, None, 2, 200, 230, "cpu", BLOCK_SIZE=32)
    visited = schedule.kv_num_blocks + schedule.full_kv_num_blocks
    return RunSchedule.from_block_mask(schedule) if form == "runs" else schedule, visited


def heaviest_first(order, visited):
    assert torch.equal(order.sort(-1).values, torch.arange(7, dtype=torch.int32).expand(1, 2, 7))
    sequence = visited.gather(2, order.long())
    assert (sequence[..., :-1] >= sequence[..., 1:]).all() and not torch.equal(sequence, visited.flip(2))


@pytest.mark.parametrize("form", slow_but(["lists", "runs"], "runs"))
def test_rows_that_visit_most_come_first(form, orders):
    schedule, visited = two_heads(form)
    sizes = Sizes(batch=1, heads=2, queries=200, keys=230)
    attend = interpret.compiled(attention_of(None), options=options({"persistent": 1}))
    judge(attend, dense_of(None), sizes.inputs(torch.float16), (), schedule)
    (order,) = orders
    heaviest_first(order, visited)


@pytest.mark.parametrize("form", slow_but(["lists", "runs"], "lists"))
@pytest.mark.parametrize("winner", [0, 1], ids=["plain", "persistent"])
def test_rows_are_sorted_only_for_a_config_that_asks(winner, form, orders, monkeypatch):
    """Of all that max-autotune leaves to be timed, the interpreter takes the first: here the first that is plain, or
    has persistent instances."""
    make = interpret._Interpreted.__init__

    def making(self, kernel):
        found = sorted(kernel.configs, key=lambda config: config.get("PERSISTENT") != winner)
        make(self, dataclasses.replace(kernel, given={**kernel.given, "configs": found}))

    monkeypatch.setattr(interpret._Interpreted, "__init__", making)
    schedule, visited = two_heads(form)
    attend = interpret.compiled(attention_of(None), options={"max_autotune": True})
    inputs = Sizes(batch=1, heads=2, queries=200, keys=230).inputs(torch.float16)
    _, (code, *_) = run_and_get_code(judge, attend, dense_of(None), inputs, (), schedule)
    assert code.count(".run(") == 1 and "sort" not in code.replace("fill_if_used", "")
    (order,) = orders
    if winner:
        heaviest_first(order, visited)
    else:
        assert (order == torch.iinfo(torch.int32).max).all()  # as it was allocated


@pytest.mark.parametrize("axes", [BOTH, {"descriptors": 1, "specialized": 1}])
def test_over_runs(axes, kinds):
    sizes = Sizes(batch=1)
    runs = RunSchedule.from_block_mask(MASKS["prefix"](sizes))
    attend = interpret.compiled(attention_of(None), options=options(axes))
    judge(attend, dense_of(None), sizes.inputs(torch.float16), (), runs)
    check(kinds, axes)


@pytest.mark.parametrize(
    "configs, coalesced",
    [({}, 0), ({"backward_dq": {"staged": 1, "coalesced": 1}}, 1), ({"backward_onepass": {}}, 0)],
    ids=["in place", "through shared memory", "one pass"],
)
def test_values_for_every_score(configs, coalesced, monkeypatch):
    """The kernels for NVIDIA's cards, with plain twins in place of assembly."""
    monkeypatch.setattr(Device, "nvidia", property(lambda self: True))
    make, found = interpret._Interpreted.__init__, []

    def noting(self, kernel):
        make(self, kernel)
        found.extend(self.config[name] for name in ("COALESCED",) if name in self.config)

    monkeypatch.setattr(interpret._Interpreted, "__init__", noting)
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
