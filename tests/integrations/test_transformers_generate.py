"""generate with attn_implementation="flex_inductor": the same tokens as with eager attention."""

from __future__ import annotations

import itertools
import re
import runpy
from pathlib import Path

import pytest
import torch
import transformers
from transformers import DynamicCache, StaticCache

from flex_inductor import FlexError
from flex_inductor.integrations import transformers as integration
from tests.integrations.families import (
    CAUSAL,
    DECODER,
    ENCODER_DECODER,
    VOCAB,
    WINDOW,
    model_of,
    padding,
    tokens,
)

NAME = integration.NAME
ROOT = Path(__file__).resolve().parents[2]
QUICK = (("Llama", 3, "dynamic"), ("Llama", 1, "static"), ("gpt-oss", 1, "dynamic"), ("T5", 1, "dynamic"))


def both(family, generate):
    """What `generate(model)` gives with eager attention and with ours."""
    model, results = model_of(family), []
    if family == "BART":  # in fp32 rounding decides between two of its beams
        model = model.double()
    for implementation in ("eager", NAME):
        model.set_attn_implementation(implementation)
        results.append(generate(model))
    return results


def generated(model, ids, **given):
    settings = {"max_new_tokens": 48, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(ids, **{**settings, **given})


@pytest.mark.parametrize(
    "family, beams, cache",
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in itertools.product((*CAUSAL, *ENCODER_DECODER), (1, 3), ("dynamic", "static"))
        if case[::2] != ("DeepSeek-V4", "static")  # transformers has no static cache for it
    ],
)
def test_the_same_tokens(family, beams, cache):
    ids = tokens()
    given = {"attention_mask": padding(), "num_beams": beams, "cache_implementation": cache}
    eager, ours = both(family, lambda model: generated(model, ids, **given))
    assert torch.equal(ours, eager)


def test_layers_that_share_keys_compute_the_last_token_alone():
    """Gemma 4 takes the last row of the prompt's mask."""
    config = transformers.Gemma4TextConfig(
        **{**DECODER, "num_hidden_layers": 4},
        num_kv_shared_layers=2,
        global_head_dim=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=WINDOW,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=8,
    )
    model, ids = transformers.Gemma4ForCausalLM(config).eval(), tokens()
    given = {"attention_mask": padding(), "max_new_tokens": 2}
    found = []
    for implementation in ("eager", NAME):
        model.set_attn_implementation(implementation)
        found.append(generated(model, ids, output_scores=True, return_dict_in_generate=True, **given))
    for eager, ours in zip(*(each.scores for each in found), strict=True):
        torch.testing.assert_close(ours, eager, rtol=0, atol=1e-5)


def test_assisted_decoding():
    ids, assistant = tokens(batch=1), model_of("Gemma 2", num_hidden_layers=1)
    assistant.set_attn_implementation(NAME)
    eager, ours = both("Gemma 2", lambda model: generated(model, ids, assistant_model=assistant))
    assert torch.equal(ours, eager)


@pytest.mark.parametrize("chunk", [40, 16])
@pytest.mark.parametrize("cache", [DynamicCache, StaticCache])
@pytest.mark.parametrize("family", ["Llama", "Gemma 2"])
def test_a_prompt_in_chunks(family, cache, chunk):
    """A static cache counts in place how far it is filled, between a step's mask and the layers that read it."""
    ids = tokens(length=80)

    @torch.no_grad()
    def prefill(model):
        room = {"max_cache_len": 100} if cache is StaticCache else {}
        past = cache(config=model.config, **room)
        return torch.cat([model(part, past_key_values=past).logits for part in ids.split(chunk, 1)], 1)

    eager, ours = both(family, prefill)
    torch.testing.assert_close(ours, eager, rtol=0, atol=1e-5)


def test_the_example(capsys):
    runpy.run_path(str(ROOT / "examples/huggingface.py"))["main"](["--steps", "20"])
    shown = capsys.readouterr().out
    (apart,) = re.findall(r"losses at most (\S+) apart; the same tokens: True", shown)
    assert float(apart) < 1e-5


class Rounded(DynamicCache):
    """Keeps keys and values in 8 bits; hands them out in `dtype`."""

    dtype = torch.float8_e4m3fn

    def update(self, key, value, *args, **kwargs):
        narrow = (t.to(torch.float8_e4m3fn) for t in (key, value))
        return tuple(t.to(self.dtype) for t in super().update(*narrow, *args, **kwargs))


class Widened(Rounded):
    dtype = torch.float32


def test_caches_of_8_bits():
    model, ids = model_of("Llama"), tokens()
    model.set_attn_implementation(NAME)
    options = {"max_new_tokens": 8, "do_sample": False}
    got, want = (model.generate(ids, past_key_values=kind(), **options) for kind in (Rounded, Widened))
    assert torch.equal(got, want)
    with torch.no_grad():
        logits = [model(ids, past_key_values=kind()).logits for kind in (Rounded, Widened)]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
    with pytest.raises(FlexError, match="float8_e4m3fn"):
        model(ids, past_key_values=Rounded())
