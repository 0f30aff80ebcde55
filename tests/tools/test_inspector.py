"""Kernels rendered and compiled for devices that are not there."""

import pytest
import torch
from torch._dynamo.utils import counters

import flex_inductor
from flex_inductor import FlexError, create_block_mask, decisions, flex_attention
from flex_inductor.lowerings.triton.device import known_device

LENGTH = 512
HALF = torch.float16  # the compiler takes 10 to 20 times as long over the same kernel in fp32


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def softcap(score, b, h, q_idx, kv_idx):
    return 20.0 * torch.tanh(score / 20.0)


def alibi(score, b, h, q_idx, kv_idx):
    return score + torch.exp2(-(h + 1.0)) * (kv_idx - q_idx)


def documents(length):
    document = torch.arange(length) // 100
    return lambda b, h, q_idx, kv_idx: (document[q_idx] == document[kv_idx]) & (q_idx >= kv_idx)


def call(variant, head_dim, length=LENGTH):
    """A function of a bias and the inputs, and those, all with gradients."""
    mask_mod = documents(length) if variant == "document" else causal
    mask = create_block_mask(mask_mod, None, None, length, length, "cpu")
    mod = {"softcap": softcap, "alibi": alibi}.get(variant)

    def attend(bias, q, k, v):
        learnt = lambda s, b, h, q_idx, kv_idx: s + bias[q_idx - kv_idx + length]  # noqa: E731
        return flex_attention(q, k, v, learnt if variant == "bias" else mod, mask)

    inputs = [torch.randn(1, 4, length, head_dim, dtype=torch.bfloat16) for _ in range(3)]
    tensors = [torch.randn(2 * length), *inputs]
    return attend, [tensor.requires_grad_() for tensor in tensors]


TARGETS = ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "gfx942")
VARIANTS = ("causal", "alibi", "softcap", "document", "bias")
ODD = 1001  # no tile divides it
SHORT = [("sm_90", "document", 64, ODD), ("gfx942", "causal", 64, LENGTH)]


@pytest.mark.parametrize(
    "target, variant, head_dim, length",
    SHORT
    + [
        pytest.param(target, variant, head_dim, length, marks=pytest.mark.slow)
        for length in (LENGTH, ODD)
        for target in TARGETS
        for variant in VARIANTS
        for head_dim in (64, 128, 256)
        if (target, variant, head_dim, length) not in SHORT
    ],
)
def test_default_configs_fit(target, variant, head_dim, length):
    attend, tensors = call(variant, head_dim, length)
    report = flex_inductor.inspect(attend, *tensors, target=target)
    of_keys = ["backward_dkdv"] if head_dim <= 128 else ["backward_dk", "backward_dv"]
    assert sorted(kernel.kind for kernel in report.kernels) == sorted(["forward", "backward_dq", *of_keys])
    for kernel in report.kernels:
        found = kernel.resources
        assert found.spill_bytes <= known_device(target).few_spilled, f"{kernel.kind}: {kernel.config}"
        assert 0 < found.shared_bytes <= known_device(target).shared_bytes
        assert 0 < found.registers <= (512 if target == "gfx942" else 255)
        assert found.instructions["tensor"] > 0
        assert not found.reasons


@pytest.mark.parametrize(
    "target",
    ["sm_90", *(pytest.param(target, marks=pytest.mark.slow) for target in TARGETS if target != "sm_90")],
)
def test_few_queries_split_the_keys(target):
    query = torch.randn(1, 32, 1, 128, dtype=torch.bfloat16)
    key = torch.randn(1, 8, 4096, 128, dtype=torch.bfloat16)
    report = flex_inductor.inspect(
        lambda q, k: flex_attention(q, k, k, enable_gqa=True), query, key, target=target
    )
    decode, combine = report.kernels
    assert (decode.kind, combine.kind) == ("decode", "combine")
    assert decode.resources.spill_bytes == combine.resources.spill_bytes == 0
    assert decode.resources.shared_bytes <= known_device(target).shared_bytes
    assert decode.resources.instructions["tensor"] > 0
    assert "first_h = tl.program_id(1) * 4" in decode.source  # the group is in one tile


def test_lengths_are_constants_whatever_was_inspected_before():
    for length in (128, 200):
        q = torch.randn(1, 2, length, 64, dtype=HALF)
        (kernel,) = flex_inductor.inspect(flex_attention, q, q, q, target="sm_90").kernels
        assert "size_0" not in kernel.source
    torch._dynamo.mark_dynamic(q, 2)
    (kernel,) = flex_inductor.inspect(flex_attention, q, q, q, target="sm_90").kernels
    assert "size_0" in kernel.source


def test_only_the_forward_where_nothing_needs_a_gradient():
    q = torch.randn(1, 2, 128, 16)
    report = flex_inductor.inspect(flex_attention, q, q, q, target="sm_90")
    (kernel,) = report.kernels
    assert (report.target, kernel.kind, kernel.name) == ("sm_90", "forward", "flex_inductor_forward_0")
    assert f"def {kernel.name}(" in kernel.source
    assert kernel.config.keys() == {"BLOCK_M", "BLOCK_N", "num_warps", "num_stages"}


def test_equal_calls_have_one_kernel_between_them():
    def two_layers(q):
        once = flex_attention(q, q, q)
        again = flex_attention(once, once, once)
        return flex_attention(again, again, again, softcap)

    report = flex_inductor.inspect(two_layers, torch.randn(1, 2, 128, 64, dtype=HALF), target="sm_90")
    assert [kernel.kind for kernel in report.kernels] == ["forward", "forward"]


def test_a_capture_that_needs_a_gradient_brings_the_backward():
    slopes = torch.randn(2, requires_grad=True)
    q = torch.randn(1, 2, 128, 64, dtype=HALF)
    report = flex_inductor.inspect(
        lambda q: flex_attention(q, q, q, lambda s, b, h, q_idx, kv_idx: s * slopes[h]),
        q,
        target="sm_90",
    )
    assert [kernel.kind for kernel in report.kernels] == ["forward", "backward_dq"]


def test_nothing_is_left_behind():
    q = torch.randn(1, 2, 64, 16)
    compilations = []

    def backend(module, inputs):
        compilations.append(module)
        return module.forward

    compiled = torch.compile(lambda q: flex_attention(q, q, q), backend=backend)
    want = compiled(q)
    counted, decided = {name: dict(counts) for name, counts in counters.items()}, decisions()
    flex_inductor.inspect(compiled, q, target="sm_90")
    flex_inductor.inspect(compiled, q)
    assert {name: dict(counts) for name, counts in counters.items()} == counted
    assert decisions() == decided
    assert torch.equal(compiled(q), want) and len(compilations) == 1
    served = torch.compile(lambda q: flex_attention(q, q, q), backend="flex_inductor")(q)
    torch.testing.assert_close(served, want)
    assert decisions()[-1].chosen != "triton"


def test_unknown_target():
    with pytest.raises(FlexError) as error:
        flex_inductor.inspect(flex_attention, target="sm_70")
    assert str(error.value) == (
        "target: expected one of cpu, sm_80, sm_86, sm_89, sm_90, sm_100, sm_120, gfx942, gfx950, got 'sm_70'."
    )
