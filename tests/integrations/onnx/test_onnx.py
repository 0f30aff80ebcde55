"""Exported models, run by onnx's reference evaluator, against the models themselves."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import nn

from flex_inductor import AuxRequest, BlockMask, FlexError, create_block_mask, flex_attention, masks, mods
from flex_inductor.integrations import onnx as ours

B, H, M, N, D = 2, 4, 24, 40, 8


class Attention(nn.Module):
    """A projection, attention, and a projection of what it returns."""

    def __init__(self, score_mod=None, mask_mod=None, block_mask=None, **arguments):
        super().__init__()
        self.inner = nn.Linear(D, D)
        self.slopes = nn.Parameter(torch.randn(H))
        self.ids = nn.Buffer(torch.arange(64) // 9)
        self.score_mod, self.mask_mod, self.block_mask, self.arguments = (
            score_mod,
            mask_mod,
            block_mask,
            arguments,
        )

    def forward(self, query, key, value):
        score_mod, mask_mod, block_mask = (
            given(self) if given is not None else None
            for given in (self.score_mod, self.mask_mod, self.block_mask)
        )
        if mask_mod is not None:
            block_mask = create_block_mask(mask_mod, *query.shape[:3], key.shape[2])
        return self.inner(
            flex_attention(self.inner(query), key, value, score_mod, block_mask, **self.arguments)
        )


def inputs(keys=N, key_heads=H, batch=B, queries=M, dtype=torch.float32):
    shapes = [(batch, H, queries, D), (batch, key_heads, keys, D), (batch, key_heads, keys, D)]
    return tuple(torch.randn(shape).to(dtype) for shape in shapes)


def run(program, path, *args):
    """What the file gives, and which operators it has."""
    program.save(path)
    onnx.checker.check_model(path, full_check=True)
    graph = onnx.load(path).graph
    feeds = {value.name: arg.numpy() for value, arg in zip(graph.input, args, strict=True)}
    found = ReferenceEvaluator(str(path)).run(None, feeds)
    return [torch.from_numpy(result) for result in found], [node.op_type for node in graph.node]


def lists():
    """Blocks of 8, of which each row has the first and the last; no mask_mod says so."""
    counts, indices = torch.full((1, 1, 3), 2, dtype=torch.int32), torch.zeros(1, 1, 3, 5, dtype=torch.int32)
    indices[..., 0] = 4
    return BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=8, seq_lengths=(M, N))


LISTS = lists()


def alibi(model):
    return lambda score, b, h, q_idx, kv_idx: score + model.slopes[h] * (kv_idx - q_idx)


def same_document(model):
    return lambda b, h, q_idx, kv_idx: model.ids[q_idx] == model.ids[kv_idx]


CALLS = {
    "plain": {},
    "bias": {"score_mod": alibi, "scale": 0.3},
    "softcap": {"score_mod": lambda _: mods.softcap(0.5)},
    "causal": {"mask_mod": lambda _: masks.causal()},
    "bias, documents": {"score_mod": alibi, "mask_mod": same_document},
    "rows that see nothing": {"mask_mod": lambda _: lambda b, h, q, kv: (q > 5) & (kv < 30) & (b + h > 0)},
    "neighbours": {"mask_mod": lambda _: lambda b, h, q, kv: (q // 5 - kv // 5).abs() <= 1},
    "lists": {"block_mask": lambda _: LISTS},
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_is_flex_attention(call, tmp_path):
    model, args = Attention(**CALLS[call]), inputs()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", UserWarning)
        program = ours.export(model, args)
        (result,), operators = run(program, tmp_path / "model.onnx", *args)
        assert operators.count("FlexAttention") == 1 and "Softmax" not in operators
        torch.testing.assert_close(result, model(*args), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype, close", [(torch.float16, 2e-3), (torch.float64, 1e-6)])
def test_dtypes(dtype, close, tmp_path):
    model = Attention(alibi, lambda _: masks.causal()).to(dtype)
    args = inputs(dtype=dtype)
    with torch.no_grad():
        (result,), operators = run(ours.export(model, args), tmp_path / "model.onnx", *args)
        assert "FlexAttention" in operators
        torch.testing.assert_close(result, model(*args), atol=close, rtol=close)


def test_grouped_queries_and_other_lengths(tmp_path):
    """One file serves other batches and lengths."""
    model = Attention(alibi, lambda _: masks.sliding_window(7, causal=False), enable_gqa=True)
    batch, queries, keys = (torch.export.Dim(name, min=2, max=64) for name in ("batch", "queries", "keys"))
    shapes = ({0: batch, 2: queries}, {0: batch, 2: keys}, {0: batch, 2: keys})
    program = ours.export(model, inputs(key_heads=2), dynamic_shapes=shapes)
    for sizes in ((40, 2, 2, 24), (50, 2, 3, 33), (9, 2, 4, 9)):
        args = inputs(*sizes)
        with torch.no_grad():
            (result,), operators = run(program, tmp_path / "model.onnx", *args)
            assert "FlexAttention" in operators
            torch.testing.assert_close(result, model(*args), atol=1e-5, rtol=1e-5)


def test_two_calls_in_a_model(tmp_path):
    first, second = Attention(alibi, lambda _: masks.causal()), Attention(alibi, same_document)

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = first, second

        def forward(self, query, key, value):
            return self.second(self.first(query, key, value), key, value)

    model, args = Both(), inputs()
    with torch.no_grad():
        (result,), operators = run(ours.export(model, args), tmp_path / "model.onnx", *args)
        assert operators.count("FlexAttention") == 2
        torch.testing.assert_close(result, model(*args), atol=1e-5, rtol=1e-5)


class Computed(Attention):
    """A bias and documents that the model computes."""

    def forward(self, query, key, value, ids):
        slopes = (self.slopes * query.mean()).exp()
        mask = create_block_mask(lambda b, h, q, kv: ids[q] <= ids[kv], None, None, M, N)
        return self.inner(
            flex_attention(query, key, value, lambda s, b, h, q, kv: s * slopes[h], mask, enable_gqa=True)
        )


class Logsumexp(Attention):
    def forward(self, query, key, value):
        mask = create_block_mask(lambda b, h, q, kv: q > kv, None, None, M, N)
        out, aux = flex_attention(
            query, key, value, block_mask=mask, return_aux=AuxRequest(lse=True, max_scores=True)
        )
        return out, aux.lse, aux.max_scores


@pytest.mark.parametrize(
    "model, more, reason",
    [
        (Computed(), (torch.arange(N) % 11,), "a mod or a mask reads what the model computes"),
        (Logsumexp(), (), "its logsumexp or maximum is read"),
    ],
)
def test_a_call_without_a_place_is_dense_and_says_so(model, more, reason, tmp_path):
    args = (*inputs(key_heads=2 if more else H), *more)
    with torch.no_grad():
        with pytest.warns(UserWarning, match=f"becomes dense attention.* {reason}"):
            program = ours.export(model, args)
        results, operators = run(program, tmp_path / "model.onnx", *args)
        wanted = model(*args)
        assert "FlexAttention" not in operators
        torch.testing.assert_close(
            results, list(wanted) if isinstance(wanted, tuple) else [wanted], atol=1e-5, rtol=1e-5
        )


def test_what_is_not_served_is_named():
    with pytest.raises(FlexError, match=r"^export to ONNX: got a call with sinks\. Served are"):
        ours.export(Attention(sinks=torch.randn(H)), inputs())


def test_blocks_of_another_mask_are_not_dropped():
    class Mixed(Attention):
        def forward(self, query, key, value):
            mask = create_block_mask(masks.sliding_window(9), None, None, M, N, BLOCK_SIZE=8)
            mask.mask_mod = masks.causal()
            return flex_attention(query, key, value, block_mask=mask)

    with pytest.raises(FlexError, match=r"^export to ONNX: got a call with blocks of another mask_mod"):
        ours.export(Mixed(), inputs())


def test_the_example_of_the_docs_runs(tmp_path, monkeypatch):
    text = (Path(__file__).parents[3] / "docs" / "export.md").read_text()
    (example,) = re.findall(r"## ONNX\n.*?```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(example, {})
