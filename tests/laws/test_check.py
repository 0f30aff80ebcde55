"""flex_inductor.check: a right function keeps every law, and what breaks one is told by that law's name."""

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

import flex_inductor
from flex_inductor import create_block_mask, flex_attention
from flex_inductor.laws import calls
from tests.laws import functions
from tests.laws.functions import IDS, LENGTHS, attention, inputs

LAWS = ["masked", "shift", "permutation", "documents", "schedule", "gradients", "compiled", "batch"]
QUICK = [law for law in LAWS if law != "compiled"]


def check(made, laws, documents=LENGTHS):
    return flex_inductor.check(*made, documents, laws=laws)


def outcomes(report):
    return {result.law: result.outcome for result in report.results}


def only(report, law):
    """The texts of a law's failures, which are all there are."""
    assert not report.ok and {failure.law for failure in report.failures} == {law}
    return [failure.text for failure in report.failures]


def test_a_right_function_keeps_all():
    fn, tensors = functions.right()
    before, state = [t.clone() for t in tensors], torch.get_rng_state()
    report = check((fn, tensors), None)
    assert outcomes(report) == dict.fromkeys(LAWS, "holds"), str(report)
    assert report.ok and not report.failures
    # Nothing of the user's has changed.
    assert all(map(torch.equal, tensors, before)) and torch.equal(torch.get_rng_state(), state)
    assert all(t.grad is None for t in tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_right_in_other_dtypes(dtype):
    fn, tensors = functions.right()
    report = check((fn, [t.to(dtype) for t in tensors]), QUICK)
    assert outcomes(report) == dict.fromkeys(QUICK, "holds"), str(report)


def test_masked():
    (text,) = only(check(functions.masked(), ["masked", "shift", "gradients"]), "masked")
    assert text.startswith("call 0 (functions.py:")
    assert "out at batch 0, head 0, row " in text and ": nan came, " in text and " was expected" in text
    assert "held NaN and Inf there: 1 to 79" in text and "rule them out in mask_mod" in text


def test_shift():
    (text, *_) = only(check(functions.shift(), ["masked", "shift", "schedule"]), "shift")
    assert "was added to every score. Scores reach 1e+05" in text and "softcap" in text


def test_permutation():
    (text,) = only(check(functions.permutation(), ["permutation"]), "permutation")
    assert "out at batch 0" in text and "saw each under its old kv_idx" in text


def test_documents():
    texts = only(check(functions.documents(), ["documents", "schedule", "batch"]), "documents")
    assert (
        "output at batch " in texts[0]
        and ", head 0, row " in texts[0]
        and "after document 0 (tokens 0 to 29) was replaced" in texts[0]
    )
    assert "Moved with it: document 1 (tokens 30 to 79)." in texts[0]
    # The second sees the first, and not the other way round; but the first has a gradient of what the second gives.
    assert (
        "gradient of k at batch " in texts[1]
        and ", key " in texts[1]
        and "Moved with it: document 0 (tokens 0 to 29)." in texts[1]
    )


def test_schedule():
    (text,) = only(check(functions.schedule(), ["schedule", "masked", "permutation"]), "schedule")
    assert "batch 0, head 0, row 64, key 5: mask_mod lets it through" in text
    assert (
        "row 2 and column 0 of blocks of 32 x 32, is not visited" in text
        and "by create_block_mask, and anew" in text
    )


def test_schedule_visits_whole_what_is_masked():
    everything = functions.block_mask(lambda b, h, q_idx, kv_idx: q_idx >= 0)
    everything.mask_mod = functions.causal
    fn = lambda q, k, v: flex_attention(q, k, v, block_mask=everything, enable_gqa=True)  # noqa: E731
    (text,) = only(check((fn, inputs()), ["schedule"]), "schedule")
    assert "batch 0, head 0, row 0, key 1: mask_mod rules it out" in text and "visited whole" in text


def test_schedule_of_one_head():
    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx < 8 + 60 * h)

    mask = create_block_mask(mask_mod, 1, 1, 80, 80, "cpu", 32)
    fn = lambda q, k, v: flex_attention(q, k, v, block_mask=mask, enable_gqa=True)  # noqa: E731
    (text,) = only(check((fn, inputs()), ["schedule"]), "schedule")
    assert "head 1" in text and "with H, which it has for one alone" in text


def test_gradients():
    (text,) = only(check(functions.gradients(), ["masked", "gradients"]), "gradients")
    assert "d captured slopes, along a random direction: the backward gives" in text
    assert "at [0]: " in text or "at [1]: " in text


def test_a_gradient_that_is_cut_off():
    fn = attention(lambda score, b, h, q_idx, kv_idx: 5 * torch.tanh(score.detach() / 5))
    texts = only(check((fn, inputs()), ["gradients"]), "gradients")
    assert [text.split(", along")[0].rpartition(": ")[2] for text in texts] == ["d query", "d key"]


def test_a_mod_in_fp32_has_gradients():
    fn = attention(lambda score, b, h, q_idx, kv_idx: 5 * torch.tanh(score.float() / 5))
    assert check((fn, inputs()), ["gradients"]).ok


def test_compiled():
    texts = only(check(functions.compiled(), ["compiled"]), "compiled")
    assert texts[0].startswith("output at batch ") and "not ask whether they are being compiled" in texts[0]
    assert [text.split(" at ")[0] for text in texts[1:]] == [
        *(f"gradient of {name}" for name in "qkv"),
        "gradient of captured slopes",
    ]


def test_batch():
    (text,) = only(check(functions.batch(), ["masked", "schedule", "batch"]), "batch")
    assert "output at batch 0, head " in text and "after all entries of the batch but 0 were replaced" in text


def wrong(broken):
    """The op, with something done to its results."""

    def attend(query, key, value, *rest):
        out, lse, maxima = attention_op(query, key, value, *rest)
        return *broken(out, lse, query, key, value), maxima

    attention_op = calls.attention
    return attend


BIAS = torch.randn(2, 160, generator=torch.Generator().manual_seed(0)).requires_grad_()
MODS = {
    "none": None,
    "relative": lambda score, b, h, q_idx, kv_idx: score + BIAS[h, q_idx - kv_idx + 80],
    "capped": lambda score, b, h, q_idx, kv_idx: 10 * torch.tanh(score / 10),
    "kinked": lambda score, b, h, q_idx, kv_idx: torch.relu(score),
    "of the batch": lambda score, b, h, q_idx, kv_idx: score * (b + 1),
    "steep": lambda score, b, h, q_idx, kv_idx: score * 30,
}
MASKS = {
    "none": None,
    "window": flex_inductor.masks.sliding_window(33),
    "dead rows": lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx > 20) & (kv_idx < 50),
    "of the head": lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < 10 + 20 * h),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("mod", MODS)
def test_no_false_alarm(mod, mask, sinks, dtype):
    given = torch.randn(2, requires_grad=True) if sinks else None
    block_mask = MASKS[mask] and create_block_mask(
        MASKS[mask], None, 2, 80, 80, "cpu", 32, compact=mask == "window"
    )

    def fn(q, k, v):
        return flex_attention(q, k, v, MODS[mod], block_mask, enable_gqa=True, sinks=given, return_lse=True)

    report = check((fn, [t.to(dtype) for t in inputs()]), QUICK, None)
    assert report.ok, str(report)


# What no mod can do, done to the op: the law that finds it, and what it finds.
FAULTS = {
    "masked": (lambda out, lse, q, k, v: (out + 0 * v[:, :, -1:].mean((1, 2, 3), True), lse), "please report it"),
    "shift": (lambda out, lse, q, k, v: (out, lse * 1.01), "lse at batch"),
    "permutation": (lambda out, lse, q, k, v: (out + 0.01 * v[:, :, :1], lse), "its old kv_idx"),
    "gradients": (lambda out, lse, q, k, v: (out + 0.01 * (v.mean() - v.detach().mean()), lse), "d value"),
    "batch": (lambda out, lse, q, k, v: (out * (1 + 0.01 * len(q)), lse), "this entry alone"),
}  # fmt: skip


@pytest.mark.parametrize("law", FAULTS)
def test_faults_of_the_op(law, monkeypatch):
    broken, told = FAULTS[law]
    fn, tensors = functions.right()
    traced = flex_inductor.check(fn, tensors, laws=[law])
    assert traced.ok
    captured = calls.capture

    def then_broken(*args):
        result = captured(*args)
        monkeypatch.setattr(calls, "attention", wrong(broken))
        return result

    monkeypatch.setattr("flex_inductor.laws.functions.capture", then_broken)
    assert told in only(flex_inductor.check(fn, tensors, laws=[law]), law)[0]


def test_torchs_own_function():
    mask = functions.block_mask(functions.causal)
    fn = lambda q, k, v: torch_flex.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)  # noqa: E731
    texts = only(check((fn, inputs()), ["masked", "documents"]), "documents")
    assert len(texts) == 2


def test_what_does_not_apply_is_said():
    def fn(q, k, v):
        return torch.softmax(q @ k.mT, -1) @ v

    report = flex_inductor.check(fn, inputs(), laws=QUICK)
    assert report.ok and set(outcomes(report).values()) == {"not applicable"}
    reasons = {result.law: result.text for result in report.results}
    assert reasons["documents"] == "no documents were given"
    assert reasons["shift"] == "the function calls no flex_attention"
    fn = attention(None, None, dropout_p=0.1)
    reasons = {r.law: r.text for r in flex_inductor.check(fn, inputs(), laws=["masked"]).results}
    assert reasons["masked"].startswith("call 0 (functions.py:") and "dropout leaves out" in reasons["masked"]


def test_documents_of_packed_tensors():
    """In [tokens, heads, dim], which no law of calls can change."""
    sequences = flex_inductor.Sequences.from_lengths(LENGTHS)
    mask = sequences.mask(functions.causal)
    q = torch.randn(80, 2, 16)

    def fn(q, k, v):
        return flex_inductor.varlen_attention(q, k, v, sequences, block_mask=mask)

    report = check((fn, (q, q.clone(), q.clone())), QUICK)
    assert report.ok and outcomes(report)["documents"] == "holds", str(report)
    assert "a packed or paged call" in next(r.text for r in report.results if r.law == "masked")


def test_padding_is_no_document():
    ids = IDS.masked_fill(torch.arange(80) >= 70, -1)
    report = check(functions.right(), ["documents"], ids.expand(2, -1))
    assert report.ok and report.results[0].text.startswith("4 documents")


@pytest.mark.parametrize(
    "documents, laws, message",
    [
        (
            [30, 40],
            None,
            "documents: they have 70 tokens, and no input has a dimension of that size: [2, 2, 80, 16]",
        ),
        ([30.0], None, "documents: expected lengths, such as [100, 156], or a tensor of integers"),
        (torch.zeros(80), None, "got torch.float32 [80]"),
        (LENGTHS, "masked", "laws: expected a list of names, got 'masked'. Pass laws=['masked']."),
        (LENGTHS, ["shifts"], "laws: got 'shifts', expected some of masked, shift, permutation, documents"),
    ],
)
def test_refused(documents, laws, message):
    with pytest.raises(flex_inductor.FlexError) as error:
        check(functions.right(), laws, documents)
    assert message in str(error.value)


def test_inputs_without_numbers_are_refused():
    with pytest.raises(
        flex_inductor.FlexError, match="expected a tuple or a dict with floating-point tensors"
    ):
        flex_inductor.check(torch.neg, (torch.zeros(3, dtype=torch.int64),))


@pytest.mark.parametrize("own", [True, False], ids=["dropout_p", "dropout of the output"])
def test_a_function_that_draws_random_numbers(own):
    """Right it keeps the laws, wrong it does not."""
    attend = attention(dropout_p=0.3) if own else attention()

    def right(q, k, v):
        return torch.nn.functional.dropout(attend(q, k, v), 0.0 if own else 0.3)

    def wrong(q, k, v):
        return right(q, k, v) * (3 if torch.compiler.is_compiling() else 1)

    report = check((right, inputs()), ["documents", "compiled"])
    assert outcomes(report) == dict.fromkeys(("documents", "compiled"), "holds"), str(report)
    only(check((wrong, inputs()), ["compiled"]), "compiled")
