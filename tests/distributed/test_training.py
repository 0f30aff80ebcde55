"""Whole training steps, and what docs/context_parallel.md shows."""

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from flex_inductor import FlexError, context_parallel, create_block_mask, flex_attention
from flex_inductor.distributed.torch_ways import ContextParallelStyle, sharded_buffers

LENGTH, WIDTH, HEADS, VOCAB = 128, 32, 4, 11


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.bias = nn.Parameter(torch.randn(HEADS, LENGTH) / 4)

    def layer(self, qkv, x, mask):
        bias = self.bias
        q, k, v = qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = flex_attention(q, k, v, lambda s, b, h, q, kv: s + bias[h, q - kv], mask)
        return x + y.transpose(1, 2).flatten(2)

    def forward(self, tokens, mask):
        x = self.embed(tokens)
        x = self.layer(self.qkv[0], x, mask)
        x = checkpoint(self.layer, self.qkv[1], x, mask, use_reentrant=False)
        return self.head(x)


def step(group):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    row, cp = mesh["dp"].get_local_rank(), context_parallel(mesh["cp"], "cast", "head_tail")
    ids = torch.tensor([0, 30, 31, 100]).bincount(minlength=LENGTH).cumsum(0)
    mask = create_block_mask(
        lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv), None, None, LENGTH, LENGTH, "cpu", 16
    )
    torch.manual_seed(0)
    one = Model()
    tokens, labels = torch.randint(0, VOCAB, (2, 2, LENGTH))
    sharded = copy.deepcopy(one)
    fully_shard(sharded, mesh=mesh["dp", "cp"]._flatten("dp_cp"))
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2) for m in (one, sharded)]

    F.cross_entropy(one(tokens, mask).flatten(0, 1), labels.flatten()).backward()
    planned = cp.plan(mask)
    mine, targets = cp.shard((tokens[row : row + 1], labels[row : row + 1]), 1)
    losses = F.cross_entropy(sharded(mine, planned).flatten(0, 1), targets.flatten(), reduction="sum")
    (losses / labels.numel() * 4).backward()  # FSDP takes the mean over four ranks
    for optimizer in optimizers:
        optimizer.step()
    for (name, want), got in zip(one.named_parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(got.grad.full_tensor(), want.grad, rtol=0, atol=2e-6, msg=name)
        # Adam divides by the gradient's size: where that is near 0, so may be the digits of the step.
        near = want.grad.abs() > 1e-4
        torch.testing.assert_close(got.full_tensor()[near], want[near], rtol=0, atol=2e-6, msg=name)


def test_one_step_with_fsdp(group):
    group.run(step)


def snippet(group, code):
    def mask_of(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    q, k, v = (torch.randn(1, 2, LENGTH, 16) for _ in range(3))
    names = {
        "mesh": {"cp": group},
        "documents": create_block_mask(mask_of, None, None, 2 * LENGTH, 2 * LENGTH, "cpu"),
        "window": create_block_mask(lambda b, h, q, kv: q == kv, None, None, 2 * LENGTH, 2 * LENGTH, "cpu"),
        "score_mod": lambda score, b, h, q_idx, kv_idx: score - (q_idx - kv_idx),
        "tokens": torch.arange(2 * LENGTH)[None],
        "positions": torch.arange(2 * LENGTH)[None],
        "logits": torch.randn(1, LENGTH, VOCAB),
        **{"q": q, "k": k, "v": v},
    }
    exec(compile(code, "docs/context_parallel.md", "exec"), names)
    assert names["logits"].shape == (1, 2 * LENGTH, VOCAB)
    assert torch.equal(names["tokens"], names["positions"]) and names["tokens"].shape == (1, LENGTH)
    assert names["out"].shape == q.shape


def test_the_page(group):
    page = (Path(__file__).parents[2] / "docs/context_parallel.md").read_text()
    code, *_ = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    group.run(snippet, code, ranks=2)


class Attends(nn.Module):
    def forward(self, x):
        q, k, v = x.view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def torch_ways(group):
    mesh = DeviceMesh.from_group(group, "cpu")
    torch.manual_seed(0)
    x = torch.randn(2, LENGTH, 3 * WIDTH, dtype=torch.float64)
    want = Attends()(x)
    cp = context_parallel(mesh, "cast", "head_tail")
    cp.plan(None, LENGTH, block=16)
    model = parallelize_module(nn.Sequential(Attends()), mesh, {"0": ContextParallelStyle(cp)})
    got = cp.unshard(model(cp.shard(x, 1)), 1)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    compiled = torch.compile(model, backend="flex_inductor", fullgraph=True)
    for length in (LENGTH, LENGTH // 2):
        cp.plan(None, length, block=16)
        got = cp.unshard(compiled(cp.shard(x[:, :length], 1)), 1)
        torch.testing.assert_close(got, Attends()(x[:, :length]), rtol=0, atol=1e-12)
    assert not cp._modes
    unplanned = context_parallel(mesh)
    refused = parallelize_module(nn.Sequential(nn.Identity()), mesh, {"0": ContextParallelStyle(unplanned)})
    with cp:
        with pytest.raises(FlexError, match="nothing is planned yet"):
            refused(x)
        assert len(cp._modes) == 1 and not unplanned._modes
        with pytest.raises(FlexError, match="without a planned mask"):
            flex_attention(*x.view(1, 3, 1, -1, WIDTH).unbind(1))
    x = torch.randn(2, 2 * LENGTH, 3 * WIDTH, dtype=torch.float64)
    want = Attends()(x)
    whole, left = x.clone(), torch.arange(2 * LENGTH)
    cp = context_parallel(mesh, "ring", "contiguous")
    with sharded_buffers(cp, buffers=[whole, left], buffer_seq_dims=[1, 0], no_restore_buffers={left}):
        part = Attends()(whole)
        torch.testing.assert_close(part, want[:, left], rtol=0, atol=1e-12)
    assert torch.equal(whole, x) and len(left) == LENGTH and not cp._modes


def test_torchs_ways_in(group):
    group.run(torch_ways, ranks=2)
