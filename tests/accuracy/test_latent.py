"""Multi-head latent attention: keys wider than values (192 and 128), and latent ones of which values are a view (576 and
512), for prompts and for single tokens."""

import functools
import math

import pytest
import torch
from support import Sizes, judge, served_by

from flex_inductor import create_block_mask, decisions, flex_attention
from flex_inductor.tools.inspector import attention_kernels, kind
from flex_inductor.tools.resources import compile_untuned, machine_code
from flex_inductor.tools.sass import LOCAL_MEMORY, loops

WIDE = Sizes(1, 2, 2, queries=40, keys=70, head_dim=192, value_dim=128)
LATENT = Sizes(1, 16, 1, queries=40, keys=70, head_dim=576, value_dim=512)
CALLS = {
    "wide, prompt": WIDE,
    "wide, token": WIDE._replace(queries=1, keys=300),
    "latent, prompt": LATENT,
    "latent, token": LATENT._replace(queries=1, keys=300),
}


def schedule(sizes):
    """Causal, aligned at the end."""
    before = sizes.keys - sizes.queries
    return create_block_mask(
        lambda b, h, q_idx, kv_idx: q_idx + before >= kv_idx, None, None, sizes.queries, sizes.keys
    )


def values(key, value):
    """The latent's are the first of its keys."""
    return key[..., : value.size(-1)] if key.size(-1) == LATENT.head_dim else value + 0


def attend(query, key, value, captures, block_mask):
    given = {"enable_gqa": True, "return_lse": True, "block_mask": block_mask}
    out, lse = flex_attention(query, key, values(key, value), **given)
    return out, lse, lse.detach()


def dense(query, key, value, captures, block_mask):
    rows, keys = query.size(2), key.size(2)
    scores = query @ key.mT / math.sqrt(query.size(-1))
    scores = scores.masked_fill(torch.ones(rows, keys).triu(keys - rows + 1).bool(), -math.inf)
    return scores.softmax(-1) @ values(key, value), scores.logsumexp(-1), scores.logsumexp(-1).detach()


def judged(call, run, dtype=torch.float32):
    judge(run(attend), dense, CALLS[call].inputs(dtype), [], schedule(CALLS[call]))


@pytest.mark.parametrize("call", CALLS)
def test_on_cpu(call):
    with served_by("cpu"):
        judged(call, functools.partial(torch.compile, backend="flex_inductor", dynamic=False))
    first = decisions()[0].kernels[0].kernel
    assert first == ("decode" if "token" in call else "forward")


@pytest.mark.parametrize("call", CALLS)
def test_no_local_memory_in_loops_of_an_h100(call):
    sizes = CALLS[call]._replace(keys=4096, queries=1 if "token" in call else 512)
    query, key, value = sizes.inputs(torch.bfloat16)
    mask = None if "token" in call else schedule(sizes)

    def run(query, key, value):
        return flex_attention(query, key, values(key, value), block_mask=mask, enable_gqa=True)

    found = attention_kernels(run, query, key, value, target="sm_90")
    kinds = ["decode", "combine"] if "token" in call else ["forward"]
    assert [*map(kind, found)] == kinds
    for kernel in found:
        _, compiled, resources = compile_untuned(kernel, "sm_90")
        assert resources.shared_bytes <= 227 << 10 and resources.spill_bytes == 0
        assert not any(i.matches(LOCAL_MEMORY) for loop in loops(machine_code(compiled)) for i in loop)
