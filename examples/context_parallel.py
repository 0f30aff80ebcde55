"""Train a small transformer on packed documents whose tokens lie on several ranks.

    torchrun --nproc-per-node 4 examples/context_parallel.py

On CPU with gloo, or on GPUs with nccl where torch finds them (not tried: none was at hand). One layer attends within
documents, the other to a window in them, both with a learnt bias of the distance. Prints the loss beside that of one
process on the whole sequence, and what each method would send.
"""

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from flex_inductor import and_masks, context_parallel, create_block_mask, flex_attention, masks, mods

LENGTH, VOCAB, WIDTH, HEADS, WINDOW, STEPS = 1024, 64, 64, 4, 64, 8
LAYERS = ("documents", "window")


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.qkv = nn.ModuleDict({name: nn.Linear(WIDTH, 3 * WIDTH) for name in LAYERS})
        self.bias = nn.ParameterDict({name: torch.zeros(HEADS, 2 * LENGTH - 1) for name in LAYERS})
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, positions: Tensor, layer_masks: dict) -> Tensor:
        x = self.tokens(tokens) + self.positions(positions)
        for name in LAYERS:
            qkv = self.qkv[name](F.layer_norm(x, (WIDTH,)))
            q, k, v = qkv.unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            # Distances are those in the whole sequence, wherever its tokens are.
            by_distance = mods.relative_bias(self.bias[name])
            x = x + flex_attention(q, k, v, by_distance, layer_masks[name]).transpose(1, 2).flatten(2)
        return self.head(x)


def batch(step: int, device: str) -> tuple[Tensor, dict]:
    """Documents that count, each by steps of its own, and the masks of the two layers."""
    torch.manual_seed(step)  # the same on all ranks
    document = (torch.rand(LENGTH, device=device) < 0.01).cumsum(0)
    tokens = (torch.arange(LENGTH, device=device) * (1 + document % 7) % VOCAB)[None]
    own = masks.document(document)
    near = and_masks(own, masks.sliding_window(WINDOW))
    sizes = (None, None, LENGTH, LENGTH, device, 32)  # blocks of 32 tokens
    return tokens, {"documents": create_block_mask(own, *sizes), "window": create_block_mask(near, *sizes)}


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group()  # nccl or gloo
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    group = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("cp",))["cp"]
    cp, first = context_parallel(group), dist.get_rank() == 0
    torch.manual_seed(0)
    model = Transformer().to(device)
    alone = copy.deepcopy(model)
    optimizer = torch.optim.SGD([*model.parameters(), *alone.parameters()], 0.5)
    for parameter in model.parameters():  # a rank without tokens computes none
        parameter.grad = torch.zeros_like(parameter)
    positions = torch.arange(LENGTH, device=device)[None]
    for step in range(STEPS):
        tokens, layer_masks = batch(step, device)
        planned = cp.plan(layer_masks)  # a data loader's worker may do it
        mine, where = cp.shard((tokens, positions), 1)
        logits, labels = model(mine, where, planned), cp.next_tokens(tokens)
        loss = F.cross_entropy(logits[0], labels[0], reduction="sum") / (LENGTH - 1)  # of all ranks' labels
        expected = F.cross_entropy(alone(tokens, positions, layer_masks)[0, :-1], tokens[0, 1:])
        optimizer.zero_grad(set_to_none=False)
        (loss + expected).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)  # a sum; FSDP and DDP take the mean of ranks
        optimizer.step()
        dist.all_reduce(loss := loss.detach())
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-5)
        if first:
            print(f"step {step}: loss {loss:.6f}, of one process {expected:.6f}")
    heads = torch.empty(1, HEADS, mine.size(1), WIDTH // HEADS, device=device)
    for method in ("all_gather", "ring", "ulysses", "cast"):
        planned = context_parallel(group, method).plan(layer_masks)
        sent = {name: mask.bytes_sent(heads, heads, heads) for name, mask in planned.items()}
        if first:
            sizes = [f"{name} {s.forward // 1024} and {s.backward // 1024}" for name, s in sent.items()]
            print(f"{method}: KiB that rank 0 sends, forward and backward: {', '.join(sizes)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
