"""The judge of outputs and gradients sees what is wrong by little."""

import pytest
import torch

from tests.support import MASKS, MODS, Sizes, attention_of, bounded, dense_of, judge

SIZES = Sizes(batch=1, heads=4, kv_heads=2, queries=40, keys=60)
SCALE = SIZES.head_dim**-0.5


def judged(dtype, attend):
    captures, build = MODS["position_bias"]
    mask = MASKS["prefix"](SIZES)
    judge(attend(build), dense_of(build, SCALE), SIZES.inputs(dtype), captures(SIZES), mask)


def changed(index, change):
    """Attention whose result at `index` (0 is out, 1 the logsumexp, 2 the maximum) is changed."""

    def attend(build):
        right = attention_of(build, SCALE)

        def wrong(*args):
            results = list(right(*args))
            results[index] = change(results[index])
            return tuple(results)

        return wrong

    return attend


def with_gradients(index, change):
    """Attention that is right, but for the gradient of query (0), key (1), value (2) or the captured tensor (3)."""

    def attend(build):
        right = attention_of(build, SCALE)

        def wrong(query, key, value, captures, block_mask):
            tensors = [query, key, value, *captures]
            if tensors[index].requires_grad:
                tensors[index] = tensors[index].view_as(tensors[index])
                tensors[index].register_hook(change)
            return right(*tensors[:3], tuple(tensors[3:]), block_mask)

        return wrong

    return attend


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_right_results_pass(dtype):
    judged(dtype, lambda build: attention_of(build, SCALE))


@pytest.mark.parametrize(
    "dtype, by", [(torch.bfloat16, 1.01), (torch.float16, 1.001), (torch.float32, 1.00001)]
)
def test_a_scale_that_is_off(dtype, by):
    with pytest.raises(AssertionError, match="lse: error"):
        judged(dtype, lambda build: attention_of(build, SCALE * by))


@pytest.mark.parametrize("index, name", [(1, "lse"), (2, "max_scores")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_that_is_off(index, name, dtype):
    with pytest.raises(AssertionError, match=f"^{name}: error"):
        judged(dtype, changed(index, lambda rows: rows + 1e-4))


OFF = {torch.bfloat16: 1.03, torch.float16: 1.005, torch.float32: 1.0001}


@pytest.mark.parametrize("index, name", [*enumerate(["d_query", "d_key", "d_value", r"d_captures\[0\]"])])
@pytest.mark.parametrize("dtype", OFF)
def test_one_gradient_that_is_off(index, name, dtype):
    off = (OFF[dtype] - 1) * (2 if index == 3 else 1)  # captured tensors have twice the roundings
    with pytest.raises(AssertionError, match=f"^{name}: error"):
        judged(dtype, with_gradients(index, lambda grad: grad * (1 + off)))


def test_a_gradient_in_the_wrong_rows():
    with pytest.raises(AssertionError, match=r"^d_key: error"):
        judged(torch.bfloat16, with_gradients(1, lambda grad: grad.roll(1, 2)))


def test_at_a_tie_the_gradient_of_either_branch_is_right():
    def dense(captures, _):
        x = captures[0].requires_grad_()
        largest = torch.maximum(x * 0.3, (x - 1) * 2 + 0.3)
        return {"d_x": torch.autograd.grad(largest.sum(), x)[0]}

    gold, allowed = bounded(torch.float32, [torch.tensor([1.0, 2.0])], dense)
    low, high = (gold["d_x"] - allowed["d_x"]).tolist(), (gold["d_x"] + allowed["d_x"]).tolist()
    assert low[0] < 0.3 and high[0] > 2
    assert low[1] > 1.9999 and high[1] < 2.0001
