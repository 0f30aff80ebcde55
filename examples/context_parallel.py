"""Train a small transformer on packed documents whose tokens lie on several ranks.

    torchrun --nproc-per-node 4 examples/context_parallel.py

On CPU with gloo, or on GPUs with nccl where torch finds them (which was not tried: none was at hand). One layer
attends within documents, with a learnt bias of the distance; the other has a window. Prints the loss beside that of one
process on the whole sequence, and what a step sends by each method.
"""

from __future__ import annotations

import copy
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from flex_inductor import context_parallel, create_block_mask, flex_attention

LENGTH, VOCAB, WIDTH, HEADS, WINDOW, STEPS, BLOCK = 1024, 64, 64, 4, 64, 8, 32


class Attention(nn.Module):
    def __init__(self, learns_bias: bool):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.zeros(HEADS, LENGTH)) if learns_bias else None

    def forward(self, x: Tensor, mask) -> Tensor:
        def by_distance(score, b, h, q_idx, kv_idx):  # of the whole sequence, wherever its tokens are
            return score + self.bias[h, q_idx - kv_idx]

        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        score_mod = None if self.bias is None else by_distance
        return self.out(flex_attention(q, k, v, score_mod, block_mask=mask).transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.attention = nn.ModuleDict({"documents": Attention(True), "window": Attention(False)})
        self.norm = nn.ModuleDict({name: nn.LayerNorm(WIDTH) for name in self.attention})
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, positions: Tensor, masks: dict) -> Tensor:
        x = self.tokens(tokens) + self.positions(positions)
        for name, attention in self.attention.items():
            x = x + attention(self.norm[name](x), masks[name])
        return self.head(x)


def batch(step: int, device: str) -> tuple[Tensor, dict]:
    """Documents that count, each by steps of its own, and the masks of the two layers."""
    generator = torch.Generator().manual_seed(step)
    ends = torch.randint(0, LENGTH, (12,), generator=generator).sort().values
    document = torch.bucketize(torch.arange(LENGTH), ends, right=True)
    stride = torch.randint(1, 8, (13,), generator=generator)[document]
    tokens = (torch.arange(LENGTH) * stride % VOCAB)[None].to(device)
    document = document.to(device)

    def documents(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (document[q_idx] == document[kv_idx])

    def window(b, h, q_idx, kv_idx):
        return documents(b, h, q_idx, kv_idx) & (q_idx - kv_idx < WINDOW)

    masks = {"documents": documents, "window": window}
    return tokens, {
        name: create_block_mask(mod, None, None, LENGTH, LENGTH, device, BLOCK, compact=True)
        for name, mod in masks.items()
    }


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    ranks, first = dist.get_world_size(), dist.get_rank() == 0
    group = init_device_mesh(device, (ranks,), mesh_dim_names=("cp",))["cp"]
    cp = context_parallel(group)

    torch.manual_seed(0)
    model = Transformer().to(device)
    alone = copy.deepcopy(model)
    optimizer, of_alone = (torch.optim.SGD(m.parameters(), 0.5) for m in (model, alone))
    positions = torch.arange(LENGTH, device=device)[None]
    for step in range(STEPS):
        tokens, masks = batch(step, device)
        planned = cp.plan(masks)  # a data loader's worker may do it
        mine, where = cp.shard((tokens, positions), 1)
        labels = cp.next_tokens(tokens)
        logits = model(mine, where, planned)
        # The mean over the labels of all ranks. FSDP and DDP take the mean of the ranks' gradients: there, times ranks.
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (LENGTH - 1)
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            if parameter.grad is None:  # of a rank without tokens
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
        optimizer.step()
        loss = loss.detach()
        dist.all_reduce(loss)

        if first:
            expected = F.cross_entropy(alone(tokens, positions, masks)[0, :-1], tokens[0, 1:])
            of_alone.zero_grad()
            expected.backward()
            of_alone.step()
            print(f"step {step}: loss {loss:.6f}, of one process {expected:.6f}")
            torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-5)

    if first:
        print(f"\nKiB that rank 0 of {ranks} sends for one attention, forward and backward:")
    heads = torch.empty(1, HEADS, mine.size(1), WIDTH // HEADS, device=device)
    for method in ("all_gather", "ring", "ulysses", "cast"):
        for balance in ("head_tail", "auto"):
            other = context_parallel(group, method, balance)
            sent = {name: mask.bytes_sent(heads, heads, heads) for name, mask in other.plan(masks).items()}
            if first:
                sizes = ", ".join(
                    f"{name} {s.forward / 1024:.0f} and {s.backward / 1024:.0f}" for name, s in sent.items()
                )
                print(f"  {method:10} {balance:10} {sizes}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
