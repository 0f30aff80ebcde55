"""What mods look up by lanes and by other indices together, next to torch's own indexing of each pair by itself."""

import numpy as np
import pytest
import torch

from flex_inductor import create_block_mask, flex_attention

N = 6
_drawn = torch.Generator().manual_seed(0)
TABLE, WORDS, BIAS = (
    torch.randn(size, generator=_drawn, dtype=torch.float64) for size in ((N, N), (10, 3), (10,))
)
THREE, FOUR = (torch.randn(size, generator=_drawn, dtype=torch.float64) for size in ((2, N, N), (N, N, N, N)))
LEAVES = tuple(tensor.requires_grad_() for tensor in (TABLE, WORDS, BIAS, THREE, FOUR))
IDS = torch.randint(0, 10, (N,), generator=_drawn)
NEAR = torch.randint(0, N, (N, N), generator=_drawn)
A, B = torch.randint(0, N, (2, N), generator=_drawn)
ORDER, ONE = [2, 1, 0, 3, 4, 4], np.int64(1)


def written(i, j):
    made = torch.zeros(N, N, dtype=torch.float64)
    made[i, [0, 2]] = torch.tensor([1.0, 2.0], dtype=torch.float64)
    made[[1, 3], j] = 0.5
    made[:, i] += 0.25
    return (made * TABLE).sum()


# By lanes after tensors of indices, whose gradients pass through both.
AFTER = {
    "bias[ids][j]": lambda i, j: BIAS[IDS][j],
    "embedding": lambda i, j: (torch.nn.functional.embedding(IDS, WORDS)[i] * WORDS[IDS][j]).sum(),
    "table[a][j][i]": lambda i, j: TABLE[A][j][i],
    "table[near][i, j]": lambda i, j: TABLE[NEAR][i, j].sum(),
    "table[i][a][j]": lambda i, j: TABLE[i][A][j],
    "table[a, b][j]": lambda i, j: TABLE[A, B][j],
    "gather": lambda i, j: TABLE.gather(1, NEAR)[i, j],
    "take": lambda i, j: TABLE.take(NEAR)[i, j],
    "take_along_dim": lambda i, j: TABLE.take_along_dim(NEAR, 0)[i, j],
    "table[list][i, j]": lambda i, j: TABLE[ORDER][i, j],
    "table[range][i, j]": lambda i, j: TABLE[range(N)][i, j],
}
# By both at once.
BESIDE = {
    "table[near, i]": lambda i, j: TABLE[NEAR, i][j, 0],
    "table[list, i]": lambda i, j: TABLE[ORDER, i][j],
    "table[array, i]": lambda i, j: TABLE[np.arange(N), i][j],
    "table[True, i]": lambda i, j: TABLE[True, i][0, j],
    "table[None, i, near]": lambda i, j: TABLE[None, i, NEAR][0, j].sum(),
    "three[integer of NumPy, i, j]": lambda i, j: THREE[ONE, i, j],
    "three[a % 2, a, i]": lambda i, j: THREE[A % 2, A, i].sum() * j,
    "four[a, b, i]": lambda i, j: FOUR[A, B, i][j, 0],
    "four[i, a, :, j]": lambda i, j: FOUR[i, A, :, j][2, 3],
    "four[a, i, :, b]": lambda i, j: FOUR[A, i, :, B][2, j],
    "four[..., a, j]": lambda i, j: FOUR[..., A, j][i, 1, 2],
    "written": written,
}
LOOKUPS = {**AFTER, **BESIDE}


def dense(lookup):
    """Pair by pair, with Python's integers."""
    return torch.stack([torch.stack([lookup(i, j) for j in range(N)]) for i in range(N)])


def judged(attend, lookup):
    query, key, value = torch.randn(3, 1, 1, N, 4, dtype=torch.float64)
    out = attend(query, key, value, lambda score, b, h, q_idx, kv_idx: score + lookup(q_idx, kv_idx))
    want = (query @ key.mT / 2 + dense(lookup)).softmax(-1) @ value
    torch.testing.assert_close(out, want)
    got, wanted = (torch.autograd.grad(o.sin().sum(), LEAVES, allow_unused=True) for o in (out, want))
    for ours, theirs in zip(got, wanted, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", LOOKUPS)
def test_score_mods(name):
    judged(flex_attention, LOOKUPS[name])


def test_compiled():
    def all_of_them(i, j):
        return sum(lookup(i, j) for lookup in LOOKUPS.values()) / 8

    judged(torch.compile(flex_attention, backend="flex_inductor", fullgraph=True), all_of_them)


@pytest.mark.parametrize("name", BESIDE)
def test_masks(name):
    def mask_mod(b, h, q_idx, kv_idx):
        return LOOKUPS[name](q_idx, kv_idx) > 0

    seen = create_block_mask(mask_mod, None, None, N, N, device="cpu", BLOCK_SIZE=1).to_dense()[0, 0].bool()
    assert torch.equal(seen, dense(LOOKUPS[name]) > 0)
