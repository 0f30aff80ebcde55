"""Small models with what happens inside the softmax: they repeat bit for bit under checkpointing and compiled."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flex_inductor import create_block_mask, flex_attention

LENGTH, WIDTH, HEADS, KV_HEADS = 48, 64, 4, 2


class Layer(nn.Module):
    """As gpt-oss has them: sinks that are learnt, a window in every other layer; and dropout."""

    def __init__(self, number: int, dropout_p: float):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * 16)
        self.out = nn.Linear(HEADS * 16, WIDTH)
        self.sinks = nn.Parameter(torch.randn(HEADS))
        self.dropout_p, self.number = dropout_p, number
        window = 16 if number % 2 == 0 else LENGTH

        def mask_mod(b, h, q_idx, kv_idx):
            return (q_idx >= kv_idx) & (q_idx - kv_idx < window)

        self.mask = create_block_mask(mask_mod, None, None, LENGTH, LENGTH, BLOCK_SIZE=16)

    def forward(self, x, seed=None):
        rows = self.qkv(x).unflatten(-1, (-1, 16)).transpose(1, 2)
        state = None if seed is None else (seed, torch.full_like(seed, self.number))
        given = {"sinks": self.sinks, "dropout_p": self.dropout_p, "rng_state": state}
        heads = flex_attention(
            *rows.split([HEADS, KV_HEADS, KV_HEADS], 1), block_mask=self.mask, enable_gqa=True, **given
        )
        return x + self.out(heads.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, dropout_p: float):
        super().__init__()
        self.layers = nn.ModuleList(Layer(number, dropout_p) for number in range(2))
        self.again = False

    def forward(self, x, seed=None):
        for layer in self.layers:
            x = checkpoint(layer, x, seed, use_reentrant=False) if self.again else layer(x, seed)
        return x


def step(model, run, again, **given):
    """The output and all gradients of a step, computed twice where `again`."""
    torch.manual_seed(7)
    model.again = again
    out = run(torch.linspace(-1, 1, 2 * LENGTH * WIDTH).sin().view(2, LENGTH, WIDTH), **given)
    return [out, *torch.autograd.grad(out.square().mean(), [*model.parameters()])]


def test_bits():
    model = Model(dropout_p=0.25)
    plain = step(model, model, again=False)
    for one, other in zip(plain, step(model, model, again=True), strict=True):
        assert torch.equal(one, other)
    compiled = torch.compile(model, backend="flex_inductor", fullgraph=True)
    seed = {"seed": torch.tensor(11)}
    first, second, checked = (step(model, compiled, again, **seed) for again in (False, False, True))
    for one, other, third in zip(first, second, checked, strict=True):
        assert torch.equal(one, other) and torch.equal(one, third)
    for one, other in zip(first, step(model, model, again=False, **seed), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(plain[0], first[0], rtol=0.01, atol=0.01)  # another state
