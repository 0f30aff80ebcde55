"""diffusers' models with our attention, against their own on torch's scaled_dot_product_attention."""

from __future__ import annotations

import functools
import re
import threading
from pathlib import Path

import pytest
import torch
from diffusers import FluxTransformer2DModel, WanTransformer3DModel
from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn
from torch.nn.attention import flex_attention as torch_flex
from torch.utils.checkpoint import checkpoint

from flex_inductor import FlexError, create_block_mask, masks
from flex_inductor.integrations import diffusers as ours

ours.register()
CLOSE = {"atol": 1e-5, "rtol": 1e-5}
B, M, N, H, D = 2, 48, 80, 4, 16


@pytest.fixture
def calls(monkeypatch):
    """Our calls: a test without one proves nothing."""
    seen = []
    attend = ours.attend_tables

    def seeing(*given):
        seen.append(given)
        return attend(*given)

    monkeypatch.setattr(ours, "attend_tables", seeing)
    return seen


def tensors(keys=N, key_heads=H, **kinds):
    shapes = [(B, M, H, D), (B, keys, key_heads, D), (B, keys, key_heads, D)]
    return [torch.randn(shape, **kinds) for shape in shapes]


MASKS = {
    "keys": lambda: torch.rand(B, N) < 0.7,
    "keys of four": lambda: torch.rand(B, 1, 1, N) < 0.7,
    "queries and keys": lambda: torch.rand(B, 1, M, N) < 0.7,
    "heads": lambda: torch.rand(1, H, M, N) < 0.7,
    "added": lambda: torch.randn(B, H, M, N),
    "added to keys": lambda: torch.randn(B, 1, 1, N),
    "none": lambda: None,
}


@pytest.mark.parametrize("mask", MASKS)
def test_calls_give_what_the_native_backend_gives(mask):
    query, key, value = (tensor.requires_grad_() for tensor in tensors())
    given = MASKS[mask]()
    results = {}
    for backend in ("native", "flex_inductor"):
        with attention_backend(backend):
            out = dispatch_attention_fn(query, key, value, attn_mask=given)
        results[backend] = out, *torch.autograd.grad(out.square().sum(), (query, key, value))
    torch.testing.assert_close(results["flex_inductor"], results["native"], **CLOSE)


def test_causal_scaled_grouped_calls_do_too():
    query, key, value = tensors(M, 2)
    given = {"is_causal": True, "scale": 0.5, "enable_gqa": True}
    wanted = dispatch_attention_fn(query, key, value, **given, backend="native")
    torch.testing.assert_close(
        dispatch_attention_fn(query, key, value, **given, backend="flex_inductor"), wanted
    )


def test_the_logsumexp_has_diffusers_layout():
    query, key, value = tensors()
    out, lse = ours.attend(query, key, value, return_lse=True)
    scores = torch.einsum("bmhd,bnhd->bmhn", query, key) / D**0.5
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.testing.assert_close(out, torch.einsum("bmhn,bnhd->bmhd", scores.softmax(-1), value))


def test_a_model_passes_a_score_mod_on():
    query, key, value = tensors(M)
    bias = torch.randn(H)
    out = dispatch_attention_fn(
        query,
        key,
        value,
        attention_kwargs={"score_mod": lambda score, b, h, q, kv: score + bias[h] * (q - kv)},
        backend="flex_inductor",
    )
    distance = (torch.arange(M)[:, None] - torch.arange(M)) * bias[:, None, None]
    wanted = dispatch_attention_fn(query, key, value, attn_mask=distance[None], backend="native")
    torch.testing.assert_close(out, wanted, **CLOSE)


def flux():
    return FluxTransformer2DModel(
        in_channels=8, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, pooled_projection_dim=16, axes_dims_rope=(4, 4, 8),
    ).eval()  # fmt: skip


def of_flux():
    ids = torch.stack(torch.meshgrid(torch.zeros(1), torch.arange(6.0), torch.arange(8.0), indexing="ij"), -1)
    return {
        "hidden_states": torch.randn(2, 48, 8),
        "encoder_hidden_states": torch.randn(2, 7, 16),
        "pooled_projections": torch.randn(2, 16),
        "timestep": torch.tensor([0.3, 0.8]),
        "img_ids": ids.view(-1, 3),
        "txt_ids": torch.zeros(7, 3),
    }


def wan():
    return WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4,
        text_dim=16, freq_dim=16, ffn_dim=32, num_layers=2,
    ).eval()  # fmt: skip


GRID = (4, 6, 8)  # frames, rows and columns of patches


def of_wan():
    frames, rows, columns = GRID
    return {
        "hidden_states": torch.randn(1, 4, frames, 2 * rows, 2 * columns),
        "timestep": torch.tensor([300]),
        "encoder_hidden_states": torch.randn(1, 12, 16),
    }


def by(backend, model, given):
    model.set_attention_backend(backend)
    return model(**given, return_dict=False)[0]


@torch.no_grad()
@pytest.mark.parametrize(
    "make, given, layers", [(flux, of_flux, 2), (wan, of_wan, 4)], ids=["image", "video"]
)
def test_models_agree(make, given, layers, calls):
    model, given = make(), given()
    wanted = by("native", model, given)
    torch.testing.assert_close(by("flex_inductor", model, given), wanted, **CLOSE)
    assert len(calls) == layers


def test_gradients_of_models_agree():
    model, given = wan(), of_wan()
    grads = []
    for backend in ("native", "flex_inductor"):
        by(backend, model, given).square().sum().backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        model.zero_grad()
    torch.testing.assert_close(*grads, **CLOSE)


def windows():
    """Video attention within 3 frames and 3 x 5 patches, as a mask of blocks and as a table."""
    mask_mod = masks.neighborhood(GRID, (3, 3, 5))
    length = GRID[0] * GRID[1] * GRID[2]
    places = torch.arange(length)
    table = mask_mod(0, 0, places[:, None], places)
    return create_block_mask(mask_mod, None, None, length, length, BLOCK_SIZE=32), table


def dense(monkeypatch, table):
    """Wan on the native backend, under a dense mask where it has as many queries as keys."""

    def dispatch(query, key, value, attn_mask=None, **kwargs):
        mask = table if query.size(1) == key.size(1) else attn_mask
        return dispatch_attention_fn(query, key, value, attn_mask=mask, **kwargs)

    monkeypatch.setattr("diffusers.models.transformers.transformer_wan.dispatch_attention_fn", dispatch)


@torch.no_grad()
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_video_model_takes_a_mask_of_blocks(compiled, monkeypatch, calls):
    model, given = wan(), of_wan()
    block_mask, table = windows()
    without = by("native", model, given)
    with monkeypatch.context() as native:
        dense(native, table[None, None])
        wanted = by("native", model, given)
    model.set_attention_backend("flex_inductor")
    call = torch.compile(model, backend="flex_inductor", fullgraph=True) if compiled else model
    with ours.mods(block_mask):
        torch.testing.assert_close(call(**given, return_dict=False)[0], wanted, **CLOSE)
    assert (without - wanted).abs().max() > 1e-3
    torch.testing.assert_close(call(**given, return_dict=False)[0], without, **CLOSE)


@torch.no_grad()
def test_mods_are_of_one_thread(calls):
    model, given = wan(), of_wan()
    wanted = by("native", model, given)
    model.set_attention_backend("flex_inductor")
    with ours.mods(windows()[0]):
        other = threading.Thread(target=lambda: results.append(model(**given, return_dict=False)[0]))
        results = []
        other.start()
        other.join()
    torch.testing.assert_close(results[0], wanted, **CLOSE)


def nearer(score, b, h, q_idx, kv_idx):
    return score - (q_idx - kv_idx).abs() / 10


def trained(model, inputs, backward=torch.Tensor.backward, **given):
    """Gradients of a forward with the mods given, by a backward outside of them."""
    model.set_attention_backend("flex_inductor")
    model.zero_grad()
    with ours.mods(**given):
        loss = model(**inputs, return_dict=False)[0].square().sum()
    backward(loss)
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def under_other_mods(loss):
    with ours.mods(score_mod=lambda score, *_: 2 * score):
        loss.backward()


def in_another_thread(loss):
    other = threading.Thread(target=loss.backward)
    other.start()
    other.join()


@pytest.mark.parametrize("backward", [torch.Tensor.backward, under_other_mods, in_another_thread])
@pytest.mark.parametrize("reentrant", [None, True], ids=["by default", "reentrant"])
@pytest.mark.parametrize("given", [{"score_mod": nearer}, {}], ids=["mods", "no mods"])
def test_checkpointed_blocks_keep_the_mods_of_their_forward(given, reentrant, backward):
    model, inputs = wan().train(), of_wan()
    inputs["hidden_states"].requires_grad_()
    wanted = trained(model, inputs, **given)
    model.enable_gradient_checkpointing(reentrant and functools.partial(checkpoint, use_reentrant=True))
    torch.testing.assert_close(trained(model, inputs, backward, **given), wanted, **CLOSE)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_other_checkpoints_take_mods_inside_and_are_refused_outside(compiled, reentrant):
    query, key, value = (tensor.requires_grad_() for tensor in tensors(M))
    torch._dynamo.reset()
    attend = torch.compile(ours.attend, backend="flex_inductor") if compiled else ours.attend

    def with_mods(*given):
        with ours.mods(score_mod=nearer):
            return attend(*given)

    wanted = torch.autograd.grad(with_mods(query, key, value).sum(), key)
    checkpoint(with_mods, query, key, value, use_reentrant=reentrant).sum().backward()
    torch.testing.assert_close(key.grad, *wanted)
    with ours.mods(score_mod=nearer):
        out = checkpoint(attend, query, key, value, use_reentrant=reentrant)
    with pytest.raises(FlexError, match=r"^mods: got a call inside a backward"):
        out.sum().backward()


def test_a_call_keeps_its_mask_beside_that_of_mods():
    query, key, value = tensors(M)
    padding, window = torch.rand(B, M) < 0.7, masks.sliding_window(9, causal=False)
    padding[:, ::5] = True  # so that every query sees a key
    places = torch.arange(M)
    both = padding[:, None, None] & window(0, 0, places[:, None], places)
    wanted = dispatch_attention_fn(query, key, value, attn_mask=both, backend="native")
    with ours.mods(create_block_mask(window, None, None, M, M)):
        out = dispatch_attention_fn(query, key, value, attn_mask=padding, backend="flex_inductor")
        cross = dispatch_attention_fn(query, key[:, :9], value[:, :9], backend="flex_inductor")
    torch.testing.assert_close(out, wanted, **CLOSE)
    wanted = dispatch_attention_fn(query, key[:, :9], value[:, :9], backend="native")
    torch.testing.assert_close(cross, wanted, **CLOSE)


def test_models_that_ask_for_flex_get_ours(monkeypatch, calls):
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    for table in ("_backends", "_constraints", "_supported_arg_names"):
        monkeypatch.setattr(_AttentionBackendRegistry, table, dict(getattr(_AttentionBackendRegistry, table)))
    query, key, value = tensors(M)
    lists = torch.zeros(B, H, 3, 3, dtype=torch.int32), torch.full((B, H, 3), 2, dtype=torch.int32)
    lists[0][..., 0] = 2
    blocks = torch_flex.BlockMask.from_kv_blocks(
        lists[1], lists[0], BLOCK_SIZE=16
    )  # as Kandinsky 5 makes them
    table = torch.tensor([[1, 0, 1]] * 3).bool().repeat_interleave(16, 0).repeat_interleave(16, 1)
    wanted = dispatch_attention_fn(query, key, value, attn_mask=table, backend="native")
    ours.register(instead_of_flex=True)
    out = dispatch_attention_fn(query, key, value, attn_mask=blocks, backend=AttentionBackendName.FLEX)
    assert len(calls) == 1
    torch.testing.assert_close(out, wanted, **CLOSE)


def test_what_is_wrong_is_named():
    query, key, value = tensors()
    with pytest.raises(FlexError, match=r"^attn_mask: expected a mask .* \[2, 4, 48, 80\], got \[2, 79\]"):
        ours.attend(query, key, value, torch.ones(B, N - 1, dtype=torch.bool))
    with pytest.raises(FlexError, match=r"^attn_mask: expected one mask of blocks, got two"):
        ours.attend(query, key, value, torch.ones(B, N, dtype=torch.bool), is_causal=True)
    with pytest.raises(FlexError, match=r"^parallel_config: "):
        ours.attend(query, key, value, _parallel_config=object())
    with pytest.raises(FlexError, match="block_mask"):
        ours.attend(query, key, value, create_block_mask(masks.causal(), None, None, M, M))


def test_the_example_of_the_docs_runs(calls):
    text = (Path(__file__).parents[3] / "docs" / "diffusers.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(example, {})
    assert len(calls) == 4
