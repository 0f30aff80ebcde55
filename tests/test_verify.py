"""options={"verify": True}: kernels that are wrong are found out when they run, and right ones are left alone."""

import functools
import re
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch._inductor.lowering  # before the template, which it imports as well
from torch._functorch import config as functorch_config
from torch._inductor import config
from torch.nn.attention import flex_attention as torch_flex

from flex_inductor import FlexError, create_block_mask, flex_attention
from flex_inductor.lowerings.cpu import template
from flex_inductor.masks.schedule import schedule_parts
from flex_inductor.mod_ir.arguments import MASK_LANES, SCORE_LANES
from flex_inductor.mod_ir.split import programs, split
from flex_inductor.mod_ir.trace import trace_value
from flex_inductor.op import Inputs, call_text
from flex_inductor.reference import reference
from flex_inductor.verify import check
from flex_inductor.verify.mods import Mod
from tests import inspected
from tests.kernel_in_torch import FORWARD, Call, Kernel


@pytest.fixture
def breaking(monkeypatch):
    """Lets a test change what templates render; nothing compiled meanwhile comes from a cache, or goes there."""
    source = template.source

    def change(name, right, wrong):
        def render(**values):
            text = source(name).render(**values)
            assert right in text
            return text.replace(right, wrong)

        monkeypatch.setattr(
            template,
            "source",
            lambda other: SimpleNamespace(render=render) if other == name else source(other),
        )

    torch._dynamo.reset()
    with config.patch({"fx_graph_cache": False}), functorch_config.patch({"enable_autograd_cache": False}):
        yield change


def compiled():
    module, args = inspected.learnable_bias()
    args = [torch.randn_like(tensor, dtype=torch.float32).requires_grad_() for tensor in args]
    return torch.compile(module, backend="flex_inductor", options={"verify": True}), args


def test_right_kernels_pass():
    attend, args = compiled()
    out = attend(*args)
    want, _, _ = reference(*args, attend.relative, attend.mask)
    torch.testing.assert_close(out, want)
    (grad,) = torch.autograd.grad(out.sum(), args[0])
    torch.testing.assert_close(grad, torch.autograd.grad(want.sum(), args[0])[0], rtol=1e-4, atol=1e-5)


def test_a_broken_forward_is_found(breaking):
    breaking("forward.jinja", "here.index + q0 + r0", "here.index + q0 + r0 + (q0 >= 128 ? 1 : 0)")
    attend, args = compiled()
    with pytest.raises(FlexError) as found:
        attend(*args)
    assert re.match(
        r"verify: out is wrong in batch 0, head 0, queries 128 to 255\. At \[0, 0, \d+, \d+\] the kernel gives \S+ and "
        r"float64 gives \S+, where rounding allows for \S+\. It is a fault of flex_inductor: ",
        str(found.value),
    )
    assert "Inlined:\n  def score_mod(score, b, h, q_idx, kv_idx" in str(found.value)
    assert "torch.ops.aten.tanh.default(" in str(found.value)


def test_a_broken_backward_is_found(breaking):
    breaking("backward.jinja", "const float scale = ", "const float scale = 1.01f * ")
    attend, args = compiled()
    out = attend(*args)
    with pytest.raises(FlexError, match=r"^verify: d_q is wrong in batch 0, head 0, queries 0 to 127\. "):
        out.sum().backward()


def op_arguments(rows=1024):
    q, k, v = (torch.randn(1, 2, rows, 16) for _ in range(3))
    mask = programs(None, trace_value(inspected.causal, MASK_LANES, q, ()), guarded=False)
    text, tensors = call_text.dump(Inputs(), mask, 0.25)
    scores = (q @ k.transpose(-1, -2) * 0.25).masked_fill(torch.ones(rows, rows).triu(1).bool(), -torch.inf)
    return (
        [q, k, v, tensors, text, ""],
        torch.softmax(scores, -1) @ v,
        scores.logsumexp(-1),
    )


@pytest.mark.parametrize("row", [0, 1023])
def test_large_calls_are_sampled_at_both_ends(row, monkeypatch):
    monkeypatch.setattr(check, "WHOLE_LANES", 0)
    arguments, out, lse = op_arguments()
    state = torch.get_rng_state()
    checked = torch.ops.flex_inductor.verified_forward(*arguments, out, [lse], ["lse"])
    assert torch.equal(checked, out) and checked is not out
    assert torch.equal(torch.get_rng_state(), state)
    lse[0, 1, row] += 1e-3
    first = row // 128 * 128
    with pytest.raises(
        FlexError, match=rf"^verify: lse is wrong in batch 0, head 1, queries {first} to {first + 127}\."
    ):
        torch.ops.flex_inductor.verified_forward(*arguments, out, [lse], ["lse"])


def test_what_is_not_a_number_is_wrong():
    arguments, out, lse = op_arguments(128)
    out[0, 1, 5, 3] = torch.nan
    with pytest.raises(FlexError, match=r"At \[0, 1, 5, 3\] the kernel gives nan and"):
        torch.ops.flex_inductor.verified_forward(*arguments, out, [lse], ["lse"])


def test_bad_option():
    compiled = torch.compile(lambda x: x + 1, backend="flex_inductor", options={"verify": 1})
    with pytest.raises(Exception, match=r"options\['verify'\] is 1; expected True or False\."):
        compiled(torch.zeros(1))


# What a kernel may get wrong, by a realistic amount.

PRODUCTS = {"QK": "out", "PV": "out", "P^T dO": "d_v", "dO V^T": "d_q", "dS K": "d_q", "dS^T Q": "d_k"}
GRADIENTS = ("d_q", "d_k", "d_v", "d_captures[0]", "d_captures[1]")
FAULTS = {
    **PRODUCTS,
    **{f"{name} block": PRODUCTS[name] for name in PRODUCTS if name != "dO V^T"},
    **{f"{name} row": PRODUCTS[name] for name in ("PV", "P^T dO", "dS K", "dS^T Q")},
    "lse": "lse",
    **{name: name for name in FORWARD[1:] if name != "lse"},
    "entropy's gradient": "d_q",
    "entropy's gradient stale": "d_q",
    "weights": "d_q",
    "weights block": "d_q",
    "delta": "d_q",
    "delta stale": "d_q",
    **{name: name for name in GRADIENTS},
    **{f"{name} stale": name for name in GRADIENTS},
    **{f"{name} part": name for name in GRADIENTS},
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@functools.cache
def call_of(dtype):
    call = Call.of(DTYPES[dtype])
    return call, call.arguments(), call.arguments(backward=True), Kernel(call).forward()


def said(dtype, fault=""):
    """What verify says of a kernel with `fault`; a wrong backward is given the right forward."""
    call, arguments, backward, (out, lse, *_) = call_of(dtype)
    kernel = Kernel(call, fault)
    try:
        if not fault or FAULTS[fault] in FORWARD:
            out_of_kernel, *rows = kernel.forward()
            torch.ops.flex_inductor.verified_forward(*arguments, out_of_kernel, rows, FORWARD[1:])
        if not fault or FAULTS[fault] not in FORWARD:
            upstream, grads = (out, lse, call.grad_out, call.grad_lse), kernel.backward(out, lse)
            torch.ops.flex_inductor.verified_backward(*backward, *upstream, grads)
    except FlexError as error:
        return str(error).removeprefix("verify: ").split(" is wrong")[0]
    return None


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_fault_is_found(dtype):
    assert said(dtype) is None
    faults = {name: FAULTS[name] for name in (*PRODUCTS, *GRADIENTS)} if dtype == "fp16" else FAULTS
    assert {fault: said(dtype, fault) for fault in faults} == faults


@pytest.mark.parametrize("fault", ["d_captures[0]", "d_captures[1]"])
def test_captured_gradients_of_large_calls(fault, monkeypatch):
    """A slope for each head, and an entry for each 8 keys: what a part of the call alone adds to is checked."""
    call, *_ = call_of("fp32")
    length = call.query.size(2)
    monkeypatch.setattr(check, "WHOLE_LANES", length * length)  # half of the call
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert said("fp32") is None
        assert said("fp32", fault) == fault


def test_captured_gradients_that_are_not_checked_are_named(monkeypatch):
    monkeypatch.setattr(check, "WHOLE_LANES", 1000)
    text = (
        r"^verify: gradients of captured tensors of shapes \[2\], \[12\] are not checked: the call has 18,432 scores, and no "
        r"element was found that at most 1,000 of them add to\. Check a shorter call\.$"
    )
    with pytest.warns(UserWarning, match=text):
        assert said("fp32", "d_captures[0]") is None


# What looks wrong and is not.


def conditioned(name, seed):
    """Calls whose dense fp32 is far off as well: exp makes relative errors of weights out of errors of scores."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(1, 2, 128, 64, generator=generator) for _ in range(3))
    place = torch.arange(128)[:, None]
    return {
        "one tensor": (query, query, query),
        "T5": (query * 8, key, value),
        "large": (query * 20, key * 20, value),
        "equal scores": (query * 0, key, value),
        # Two weights in all, whose roundings do not cancel as many different ones do.
        "two scores": (
            query,
            (place % 2 == 0).float().expand_as(key),
            (place % 2 * 2 - 1.0).expand_as(value),
        ),
    }[name]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_no_false_alarm(dtype):
    """Slopes are bf16: what a mod itself rounds away is not the kernel's fault."""
    mask = create_block_mask(inspected.causal, None, None, 128, 128, "cpu")
    slopes = torch.tensor([0.0, 0.7], dtype=torch.bfloat16, requires_grad=True)

    def alibi(score, b, h, q_idx, kv_idx):
        return score - (slopes[h] * (q_idx - kv_idx)).abs()

    attend = torch.compile(
        lambda *qkv: flex_attention(*qkv, alibi, mask, return_lse=True),
        backend="flex_inductor",
        options={"verify": True, "route": "cpu"},
    )
    for name in ("one tensor", "T5", "large", "equal scores", "two scores"):
        for seed in range(3):
            tensors = conditioned(name, seed)
            out, lse = attend(*(t.to(DTYPES[dtype], copy=True).requires_grad_() for t in tensors))
            (out.float().square().sum() + lse.sum()).backward()


def test_blocks_of_one_head_for_masks_of_each():
    """torch builds such a BlockMask without a word: the others visit what the first head does."""

    def per_head(b, h, q_idx, kv_idx):
        return q_idx - kv_idx >= 16 * h

    arguments, out, lse = op_arguments(64)
    for heads in (None, 2):
        mask = torch_flex.create_block_mask(per_head, None, heads, 64, 64, device="cpu", BLOCK_SIZE=16)
        schedule, _ = schedule_parts(mask)
        mods = programs(None, trace_value(per_head, MASK_LANES, out, ()), guarded=True)
        arguments[4], arguments[3] = call_text.dump(Inputs(schedule=schedule), mods, 0.25)
        out, lse, _ = reference(*arguments[:3], None, mask, 0.25)
        if heads is None:
            text = (
                r"^verify: block_mask has H=1, and its mask_mod differs between those that share its blocks: at b=0, h=1, "
                r"q_idx=16, kv_idx=1 it does not say what the blocks do\. Pass the sizes of the call to "
                r"create_block_mask as H\.$"
            )
            with pytest.raises(FlexError, match=text):
                torch.ops.flex_inductor.verified_forward(*arguments, out, [lse], ["lse"])
        else:
            torch.ops.flex_inductor.verified_forward(*arguments, out, [lse], ["lse"])


def test_a_table_that_a_mod_holds():
    """In float64 it is all that it is in bfloat16, and what is made of it is not rounded again."""
    table = torch.tensor([0.1, 2.5], dtype=torch.bfloat16)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + torch.tensor([0.1, 2.5], dtype=torch.bfloat16).exp()[kv_idx]

    text = split(trace_value(score_mod, SCORE_LANES, table, ()), SCORE_LANES).to_text()
    lanes = {name: torch.zeros(1, dtype=torch.int32) for name in ("b", "h", "q_idx")}
    lanes |= {"score": torch.zeros(1, 1, 1, 2, dtype=torch.float64), "kv_idx": torch.arange(2)}
    mod = Mod(text, ())
    (wide,), (plain,) = mod.exact(lanes, None), mod.rounded(lanes, None, torch.float32)
    assert torch.equal(wide.flatten(), table.double().exp())
    assert torch.equal(plain.flatten(), table.exp().float())


def test_rows_that_lanes_hold():
    """A dot product in a mod: its gradient adds up rows."""
    table, other = (torch.randn(n, 3, requires_grad=True) for n in (2, 20))

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + (table[h] * other[kv_idx]).sum()

    torch._dynamo.reset()
    inputs = [torch.randn(1, 2, 20, 8, requires_grad=True) for _ in range(3)]
    attend = torch.compile(flex_attention, backend="flex_inductor", options={"verify": True})
    got = torch.autograd.grad(attend(*inputs, score_mod).square().sum(), (*inputs, table, other))
    want = torch.autograd.grad(reference(*inputs, score_mod)[0].square().sum(), (*inputs, table, other))
    for ours, like in zip(got, want, strict=True):
        torch.testing.assert_close(ours, like, rtol=1e-4, atol=1e-5)
