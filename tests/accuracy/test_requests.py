"""What a call returns beside its output."""

import pytest
import torch
from torch.nn.attention import flex_attention as of_torch

from flex_inductor import AuxRequest, Sequences, flex_attention, varlen_attention

TORCHS = of_torch.AuxRequest(lse=True)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_largest_score_of_each_head(compiled):
    run = torch.compile(flex_attention, backend="flex_inductor") if compiled else flex_attention
    query, key = torch.randn(2, 3, 40, 16), torch.randn(2, 3, 50, 16)
    _, aux = run(query, key, key, return_aux=AuxRequest(head_max_scores=True))
    assert aux.max_scores is None and aux.lse is None
    torch.testing.assert_close(aux.head_max_scores, (query @ key.mT / 4).amax((0, 2, 3)))


def test_of_packed_and_nested_sequences_and_of_none():
    packed, sequences = torch.randn(9, 2, 16), Sequences.from_lengths([3, 4])
    request = AuxRequest(lse=True, max_scores=True, head_max_scores=True, rng_state=True)
    _, aux = varlen_attention(packed, packed, packed, sequences, dropout_p=0.2, return_aux=request)
    assert aux.lse.shape == aux.max_scores.shape == (2, 9)
    assert torch.equal(aux.head_max_scores, aux.max_scores[:, :7].amax(1))
    nested = torch.nested.nested_tensor([packed[:3], packed[3:7]], layout=torch.jagged).transpose(1, 2)
    out, of_nested = flex_attention(nested, nested, nested, return_aux=request)
    assert out.is_nested and of_nested.lse.is_nested
    assert torch.equal(of_nested.head_max_scores, aux.head_max_scores)
    none = torch.randn(0, 2, 4, 16)
    _, aux = flex_attention(none, none, none, return_aux=request)
    assert aux.head_max_scores.tolist() == [-torch.inf] * 2


def test_torchs_own_request_gets_torchs_own_answer():
    query = torch.randn(1, 2, 5, 16)
    _, aux = flex_attention(query, query, query, return_aux=TORCHS)
    assert type(aux) is of_torch.AuxOutput and aux.max_scores is None
    torch.testing.assert_close(aux.lse, (query @ query.mT / 4).logsumexp(-1))
