"""Where sequences lie: what is accepted, the forms they come in, and the windows that masks are."""

import math

import pytest
import torch
from torch.utils import _pytree as pytree

from flex_inductor import Sequences, pad, unpad
from flex_inductor.errors import FlexError
from flex_inductor.masks.analysis.trace import trace_mask
from flex_inductor.masks.analysis.window import window_of
from flex_inductor.visits.window import Window


def offsets(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


BAD = {
    "int64": (lambda: Sequences(offsets(0, 3, dtype=torch.int64)), r"^cu_q: expected an int32 tensor of one dimension, got a tensor of shape \[2\] and dtype torch.int64"),
    "a list": (lambda: Sequences([0, 3]), r"^cu_q: expected an int32 tensor of one dimension, got a list"),
    "two dimensions": (lambda: Sequences(offsets(0, 3)[None]), r"^cu_q: expected .* of shape \[1, 2\]"),
    "half a page": (lambda: Sequences(offsets(0, 5), used_k=offsets(5), pages=offsets(0, 1)[None], page_size=4.5), r"^page_size: expected a positive integer"),
    "not nested": (lambda: Sequences.from_nested(None), r"^query: expected a nested tensor with layout=torch.jagged, got NoneType"),
    "empty": (lambda: Sequences(offsets()), r"^cu_q: expected the offset 0 and one more"),
    "falls": (lambda: Sequences(offsets(0, 5, 3)), r"^cu_q: expected offsets .* falls from 5 to 3 at entry 2"),
    "starts later": (lambda: Sequences(offsets(1, 5)), r"^cu_q: expected offsets .* starts at 1"),
    "fewer keys": (lambda: Sequences(offsets(0, 5), offsets(0, 2, 5)), r"^cu_k: has 2 sequences and cu_q has 1"),
    "max": (lambda: Sequences(offsets(0, 5, 12), max_q=6), r"^max_q: is 6, and the longest sequence has 7 tokens"),
    "max of keys": (lambda: Sequences(offsets(0, 5), offsets(0, 9), max_k=6), r"^max_k: is 6, .* 9 tokens"),
    "used": (lambda: Sequences(offsets(0, 5, 9), offsets(0, 5, 9), used_k=offsets(5, 6)), r"^used_k: sequence 1 uses 6 tokens of a room of 4"),
    "used count": (lambda: Sequences(offsets(0, 5), used_q=offsets(1, 1)), r"^used_q: expected an int32 tensor with an entry for each of 1"),
    "differences that wrap around": (lambda: Sequences(offsets(0, 2**30, -(2**31), -(2**30))), r"^cu_q: .* falls from 1073741824"),
    "max of floats": (lambda: Sequences(offsets(0, 5), max_q=6.0), r"^max_q: expected an integer, got a float"),
    "max of text": (lambda: Sequences(offsets(0, 5), max_k="6"), r"^max_k: expected an integer, got a str"),
    "lengths of floats": (lambda: Sequences.from_lengths([3.5, 2]), r"^lengths_q: expected a list of integers or"),
    "lengths of nothing": (lambda: Sequences.from_lengths([3], "3"), r"^lengths_k: expected a list of integers .* got a str"),
    "flags for lengths": (lambda: Sequences.from_lengths(torch.tensor([True])), r"^lengths_q: .* got a tensor of shape \[1\] and dtype torch.bool"),
    "negative lengths": (lambda: Sequences.from_lengths([3, -1]), r"^lengths_q: expected lengths from 0 on"),
    "lengths too long": (lambda: Sequences.from_lengths([2**30] * 5), r"^lengths_q: .* add up to at most 2,147,483,647"),
    "padding": (lambda: Sequences.from_padding_mask(torch.ones(2, 3)), r"^mask: expected a bool tensor \[batch, length\]"),
    "another mask": (lambda: unpad(torch.ones(2, 5, 3), torch.ones(2, 4, dtype=torch.bool)), r"^padded: expected a tensor of shape \[2, 4, ...\]"),
    "more tokens": (lambda: pad(torch.ones(9, 3), torch.ones(2, 4, dtype=torch.bool)), r"^packed: expected a tensor of 8 tokens"),
    "no tensor": (lambda: unpad([1], torch.ones(1, 1, dtype=torch.bool)), r"^padded: .* got a list"),
    "nested": (lambda: Sequences.from_nested(torch.ones(2, 3)), r"^query: expected a nested tensor with layout=torch.jagged"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_wrong_sequences(case):
    make, text = BAD[case]
    with pytest.raises(FlexError, match=text):
        make()


def test_forms():
    mask = torch.tensor([[True, True, False], [False, True, True], [False, False, False]])
    padded = torch.randn(3, 3, 2, requires_grad=True)
    sequences = Sequences.from_padding_mask(mask)
    assert sequences.cu_q.tolist() == [0, 2, 4, 4] and (sequences.max_q, sequences.total_q) == (2, 4)
    packed = unpad(padded, mask)
    assert torch.equal(packed, padded[mask])
    back = pad(packed, mask, -1.0)
    assert torch.equal(back, torch.where(mask[..., None], padded, -1.0))
    (grad,) = torch.autograd.grad(back.sum(), padded)
    assert torch.equal(grad, mask[..., None].expand(3, 3, 2).float())
    nested = torch.nested.nested_tensor([torch.ones(3, 2), torch.ones(5, 2)], layout=torch.jagged)
    assert Sequences.from_nested(nested).cu_k.tolist() == [0, 3, 8]
    assert Sequences.from_lengths([3, 5], torch.tensor([1, 2])).cu_k.tolist() == [0, 1, 3]


def test_a_pytree():
    sequences = Sequences.from_lengths([3, 5], [4, 9])
    mask = sequences.mask(lambda b, h, q, kv: q >= kv)
    leaves, spec = pytree.tree_flatten((sequences, mask))
    again, mask_again = pytree.tree_unflatten(leaves, spec)
    assert again.cu_k is sequences.cu_k and again.max_k == 9 and again.used_q is None
    assert mask_again.schedule == mask.schedule and mask_again.mask_mod is mask.mask_mod


NINE = 9
WINDOWS = {
    "causal": (lambda b, h, q, kv: q >= kv, Window(right=0)),
    "turned": (lambda b, h, q, kv: kv <= q, Window(right=0)),
    "strict": (lambda b, h, q, kv: kv < q, Window(right=-1)),
    "moved": (lambda b, h, q, kv: kv <= q + 3, Window(right=3)),
    "from the future": (lambda b, h, q, kv: q <= kv, Window(left=0)),
    "window": (lambda b, h, q, kv: (q >= kv) & (q - kv <= NINE), Window(9, 0)),
    "the other way round": (lambda b, h, q, kv: (-kv + q + 1 > 0) & (kv - q >= -9), Window(9, 0)),
    "around": (lambda b, h, q, kv: (q - kv).abs() < NINE, Window(8, 8)),
    "around something else": (lambda b, h, q, kv: (q - kv + 2).abs() <= 8, Window(6, 10)),
    "and true": (lambda b, h, q, kv: (q >= kv) & True, Window(math.inf, 0)),
    "chunks": (lambda b, h, q, kv: q // 4 == kv // 4, Window(chunk=4)),
    "causal chunks": (lambda b, h, q, kv: (q >= kv) & (kv // 4 == q // 4), Window(right=0, chunk=4)),
    "chunks of chunks": (
        lambda b, h, q, kv: (q // 12 == kv // 12) & (q // 4 == kv // 4),
        Window(chunk=4),
    ),
    "prefix": (lambda b, h, q, kv: (kv < 3) | (q >= kv + 1), Window(right=-1, prefix=3)),
    "logical": (lambda b, h, q, kv: torch.logical_and(q >= kv, q < kv + 5), Window(4, 0)),
}
OTHERS = {
    "prefix of a window": lambda b, h, q, kv: ((q >= kv) & (q - kv < 9)) | (kv < 3),
    "prefix and more": lambda b, h, q, kv: ((q >= kv) | (kv < 3)) & (q - kv < 9),
    "prefix of queries": lambda b, h, q, kv: (q >= kv) | (q < 3),
    "absolute": lambda b, h, q, kv: kv < 3,
    "both ways": lambda b, h, q, kv: q + kv < 3,
    "twice": lambda b, h, q, kv: 2 * q >= kv,
    "by head": lambda b, h, q, kv: q >= kv + h,
    "chunks of others": lambda b, h, q, kv: q // 4 == kv // 8,
    "moved chunks": lambda b, h, q, kv: (q + 1) // 4 == kv // 4,
    "one side's chunk": lambda b, h, q, kv: q // 4 == q // 4,
    "a place of chunks": lambda b, h, q, kv: q // 4 == 1,
    "chunks that overlap": lambda b, h, q, kv: (q // 4 == kv // 4) & (q // 6 == kv // 6),
    "not": lambda b, h, q, kv: ~(q >= kv),
    "far away": lambda b, h, q, kv: (q - kv).abs() > 3,
    "floats": lambda b, h, q, kv: q >= kv + 0.5,
    "and false": lambda b, h, q, kv: (q >= kv) & False,
    "a factor": lambda b, h, q, kv: torch.ops.aten.add.Scalar(q, 5, -2) >= kv,
    "sums that wrap around": lambda b, h, q, kv: q - kv + (2**31 - 1) + (2**31 - 1) <= 3,
    "a table": lambda b, h, q, kv: q - kv <= torch.tensor([3, 4])[b],
}


@pytest.mark.parametrize("case", WINDOWS)
def test_windows(case):
    mask_mod, expected = WINDOWS[case]
    assert window_of(trace_mask(mask_mod, torch.device("cpu"))) == expected
    q, kv = torch.arange(30)[:, None], torch.arange(30)
    seen = (kv >= q - expected.left) & (kv <= q + expected.right)
    if expected.chunk:
        seen &= q // expected.chunk == kv // expected.chunk
    seen |= kv < expected.prefix
    assert torch.equal(mask_mod(0, 0, q, kv), seen) and math.inf in (*expected, math.inf)


@pytest.mark.parametrize("case", OTHERS)
def test_no_windows(case):
    assert window_of(trace_mask(OTHERS[case], torch.device("cpu"))) is None
