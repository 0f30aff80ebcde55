"""Lane graphs as statements, where Inductor would write other ones for a GPU."""

import pytest
import sympy
import torch
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx

from flex_inductor.lowerings.subgraphs import with_reciprocals
from flex_inductor.lowerings.triton.kernel import Arguments
from flex_inductor.lowerings.triton.lanes import SCORED, Lane, LaneCode
from flex_inductor.op.program import split


def written(fn):
    """The statements for fn(score, q_idx) on a GPU."""
    graph = make_fx(fn)(torch.zeros(()), torch.zeros((), dtype=torch.int32))
    program = with_reciprocals(split(graph, ("score", "q_idx"), guarded=False))
    lanes = [
        Lane("score", frozenset(("q_idx", SCORED)), torch.float32),
        Lane("q_idx", frozenset(("q_idx",)), torch.int32),
    ]
    code = LaneCode(Arguments(), "x_", torch.device("cuda"), approximate=True, nvidia=True)
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


def difference(fn, below):
    """The statements for fn(score, q_idx, kv_idx) where both indices are below a number."""
    indices = torch.zeros(2, dtype=torch.int32).unbind()
    program = split(make_fx(fn)(torch.zeros(()), *indices), ("score", "q_idx", "kv_idx"), guarded=False)
    lanes = [Lane("score", frozenset(("q_idx", "kv_idx", SCORED)), torch.float32)]
    lanes += [
        Lane(name, frozenset((name,)), torch.int32, None if below is None else sympy.Integer(below))
        for name in ("q_idx", "kv_idx")
    ]
    code = LaneCode(Arguments(), "x_", torch.device("cuda"), approximate=True, nvidia=True)
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
