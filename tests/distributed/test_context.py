"""context_parallel: plans, shards, what it serves and what it refuses."""

import copy
import pickle
import re

import pytest
import torch
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention.flex_attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import noop_mask
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from flex_inductor import (
    FlexError,
    Sequences,
    context_parallel,
    create_block_mask,
    decisions,
    flex_attention,
    set_eager_kernels,
)
from flex_inductor.distributed.cost import CostModel
from flex_inductor.distributed.torch_ways import sharded_buffers
from flex_inductor.errors import FlexNotImplementedError
from flex_inductor.lowerings.decision import Decision
from flex_inductor.masks import causal, sliding_window
from tests.distributed.cases import Case, mesh_of
from tests.support import served_by

LENGTH = 300


def masks():
    return {
        "causal": create_block_mask(causal(), None, None, LENGTH, LENGTH, "cpu", 32, compact=True),
        "window": create_block_mask(sliding_window(40), None, None, LENGTH, LENGTH, "cpu", (32, 16)),
    }


def planned(group):
    """What a user does around a model."""
    cp = context_parallel(group, "cast", "head_tail")
    found = cp.plan({**masks(), "mod": noop_mask, "none": [None, Sequences.from_lengths([100, 200])]}, LENGTH)
    layouts = {mask.layout for mask in pytree.tree_leaves(found, is_leaf=lambda m: hasattr(m, "layout"))}
    assert len(layouts) == 1 and layouts == {cp.layout}
    whole = torch.randn(2, LENGTH, 3, generator=torch.Generator().manual_seed(0))
    tokens, positions = cp.shard((whole, torch.arange(LENGTH)), (1, 0))
    assert torch.equal(positions, cp.layout.positions(cp.rank).long())
    assert torch.equal(whole[:, positions], tokens)
    named = cp.shard({"tokens": whole, "positions": torch.arange(LENGTH)}, {"positions": 0, "tokens": 1})
    assert torch.equal(named["tokens"], tokens) and torch.equal(named["positions"], positions)
    part = tokens.clone().requires_grad_()
    back = cp.unshard(part, 1)
    assert torch.equal(back, whole)
    (back * whole).sum().backward()
    assert torch.equal(part.grad, tokens)
    labels = cp.next_tokens(torch.arange(LENGTH)[None], 1)
    assert torch.equal(labels[0], torch.where(positions == LENGTH - 1, -100, positions + 1))
    mask = pickle.loads(pickle.dumps(found["window"]))
    leaves, spec = pytree.tree_flatten(mask)
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    again = pytree.tree_unflatten(leaves, spec).to("cpu")
    case = Case(length=LENGTH, score=False, dtype=torch.float64)
    rows = cp.shard([t[:, :, :LENGTH] for t in case.tensors()[:3]], 2)
    one = flex_attention(*rows, block_mask=found["window"], enable_gqa=True)
    with torch.inference_mode():
        assert torch.equal(one, flex_attention(*rows, block_mask=again, enable_gqa=True))
    return found["causal"].plan[0].item()


def test_a_plan(group):
    assert len(set(group.run(planned))) == 1


def chosen(group):
    """The methods that the last plan had to choose from."""
    mesh = mesh_of(group)
    found = []
    for method in ("auto", "ring"):
        decisions(clear=True)
        cp = context_parallel(mesh, method)
        mask = cp.plan(masks(), model=CostModel(heads=6, kv_heads=1))["window"]
        (decision,) = decisions()
        assert decision == Decision(*cp.choice) and mask.choice == cp.choice
        assert pickle.loads(pickle.dumps(mask)).choice == cp.choice
        found.append((decision.chosen, [name for name, _ in decision.rejected]))
    few = CostModel(heads=2, kv_heads=2, bandwidth=1e6)  # heads, and slow links
    both = context_parallel(mesh, "auto").plan(causal(), LENGTH, block=32, model=few)
    assert both.ring and both.heads_group and both.choice.chosen == "ring_ulysses"
    return found


def test_a_plan_says_what_it_chose(group):
    for auto, ring in group.run(chosen):
        assert auto == ("cast", ["all_gather", "ulysses", "ring_ulysses", "ring"])
        assert ring == ("ring", ["all_gather", "cast", "ulysses", "ring_ulysses"])


def alone(group):
    """An eager call whose kernel no other rank compiles."""
    if group.rank():
        return
    graphs_compared = torch._inductor.config.patch(
        {
            f"aten_distributed_optimizations.{name}": True
            for name in ("spmd_check", "enable_overlap_scheduling")
            if hasattr(torch._inductor.config.aten_distributed_optimizations, name)
        }
    )
    query = torch.randn(1, 3, 40, 24)
    before = set_eager_kernels("always")
    with graphs_compared, served_by("cpu"):
        found = flex_attention(query, query, query, lambda score, b, h, q, k: score + 0.125 * q)
    set_eager_kernels(before)
    want = torch.nn.functional.scaled_dot_product_attention(query, query, query)
    torch.testing.assert_close(found, want)


def test_one_rank_alone(group):
    group.run(alone, ranks=2)


def served(group, is_causal, gqa):
    case = Case("none", length=LENGTH, kv_heads=2 if gqa else 4, score=False)
    cp = context_parallel(group, "auto", "head_tail")
    cp.plan(None, LENGTH, block=32)
    query, key, value, *_ = case.tensors()
    want = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=is_causal, enable_gqa=gqa
    )
    parts = cp.shard([query, key, value], 2)
    for own in (cp, copy.deepcopy(cp), pickle.loads(pickle.dumps(cp))):
        own.plan(None, LENGTH, block=32)
        with own:
            got = torch.nn.functional.scaled_dot_product_attention(
                *parts, is_causal=is_causal, enable_gqa=gqa
            )
        torch.testing.assert_close(got, own.shard(want, 2), rtol=0, atol=1e-13)
        assert own.dense_layout is own.layout and not own._modes


@pytest.mark.parametrize("is_causal, gqa", [(True, True), (False, False)])
def test_sdpa_is_served(group, is_causal, gqa):
    group.run(served, is_causal, gqa, ranks=2)


def of_modules(group):
    """Modules that call scaled_dot_product_attention out of sight of modes, training, and evaluated."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 8, dropout=0, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, LENGTH, 8, dtype=torch.float64)
    cp = context_parallel(group, "ring", "head_tail")
    cp.plan(None, LENGTH, block=32)
    want = cp.shard(layer(x), 1)
    for training in (True, False):
        with cp, torch.set_grad_enabled(training):
            got = layer.train(training)(cp.shard(x, 1))
        torch.testing.assert_close(got, want, rtol=0, atol=1e-13)


def test_modules_are_served(group):
    group.run(of_modules, ranks=2)


def on_meshes(group):
    """Meshes whose ranks do not ascend row by row."""
    case = Case("none", length=LENGTH, score=False)
    query, key, value, *_ = case.tensors()
    want = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    )
    for ranks in ([[0, 2], [1, 3]], [[3, 2], [1, 0]]):
        cp = context_parallel(
            DeviceMesh("cpu", ranks, mesh_dim_names=("ring", "heads")), "ring_ulysses", "head_tail"
        )
        mask = cp.plan(causal(), LENGTH, block=32)
        got = flex_attention(*cp.shard([query, key, value], 2), block_mask=mask, enable_gqa=True)
        torch.testing.assert_close(got, cp.shard(want, 2), rtol=0, atol=1e-13)
    mesh = DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("ring", "heads"))
    with pytest.raises(FlexError, match=r"the mesh is \[\[0, 1\], \[3, 2\]\].*ascend along both dimensions"):
        context_parallel(mesh, "ring_ulysses")
    context_parallel(mesh)


def test_order_of_a_mesh(group):
    group.run(on_meshes)


def differentiated_twice(group, method):
    cp = context_parallel(group, method, "contiguous")
    mask = cp.plan(None, 64, block=32)
    query = torch.randn(1, 2, 32, 8, requires_grad=True)
    out = flex_attention(query, query, query, block_mask=mask)
    with pytest.raises(FlexNotImplementedError, match="over the shards of several ranks"):
        torch.autograd.grad(out.sum(), query, create_graph=True)
    with forward_ad.dual_level(), pytest.raises(FlexNotImplementedError, match="over the shards"):
        dual = forward_ad.make_dual(query, query)
        flex_attention(dual, query, query, block_mask=mask)
    with pytest.raises(
        FlexNotImplementedError, match="a mask that context_parallel has planned is not served"
    ):
        torch.func.vmap(lambda q: flex_attention(q, query, query, block_mask=mask))(query[None])


@pytest.mark.parametrize("method", ["all_gather", "cast", "ulysses", "ring"])
def test_second_derivatives_and_vmap_are_refused(group, method):
    group.run(differentiated_twice, method, ranks=2)


def refused(group, what):
    """The error that each rank gets."""
    cp = context_parallel(group, "ulysses" if what == "heads" else "cast", "contiguous")
    mask = cp.plan(causal(), LENGTH, block=32)
    case = Case(length=LENGTH, score=False)
    query, key, value = cp.shard(case.tensors()[:3], 2)
    more = {"enable_gqa": True}
    try:
        if what == "unplanned":
            with cp:
                flex_attention(query, key, value, **more)
        elif what == "local length":
            flex_attention(query[:, :, 1:], key, value, block_mask=mask, **more)
        elif what == "heads":
            flex_attention(query[:, :3], key[:, :1], value[:, :1], block_mask=mask, **more)
        elif what == "batches":
            two = cp.plan(create_block_mask(lambda b, h, q, k: q >= b, 2, None, LENGTH, LENGTH, "cpu", 32))
            flex_attention(*(t.expand(3, -1, -1, -1) for t in (query, key, value)), block_mask=two, **more)
        elif what == "other rank":
            mask.cp_group = mask.cp_group._replace(rank=cp.rank + 1)
            flex_attention(query, key, value, block_mask=mask, **more)
        elif what == "other group":
            mask.cp_group = mask.cp_group._replace(name="none such")
            flex_attention(query, key, value, block_mask=mask, **more)
        elif what == "other shapes":
            rows = [query, key, value] if cp.rank else [t[..., :-1] for t in (query, key, value)]
            flex_attention(*rows, block_mask=mask, **more)
        elif what == "other plans":
            mask = cp.plan(sliding_window(7 if cp.rank else 150), LENGTH, block=32)
            flex_attention(query, key, value, block_mask=mask, **more)
        elif what == "other values":  # in the same tiles
            ids = torch.arange(LENGTH) // (10 + cp.rank)
            mask = cp.plan(lambda b, h, q, kv: (q >= kv) & (ids[q] != ids[kv] - 1000), LENGTH, block=32)
            flex_attention(query, key, value, block_mask=mask, **more)
        elif what == "other methods":
            both = {"cast": "cast", "all": "all_gather"}
            mask = context_parallel(group, both["all" if cp.rank else "cast"], "contiguous").plan(
                sliding_window(4), LENGTH, block=32
            )
            flex_attention(query, key, value, block_mask=mask, **more)
        elif what == "weights of heads":
            rows = query.flatten(2).float()
            heads = torch.nn.MultiheadAttention(rows.size(-1), 1, batch_first=True)
            with cp:
                heads(rows, rows, rows)
        elif what == "torch's flex":
            with cp:
                torch_flex(query, query, query)
        elif what == "checkpoint":
            sdpa = torch.nn.functional.scaled_dot_product_attention
            with cp:
                checkpoint(lambda q: sdpa(q, q, q), query.requires_grad_(), use_reentrant=bool(cp.rank))
        elif what == "compiled local length":
            call = torch.compile(flex_attention, backend="flex_inductor", fullgraph=True, dynamic=True)
            call(query[:, :, 1:], key, value, block_mask=mask, **more)
        elif what == "shared buffer":
            with sharded_buffers(cp, buffers=torch.zeros(LENGTH, 2).chunk(2, -1), buffer_seq_dims=[0, 0]):
                pass
        elif what == "attn_mask":
            with cp:
                torch.nn.functional.scaled_dot_product_attention(query, key, value, torch.ones(1))
        elif what == "local capture":
            gate = torch.randn(query.size(2), dtype=torch.float64)
            flex_attention(query, key, value, lambda s, b, h, q, kv: s + gate[q], block_mask=mask, **more)
        elif what == "compiled local capture":
            gate = torch.randn(2, query.size(2), dtype=torch.float64)

            def call(gate):
                return flex_attention(
                    query, key, value, lambda s, b, h, q, kv: s + gate[h % 2, kv], block_mask=mask, **more
                )

            torch.compile(call, backend="flex_inductor", fullgraph=True)(gate)
        elif what == "beyond a capture":
            gate = torch.randn(query.size(2), dtype=torch.float64)
            flex_attention(query, key, value, lambda s, b, h, q, kv: s + gate[q * 1], block_mask=mask, **more)
            if cp.rank == 0:  # whose tokens all are below its own length
                return ""
        elif what == "placement":
            mesh = DeviceMesh.from_group(group, "cpu")
            rows = [DTensor.from_local(t, mesh, [Shard(1)]) for t in (query, key, value)]
            flex_attention(*rows, block_mask=mask, **more)
        elif what == "planned twice":
            cp.plan({"a": mask})
        elif what == "lengths":
            cp.plan([causal(), create_block_mask(causal(), None, None, 64, 64, "cpu", 32)], LENGTH)
        elif what == "no length":
            cp.plan(causal())
        elif what == "weights":
            cp.plan(masks(), weights={"causal": 1, "windows": 2})
        elif what == "dims":
            cp.shard([query, key], [2])
        elif what == "no plan":
            context_parallel(group).shard(query, 2)
        elif what == "whole length":
            cp.shard(query, 2)
        elif what == "method":
            context_parallel(group, "rings")
        elif what == "balance":
            context_parallel(group, balance="even")
        elif what == "names":
            context_parallel(DeviceMesh("cpu", [[0, 1]]), "ring_ulysses")
        elif what == "group":
            context_parallel("cp")
        elif what == "no member":
            context_parallel(torch.distributed.GroupMember.NON_GROUP_MEMBER)
        elif what == "second":
            rows = [t.requires_grad_() for t in (query, key, value)]
            out = flex_attention(*rows, block_mask=mask, **more)
            (grad,) = torch.autograd.grad(out.square().sum(), rows[1], create_graph=True)
            grad.sum().backward()
    except FlexError as error:
        return str(error)
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    "what, text",
    [
        ("unplanned", "flex_attention: called inside of `with context_parallel"),
        ("local length", "query: the mask was planned for a sequence of 300, of which rank 0 has"),
        ("heads", "ulysses: query has 3 heads, which 2 ranks cannot share alike. Use .* that divides 3, or"),
        ("batches", "block_mask was planned for 2 batches, but query has 3"),
        ("other rank", "block_mask was planned for rank 1 of 2, but this is rank 0 of 2"),
        ("other group", "planned for the process group 'none such', which this process does not have"),
        ("other shapes", r"ranks call with different shapes: rank 0 \[1, 2, 22\], rank 1 \[1, 2, 24\]"),
        ("other plans", "ranks call with different plans: rank 0 "),
        ("other values", "ranks call with different plans: rank 0 "),
        ("other methods", "ranks call with different plans: .* for the same method"),
        ("weights of heads", "multi_head_attention_forward: need_weights: got True inside of"),
        ("torch's flex", "torch's flex_attention was called inside of"),
        ("checkpoint", "called by torch.utils.checkpoint inside of .*Enter `with cp:` in the checkpointed"),
        ("compiled local length", "query: the mask was planned for a sequence of 300, of which rank 0 has"),
        ("shared buffer", r"sharded_buffers: buffers\[0\]: shares its memory with another tensor"),
        ("attn_mask", "attn_mask: got a tensor inside of"),
        (
            "local capture",
            r"score_mod looks up `gate` by positions in the whole sequence, 300 tokens, but it has \d+ ",
        ),
        (
            "compiled local capture",
            "score_mod looks up `gate` by positions in the whole sequence, 300 tokens, but ",
        ),
        ("beyond a capture", "^$"),
        ("placement", r"query: a DTensor with placements \(Shard\(dim=1\),\) on .*expected Shard\(2\)"),
        ("planned twice", r"masks\['a'\] is planned already"),
        ("lengths", r"masks\[1\]: expected 300 queries and keys, one length for all masks, got 64 x 64"),
        ("no length", "does not say how long the sequence is. Pass length="),
        ("weights", r"plan: weights: expected \['causal'\], \['window'\], got \['causal'\], \['windows'\]"),
        ("dims", r"shard: dims: expected \[0\], \[1\], got \[0\]"),
        ("no plan", "shard: nothing is planned yet"),
        ("whole length", "shard: tensor 0: expected 300 in dimension 2, the whole sequence"),
        ("method", "method: expected one of auto, cast, .*, got 'rings'"),
        ("balance", "balance: expected one of .*, got 'even'"),
        ("group", "expected a DeviceMesh of one or two dimensions or a process group, got str 'cp'"),
        ("no member", "got -100, which torch gives for a group that this process is not in"),
        ("names", "the dimensions of the mesh have no names"),
        ("second", "derivative"),
    ],
)
def test_bad_input(group, what, text):
    first, second = group.run(refused, what, ranks=2)
    if what == "beyond a capture":
        assert "beyond its end. Mods see indices of the whole sequence, 300 tokens, of which" in second
    assert re.search(text, first), first
