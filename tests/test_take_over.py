"""Code written for torch's flex_attention, served without changing it."""

import concurrent.futures
import itertools

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask as torchs_block_mask
from torch.nn.attention.flex_attention import flex_attention as torchs

import flex_inductor
from flex_inductor import AuxRequest, create_block_mask
from flex_inductor.reference import reference
from tests.support import attention_of, dense_of, judge, served_by


@pytest.fixture(scope="module")
def qkv():
    return [torch.randn(2, 4, 40, 8) for _ in range(3)]


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


MASK = create_block_mask(causal, None, None, 40, 40, device="cpu", BLOCK_SIZE=16)
BIAS = torch.randn(40)


def biased(score, b, h, q_idx, kv_idx):
    return score + BIAS[q_idx] * BIAS[kv_idx]


@pytest.mark.parametrize(("mod", "mask"), [(None, None), (biased, MASK)], ids=["plain", "mods"])
def test_torchs_nodes_are_replaced_in_compiled_code(qkv, mod, mask):
    compiled = torch.compile(
        lambda q, k, v: torchs(q, k, v, mod, mask), backend="flex_inductor", fullgraph=True
    )
    with served_by("cpu"):
        torch.testing.assert_close(compiled(*qkv), reference(*qkv, mod, mask)[0])


def test_torch_refuses_without_the_switch_and_after_it(qkv):
    leaves = [t.clone().requires_grad_() for t in qkv]
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        torchs(*leaves)
    flex_inductor.take_over().undo()
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        torchs(*leaves)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_switch_gives_gradients_and_aux(qkv, compiled):
    attend = attention_of(lambda: biased, attention=torchs)
    with flex_inductor.take_over():
        if not compiled:
            judge(attend, dense_of(lambda: biased), qkv, (), MASK)
            return
        with served_by("cpu", "cpu"):
            attend = torch.compile(attend, backend="flex_inductor", fullgraph=True)
            judge(attend, dense_of(lambda: biased), qkv, (), MASK)


def test_lse_in_natural_logarithm_through_torchs_op(qkv):
    """Torch's op gives log2 and its wrapper multiplies by ln 2; ours is converted to fit."""
    compiled = torch.compile(
        lambda q, k, v: torchs(q, k, v, return_aux=AuxRequest(lse=True))[1].lse, backend="flex_inductor"
    )
    with served_by("cpu"):
        torch.testing.assert_close(compiled(*qkv), reference(*qkv)[1])


def attributes():
    return [(f.__code__, f.__defaults__, f.__kwdefaults__) for f in (torchs, torchs_block_mask)]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_switches_are_undone_in_any_order(order):
    before = attributes()
    switches = [flex_inductor.take_over() for _ in range(3)]
    for number in order:
        assert all(ours != torchs for ours, torchs in zip(attributes(), before, strict=True))
        switches[number].undo()
        switches[number].undo()
    assert attributes() == before


def test_switch_is_undone_when_something_fails():
    before = attributes()
    with pytest.raises(ZeroDivisionError), flex_inductor.take_over(), flex_inductor.take_over():
        raise ZeroDivisionError
    assert attributes() == before


def test_switches_in_many_threads():
    before = attributes()

    def switch_often():
        for _ in range(300):
            with flex_inductor.take_over():
                assert attributes() != before

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for switching in [pool.submit(switch_often) for _ in range(4)]:
            switching.result()
    assert attributes() == before
