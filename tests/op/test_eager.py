"""A call without any compile: whatever a mod captures, and however, gets its gradient."""

import functools

import pytest
import torch
from op.calls import check, close, draw, parameter, qkv

from flex_inductor import create_block_mask, flex_attention
from flex_inductor.mod_ir.arguments import SCORE_LANES
from flex_inductor.mod_ir.capture import lift

GLOBAL_BIAS = torch.linspace(-1, 1, 6, dtype=torch.float64).requires_grad_()


class Bias(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(draw(2, 6))
        self.register_buffer("distance", torch.arange(6).abs())

    def score_mod(self, score, b, h, q_idx, kv_idx):
        return score + self.table[h, self.distance[q_idx]] * kv_idx

    forward = score_mod


class Doubled(torch.autograd.Function):
    """Twice the product, with a gradient of its own that says so: it is three times as large."""

    @staticmethod
    def forward(ctx, score, factor):
        ctx.save_for_backward(score, factor)
        return 2 * score * factor

    @staticmethod
    def backward(ctx, grad):
        score, factor = ctx.saved_tensors
        return 3 * grad * factor, 3 * grad * score


def by_closure():
    bias = parameter(6, 6)
    return (lambda score, b, h, q_idx, kv_idx: score + bias[q_idx, kv_idx]), [bias]


def by_global():
    return (lambda score, b, h, q_idx, kv_idx: score + GLOBAL_BIAS[q_idx] * GLOBAL_BIAS[kv_idx]), [
        GLOBAL_BIAS
    ]


def by_module_attribute():
    bias = Bias()
    return (lambda score, b, h, q_idx, kv_idx: score + bias.table[h, kv_idx]), [bias.table]


def by_bound_method():
    bias = Bias()
    return bias.score_mod, [bias.table]


def by_callable_module():
    bias = Bias()
    return bias, [bias.table]


def by_partial():
    def score_mod(score, b, h, q_idx, kv_idx, slopes, factor):
        return score * factor + slopes[h] * (q_idx - kv_idx)

    slopes = parameter(2)
    return functools.partial(score_mod, slopes=slopes, factor=0.5), [slopes]


def by_inner_function():
    slopes = parameter(2)

    def distance(h, q_idx, kv_idx):
        return slopes[h] * (q_idx - kv_idx)

    return (lambda score, b, h, q_idx, kv_idx: score + distance(h, q_idx, kv_idx)), [slopes]


def by_default_argument():
    slopes = parameter(2)

    def score_mod(score, b, h, q_idx, kv_idx, slopes=slopes):
        return score + slopes[h] * kv_idx

    return score_mod, [slopes]


def by_list():
    rows = [parameter(6), parameter(6)]
    return (lambda score, b, h, q_idx, kv_idx: score + rows[0][q_idx] * rows[1][kv_idx]), rows


@pytest.mark.parametrize(
    "make",
    [
        by_closure, by_global, by_module_attribute, by_bound_method, by_callable_module, by_partial,
        by_inner_function, by_default_argument, by_list,
    ],
)  # fmt: skip
def test_captures_get_gradients(make):
    score_mod, captures = make()
    check(lambda q, k, v: flex_attention(q, k, v, score_mod), qkv(), captures, score_mod)


class ScaledModule(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, score, b, h, q_idx, kv_idx):
        return Doubled.apply(score, self.factor)


def custom_function_by_closure():
    factor = parameter()
    return (lambda score, b, h, q_idx, kv_idx: Doubled.apply(score, factor)), factor


def custom_function_by_module():
    module = ScaledModule()
    return module, module.factor


doubled = Doubled.apply


def custom_function_by_name():
    factor = parameter()
    return (lambda score, b, h, q_idx, kv_idx: doubled(score, factor)), factor


def custom_function_of_what_was_read_before():
    factor = parameter()

    def score_mod(score, b, h, q_idx, kv_idx):
        unchanged = score + 0 * factor
        return doubled(unchanged, factor)

    return score_mod, factor


@pytest.mark.parametrize(
    "make",
    [
        custom_function_by_closure,
        custom_function_by_module,
        custom_function_by_name,
        custom_function_of_what_was_read_before,
    ],
)
def test_custom_backward_is_used(make):
    score_mod, factor = make()
    q, k, v = qkv()
    grads = torch.autograd.grad(flex_attention(q, k, v, score_mod).sin().sum(), (q, k, v, factor))
    honest = flex_attention(q, k, v, lambda score, b, h, q_idx, kv_idx: 2 * score * factor)
    d_q, d_k, d_v, d_factor = torch.autograd.grad(honest.sin().sum(), (q, k, v, factor))
    close(grads, (1.5 * d_q, 1.5 * d_k, d_v, 1.5 * d_factor))


def test_what_fails_in_a_mod_leaves_nothing_behind():
    def fails(score, b, h, q_idx, kv_idx):
        raise RuntimeError("from the mod")

    with pytest.raises(RuntimeError, match="from the mod"):
        flex_attention(*qkv(), fails)
    x = parameter(3)
    (grad,) = torch.autograd.grad(doubled(x, torch.ones(3)).sum(), x)
    close(grad, torch.full_like(x, 3))


def test_anomaly_mode_finds_no_nan_where_there_are_no_values():
    table = parameter(6)

    def loss():
        return flex_attention(*qkv(), lambda score, b, h, q_idx, kv_idx: score + table[kv_idx]).sum()

    with torch.autograd.set_detect_anomaly(True):
        loss().backward()
        with pytest.raises(RuntimeError, match="returned nan values"), pytest.warns(UserWarning):
            (loss() * float("nan")).backward()


def test_only_what_is_computed_with_is_captured():
    q, _, _ = qkv()
    unused, bias = parameter(3), parameter(6)

    def score_mod(score, b, h, q_idx, kv_idx):
        _ = unused
        return score + bias[kv_idx] / q.shape[2] + q.size(0)

    lifted, captures = lift(score_mod, SCORE_LANES, q)
    assert [id(c) for c in captures] == [id(bias)]
    assert lifted.names == ("bias",)


def test_captures_keep_the_names_a_person_gave_them():
    bias, slopes = Bias(), parameter(2)

    def score_mod(score, b, h, q_idx, kv_idx, factor):
        return score * factor + slopes[h] + bias.table[h, kv_idx] + GLOBAL_BIAS[q_idx]

    q, _, _ = qkv()
    lifted, _ = lift(functools.partial(score_mod, factor=parameter()), SCORE_LANES, q)
    assert lifted.names == ("factor", "slopes", "bias.table", "GLOBAL_BIAS")
    assert lift(bias, SCORE_LANES, q)[0].names == ("self.distance", "self.table")
    assert lift(bias.score_mod, SCORE_LANES, q)[0].names == ("self.distance", "self.table")
    tables = {"near": [bias.table]}
    lifted, _ = lift(lambda score, b, h, q_idx, kv_idx: score + tables["near"][0][h, q_idx], SCORE_LANES, q)
    assert lifted.names == ("tables['near'][0]",)


def test_one_tensor_in_both_mods():
    gate, limit = parameter(6), torch.tensor(3)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score * gate[kv_idx] + (q_idx > limit)

    mask = create_block_mask(lambda b, h, q, kv: kv <= limit + q // 2, None, None, 6, 6, "cpu", BLOCK_SIZE=2)
    check(lambda q, k, v: flex_attention(q, k, v, score_mod, mask), qkv(), [gate], score_mod, mask)


class Shifted(torch.autograd.Function):
    """A gradient that is not a product."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * 1.0

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad + 0.01


def test_a_gradient_to_which_a_number_is_added():
    table = parameter(6)
    check(
        lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: Shifted.apply(s + table[j])),
        qkv(), (table,), lambda s, b, h, i, j: Shifted.apply(s + table[j]),
    )  # fmt: skip


def test_open_slices_of_a_mods_own_tensor():
    def sliced(score, b, h, q_idx, kv_idx):
        both = torch.stack([score, score])
        both[1:] *= 3
        return both[-1:].sum() + both[:-1].sum()

    inputs = qkv()
    close(flex_attention(*inputs, sliced), flex_attention(*inputs, lambda score, *_: 4 * score))


def beside_a_table(score, b, h, q_idx, kv_idx):
    total = 2 * score
    return total.add_(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)[kv_idx % 3])


def into_a_table(score, b, h, q_idx, kv_idx):
    table = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    table[1:] *= 2
    table[0] = 5.0
    return score + table[kv_idx % 3]


def into_a_copy_of_an_index(score, b, h, q_idx, kv_idx):
    index = kv_idx.clone()
    return score + index.fill_(3) + kv_idx


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("score_mod", [beside_a_table, into_a_table, into_a_copy_of_an_index])
def test_a_mod_may_write_where_it_writes_a_table_out(score_mod, compiled):
    attend = lambda *qkv: flex_attention(*qkv, score_mod)  # noqa: E731
    attend = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
    check(attend, qkv(), score_mod=score_mod)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_mod_may_write_into_parts_of_its_own_tensors(compiled):
    def in_parts(score, b, h, q_idx, kv_idx):
        pair = torch.zeros(2, dtype=score.dtype)
        pair[0] = score
        pair[1] = slopes[h] * kv_idx
        pair[0] *= 2
        return pair.sum()

    def whole(score, b, h, q_idx, kv_idx):
        return 2 * score + slopes[h] * kv_idx

    inputs, slopes = qkv(), parameter(4)
    attend = torch.compile(flex_attention, backend="aot_eager") if compiled else flex_attention
    (out, want) = attend(*inputs, in_parts), flex_attention(*inputs, whole)
    close(out, want)
    wanted = (*inputs, slopes)
    for got, like in zip(*(torch.autograd.grad(o.square().sum(), wanted) for o in (out, want)), strict=True):
        close(got, like)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_mod_may_change_its_own_values_in_place(compiled):
    attend = (
        torch.compile(flex_attention, backend="aot_eager", fullgraph=True) if compiled else flex_attention
    )
    bias = parameter(6)

    def score_mod(score, b, h, q_idx, kv_idx):
        score += bias[kv_idx]
        score.mul_(2).clamp_(min=-1)
        q_idx += 1
        return score / q_idx

    def out_of_place(score, b, h, q_idx, kv_idx):
        return ((score + bias[kv_idx]) * 2).clamp(min=-1) / (q_idx + 1)

    inputs = qkv()
    ours, expected = (
        torch.autograd.grad(attend(*inputs, mod).sin().sum(), (*inputs, bias))
        for mod in (score_mod, out_of_place)
    )
    close(ours, expected)
