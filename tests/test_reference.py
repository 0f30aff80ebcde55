"""The oracle itself: against softmax written by hand, against torch's flex_attention, and that it stands alone."""

import ast
import inspect
import math

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from flex_inductor import AuxRequest, BlockMask, RunSchedule, create_block_mask
from flex_inductor import reference as module
from flex_inductor.reference import reference
from tests.support import MASKS, MODS, Sizes

SIZES = Sizes(batch=2, heads=4, kv_heads=2, queries=20, keys=28, head_dim=8, value_dim=6)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def test_it_imports_nothing_that_it_judges():
    tree = ast.parse(inspect.getsource(module))
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert not any(node.level for node in imports if isinstance(node, ast.ImportFrom))
    names = {node.module for node in imports if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    assert {name.split(".")[0] for name in names} == {"__future__", "math", "torch", "typing"}


def by_hand(query, key, value, bias, live):
    """Softmax row by row, in plain numbers."""
    out, lse, peak = torch.zeros(query.size(0), value.size(1)), [], []
    for i, q in enumerate(query):
        scores = {j: float(q @ k) / math.sqrt(len(q)) + bias(i, j) for j, k in enumerate(key) if live(i, j)}
        total = sum(math.exp(score) for score in scores.values())
        for j, score in scores.items():
            out[i] += math.exp(score) / total * value[j]
        lse.append(math.log(total) if total else -math.inf)
        peak.append(max(scores.values(), default=-math.inf))
    return out, torch.tensor(lse), torch.tensor(peak)


def test_by_hand():
    query, key, value = (torch.randn(1, 1, 7, 3) for _ in range(3))
    table, scale = torch.randn(13, 2), torch.rand(7)

    def mod(score, b, h, q_idx, kv_idx):
        return score + table[q_idx - kv_idx + 6][1] * scale[..., -1 - kv_idx]

    def live(b, h, q_idx, kv_idx):
        return (q_idx > kv_idx) & (kv_idx != 2)

    mask = torch_flex.create_block_mask(live, None, None, 7, 7, device="cpu", BLOCK_SIZE=3)
    expected = by_hand(
        query[0, 0], key[0, 0], value[0, 0],
        lambda i, j: float(table[i - j + 6, 1] * scale[6 - j]),
        lambda i, j: i > j and j != 2,
    )  # fmt: skip
    for got, want in zip(reference(query, key, value, mod, mask), expected, strict=True):
        torch.testing.assert_close(got[0, 0], want)


@pytest.mark.parametrize(
    "mod, mask",
    [("alibi", "sliding_window"), ("bucketed_bias", "per_head"), ("learned_temperature", "per_batch")],
)
def test_against_torch(mod, mask):
    """Its math mode, forward: grouped heads, masks of batches and heads, and mods that look up."""
    (captures, build), block_mask = MODS[mod], MASKS[mask](SIZES)
    inputs, score_mod = SIZES.inputs(torch.float64), build(*captures(SIZES))
    aux = AuxRequest(lse=True)
    want, aux = torch_flex.flex_attention(*inputs, score_mod, block_mask, enable_gqa=True, return_aux=aux)
    out, lse, _ = reference(*inputs, score_mod, block_mask)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, aux.lse)


def test_blocks_alone():
    """What lists leave out is not attended, whatever mask_mod says; what they call full is, too."""
    counts, nothing = torch.tensor([[[1, 0, 1]]], dtype=torch.int32), torch.zeros(1, 1, 3, dtype=torch.int32)
    column = torch.tensor([[[[2, 0, 1], [1, 0, 2], [0, 1, 2]]]], dtype=torch.int32)
    query, key, value = torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 4), torch.eye(6).expand(1, 2, 6, 6)
    even = lambda b, h, q_idx, kv_idx: kv_idx % 2 == 0  # noqa: E731
    for full, seen in ((False, {0: [4], 4: [0]}), (True, {0: [4, 5], 4: [0, 1]})):
        lists = (nothing, column, counts, column) if full else (counts, column)
        mask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=2, mask_mod=even)
        out, lse, _ = reference(query, key, value, None, mask)
        for row in range(6):
            keys = seen.get(row // 2 * 2, [])
            assert out[0, 1, row].nonzero().flatten().tolist() == keys and (
                lse[0, 1, row] > -math.inf
            ) == bool(keys)


def test_gradients_by_finite_differences():
    sizes = Sizes(1, 2, 1, 3, 4, 2, 2)
    captures, build = MODS["bucketed_bias"]
    table, bucket = captures(sizes)
    mask = torch_flex.create_block_mask(causal, None, None, 3, 4, device="cpu", BLOCK_SIZE=2)
    inputs = [t.requires_grad_() for t in (*sizes.inputs(torch.float64), table)]
    assert torch.autograd.gradcheck(lambda q, k, v, t: reference(q, k, v, build(t, bucket), mask)[:2], inputs)


@pytest.mark.parametrize(
    "mask_mod", [causal, lambda b, h, q_idx, kv_idx: (q_idx + h + b) // 5 == kv_idx // 5]
)
def test_runs_and_lists_are_the_same_blocks(mask_mod):
    """torch's lists, read here, and ours as runs; the mask_mod itself says the same."""
    arguments = (2, 4, SIZES.queries, SIZES.keys, "cpu", 4)
    lists = torch_flex.create_block_mask(mask_mod, *arguments)
    runs = create_block_mask(mask_mod, *arguments, compact=True)
    assert isinstance(runs, RunSchedule)
    inputs = SIZES.inputs(torch.float64)
    b, h, m, n = (
        torch.arange(size).view(-1, *(1,) * i) for i, size in zip((3, 2, 1, 0), (2, 4, 20, 28), strict=True)
    )
    dense = mask_mod(b, h, m, n).expand(2, 4, 20, 28)
    results = [reference(*inputs, block_mask=mask) for mask in (lists, runs)]
    results.append(
        reference(
            *inputs,
            lambda score, b, h, q_idx, kv_idx: torch.where(dense[b, h, q_idx, kv_idx], score, -math.inf),
        )
    )
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            torch.testing.assert_close(got, want)
