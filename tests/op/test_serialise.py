"""Mods as text in ops: what is written comes back, and what is read is data, whoever wrote it."""

import json
import math
import os
import weakref

import pytest
import torch
from support import MODS, Sizes
from torch import fx

from flex_inductor.errors import FlexValueError
from flex_inductor.mod_ir import serialise
from flex_inductor.mod_ir.arguments import JOINT_LANES, MASK_LANES, SCORE_LANES
from flex_inductor.mod_ir.program import LaneProgram
from flex_inductor.mod_ir.split import Programs, split, with_guards
from flex_inductor.mod_ir.trace import trace_joint, trace_value
from flex_inductor.op import Inputs
from flex_inductor.op.eager import chunked

aten = torch.ops.aten
SIZES = Sizes(batch=1, heads=2, kv_heads=1, queries=5, keys=6, head_dim=4, value_dim=4)


def programs_of(build, captures, query):
    def mod(score, b, h, q_idx, kv_idx, *captures):
        return build(*captures)(score, b, h, q_idx, kv_idx)

    wanted = [True, *(capture.is_floating_point() for capture in captures)]
    return (
        with_guards(split(trace_value(mod, SCORE_LANES, query, captures), SCORE_LANES)),
        with_guards(split(trace_joint(mod, query, captures, wanted), JOINT_LANES)),
    )


@pytest.mark.parametrize("name", [name for name, mod in MODS.items() if mod.build])
def test_a_mod_that_was_read_gives_the_same_bits(name):
    query, key, value = SIZES.inputs(torch.float32)
    captures = MODS[name].captures(SIZES)
    score, joint = programs_of(MODS[name].build, captures, query)
    mask = split(trace_value(lambda b, h, q, kv: q >= kv, MASK_LANES, query, ()), MASK_LANES)

    def run(score, joint, mask):
        mods, inputs = Programs(score, mask, joint), Inputs(captures)
        out, lse, peak = chunked.forward(query, key, value, inputs, mods, 0.5)
        wants = ("query", "key", "value")
        grads = chunked.backward(query, key, value, out, lse, out, lse, inputs, mods, 0.5, wants)
        return [out, lse, peak, *grads[:3], *(grad for grad in grads[3] if grad is not None)]

    again = [LaneProgram.from_text(program.to_text()) for program in (score, joint, mask)]
    for got, want in zip(run(*again), run(score, joint, mask), strict=True):
        assert torch.equal(got, want)


def test_equal_graphs_have_equal_text():
    def first(score, b, h, q_idx, kv_idx, slopes):
        return score + slopes[h] * q_idx

    def second(score, batch, head, row, column, table):
        bias = table[head] * row
        return score + bias

    query, slopes = torch.randn(1, 2, 3, 4), torch.randn(2)
    texts = [
        with_guards(split(trace_value(mod, SCORE_LANES, query, (slopes,)), SCORE_LANES)).to_text()
        for mod in (first, second)
    ]
    assert texts[0] == texts[1]
    assert "slopes" not in texts[0]  # names would make a key of what does not matter


def graph_of(*calls, constants=()):
    """A graph of one input with these calls on it, each (target, args before and after the input, kwargs)."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    held = [graph.get_attr(name) for name, _ in constants]
    results = [graph.call_function(target, make(x), kwargs) for target, make, kwargs in calls]
    graph.output((*results, *held))
    return fx.GraphModule(dict(constants), graph)


def read_again(module):
    return serialise.graph_function(json.loads(json.dumps(serialise.graph_data(module))))


def test_literals_come_back_exactly():
    numbers = [math.inf, -math.inf, math.nan, -0.0, 0.1, 5e-324, 2**62, -3, True, False]
    calls = [(aten.full.default, lambda x, n=n: ([2], n), {}) for n in numbers]
    given = {
        "dtype": torch.float16,
        "layout": torch.strided,
        "device": torch.device("cpu"),
        "pin_memory": None,
    }
    calls += [
        (aten.full.default, lambda x: ((), 1.5 - 2j), {"dtype": torch.complex64}),
        (aten.new_zeros.default, lambda x: (x, [1, 2]), given),
        (aten.clone.default, lambda x: (x,), {"memory_format": torch.preserve_format}),
        (aten.div.Tensor_mode, lambda x: (x, 2), {"rounding_mode": "floor"}),
        (aten.index.Tensor, lambda x: (x, [None]), {}),
    ]
    module, x = graph_of(*calls[:-1]), torch.tensor([3.0, -0.0])
    want, got = module(x), read_again(module)(x)
    for one, other in zip(want, got, strict=True):
        assert one.dtype == other.dtype and torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
        assert torch.equal(one.real.signbit(), other.real.signbit())
    assert serialise.graph_data(graph_of(calls[-1]))["steps"] == [
        ["aten::index.Tensor", [{"value": 0}, [None]], {}]
    ]


DTYPES = [
    torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64, torch.int8, torch.int64,
    torch.bool,
]  # fmt: skip


def test_constants_come_back_exactly():
    tensors = [torch.tensor([0, 1, 2, 5, 1, 0]).to(dtype).view(2, 3).t() for dtype in DTYPES]
    tensors += [torch.empty(0, 3), torch.tensor([math.nan, -0.0, math.inf]), torch.tensor(2.5)]
    tensors += [torch.tensor([1 + 2j]).conj(), torch.nn.Parameter(torch.ones(2))]
    named = [(f"_constant{i}", tensor) for i, tensor in enumerate(tensors)]
    for want, got in zip(tensors, read_again(graph_of(constants=named))(torch.ones(())), strict=True):
        assert (got.dtype, got.shape, got.device) == (want.dtype, want.shape, want.device)
        want = want.detach().resolve_conj().contiguous()
        if want.numel():
            same_bytes = got.reshape(-1).view(torch.uint8) == want.reshape(-1).view(torch.uint8)
            assert same_bytes.all()


def test_values_are_let_go_after_their_last_use():
    chain = fx.Graph()
    value = chain.placeholder("x")
    for _ in range(3):
        value = chain.call_function(aten.neg.default, (value,))
    chain.output((value,))
    read = read_again(fx.GraphModule({}, chain))
    seen = []

    def remember(x):
        seen.append(weakref.ref(x))
        return -x

    first, second, third = read.steps
    after = third._replace(call=lambda x: x if seen[0]() is None else None)
    read = serialise.GraphFunction(1, [], [first, second._replace(call=remember), after], read.output)
    assert read(torch.ones(2))[0].tolist() == [1, 1]


def text_of(*steps, output=({"value": 0},), inputs=1, constants=()):
    """A program whose lane part has these steps."""
    empty = {"inputs": 0, "constants": [], "steps": [], "output": []}
    lane = {"inputs": inputs, "constants": list(constants), "steps": list(steps), "output": list(output)}
    data = {"lanes": ["b"], "guards": [], "leaves": [], "gradients": [], "tensors": []}
    return serialise.dump({**data, "prologue": empty, "lane": lane, "epilogue": empty})


X = {"value": 0}


def refused(text, match):
    with pytest.raises(FlexValueError, match=match):
        LaneProgram.from_text(text)


@pytest.mark.parametrize(
    "name",
    [
        "os.getpid", "os::getpid", "builtins.eval", "torch.load", "torch::load", "operator.attrgetter",
        "operator.methodcaller", "_operator.add", "aten::add.__class__", "aten::__class__", "aten::add.Tensor.op",
        "aten.add.Tensor", "aten::add.Tensor; import os", "aten::", "::add", "", "load_library::x", "__init__::x",
        "aten::nothing", "aten::add.nothing", "aten::add\n", "aten::\u0430dd.Tensor", "aten::save", "prim::Print",
        "aten::add.Tensor\0",
    ],
)  # fmt: skip
def test_what_is_not_a_registered_operator(name):
    refused(
        text_of([name, [X], {}]),
        r"(?s)A mod uses .*, which is not an operator registered with torch\. In a compi",
    )


@pytest.mark.parametrize(
    "name, why",
    [
        ("aten::from_file", "takes text and no tensor, such as the name of a file"),
        ("aten::_print", "does not give tensors or numbers"),
        ("aten::_cufft_clear_plan_cache", "does not give tensors or numbers"),
        ("aten::rand", "draws random numbers"),
        ("aten::bernoulli.p", "draws random numbers"),
        ("aten::native_dropout", "draws random numbers"),
        ("aten::set_.source_Storage", "takes a Storage, which is not data"),
        ("aten::record_stream", "does not give tensors or numbers"),
    ],
)
def test_operators_that_a_mod_may_not_use(name, why):
    refused(text_of([name, [X], {}]), f"A mod uses '{name}', which {why}")


def test_no_file_is_touched(tmp_path):
    file = tmp_path / "made"
    refused(text_of(["aten::from_file", [str(file), True, 4], {}]), "takes text and no tensor")
    assert os.listdir(tmp_path) == []


def test_an_operator_of_somebody_else():
    with torch.library._scoped_library("graph_text_test", "FRAGMENT") as library:
        library.define("twice(Tensor x, str how) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
        library.define("write(Tensor(a!) x) -> Tensor")
        library.define("noise(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
        for name in ("twice", "write", "noise"):
            library.impl(name, lambda x, how="": x * 2, "CompositeExplicitAutograd")
        lane = LaneProgram.from_text(
            text_of(["graph_text_test::twice", [X, "so"], {}], output=[{"value": 1}])
        ).lane
        assert lane(torch.ones(())) == (2.0,)
        refused(text_of(["graph_text_test::write", [X], {}]), "writes into what the mod was given")
        refused(text_of(["graph_text_test::noise", [X], {}]), "draws random numbers")


CONSTANT = ["torch.float32", [1], "cpu", "AACAPw=="]


@pytest.mark.parametrize(
    "steps, constants",
    [
        ([["aten::add_.Tensor", [X, 1], {}]], []),
        ([["aten::add_.Tensor", [], {"self": X, "other": 1}]], []),
        ([["aten::view", [X, [1]], {}], ["aten::fill_.Scalar", [{"value": 2}, 1], {}]], [CONSTANT]),
        ([["aten::_unsafe_view", [X, [1]], {}], ["aten::zero_", [{"value": 1}], {}]], []),
        ([["aten::split.Tensor", [X, 1], {}], ["operator.getitem", [{"value": 1}, 0], {}],
          ["aten::zero_", [{"value": 2}], {}]], []),
        ([["aten::zero_", [{"value": 1}], {}]], [CONSTANT]),
        ([["aten::add.out", [X, 1], {"out": X}]], []),
        ([["aten::_foreach_zero", [[X]], {}], ["aten::_foreach_add_.Scalar", [[X], 1], {}]], []),
    ],
)  # fmt: skip
def test_nothing_is_written_but_what_the_mod_made(steps, constants):
    refused(
        text_of(*steps, constants=constants), "(writes into what the mod was given|does not give tensors)"
    )


def test_a_mod_may_write_into_what_it_made():
    steps = [
        ["aten::new_zeros", [X, [2]], {}],
        ["aten::select.int", [{"value": 1}, 0, 1], {}],
        ["aten::copy_", [{"value": 2}, X], {}],
    ]
    lane = LaneProgram.from_text(text_of(*steps, output=[{"value": 1}])).lane
    assert torch.equal(lane(torch.tensor(3.0))[0], torch.tensor([0.0, 3.0]))


def nested(depth):
    argument = X
    for _ in range(depth):
        argument = [argument]
    return argument


@pytest.mark.parametrize(
    "text, match",
    [
        ("", "Expecting value"),
        ("def forward(self): import os", "Expecting value"),
        ("[]", "it is not a table of names and values"),
        ("[" * 100_000, "(recursion|Recursion)"),
        ("{}", "it has format None, and this version reads format 2"),
        ('{"format": 1}', "it has format 1"),
        ('{"format": 2, "lane": {}}', "expected lanes, guards"),
        (text_of(["aten::stack", [nested(30)], {}]), "lists go more than 4 deep"),
        (text_of(["aten::neg", [{"value": 1}], {}]), r"an argument is \{'value': 1\}"),
        (text_of(["aten::neg", [{"value": -1}], {}]), r"an argument is \{'value': -1\}"),
        (text_of(["aten::neg", [{"value": True}], {}]), r"an argument is \{'value': True\}"),
        (text_of(["aten::neg", [{"torch": "torch.load"}], {}]), "an argument is {'torch': 'torch.load'}"),
        (text_of(["aten::neg", [{"device": "os"}], {}]), "a device is os"),
        (text_of(["aten::neg", [{"complex": ["1", 2]}], {}]), "an argument is {'complex'"),
        (text_of(["aten::neg", [{"python": "os.getpid"}], {}]), "an argument is {'python'"),
        (text_of(["aten::neg", [{}], {}]), "an argument is {}"),
        (text_of(["aten::neg", X, {}]), "aten::neg has no list of arguments"),
        (text_of(["aten::neg", [X]]), "a step is"),
        (text_of([{}, [X], {}]), "an operator is {}"),
        (text_of(["operator.mul", [X, "a"], {}]), "operator.mul is given text or a list"),
        (text_of(["operator.mod", ["%999999999d", X], {}]), "operator.mod is given text or a list"),
        (text_of(output=[{"value": 7}]), "an argument is {'value': 7}"),
        (text_of(inputs=-1), "a graph has -1 inputs"),
        (text_of(inputs="1"), "a graph has '1' inputs"),
        (text_of(constants=[["float32", [1], "cpu", "AACAPw=="]]), "the dtype of a constant is float32"),
        (text_of(constants=[["torch.strided", [1], "cpu", "AACAPw=="]]), "the dtype of a constant is torch.strided"),
        (text_of(constants=[["torch.float32", [2], "cpu", "AACAPw=="]]), r"a constant of shape \[2\] has 4 bytes"),
        (text_of(constants=[["torch.float32", [-1], "cpu", "AACAPw=="]]), "the shape of a constant"),
        (text_of(constants=[["torch.float32", [1], "cpu", "?"]]), "bytes are not in base64"),
        (text_of(constants=[["torch.float32", [1], "os", "AACAPw=="]]), "a device is os"),
        (text_of(constants=[7]), "a constant is 7"),
        (text_of().replace('"lanes":["b"]', '"lanes":["import os"]'), "expected names of"),
        (text_of().replace('"leaves":[]', '"leaves":[[[1],[true],"x",[]]]'), "expected sizes in"),
        (text_of().replace('"leaves":[]', '"leaves":[3]'), "expected a list, found 3"),
        (text_of().replace('"guards":[]', '"guards":[["score"]]'), "expected names of"),
        (text_of().replace('"gradients":[]', '"gradients":[1]'), "expected a list of bool"),
    ],
)  # fmt: skip
def test_text_that_is_no_mod(text, match):
    refused(text, match)


def test_bools_are_bools_whatever_the_bytes():
    """Torch counts and gathers the true elements separately, and trusts them to be 0 or 1."""
    text = text_of(constants=[["torch.bool", [3], "cpu", "AAEC"]], output=[{"value": 1}])
    (flags,) = LaneProgram.from_text(text).lane(torch.ones(()))
    assert flags.view(torch.uint8).tolist() == [0, 1, 1]


CALL = {
    "inputs": {},
    "mods": dict.fromkeys(("score", "mask", "joint")),
    "scale": 1.0,
    "wants": [],
    "options": {"hints": {}, "lse": False, "max_scores": False, "more": []},
}


def test_the_ops_refuse_such_text():
    q = torch.randn(1, 1, 2, 4)
    for mod in ("import os", text_of(["os.getpid", [], {}])):
        call = {**CALL, "mods": {**CALL["mods"], "score": mod}}
        with pytest.raises(FlexValueError):
            torch.ops.flex_inductor.chunked_forward(q, q, q, [], serialise.dump(call))


@pytest.mark.parametrize(
    "changed",
    [
        {"inputs": {"sink": None}},
        {"inputs": {"score_captures": [{"tensor": 0}]}},
        {"inputs": {"schedule": ["os"]}},
        {"inputs": {"schedule": ["runs", 1, 2]}},
        {"inputs": {"schedule": {"os": 1}}},
        {"inputs": []},
        {"mods": {"score": 1, "mask": None, "joint": None}},
        {"scale": "1"},
        {"wants": [0]},
        {"options": {"hints": {}}},
    ],
)
def test_the_ops_refuse_such_calls(changed):
    q = torch.randn(1, 1, 2, 4)
    torch.ops.flex_inductor.chunked_forward(q, q, q, [], serialise.dump(CALL))
    with pytest.raises(FlexValueError):
        torch.ops.flex_inductor.chunked_forward(q, q, q, [], serialise.dump({**CALL, **changed}))


def test_a_mod_that_cannot_be_written_says_why():
    class Odd(torch.Tensor):
        pass

    with pytest.raises(FlexValueError, match="A mod holds `_constant`, an Odd, which cannot be written"):
        serialise.graph_data(graph_of(constants=[("_constant", torch.ones(1).as_subclass(Odd))]))
    with pytest.raises(
        FlexValueError, match="A mod uses '<built-in function getpid>', which is not an operator"
    ):
        serialise.graph_data(graph_of((os.getpid, lambda x: (), {})))
    with pytest.raises(FlexValueError, match="A mod gives an operator a slice, which cannot be written"):
        serialise.graph_data(graph_of((aten.neg.default, lambda x: (slice(0, 1),), {})))
    with pytest.raises(FlexValueError, match=r"A mod uses 'aten::rand', which draws random numbers"):
        serialise.graph_data(graph_of((aten.rand.default, lambda x: ([1],), {})))
