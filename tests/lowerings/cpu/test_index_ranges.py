"""Which indices are known to stay inside of what they look up."""

import pytest
import sympy
import torch
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx

from flex_inductor.lowerings.cpu.index_ranges import needed
from flex_inductor.mod_ir.ranges import Range

SIZES = {"q_idx": 100, "kv_idx": 70}


def stays_below(length, index, sizes=SIZES):
    zeros = [torch.zeros((), dtype=torch.int32) for _ in SIZES]
    graph = make_fx(index)(*zeros)
    for node, name in zip(graph.graph.find_nodes(op="placeholder"), SIZES, strict=True):
        node.name = name
    (output,) = graph.graph.find_nodes(op="output")[0].args
    with V.set_graph_handler(GraphLowering(graph)):
        bounds = {name: Range(sympy.S.Zero, sympy.Integer(size - 1)) for name, size in sizes.items()}
        return needed(output, length, bounds) == set()


@pytest.mark.parametrize(
    "length, index",
    [
        (100, lambda q, k: q),
        (169, lambda q, k: q - k + 69),
        (100, lambda q, k: (q - k).abs()),
        (397, lambda q, k: q.long() * 4),
        (397, lambda q, k: (-q + 99) * 4),
        (7, lambda q, k: (k * 100_000_000) % 7),  # whatever wrapped around
        (9, lambda q, k: torch.clamp(q - k, -3, 5) + 3),
        (9, lambda q, k: torch.clamp(k * 100_000_000, 0, 8)),
        (100, lambda q, k: (q - k).clamp(min=0)),
        (6, lambda q, k: q.clamp(max=5)),
        (6, lambda q, k: (q % 9).clamp(max=5)),
        (100, lambda q, k: torch.maximum(q, k)),
        (70, lambda q, k: torch.minimum(q, k)),
        (15, lambda q, k: q // 7),
        (16, lambda q, k: q // 10 - torch.div(k, 10, rounding_mode="floor") + 6),
    ],
)
def test_to_the_last_entry(length, index):
    assert stays_below(length, index)
    assert not stays_below(length - 1, index)


@pytest.mark.parametrize(
    "length, index",
    [
        (1000, lambda q, k: q - k),  # may be negative
        (2**40, lambda q, k: q * 100_000_000),  # int32 is full at 22
        (1000, lambda q, k: torch.minimum(k * 100_000_000, torch.full_like(k, 5)).abs()),
        (
            1000,
            lambda q, k: (k * 100_000_000).clamp(min=2_147_483_000) - 2_147_483_000,
        ),  # more if it does not wrap
        (2**40, lambda q, k: (k * 100_000_000).long()),
        (2**40, lambda q, k: (k * 100_000_000) + k.long()),
        (100, lambda q, k: q % (k + 1)),
        (100, lambda q, k: q // (k + 1)),
        (100, lambda q, k: q // -7 + 20),
        (100, lambda q, k: torch.div(q, 7, rounding_mode="trunc")),
        (100, lambda q, k: (k * 100_000_000) // 4_000_000),  # may have wrapped around before
        (100, lambda q, k: q.float().int()),
    ],
)
def test_not_known(length, index):
    assert not stays_below(length, index)
