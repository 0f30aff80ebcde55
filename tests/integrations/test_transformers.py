"""transformers' models with attn_implementation="flex_inductor", against their own eager attention."""

from __future__ import annotations

import pytest
import torch

from flex_inductor.integrations import transformers as integration
from tests.integrations.families import CAUSAL, FAMILIES, inputs, model_of

NAME = integration.NAME
CLOSE = 1e-5  # of the largest magnitude, or absolute below 1


def trained(model, given, implementation, seen=None):
    """Logits and gradients of a step in which the tokens that are `seen` count."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    logits = model(**given).logits
    if seen is not None:
        logits = logits * seen.unsqueeze(-1)
    generator = torch.Generator().manual_seed(1)
    (logits * torch.randn(logits.shape, generator=generator)).sum().div(10).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **gradients}


def assert_same(ours, eager):
    assert ours.keys() == eager.keys()
    for name, want in eager.items():
        torch.testing.assert_close(
            ours[name], want, rtol=0, atol=CLOSE * max(1.0, want.abs().max().item()), msg=lambda m, n=name: f"{n}: {m}"
        )


FORMS = [
    *((family, "plain") for family in FAMILIES),
    *((family, "padded") for family in FAMILIES if family != "ViT"),
    *((family, "packed") for family in CAUSAL),
]


@pytest.mark.parametrize("family, form", FORMS)
def test_families_train_as_with_eager_attention(family, form):
    model, given = model_of(family), inputs(family, form)
    seen = given.get("attention_mask") if "decoder_input_ids" not in given else None
    eager = trained(model, given, "eager", seen)
    assert_same(trained(model, given, NAME, seen), eager)
