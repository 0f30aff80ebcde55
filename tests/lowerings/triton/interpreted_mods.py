"""Generated Triton kernels run by Triton's interpreter, with every mod and mask. See test_interpreted.py."""

import pytest
import torch
from marks import slow_but
from support import (
    MADE,
    MASKS,
    MODS,
    Mod,
    Sizes,
    attention_of,
    dense_of,
    judge,
    makes_tables,
    of_converted_positions,
    served_by,
)

from flex_inductor import FlexError, create_block_mask, decisions, flex_attention
from flex_inductor.tools import interpret

CASES = [
    ("plain", "none", torch.float32),
    ("plain", "causal", torch.float16),
    ("alibi", "prefix", torch.float16),
    ("softcap", "causal", torch.float32),
    ("softcap", "per_batch", torch.float16),
    ("relative_bias", "sliding_window", torch.float32),
    ("bucketed_bias", "document", torch.float16),
    ("position_bias", "causal", torch.float32),
    ("learned_temperature", "per_head", torch.float32),
    ("learned_temperature", "blocks_only", torch.float32),
]
QUICK = [case for case in CASES if case[1] in ("per_batch", "sliding_window", "document", "per_head")]


def judge_interpreted(build, sizes, captures, block_mask, dtype=torch.float32, scale=None, dense=None):
    with served_by("triton", "triton"):
        attend = interpret.compiled(attention_of(build, scale))
        return judge(attend, dense or dense_of(build, scale), sizes.inputs(dtype), captures, block_mask)


@pytest.mark.parametrize("case", slow_but(CASES, *QUICK), ids=str)
def test_as_right_as_dense_attention(case):
    mod, mask, dtype = case
    sizes = Sizes(batch=2 if mask == "per_batch" else 1, queries=40)
    captures = MODS[mod].captures(sizes)
    judge_interpreted(MODS[mod].build, sizes, captures, MASKS[mask](sizes), dtype)


def test_tables_that_a_mod_makes():
    judge_interpreted(makes_tables, Sizes(1, 2, 1, MADE, MADE), (), None)


def test_what_was_compiled_for_the_cpu_is_not_taken_from_a_cache():
    q = torch.randn(1, 1, 4, 1)
    with torch._functorch.config.patch(enable_autograd_cache=True):
        with served_by("cpu"):
            torch.compile(flex_attention, backend="flex_inductor", fullgraph=True)(q, q, q)
        torch._dynamo.reset()
        with served_by("triton"):
            interpret.compiled(flex_attention, fullgraph=True)(q, q, q)


def test_dead_lanes_neither_load_nor_scatter_out_of_range():
    sizes = Sizes(batch=1, queries=64, keys=64)

    def windowed(beside):
        def build(table, strength):
            def score_mod(score, b, h, q_idx, kv_idx):
                distance = q_idx - kv_idx
                inside = (distance >= 0) & (distance < 20)  # what the mask leaves
                return score + strength * table[torch.where(inside, distance, beside)]

            return score_mod

        return build

    captures = torch.randn(20, dtype=torch.float64), torch.tensor(0.7, dtype=torch.float64)
    # A gigabyte away there is nothing to read: the process would end. Dense attention reads everywhere.
    mask, dense = MASKS["sliding_window"](sizes), dense_of(windowed(0))
    judge_interpreted(windowed(1 << 28), sizes, captures, mask, dense=dense)


def test_one_number_beside_a_tile():
    """Of a head, which is compared with itself for NaN, and of keys."""

    def build(of_heads, of_keys):
        return lambda score, b, h, q_idx, kv_idx: torch.maximum(of_heads[h], of_keys[kv_idx])

    captures = torch.randn(4, dtype=torch.float64), torch.randn(24, dtype=torch.float64)
    judge_interpreted(build, Sizes(batch=1, queries=24, keys=24), captures, None)


def test_a_row_with_an_infinite_score_is_nan():
    def build():
        return lambda score, b, h, q_idx, kv_idx: torch.where((q_idx == 3) & (kv_idx == 1), torch.inf, score)

    judge_interpreted(build, Sizes(batch=1, queries=24, keys=24), (), None)


def test_a_row_that_score_mod_kills():
    """No weight, forward and backward, also where the schedule visits all of the row."""

    def build():
        return lambda score, b, h, q_idx, kv_idx: torch.where(q_idx == 5, -torch.inf, score)

    judge_interpreted(build, Sizes(batch=1, queries=24, keys=24), (), None)


def test_negative_indices_count_from_the_end():
    sizes = Sizes(batch=1)

    def from_the_end(table):
        return lambda score, b, h, q_idx, kv_idx: score + table[-1 - h] + table[h - 4]

    judge_interpreted(from_the_end, sizes, (torch.randn(4, dtype=torch.float64),), None)


def test_indices_are_divided_as_eagerly():
    sizes = Sizes(batch=1)

    def bucketed(table):
        # 82 / 41 is 2, where 82 times the nearest number to 1 / 41 is less.
        return lambda s, b, h, q, kv: s + table[((q - kv + 100).float() / 41).to(torch.int64)] / (1 + s.abs())

    judge_interpreted(bucketed, sizes, (torch.randn(5, dtype=torch.float64),), None, torch.float16)


def test_positions_become_other_types():
    mask = create_block_mask(lambda b, h, q, kv: (q - kv - 2).bool(), None, None, 40, 40, "cpu")
    table = torch.randn(128, dtype=torch.float64)
    judge_interpreted(of_converted_positions, Sizes(batch=1, queries=40, keys=40), (table,), mask)


def test_indices_of_64_bits():
    sizes = Sizes(batch=1, queries=40, keys=40)

    def build(scores):
        return lambda score, b, h, q_idx, kv_idx: score + scores[(kv_idx.long() * 3_000_000_001 + q_idx) % 7]

    mask = create_block_mask(
        lambda b, h, q_idx, kv_idx: (
            (kv_idx.long() * 3_000_000_000 <= q_idx.long() * 3_000_000_000) & (kv_idx.long() < 2**33)
        ),
        *(None, None, 40, 40, "cpu"),
        BLOCK_SIZE=16,
    )
    judge_interpreted(build, sizes, (torch.randn(7, dtype=torch.float64),), mask)


def test_rounding():
    sizes = Sizes(batch=1, queries=40, keys=40)

    def rounded(table):
        return lambda score, b, h, q_idx, kv_idx: score + torch.round(2 * table[kv_idx])

    judge_interpreted(rounded, sizes, (torch.randn(40, dtype=torch.float64),), None)


def test_gradients_flow_through_what_runs_once_and_through_functions():
    sizes = Sizes(batch=1, queries=33, keys=20)

    def build(table, strength):
        slopes = (table * 2).exp()
        return lambda s, b, h, q, kv: torch.where(q > kv, s * slopes[h], s) + torch.sin(strength * s)

    captures = (torch.randn(4, dtype=torch.float64) * 0.1, torch.tensor(0.3, dtype=torch.float64))
    judge_interpreted(build, sizes, captures, None)


def test_integer_and_bool_captures():
    sizes = Sizes(batch=1)
    bucket = torch.arange(70 * 100).reshape(70, 100) % 5
    flag = torch.arange(100) % 3 > 0

    def build(table):
        return lambda s, b, h, q, kv: torch.where(flag[kv], s + table[bucket[q, kv]], s - 1.0)

    judge_interpreted(build, sizes, (torch.randn(5, dtype=torch.float64),), MASKS["causal"](sizes))


@pytest.mark.parametrize("wanted", ["q", "k", "v", "captured"])
def test_only_what_is_wanted_is_computed(wanted):
    sizes, dtype = Sizes(batch=1), torch.float32
    tensors = dict(zip("qkv", sizes.inputs(dtype), strict=True), captured=torch.randn(4))
    tensors[wanted].requires_grad_()

    def attend(q, k, v, captured):
        return flex_attention(q, k, v, lambda s, b, h, m, n: s + captured[h] * n / 32, enable_gqa=True)

    with served_by("triton", "triton"):
        out = interpret.run(attend, *tensors.values())
        upstream = torch.randn_like(out)
        (got,) = torch.autograd.grad(out, tensors[wanted], upstream)
    (want,) = torch.autograd.grad(attend(*tensors.values()), tensors[wanted], upstream)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_bf16_products_are_right_or_refused_by_name():
    sizes = Sizes(batch=1, queries=16, keys=16, head_dim=16, value_dim=16)
    if interpret._bf16_dot_error():
        with pytest.raises(FlexError, match="bfloat16 matrices, which the interpreter of triton"):
            interpret.run(flex_attention, *sizes.inputs(torch.bfloat16), enable_gqa=True)
    else:
        judge_interpreted(MODS["plain"].build, sizes, (), None, torch.bfloat16)


def test_a_mod_that_cannot_be_inlined_is_left_to_the_chunks():
    def build(table):
        return lambda s, b, h, q, kv: s + (table[h] * table[h]).sum()

    mod, sizes = Mod(lambda s: (), build), Sizes(batch=1)
    decisions(clear=True)
    attend = interpret.compiled(attention_of(mod.build))
    judge(attend, dense_of(build), sizes.inputs(torch.float32), (torch.randn(4, 3, dtype=torch.float64),))
    assert decisions()[0].chosen == "chunked"
    assert "score_mod computes a tensor for each score" in dict(decisions()[0].rejected)["triton"]


def test_a_gradient_whose_strides_inductor_would_pad():
    """Above 1024 it makes strides a multiple of 32, and kernels add by offsets into what is contiguous."""
    sizes = Sizes(batch=2, heads=4, queries=300, keys=16)
    mod = MODS["learned_temperature"]
    judge_interpreted(mod.build, sizes, mod.captures(sizes), None)
