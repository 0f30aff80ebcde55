"""Tokens of small models, by this backend, by vLLM's own and by transformers."""

from __future__ import annotations

import pytest
import torch

from flex_inductor import Sequences
from flex_inductor.integrations import vllm as integration
from flex_inductor.sequences.repeated import Repeated
from tests.integrations.vllm.engines import engine, tokens_of
from tests.integrations.vllm.models import bloom, gemma, generated, gpt_oss, llama, prompts, save

LENGTHS = [5, 40, 1, 130, 17, 64, 300, 2]


@pytest.mark.parametrize("make", [llama, gemma, gpt_oss, bloom])
def test_tokens(make, tmp_path, calls):
    model = save(make(), tmp_path)
    asked = prompts(LENGTHS)
    with engine(tmp_path, ours=False) as llm:
        own = tokens_of(llm, asked)
    assert not calls
    with engine(tmp_path, ours=True) as llm:
        calls.clear()  # of the start
        ours = tokens_of(llm, asked)
    assert ours == own
    assert ours == [generated(model, prompt, 12) for prompt in asked]
    layers = model.config.num_hidden_layers
    assert sum(calls) == layers * sum(n + 11 for n in LENGTHS)  # each token in each layer, once
    assert max(calls) == sum(LENGTHS)  # all prompts in one call


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A folder with a Llama, and the model."""
    folder = tmp_path_factory.mktemp("llama")
    return folder, save(llama(), folder)


def test_shared_prefixes_in_chunks(small, calls):
    """Prompts of more tokens than a step has, most of which have the same first two pages."""
    folder, model = small
    first, *rest = prompts([70, 9, 150, 33, 1, 200])
    asked = [*(first + more for more in rest), first, rest[2]]
    options = {"block_size": 32, "max_num_batched_tokens": 64, "enable_chunked_prefill": True}
    with engine(folder, ours=True, **options) as llm:
        calls.clear()
        found = [tokens_of(llm, asked) for _ in range(2)]
    assert found == [[generated(model, prompt, 12) for prompt in asked]] * 2
    assert max(calls) == 64
    written = sum(calls) // model.config.num_hidden_layers
    assert written < 2 * sum(len(prompt) + 11 for prompt in asked) - 2 * 64 * 4  # pages were shared


def test_compiled_model(small, calls):
    """As vLLM runs it by default: with torch.compile around the attention of each layer."""
    folder, model = small
    asked = prompts([20, 3])
    with engine(folder, ours=True, enforce_eager=False) as llm:
        calls.clear()
        assert tokens_of(llm, asked) == [generated(model, prompt, 12) for prompt in asked]
    assert calls


@pytest.mark.parametrize("narrow", ["bfloat16", "float16"])
def test_16_bits(small, narrow):
    """Logits then have ties. The tokens agree as far with those of float32 as vLLM's own do."""
    folder, _ = small
    asked = prompts(LENGTHS)
    found = {}
    for name, ours, dtype in (("exact", False, "float32"), ("own", False, narrow), ("ours", True, narrow)):
        with engine(folder, ours=ours, dtype=dtype) as llm:
            found[name] = [t for request in tokens_of(llm, asked, 4) for t in request]
    agree = {name: sum(map(int.__eq__, found[name], found["exact"])) for name in ("own", "ours")}
    assert agree["ours"] >= agree["own"] - 3 and agree["ours"] > 16


def test_layers_that_share_a_cache():
    """The second writes nothing, and reads what the first has written."""
    layers = [integration.Layer(4, 32, 1.0, 2, kv_sharing_target_layer_name=name) for name in (None, "first")]
    cache = torch.zeros(4, 16, 2, 64).transpose(1, 2)
    starts, used, pages = (torch.tensor(n, dtype=torch.int32) for n in ([0, 3], [3], [[2]]))
    sequences = Sequences(starts, used_k=used, pages=pages, page_size=16)
    metadata = integration.Metadata(sequences, True)
    metadata.slots = torch.tensor([32, 33, 34])
    q, *others = torch.randn(5, 3, 4, 32)
    out = []
    for layer, k, v in zip(layers, others[:2], others[2:], strict=True):
        layer.attend = Repeated(None, 1.0)
        out.append(torch.zeros(3, 4, 32))
        layer.forward(None, q, k[:, :2], v[:, :2], cache, metadata, out[-1])
    assert torch.equal(*out) and out[0].count_nonzero()
