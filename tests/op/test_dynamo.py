"""torch.compile traces the op as one node, with what the mods capture as its inputs."""

import functools

import expecttest
import pytest
import torch
from op.calls import check, close, draw, parameter, qkv
from torch._dynamo.testing import CompileCounterWithBackend, normalize_gm
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from flex_inductor import create_block_mask, flex_attention
from flex_inductor.op import AttentionCall, attention
from flex_inductor.op.eager import chunked

BACKENDS = ["eager", "aot_eager", "inductor"]


class Recorder:
    """A backend that keeps the graphs it is given."""

    def __init__(self):
        self.graphs = []

    def __call__(self, module, inputs):
        self.graphs.append(module)
        return module

    def call(self) -> AttentionCall:
        (node,) = self.graphs[-1].graph.find_nodes(op="call_function", target=attention)
        return AttentionCall.read(*node.args)


class TestGraph(expecttest.TestCase):
    def test_dynamo_graph(self):
        torch._dynamo.reset()
        record = Recorder()
        bias, limit = parameter(6), torch.tensor(2)

        @torch.compile(backend=record, fullgraph=True)
        def attend(q, k, v):
            def score_mod(score, b, h, q_idx, kv_idx):
                return score + bias[kv_idx] / q.shape[2]

            def mask_mod(b, h, q_idx, kv_idx):
                return q_idx - kv_idx <= limit

            return attention(q, k, v, score_mod, mask_mod, 0.5)[0]

        check(attend, qkv(), [bias], *self.equivalent(bias, limit))
        self.assertExpectedInline(
            normalize_gm(record.graphs[0].print_readable(print_output=False)),
            """\
class GraphModule(torch.nn.Module):
    def forward(self, L_q_: "f64[2, 2, 6, 4]", L_k_: "f64[2, 2, 6, 4]", L_v_: "f64[2, 2, 6, 4]", L_bias_: "f64[6]", L_limit_: "i64[]"):
        l_q_ = L_q_
        l_k_ = L_k_
        l_v_ = L_v_
        l_bias_ = L_bias_
        l_limit_ = L_limit_

        score_mod_0 = self.score_mod_0
        mask_mod_0 = self.mask_mod_0
        flex_inductor_attention = torch.ops.higher_order.flex_inductor_attention(l_q_, l_k_, l_v_, score_mod_0, mask_mod_0, 0.5, {'score_captures': (l_bias_,), 'mask_captures': (l_limit_,)}, {});  l_q_ = l_k_ = l_v_ = score_mod_0 = mask_mod_0 = l_bias_ = l_limit_ = None
        getitem: "f64[2, 2, 6, 4]" = flex_inductor_attention[0];  flex_inductor_attention = None
        return (getitem,)

    class score_mod_0(torch.nn.Module):
        def forward(self, score: "f64[]", b: "i32[]", h: "i32[]", q_idx: "i32[]", kv_idx: "i32[]", l_bias_: "f64[6]"):
            getitem: "f64[]" = l_bias_[kv_idx];  l_bias_ = kv_idx = None
            truediv: "f64[]" = getitem / 6;  getitem = None
            add: "f64[]" = score + truediv;  score = truediv = None
            return add

    class mask_mod_0(torch.nn.Module):
        def forward(self, b: "i32[]", h: "i32[]", q_idx: "i32[]", kv_idx: "i32[]", l_limit_: "i64[]"):
            sub: "i32[]" = q_idx - kv_idx;  q_idx = kv_idx = None
            le: "b8[]" = sub <= l_limit_;  sub = l_limit_ = None
            return le
""",
        )

    def equivalent(self, bias, limit):
        mask = create_block_mask(lambda b, h, q, kv: q - kv <= limit, None, None, 6, 6, "cpu")
        return (lambda score, b, h, q_idx, kv_idx: (score + bias[kv_idx] / 6) * 1.0), mask


def scaled(score, b, h, q_idx, kv_idx, factor):
    return score * factor


def partial_of(factor):
    return functools.partial(scaled, factor=factor)


def closure_over(factor):
    return lambda score, b, h, q_idx, kv_idx: score * factor


def window_of(size):
    return lambda score, b, h, q_idx, kv_idx: torch.where(q_idx - kv_idx < size, score, -1.0)


@pytest.mark.parametrize(
    "make, values",
    [(partial_of, (1.5, 2.5, 3.5, 4.5)), (closure_over, (1.5, 2.5, 3.5, 4.5)), (window_of, (2, 3, 4, 5))],
)
def test_changing_numbers_compile_twice(make, values):
    counter = CompileCounterWithBackend("aot_eager")
    inputs = qkv()

    @torch.compile(backend=counter, fullgraph=True)
    def attend(q, k, v, value):
        return flex_attention(q, k, v, make(value))

    compiles = []
    for value in values:
        check(lambda *a, value=value: attend(*a, value), inputs, (), make(value))
        compiles.append(counter.frame_count)
    assert compiles == [1, 2, 2, 2]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_length_inside_a_mod_lifts_no_tensor(dynamic):
    record = Recorder()

    def attend(q, k, v):
        return flex_attention(q, k, v, lambda score, b, h, i, j: score * q.shape[2] / k.size(2))

    torch.compile(attend, backend=record, fullgraph=True, dynamic=dynamic)(*qkv())
    lifted = [node.meta["example_value"] for node in record.call().inputs.score_captures]
    assert not [example for example in lifted if isinstance(example, torch.Tensor)]


def test_a_dynamic_length_inside_a_mod():
    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def attend(q, k, v):
        return flex_attention(q, k, v, lambda score, b, h, q_idx, kv_idx: score + kv_idx / q.shape[2])

    for length in (6, 9):
        equivalent = lambda score, b, h, q_idx, kv_idx, n=length: score + kv_idx / n  # noqa: E731
        check(attend, qkv(2, 2, length, 4), (), equivalent)


def test_a_dynamic_length_that_cuts_a_tensor():
    bias = parameter(12)

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def attend(q, k, v):
        return flex_attention(q, k, v, lambda score, b, h, q_idx, kv_idx: score + bias[-q.shape[2] :][kv_idx])

    for length in (6, 9):
        equivalent = lambda score, b, h, q_idx, kv_idx, n=length: score + bias[12 - n :][kv_idx]  # noqa: E731
        check(attend, qkv(2, 2, length, 4), [bias], equivalent)


class Bias(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(draw(2, 6))

    def score_mod(self, score, b, h, q_idx, kv_idx):
        return score + self.table[h, kv_idx]


@pytest.mark.parametrize("backend", BACKENDS)
def test_parameters_of_a_module_get_gradients(backend):
    bias = Bias()
    attend = torch.compile(
        lambda q, k, v: flex_attention(q, k, v, bias.score_mod), backend=backend, fullgraph=True
    )
    check(attend, qkv(), [bias.table], bias.score_mod)


def call_with_captures():
    bias, documents = parameter(6), torch.tensor([0, 0, 0, 1, 1, 1])
    mask = create_block_mask(
        lambda b, h, q, kv: documents[q] == documents[kv], None, None, 6, 6, "cpu", BLOCK_SIZE=4
    )
    return bias, mask, lambda score, b, h, q_idx, kv_idx: score * bias[kv_idx]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(context, backend):
    _, mask, score_mod = call_with_captures()
    inputs = qkv()
    attend = torch.compile(lambda *a: flex_attention(*a, score_mod, mask), backend=backend, fullgraph=True)
    with context():
        close(attend(*inputs), flex_attention(*inputs, score_mod, mask))


# What aot_eager takes, eager takes: it stops sooner.
@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.slow), "aot_eager"])
def test_compiled_autograd(backend):
    """Both ops in the compiled backward: of a compiled forward, and of an eager one."""
    bias, mask, score_mod = call_with_captures()
    inputs = qkv()
    leaves = [*inputs, bias]

    def loss():
        return flex_attention(*inputs, score_mod, mask).sin().sum()

    expected = list(torch.autograd.grad(loss(), leaves))

    def grads():
        found = [t.grad for t in leaves]
        for t in leaves:
            t.grad = None
        return found

    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda: loss().backward(), backend=backend)()
    close(grads(), expected)
    torch._dynamo.reset()
    compiler = CompileCounterWithBackend(backend)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend=compiler)):
        loss().backward()
    assert compiler.frame_count >= 1
    close(grads(), expected)


def test_blocks_that_are_compiled_once_and_read_from_the_cache():
    """Regional compilation: three blocks, one region. Its graph is read again by torch.fx's own tracer."""
    bias, mask, score_mod = call_with_captures()

    @torch.compiler.nested_compile_region
    def block(x, k, v):
        return x + flex_attention(x.sin(), k, v, score_mod, mask)

    def model(x, k, v):
        return block(block(block(x, k, v), k, v), k, v)

    q, k, v = qkv()
    x = torch.randn_like(q, requires_grad=True)
    leaves = [x, k, v, bias]

    def grads(of):
        return list(torch.autograd.grad(of(x, k, v).sin().sum(), leaves))

    expected = grads(model)
    for hits in (0, 1):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        close(grads(torch.compile(model, backend="flex_inductor", fullgraph=True)), expected)
        assert torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"] >= hits


@pytest.mark.parametrize("policy, expected", [("MUST_SAVE", 1), ("MUST_RECOMPUTE", 2)])
def test_selective_checkpointing(policy, expected, monkeypatch):
    bias, mask, score_mod = call_with_captures()
    inputs, runs = qkv(), []
    forward = chunked.forward
    monkeypatch.setattr(chunked, "forward", lambda *args: runs.append(1) or forward(*args))

    def block(q, k, v):
        return flex_attention(q.sin(), k, v, score_mod, mask).sin()

    def choose(ctx, op, *args, **kwargs):
        return CheckpointPolicy[policy] if op is attention else CheckpointPolicy.PREFER_RECOMPUTE

    @torch.compile(backend="aot_eager", fullgraph=True)
    def checkpointed(q, k, v):
        contexts = functools.partial(create_selective_checkpoint_contexts, choose)
        return checkpoint(block, q, k, v, use_reentrant=False, context_fn=contexts)

    grads = torch.autograd.grad(checkpointed(*inputs).sum(), (*inputs, bias))
    assert len(runs) == expected
    close(grads, torch.autograd.grad(block(*inputs).sum(), (*inputs, bias)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_transforms_inside_compile(backend, dynamic):
    args = [draw(3, 2, 2, 6, 4) for _ in range(3)] + [draw(3, 6)]

    def loss(q, k, v, bias):
        return flex_attention(q, k, v, lambda score, b, h, q_idx, kv_idx: score * bias[kv_idx]).sin().sum()

    per_example = vmap(grad(loss, (0, 3)))
    close(torch.compile(per_example, backend=backend, dynamic=dynamic)(*args), per_example(*args))


def test_a_traced_graph_compiles():
    bias = parameter(6)

    def attend(q, k, v, bias):
        return flex_attention(q, k, v, lambda score, b, h, q_idx, kv_idx: score * bias[kv_idx])

    args = [*(t.detach() for t in qkv()), bias.detach()]
    traced = make_fx(attend)(*args)
    close(torch.compile(traced, backend="aot_eager", fullgraph=True)(*args), attend(*args))
