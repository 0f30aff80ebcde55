"""Under `accelerate launch`: a tiny Llama trains on this process's part of the batches, with the attention named."""

import json
import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import flex_inductor.integrations.transformers  # noqa: F401
from flex_inductor import decisions, set_eager_kernels
from tests.integrations.families import DECODER, LENGTH, VOCAB


def main(attention):
    set_eager_kernels("always")
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**DECODER, attn_implementation=attention))
    tokens = torch.randint(1, VOCAB, (24, LENGTH))
    tokens[::2, 30:] = 0  # padding
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 0.3), DataLoader(tokens, batch_size=2)
    )
    losses = []
    for ids in loader:
        given = {"attention_mask": (ids != 0).long(), "labels": ids.masked_fill(ids == 0, -100)}
        loss = model(input_ids=ids, **given).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).tolist())
    if accelerator.is_main_process:
        print(json.dumps({"losses": losses, "served": sorted({decision.chosen for decision in decisions()})}))


main(sys.argv[1])
