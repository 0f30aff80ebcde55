"""flex_attention of nested tensors against padded ones, of which each sequence sees its own part."""

import pytest
import torch
from support import judge, served_by
from torch.nested import nested_tensor, nested_tensor_from_jagged

from flex_inductor import AuxRequest, Sequences, create_block_mask, flex_attention
from flex_inductor.errors import FlexError
from flex_inductor.reference import reference

HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 8, 4
LENGTHS = ([5, 0, 50, 1, 17], [5, 3, 50, 64, 40])


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def offsets_of(lengths):
    return torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0))


def tensors(lengths, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = (
        (sum(lengths[side]), heads, dim)
        for side, heads, dim in ((0, HEADS, DIM), (1, KV_HEADS, DIM), (1, KV_HEADS, VALUE_DIM))
    )
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]


def nested(packed, offsets):
    """[T, H, D] as [batch, H, length, D]."""
    return nested_tensor_from_jagged(packed, offsets).transpose(1, 2)


def bias_of(table):
    return lambda score, b, h, q_idx, kv_idx: score + table[b, h, q_idx - kv_idx + 100]


def as_nested(lengths, with_mask, attend=flex_attention):
    offsets = [offsets_of(side) for side in lengths]

    def ours(q, k, v, captures, _):
        q, k, v = (nested(t[0].transpose(0, 1), offsets[i > 0]) for i, t in enumerate((q, k, v)))
        mask = Sequences.from_nested(q, k).mask(causal) if with_mask else None
        out, aux = attend(
            q,
            k,
            v,
            bias_of(*captures),
            mask,
            enable_gqa=True,
            return_aux=AuxRequest(lse=True, max_scores=True),
        )
        assert out.shape[:3] == aux.lse.shape == q.shape[:3]
        return tuple(t.values()[None] for t in (out, aux.lse, aux.max_scores))

    return ours


def alone(lengths, with_mask):
    offsets = [offsets_of(side).tolist() for side in lengths]

    def dense(q, k, v, captures, _):
        parts = []
        for at in range(len(lengths[0])):
            rows, keys = (slice(*side[at : at + 2]) for side in offsets)
            shift = lengths[1][at] - lengths[0][at]

            def mod(score, b, h, q_idx, kv_idx, at=at, shift=shift):
                score = bias_of(*captures)(score, b + at, h, q_idx + shift, kv_idx)
                return torch.where(q_idx + shift >= kv_idx, score, -torch.inf) if with_mask else score

            if rows.stop > rows.start:
                parts.append(reference(q[:, :, rows], k[:, :, keys], v[:, :, keys], mod))
        return tuple(torch.cat(found, 2) for found in zip(*parts, strict=True))

    return dense


@pytest.mark.parametrize(
    "compiled, with_mask",
    [(False, True), (False, False), (True, True), pytest.param(True, False, marks=pytest.mark.slow)],
)
def test_values_and_gradients(compiled, with_mask):
    attend = (
        torch.compile(flex_attention, backend="flex_inductor", fullgraph=True) if compiled else flex_attention
    )
    table = torch.randn(5, HEADS, 200, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    given = tensors(LENGTHS, torch.float32 if compiled else torch.float64)
    with served_by("cpu" if compiled else "chunked"):
        judge(
            as_nested(LENGTHS, with_mask, attend),
            alone(LENGTHS, with_mask),
            [x.transpose(0, 1)[None] for x in given],
            (table,),
        )


def test_holes_between_sequences():
    """What lies between the end of a sequence and the next is nobody's."""
    offsets, lengths = torch.tensor([0, 6, 10]), torch.tensor([3, 4])
    values = torch.randn(10, 2, 8)
    jagged = nested_tensor_from_jagged(values, offsets, lengths).transpose(1, 2)
    values[3:6] = torch.nan
    out = flex_attention(jagged, jagged, jagged)
    for at, (start, length) in enumerate(((0, 3), (6, 4))):
        part = values[None, start : start + length].transpose(1, 2)
        torch.testing.assert_close(out[at][None], flex_attention(part, part, part))
    assert out.lengths() is jagged.lengths()


def jagged(*lengths, heads=HEADS):
    return nested_tensor([torch.randn(n, heads, DIM) for n in lengths], layout=torch.jagged).transpose(1, 2)


def bad_calls():
    query = jagged(3, 5)
    other = Sequences.from_lengths([5, 3]).mask(causal)
    shorter = Sequences.from_lengths([3, 4, 1]).mask(causal)
    strided = torch.nested.nested_tensor([torch.randn(HEADS, 3, DIM)])
    dense = create_block_mask(causal, None, None, 8, 8, device="cpu")
    return {
        "not jagged": (
            (query, query, query.values()),
            {},
            "value: expected a nested tensor with layout=torch.jagged, got a dense",
        ),
        "strided": ((strided, strided, strided), {}, "query: .* got a nested tensor of another layout"),
        "not transposed": ((query.transpose(1, 2),) * 3, {}, "query: .*another dimension does.*transpose"),
        "other offsets": ((query, query, jagged(3, 5)), {}, "value: .*other offsets than key"),
        "another count": ((query, jagged(8), jagged(8)), {}, "offsets|sequences"),
        "a dense mask": ((query,) * 3, {"block_mask": dense}, "block_mask: .*from_nested.*got BlockMask"),
        "mask of others": ((query,) * 3, {"block_mask": other}, "made by other sequences"),
        "mask of more": ((query,) * 3, {"block_mask": shorter}, "made by other sequences"),
        "heads": ((query, *(jagged(3, 5, heads=3),) * 2), {}, "heads"),
    }


@pytest.mark.parametrize(  # torch refuses to compile calls with strided ones
    "case, compiled",
    [(case, how) for case in bad_calls() for how in (False, True) if case != "strided" or not how],
)
def test_bad_input(case, compiled):
    attend = flex_attention
    if compiled:
        torch.compiler.reset()
        attend = torch.compile(flex_attention, backend="flex_inductor", fullgraph=True)
    args, kwargs, text = bad_calls()[case]
    # What compiled kernels find in the values is torch's assertion.
    kind = RuntimeError if compiled and case == "mask of others" else FlexError
    with pytest.raises(kind, match=text):
        attend(*args, **kwargs)
