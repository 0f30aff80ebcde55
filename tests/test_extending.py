"""What docs/extending.md tells people to write works."""

import re
from pathlib import Path

import pytest
import torch

from flex_inductor import create_block_mask, flex_attention
from flex_inductor.lowerings import registry
from flex_inductor.masks.analysis import interval_rules
from flex_inductor.masks.analysis.rectangles import MaskBounds
from flex_inductor.op import Inputs, attention
from flex_inductor.options import call_options
from flex_inductor.visits import protocol
from tests.support import Sizes, attention_of, dense_of, judge, served_by

PAGE = (Path(__file__).parents[1] / "docs/extending.md").read_text()


def written(name):
    """What the block of that name defines."""
    (code,) = re.findall(rf"```python {name}\n(.*?)```", PAGE, flags=re.DOTALL)
    names = {}
    exec(compile(code, "docs/extending.md", "exec"), names)
    return names


def test_a_route(monkeypatch):
    route = written("route")["OneKeyRoute"]()
    monkeypatch.setattr(registry, "ROUTES", (route, *registry.ROUTES))
    torch._dynamo.reset()
    sizes = Sizes(kv_heads=4, keys=1)
    query, key, value = sizes.inputs(torch.float32)
    with torch.no_grad():
        attend = torch.compile(attention_of(None), backend="flex_inductor", options={"route": "one_key"})
        got, want = (f(query, key, value, (), None) for f in (attend, dense_of(None)))
    for ours, dense in zip(got, want, strict=True):
        torch.testing.assert_close(ours, dense)
    attend = torch.compile(attention_of(None), backend="flex_inductor")
    judge(attend, dense_of(None), (query, key, value))  # its backward goes to another route
    with pytest.raises(Exception, match="one_key: more than one key, grouped heads, or a score_mod"):
        torch.compile(flex_attention, backend="flex_inductor", options={"route": "one_key"})(
            query, query, query
        )


def test_a_rule_for_masks(monkeypatch):
    monkeypatch.setattr(interval_rules, "RULES", dict(interval_rules.RULES))

    def near(b, h, q_idx, kv_idx):
        return torch.log1p((q_idx - kv_idx).abs().float()) < 5

    def undecided():
        found, over = [], MaskBounds.over

        def counting(self, rectangles, look_up=False):
            always, possible = over(self, rectangles, look_up)
            found.append(int((possible & ~always).sum()))
            return always, possible

        monkeypatch.setattr(MaskBounds, "over", counting)
        mask = create_block_mask(near, None, None, 2048, 2048, "cpu", BLOCK_SIZE=64)
        monkeypatch.setattr(MaskBounds, "over", over)
        return mask, sum(found)

    before, many = undecided()
    written("mask rule")
    after, few = undecided()
    assert few < many / 3
    for left, right in zip(before.as_tuple()[:-1], after.as_tuple()[:-1], strict=True):
        assert torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right


def test_a_kind_of_schedule(monkeypatch):
    monkeypatch.setitem(protocol.KINDS, "every second", None)  # taken away afterwards
    schedule = written("schedule")["EverySecond"](16, 8, 1)
    query, key, value = Sizes(queries=40, keys=60).inputs(torch.float64)

    def attend(query, key, value, captures, mask):
        options = call_options(None, lse=True, max_scores=True)
        return attention(query, key, value, None, None, 0.25, Inputs(schedule=schedule), options)

    mask = create_block_mask(
        lambda b, h, q_idx, kv_idx: kv_idx // 8 % 2 == 1, None, None, 40, 60, "cpu", (16, 8)
    )
    judge(attend, dense_of(None, scale=0.25), (query, key, value), (), mask)
    inputs = [tensor.float() for tensor in (query, key, value)]
    with served_by("chunked"):
        judge(torch.compile(attend, backend="flex_inductor"), dense_of(None, scale=0.25), inputs, (), mask)


def test_the_diffs_apply():
    """Each line that a diff takes away is there to be taken away."""
    for path, diff in re.findall(r"```diff\n--- a/(\S+)\n(.*?)```", PAGE, flags=re.DOTALL):
        source = (Path(__file__).parents[1] / path).read_text()
        for line in re.findall(r"^[- ](.+)$", diff, flags=re.MULTILINE):
            assert f"{line}\n" in source, (path, line)
