"""What docs/litgpt.md shows, beside litgpt's own attention."""

import re
from pathlib import Path

import pytest
import torch
from litgpt import GPT, Config, adapter
from litgpt.model import CausalSelfAttention

from tests.support import served_by

TINY = {
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 64,
    "padded_vocab_size": 50,
    "block_size": 256,
    "intermediate_size": 64,
}
MODELS = {
    "grouped": {"n_query_groups": 2},
    "softcap": {"attention_logit_softcapping": 2.0, "attention_scores_scalar": 10},
    "window": {"sliding_window_size": 40, "sliding_window_indices": [1, 0]},
}


def trained(model, tokens):
    model.zero_grad()
    logits = model(tokens)
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    return {"logits": logits.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}}


@pytest.fixture
def show(monkeypatch):
    """Run what the docs show. Its method is taken back afterwards."""
    own = CausalSelfAttention.scaled_dot_product_attention
    monkeypatch.setattr(CausalSelfAttention, "scaled_dot_product_attention", own)
    text = (Path(__file__).parents[3] / "docs/litgpt.md").read_text()
    (snippet,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    torch._dynamo.reset()

    def run():
        exec(snippet, {})
        assert CausalSelfAttention.scaled_dot_product_attention is not own

    return run


@pytest.mark.parametrize("name", MODELS)
def test_what_the_docs_show(name, show):
    model, tokens = GPT(Config(**TINY, **MODELS[name])), torch.randint(50, (2, 200))
    expected = trained(model, tokens)
    show()
    with served_by("cpu"):
        found = trained(model, tokens)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_calls_with_a_mask_keep_litgpts_own(name, show):
    """An adapter's prompt and a cache may have as many keys as there are queries."""
    tokens = torch.randint(50, (2, 40))
    plain = GPT(Config(**TINY, **MODELS[name]))
    plain.set_kv_cache(2, 60)
    adapted = adapter.GPT(
        adapter.Config(**TINY, **MODELS[name], adapter_prompt_length=40, adapter_start_layer=0)
    )
    for block in adapted.transformer.h:
        block.attn.gating_factor.fill_(1.0)
    calls = [lambda: adapted(tokens), lambda: plain(tokens, torch.arange(40))]
    expected = [call() for call in calls]
    show()
    torch.testing.assert_close([call() for call in calls], expected, rtol=1e-5, atol=1e-5)
