"""torch's own flex_attention kernels, executed as ours are: no check may fire, and the numbers are right."""

import contextlib
import importlib
import inspect
import textwrap
from unittest import mock

import pytest
import torch
from torch._inductor.choices import InductorChoices
from torch._inductor.template_heuristics.triton import CUDAConfigHeuristic
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from flex_inductor.tools import execute
from flex_inductor.tools.environment import triton_on_cpu
from flex_inductor.tools.resources import gpu_target
from tests.marks import slow_but
from tests.support import assert_accurate
from tests.tools.ptx.test_attention import causal_alibi_in_torch

CALLS = importlib.import_module("torch.nn.attention.flex_attention")
LOWERING = importlib.import_module("torch._inductor.kernel.flex.flex_attention")
CASES = [
    (target, head_dim, dtype)
    for target in ("sm_80", "sm_90")
    for head_dim in (64, 128)
    for dtype in (torch.float16, torch.bfloat16, torch.float32)
]


@contextlib.contextmanager
def for_a_card(target, launches):
    """torch lowers CPU tensors to kernels for that card."""
    text = textwrap.dedent(inspect.getsource(LOWERING.flex_attention))
    text = text[text.index("def flex_attention(") :].replace('type == "cpu"', "type is None")
    namespace = {**vars(LOWERING)}
    exec(text, namespace)
    capability = int(target[3:-1]), int(target[-1])
    with (
        triton_on_cpu(execute.loader(target, launches), gpu_target(target)),
        mock.patch.object(CALLS, "_validate_device", lambda *_: None),  # which refuses a backward
        mock.patch.object(LOWERING, "lower_cpu", namespace["flex_attention"]),
        mock.patch.object(InductorChoices, "get_config_heuristics", lambda *_: CUDAConfigHeuristic()),
        mock.patch.object(torch.cuda, "get_device_capability", lambda *_: capability),
    ):
        yield


@pytest.mark.parametrize("case", slow_but(CASES, ("sm_90", 64, torch.bfloat16)), ids=str)
def test_forward_and_backward(case):
    target, head_dim, dtype = case
    torch._dynamo.reset()
    torch.manual_seed(0)
    rows = [torch.randn(1, 2, 130, head_dim).to(dtype) for _ in range(3)]
    slopes, launches = torch.rand(2).to(dtype), []
    mask = create_block_mask(lambda b, h, m, n: m >= n, None, None, 130, 130, "cpu")

    def by_flex(q, k, v, slopes):
        score_mod = lambda s, b, h, m, n: s - slopes[h] * (m - n)  # noqa: E731
        # On CPU tensors only a call that returns the logsumexp keeps it for the backward.
        return flex_attention(q, k, v, score_mod, mask, return_lse=True)[0]

    def results(call, dtype):
        given = [tensor.to(dtype).requires_grad_() for tensor in rows]
        out = call(*given, slopes.to(dtype))
        above = torch.linspace(-1, 1, out.numel()).to(out.dtype).view_as(out)
        gradients = torch.autograd.grad(out, given, above)
        return dict(zip(["out", "d_query", "d_key", "d_value"], [out.detach(), *gradients], strict=True))

    with for_a_card(target, launches):
        found = results(torch.compile(by_flex, backend="inductor"), dtype)
    gold, eager = (results(causal_alibi_in_torch, each) for each in (torch.float64, dtype))
    assert_accurate(found, eager, gold, dtype)
    kernels = [launch.kernel.name for launch in launches if "tem_fused_flex" in launch.kernel.name]
    assert [("backward" in kernel) for kernel in kernels] == [False, True]
    families = {family for launch in launches for family in launch.counts.by_family()}
    if dtype != torch.float32:
        assert ("wgmma" if target == "sm_90" else "mma") in families
