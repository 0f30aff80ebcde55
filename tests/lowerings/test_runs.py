"""A RunSchedule gives what the block lists of the same tiles give: eager, and on the routes for CPUs.

Triton's kernels are compared in triton/interpreted_runs.py.
"""

from __future__ import annotations

import functools

import pytest
import torch

import flex_inductor
from flex_inductor import RunSchedule, create_block_mask, flex_attention
from flex_inductor.lowerings.registry import ROUTES
from flex_inductor.op.eager import tiles
from tests.support import (
    MASKS,
    MODS,
    Result,
    Sizes,
    assert_within,
    attention_of,
    bounded,
    dense_of,
    judge,
    run,
)

SIZES = Sizes()
BIASED, CAPTURES = MODS["relative_bias"].build, MODS["relative_bias"].captures(SIZES)


def forward_only(attend, inputs, captures, block_mask) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return dict(zip(Result._fields, attend(*inputs, captures, block_mask), strict=False))


def both_ways(attend, inputs, captures, block_mask) -> dict[str, torch.Tensor]:
    return run(attend, inputs, captures, block_mask).named()


def assert_equal(runs: dict[str, torch.Tensor], lists: dict[str, torch.Tensor]) -> None:
    assert runs.keys() == lists.keys()
    for name, expected in lists.items():
        assert torch.equal(runs[name], expected), name


@functools.cache
def both_forms(mask: str):
    lists = MASKS[mask](SIZES)
    return lists, RunSchedule.from_block_mask(lists)


@pytest.mark.parametrize("mask", [name for name in MASKS if name != "none"])
def test_eager(mask, monkeypatch):
    for limit, value in (("MAX_CHUNK_KEYS", 48), ("MAX_CHUNK_QUERIES", 40), ("CHUNK_ELEMENTS", 5000)):
        monkeypatch.setattr(tiles, limit, value)  # several tiles, none of the size of a block
    lists, runs = both_forms(mask)
    inputs = SIZES.inputs(torch.float32)
    found = judge(attention_of(BIASED), dense_of(BIASED), inputs, CAPTURES, runs)
    captures = [c.float() for c in CAPTURES]
    assert_equal(found.named(), both_ways(attention_of(BIASED), inputs, captures, lists))


@pytest.mark.parametrize(
    "mask, results",
    [
        ("per_head", both_ways),
        ("per_head", forward_only),
        *(
            pytest.param(mask, results, marks=pytest.mark.slow)
            for mask in ("document", "per_batch")
            for results in (both_ways, forward_only)
        ),
    ],
)
@pytest.mark.parametrize("route", [route.name for route in ROUTES if route.name != "triton"])
def test_routes(route, mask, results):
    inputs = SIZES.inputs(torch.float32)
    captures = [c.float() for c in CAPTURES]
    attend = torch.compile(
        attention_of(BIASED), backend="flex_inductor", fullgraph=True, options={"route": route}
    )
    torch._dynamo.reset()
    lists, runs = both_forms(mask)
    found = results(attend, inputs, captures, runs)
    if route == "chunked":
        assert_equal(found, results(attend, inputs, captures, lists))
    if results is both_ways:
        judge(attend, dense_of(BIASED), inputs, captures, runs)
    else:
        wide = [t.double() for t in inputs]
        dense = lambda captures, _: results(dense_of(BIASED), wide, captures, lists)  # noqa: E731
        assert_within(found, *bounded(torch.float32, captures, dense))


def test_decision_names_the_form():
    torch._dynamo.reset()
    flex_inductor.decisions(clear=True)
    compiled = torch.compile(flex_attention, backend="flex_inductor", fullgraph=True)
    compiled(
        *(t.detach() for t in SIZES.inputs(torch.float32)),
        block_mask=both_forms("document")[1],
        enable_gqa=True,
    )
    assert flex_inductor.decisions(clear=True)[-1].call.endswith("blocks 32x32 in runs")


def documents(width: int, length: int = 192, in_order: bool = False) -> RunSchedule:
    """Two that take turns: those that follow each other are bounds."""
    ids = torch.arange(length) // width % (length if in_order else 2)
    return create_block_mask(
        lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv),
        None,
        None,
        length,
        length,
        "cpu",
        16,
        compact=True,
    )


class Model(torch.nn.Module):
    def __init__(self, schedule: RunSchedule):
        super().__init__()
        self.schedule = schedule

    def forward(self, q, k, v, schedule):
        return flex_attention(q, k, v, block_mask=self.schedule)


def in_closure(schedule):
    return lambda q, k, v, _: flex_attention(q, k, v, block_mask=schedule)


def as_argument(schedule):
    return lambda q, k, v, given: flex_attention(q, k, v, block_mask=given)


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("holder", [as_argument, in_closure, Model])
def test_a_schedule_comes_into_a_full_graph(holder, in_order):
    torch._dynamo.reset()
    schedule = documents(70, in_order=in_order)
    q, k, v = (torch.randn(1, 2, 192, 8) for _ in range(3))
    compiled = torch.compile(
        holder(schedule), backend="flex_inductor", fullgraph=True, options={"route": "chunked"}
    )
    flex_inductor.decisions(clear=True)
    torch.testing.assert_close(compiled(q, k, v, schedule), flex_attention(q, k, v, block_mask=schedule))
    form = "bounds" if in_order else "runs"
    assert flex_inductor.decisions(clear=True)[-1].call.endswith(f"blocks 16x16 in {form}")


@pytest.mark.parametrize("dynamic, route", [(None, "chunked"), (True, "cpu")], ids=["automatic", "dynamic"])
def test_other_runs_do_not_compile_again(dynamic, route):
    torch._dynamo.reset()
    graphs = []

    def backend(module, inputs, **kwargs):
        graphs.append(module)
        return flex_inductor.backend.flex_inductor(module, inputs, **kwargs)

    options = {"route": route}
    compiled = torch.compile(
        as_argument(None), backend=backend, fullgraph=True, dynamic=dynamic, options=options
    )
    counts = []
    for width, length in ((40, 192), (50, 192), (70, 208), (43, 240), (100, 400), (64, 192)):
        schedule = documents(width, length)
        q, k, v = (torch.randn(1, 2, length, 8) for _ in range(3))
        expected = flex_attention(q, k, v, block_mask=schedule.to_block_mask())
        torch.testing.assert_close(compiled(q, k, v, schedule), expected)
        counts.append(len(graphs))
    assert counts[-1] == counts[2], counts


def test_created_within_the_compiled_function():
    torch._dynamo.reset()

    def attend(q, k, v, ids):
        schedule = create_block_mask(
            lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx],
            None,
            None,
            192,
            192,
            "cpu",
            16,
            compact=True,
        )
        return flex_attention(q, k, v, block_mask=schedule)

    compiled = torch.compile(attend, backend="flex_inductor")
    q, k, v = (torch.randn(1, 2, 192, 8) for _ in range(3))
    for width in (70, 30):
        ids = torch.arange(192) // width % 3
        torch.testing.assert_close(compiled(q, k, v, ids), attend(q, k, v, ids))


def test_wrong_length_is_refused_as_for_lists():
    with pytest.raises(ValueError, match="block_mask was made for Q_LEN=192"):
        flex_attention(*(torch.randn(1, 2, 100, 8) for _ in range(3)), block_mask=documents(70))
