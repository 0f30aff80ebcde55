"""Kernels written in Triton, compiled for cards and executed: their numbers, whatever the order of time."""

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from flex_inductor.tools import ptx
from tests.tools.ptx import kernels

TARGETS = ("sm_80", "sm_90", pytest.param("sm_100", marks=pytest.mark.slow))
PRODUCTS = {"sm_80": "mma", "sm_90": "wgmma", "sm_100": "tcgen05"}


def empty(*shape, dtype=torch.float32):
    return torch.full(shape, float("nan"), dtype=dtype)


@pytest.mark.parametrize("target", TARGETS)
def test_elementwise_and_rows(target):
    a, b, out = *torch.randn(2, 1000), empty(1000)
    ptx.run(kernels.add, (4,), a, b, out, 1000, target=target, BLOCK=256, unwritten=[out])
    assert torch.equal(out, a + b)

    x, out = torch.randn(5, 700), empty(5, 700)
    ptx.run(kernels.softmax, (5,), x, out, 700, target=target, BLOCK=1024, unwritten=[out])
    torch.testing.assert_close(out, x.softmax(-1), rtol=1e-6, atol=1e-7)

    weight, bias = torch.randn(2, 700)
    given = (x, weight, bias, out, 700, 1e-5)
    ptx.run(kernels.layer_norm, (5,), *given, target=target, BLOCK=1024, unwritten=[out])
    torch.testing.assert_close(
        out, torch.nn.functional.layer_norm(x, [700], weight, bias), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("target", TARGETS)
def test_matmul(target, dtype, stages):
    a, b, out = torch.randn(128, 96, dtype=dtype), torch.randn(96, 64, dtype=dtype), empty(128, 64)
    want = a.double() @ b.double()
    for when in ("late", "early", "random"):
        out.fill_(float("nan"))
        counts = ptx.run(
            kernels.matmul, (2, 1), a, b, out, 128, 64, 96, target=target, num_stages=stages, when=when,
            unwritten=[out], fences=kernels.FENCES, BM=64, BN=64, BK=32,
        )  # fmt: skip
        bound = 96**0.5 * 2**-8 if dtype == torch.float32 else 1e-5  # TF32 cuts all but 10 bits
        assert (out - want).abs().max() < bound
        assert counts.total.products == 128 * 64 * 96
    families = counts.by_family()
    assert {family for family in PRODUCTS.values() if family in families} == {PRODUCTS[target]}
    if stages == 3:
        assert families["cp"].warps


@pytest.mark.parametrize("when", ["late", "early", "random"])
@pytest.mark.parametrize("target", TARGETS)
def test_attention(target, when):
    """A product that ends early ends after those before it."""
    q, k, v = torch.randn(3, 128, 64, dtype=torch.float16)
    want = (q.double() @ k.double().T).softmax(-1) @ v.double()
    for rows, seed in ((64, 0), (128, 1), (128, 2)):
        out = empty(128, 64)
        ptx.run(
            kernels.attention, (128 // rows,), q, k, v, out, 128, target=target, seed=seed, when=when,
            unwritten=[out], fences=kernels.FENCES, D=64, BM=rows, BN=32,
        )  # fmt: skip
        assert (out - want).abs().max() < 4e-3


def test_atomics_of_many_blocks():
    values, out = torch.randint(7, (1000,), dtype=torch.int32), torch.zeros(7, dtype=torch.int32)
    ptx.run(kernels.histogram, (4,), values, out, 1000, target="sm_80", BLOCK=256, seed=3)
    assert torch.equal(out, torch.bincount(values, minlength=7).int())


def test_counts():
    a, b, out = *torch.randn(2, 1024), empty(1024)
    counts = ptx.run(kernels.add, (4,), a, b, out, 1024, target="sm_80", BLOCK=256)
    assert counts.total.global_bytes == 3 * 4096 and counts.total.sectors == 3 * 128
    # Which of a statement's lines an access belongs to depends on the version of Triton.
    own = {name: count for name, count in counts.by_source_line().items() if name.startswith("kernels.py:")}
    assert sum(count.global_bytes for count in own.values()) == 3 * 4096 and len(own) >= 3


def test_the_worst_approximations_are_off_by_little():
    x, out = torch.randn(5, 700), empty(5, 700)
    ptx.run(kernels.softmax, (5,), x, out, 700, target="sm_80", approximations="worst", BLOCK=1024)
    off = ((out - x.softmax(-1)) / x.softmax(-1)).abs().max()
    assert 1e-7 < off < 2e-6


@pytest.mark.parametrize("stages, dtype", [(1, torch.float16), (3, torch.float16), (3, torch.bfloat16)])
def test_bulk_copies(stages, dtype):
    a, b = torch.randn(100, 96, dtype=dtype), torch.randn(72, 96, dtype=dtype)
    want = a.double() @ b.double().T
    for when in ("late", "early", "random"):
        out = empty(100, 72, dtype=dtype)
        counts = ptx.run(
            kernels.transposed_product, (2, 2), a, b, out, 100, 72, 96, target="sm_90", num_stages=stages, when=when,
            unwritten=[out], BM=64, BN=64, BK=32,
        )  # fmt: skip
        assert (out - want).abs().max() < (0.02 if dtype == torch.float16 else 0.2)
    assert any(".bulk.tensor" in i.name and count.warps for i, count in counts.instructions)


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_tensor_maps_of_the_host(target, dtype):
    source, out = torch.randn(100, 64, dtype=dtype), empty(100, 64, dtype=dtype)
    maps = [TensorDescriptor(t, [100, 64], [64, 1], [32, 64]) for t in (source, out)]
    counts = ptx.run(kernels.doubled_rows, (4,), *maps, target=target, M=32)
    assert torch.equal(out, 2 * source)
    assert any(".bulk.tensor" in i.name and count.warps for i, count in counts.instructions)
    with pytest.raises(ValueError, match="no TensorDescriptor"):
        ptx.run(kernels.doubled_rows, (4,), *maps, target="sm_80", M=32)


def test_tensor_maps_that_do_not_fit():
    text = ".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry none(.param .b8 none_param_0[{}]) {{ ret; }}"
    numbers = torch.zeros(8, 64)
    for size, tensor, box, message in (
        (128, numbers, (8,), "as many"),
        (128, numbers.T, (8, 8), "stride 1"),
        (64, numbers, (8, 8), "expected 64 bytes for none_param_0, got 128"),
    ):
        with pytest.raises(ValueError, match=message):
            ptx.run_text(text.format(size), "none", 1, [ptx.TensorMap(tensor, box)], num_warps=1)
    ptx.run_text(text.format(128), "none", 1, [ptx.TensorMap(numbers, (8, 8))], num_warps=1)
