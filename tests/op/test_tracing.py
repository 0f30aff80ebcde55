"""Fake tensors, functionalization, proxy tracing and checkpointing see the op as one node."""

import functools

import pytest
import torch
from op.calls import close, draw, parameter, qkv
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from flex_inductor import AuxRequest, create_block_mask, flex_attention
from flex_inductor.op import attention, attention_backward
from flex_inductor.op.eager import chunked


def bhsd(batch, heads, length, dim):
    return torch.randn(batch, heads, length, dim)


def bshd(batch, heads, length, dim):
    return torch.randn(batch, length, heads, dim).transpose(1, 2)


def packed(batch, heads, length, dim):
    return torch.randn(batch, length, 3, heads, dim)[:, :, 1].transpose(1, 2)


def head_dim_outermost(batch, heads, length, dim):
    return torch.randn(dim, batch, heads, length).permute(1, 2, 3, 0)


def one_expanded_head(batch, heads, length, dim):
    return torch.randn(batch, 1, length, dim).expand(-1, heads, -1, -1)


def causal_mask(length):
    return create_block_mask(lambda b, h, q, kv: q >= kv, None, None, length, length, "cpu", BLOCK_SIZE=4)


def metadata(tensors):
    return [None if t is None else (t.shape, t.dtype, t.stride(), t.device) for t in tensors]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [bhsd, bshd, packed, head_dim_outermost, one_expanded_head])
def test_fake_results_look_like_real_ones(layout, dtype):
    bias = torch.randn(6, 6, dtype=dtype).t()

    def everything(q, k, v, bias):
        leaves = [t.detach().requires_grad_() for t in (q, k, v, bias)]
        q, k, v, bias = leaves

        def score_mod(score, b, h, q_idx, kv_idx):
            return score + bias[q_idx, kv_idx]

        aux = AuxRequest(lse=True, max_scores=True)
        out, aux = flex_attention(q, k, v, score_mod, enable_gqa=True, return_aux=aux)
        return out, aux.lse, aux.max_scores, *torch.autograd.grad(out.sum(), leaves)

    real = [layout(2, 4, 6, 8).to(dtype), layout(2, 2, 6, 8).to(dtype), layout(2, 2, 6, 5).to(dtype), bias]
    mode = FakeTensorMode()
    fake = [mode.from_tensor(t) for t in real]
    with mode:
        expected = metadata(everything(*fake))
    assert metadata(everything(*real)) == expected
    if layout in (bhsd, bshd):  # dense: results lie in memory as the query does
        assert expected[0][2] == layout(2, 4, 6, 5).stride()
        assert expected[3][2] == real[0].stride()


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_make_fx_gives_one_node_each_way(tracing_mode):
    inputs = [*qkv(), parameter(6)]
    mask = causal_mask(6)

    def traced(q, k, v, bias):
        def score_mod(score, b, h, q_idx, kv_idx):
            return score * bias[kv_idx] + bias[q_idx]

        out, lse = flex_attention(q, k, v, score_mod, mask, return_lse=True)
        loss = out.sin().sum() + lse.sum()
        return loss, *torch.autograd.grad(loss, (q, k, v, bias))

    graph = make_fx(traced, tracing_mode=tracing_mode, _allow_non_fake_inputs=True)(*inputs)
    assert len(graph.graph.find_nodes(op="call_function", target=attention)) == 1
    assert len(graph.graph.find_nodes(op="call_function", target=attention_backward)) == 1
    others = [*qkv(), parameter(6)]
    close(graph(*others), traced(*others))


def test_symbolic_graph_serves_other_lengths():
    def traced(q, k, v, bias):
        def score_mod(score, b, h, q_idx, kv_idx):
            return score * bias[kv_idx] + bias[q_idx]

        out = flex_attention(q, k, v, score_mod)
        return out, *torch.autograd.grad(out.sin().sum(), (q, k, v, bias))

    graph = make_fx(traced, tracing_mode="symbolic")(*qkv(), parameter(6))
    others = [*qkv(3, 2, 9, 4), parameter(9)]
    close(graph(*others), traced(*others))


def test_functionalization():
    def attend(q, k, v, bias):
        scaled = bias.clone()
        scaled.mul_(2)
        out = flex_attention(q, k, v, lambda score, b, h, q_idx, kv_idx: score + scaled[kv_idx])
        out.add_(1)
        return out

    inputs = [*(t.detach() for t in qkv()), draw(6)]
    graph = make_fx(torch.func.functionalize(attend))(*inputs)
    written = [n for n in graph.graph.nodes if n.op == "call_function" and str(n.target).endswith("_.Tensor")]
    assert not written
    assert len(graph.graph.find_nodes(op="call_function", target=attention)) == 1
    close(torch.func.functionalize(attend)(*inputs), attend(*inputs))
    close(graph(*inputs), attend(*inputs))


@pytest.fixture
def forward_runs(monkeypatch):
    """Counts how often the chunked forward runs."""
    runs = []
    forward = chunked.forward
    monkeypatch.setattr(chunked, "forward", lambda *args: runs.append(1) or forward(*args))
    return runs


@pytest.mark.parametrize(
    "policy, expected", [(CheckpointPolicy.MUST_SAVE, 1), (CheckpointPolicy.MUST_RECOMPUTE, 2)]
)
def test_selective_checkpointing(policy, expected, forward_runs):
    inputs, bias = qkv(), parameter(6)

    def block(q, k, v):
        return flex_attention(q.sin(), k, v, lambda score, b, h, q_idx, kv_idx: score * bias[kv_idx]).sin()

    def choose(ctx, op, *args, **kwargs):
        return policy if op is attention else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, choose)
    out = checkpoint(block, *inputs, use_reentrant=False, context_fn=contexts)
    grads = torch.autograd.grad(out.sum(), (*inputs, bias))
    assert len(forward_runs) == expected
    close(grads, torch.autograd.grad(block(*inputs).sum(), (*inputs, bias)))
