"""Mods that vLLM cannot have itself, and what is refused at start-up."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import transformers
import vllm

from flex_inductor.errors import FlexNotImplementedError, FlexValueError
from flex_inductor.integrations import vllm as integration
from flex_inductor.masks import library
from tests.integrations.vllm.engines import engine, tokens_of
from tests.integrations.vllm.models import generated, llama, prompts, save

LENGTHS = [5, 40, 12, 130]
PREFIX = 24


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return folder, save(llama(), folder)


def test_prefix_lm(small, mods):
    """The first tokens see each other in both directions, as transformers' eager attention has it by a mask."""
    folder, model = small
    asked = prompts([30, 40, 130, 64])
    mods("LlamaForCausalLM", mask_mod=library.prefix_lm(PREFIX), causal=False)
    options = {"enable_prefix_caching": False, "enable_chunked_prefill": False}
    with engine(folder, ours=True, **options) as llm:
        found = tokens_of(llm, asked)
    assert found == [generated(model, p, 12, lambda q, kv: (kv <= q) | (kv < PREFIX)) for p in asked]
    assert found != [generated(model, p, 12) for p in asked]


def test_mask_of_some_layers(small, mods, calls):
    """A mask that no window describes, in one layer, beside the causal one. Chunks, pages and decoding."""
    folder, model = small
    asked = prompts(LENGTHS)

    def strided(b, h, q_idx, kv_idx):
        return ((q_idx - kv_idx) % 3 == 0) | (kv_idx < 2)

    mods(r"layers\.1\.", mask_mod=strided)
    with engine(folder, ours=True, max_num_batched_tokens=64, block_size=16) as llm:
        found = tokens_of(llm, asked)

    def masked(module, query, key, value, attention_mask, **kwargs):
        at = torch.arange(query.size(2))
        seen = at <= at[:, None]
        if module.layer_idx == 1:
            seen = seen & strided(0, 0, at[:, None], at)
        attention_mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)[None, None]
        return transformers.models.llama.modeling_llama.eager_attention_forward(
            module, query, key, value, attention_mask, **kwargs
        )

    transformers.AttentionInterface.register("strided_in_one_layer", masked)
    model.set_attn_implementation("strided_in_one_layer")
    wanted = [generated(model, p, 12) for p in asked]
    model.set_attn_implementation("eager")
    assert found == wanted
    assert found != [generated(model, p, 12) for p in asked]


def test_score_mod_with_a_table(small, mods):
    """A bias by head and distance, in every layer; its table may change in place."""
    folder, model = small
    asked = prompts(LENGTHS)
    table = torch.randn(4, 512, generator=torch.Generator().manual_seed(2))
    mods("LlamaForCausalLM", score_mod=lambda score, b, h, q_idx, kv_idx: score + table[h, q_idx - kv_idx])
    with engine(folder, ours=True) as llm:
        found = [tokens_of(llm, asked)]
        table.mul_(-1)
        llm.reset_prefix_cache()
        found.append(tokens_of(llm, asked))

    def biased(module, query, key, value, attention_mask, **kwargs):
        at = torch.arange(query.size(2))
        bias = table[:, (at[:, None] - at).clamp(min=0)].masked_fill(at > at[:, None], -torch.inf)
        return transformers.models.llama.modeling_llama.eager_attention_forward(
            module, query, key, value, bias[None], **kwargs
        )

    transformers.AttentionInterface.register("biased", biased)
    model.set_attn_implementation("biased")
    after = [generated(model, p, 12) for p in asked]
    table.mul_(-1)
    wanted = [[generated(model, p, 12) for p in asked], after]
    model.set_attn_implementation("eager")
    assert found == wanted
    assert found[0] != found[1]


def test_of_several_patterns_the_last_counts(small, mods):
    folder, _ = small
    first, last = (lambda score, b, h, q, kv, n=n: score * n for n in (2.0, 1.0))
    mods("Llama", score_mod=first)
    mods(r"layers\.[12]", score_mod=last)
    mods("Mistral", score_mod=None, mask_mod=library.causal())
    with engine(folder, ours=True) as llm:
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        assert [layer.impl.mods.score_mod for layer in layers] == [first, last, last]


def test_heads_of_a_part_of_the_model(small, mods, monkeypatch):
    """Where processes share the heads of a model, mods see those of the whole."""
    monkeypatch.setattr(integration, "get_tensor_model_parallel_rank", lambda: 1)
    folder, _ = small
    mods("Llama", score_mod=lambda score, b, h, q, kv: score + h, mask_mod=lambda b, h, q, kv: h == 5)
    with engine(folder, ours=True) as llm:
        layers = list(llm.llm_engine.vllm_config.compilation_config.static_forward_context.values())
        at = [torch.tensor(n) for n in (0, 1, 9, 9)]
        for layer in layers:
            assert layer.impl.mods.score_mod(torch.tensor(0.0), *at) == 5
            assert layer.impl.mods.mask_mod(*at)
        assert len({layer.impl.mods.mask_mod for layer in layers}) == 1  # and so one mask for all


@pytest.mark.parametrize("option", ["enable_prefix_caching", "enable_chunked_prefill"])
def test_not_causal_needs_whole_prompts(small, mods, option):
    folder, _ = small
    mods("Llama", mask_mod=library.prefix_lm(PREFIX), causal=False)
    options = {"enable_prefix_caching": False, "enable_chunked_prefill": False, option: True}
    with (
        pytest.raises(
            FlexNotImplementedError, match=rf"register_mods\('Llama', causal=False\).*{option}=True"
        ),
        engine(folder, ours=True, **options),
    ):
        pass


def test_table_shorter_than_requests(small, mods):
    """At start-up, not in the first request that is as long."""
    folder, _ = small
    table = torch.zeros(511)
    mods("Llama", score_mod=lambda score, b, h, q_idx, kv_idx: score + table[kv_idx])
    with pytest.raises(IndexError, match="out of bounds"), engine(folder, ours=True):
        pass


def test_mod_that_no_kernel_has(small, mods):
    folder, _ = small
    mods("Llama", score_mod=lambda score, b, h, q_idx, kv_idx: score.item())
    with pytest.raises(Exception, match="score_mod"), engine(folder, ours=True):
        pass


@pytest.mark.parametrize(
    "options, words",
    [
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype: vLLM asks for fp8"),
        (
            {"kv_cache_dtype": "bfloat16"},
            "kv_cache_dtype: vLLM asks for a cache in torch.bfloat16 beside torch.float32",
        ),
        ({"block_size": 24}, r"No common block size for 24 \(FLEX_INDUCTOR: \[MultipleOf\(16\)\]\)"),
    ],
)
def test_refused_options(small, options, words):
    folder, _ = small
    with (
        pytest.raises((FlexNotImplementedError, ValueError), match=words),
        engine(folder, ours=True, **options),
    ):
        pass


def test_refused_models(tmp_path):
    config = transformers.DeepseekV2Config(
        vocab_size=256, hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=64, qk_rope_head_dim=32, qk_nope_head_dim=32,
        v_head_dim=32, first_k_dense_replace=1, n_routed_experts=2, n_shared_experts=1, moe_intermediate_size=64,
        eos_token_id=1, bos_token_id=2,
    )  # fmt: skip
    save(config, tmp_path)
    with (
        pytest.raises(FlexNotImplementedError, match="MLA: vLLM asks for a model with latent attention"),
        engine(tmp_path, ours=True),
    ):
        pass


@pytest.mark.parametrize("attn_type", ["encoder_decoder", "encoder_only", "encoder"])
def test_refused_kinds_of_attention(attn_type):
    with pytest.raises(FlexNotImplementedError, match=f"attn_type: vLLM asks for {attn_type} attention"):
        integration.Layer(4, 32, 1.0, attn_type=attn_type)


def test_refused_arguments_of_layers():
    with pytest.raises(FlexNotImplementedError, match="chunk_lookback: vLLM asks for 3"):
        integration.Layer(4, 32, 1.0, chunk_lookback=3)


def test_other_versions_of_vllm(monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.33.1")
    with pytest.raises(FlexNotImplementedError, match=r"vllm 0.33.1: .* 0.32 alone"):
        integration.register()


@pytest.mark.parametrize(
    "pattern, mod, words",
    [
        ("(", None, r"pattern: expected a regular expression, got '\('"),
        (3, None, "pattern: expected a regular expression, got 3"),
        ("Llama", "causal", "score_mod: expected a function, got 'causal'"),
    ],
)
def test_wrong_arguments(pattern, mod, words, mods):
    with pytest.raises(FlexValueError, match=words):
        mods(pattern, score_mod=mod)


def test_mods_of_another_process():
    """A process that vLLM starts does not have the mods that this one has registered: it says so if it makes layers."""
    load = "from flex_inductor.integrations.vllm_plugin import load; load()"
    layers = "from flex_inductor.integrations.vllm import FlexInductorBackend as B; B.get_impl_cls()"
    env = {**os.environ, "FLEX_INDUCTOR_VLLM": "1", integration._EXPECTED: "Llama\nlayers"}

    def errors_of(code, env):
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
        assert bool(done.returncode) == ("Traceback" in done.stderr)
        return done.stderr if done.returncode else None

    found = errors_of(f"{load}\n{layers}", env)
    assert "register_mods: 'Llama', 'layers': registered in the process that started" in found
    assert errors_of(load, env) is None
    assert errors_of(load, {**env, "FLEX_INDUCTOR_VLLM": "0"}) is None  # not asked
