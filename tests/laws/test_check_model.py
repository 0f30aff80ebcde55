"""flex_inductor.check_model: for any attention of a transformers model."""

import os

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import flex_inductor
from tests.laws import models
from tests.laws.test_check import LAWS, QUICK, only, outcomes


def check(made, *laws):
    model, batch = made
    return flex_inductor.check_model(model, batch, laws=laws or None)


@pytest.mark.parametrize(
    "implementation",
    ["flex_inductor", "eager", "sdpa"],
)
def test_a_right_model(implementation):
    report = check((models.llama(implementation), models.packed()), *QUICK)
    assert report.ok, str(report)
    of_calls = "holds" if implementation == "flex_inductor" else "not applicable"
    assert outcomes(report) == {
        **dict.fromkeys(("masked", "shift", "permutation", "schedule"), of_calls),
        **dict.fromkeys(("documents", "gradients", "batch"), "holds"),
    }
    text = next(result.text for result in report.results if result.law == "documents")
    assert text == "By position_ids: 2 documents, of which 2 were replaced, each by itself."


# Packing that a model ignores, and what says that there is some.
IGNORED = {
    "with_a_cache": "position_ids",
    "with_a_mask": "position_ids",
    "lengths_unread": "cu_seq_lens_q",
    "ids_in_the_mask": "attention_mask",
}


@pytest.mark.parametrize("name", IGNORED)
def test_documents(name):
    model, batch = getattr(models, name)()
    texts = only(flex_inductor.check_model(model, batch, laws=["documents"]), "documents")
    assert texts[0].startswith("logits at row 0, token ") and " came, " in texts[0]
    assert (
        "document 0 (tokens 0 to 19) was replaced. Moved with it: document 1 (tokens 20 to 47)." in texts[0]
    )
    assert texts[1].startswith("gradient of the embeddings at row 0, token ")
    assert f"{IGNORED[name]} says that they are packed" in texts[0]
    assert f"attn_implementation='{model.config._attn_implementation}'" in texts[0]


def test_lengths_are_read_by_ours():
    _, batch = models.lengths_unread()
    assert check((models.llama("flex_inductor"), batch), "documents").ok


def test_documents_of_several_rows():
    batch = models.packed(input_ids=models.tokens(3))
    report = check((models.llama(), batch), "documents", "batch")
    assert report.ok and "6 documents" in report.results[0].text


def test_masked():
    report = check((models.llama(), models.padded()), "masked", "batch")
    assert report.ok and report.results[0].text.startswith("Padding replaced by other tokens. Not judged: ")
    (text,) = only(check(models.mask_dropped(), "masked", "batch"), "masked")
    assert text.startswith("logits at row 0, token ") and "does not mask its padding" in text


def test_batch():
    texts = only(check(models.mixed_rows(), "documents", "batch"), "batch")
    assert "logits at row 0, token " in texts[0] and "while row 0 stayed as it was" in texts[0]


def test_gradients():
    (text,) = only(check(models.wrong_gradient(), "documents", "gradients"), "gradients")
    wrong, right = text.split(" Wrong for ")[1].split("; right for ")
    assert "model.layers.1.mlp.gate_proj.weight" in wrong and "model.embed_tokens.weight" in wrong
    assert "model.layers.1.mlp.up_proj.weight" in right and "lm_head.weight" in right


def test_compiled():
    report = check(models.right())
    assert outcomes(report) == dict.fromkeys(LAWS, "holds"), str(report)
    texts = only(check(models.otherwise_compiled(), "compiled"), "compiled")
    assert texts[0].startswith("logits at row 0, token ")


@pytest.mark.slow
def test_six_layers_take_less_than_a_minute():
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="flex_inductor",
    )
    positions = torch.cat([torch.arange(200), torch.arange(312)])[None]
    batch = {"input_ids": torch.randint(256, (1, 512)), "position_ids": positions, "use_cache": False}
    model, threads = LlamaForCausalLM(config), torch.get_num_threads()
    torch.set_num_threads(1)  # waiting threads count as if they worked
    try:
        begin = sum(os.times()[:4])
        report = flex_inductor.check_model(model, batch)
        took = sum(os.times()[:4]) - begin
    finally:
        torch.set_num_threads(threads)
    # Seconds of the processor, the C++ compiler's too: what it takes on an idle core, whatever else runs here.
    assert took < 60, took
    assert outcomes(report) == dict.fromkeys(LAWS, "holds"), str(report)


def test_an_operator_without_fp64():
    class Narrow(torch.nn.Module):
        def forward(self, x):
            if x.dtype == torch.float64:
                raise RuntimeError("no doubles here")
            return x

    model, batch = models.llama(layers=1), models.packed()
    model.model.norm = Narrow()
    (result,) = check((model, batch), "gradients").results
    assert result.outcome == "not applicable" and "RuntimeError: no doubles here" in result.text


def test_embeddings_of_padding_have_no_gradient():
    model, batch = models.llama(layers=1), models.packed()
    model.model.embed_tokens.padding_idx = int(batch["input_ids"][0, 0])
    assert check((model, batch), "gradients").ok
    assert model.model.embed_tokens.padding_idx is not None


def test_what_says_nothing_of_documents():
    report = check((models.llama(), {"input_ids": models.tokens()}), "documents")
    assert report.ok and "no position_ids that begin again; it has input_ids" in report.results[0].text
    one = {"input_ids": models.tokens(), "position_ids": torch.arange(48)[None]}
    assert (
        check((models.llama(), one), "documents").results[0].text == "position_ids: each row is one document"
    )


def test_embeddings_instead_of_tokens():
    model, batch = models.with_a_cache()
    batch["inputs_embeds"] = model.get_input_embeddings()(batch.pop("input_ids")).detach()
    only(check((model, batch), "documents"), "documents")
    assert check((model, {**batch, "use_cache": False}), "documents", "batch").ok


def test_nothing_of_the_users_changes():
    model, batch = models.right()
    model.train()
    frozen = model.get_input_embeddings().eval()
    before, state = {n: t.clone() for n, t in model.state_dict().items()}, torch.get_rng_state()
    check((model, batch), "masked", "documents", "batch")
    assert model.training and not frozen.training and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not model.get_input_embeddings()._forward_hooks


@pytest.mark.parametrize(
    "model, batch, message",
    [
        (torch.nn.Linear(2, 2), {}, "model: expected a model of transformers"),
        (None, {"labels": torch.zeros(1, 2)}, "batch: expected a dict with input_ids or inputs_embeds"),
        (None, [], "batch: expected a dict with input_ids or inputs_embeds of [batch, tokens], got list"),
    ],
)
def test_refused(model, batch, message):
    with pytest.raises(flex_inductor.FlexError) as error:
        flex_inductor.check_model(model or models.llama(), batch)
    assert message in str(error.value)
