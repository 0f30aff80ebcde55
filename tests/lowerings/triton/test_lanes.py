"""Lane graphs as statements, where Inductor would write other ones for a GPU."""

import expecttest
import pytest
import sympy
import torch
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx

from flex_inductor.lowerings.lanes import with_reciprocals
from flex_inductor.lowerings.triton.kernel import Arguments
from flex_inductor.lowerings.triton.lanes import LaneCode
from flex_inductor.lowerings.triton.printer import SCORED, Lane
from flex_inductor.mod_ir.split import split


def written(fn, nvidia=True, approximate=True):
    """The statements for fn(score, q_idx) on a GPU."""
    graph = make_fx(fn)(torch.zeros(()), torch.zeros((), dtype=torch.int32))
    program = with_reciprocals(split(graph, ("score", "q_idx")))
    lanes = [
        Lane("score", frozenset(("q_idx", SCORED)), torch.float32),
        Lane("q_idx", frozenset(("q_idx",)), torch.int32),
    ]
    code = LaneCode(Arguments(), "x_", torch.device("cuda", 0), approximate=approximate, nvidia=nvidia)
    with V.set_graph_handler(GraphLowering(graph)):
        code.inline(program, lanes, [])
    return [statement.text.partition(" = ")[2] for statement in code.statements()]


@pytest.mark.parametrize(
    "divide, quotient",
    [
        (lambda s, q: q / 41 + s, "div_rn(x_1, x_0)"),
        (lambda s, q: torch.div(q.float(), 41, rounding_mode="floor") + s, "div_rn(x_0, x_1)"),
        (lambda s, q: q.float() / (q + 1) + s, "div_rn(x_0, x_3)"),
        (lambda s, q: s / 41, "score * x_0"),
        (lambda s, q: s / (s + 1), "(score / x_1)"),
    ],
)
def test_indices_are_divided_as_eagerly_and_scores_fast(divide, quotient):
    assert any(text.endswith(quotient) for text in written(divide))


@pytest.mark.parametrize(
    "mod, rounded",
    [
        (lambda s, q: s + torch.floor(q * 0.7 + 0.3), "rounded_product(x_0, x_1)"),
        (lambda s, q: s + torch.round(-(q * 0.7) + 1), "rounded_product(x_0, x_1)"),
        (lambda s, q: s * (q * 0.7 - 0.5 > 1), "rounded_product(x_0, x_1)"),
        (lambda s, q: s + torch.floor(q * 0.7), None),  # not added before it is rounded
        (lambda s, q: s + (q * 0.7 + 0.3), None),  # no index, and compared with nothing
        (lambda s, q: s + torch.floor(s * 0.7 + 0.3), None),
    ],
)
def test_a_product_is_rounded_before_a_sum_that_decides(mod, rounded):
    found = [text for text in written(mod) if text.startswith("rounded_product")]
    assert found == ([] if rounded is None else [rounded])


def difference(fn, below):
    """The statements for fn(score, q_idx, kv_idx) where both indices are below a number."""
    indices = torch.zeros(2, dtype=torch.int32).unbind()
    program = split(make_fx(fn)(torch.zeros(()), *indices), ("score", "q_idx", "kv_idx"))
    lanes = [Lane("score", frozenset(("q_idx", "kv_idx", SCORED)), torch.float32)]
    lanes += [
        Lane(name, frozenset((name,)), torch.int32, None if below is None else sympy.Integer(below))
        for name in ("q_idx", "kv_idx")
    ]
    code = LaneCode(Arguments(), "x_", torch.device("cuda", 0), approximate=True, nvidia=True)
    with V.set_graph_handler(GraphLowering(program.lane)):
        code.inline(program, lanes, [])
    return [statement.text.partition(" = ")[2] for statement in code.statements()]


def test_differences_of_indices_are_not_converted_where_a_mantissa_holds_them():
    def distance(score, q, kv):
        return score + (q - kv)

    assert {"as_mantissa(q_idx)", "as_mantissa(kv_idx)"} < {*difference(distance, 2**23)}
    assert "q_idx.to(tl.float32)" in difference(distance, 2**23 + 1)
    assert "q_idx.to(tl.float32)" in difference(lambda score, q, kv: score + (q + kv), 2**23)
    assert not any("as_mantissa" in line for line in difference(distance, None))


def test_what_a_mantissa_holds():
    indices = torch.tensor([0, 1, 4097, 2**23 - 1], dtype=torch.int32)
    assert torch.equal((indices + 0x4B000000).view(torch.float32).double(), indices.double() + 2**23)


def test_comparisons_share_what_differences_have():
    """Where a score_mod has indices as floats by their bits, comparisons are of the same bits."""
    both = difference(lambda score, q, kv: (score + (q - kv)) * (q >= kv), 2**23)
    assert "each_alone(kv_idx + 0x4B000000)" in both and "each_alone(q_idx + 0x4B000000)" in both
    assert "each_alone(kv_idx)" in difference(lambda score, q, kv: score * (q >= kv), 2**23)
    assert "each_alone(kv_idx)" in difference(lambda score, q, kv: (score + (q - kv)) * (kv > 9), 2**23)


class Functions(expecttest.TestCase):
    maxDiff = None

    def test_of_16_bit_inputs(self):
        def score_mod(s, q):
            capped = 20 * torch.tanh(s / 20)
            return (
                capped * torch.sigmoid(s)
                + torch.exp(-s)
                + torch.sqrt(s + 1)
                + torch.log1p(torch.exp(s))
                + (s + 1) ** 0.7
            )

        self.assertExpectedInline(
            "\n".join(written(score_mod)),
            """\
tl.full([], 0.05, tl.float32)
score * x_0
1.0 - 2.0 * reciprocal(tl.exp2(score * 0.14426950408889636) + 1.0)
tl.full([], 20.0, tl.float32)
x_2 * x_3
reciprocal(tl.exp2(score * -1.4426950408889634) + 1.0)
x_4 * x_5
-score
tl.exp2(x_7 * 1.4426950408889634)
x_6 + x_8
tl.full([], 1.0, tl.float32)
score + x_10
tl.sqrt(x_11)
x_9 + x_12
tl.exp2(score * 1.4426950408889634)
tl.where(tl.abs(x_14) < 0.015625, x_14 * (1.0 - x_14 * (0.5 - x_14 * 0.3333333333333333)), libdevice.fast_log2f(x_14 + 1.0) * 0.6931471805599453)
x_13 + x_15
tl.full([], 0.7, tl.float32)
tl.exp2(libdevice.fast_log2f(x_11) * 0.7)
x_16 + x_18""",
        )

    def test_on_amd(self):
        found = written(lambda s, q: torch.log(s) + torch.tanh(s), nvidia=False)
        self.assertExpectedInline(
            "\n".join(found),
            """\
tl.log2(score) * 0.6931471805599453
1.0 - 2.0 * libdevice.fast_dividef(1.0, tl.exp2(score * 2.8853900817779268) + 1.0)
x_0 + x_1""",
        )

    def test_of_indices_alone(self):
        """Where a bucket starts is for the library to say, and what is added to a score is not."""

        def score_mod(s, q):
            distance = q.float()
            bucket = (torch.log(distance / 16) * 8).to(torch.int32)
            return s + bucket - torch.log1p(distance) + (torch.exp(distance) > 9).float()

        self.assertExpectedInline(
            "\n".join(written(score_mod)),
            """\
q_idx.to(tl.float32)
tl.full([], 16.0, tl.float32)
tl.div_rn(x_0, x_1)
tl_math.log(x_2)
tl.full([], 8.0, tl.float32)
x_3 * x_4
x_5.to(tl.int32)
x_6.to(tl.float32)
score + x_7
tl.where(tl.abs(x_0) < 0.015625, x_0 * (1.0 - x_0 * (0.5 - x_0 * 0.3333333333333333)), libdevice.fast_log2f(x_0 + 1.0) * 0.6931471805599453)
x_8 - x_9
libdevice.exp(x_0)
tl.full([], 9.0, tl.float32)
x_11 > x_12
x_13.to(tl.float32)
x_10 + x_14""",
        )

    def test_of_32_bit_inputs(self):
        found = written(lambda s, q: torch.exp(s) + torch.sigmoid(s) + s**1.5, approximate=False)
        self.assertExpectedInline(
            "\n".join(found),
            """\
libdevice.exp(score)
tl.sigmoid(score)
x_0 + x_1
tl.full([], 1.5, tl.float32)
libdevice.pow(score, x_3)
x_2 + x_4""",
        )
