"""Tiny models of transformers with their batches: right ones, and for each law one that breaks it."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import flex_inductor.integrations.transformers  # noqa: F401  makes the attention known

TOKENS, WORDS = 48, 50
POSITIONS = torch.cat([torch.arange(20), torch.arange(28)])


def llama(implementation="sdpa", layers=2):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    # Far from 0, so that what a token sees shows in its logits.
    config = LlamaConfig(
        vocab_size=WORDS,
        num_hidden_layers=layers,
        initializer_range=0.2,
        attn_implementation=implementation,
        **sizes,
    )
    return LlamaForCausalLM(config)


def tokens(rows=1):
    return torch.randint(WORDS, (rows, TOKENS), generator=torch.Generator().manual_seed(0))


def packed(**more):
    return {"input_ids": tokens(), "position_ids": POSITIONS[None], "use_cache": False, **more}


def padded(rows=2):
    mask = torch.ones(rows, TOKENS, dtype=torch.long)
    mask[0, 40:] = 0
    return {"input_ids": tokens(rows), "attention_mask": mask}


def right():
    return llama("flex_inductor"), packed()


def with_a_cache():
    """transformers does not look for documents beside a cache."""
    return llama(), {**packed(), "use_cache": True}


def with_a_mask():
    """Nor beside an attention_mask."""
    return llama("eager"), packed(attention_mask=torch.ones(1, TOKENS, dtype=torch.long))


def lengths_unread():
    """sdpa reads no cu_seq_lens."""
    ends = torch.tensor([0, 20, 48], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 28, "max_length_k": 28}
    return llama(), {"input_ids": tokens(), **lengths}


def ids_in_the_mask():
    """A mask of 1 and 2 is one of True to transformers."""
    return llama(), {"input_ids": tokens(), "attention_mask": (torch.arange(TOKENS) >= 20)[None].long() + 1}


def mask_dropped():
    class Careless(LlamaForCausalLM):
        def forward(self, attention_mask=None, **given):
            return super().forward(**given)

    model = llama()
    model.__class__ = Careless
    batch = padded()
    batch["attention_mask"] = batch["attention_mask"].flip(1)  # left, where causal masks hide nothing
    return model, batch


class Centred(torch.nn.Module):
    """A norm by a statistic of the whole batch."""

    def forward(self, x):
        return x - x.mean(0, keepdim=True) / 2


def mixed_rows():
    model = llama()
    model.model.norm = Centred()
    return model, padded()


class HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        return grad / 2


class Halved(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.silu(HalfGradient.apply(x))


def wrong_gradient():
    model = llama()
    model.model.layers[1].mlp.act_fn = Halved()
    return model, packed()


class OtherCompiled(torch.nn.Module):
    def forward(self, x):
        return x * 2 if torch.compiler.is_compiling() else x


def otherwise_compiled():
    model = llama("flex_inductor", layers=1)
    model.model.norm = OtherCompiled()
    return model, packed()
