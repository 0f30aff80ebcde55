"""options={"verify": True} for calls on sequences: what is wrong in one row of one sequence is found out."""

import warnings

import pytest
import torch
from support import served_by

from flex_inductor import FlexError, Sequences, varlen_attention
from flex_inductor.op.eager import chunked
from flex_inductor.verify import check
from tests.sequences.appended import int32

HEADS, KV_HEADS, DIM = 4, 2, 8
QUERIES, KEYS = [5, 0, 50, 17], [7, 3, 150, 17]


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def by_sequence(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx + h) & ((q_idx + b) % 5 != 0)


def case(kind):
    """Sequences, and a query, key and value for them; what no sequence has is NaN."""
    generator = torch.Generator().manual_seed(0)
    cu = int32([0, 5, 5, 55, 72])
    shape = {"packed": (200,), "rows": (6, 160), "pages": (40, 16)}[kind]
    if kind == "packed":
        sequences = Sequences(cu, int32([0, 7, 10, 160, 177]))
    elif kind == "rows":
        sequences = Sequences(
            cu, used_k=int32([9, 3, 152, 17]), left_pad_k=int32([2, 0, 2, 0]), cache_rows=int32([4, 1, 0, 5])
        )
    else:
        table = torch.randperm(40, generator=generator)[:40].view(4, 10).int()
        sequences = Sequences(cu, used_k=int32(KEYS), pages=table, page_size=16)
    query = torch.randn(80, HEADS, DIM, generator=generator)
    key, value = (torch.randn(*shape, KV_HEADS, DIM, generator=generator) for _ in range(2))
    return sequences, query, key, value


def compiled():
    torch._dynamo.reset()
    return torch.compile(
        varlen_attention, backend="flex_inductor", options={"verify": True, "route": "chunked"}
    )


@pytest.fixture
def spoil(monkeypatch):
    """Adds to an element of one of a route's results."""

    def change(name, result, place, by=1e-2):
        right = getattr(chunked, name)

        def wrong(*args):
            results = right(*args)
            (results[result] if result < 3 else results[3][0])[place] += by
            return results

        monkeypatch.setattr(chunked, name, wrong)

    return change


@pytest.mark.parametrize("mask_mod", [causal, by_sequence])
@pytest.mark.parametrize("kind", ["packed", "rows", "pages"])
def test_forward(kind, mask_mod, spoil):
    sequences, *given = case(kind)
    mask, attend = sequences.mask(mask_mod, heads=HEADS, block_size=(16, 16)), compiled()
    with torch.no_grad(), served_by("chunked"):
        attend(*given, sequences, block_mask=mask, enable_gqa=True)
        spoil("forward", 0, (0, 3, 20, 1))
        text = r"^verify: out is wrong in sequence 2, head 3, queries 0 to 49\. At \[2, 3, 15, 1\] the kernel gives "
        with pytest.raises(FlexError, match=text):
            attend(*given, sequences, block_mask=mask, enable_gqa=True)


def test_rows_of_no_sequence(spoil):
    sequences, *given = case("packed")
    spoil("forward", 0, (0, 1, 75, 0))
    with (
        torch.no_grad(),
        pytest.raises(FlexError, match=r"^verify: out is wrong in batch 0, head 1, queries 75 to 75\."),
    ):
        compiled()(*given, sequences, enable_gqa=True)


@pytest.mark.parametrize(
    "result, place, text",
    [
        (None, None, None),
        (0, (0, 2, 70, 3), r"d_q is wrong in sequence 3, head 2, queries 0 to 16\. At \[3, 2, 15, 3\]"),
        (1, (0, 1, 100, 0), r"d_k is wrong in sequence 2, head 1, keys 0 to 127\. At \[2, 1, 90, 0\]"),
        (2, (0, 0, 6, 7), r"d_v is wrong in sequence 0, head 0, keys 0 to 6\. At \[0, 0, 6, 7\]"),
        (1, (0, 1, 190, 0), r"d_k is wrong in batch 0, head 1, keys 190 to 190\. "),
        (3, (2,), r"d_captures\[0\] is wrong in the captured tensor\. At \[2\]"),
    ],
)
def test_backward(result, place, text, spoil):
    sequences, *given = case("packed")
    slopes = torch.rand(HEADS, requires_grad=True)
    given = [x.requires_grad_() for x in given]

    def alibi(score, b, h, q_idx, kv_idx):
        return score - slopes[h] * (q_idx - kv_idx)

    out = compiled()(*given, sequences, alibi, sequences.mask(causal, block_size=16), enable_gqa=True)
    if result is None:
        return out.square().sum().backward()
    spoil("backward", result, place, 1.0)
    with pytest.raises(FlexError, match=f"^verify: {text}"):
        out.square().sum().backward()


def test_large_calls_are_sampled(spoil, monkeypatch):
    """The last sequence is always among those that are checked, and its last row."""
    monkeypatch.setattr(check, "WHOLE_LANES", 0)
    monkeypatch.setattr(check, "SAMPLES", 2)
    sequences, *given = case("packed")
    given = [x.requires_grad_() for x in given]
    attend = compiled()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        attend(*given, sequences, enable_gqa=True).square().sum().backward()
    spoil("forward", 0, (0, 0, 30, 0))
    attend(*given, sequences, enable_gqa=True)  # of the second
    spoil("forward", 0, (0, 0, 71, 0))
    with pytest.raises(
        FlexError, match=r"^verify: out is wrong in sequence 3, head 0, queries 0 to 16\. At \[3, 0, 16, 0\]"
    ):
        attend(*given, sequences, enable_gqa=True)
