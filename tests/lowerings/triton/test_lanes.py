"""Lane graphs as statements, where Inductor would write other ones for a GPU."""

import pytest
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
