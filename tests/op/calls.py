"""What the tests of the op share: inputs, and the comparison with the reference."""

import torch
from torch import Tensor

from flex_inductor.reference import reference


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def parameter(*shape: int) -> Tensor:
    return draw(*shape).requires_grad_()


def leaf(tensor: Tensor) -> Tensor:
    """A copy that gets a gradient of its own."""
    return tensor.detach().clone().requires_grad_()


def qkv(batch: int = 2, heads: int = 2, length: int = 6, dim: int = 4) -> list[Tensor]:
    return [parameter(batch, heads, length, dim) for _ in range(3)]


def close(actual, expected) -> None:
    """Equal but for the order of additions in fp64."""
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


def check(attend, inputs, captures=(), score_mod=None, block_mask=None) -> None:
    """`attend(q, k, v)` and its gradients, those of `captures` included, against the reference."""
    leaves = [t for t in (*inputs, *captures) if t.requires_grad]
    out = attend(*inputs)
    expected = reference(*inputs, score_mod, block_mask)[0]
    close(out, expected)
    d_out = torch.randn_like(expected)
    # A score_mod that drops the score leaves the reference without a gradient of the query: that is zero.
    wanted = torch.autograd.grad(expected, leaves, d_out, materialize_grads=True)
    close(torch.autograd.grad(out, leaves, d_out), wanted)
