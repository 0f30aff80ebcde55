"""The joint graph: what it looks like, and that it gives every captured tensor its gradient."""

import expecttest
import pytest
import torch
from op.calls import check, close, draw, parameter, qkv

from flex_inductor import create_block_mask, flex_attention
from flex_inductor.mod_ir.trace import trace_joint


class TestJointGraph(expecttest.TestCase):
    def joint_of(self, score_mod, *captures):
        query = draw(1, 2, 6, 4)
        wanted = [True, *(capture.is_floating_point() for capture in captures)]
        return trace_joint(score_mod, query, captures, wanted).code.strip()

    def test_alibi_with_learnable_slopes(self):
        def alibi(score, b, h, q_idx, kv_idx, slopes):
            return score + slopes[h] * (kv_idx - q_idx)

        self.assertExpectedInline(
            self.joint_of(alibi, draw(2)),
            """\
def forward(self, arg0_1, arg1_1, arg2_1, arg3_1, arg4_1, arg5_1, arg6_1):
    sub = torch.ops.aten.sub.Tensor(arg4_1, arg3_1);  arg4_1 = arg3_1 = None
    mul_1 = torch.ops.aten.mul.Tensor(arg5_1, sub);  sub = None
    new_zeros = torch.ops.aten.new_zeros.default(mul_1, [2], dtype = torch.float64, layout = torch.strided, device = device(type='cpu'))
    index_put = torch.ops.aten.index_put.default(new_zeros, [arg2_1], mul_1, True);  new_zeros = arg2_1 = mul_1 = None
    return (arg5_1, index_put)""",
        )

    def test_relative_bias(self):
        def relative(score, b, h, q_idx, kv_idx, table):
            return score + table[h, q_idx - kv_idx]

        self.assertExpectedInline(
            self.joint_of(relative, draw(2, 12)),
            """\
def forward(self, arg0_1, arg1_1, arg2_1, arg3_1, arg4_1, arg5_1, arg6_1):
    sub = torch.ops.aten.sub.Tensor(arg3_1, arg4_1);  arg3_1 = arg4_1 = None
    new_zeros = torch.ops.aten.new_zeros.default(arg5_1, [2, 12], dtype = torch.float64, layout = torch.strided, device = device(type='cpu'))
    index_put = torch.ops.aten.index_put.default(new_zeros, [arg2_1, sub], arg5_1, True);  new_zeros = arg2_1 = sub = None
    return (arg5_1, index_put)""",
        )

    def test_nested_indexing(self):
        def nested(score, b, h, q_idx, kv_idx, bias, rel):
            return score + bias[rel[q_idx, kv_idx]]

        self.assertExpectedInline(
            self.joint_of(nested, draw(4), torch.zeros(6, 6, dtype=torch.long)),
            """\
def forward(self, arg0_1, arg1_1, arg2_1, arg3_1, arg4_1, arg5_1, arg6_1, arg7_1):
    index = torch.ops.aten.index.Tensor(arg7_1, [arg3_1, arg4_1]);  arg7_1 = arg3_1 = arg4_1 = None
    new_zeros = torch.ops.aten.new_zeros.default(arg5_1, [4], dtype = torch.float64, layout = torch.strided, device = device(type='cpu'))
    index_put = torch.ops.aten.index_put.default(new_zeros, [index], arg5_1, True);  new_zeros = index = None
    return (arg5_1, index_put, None)""",
        )


class Cubed(torch.autograd.Function):
    """A cube whose gradient is that of a square."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def several_indexings():
    bias = parameter(6)
    return (lambda s, b, h, q, kv: s + bias[q] + bias[kv] * bias[5 - q]), [bias]


def nested_indexing():
    table, bucket = parameter(9), torch.tensor([0, 0, 1, 2, 3, 4])
    return (lambda s, b, h, q, kv: s + table[bucket[q] - bucket[kv] + 4]), [table]


def rows_of_rows():
    table = parameter(2, 6, 3)
    return (lambda s, b, h, q, kv: s * table[h][q][kv % 3] + table[b, kv].sum()), [table]


def scalar():
    temperature = parameter()
    return (lambda s, b, h, q, kv: torch.tanh(s / temperature) * temperature), [temperature]


def two_dimensions():
    bias = parameter(6, 6)
    return (lambda s, b, h, q, kv: s + bias[q, kv]), [bias]


def four_dimensions():
    bias = parameter(2, 2, 6, 6)
    return (lambda s, b, h, q, kv: s * bias[b, h, q, kv]), [bias]


def negative_and_computed_indices():
    bias = parameter(12)
    return (lambda s, b, h, q, kv: s + bias[q - kv] * bias[(q - kv).abs() * 2]), [bias]


def unused():
    bias, ignored = parameter(6), parameter(6)
    return (lambda s, b, h, q, kv: s + bias[kv] + 0 * ignored.size(0)), [bias]


def a_view():
    base = parameter(4, 6, 2)
    view = base[1:3].transpose(0, 1)[::2]
    return (lambda s, b, h, q, kv: s + view[q % 3, h, b]), [base]


def not_contiguous():
    bias = torch.randn(6, 6, dtype=torch.float64).t().requires_grad_()
    return (lambda s, b, h, q, kv: s + bias[q, kv] + bias.t()[q, kv].sin()), [bias]


def expanded():
    bias = parameter(6)
    wide = bias.expand(2, 6)
    return (lambda s, b, h, q, kv: s + wide[h, kv]), [bias]


def reduction():
    bias = parameter(6)
    return (lambda s, b, h, q, kv: s * bias.sum() + bias.softmax(0)[kv] + bias.mean()), [bias]


def computed_before_indexing():
    slopes, table = parameter(2), parameter(6, 6)
    return (lambda s, b, h, q, kv: s + (-slopes.exp())[h] * (q - kv).abs() + (table @ table)[q, kv]), [
        slopes,
        table,
    ]


def list_of_tensors():
    pair = (parameter(6), [parameter(6), parameter()])
    return (lambda s, b, h, q, kv: s * pair[1][1] + pair[0][q] * pair[1][0][kv]), [pair[0], *pair[1]]


def custom_function():
    bias = parameter(6)
    return (lambda s, b, h, q, kv: Cubed.apply(s * bias[kv])), [bias]


def no_dependence_on_the_score():
    bias = parameter(6)
    return (lambda s, b, h, q, kv: bias[kv] * 2), [bias]


def branches():
    bias = parameter(6)
    return (lambda s, b, h, q, kv: torch.where(q >= kv, s * bias[kv], -bias[q].abs())), [bias]


MODS = [
    several_indexings, nested_indexing, rows_of_rows, scalar, two_dimensions, four_dimensions,
    negative_and_computed_indices, unused, a_view, not_contiguous, expanded, reduction,
    computed_before_indexing, list_of_tensors, no_dependence_on_the_score, branches,
]  # fmt: skip


@pytest.mark.parametrize("make", MODS)
@pytest.mark.parametrize("how", ["eager", "aot_eager"])
def test_gradients(make, how):
    score_mod, captures = make()

    def attend(q, k, v):
        return flex_attention(q, k, v, score_mod)

    if how != "eager":
        attend = torch.compile(attend, backend=how, fullgraph=True)
    check(attend, qkv(), captures, score_mod)


@pytest.mark.parametrize("how", ["eager", "aot_eager"])
def test_all_at_once_through_one_program_text(how):
    """Every mod in one, through the form in which compiled code carries programs."""
    made = [make() for make in (several_indexings, nested_indexing, scalar, two_dimensions, reduction)]

    def score_mod(s, b, h, q, kv):
        for mod, _ in made:
            s = mod(s, b, h, q, kv)
        return s

    captures = [capture for _, owned in made for capture in owned]
    backend = "inductor" if how == "aot_eager" else "eager"
    attend = torch.compile(lambda *a: flex_attention(*a, score_mod), backend=backend, fullgraph=True)
    check(attend, qkv(), captures, score_mod)


@pytest.mark.parametrize("how", ["eager", "aot_eager", "inductor"])
def test_custom_backward_is_used(how):
    score_mod, (bias,) = custom_function()
    inputs = qkv()

    def attend(q, k, v):
        return flex_attention(q, k, v, score_mod)

    if how != "eager":
        attend = torch.compile(attend, backend=how, fullgraph=True)
    out = attend(*inputs)
    # d(cube) as the function has it, 2x where a derivative says 3x^2: autograd through the dense form knows it.
    q, k, v = inputs
    x = (q @ k.mT) * 0.5 * bias
    expected = torch.softmax(Cubed.apply(x), -1) @ v
    close(out, expected)
    leaves = [*inputs, bias]
    close(torch.autograd.grad(out.sin().sum(), leaves), torch.autograd.grad(expected.sin().sum(), leaves))


def test_a_capture_of_both_mods_masked_by_the_other():
    gate = parameter(6)
    near = torch.tensor([1, 1, 2, 3, 2, 1])
    mask = create_block_mask(lambda b, h, q, kv: q - kv <= near[kv], None, None, 6, 6, "cpu", BLOCK_SIZE=2)

    def score_mod(s, b, h, q, kv):
        return s + gate[near[kv]]

    check(lambda q, k, v: flex_attention(q, k, v, score_mod, mask), qkv(), [gate], score_mod, mask)
