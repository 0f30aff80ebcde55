"""Every method gives what one process gives."""

import pytest
import torch

from flex_inductor.distributed import ring
from tests.distributed.cases import Case, attend, on_rank, together, whole

LIMIT = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2e-2}
METHODS = ["cast", "all_gather", "ulysses", "ring", "ring_ulysses"]


def reversed_cyclic(work, ranks):
    return [(work.tiles - tile) % ranks for tile in range(work.tiles)]


def idle(work, ranks):
    """The last rank has nothing."""
    return [tile * (ranks - 1) // work.tiles if ranks > 1 else 0 for tile in range(work.tiles)]


def bf16_errors(found, want):
    return {n: float((found[n].double() - want[n]).abs().mean() / want[n].abs().mean()) for n in want}


@pytest.mark.parametrize("method", METHODS)
def test_bf16_rounds_as_one_process(group, method):
    """Partial results and gradients in fp32: sums of rounded ones are 1.4 times as far off."""
    case = Case("none", kv_heads=4, length=256, dtype=torch.bfloat16, score=False)
    want = whole(case)
    one = bf16_errors(attend(case, case.tensors(), case.block_mask()), want)
    ours = bf16_errors(together(group.run(on_rank, case, method, "head_tail")), want)
    for name in ("out", "d_query", "d_key", "d_value"):
        assert ours[name] <= 1.1 * one[name], (name, ours[name], one[name])


def check(group, case, method, balance, ranks, is_compiled=False):
    found = together(group.run(on_rank, case, method, balance, is_compiled, ranks=ranks))
    want = whole(case)
    assert found.keys() == want.keys()
    for name, gold in want.items():
        got, finite = found[name].double(), gold.isfinite()
        assert torch.equal(got[~finite], gold[~finite]), name
        error = (got - gold)[finite].abs().max() / gold[finite].abs().max().clamp(min=1)
        assert error <= LIMIT[case.dtype], (name, float(error))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "case, balance, ranks",
    [
        (Case(), "head_tail", 4),
        (Case("window"), "contiguous", 2),
        (Case("heads", kv_heads=4), reversed_cyclic, 4),
        (Case("batches", batch=3, dropout=0.3), "head_tail", 2),
        (Case("none", batch=2, kv_heads=1, length=130), "contiguous", 4),
        (Case("dead", block=(64, 32)), idle, 4),
        (Case("dead", block=(64, 32), sinks=True, dropout=0.3, entropy=True), idle, 4),
        (Case(dtype=torch.float32, entropy=True), reversed_cyclic, 2),
        (Case("window", heads=8, kv_heads=8, block=(16, 64)), "head_tail", 1),
    ],
    ids=lambda x: x.mask if isinstance(x, Case) else getattr(x, "__name__", str(x)),
)
def test_as_one_process(group, case, balance, ranks, method):
    check(group, case, method, balance, ranks)


def test_a_rank_that_dynamo_takes_for_a_size(group):
    check(group, Case("documents", 203, 2, 12, 12), "ring", "head_tail", 2, is_compiled=True)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_compiled_as_one_process(group, method, dtype, ranks):
    """Uneven lengths, captures and lse with their gradients; kernels serve all lengths of a kind of call."""
    for mask, length, heads, kv_heads, bshd, entropy in (
        ("documents", 203, 12, 12, False, False),
        ("documents", 500, 12, 12, False, False),
        ("documents", 203, 12, 12, True, False),
        ("window", 330, 4, 2, True, False),
        ("dead", 390, 4, 2, True, True),
    ):
        case = Case(mask, length, 2, heads, kv_heads, dtype=dtype, bshd=bshd, entropy=entropy)
        check(group, case, method, "head_tail" if mask == "documents" else idle, ranks, is_compiled=True)


def test_parts_of_a_ring_with_large_scores():
    """Weights come from a difference, so results are not off by rounding times the scores."""

    def part(scores):
        lse = scores.logsumexp(-1)
        weights = (scores - lse.unsqueeze(-1)).exp()
        return [
            weights @ values[: scores.size(-1)],
            lse,
            scores.amax(-1),
            torch.special.entr(weights).sum(-1),
        ]

    generator = torch.Generator().manual_seed(0)
    scores = 300 + torch.randn(1, 2, 50, 40, generator=generator, dtype=torch.float64)
    values = torch.ones(40, 3, dtype=torch.float64)
    parts = [[t.float() for t in part(half)] for half in scores.split(20, -1)]
    merged = ring._merged(*parts, ("entropy",))
    *found, entropy = merged
    *exact, right = part(scores)
    for got, want in zip(found, exact, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=4 * 2**-24, atol=0)
    # Each logsumexp is rounded by 256 * 2**-24, and a share changes by a quarter of their difference.
    torch.testing.assert_close(entropy.double(), right, rtol=4 * 2**-24, atol=128 * 2**-24)
