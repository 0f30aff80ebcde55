"""Sums of integers in another order have the same value, and one node for all that is of the key."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import lowerings.lanes  # noqa: F401 - loads Inductor's lowerings first
from lowerings.cpu.regroup import regroup
from lowerings.cpu.tables import of_one_index

MOST = 2**31 - 1


def doubled(q, k):
    for _ in range(40):
        k = k + k
    return k // 7 + q - k % 5 + 1


SUMS = {
    "an image": lambda q, k: q // 7 - k // 7 + 12 - 1,
    "both ways": lambda q, k: (k // 7 - q) - (5 - (q + k % 3)),
    "several times": lambda q, k: q + k // 7 + (k // 7 + q) + k,
    "a sum in a sum": lambda q, k: -(q - (k % 5 + 3)) - (-(k % 5)),
    "the key beside": lambda q, k: k - k % 8 + q,
    "nothing of the query is left": lambda q, k: q + k // 3 - q,
    "a number that wraps around": lambda q, k: q - k // 7 + MOST + MOST,
    "each sum twice in the next": lambda q, k: doubled(q, k // 7 - q),
    "multiplied": lambda q, k: (q // 7 - k // 7 + 6) * 13 + q % 7 - k % 7 * 2 + 6,
    "one of the key, multiplied": lambda q, k: (q - k // 7) * 5,
    "used twice": lambda q, k: (q - k // 7 + 4) * (q - k // 7 + 4 - k % 2),
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("name", SUMS)
def test_sums_have_the_same_value(name, dtype):
    pairs = [(q, k) for q in (0, 1, 6, 7, 40) for k in (0, 2, 13, 14, 99)]
    query, key = (torch.tensor(values, dtype=dtype) for values in zip(*pairs, strict=True))
    traced = make_fx(SUMS[name], tracing_mode="fake")(query, key)
    wanted = traced(query, key)
    of_key = traced.graph.find_nodes(op="placeholder")[1]
    regroup(traced.graph, of_key, of_one_index(traced.graph, of_key))
    traced.graph.lint()
    traced.recompile()
    assert torch.equal(traced(query, key), wanted)
    if name != "used twice":
        alone = of_one_index(traced.graph, of_key)
        assert len([node for node in alone if any(user not in alone for user in node.users)]) == 1


@pytest.mark.parametrize(
    "unlike", [lambda q, k: q - k // 7, lambda q, k: q + k + 3, lambda q, k: q * 0.5 + k // 7 + 1.5 + 2]
)
def test_other_graphs_stay_as_they_are(unlike):
    """With nothing to put together, nothing slow, or other numbers than integers."""
    traced = make_fx(unlike, tracing_mode="fake")(*(torch.arange(5, dtype=torch.int32) for _ in range(2)))
    before = str(traced.graph)
    of_key = traced.graph.find_nodes(op="placeholder")[1]
    regroup(traced.graph, of_key, of_one_index(traced.graph, of_key))
    assert str(traced.graph) == before
