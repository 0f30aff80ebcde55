"""Every bit of calls that need no rounding, over ranks: a wrong tile, head or place is off by a whole number."""

import pytest
import torch

from flex_inductor import create_block_mask
from flex_inductor.distributed.context import context_parallel
from tests.accuracy.test_exact import DOCUMENT, attend_to
from tests.distributed.cases import mesh_of, together
from tests.distributed.test_methods import METHODS, idle, reversed_cyclic
from tests.exact import assert_bits, exact, results, visible_by
from tests.support import Sizes

LENGTH = len(DOCUMENT)
SIZES = Sizes(batch=2, heads=4, kv_heads=2, queries=LENGTH, keys=LENGTH, head_dim=16, value_dim=24)
MASKS = {
    "documents": lambda b, h, q_idx, kv_idx: (DOCUMENT[q_idx] == DOCUMENT[kv_idx]) & (q_idx >= kv_idx),
    "per head": lambda b, h, q_idx, kv_idx: (q_idx - kv_idx > 8 * h - 16) & (kv_idx < 160 - 30 * b),
}


def on_rank(group, call, mask, method, balance):
    cp = context_parallel(mesh_of(group) if method == "ring_ulysses" else group, method, balance)
    blocks = create_block_mask(MASKS[mask], 2, 4, LENGTH, LENGTH, "cpu", BLOCK_SIZE=16)
    plan = cp.plan(blocks, LENGTH, block=16)
    *rows, d_out, d_lse = cp.shard([*call.tensors[:3], *call.above], 2)
    tensors = [t.detach().requires_grad_() for t in (*rows, call.tensors[3])]
    found = results(
        attend_to(plan, use_table=True), tensors, (d_out, d_lse), ("d_query", "d_key", "d_value", "d_table")
    )
    return {"positions": cp.layout.positions(cp.rank), **found}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "mask, dtype, balance, ranks",
    [
        ("documents", torch.float32, reversed_cyclic, 4),
        ("per head", torch.float32, "head_tail", 4),
        ("per head", torch.bfloat16, idle, 2),
    ],
    ids=["documents", "per head", "bf16"],
)
def test_bits(group, mask, dtype, balance, ranks, method):
    call = exact("last", "table", SIZES, dtype, visible_by(MASKS[mask], SIZES))
    assert_bits(call, together(group.run(on_rank, call, mask, method, balance, ranks=ranks)))
