"""What runs while an exchange is under way."""

import re
import textwrap
from contextlib import ExitStack, suppress

import expecttest
import pytest
import torch
import torch._functorch.config
import torch._inductor.config

from flex_inductor import flex_attention
from flex_inductor.distributed import ring
from flex_inductor.distributed.context import context_parallel
from flex_inductor.masks import causal

LENGTH = 256


def rotated(rows, cos, sin):
    one, other = rows.chunk(2, -1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)


def layer(x, to_query, to_key, to_value, to_out, cos, sin, mask):
    def heads(weight):
        return (x @ weight).unflatten(-1, (4, 16)).transpose(1, 2)

    query, key = (rotated(heads(weight), cos, sin) for weight in (to_query, to_key))
    out = flex_attention(query, key, heads(to_value), block_mask=mask)
    return x + out.transpose(1, 2).flatten(2) @ to_out


KINDS = {
    r"flex_inductor\.send_rows": "EXCHANGE",  # not a kernel that is named after it
    r"wait_tensor": "WAIT",
    r"cpp_fused\w*flex_inductor_attention": "attention",
    r"cpp_fused\w*\(": "elements",
    r"extern_kernels.mm": "product",
    r"segment_reduce\.": "sum of copies",
}


def wrapped(calls):
    return textwrap.fill(", ".join(calls), 100)


def outline(code):
    """What generated code calls, in order."""
    lines = code[code.index("def call") :].splitlines()
    calls = [line for line in lines if "assert" not in line and not line.strip().startswith("#")]
    found = [next((kind for text, kind in KINDS.items() if re.search(text, line)), None) for line in calls]
    return [kind for kind in found if kind]


class Compiled(Exception):
    """Where the compiled graph would run."""


def compiled(group, method):
    """The forward and the backward; no kernel is built."""
    from torch._inductor.utils import get_code

    from flex_inductor.backend import flex_inductor

    def backend(module, inputs):
        flex_inductor(module, inputs)
        return stop

    def stop(*_):
        raise Compiled

    def compile_only():
        with suppress(Compiled):
            run(x.requires_grad_(), *weights, cos, sin, mask)

    cp = context_parallel(group, method, "contiguous")
    mask = cp.plan(causal(), LENGTH, block=16)
    x, cos, sin = cp.shard((torch.randn(1, LENGTH, 64), *torch.randn(2, LENGTH, 8)), (1, 0, 0))
    weights = [torch.randn(64, 64, requires_grad=True) for _ in range(4)]
    with ExitStack() as stack:
        stack.enter_context(torch._functorch.config.patch(force_non_lazy_backward_lowering=True))
        stack.enter_context(torch._inductor.config.patch(force_disable_caches=True))
        torch._dynamo.reset()
        run = torch.compile(layer, backend=backend, fullgraph=True)
        codes = get_code(compile_only)
    return [wrapped(outline(code)) for code in codes if "def call" in code]


def steps(group):
    """What one rank of a ring does, in order."""
    told = []

    def tells(what, function):
        def run(*args):
            if args[-1]:  # the messages, or the works, if there are any
                told.append(what)
            return function(*args)

        return run

    cp = context_parallel(group, "ring", "head_tail")
    mask = cp.plan(causal(), LENGTH, block=16)
    rows = [torch.randn(1, 2, mask.positions.numel(), 16, requires_grad=True) for _ in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("attention", "attention_backward"):
            patch.setattr(ring, name, tells("attention", getattr(ring, name)))
        patch.setattr(ring._Way, "begin", tells("EXCHANGE", ring._Way.begin))
        patch.setattr(ring._Way, "end", tells("WAIT", ring._Way.end))
        out = flex_attention(*rows, block_mask=mask)
        forward = wrapped(told)
        told.clear()
        out.sum().backward()
        return forward, wrapped(told)


class Overlap(expecttest.TestCase):
    @pytest.fixture(autouse=True)
    def _group(self, group):
        self.group = group

    def test_cast(self):
        forward, backward = self.group.run(compiled, "cast", ranks=1)[0]
        self.assertExpectedInline(
            forward,
            """\
product, elements, product, elements, EXCHANGE, product, elements, WAIT, attention, elements,
product, elements""",
        )
        self.assertExpectedInline(
            backward,
            """\
product, attention, elements, EXCHANGE, product, elements, product, product, WAIT, elements, sum of
copies, elements, product, product, elements, product, product, elements""",
        )

    def test_ulysses(self):
        forward, backward = self.group.run(compiled, "ulysses", ranks=1)[0]
        self.assertExpectedInline(
            forward,
            """\
product, product, elements, product, elements, EXCHANGE, WAIT, attention, EXCHANGE, WAIT, product,
elements""",
        )
        self.assertExpectedInline(
            backward,
            """\
product, EXCHANGE, product, WAIT, attention, elements, EXCHANGE, WAIT, product, product, elements,
product, product, elements, product, product, elements""",
        )

    def test_ring(self):
        forward, backward = self.group.run(steps, ranks=2)[1]
        self.assertExpectedInline(
            forward, """EXCHANGE, attention, WAIT, EXCHANGE, attention, WAIT, attention"""
        )
        self.assertExpectedInline(
            backward,
            """\
EXCHANGE, attention, EXCHANGE, WAIT, EXCHANGE, attention, WAIT, EXCHANGE, WAIT, attention, WAIT,
EXCHANGE, WAIT, EXCHANGE, WAIT""",
        )
