"""torchtitan's Trainer with FlexInductorConverter, beside torchtitan's own modules."""

import functools
import re
from pathlib import Path

import pytest
import torch
from torch._higher_order_ops import inductor_compiled_code
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torchtitan.components.lora import LoRAConverter
from torchtitan.distributed import activation_checkpoint
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from flex_inductor import create_block_mask, flex_attention
from flex_inductor.errors import FlexValueError
from flex_inductor.integrations.torchtitan import FlexInductorAttention, FlexInductorConverter
from flex_inductor.masks import causal
from flex_inductor.op import attention
from tests.integrations.torchtitan import debug

ROOT = Path(__file__).parents[3]
FULL = {"parallelism.spmd_backend": "full_dtensor"}
FSDP = {}
CP = {"parallelism.context_parallel_degree": 2, "parallelism.data_parallel_shard_degree": 1}
TP = {"parallelism.tensor_parallel_degree": 2, "parallelism.data_parallel_shard_degree": 1}
PLANS = {"all_gather", "cast"}


def both(group, own, settings, **more):
    """Losses of torchtitan's module and of ours, and the routes of ours."""
    plain = {path: value for path, value in settings.items() if not path.startswith("compile.")}
    (expected, none), (found, routes) = (
        group.run(functools.partial(debug.losses, **more), attention, chosen, ranks=2)[0]
        for attention, chosen in ((own, plain), ("ours", settings))
    )
    assert not none
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=0)
    assert found[-1] < found[0]
    return routes


@pytest.mark.parametrize("backend", ["full_dtensor", "partial_dtensor"])
@pytest.mark.parametrize("layout", [FSDP, TP, CP], ids=["fsdp", "tp", "cp"])
def test_losses_are_those_of_dense_attention(group, layout, backend):
    steps = 20 if backend == "full_dtensor" else 4
    routes = both(group, "dense", {"parallelism.spmd_backend": backend, **layout}, steps=steps)
    planned = [route for route in routes if route in PLANS]
    assert len(planned) == (steps if layout is CP else 0)
    assert [route for route in routes if route not in PLANS] == [
        "cpu",
        "cpu",
    ]  # forward, backward: compiled once


@pytest.mark.parametrize(
    "checkpointing, backend, calls",
    [
        (None, "inductor", 2),
        (SelectiveAC, "inductor", 2),
        (FullAC, "inductor", 3),
        (SelectiveAC, "aot_eager", None),
    ],
)
def test_compiled_and_checkpointed_blocks(group, checkpointing, backend, calls):
    settings = {
        "parallelism.spmd_backend": "full_dtensor",
        "compile.enable": True,
        "compile.backend": backend,
    }
    more = {"checkpointing": checkpointing and checkpointing.Config(), "steps": 3}
    routes = both(group, "dense", settings, **more)
    assert set(routes) == {"cpu"}
    if calls:  # a block is one graph: a forward that is computed again is a third call in it
        assert len(routes) == calls


def test_compiled_blocks_with_context_parallelism(group):
    # The same with full_dtensor fails in torch 2.13 for torchtitan's own attention too.
    settings = {"parallelism.spmd_backend": "partial_dtensor", "compile.enable": True, **CP}
    routes = both(group, "dense", settings, steps=3)
    assert sorted(set(routes) - PLANS) == ["cpu"]


@pytest.mark.parametrize("own", [True, False])
def test_what_selective_checkpointing_saves(own):
    """Attention is computed once, by its compiled region or as an op."""
    ran = []

    class Counted(TorchDispatchMode):
        supports_higher_order_operators = True

        @classmethod
        def ignore_compile_internals(cls):
            return True

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func in (attention, inductor_compiled_code):
                ran.append(func)
            return func(*args, **(kwargs or {}))

    def policy(ctx, func, *args, **kwargs):
        saved = func in activation_checkpoint._get_default_save_ops()
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    module = FlexInductorAttention(FlexInductorAttention.Config())
    compiled = FlexInductorAttention.compiled if own else flex_attention
    q, k, v = torch.randn(3, 1, 64, 2, 16, requires_grad=True).unbind()
    mask = create_block_mask(causal(), None, None, 64, 64, "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlexInductorAttention, "compiled", staticmethod(compiled))
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        with Counted():
            out = checkpoint(
                lambda *args: module(*args, attention_masks=mask).sin(),
                q,
                k,
                v,
                use_reentrant=False,
                context_fn=contexts,
            )
            assert ran == [inductor_compiled_code if own else attention]
            out.sum().backward()
    assert ran.count(ran[0]) == (2 if own else 1)  # a compiled backward is such a region too


def test_other_results_and_head_layout():
    """out_transform gets the logsumexp, [B, L, N], as torchtitan's module gives it."""
    module = FlexInductorAttention(FlexInductorAttention.Config())
    q, k, v = torch.randn(3, 2, 64, 4, 16).unbind()
    mask = create_block_mask(causal(), None, None, 64, 64, "cpu")
    out, lse = module(
        q,
        k[:, :, :2],
        v[:, :, :2],
        attention_masks=mask,
        enable_gqa=True,
        out_transform=lambda *results: results,
    )
    scores = torch.einsum("blnh,bmnh->bnlm", q, k[:, :, :2].repeat_interleave(2, 2)) / 4
    scores = scores.masked_fill(~torch.ones(64, 64, dtype=torch.bool).tril(), -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1).transpose(1, 2))
    torch.testing.assert_close(
        out, torch.einsum("bnlm,bmnh->blnh", scores.softmax(-1), v[:, :, :2].repeat_interleave(2, 2))
    )


def test_every_flex_attention_is_converted():
    model = debug.model_registry(
        "debugmodel", converters=[FlexInductorConverter.Config(cp_method="cast")]
    ).model
    found = [layer.attention.inner_attention for layer in model.layers]
    assert {type(config) for config in found} == {FlexInductorAttention.Config}
    assert {config.cp_method for config in found} == {"cast"}
    assert {type(config.build()) for config in found} == {FlexInductorAttention}


def test_a_model_without_flex_attention_is_refused():
    with pytest.raises(FlexValueError, match=r"with FlexAttention, got Llama3Model\.Config, which has none"):
        debug.model_registry("debugmodel", attn_backend="varlen", converters=[FlexInductorConverter.Config()])


def test_an_unknown_method_is_refused_before_training(group):
    with pytest.raises(AssertionError, match=r"method: expected one of .*, got 'mail'"):
        group.run(functools.partial(debug.losses, cp_method="mail"), "ours", CP | FULL, ranks=2)


@pytest.mark.parametrize("first", [True, False])
def test_beside_lora(first):
    both = [FlexInductorConverter.Config(), LoRAConverter.Config(rank=4)]
    model = debug.model_registry("debugmodel", converters=both if first else both[::-1]).model
    attention = model.build().layers["0"].attention
    assert isinstance(attention.inner_attention, FlexInductorAttention)
    assert type(attention.wo).__name__ == "LoRALinear"


def test_what_the_docs_show():
    (snippet,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/torchtitan.md").read_text(), re.DOTALL)
    shown = {}
    exec(snippet, shown)
    model = shown["config"].model_spec.model
    assert isinstance(model.first_attention.inner_attention, FlexInductorAttention.Config)
