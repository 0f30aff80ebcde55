"""mode="reduce-overhead": what waits for the host is kept out of CUDA graphs; no card is needed to see that it says so."""

import pytest
import torch
from torch._inductor.output_code import CompiledFxGraph

import flex_inductor.lowerings.lower  # noqa: F401 - defines the ops of verify
from flex_inductor import decisions, flex_attention

OPS = (
    "chunked_forward",
    "chunked_backward",
    "verified_forward",
    "verified_backward",
    "verified_append_kv",
    "block_lists",
)


@pytest.mark.parametrize("name", OPS)
def test_ops_say_so(name):
    assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.flex_inductor, name).default.tags


@pytest.mark.parametrize(
    "options, waits", [({"route": "chunked"}, "chunked"), ({"verify": True}, "verified"), ({}, None)]
)
def test_graphs_with_them_say_so(options, waits, monkeypatch):
    reasons = []
    made = CompiledFxGraph.__init__

    def noting(graph, *args):
        made(graph, *args)
        reasons.append(graph.disabled_cudagraphs_reason)

    monkeypatch.setattr(CompiledFxGraph, "__init__", noting)
    torch._dynamo.reset()
    decisions(clear=True)
    query, key, value = (torch.randn(1, 1, 16, 16, requires_grad=True) for _ in range(3))
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        torch.compile(flex_attention, backend="flex_inductor", options=options)(
            query, key, value
        ).sum().backward()
    assert {decision.chosen for decision in decisions()} == {options.get("route", "cpu")}
    if waits is None:
        assert reasons == [None, None]
    else:
        assert reasons == [
            f"flex_inductor.{waits}_{which}.default waits for values on the host"
            for which in ("forward", "backward")
        ]
