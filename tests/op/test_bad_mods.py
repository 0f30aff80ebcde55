"""Mods that cannot be served: the same error class eagerly and compiled, and a text that names the variable."""

import functools

import numpy as np
import pytest
import torch
from op.calls import check, draw, parameter, qkv

from flex_inductor import FlexError, create_block_mask, flex_attention
from flex_inductor.op import attention

HOW = ["eager", "compiled", "fullgraph"]


def in_each_way(cases):
    """After a graph break a call runs eagerly: of several alike, the first alone is compiled so."""
    return [(case, how) for i, case in enumerate(cases) for how in HOW if i == 0 or how != "compiled"]


def mask_of(mask_mod):
    """A BlockMask of everything, whatever mask_mod does."""
    mask = create_block_mask(lambda b, h, q, kv: q >= 0, None, None, 6, 6, "cpu", BLOCK_SIZE=4)
    mask.mask_mod = mask_mod
    return mask


def refused(how, error, match, score_mod=None, block_mask=None):
    def attend(q, k, v):
        return flex_attention(q, k, v, score_mod, block_mask)

    if how != "eager":
        attend = torch.compile(attend, backend="aot_eager", fullgraph=how == "fullgraph")
    with pytest.raises(error, match=f"^{match}") as caught:
        attend(*(t.detach() for t in qkv()))
    assert isinstance(caught.value, FlexError)


@pytest.mark.parametrize("how", HOW)
def test_mask_capture_that_requires_grad(how):
    gate = parameter(6)
    refused(
        how,
        ValueError,
        "mask_mod captures `gate`, which requires grad, but a mask has no gradient. Use gate.detach",
        block_mask=mask_of(lambda b, h, q_idx, kv_idx: gate[kv_idx] > 0),
    )


def add_in_place(bias):
    def score_mod(score, b, h, q_idx, kv_idx):
        bias.add_(1)
        return score + bias[kv_idx]

    return score_mod, "add_"


def set_an_item(bias):
    def score_mod(score, b, h, q_idx, kv_idx):
        bias[0] = 1
        return score + bias[kv_idx]

    return score_mod, "(copy|fill)_"  # up to 2.14, and from 2.15 on


def set_at_a_lane(bias):
    def score_mod(score, b, h, q_idx, kv_idx):
        bias[kv_idx] = score
        return score

    return score_mod, "index_put_"


def write_out(bias):
    def score_mod(score, b, h, q_idx, kv_idx):
        torch.mul(bias, 2, out=bias)
        return score + bias[kv_idx]

    return score_mod, "mul.out"


@pytest.mark.parametrize("make, how", in_each_way([add_in_place, set_an_item, set_at_a_lane, write_out]))
def test_mutated_capture_of_score_mod(make, how):
    bias = draw(6)
    score_mod, op = make(bias)
    before = bias.clone()
    refused(
        how, RuntimeError, rf"score_mod changes the captured tensor `bias` in place \(aten\.{op}", score_mod
    )
    assert torch.equal(bias, before)


@pytest.mark.parametrize("how", HOW)
def test_mutated_capture_of_mask_mod(how):
    seen = torch.zeros(6)

    def mask_mod(b, h, q_idx, kv_idx):
        seen.add_(1)
        return seen[kv_idx] > q_idx

    refused(
        how,
        RuntimeError,
        "mask_mod changes the captured tensor `seen` in place",
        block_mask=mask_of(mask_mod),
    )


def add_to_an_attribute(bias):
    module = torch.nn.Module()
    module.bias = bias

    def score_mod(score, b, h, q_idx, kv_idx):
        module.bias += 1
        return score + module.bias[kv_idx]

    return score_mod, module


@pytest.mark.parametrize("how", HOW)
def test_mutated_attribute(how):
    bias = draw(6)
    before = bias.clone()
    score_mod, module = add_to_an_attribute(bias)
    changes = (
        "something outside of it"
        if how == "fullgraph"
        else r"the captured tensor `module.bias` in place \(aten.add_"
    )
    refused(how, RuntimeError, f"score_mod changes {changes}", score_mod)
    assert module.bias is bias and torch.equal(bias, before)


@pytest.mark.parametrize("make, how", in_each_way([add_in_place, set_at_a_lane, write_out]))
def test_mutated_parameter(make, how):
    bias = parameter(6)
    score_mod, _ = make(bias)
    attend = lambda *qkv: flex_attention(*qkv, score_mod)  # noqa: E731
    if how != "eager":
        attend = torch.compile(attend, backend="aot_eager", fullgraph=how == "fullgraph")
    with pytest.raises(
        RuntimeError, match=r"^score_mod changes (the|a) captured tensor .*in place.*may only read"
    ):
        attend(*qkv())


def hook_on_a_score(score, b, h, q_idx, kv_idx):
    score = 2 * score
    score.register_hook(lambda grad: grad * 2)
    return score


@pytest.mark.parametrize("how", HOW)
def test_hooks(how):
    message = (
        r"score_mod registers a hook on a tensor \(register_hook\).* Apply a torch.autograd.Function whose"
    )
    refused(how, NotImplementedError, message, hook_on_a_score)


class StochasticGradient(torch.autograd.Function):
    """Draws in its backward alone."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.rand_like(grad)


RANDOM = {
    "bernoulli_": lambda s, b, h, q_idx, kv_idx: torch.nn.functional.dropout(s, 0.5),
    "rand.default": lambda s, b, h, q_idx, kv_idx: s + torch.rand(()),
    "normal_": lambda s, b, h, q_idx, kv_idx: s + torch.empty_like(s).normal_(),
}


@pytest.mark.parametrize("op, how", in_each_way(RANDOM))
def test_random_score_mod(op, how):
    # Dynamo may take the whole dropout for the op.
    drawn = "(bernoulli|native_dropout)" if op == "bernoulli_" else op
    message = rf"score_mod draws random numbers \(aten\.{drawn}.*\)\. It runs again in the backward .* Draw a tensor"
    refused(how, RuntimeError, message, RANDOM[op])


@pytest.mark.parametrize("how", HOW)
def test_random_mask_mod(how):
    mask = mask_of(lambda b, h, q_idx, kv_idx: torch.rand(()) < 0.5)
    message = r"mask_mod draws random numbers \(aten\.rand\.default\)\. .* noise\[h, kv_idx\] in mask_mod\."
    refused(how, RuntimeError, message, block_mask=mask)


@pytest.mark.parametrize("compiled", [False, True])
def test_random_backward_of_a_function(compiled):
    attend = lambda *qkv: flex_attention(*qkv, lambda s, b, h, i, j: StochasticGradient.apply(s))  # noqa: E731
    attend = torch.compile(attend, backend="aot_eager") if compiled else attend
    with pytest.raises(FlexError, match=r"score_mod draws random numbers \(aten.rand_like.default\)"):
        attend(*qkv())


def test_random_mods_are_refused_below_autograd():
    inputs = [t.detach() for t in qkv()]
    attend = torch.compile(lambda *qkv: flex_attention(*qkv, RANDOM["rand.default"]), backend="aot_eager")
    with torch.inference_mode(), pytest.raises(Exception, match="score_mod draws random numbers"):
        attend(*inputs)


@pytest.mark.parametrize("compiled", [False, True])
def test_dropout_that_draws_nothing(compiled):
    off = torch.nn.Dropout(0.5).eval()
    attend = lambda *qkv: flex_attention(  # noqa: E731
        *qkv, lambda s, b, h, i, j: off(torch.nn.functional.dropout(s, 0.0))
    )
    attend = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
    check(attend, qkv())


@pytest.mark.parametrize("how", HOW)
def test_score_mod_with_the_arguments_of_a_mask_mod(how):
    refused(
        how,
        TypeError,
        r"score_mod must take 5 arguments, score_mod\(score, b, h, q_idx, kv_idx\), but .* takes 4\. It looks like a "
        r"mask_mod: were the two swapped\?",
        lambda b, h, q_idx, kv_idx: q_idx >= kv_idx,
    )


@pytest.mark.parametrize("how", HOW)
def test_mask_mod_with_the_arguments_of_a_score_mod(how):
    refused(
        how,
        TypeError,
        r"mask_mod must take 4 arguments, .* takes 5\. It looks like a score_mod: were the two swapped\?",
        block_mask=mask_of(lambda score, b, h, q_idx, kv_idx: score),
    )


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    "score_mod, takes",
    [
        (lambda score: score, "takes 1"),
        (lambda score, b, h, q_idx, kv_idx, extra, *, more: score, "takes 7"),
    ],
)
def test_wrong_number_of_arguments(score_mod, takes, how):
    refused(how, TypeError, f"score_mod must take 5 arguments, .* {takes}", score_mod)


MASK_RESULTS = {
    "shape \\[\\] and dtype torch.int32. Compare": lambda b, h, q_idx, kv_idx: q_idx - kv_idx,
    "shape \\[2\\] and dtype torch.bool": lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx).expand(2),
    "a bool": lambda b, h, q_idx, kv_idx: True,
    "None": lambda b, h, q_idx, kv_idx: None,
}
SCORE_RESULTS = {
    "shape \\[\\] and dtype torch.int32": lambda score, b, h, q_idx, kv_idx: q_idx,
    "torch.bool. It looks like a mask_mod": lambda score, b, h, q_idx, kv_idx: q_idx >= kv_idx,
    "shape \\[2\\]": lambda score, b, h, q_idx, kv_idx: score.expand(2),
    "a float": lambda score, b, h, q_idx, kv_idx: 1.0,
    "a tuple": lambda score, b, h, q_idx, kv_idx: (score, score),
    "None": lambda score, b, h, q_idx, kv_idx: None,
}


@pytest.mark.parametrize("returned, how", in_each_way(MASK_RESULTS))
def test_mask_mod_result(returned, how):
    message = f"mask_mod must return one bool, a 0-d torch.bool tensor, but returned .*{returned}"
    refused(how, TypeError, message, block_mask=mask_of(MASK_RESULTS[returned]))


@pytest.mark.parametrize("returned, how", in_each_way(SCORE_RESULTS))
def test_score_mod_result(returned, how):
    message = f"score_mod must return one floating-point score, a 0-d tensor, but returned .*{returned}"
    refused(how, TypeError, message, SCORE_RESULTS[returned])


@pytest.mark.parametrize("how", HOW)
def test_capture_on_another_device(how):
    bias = torch.randn(6, device="meta")
    refused(
        how,
        ValueError,
        "score_mod captures `bias`, which is on meta, but query is on cpu. Move it before the call: bias = bias.to",
        lambda score, b, h, q_idx, kv_idx: score + bias[kv_idx],
    )
    refused(
        how,
        ValueError,
        "mask_mod captures `bias`, which is on meta",
        block_mask=mask_of(lambda b, h, q_idx, kv_idx: bias[kv_idx] > 0),
    )


def test_checks_hold_below_autograd():
    """In inference mode the op is not dispatched through autograd, where the checks usually are."""
    q, k, v = (t.detach() for t in qkv())
    gate = parameter(6)
    with torch.inference_mode(), pytest.raises(ValueError, match="mask_mod captures `gate`"):
        attention(q, k, v, None, lambda b, h, q_idx, kv_idx: gate[kv_idx] > 0, 1.0)


class Gate(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(draw(6))

    def mask_mod(self, b, h, q_idx, kv_idx):
        return self.table[kv_idx] > 0

    def forward(self, q, k, v):
        return attention(q, k, v, None, self.mask_mod, 1.0)[0]


def through_a_module():
    return Gate(), "self.table"


def through_a_local_function():
    gate = parameter(6)

    def attend(q, k, v):
        limit = gate

        def mask_mod(b, h, q_idx, kv_idx):
            return limit[kv_idx] > 0

        return attention(q, k, v, None, mask_mod, 1.0)[0]

    return attend, "(limit|gate)"  # Dynamo knows the tensor by its first name


def through_a_partial():
    def mask_mod(b, h, q_idx, kv_idx, gate):
        return gate[kv_idx] > 0

    gated = functools.partial(mask_mod, gate=parameter(6))
    return lambda q, k, v: attention(q, k, v, None, gated, 1.0)[0], "gate"


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("make", [through_a_module, through_a_local_function, through_a_partial])
def test_captures_are_named_as_their_author_does(make, how):
    attend, name = make()
    if how != "eager":
        attend = torch.compile(attend, backend="aot_eager", fullgraph=how == "fullgraph")
    with pytest.raises(Exception, match=f"mask_mod captures `{name}`, which requires grad"):
        attend(*(t.detach() for t in qkv()))


@pytest.mark.parametrize("fullgraph", [False, True])
def test_arity_of_a_function_made_inside_the_compiled_one(fullgraph):
    def attend(q, k, v):
        def score_mod(score, b, h, q_idx):
            return score

        return flex_attention(q, k, v, score_mod)

    with pytest.raises(Exception, match=r"score_mod must take 5 arguments, .*score_mod` takes 4"):
        torch.compile(attend, backend="aot_eager", fullgraph=fullgraph)(*qkv())


def chooses(score, b, h, q_idx, kv_idx):
    return score if h == 0 else score * 2


def joins(score, b, h, q_idx, kv_idx):
    return torch.where(q_idx > 1 and kv_idx > 1, score, 0.0)


def reads(score, b, h, q_idx, kv_idx):
    return score * kv_idx.item()


def looks_up(score, b, h, q_idx, kv_idx):
    return score * [1.0, 2.0][h]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    "score_mod, line",
    [(chooses, "return score if h"), (joins, "q_idx > 1 and"), (reads, "item"), (looks_up, "2.0")],
)
def test_the_value_of_a_lane(score_mod, line, how):
    refused(
        how,
        TypeError,
        rf"score_mod needs the value of a tensor in Python, at test_bad_mods.py:\d+ \(.*{line}.*\): for `if`, .* "
        "Choose with torch.where",
        score_mod,
    )


@pytest.mark.parametrize("how", HOW)
def test_the_value_of_a_lane_in_a_mask(how):
    mask = mask_of(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx and h == 0)
    refused(
        how, TypeError, "mask_mod needs the value of a tensor in Python, at test_bad_mods.py", block_mask=mask
    )


@pytest.mark.parametrize("how", HOW)
def test_a_tensor_whose_size_depends_on_values(how):
    table = torch.tensor([1.0, -1.0, 2.0])

    def positive(score, b, h, q_idx, kv_idx):
        return score * table[table > 0].sum()

    refused(
        how,
        TypeError,
        r"score_mod makes a tensor of a size that depends on values, at test_bad_mods.py:\d+ \(.*table > 0.*\), .* "
        "keep the size: torch.where",
        positive,
    )


def test_a_numpy_array():
    slopes = np.array([1.0, 2.0])
    refused(
        "eager",
        TypeError,
        r"score_mod computes with a tensor and a NumPy array, at test_bad_mods.py:\d+ \(.*slopes.*torch.from_numpy",
        lambda score, b, h, q_idx, kv_idx: score * slopes[h],
    )


@pytest.mark.parametrize("how", HOW)
def test_a_call_that_is_refused_before_its_mods_are_traced(how):
    refused(how, TypeError, "score_mod must be a function, .* but is a tensor of shape .*", torch.ones(()))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("number", [-1e300, 1e40])
def test_a_number_beyond_the_dtype(number, how):
    def attend(q, k, v):
        return flex_attention(q, k, v, lambda s, b, h, q, kv: torch.where(q >= kv, s, number))

    if how != "eager":
        attend = torch.compile(attend, backend="aot_eager", fullgraph=how == "fullgraph")
    message = rf"score_mod computes in float32 with the number {number:g}, which is beyond what float32 holds \(3.4e\+38\)"
    with pytest.raises(ValueError, match=message.replace("e+40", r"e\+40").replace("e+300", r"e\+300")):
        attend(*(t.float() for t in qkv()))
    attend(*(t.detach() for t in qkv()))  # float64 holds it


narrow = torch.zeros(6, dtype=torch.int8)
WRAPPING = {
    "int32 with the number 3000000000": lambda b, h, q_idx, kv_idx: kv_idx * 3_000_000_000 > q_idx,
    "int32 with the number 8589934592": lambda b, h, q_idx, kv_idx: kv_idx < 2**33,
    "int32 with the number -3000000000": lambda b, h, q_idx, kv_idx: (
        kv_idx > torch.where(h > 0, b, -3 * 10**9)
    ),
    "int32 with the number 4294967295": lambda b, h, q_idx, kv_idx: kv_idx & 0xFFFFFFFF > 0,
    "int8 with the number 300": lambda b, h, q_idx, kv_idx: narrow[kv_idx] + 300 > 0,
}


@pytest.mark.parametrize("what, how", in_each_way(WRAPPING))
def test_an_integer_beyond_the_dtype(what, how):
    mask_mod = WRAPPING[what]
    message = rf"mod computes in {what}, which is beyond what int.* would wrap around\. Compute in int64, as in kv_idx"
    refused(how, ValueError, f"mask_{message}", block_mask=mask_of(mask_mod))
    refused(
        how, ValueError, f"score_{message}", lambda score, *lanes: torch.where(mask_mod(*lanes), score, 0.0)
    )


@pytest.mark.parametrize("how", HOW)
def test_integers_within_the_dtype(how):
    """Where they meet floats or int64, or say where a slice ends."""

    def score_mod(score, b, h, q_idx, kv_idx):
        few = torch.where(narrow[1:][kv_idx % 5].long() + 3_000_000_000 > 0, kv_idx / 3_000_000_000, 0)
        return score * 3_000_000_000 + few - (kv_idx < 2**31 - 1) * 3_000_000_000

    attend = lambda *qkv: flex_attention(*qkv, score_mod)  # noqa: E731
    if how != "eager":
        attend = torch.compile(attend, backend="aot_eager", fullgraph=how == "fullgraph")
    check(attend, qkv(), score_mod=score_mod)


def test_a_value_overwritten_that_a_gradient_needs():
    table = parameter(6)

    def score_mod(score, b, h, q_idx, kv_idx):
        both = torch.stack([score, table[kv_idx]])
        both[1] = both[0] * table[q_idx]
        both[0].mul_(2)
        return both.sum()

    with pytest.raises(
        FlexError, match="score_mod changes in place a value that its gradient needs as it was"
    ):
        flex_attention(*qkv(), score_mod)
