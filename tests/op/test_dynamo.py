"""torch.compile traces the op as one node, with what the mods capture as its inputs."""

import functools
from pathlib import Path

import expecttest
import pytest
import torch
from op.calls import check, close, draw, parameter, qkv
from torch._dynamo.symbolic_convert import InliningInstructionTranslator
from torch._dynamo.testing import CompileCounterWithBackend, normalize_gm
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import flex_attention as torch_attention
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import flex_inductor
from flex_inductor import create_block_mask, flex_attention, masks
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


class Window:
    """Masks and score_mods of other kinds than a function."""

    def __init__(self, size):
        self.size = size

    def __call__(self, b, h, q_idx, kv_idx):
        return abs(q_idx - kv_idx) < self.size


class Slopes(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.slopes = torch.nn.Parameter(torch.randn(2))

    def forward(self, score, b, h, q_idx, kv_idx):
        return score + self.slopes[h] * kv_idx


def multiplied(score, b, h, q_idx, kv_idx, *, by):
    return score * by


PLAIN = {
    "nothing": {},
    "a mask": {"block_mask": create_block_mask(masks.causal(), None, None, 6, 6)},
    "runs": {"block_mask": create_block_mask(masks.causal(), None, None, 6, 6, compact=True)},
    "an object's mask": {"block_mask": create_block_mask(Window(3), 2, 2, 6, 6)},
    "a module": {"score_mod": Slopes()},
    "a partial function": {"score_mod": functools.partial(multiplied, by=0.5), "scale": 0.3},
    "hints": {"kernel_options": {"BLOCK_M": 64}, "return_lse": True},
}


@pytest.mark.parametrize("case", PLAIN)
def test_the_python_of_a_plain_call_is_not_traced(case, monkeypatch):
    """Tracing it takes as long as a layer of a transformer."""
    torch._dynamo.reset()
    traced, inline = set(), InliningInstructionTranslator.inline_call

    def seen(parent, function, *args, **kwargs):
        traced.add(function.get_code().co_filename)
        return inline(parent, function, *args, **kwargs)

    monkeypatch.setattr(InliningInstructionTranslator, "inline_call", seen)
    q, k, v = qkv()
    compiled = torch.compile(flex_attention, backend="eager", fullgraph=True)
    got, want = (attend(q, k, v, **PLAIN[case]) for attend in (compiled, flex_attention))
    close(got, want)
    package = Path(flex_inductor.__file__).parent
    ours = {Path(name).relative_to(package) for name in traced if Path(name).is_relative_to(package)}
    assert ours <= {Path("masks/library/positions.py")}  # a mod


def attributes_assigned_between(attend, q, k, v):
    window = WINDOW
    window.size = 2
    near = attend(q, k, v, score_mod=in_window)
    window.size = 5
    return near, attend(q, k, v, score_mod=in_window)


WINDOW = Window(2)


def in_window(score, b, h, q_idx, kv_idx):
    return torch.where(abs(q_idx - kv_idx) < WINDOW.size, score, 2 * score)


@pytest.mark.parametrize("attend", [flex_attention, torch_attention])
def test_a_mod_sees_attributes_that_were_assigned_before_the_call(attend):
    torch._dynamo.reset()
    compiled = torch.compile(attributes_assigned_between, backend="flex_inductor", fullgraph=True)
    q, k, v = (tensor.detach() for tensor in qkv())
    close(compiled(attend, q, k, v), attributes_assigned_between(flex_attention, q, k, v))


def test_layers_share_the_graph_of_a_mod_without_captures():
    torch._dynamo.reset()
    record, bias = Recorder(), torch.randn(6)
    mask = create_block_mask(masks.causal(), None, None, 6, 6)

    def two_layers(q, k, v, sizes):
        for size in sizes:
            softcap = lambda score, *_: size * torch.tanh(score / size)  # noqa: E731, B023
            v = flex_attention(q, k, v, softcap, mask)
        biased = lambda score, b, h, q_idx, kv_idx: score + bias[kv_idx]  # noqa: E731
        return flex_attention(q, k, flex_attention(q, k, v, biased), biased)

    compiled = torch.compile(two_layers, backend=record, fullgraph=True)
    given = (*qkv(), (1.0, 2.0, 1.0))
    close(compiled(*given), two_layers(*given))
    calls = record.graphs[0].graph.find_nodes(op="call_function", target=attention)
    found = [[mod and mod.target for mod in AttentionCall.read(*call.args)[3:5]] for call in calls]
    assert found == [
        ["score_mod_0", "mask_mod_0"],
        ["score_mod_1", "mask_mod_0"],
        ["score_mod_0", "mask_mod_0"],
        ["score_mod_2", None],
        ["score_mod_3", None],
    ]


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
