"""Which mods Dynamo takes for right without making graphs of them anew."""

import unittest.mock

import pytest
import torch
from op.calls import parameter, qkv
from torch import fx

from flex_inductor import create_block_mask, flex_attention, masks
from flex_inductor.op import prepare
from flex_inductor.op.dynamo.nodes import only_computes

I32, F32 = torch.int32, torch.float32
COMPUTE = {
    "causal": (lambda q, kv: q >= kv, I32, I32),
    "a window": (lambda q, kv: (q - kv).abs() <= 100_000, I32, I32),
    "a cap": (lambda s: torch.tanh(s / 20.0) * 20.0, F32),
    "masked": (lambda s, q, kv: torch.where(q >= kv, s, -float("inf")), F32, I32, I32),
    "a bias": (lambda s, kv, bias: s + bias[kv], F32, I32, torch.float16),
    "documents": (lambda q, kv, ids: (ids[q] == ids[kv]) & (q >= kv), I32, I32, torch.int64),
    "kept": (lambda kv, kept: kept[kv], I32, torch.bool),
}
MAY_BE_REFUSED = {
    "random": (lambda s: s + torch.rand(()), F32),
    "in place": (lambda s: s.add_(1), F32),
    "beyond fp32": (lambda s: s + 1e40, F32),
    "beyond fp16": (lambda s, bias: s + bias * 1e5, F32, torch.float16),
    "beyond int32": (lambda q, kv: q - kv < 3_000_000_000, I32, I32),
    "beyond int8": (lambda kv, ids: ids[kv] == 300, I32, torch.int8),
    "another type": (lambda s: s.half() * 1e5, F32),
    "not a number": (lambda s: s + float("nan"), F32),
    "complex": (lambda s, table: s + table[0], F32, torch.complex64),
    "any function": (lambda s: torch.nn.functional.dropout(s, 0.5), F32),
}


def graph_of(mod, *dtypes):
    graph = fx.symbolic_trace(mod).graph
    for placeholder, dtype in zip(graph.find_nodes(op="placeholder"), dtypes, strict=True):
        placeholder.meta["example_value"] = torch.zeros((), dtype=dtype)
    return graph


@pytest.mark.parametrize("name", COMPUTE)
def test_known_functions_only_compute(name):
    assert only_computes(graph_of(*COMPUTE[name]))


@pytest.mark.parametrize("name", MAY_BE_REFUSED)
def test_what_a_check_may_refuse(name):
    assert not only_computes(graph_of(*MAY_BE_REFUSED[name]))


def test_a_number_that_changes():
    graph = graph_of(lambda q, kv, width: q - kv < width, I32, I32, I32)
    graph.find_nodes(op="placeholder")[-1].meta["example_value"] = 5
    assert not only_computes(graph)


@pytest.mark.parametrize("known", [True, False])
def test_graphs_that_dynamo_makes(known):
    torch._dynamo.reset()
    bias, mask = parameter(6), create_block_mask(masks.causal(), None, None, 6, 6, device="cpu")
    counts = []

    def attend(q, k, v):
        score_mod = lambda s, b, h, i, j: s * 2 + bias[j] if known else s.mul(2) + bias[j]  # noqa: E731
        return flex_attention(q, k, v, score_mod, mask, return_lse=True)

    with unittest.mock.patch.object(prepare, "lane_graph", wraps=prepare.lane_graph) as made:

        def backend(module, _):
            counts.append(made.call_count)
            return module

        out, lse = torch.compile(attend, backend=backend, fullgraph=True)(*qkv())
    assert counts == [0] if known else counts[0] > 0
    (out.sum() + lse.sum()).backward()
    assert bias.grad is not None
