"""Compiled models with attn_implementation="flex_inductor", against their own eager attention, eagerly."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import StaticCache

from flex_inductor.integrations import transformers as integration
from tests.integrations.families import inputs, model_of, padding, tokens
from tests.integrations.test_transformers import assert_same, trained
from tests.support import served_by

NAME = integration.NAME


def in_one_graph(model, backend):
    """A mixture of experts asks for numbers of tokens, which breaks graphs."""
    torch._dynamo.reset()
    model.set_attn_implementation(NAME)
    model.forward = torch.compile(model.forward, backend=backend, fullgraph=True)


@pytest.mark.parametrize("form", ["padded", pytest.param("packed", marks=pytest.mark.slow)])
def test_models_are_traced_whole(form):
    model, given = model_of("Gemma 2"), {**inputs("Gemma 2", form), "use_cache": False}
    eager = trained(model, given, "eager", given.get("attention_mask"))
    in_one_graph(model, "eager")
    assert_same(trained(model, given, NAME, given.get("attention_mask")), eager)


@pytest.mark.slow
@pytest.mark.parametrize("family, form", [("Llama", "packed"), ("Gemma 2", "padded"), ("BERT", "plain")])
def test_training_is_compiled(family, form):
    model, given = model_of(family), {**inputs(family, form), "use_cache": False}
    seen = given.get("attention_mask") if family == "Gemma 2" else None
    eager = trained(model, given, "eager", seen)
    in_one_graph(model, "flex_inductor")
    with served_by("cpu"):
        ours = trained(model, given, NAME, seen)
    assert_same(ours, eager)


@pytest.mark.slow
def test_a_mixture_of_experts_is_compiled_in_parts():
    model, given = model_of("gpt-oss"), inputs("gpt-oss", "packed")
    eager = trained(model, given, "eager")
    torch._dynamo.reset()
    model.set_attn_implementation(NAME)
    model.forward = torch.compile(model.forward, backend="flex_inductor")
    with served_by("cpu"):
        ours = trained(model, given, NAME)
    assert_same(ours, eager)


def decoded(model, step, steps=6):
    """The logits of steps after a prompt, and how many graphs there were after each."""
    ids, past = tokens(length=40), StaticCache(config=model.config, max_cache_len=64)
    mask = torch.cat([padding(40), torch.ones(2, 24, dtype=torch.int64)], 1)
    logits, graphs = [], []
    with torch.no_grad():
        ids = (
            model(ids, attention_mask=mask[:, :40], past_key_values=past)
            .logits[:, -1]
            .argmax(-1, keepdim=True)
        )
        for _ in range(steps):
            found = step(ids, attention_mask=mask, past_key_values=past)
            logits.append(found.logits[:, -1].clone())
            graphs.append(counters["stats"]["unique_graphs"])
            ids = logits[-1].argmax(-1, keepdim=True)
    return torch.stack(logits), graphs


@pytest.mark.parametrize("backend", ["eager", pytest.param("flex_inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["Llama", pytest.param("gpt-oss", marks=pytest.mark.slow)])
def test_a_static_cache_compiles_once(family, backend):
    model = model_of(family)
    model.set_attn_implementation("eager")
    torch.manual_seed(1)
    eager, _ = decoded(model, model)
    torch._dynamo.reset()
    counters.clear()
    model.set_attn_implementation(NAME)
    torch.manual_seed(1)
    ours, graphs = decoded(model, torch.compile(model, backend=backend, fullgraph=family == "Llama"))
    torch.testing.assert_close(ours, eager, rtol=0, atol=1e-4)
    assert len(set(graphs[1:])) == 1
