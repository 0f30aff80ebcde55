"""transformers' models with attn_implementation="flex_inductor", against their own eager attention."""

from __future__ import annotations

import gc
import time
import warnings

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache, masking_utils
from transformers.integrations import hub_kernels
from transformers.models.inkling2 import modeling_inkling2

from flex_inductor import FlexError, create_block_mask, masks, mods
from flex_inductor.integrations import transformers as integration
from flex_inductor.integrations.tables import attend_tables
from flex_inductor.softmax import Softmax
from tests.integrations.families import CAUSAL, FAMILIES, LENGTH, WINDOW, inputs, model_of, tokens

NAME = integration.NAME
CLOSE = 1e-5  # of the largest magnitude, or absolute below 1


def trained(model, given, implementation, seen=None):
    """Logits and gradients of a step in which the tokens that are `seen` count."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    logits = model(**given).logits
    if seen is not None:
        logits = logits * seen.unsqueeze(-1)
    generator = torch.Generator().manual_seed(1)
    (logits * torch.randn(logits.shape, generator=generator)).sum().div(10).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **gradients}


def assert_same(ours, eager):
    assert ours.keys() == eager.keys()
    for name, want in eager.items():
        torch.testing.assert_close(
            ours[name],
            want,
            rtol=0,
            atol=CLOSE * max(1.0, want.abs().max().item()),
            msg=lambda m, n=name: f"{n}: {m}",
        )


FORMS = [
    *((family, "plain") for family in FAMILIES),
    *((family, "padded") for family in FAMILIES if family != "ViT"),
    *((family, "packed") for family in CAUSAL),
]


@pytest.mark.parametrize("family, form", FORMS)
def test_families_train_as_with_eager_attention(family, form):
    model, given = model_of(family), inputs(family, form)
    seen = given.get("attention_mask") if "decoder_input_ids" not in given else None
    eager = trained(model, given, "eager", seen)
    assert_same(trained(model, given, NAME, seen), eager)


# One mask a step.


@pytest.fixture
def made(monkeypatch):
    """The block masks that are made."""
    made = []
    create = integration.create_block_mask

    def count(*args, **kwargs):
        made.append(create(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(integration, "create_block_mask", count)
    integration._masks.clear()
    yield made
    integration._masks.clear()


def test_masks_are_made_once_a_step_and_kind(made):
    model, given = model_of("Gemma 2", num_hidden_layers=4), inputs("Gemma 2", "packed")
    model.set_attn_implementation(NAME)
    model(**given)
    assert len(made) == 2  # of the window, and of the rest
    model(**given)
    assert len(made) == 4  # documents change


def test_masks_that_stay_the_same_are_kept(made):
    model, given = model_of("Gemma 2"), inputs("Gemma 2", "plain")
    model.set_attn_implementation(NAME)
    model(**given), model(**given)
    assert len(made) == 2
    model.config.sliding_window = WINDOW + 1
    model(**given)
    assert len(made) == 3


def test_masks_with_tensors_or_functions_of_users_are_not_kept(made):
    limit = 5

    def near(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < limit

    def mask():
        return integration.make_mask(1, 40, 40, mask_function=masking_utils.and_masks(near))

    first, limit = mask(), 6
    assert first is not mask()
    assert [m.mask_mod(0, 0, torch.tensor(5), torch.tensor(0)).item() for m in (first, mask())] == [
        True,
        True,
    ]
    assert len(made) == 3


def test_masks_of_fake_tensors_are_not_kept(made):
    model, ids = model_of("Llama"), tokens(batch=1)
    model.set_attn_implementation(NAME)
    cu = torch.tensor([0, 7, LENGTH], dtype=torch.int32)
    for given in ({}, {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu}):
        integration._masks.clear()
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            model(mode.from_tensor(ids), **given)
        assert not integration._masks
        assert model(ids, **given).logits.isfinite().all()
        with FakeTensorMode() as mode:  # nor are those that were kept before of use here
            query = mode.from_tensor(torch.randn(1, 4, LENGTH, 8))
            integration.attend(model.model.layers[0].self_attn, query, query, query, None)


@pytest.mark.parametrize("padded", [False, True])
def test_a_decode_step_makes_its_mask_in_half_a_millisecond(padded):
    model = model_of("Llama")
    model.set_attn_implementation(NAME)
    past = DynamicCache(config=model.config)
    attention_mask = torch.ones(2, 513, dtype=torch.int64)
    attention_mask[0, :100] = 1 - padded
    with torch.no_grad():
        model(tokens(length=512), past_key_values=past)

    def seconds():
        start = time.process_time()
        masking_utils.create_causal_mask(model.config, torch.empty(2, 1, 0), attention_mask, past)
        return time.process_time() - start

    assert min(seconds() for _ in range(20)) < 5e-4


# What callers hand in.


def with_mask(kind):
    seen = torch.rand(2, 1, LENGTH, LENGTH) < 0.5
    seen |= torch.eye(LENGTH, dtype=torch.bool)
    if kind == "boolean":
        return seen, torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    added = torch.randn(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    return added, added


@pytest.mark.parametrize("kind", ["boolean", "additive"])
@pytest.mark.parametrize("family", ["Llama", "BERT"])
def test_masks_of_four_dimensions(family, kind):
    model, given = model_of(family), inputs(family, "plain")
    mask, eagers = with_mask(kind)
    eager = trained(model, {**given, "attention_mask": eagers}, "eager")
    assert_same(trained(model, {**given, "attention_mask": mask}, NAME), eager)


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("length", [LENGTH, 20])
def test_masks_of_blocks(length, compact):
    model, ids = model_of("Gemma 2"), tokens(length=length)
    mask = create_block_mask(masks.sliding_window(9), None, None, length, length, "cpu", compact=compact)
    rows, columns = torch.arange(length)[:, None], torch.arange(length)
    seen = ((rows >= columns) & (rows - columns < 9))[None, None]
    added = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    eager = trained(model, {"input_ids": ids, "attention_mask": added}, "eager")
    assert_same(trained(model, {"input_ids": ids, "attention_mask": mask}, NAME), eager)


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("queries, keys", [(1, 48), (48, 48), (64, 48), (48, 64)])
def test_masks_of_blocks_of_other_sizes_are_refused(queries, keys, compact):
    attention = model_of("Llama").model.layers[0].self_attn
    query, key = torch.randn(1, 4, queries, 8), torch.randn(1, 4, keys, 8)
    other = 96 if queries == keys else 48
    mask = create_block_mask(masks.causal(), None, None, other, other, "cpu", compact=compact)
    match = f"^block_mask was made for Q_LEN={other} and KV_LEN={other}, but query has length {queries}"
    with pytest.raises(FlexError, match=match):
        integration.attend(attention, query, key, key, mask)


@pytest.mark.parametrize("family", ["Llama", "Gemma 2"])
@pytest.mark.parametrize("length", [LENGTH, 20])
def test_documents_by_their_offsets(family, length, made):
    """As they come for FlashAttention: cu_seq_lens, with positions that say nothing of documents."""
    model, ids = model_of(family), tokens(batch=1, length=length)
    lengths = torch.tensor([7, 1, length - 8])
    cu = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    packed = torch.cat([torch.arange(n) for n in lengths.tolist()])[None]
    eager = trained(model, {"input_ids": ids, "position_ids": packed, "use_cache": False}, "eager")
    model.set_attn_implementation(NAME)
    given = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": length, "max_length_k": length}
    by_offsets = model(ids, position_ids=packed, **given).logits
    assert_same({"logits": by_offsets}, {"logits": eager["logits"]})
    # Rotary positions count from the start of the sequence: the documents alone are the same.
    query, key, value = (torch.randn(1, 4, length, 8) for _ in range(3))
    attention = model.model.layers[0].self_attn
    integration._masks.clear()
    del made[:]
    both = [integration.make_mask(1, length, length, allow_is_causal_skip=False) for _ in range(2)]
    outs = [integration.attend(attention, query, key, value, mask, **given)[0] for mask in both]
    document = torch.repeat_interleave(lengths)
    seen = (document[:, None] == document) & torch.ones(length, length).tril().bool()
    dense = torch.nn.functional.scaled_dot_product_attention(query, key, value, seen).transpose(1, 2)
    for out in outs:
        torch.testing.assert_close(out, dense, rtol=0, atol=1e-5)
    assert len(made) == (2 if length > integration.FEW else 0)  # causal, and within documents


def test_masks_of_documents_go_with_their_mask():
    before = len(integration._documents)
    query = torch.randn(1, 4, LENGTH, 8)
    mask = create_block_mask(masking_utils.causal_mask_function, None, None, LENGTH, LENGTH, "cpu")
    cu = torch.tensor([0, 7, LENGTH], dtype=torch.int32)
    made = [integration._within_documents(mask, query, query, cu, None) for _ in range(2)]
    assert made[0] is made[1] and len(integration._documents) == before + 1
    cu.data[1] = 9  # which no version counts
    changed = integration._within_documents(mask, query, query, cu, None)
    b, h, q_idx, kv_idx = torch.tensor([0, 0, 8, 6])
    assert changed.mask_mod(b, h, q_idx, kv_idx) and not made[0].mask_mod(b, h, q_idx, kv_idx)
    assert len(integration._documents) == before + 1
    del mask
    gc.collect()
    assert len(integration._documents) == before


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    model, given = model_of("gpt-oss"), inputs("gpt-oss", "packed")
    eager = trained(model, given, "eager")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    assert_same(trained(model, {**given, "use_cache": False}, NAME), eager)


# What is refused, and what warns.


@pytest.mark.parametrize("family", ["BERT", "Llama"])
def test_attention_weights_come_from_eager_attention(family):
    model, given = model_of(family), inputs(family, "padded")
    model.set_attn_implementation("eager")
    want = model(**given, output_attentions=True).attentions
    model.set_attn_implementation(NAME)
    integration._warn_once.cache_clear()
    with pytest.warns(UserWarning, match=f"output_attentions=True: .* {family.title()}.*Attention computes"):
        got = model(**given, output_attentions=True).attentions
    assert len(got) == len(want) == 2
    for ours, eager in zip(got, want, strict=True):
        torch.testing.assert_close(ours, eager)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**given, output_attentions=True)


def test_attention_dropout_repeats_with_the_seed_and_under_checkpointing():
    model = model_of("BERT", attention_probs_dropout_prob=0.3)
    model.set_attn_implementation(NAME)
    ids = tokens()
    plain = model(ids).logits
    model.train()

    def step(seed):
        torch.manual_seed(seed)
        logits = model(ids).logits
        model.zero_grad()
        logits.square().sum().backward()
        return [logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    first = step(1)
    assert not torch.allclose(first[0], plain) and not torch.equal(first[0], step(2)[0])
    model.gradient_checkpointing_enable()
    again = step(1)
    assert len(first) == len(again) > 10
    for one, other in zip(first, again, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert torch.equal(model.eval()(ids).logits, plain)


@pytest.mark.parametrize("name", ["Bloom", "Falcon"])
def test_models_with_attention_of_their_own_are_refused(name):
    config = getattr(transformers, f"{name}Config")(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4
    )
    with pytest.raises(
        FlexError, match=rf'^attn_implementation: got "flex_inductor" for {name}Model, which has'
    ):
        getattr(transformers, f"{name}Model")._from_config(config, attn_implementation=NAME)


def test_models_from_a_prompt_are_taken_at_their_word():
    class Own(transformers.PreTrainedModel):
        config_class = transformers.LlamaConfig

    Own.__module__ = "__main__of_a_prompt"
    assert Own(transformers.LlamaConfig(attn_implementation=NAME)).config._attn_implementation == NAME


def test_other_arguments_that_change_attention_are_refused():
    attention = model_of("Llama").model.layers[0].self_attn
    query = torch.randn(1, 4, 8, 8)
    with pytest.raises(FlexError, match=r"^continuous batching \(cache\): LlamaAttention passes it"):
        integration.attend(attention, query, query, query, None, cache=object())
    rows = query.expand(2, -1, -1, -1)
    with pytest.raises(FlexError, match=r"^cu_seq_lens_q: expected a batch of 1, .* got 2"):
        integration.attend(attention, rows, rows, rows, None, cu_seq_lens_q=torch.tensor([0, 8, 16]))
    with pytest.raises(FlexError, match=r"^attention_mask: .* \[1, 4, 8, 8\], got \[1, 1, 8, 9\]"):
        integration.attend(attention, query, query, query, torch.ones(1, 1, 8, 9, dtype=torch.bool))


@pytest.mark.parametrize("compiled", [False, True])
def test_arguments_that_the_models_own_attention_takes_are_refused_where_unknown(compiled):
    attention = modeling_inkling2.Inkling2FullAttention
    layer = attention.__new__(attention)
    torch.nn.Module.__init__(layer)
    query = torch.randn(1, 4, 8, 8)

    def attend(**given):
        return integration.attend(layer, query, query, query, None, **given)[0]

    if compiled:
        torch._dynamo.reset()
        attend = torch.compile(attend, backend="eager", fullgraph=True)
    assert torch.equal(attend(sinks=None, sliding_window=4, position_ids=query), attend())
    with pytest.raises(FlexError, match=r"^sinks: Inkling2FullAttention passes it, and it is not served"):
        attend(sinks=torch.zeros(1, 4, 8, 1))


def test_attention_without_an_eager_form_has_no_weights():
    query = torch.randn(1, 4, 8, 8)
    with pytest.raises(FlexError, match=r"^output_attentions: .* and Identity has no eager attention"):
        integration.attend(torch.nn.Identity(), query, query, query, None, output_attentions=True)


# Few queries: torch's operations.


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("queries", [1, 5])
def test_few_queries_are_as_the_op_has_them(queries, biased, softcap, with_sinks):
    query, key, value = torch.randn(2, 8, queries, 16), torch.randn(2, 2, 40, 16), torch.randn(2, 2, 40, 24)
    mask = torch.rand(2, 1, queries, 40) < 0.5
    mask[0, :, 0] = False  # sees nothing
    biases = [torch.randn(1, 8, queries, 40)] if biased else []
    sinks = torch.randn(8) if with_sinks else None
    assert integration._is_small(query, key, value, mask, sinks, *biases)
    few = integration._few_queries(query, key, value, mask, biases, 0.25, softcap, sinks)
    score_mod = softcap and mods.softcap(softcap)
    op, _ = attend_tables(query, key, value, mask, biases, 0.25, score_mod, Softmax(sinks))
    assert few[0, :, 0].abs().max() == 0
    torch.testing.assert_close(few, op, rtol=0, atol=2e-6)


def test_a_single_query_sees_its_indices_alone():
    attention = model_of("Llama").model.layers[0].self_attn
    query, keys = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 8, 8)
    chosen = torch.tensor([[[1, 4, 6]]])
    found, want = (
        integration.attend(attention, query, given, given, None, **more)[0]
        for given, more in ((keys, {"indices": chosen}), (keys[:, :, chosen[0, 0]], {}))
    )
    torch.testing.assert_close(found, want)


def test_few_queries_in_forward_mode():
    attention = model_of("Llama").model.layers[0].self_attn
    query, tangent = torch.randn(2, 1, 4, 8, 8)

    def ours(x):
        return integration.attend(attention, x, x, x, torch.ones(1, 1, 8, 8, dtype=torch.bool))[0]

    def plain(x):
        return ((x @ x.mT / 8**0.5).softmax(-1) @ x).transpose(1, 2)

    for found, want in zip(*(torch.func.jvp(f, (query,), (tangent,)) for f in (ours, plain)), strict=True):
        torch.testing.assert_close(found, want)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_few_queries_keep_scores_in_single_precision(softcap):
    query, key, value = (torch.randn(1, 4, n, 64, dtype=torch.bfloat16) for n in (1, 512, 512))
    few = integration._few_queries(query, key, value, None, [], 1.0, softcap, None)
    wide = integration._few_queries(
        query.double(), key.double(), value.double(), None, [], 1.0, softcap, None
    )
    assert few.dtype == torch.bfloat16
    torch.testing.assert_close(few, wide.to(few.dtype), rtol=2**-7, atol=1e-3)


def test_a_name_with_slashes_is_the_same_attention_and_no_kernel_of_the_hub():
    """axolotl takes only names that it knows or that have a slash; transformers downloads what has one slash."""
    name = integration.WITH_SLASHES
    assert (
        "/" in name and not hub_kernels.is_kernel(name) and hub_kernels.is_kernel("flex_inductor/attention")
    )
    model, given = model_of("Gemma 2"), inputs("Gemma 2", "padded")
    seen = given["attention_mask"]
    ours, other = (trained(model, given, each, seen) for each in (NAME, name))
    assert ours.keys() == other.keys() and all(torch.equal(ours[key], other[key]) for key in ours)
    assert model.config._attn_implementation == name
    with pytest.raises(FlexError, match="attention of its own"):
        transformers.BloomForCausalLM(
            transformers.BloomConfig(n_layer=1, hidden_size=32, attn_implementation=name)
        )
