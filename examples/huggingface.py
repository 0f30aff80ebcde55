"""A tiny Llama and a tiny gpt-oss with attn_implementation="flex_inductor": packed training, then generate.

Both are made from configs on the spot. Prints the loss next to that of the models' own eager attention, the times of
both, which route served each attention call, and whether the same tokens are generated.
"""

from __future__ import annotations

import time

import torch
from rich.console import Console
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import flex_inductor
import flex_inductor.integrations.transformers  # makes the attention known

VOCAB, LENGTH, STEPS = 64, 512, 5
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64}
console = Console(highlight=False)


def packed(lengths: tuple[int, ...]) -> dict[str, Tensor]:
    """Documents one after the other: positions that begin anew are how transformers knows."""
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    ids = torch.randint(1, VOCAB, positions.shape)
    return {"input_ids": ids, "position_ids": positions, "labels": ids}


def train(model: PreTrainedModel, batches: list[dict[str, Tensor]]) -> tuple[list[float], float]:
    """The losses, and the seconds that the steps after the first took."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    start = 0.0
    for batch in batches:
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        start = start or time.perf_counter()
    return losses, time.perf_counter() - start


def show(make, config) -> None:
    batches = [packed((200, 100, 212)), *(packed((12, 500)) for _ in range(STEPS))]
    prompt = torch.randint(1, VOCAB, (2, 60))
    losses, tokens = {}, {}
    console.print(f"\n[bold]{make.__name__}[/]")
    for implementation in ("eager", "flex_inductor"):
        torch.manual_seed(0)
        config._attn_implementation = implementation
        model = make(config)
        losses[implementation], seconds = train(model, batches)
        last = losses[implementation][-1]
        console.print(
            f"{implementation:14} {STEPS} steps after the first in {seconds:.2f} s, loss {last:.4f}"
        )
        start = time.perf_counter()
        tokens[implementation] = model.eval().generate(
            prompt, max_new_tokens=40, do_sample=False, eos_token_id=None
        )
        console.print(f"{implementation:14} 40 tokens for 2 prompts in {time.perf_counter() - start:.2f} s")
    apart = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
    console.print(f"losses at most {apart:.1e} apart; the same tokens: {torch.equal(*tokens.values())}")


def main() -> None:
    torch.manual_seed(0)
    flex_inductor.decisions(clear=True)
    show(LlamaForCausalLM, LlamaConfig(**SIZES))
    show(GptOssForCausalLM, GptOssConfig(**SIZES, **EXPERTS))
    console.print("\n[bold]Decisions[/]")
    for decision in dict.fromkeys(map(str, flex_inductor.decisions())):
        console.print(decision, markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
