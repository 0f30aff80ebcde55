"""Small models with random weights, in files as vLLM reads them, and what transformers generates with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 256
_COMMON: dict[str, Any] = {"vocab_size": VOCAB, "eos_token_id": VOCAB - 1, "bos_token_id": VOCAB - 2}
_SMALL: dict[str, Any] = {
    **_COMMON,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
}


def llama(**changed: Any) -> Any:
    return transformers.LlamaConfig(**{**_SMALL, "pad_token_id": None, **changed})


def gemma() -> Any:
    """Windows in every second layer, and capped scores."""
    return transformers.Gemma2Config(
        **{**_SMALL, "num_hidden_layers": 4},
        pad_token_id=0,
        sliding_window=48,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=30.0,
        query_pre_attn_scalar=32,
    )


def gpt_oss() -> Any:
    """Sinks, windows and experts."""
    return transformers.GptOssConfig(
        **{**_SMALL, "num_hidden_layers": 4},
        pad_token_id=None,
        sliding_window=48,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )


def bloom() -> Any:
    """ALiBi."""
    return transformers.BloomConfig(
        **_COMMON, hidden_size=128, n_layer=3, n_head=4, pad_token_id=None, initializer_range=0.2
    )


def save(config: Any, folder: Path) -> Any:
    """The model, saved in the folder."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.uniform_(0, 4)
    model.save_pretrained(folder)
    return model


def prompts(lengths: list[int], seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB - 2, (n,), generator=generator).tolist() for n in lengths]


@torch.no_grad()
def generated(model: Any, prompt: list[int], count: int, mask: Any = None) -> list[int]:
    """Greedily, without a cache; `mask(q, kv)` says which tokens see which, causal by default."""
    tokens = list(prompt)
    for _ in range(count):
        at = torch.arange(len(tokens))
        given = {}
        if mask is not None:
            seen = mask(at[:, None], at)
            given["attention_mask"] = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)[None, None]
        logits = model(torch.tensor([tokens]), use_cache=False, **given).logits[0, -1]
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]
