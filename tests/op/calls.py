"""What the tests of the op share: inputs, and the comparison with the reference."""

import torch
from torch import Tensor

from flex_inductor.reference import reference


def leaf(tensor: Tensor) -> Tensor:
    """A copy that gets a gradient of its own."""
    return tensor.detach().clone().requires_grad_()


def inputs(batch=2, heads=2, length=6, dim=4, dtype=torch.float64) -> list[Tensor]:
    return [torch.randn(batch, heads, length, dim, dtype=dtype, requires_grad=True) for _ in range(3)]


def close(actual, expected) -> None:
    """Equal but for the order of additions in fp64."""
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


def check(attend, qkv, captures=(), score_mod=None, block_mask=None) -> None:
    """`attend(q, k, v)` and its gradients, those of `captures` included, against the reference."""
    leaves = [t for t in (*qkv, *captures) if t.requires_grad]
    out = attend(*qkv)
    expected = reference(*qkv, score_mod, block_mask)[0]
    close(out, expected)
    d_out = torch.randn_like(expected)
    close(torch.autograd.grad(out, leaves, d_out), torch.autograd.grad(expected, leaves, d_out))
