"""What docs/litgpt.md shows, beside litgpt's own attention."""

import re
from pathlib import Path

import pytest
import torch
from litgpt import GPT, Config
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


@pytest.mark.parametrize("name", MODELS)
def test_what_the_docs_show(name, monkeypatch):
    own = CausalSelfAttention.scaled_dot_product_attention
    monkeypatch.setattr(CausalSelfAttention, "scaled_dot_product_attention", own)  # put back afterwards
    model, tokens = GPT(Config(**TINY, **MODELS[name])), torch.randint(50, (2, 200))
    expected = trained(model, tokens)
    (snippet,) = re.findall(
        r"```python\n(.*?)```", (Path(__file__).parents[3] / "docs/litgpt.md").read_text(), re.DOTALL
    )
    torch._dynamo.reset()
    exec(snippet, {})
    with served_by("cpu"):
        found = trained(model, tokens)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert CausalSelfAttention.scaled_dot_product_attention is not own
