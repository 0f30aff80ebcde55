"""Tiny models of transformers' families, from configs made on the spot, and what they are called with."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

VOCAB, LENGTH = 99, 48  # more tokens than a plain mask is for
WINDOW = 16

DECODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "attention_dropout": 0.0,
}
ENCODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
BOTH_WINDOWS = ["sliding_attention", "full_attention"]
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}

CAUSAL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "Llama 4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            **EXPERTS,
            "attention_chunk_size": WINDOW,
            "intermediate_size_mlp": 48,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
        },
    ),
    "Gemma 2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {"sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    ),
    "Gemma 3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {"sliding_window": WINDOW, "layer_types": BOTH_WINDOWS, "query_pre_attn_scalar": 8},
    ),
    "Mistral": ("MistralForCausalLM", "MistralConfig", {"sliding_window": WINDOW}),
    "Qwen 2": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": BOTH_WINDOWS},
    ),
    "Qwen 3": ("Qwen3ForCausalLM", "Qwen3Config", {}),
    "gpt-oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {**EXPERTS, "sliding_window": WINDOW, "layer_types": BOTH_WINDOWS},
    ),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", LATENT),
    # These compute with their masks.
    "DeepSeek-V3.2": (
        "DeepseekV32ForCausalLM",
        "DeepseekV32Config",
        {**LATENT, "index_topk": 8, "index_n_heads": 4, "index_head_dim": 16},
    ),
    "DeepSeek-V4": (
        "DeepseekV4ForCausalLM",
        "DeepseekV4Config",
        {
            **EXPERTS,
            "num_key_value_heads": 1,
            "n_routed_experts": 4,
            "moe_intermediate_size": 16,
            "q_lora_rank": 16,
            "o_lora_rank": 16,
            "o_groups": 2,
            "qk_rope_head_dim": 4,
            "sliding_window": WINDOW,
            "index_topk": 8,
            "index_n_heads": 4,
            "index_head_dim": 16,
            "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
        },
    ),
    "Doge": ("DogeForCausalLM", "DogeConfig", {"keep_window_size": 2 * WINDOW}),
}
SEQUENCES = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 128,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
}
OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ModernBERT": (
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {
            **ENCODER,
            "local_attention": WINDOW,
            "global_attn_every_n_layers": 2,
            "attention_dropout": 0.0,
            "pad_token_id": 0,
        },
    ),
    "BERT": (
        "BertForMaskedLM",
        "BertConfig",
        {**ENCODER, "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0},
    ),
    "BART": ("BartForConditionalGeneration", "BartConfig", SEQUENCES),
    # Its encoder adds the mask to scores itself.
    "BigBird-Pegasus": (
        "BigBirdPegasusForConditionalGeneration",
        "BigBirdPegasusConfig",
        {**SEQUENCES, "attention_type": "original_full"},
    ),
    "T5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCAB,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
        },
    ),
    "ViT": (
        "ViTForImageClassification",
        "ViTConfig",
        {
            **{name: size for name, size in ENCODER.items() if name != "vocab_size"},
            "image_size": 48,
            "patch_size": 8,
            "num_labels": 10,
            "attention_probs_dropout_prob": 0.0,
            "hidden_dropout_prob": 0.0,
        },
    ),
}
FAMILIES = CAUSAL | OTHERS
ENCODER_DECODER = ("BART", "BigBird-Pegasus", "T5")


def model_of(family: str, **changed: Any) -> Any:
    """Its parameters are large enough for attention to matter."""
    cls, config, own = FAMILIES[family]
    given = {**(DECODER if family in CAUSAL else {}), **own, **changed}
    model = getattr(transformers, cls)(getattr(transformers, config)(**given))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.25)
            elif "sinks" in name:
                parameter.normal_()
    return model.eval()


def tokens(batch: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(1, VOCAB, (batch, length))


def padding(length: int = LENGTH, *, left: bool = True) -> Tensor:
    """For two sequences, the first of which is shorter."""
    mask = torch.ones(2, length, dtype=torch.int64)
    mask[0, : length // 3] = 0
    return mask if left else mask.flip(1)


def positions() -> Tensor:
    """Two batches of documents."""
    rows = [[20, 1, 27], [10, 38]]
    return torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in rows])


def inputs(family: str, form: str) -> dict[str, Any]:
    """What a model is called with: plain, padded or packed."""
    if family == "ViT":
        return {"pixel_values": torch.randn(2, 3, 48, 48)}
    given: dict[str, Any] = {"input_ids": tokens()}
    if family in ENCODER_DECODER:
        given["decoder_input_ids"] = tokens(length=40)
    if form == "padded":
        given["attention_mask"] = padding(left=family in CAUSAL)
    if form == "packed":
        # With a cache, transformers looks for no documents.
        given |= {"position_ids": positions(), "use_cache": False}
    return given
