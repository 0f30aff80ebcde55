"""The model: methods one rank and one step at a time, what is really exchanged, and the scaling it promises."""

import functools
import re

import pytest
import torch

from flex_inductor import FlexError, create_block_mask, masks
from flex_inductor.distributed.balance import best, owners
from flex_inductor.distributed.cost import (
    METHODS,
    CostModel,
    MethodChoice,
    amount,
    choose_method,
    estimate,
    groups,
    log_normal_documents,
    refusal,
)
from flex_inductor.distributed.layout import Layout
from flex_inductor.distributed.methods import Groups, plan_mask
from flex_inductor.distributed.work import TileWork

from . import dense

# A second for each tile of scores and, for sent bytes, each byte: counts can be read from the times.
COUNTS = CostModel(heads=4, kv_heads=2, head_dim=8, flops=2 * 16 * 4 * 128**2, bandwidth=1.0)
TILE_BYTES = 16 * 2 * 128 * 2


MASKS = {
    "causal": masks.causal(),
    "window": masks.sliding_window(300),
    "documents": masks.document(lengths=[700, 1100, 200, 1072]),
}


def planned(name, ranks=4):
    work = TileWork.of(MASKS[name], 128 * 24)
    return work, dense.tiles_read(MASKS[name], work.length, 128), owners("head_tail", work, ranks)


@pytest.mark.parametrize("name", ["causal", "window", "documents"])
def test_cast_and_all_gather(name):
    work, read, owner = planned(name)
    computed, every, received, sent = dense.loads(read, owner, 4)
    cast = estimate(work, owner, 4, "cast", COUNTS)
    most = max(map(max, zip(received, sent, strict=True)))
    assert cast.forward.compute == pytest.approx(max(computed))
    assert cast.forward.perfect == pytest.approx(sum(computed) / 4)
    assert cast.forward.bytes == cast.forward.exchange == most * TILE_BYTES
    assert cast.backward.bytes == 2 * cast.forward.bytes  # fp32
    assert cast.backward.compute == pytest.approx(2.5 * cast.forward.compute)
    assert cast.memory == max(every) * 3 * TILE_BYTES
    times = [(c, max(r, s) * TILE_BYTES) for c, r, s in zip(computed, received, sent, strict=True)]
    assert cast.forward.hidden == pytest.approx(max(max(pair) for pair in times))
    assert cast.forward.exposed == pytest.approx(max(sum(pair) for pair in times))
    gathered = estimate(work, owner, 4, "all_gather", COUNTS)
    assert gathered.forward.bytes == 18 * TILE_BYTES and gathered.memory == 24 * 3 * TILE_BYTES
    assert gathered.forward.compute == cast.forward.compute


@pytest.mark.parametrize("name", ["causal", "window", "documents"])
def test_a_ring_step_by_step(name):
    work, read, owner = planned(name)
    computed, needed = dense.between(read, owner, 4)
    blocks = [owner.count(rank) * TILE_BYTES for rank in range(4)]
    far = [
        max(step for step in range(4) if step == 0 or needed[(rank + step) % 4, rank]) for rank in range(4)
    ]
    hidden, moved, steps = 0.0, [0] * 4, []
    for step in range(4):
        compute = max(float(computed[rank, (rank - step) % 4]) for rank in range(4))
        coming = [blocks[(r - step) % 4] if step and far[(r - step) % 4] >= step else 0 for r in range(4)]
        steps.append((compute, max(coming)))
        moved = [m + c for m, c in zip(moved, coming, strict=True)]
    for step, (compute, _) in enumerate(steps):
        hidden += max(compute, steps[step + 1][1] if step < 3 else 0)
    ring = estimate(work, owner, 4, "ring", COUNTS)
    assert ring.forward.hidden == pytest.approx(hidden)
    assert ring.forward.exposed == pytest.approx(sum(map(sum, steps)))
    assert ring.forward.bytes == max(moved)
    # Backward the gradients travel along, twice as large, and go home from the last rank.
    assert ring.backward.bytes == max(
        3 * m + 2 * b * (f > 0) for m, b, f in zip(moved, blocks, far, strict=True)
    )
    assert ring.memory == 2 * max(blocks) * 3


def test_a_block_travels_no_further_than_it_is_read():
    work = TileWork.of(masks.sliding_window(300), 128 * 64)
    owner = owners("contiguous", work, 16)
    ring, gathered = (estimate(work, owner, 16, method, COUNTS) for method in ("ring", "all_gather"))
    assert ring.forward.bytes == 4 * TILE_BYTES and gathered.forward.bytes == 60 * TILE_BYTES


def test_ulysses():
    """4 ranks, a head of queries each, two heads of keys and values repeated twice."""
    work, read, owner = planned("causal")
    made = estimate(work, owner, 4, "ulysses", COUNTS)
    tokens = 128 * 24 / 4 * 3 / 4
    query, keys, out = 4 * 8 * 2, 4 * 16 * 2, 4 * 8 * 2
    assert made.forward.bytes == tokens * (query + keys + out)
    assert made.backward.bytes == made.forward.bytes
    assert made.imbalance == 1 and made.forward.compute == pytest.approx(float(read.sum()) / 4)


def test_ring_ulysses_is_a_ring_of_nodes():
    work, _, _ = planned("causal")
    model = CostModel(heads=4, kv_heads=2, head_dim=8)
    assert groups("ring_ulysses", 12, model) == 3 and groups("ring", 12, model) == 12
    owner = owners("head_tail", work, 3)
    both, ring = (estimate(work, owner, n, m, model) for n, m in ((12, "ring_ulysses"), (3, "ring")))
    assert both.forward.perfect == pytest.approx(ring.forward.perfect / 4)
    assert both.forward.compute == pytest.approx(ring.forward.compute / 4)
    assert both.imbalance == pytest.approx(ring.imbalance)


@pytest.mark.parametrize("name", ["causal", "window", "documents"])
@pytest.mark.parametrize("method", ["cast", "all_gather", "ring", "ulysses"])
def test_bytes_are_those_that_run(name, method):
    """Of the busiest rank, byte for byte: planned masks say what a call of theirs sends."""
    work, _, owner = planned(name)
    mask = create_block_mask(MASKS[name], None, None, work.length, work.length, "cpu", compact=True)
    layout = Layout(work.length, 128, 4, owner)
    sent = []
    for rank in range(4):
        length = layout.lengths[rank]
        query, key = (torch.empty(1, heads, length, 8, dtype=torch.bfloat16) for heads in (4, 2))
        sent.append(plan_mask(method, mask, layout, rank, Groups("nobody")).bytes_sent(query, key, key))
    forward, backward = map(max, zip(*sent, strict=True))
    if method == "cast":  # what goes one way forward comes back twice as large
        forward, backward = max(forward, backward // 2), max(2 * forward, backward)
    made = estimate(work, owner, 4, method, COUNTS)
    assert (made.forward.bytes, made.backward.bytes) == (forward, backward)


def test_rates_and_sizes():
    model = CostModel()
    assert model.seconds_of_tile(128) == 4 * 128 * 128 * 128**2 / 550e12
    assert model.seconds_of_tile(128, backward=True) == pytest.approx(2.5 * model.seconds_of_tile(128))
    assert model.bytes_of_tile(128) == 2 * 128 * 8 * 128 * 2
    assert model.gradient_bytes_of_tile(128) == 2 * model.bytes_of_tile(128)
    narrow = CostModel(head_dim=192, value_dim=128)
    assert narrow.bytes_of_tile(1) == 320 * 8 * 2
    assert narrow.seconds_of_tile(1, backward=True) == 2 * (3 * 192 + 2 * 128) * 128 / 550e12
    work, _, owner = planned("documents")
    slow, fast = (estimate(work, owner, 4, "cast", CostModel(bandwidth=b)) for b in (1e9, 2e9))
    assert slow.forward.exchange == 2 * fast.forward.exchange
    assert slow.forward.compute == fast.forward.compute


@functools.cache
def of_512_ranks(name):
    """8k tokens a rank."""
    length = 512 * 8192
    mask_mod = {
        "documents": lambda: masks.document(lengths=log_normal_documents(length)),
        "window": lambda: masks.sliding_window(4096),
        "causal": masks.causal,
    }[name]()
    return TileWork.of(mask_mod, length)


@pytest.mark.parametrize("name, share", [("documents", 0.7), ("window", 0.85), ("causal", 0.95)])
def test_scaling_to_512_ranks(name, share):
    work = of_512_ranks(name)
    made = estimate(work, best(work, 512)[1], 512, "cast")
    assert made.forward.efficiency >= share
    assert made.forward.efficiency >= made.forward.efficiency_exposed > 0.5 * share


def test_the_simpler_layouts_scale_worse():
    work = of_512_ranks("documents")
    for balance in ("contiguous", "head_tail", "documents", "work"):
        assert estimate(work, owners(balance, work, 512), 512, "cast").forward.efficiency < 0.4


@pytest.mark.parametrize("ranks", [8, 4096])
def test_few_and_many_ranks(ranks):
    work = TileWork.of(masks.sliding_window(4096), ranks * 8192, tile=1024)
    name, owner = best(work, ranks)
    assert name == "contiguous"
    model = CostModel()
    for method in METHODS if ranks == 8 else ("cast", "all_gather", "ring_ulysses"):
        if refusal(method, ranks, model) is None:
            held = owners(name, work, groups(method, ranks, model))
            made = estimate(work, held, ranks, method, model)
            assert 0 < made.forward.efficiency <= 1 and made.memory > 0
    cast = estimate(work, owner, ranks, "cast")
    assert cast.forward.bytes == 4 * CostModel().bytes_of_tile(1024)


def test_several_masks_add_up():
    one, two = masks.causal(), masks.sliding_window(300)
    both = TileWork.of({"a": one, "b": two}, 128 * 24, weights={"a": 1, "b": 3})
    owner = owners("head_tail", both, 4)
    for method in ("all_gather", "ring", "ulysses"):
        single = [estimate(TileWork.of(mask, 128 * 24), owner, 4, method) for mask in (one, two)]
        made = estimate(both, owner, 4, method)
        assert made.forward.perfect == pytest.approx(
            single[0].forward.perfect + 3 * single[1].forward.perfect
        )
        assert made.backward.bytes == pytest.approx(single[0].backward.bytes + 3 * single[1].backward.bytes)
        assert made.memory == pytest.approx(max(s.memory for s in single))


def test_methods_that_cannot_run():
    model = CostModel(heads=12, kv_heads=4)
    assert refusal("ulysses", 8, model) == "12 heads do not divide by 8 ranks"
    assert refusal("ulysses", 6, model) is None and refusal("cast", 7, model) is None
    assert refusal("ring_ulysses", 7, model) == "no node of 2 to 8 ranks divides 7 ranks and 12 heads"
    with pytest.raises(
        FlexError, match=re.escape("method: expected one of cast, all_gather, ulysses, ring, ring_ulysses")
    ):
        estimate(planned("causal")[0], planned("causal")[2], 4, "rings")


def chosen(name, ranks=8, *, asked="auto", node=None, **sizes):
    work, _, owner = planned(name, ranks)
    return choose_method(work, owner, ranks, CostModel(**sizes), asked=asked, node=node)


def names(choice):
    return [name for name, _ in choice.rejected]


def test_the_method_is_chosen_by_bytes_and_memory():
    window = chosen("window", bandwidth=1e8)
    assert window.chosen == "cast" and names(window) == ["all_gather", "ulysses", "ring"]
    assert chosen("causal", heads=12).chosen == "all_gather"
    assert dict(chosen("causal", heads=12).rejected)["ulysses"] == "12 heads do not divide by 8 ranks"
    short = chosen("causal", memory=2 * 2**20)
    assert short.chosen == "ring" and names(short) == ["all_gather", "cast", "ulysses"]
    assert dict(short.rejected)["cast"].startswith("a call may hold 2 MiB; by the model ")


def test_ulysses_is_chosen_where_heads_move_less_than_tokens():
    """As many heads of keys as of queries, and all of them read by all."""
    assert chosen("causal", heads=64, kv_heads=64, bandwidth=1e8).chosen == "ulysses"


def test_a_mesh_of_two_dimensions_may_choose_both():
    """Too many ranks for the heads, and too few to hide the exchange of all keys."""
    sizes = {"heads": 4, "kv_heads": 4, "bandwidth": 1e9}
    both = chosen("causal", node=4, **sizes)
    assert both.chosen == "ring_ulysses" and names(both) == ["all_gather", "cast", "ulysses", "ring"]
    assert "ring_ulysses" not in (alone := chosen("causal", **sizes)).chosen and len(alone.rejected) == 3
    odd = chosen("causal", node=3, **sizes)
    assert dict(odd.rejected)["ring_ulysses"] == "4 heads do not divide by the 3 ranks that share them"


def test_without_a_model_heads_are_not_shared_out():
    work, _, owner = planned("causal")
    found = choose_method(work, owner, 4, node=2)
    for method in ("ulysses", "ring_ulysses"):
        assert "how many there are was not said; by the model" in dict(found.rejected)[method]
    assert found == choose_method(work, owner, 4, node=2)


def test_a_choice_says_why():
    found = chosen("window", bandwidth=1e8)
    assert isinstance(found, MethodChoice)
    assert re.fullmatch(r"plan of 1 mask, \d+ tokens in \d+ tiles of 128, 8 ranks", found.plan)
    assert found.why.startswith("by the model ") and "MiB moved" in found.why
    assert dict(found.rejected)["ring"].startswith(
        "it is for calls whose keys and values do not fit in memory; by the model "
    )


def test_a_method_that_was_asked_for():
    """It is taken though another is faster; what each would take is said all the same."""
    asked, best = chosen("window", asked="ring", bandwidth=1e8), chosen("window", bandwidth=1e8)
    assert asked.chosen == "ring" and asked.why.startswith("asked for; by the model ")
    assert dict(asked.rejected)["cast"] == f"not asked for; {best.why}"
    assert names(asked) == ["all_gather", "cast", "ulysses"]
    cannot = chosen("causal", asked="ulysses", heads=12)
    assert cannot.chosen == "ulysses" and cannot.why == "asked for"


def test_amounts():
    assert [amount(n) for n in (5, 1500, 3 * 2**20, 2**40, 2**52)] == [
        "5 B",
        "1.46 KiB",
        "3 MiB",
        "1 TiB",
        "4.1e+03 TiB",
    ]


def test_documents_are_log_normal():
    lengths = torch.tensor(log_normal_documents(1 << 24, mean=4096, sigma=0.8, seed=3), dtype=torch.float64)
    assert lengths.sum() == 1 << 24 and lengths.min() >= 1
    assert abs(lengths.mean() / 4096 - 1) < 0.05 and abs(lengths.log().std() - 0.8) < 0.05
    assert log_normal_documents(5000, seed=1) == log_normal_documents(5000, seed=1)
    assert sum(log_normal_documents(100)) == 100


@pytest.mark.parametrize("method", METHODS)
def test_nothing_depends_on_torchs_defaults(method, request):
    """A model may be built with another default dtype, and on the meta device."""
    request.addfinalizer(functools.partial(torch.set_default_dtype, torch.get_default_dtype()))

    def plan():
        work = TileWork.of({"a": MASKS["documents"], "b": None}, 128 * 24)
        owner = owners("auto", work, groups(method, 12, COUNTS), method=method)
        return owner, estimate(work, owner, 12, method, COUNTS)

    expected = plan()
    torch.set_default_dtype(torch.float64)
    assert plan() == expected
    with torch.device("meta"):
        assert plan() == expected


def test_no_tokens():
    work = TileWork.of(masks.causal(), 0)
    for method in ("cast", "all_gather", "ring", "ulysses"):
        assert estimate(work, owners("auto", work, 4), 4, method).seconds == 0
