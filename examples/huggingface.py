"""Fine-tune a tiny Llama with attn_implementation="flex_inductor" on packed documents, then generate.

A model that was trained with its own attention and saved is loaded with ours and learns something else; the same with
its own attention is beside it. Prints losses and times of both, and whether they generate the same tokens.
"""

from __future__ import annotations

import argparse
import tempfile
import time

import torch
from rich.progress import track
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import flex_inductor.integrations.transformers  # noqa: F401, makes the attention known

VOCAB, LENGTH = 64, 256
CONFIG = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    pad_token_id=0,
    attn_implementation="eager",
)


def packed(stride: int) -> dict[str, Tensor]:
    """Documents that count by `stride`. Positions that begin anew tell transformers where one begins."""
    first = int(torch.randint(32, LENGTH - 32, ()))
    positions = torch.cat([torch.arange(first), torch.arange(LENGTH - first)])[None]
    starts = torch.randint(VOCAB, (2,)).repeat_interleave(torch.tensor([first, LENGTH - first]))
    ids = (starts + positions * stride) % (VOCAB - 1) + 1
    return {"input_ids": ids, "position_ids": positions, "labels": ids}


def train(model: PreTrainedModel, stride: int, steps: int, name: str) -> list[float]:
    """The losses of the steps."""
    torch.manual_seed(stride)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in track(range(steps), name):
        loss = model(**packed(stride), use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a tiny Llama.")
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    losses, tokens = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        model = LlamaForCausalLM(CONFIG)
        print(f"trained to count by 1: loss {train(model, 1, given.steps, 'training')[-1]:.3f}")
        model.save_pretrained(folder)
        for name in ("eager", "flex_inductor"):
            tuned = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=name)
            start = time.perf_counter()
            losses[name] = train(tuned, 3, given.steps, f"fine-tuning, {name}")
            print(
                f"{name}: to count by 3, loss {losses[name][0]:.3f} at first and {losses[name][-1]:.3f} at last, "
                f"in {time.perf_counter() - start:.1f} s"
            )
            prompt = packed(3)["input_ids"][:, :20]
            tokens[name] = tuned.eval().generate(
                prompt, max_new_tokens=20, do_sample=False, eos_token_id=None
            )
    apart = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
    print(f"losses at most {apart:.1e} apart; the same tokens: {torch.equal(*tokens.values())}")


if __name__ == "__main__":
    main()
