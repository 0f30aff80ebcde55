"""Every refusal of flex_attention's arguments: its text, its type, and that compiling changes neither."""

import functools

import expecttest
import pytest
import torch

import flex_inductor
from flex_inductor import AuxRequest, FlexError, create_block_mask, flash, flex_attention


def make(*shape, **kwargs):
    return torch.zeros(shape or (2, 4, 32, 8), **kwargs)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


@functools.cache
def mask(B=None, H=None, M=32, N=32):
    return create_block_mask(causal, B, H, M, N, device="cpu", BLOCK_SIZE=16)


def nested():
    return torch.nested.nested_tensor([torch.zeros(3, 4), torch.zeros(2, 4)], layout=torch.jagged)


# name -> (function of the call's arguments by name, the built-in type torch raises for the like)
CASES = {
    "not a tensor": (lambda: {"key": [1.0]}, TypeError),
    "nested": (lambda: {"query": nested()}, ValueError),
    "rank": (lambda: {"query": make(4, 32, 8)}, ValueError),
    "dtype": (lambda: {"value": make(dtype=torch.int64)}, ValueError),
    "layout": (lambda: {"value": make().to_sparse()}, ValueError),
    "mixed dtypes": (lambda: {"key": make(dtype=torch.float64)}, ValueError),
    "8-bit types": (
        lambda: {"key": make(dtype=torch.float8_e4m3fn), "value": make(dtype=torch.float8_e5m2)},
        ValueError,
    ),
    "8 bits with float64": (
        lambda: (
            {"query": make(dtype=torch.float64)}
            | dict.fromkeys(("key", "value"), make(dtype=torch.float8_e5m2))
        ),
        ValueError,
    ),
    "mixed devices": (lambda: {"key": make(device="meta")}, ValueError),
    "meta": (lambda: dict.fromkeys(("query", "key", "value"), make(device="meta")), ValueError),
    "head dims": (lambda: {"key": make(2, 4, 32, 16)}, ValueError),
    "key and value": (lambda: {"value": make(2, 4, 31, 8)}, ValueError),
    "batch": (lambda: {"key": make(3, 4, 32, 8), "value": make(3, 4, 32, 8)}, ValueError),
    "gqa not enabled": (lambda: {"key": make(2, 2, 32, 8), "value": make(2, 2, 32, 8)}, ValueError),
    "heads": (
        lambda: {"key": make(2, 3, 32, 8), "value": make(2, 3, 32, 8), "enable_gqa": True},
        ValueError,
    ),
    "gqa": (lambda: {"enable_gqa": "no"}, TypeError),
    "sinks": (lambda: {"sinks": torch.zeros(5)}, ValueError),
    "dropout": (lambda: {"dropout_p": 1.5}, ValueError),
    "scale": (lambda: {"scale": torch.tensor(1.0)}, TypeError),
    "scale beyond": (lambda: {"scale": 1e300}, ValueError),
    "lse": (lambda: {"return_lse": 3}, TypeError),
    "lse and aux": (lambda: {"return_lse": True, "return_aux": AuxRequest(lse=True)}, ValueError),
    "aux": (lambda: {"return_aux": True}, TypeError),
    "score_mod": (lambda: {"score_mod": mask()}, TypeError),
    "block_mask": (lambda: {"block_mask": causal}, TypeError),
    "mask lengths": (lambda: {"block_mask": mask(M=48)}, ValueError),
    "mask batch": (lambda: {"block_mask": mask(B=3)}, ValueError),
    "mask batch of one": (
        lambda: dict.fromkeys(("query", "key", "value"), make(1, 4, 32, 8)) | {"block_mask": mask(B=2)},
        ValueError,
    ),
    "mask heads": (lambda: {"block_mask": mask(H=2)}, ValueError),
    "mask device": (lambda: {"block_mask": mask().to("meta")}, ValueError),
    "sliced mask": (lambda: {"block_mask": mask()[:, :, :1]}, RuntimeError),
    "kernel options": (lambda: {"kernel_options": 64}, TypeError),
    "kernel option": (lambda: {"kernel_options": {"BLOCK_Q": 64}}, ValueError),
    "kernel option's value": (lambda: {"kernel_options": {"fwd_BLOCK_M": "64 rows"}}, ValueError),
    "backend option": (lambda: {"kernel_options": {"BACKEND": "CUTLASS"}}, ValueError),
}


def arguments(name):
    return {"query": make(), "key": make(), "value": make()} | CASES[name][0]()


def refusal(function, expected=FlexError, **kwargs):
    with pytest.raises(expected) as raised:
        function(**kwargs)
    return raised.value


@pytest.mark.parametrize("name", CASES)
def test_eager_type(name):
    error = refusal(flex_attention, **arguments(name))
    assert isinstance(error, CASES[name][1])


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", [n for n in CASES if n not in ("mixed devices", "mask device", "layout")])
def test_compiling_keeps_type_and_text(name, dynamic):
    text = str(refusal(flex_attention, **arguments(name)))

    def call(**kwargs):
        return flex_attention(**kwargs)

    compiled = functools.partial(torch.compile, call, backend="aot_eager", dynamic=dynamic)
    broken = refusal(compiled(), **arguments(name))
    assert isinstance(broken, CASES[name][1])
    assert str(broken) == text
    torch._dynamo.reset()
    whole = refusal(compiled(fullgraph=True), Exception, **arguments(name))
    assert text in str(whole)


@pytest.mark.parametrize("attend", [flex_attention, flash.flash_attn_func], ids=["flex_attention", "flash"])
def test_jit_trace(attend):
    with pytest.raises(FlexError, match=r"torch.jit.trace.*Use torch.export.export"):
        torch.jit.trace(attend, (make(), make(), make()))


def test_a_scale_that_changes_and_a_dtype_that_holds_it():
    attend = torch.compile(
        lambda scale, *qkv: flex_attention(*qkv, scale=scale), backend="aot_eager", fullgraph=True
    )
    inputs = [make() for _ in range(3)]
    for scale in (0.5, 0.25, 3e38):
        attend(scale, *inputs)
    with pytest.raises(ValueError, match="scale is beyond what float32"):
        attend(1e39, *inputs)
    attend(1e39, *(t.double() for t in inputs))


def test_nothing_is_traced_or_allocated_first():
    def never(*_):
        raise AssertionError("traced")

    refusal(flex_attention, query=make(), key=make(2, 4, 32, 16), value=make(), score_mod=never)


class Texts(expecttest.TestCase):
    maxDiff = None

    def test_texts(self):
        texts = [f"{name}:\n  {refusal(flex_attention, **arguments(name))}" for name in CASES]
        self.assertExpectedInline(
            "\n".join(texts),
            """\
not a tensor:
  key must be a torch.Tensor, but is a list.
nested:
  query: expected a nested tensor [batch, heads, length, head_dim] whose length differs from sequence to sequence, got one of which another dimension does. Make it as [batch, length, heads, head_dim] and call .transpose(1, 2).
rank:
  query must have 4 dimensions, [batch, heads, length, head_dim], but has 3: [4, 32, 8]. Add the missing dimensions with unsqueeze.
dtype:
  value has dtype torch.int64; expected torch.float16, bfloat16, float32 or float64. Convert it, for example with value.to(torch.bfloat16).
layout:
  value has layout torch.sparse_coo; expected torch.strided. Convert it with value.to_dense().
mixed dtypes:
  query, key and value must have the same dtype, but query has torch.float32, key torch.float64 and value torch.float32. Convert them with .to().
8-bit types:
  key and value must have the same 8-bit type, but key has torch.float8_e4m3fn and value torch.float8_e5m2. Convert one with .to().
8 bits with float64:
  query has dtype torch.float64, which is not served with keys and values of torch.float8_e5m2. Convert the query to float32, or key and value to float64.
mixed devices:
  query, key and value must have the same device, but query has cpu, key meta and value cpu. Convert them with .to().
meta:
  query, key and value are on the meta device, which holds no values. Make them on the device that is to compute, for example with model.to_empty(device='cpu'); for shapes alone use FakeTensorMode and a real device.
head dims:
  query and key must have the same head_dim (last dimension), but query has 8 and key 16. Only value's may differ.
key and value:
  key and value must agree in batch, heads and length, but key is [2, 4, 32, 8] and value [2, 4, 31, 8].
batch:
  key and value must have query's batch size, 2, or 1, but have 3.
gqa not enabled:
  query has 4 heads and key has 2; without enable_gqa they must be equal. For grouped-query attention pass enable_gqa=True.
heads:
  With enable_gqa, query's heads must be a multiple of key's, but query has 4 and key 3.
gqa:
  enable_gqa must be True or False, but is a str. Call bool() on a result of numpy or torch.
sinks:
  sinks: expected a floating tensor with one number for each query head, [4], got a tensor of shape [5] and dtype torch.float32.
dropout:
  dropout_p: expected a number from 0 to less than 1, got 1.5.
scale:
  scale must be a Python number or None (for 1/sqrt(head_dim)), but is a tensor of shape [] and dtype torch.float32. A tensor scale that needs a gradient belongs in score_mod: lambda score, *_: score * scale.
scale beyond:
  scale is beyond what float32, the dtype of the scores, holds (3.4e+38). Give a smaller one, or query, key and value in float64.
lse:
  return_lse must be True or False, but is an int. Call bool() on a result of numpy or torch.
lse and aux:
  return_lse and return_aux were both given. Use return_aux=AuxRequest(lse=True) alone.
aux:
  return_aux must be an AuxRequest or None, but is a bool.
score_mod:
  score_mod must be a function, score_mod(score, b, h, q_idx, kv_idx), or None, but is a BlockMask. Pass the BlockMask as block_mask=.
block_mask:
  block_mask must be a BlockMask, a RunSchedule or None, but is a function. Wrap the function: create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN).
mask lengths:
  block_mask was made for Q_LEN=48 and KV_LEN=32, but query has length 32 and key 32. Make it with create_block_mask(mask_mod, B, H, 32, 32).
mask batch:
  block_mask has B=3, but query has B=2. It must be 2 or 1: make it with create_block_mask(..., B=2) or B=None.
mask batch of one:
  block_mask has B=2, but query has B=1. It must be 1: make it with create_block_mask(..., B=1) or B=None.
mask heads:
  block_mask has H=2, but query has H=4. It must be 4 or 1: make it with create_block_mask(..., H=4) or H=None.
mask device:
  block_mask is on meta, but query is on cpu. Move it with block_mask.to('cpu').
sliced mask:
  block_mask was sliced, which drops its mask_mod, because row i of the slice is no longer q_idx i. Set block_mask.mask_mod to a function with the offset added to q_idx, and before torch 2.14 also block_mask.seq_lengths to (queries, keys) of the slice.
kernel options:
  kernel_options must be a dict of hints, or None, but is an int.
kernel option:
  kernel_options has no option 'BLOCK_Q'. Known: BACKEND, BLOCKS_ARE_CONTIGUOUS, BLOCK_M, BLOCK_M1, BLOCK_M2, BLOCK_N, BLOCK_N1, BLOCK_N2, FORCE_USE_FLEX_ATTENTION, PRESCALE_QK, ROWS_GUARANTEED_SAFE, USE_TMA, WRITE_DQ, kpack, matrix_instr_nonkdim, num_splits, num_stages, num_warps, waves_per_eu.
kernel option's value:
  kernel_options['fwd_BLOCK_M'] is '64 rows'; expected a whole number, True or False.
backend option:
  kernel_options['BACKEND'] is 'CUTLASS'; expected one of AUTO, TRITON, TRITON_DECODE, FLASH.""",
        )

    def test_backend_options(self):
        with pytest.raises(Exception) as raised:  # Dynamo wraps what a backend raises
            torch.compile(make, backend="flex_inductor", options={"rout": "chunked"})(2)
        self.assertExpectedInline(
            str(raised.value).splitlines()[1],
            """FlexValueError: torch.compile(backend="flex_inductor", options=...) has no option 'rout'. Known: any of torch._inductor.list_options(), configs, route, verify.""",
        )

    def test_route_that_is_not_there(self):
        compiled = torch.compile(flex_attention, backend="flex_inductor", options={"route": "fused"})
        with pytest.raises(Exception) as raised:
            compiled(make(), make(), make())
        self.assertExpectedInline(
            str(raised.value).splitlines()[1],
            """FlexValueError: options['route'] is 'fused'; expected one of triton, cpu, chunked.""",
        )


def test_public_names():
    assert all(getattr(flex_inductor, name) is not None for name in flex_inductor.__all__)
