"""Kernels that are not ours, for the executor."""

import triton
import triton.language as tl

# Triton 3.6 writes no fence between what cp.async wrote and a product of sm_90 that reads it.
FENCES = "stores" if triton.__version__.startswith("3.6.") else "all"


@triton.jit
def add(a, b, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(a + i, mask=i < n) + tl.load(b + i, mask=i < n), mask=i < n)


@triton.jit
def softmax(x, out, n, BLOCK: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    values = tl.load(x + row * n + i, mask=i < n, other=-float("inf"))
    weights = tl.exp(values - tl.max(values, 0))
    tl.store(out + row * n + i, weights / tl.sum(weights, 0), mask=i < n)


@triton.jit
def layer_norm(x, weight, bias, out, n, eps, BLOCK: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    values = tl.load(x + row * n + i, mask=i < n, other=0.0).to(tl.float32)
    mean = tl.sum(values, 0) / n
    centred = tl.where(i < n, values - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / n + eps)
    found = centred * scale * tl.load(weight + i, mask=i < n) + tl.load(bias + i, mask=i < n)
    tl.store(out + row * n + i, found, mask=i < n)


@triton.jit
def matmul(a, b, out, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m, n, k = (
        tl.program_id(0) * BM + tl.arange(0, BM),
        tl.program_id(1) * BN + tl.arange(0, BN),
        tl.arange(0, BK),
    )
    total = tl.zeros((BM, BN), tl.float32)
    for step in range(0, K, BK):
        left = tl.load(a + m[:, None] * K + (step + k)[None, :])
        right = tl.load(b + (step + k)[:, None] * N + n[None, :])
        total = tl.dot(left, right, total)
    tl.store(out + m[:, None] * N + n[None, :], total)


@triton.jit
def attention(q, k, v, out, length, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    m, n, d = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, D)
    query = tl.load(q + m[:, None] * D + d[None, :])
    most = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    found = tl.zeros((BM, D), tl.float32)
    for first in range(0, length, BN):
        key = tl.load(k + (first + n)[:, None] * D + d[None, :])
        value = tl.load(v + (first + n)[:, None] * D + d[None, :])
        scores = tl.dot(query, tl.trans(key))
        higher = tl.maximum(most, tl.max(scores, 1))
        weights, shrink = tl.exp(scores - higher[:, None]), tl.exp(most - higher)
        total = total * shrink + tl.sum(weights, 1)
        found = tl.dot(weights.to(value.dtype), value, found * shrink[:, None])
        most = higher
    tl.store(out + m[:, None] * D + d[None, :], found / total[:, None])


@triton.jit
def histogram(values, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out + tl.load(values + i, mask=i < n, other=0), 1, mask=i < n)


@triton.jit
def last(out):
    tl.store(out, tl.program_id(0))


@triton.jit
def transposed_product(a, b, out, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """a @ b.T by bulk copies of tensors."""
    left = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BM, BK])
    right = tl.make_tensor_descriptor(b, [N, K], [K, 1], [BN, BK])
    result = tl.make_tensor_descriptor(out, [M, N], [N, 1], [BM, BN])
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        total = tl.dot(left.load([m, k]), right.load([n, k]).T, total)
    result.store([m, n], total.to(out.dtype.element_ty))


@triton.jit
def copy_with_stride(x, out, stride, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i * stride))


@triton.jit
def doubled_rows(source, target, M: tl.constexpr):
    row = tl.program_id(0) * M
    target.store([row, 0], 2 * source.load([row, 0]))
