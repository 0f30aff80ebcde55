"""Which tiles are known to be chosen whole, and what is written for whole numbers on the way."""

import itertools
import types

import pytest
import sympy
import torch
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx

from flex_inductor.lowerings.triton.kernel import Arguments
from flex_inductor.lowerings.triton.lanes import LaneCode
from flex_inductor.lowerings.triton.printer import Lane
from flex_inductor.mod_ir.split import split

LENGTH, TILE_M, TILE_N = 256, 16, 32
LANES = ("b", "h", "q_idx", "kv_idx")


def inlined(mask, length=LENGTH):
    """The statements of a mask, and when it chooses a tile whole."""
    graph = make_fx(mask, select_decomp_table())(*torch.zeros(4, dtype=torch.int32).unbind())
    program = split(graph, LANES)
    below = None if length is None else sympy.Integer(length)
    lanes = [Lane(name, frozenset((name,)), torch.int32, below) for name in LANES]
    code = LaneCode(Arguments(), "mask_", torch.device("cuda"), approximate=True, nvidia=True)
    with V.set_graph_handler(GraphLowering(program.lane)):
        (chosen,) = code.inline(program, lanes, [])
    return [statement.text for statement in code.statements()], code.whole(chosen)


language = types.SimpleNamespace(
    full=lambda size, value, dtype: value,
    int32=None,
    int1=None,
    minimum=min,
    maximum=max,
    abs=abs,
)


def said(mask):
    """For every tile, whether it is said to be chosen whole."""
    statements, expression = inlined(mask)
    names = {"tl": language, "b": 0, "h": 0}
    for statement in statements:
        if "tl.full(" in statement:
            exec(statement, names)
    for start_m, start_n in itertools.product(range(0, LENGTH, TILE_M), range(0, LENGTH, TILE_N)):
        names |= {"start_m": start_m, "last_m": start_m + TILE_M - 1}
        names |= {"start_n": start_n, "last_n": start_n + TILE_N - 1}
        yield bool(eval(expression, names))


def chosen(mask):
    q, k = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None, :]
    lanes = mask(torch.tensor(0), torch.tensor(0), q, k).expand(LENGTH, LENGTH)
    tiles = lanes.reshape(LENGTH // TILE_M, TILE_M, LENGTH // TILE_N, TILE_N)
    return tiles.all(3).all(1).flatten().tolist()


EXACT = {
    "causal": lambda b, h, q, k: q >= k,
    "before": lambda b, h, q, k: ~(k >= q),
    "window": lambda b, h, q, k: (q >= k) & (q - k <= 64),
    "prefix": lambda b, h, q, k: (k < 70) | (q > k),
    "chunks": lambda b, h, q, k: q // 48 >= k // 48,
    "one chunk": lambda b, h, q, k: q // 64 == k // 64,
    "other chunks": lambda b, h, q, k: q // 64 != k // 64,
    "band": lambda b, h, q, k: (q - k).abs() < 60,
    "corner": lambda b, h, q, k: torch.maximum(q, k + 3) >= 40,
}


@pytest.mark.parametrize("mask", EXACT)
def test_tiles_chosen_whole_are_known(mask):
    tiles = list(said(EXACT[mask]))
    assert tiles == chosen(EXACT[mask])
    assert any(tiles) and not all(tiles)


@pytest.mark.parametrize(
    "mask, length",
    [
        (lambda b, h, q, k: (q + k) % 2 == 0, LENGTH),
        (lambda b, h, q, k: (q >= k) & (q.float().sqrt() > 2), LENGTH),
        (lambda b, h, q, k: q + k >= 0, None),  # may wrap around
        (lambda b, h, q, k: q * 3 > k, LENGTH),
        (lambda b, h, q, k: (q >= k) ^ (k > 3), LENGTH),
        (lambda b, h, q, k: h + b > 2, LENGTH),  # the same for all lanes: no loop decides it
    ],
)
def test_of_other_masks_nothing_is_known(mask, length):
    assert inlined(mask, length)[1] is None


def test_an_index_is_divided_without_regard_to_signs_and_zero():
    statements, _ = inlined(lambda b, h, q, k: (q // 32) * 2 + (k % 6) > (q - k) // 7)
    assert any(text.endswith(" = q_idx // 32") for text in statements)
    assert any(text.endswith(" = kv_idx % 6") for text in statements)
    assert sum("where" in text for text in statements) >= 1  # the difference may be negative


def test_an_index_is_compared_with_64_bits_in_32():
    def mask(b, h, q, k):
        return ((q - k).long() < h.long()) & (q >= k)

    statements, _ = inlined(mask)
    compared = [text for text in statements if " < " in text]
    assert not any("int64" in text for text in compared)
