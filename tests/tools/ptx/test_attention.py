"""The project's kernels as cards get them, executed: forward and backward against torch's own attention in fp64."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from flex_inductor import Sequences, create_block_mask, flex_attention, varlen_attention
from flex_inductor.masks import causal, sliding_window
from flex_inductor.tools import execute
from tests.accuracy import test_additive_masks, test_narrow
from tests.marks import slow_but
from tests.support import assert_accurate

LENGTHS = [5, 70, 31]
SEQUENCES = Sequences.from_lengths(LENGTHS)
CAUSAL_SEQUENCES = SEQUENCES.mask(causal())


def causal_alibi(q, k, v, slopes):
    length = q.size(2)
    mask = create_block_mask(causal(), None, None, length, length, "cpu")
    return flex_attention(q, k, v, lambda s, b, h, m, n: s - slopes[h] * (m - n), mask)


def causal_alibi_in_torch(q, k, v, slopes):
    m = torch.arange(q.size(2))
    bias = -slopes[:, None, None] * (m[:, None] - m)
    return sdpa(q, k, v, attn_mask=bias.masked_fill(m[:, None] < m, -float("inf")))


def bias(q, k, v, table):
    return flex_attention(q, k, v, lambda s, b, h, m, n: s + table[m, n])


def bias_alone(q, k, v, table):
    return flex_attention(q, k, v, lambda s, b, h, m, n: table[m, n])


def scaled_by_index(q, k, v):
    """By infinity one key after the last."""
    return flex_attention(q, k, v, lambda s, b, h, m, n: s * (1 + 1 / (k.size(2) - n)))


def grouped(q, k, v):
    mask = create_block_mask(causal(), None, None, q.size(2), k.size(2), "cpu", compact=True)
    return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)


def one_query(q, k, v):
    return flex_attention(q, k, v, enable_gqa=True)


def packed(q, k, v):
    return varlen_attention(q, k, v, SEQUENCES, block_mask=CAUSAL_SEQUENCES)


def packed_in_torch(q, k, v):
    parts = zip(*(t.transpose(0, 1).split(LENGTHS, 1) for t in (q, k, v)), strict=True)
    return torch.cat([sdpa(*part, is_causal=True) for part in parts], 1).transpose(0, 1)


PAGE, QUERIES, KEYS = 16, [40, 17], [90, 33]
TABLE = torch.randperm(12, generator=torch.Generator().manual_seed(0)).view(2, 6).int()


def in_pages(queries):
    offsets = torch.tensor([0, *queries]).cumsum(0).int()
    sequences = Sequences(offsets, used_k=torch.tensor(KEYS).int(), pages=TABLE, page_size=PAGE)
    mask = sequences.mask(causal())
    return lambda q, k, v: varlen_attention(q, k, v, sequences, block_mask=mask, enable_gqa=True)


def in_pages_in_torch(queries):
    def attend(q, k, v):
        parts = []
        for rows, pages, length in zip(q.transpose(0, 1).split(queries, 1), TABLE, KEYS, strict=True):
            own = [t[pages].flatten(0, 1)[:length].transpose(0, 1) for t in (k, v)]
            seen = torch.ones(rows.size(1), length, dtype=torch.bool).tril(length - rows.size(1))
            parts.append(sdpa(rows[None], *(t[None] for t in own), attn_mask=seen, enable_gqa=True)[0])
        return torch.cat(parts, 1).transpose(0, 1)

    return attend


# By name: the call, torch's, the shapes of query, key, value and captures, and the kernels, their numbers left out.
WITH_BACKWARD = ["forward", "backward_dq", "backward_dkdv"]
CALLS = {
    "alibi": (causal_alibi, causal_alibi_in_torch, [(1, 2, 96, 64)] * 3 + [(2,)], WITH_BACKWARD),
    "bias": (bias, lambda q, k, v, table: sdpa(q, k, v, attn_mask=table), [(1, 2, 200, 64)] * 3 + [(200, 200)], WITH_BACKWARD),
    # Gradients of scores are 0, in one register, which is copied while products read it.
    "bias alone": (
        bias_alone, lambda q, k, v, table: sdpa(q * 0, k, v, attn_mask=table),
        [(1, 2, 70, 16)] * 3 + [(70, 70)], WITH_BACKWARD,
    ),
    "scaled by index": (
        scaled_by_index, lambda q, k, v: sdpa(q, k * (1 + 1 / torch.arange(k.size(2), 0, -1)[:, None]).to(k), v),
        [(1, 2, 70, 64)] * 3, WITH_BACKWARD,
    ),
    "grouped": (
        grouped, lambda q, k, v: sdpa(q, k, v, is_causal=True, enable_gqa=True),
        [(1, 4, 256, 128)] + [(1, 2, 256, 128)] * 2, WITH_BACKWARD,
    ),
    "decode": (
        one_query, lambda q, k, v: sdpa(q, k, v, enable_gqa=True), [(2, 8, 1, 64)] + [(2, 2, 700, 64)] * 2,
        ["decode", "combine"],
    ),
    "short": (one_query, lambda q, k, v: sdpa(q, k, v), [(1, 2, 64, 64)] * 3, ["decode"]),
    "packed": (packed, packed_in_torch, [(sum(LENGTHS), 2, 64)] * 3, WITH_BACKWARD),
    "pages": (in_pages(QUERIES), in_pages_in_torch(QUERIES), [(sum(QUERIES), 2, 64)] + [(12, PAGE, 1, 64)] * 2, ["forward"]),
    "pages, one query": (
        in_pages([1, 1]), in_pages_in_torch([1, 1]), [(2, 4, 64)] + [(12, PAGE, 1, 64)] * 2, ["decode"],
    ),
}  # fmt: skip
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CASES = [
    (name, target, dtype) for name in CALLS for target in ("sm_80", "sm_90", "sm_100") for dtype in DTYPES
]


@pytest.mark.parametrize(
    "case",
    slow_but(
        CASES,
        ("alibi", "sm_80", torch.bfloat16),
        ("alibi", "sm_90", torch.float16),
        ("bias", "sm_90", torch.bfloat16),
        ("bias alone", "sm_90", torch.float16),
        ("scaled by index", "sm_90", torch.float16),
        ("decode", "sm_80", torch.float16),
        ("short", "sm_90", torch.float16),
        ("short", "sm_100", torch.bfloat16),
        ("packed", "sm_90", torch.bfloat16),
        ("pages", "sm_80", torch.bfloat16),
        ("pages, one query", "sm_90", torch.float16),
    ),
    ids=str,
)
def test_call(case):
    check(*case)


@pytest.mark.parametrize("target", slow_but(["sm_80", "sm_90", "sm_100"], "sm_80"))
def test_an_index_computed_in_floats(target):
    """Where a product and a sum are rounded once, keys 31 and 41 are looked up elsewhere."""
    q, k = torch.randn(2, 1, 1, 64, 32, dtype=torch.float16)
    table = torch.randn(64)

    def attend(q, k):
        return flex_attention(q, k, k, lambda s, b, h, m, n: table[torch.floor(n * 0.7 + 0.3).int()])

    found = execute.compiled(attend, target)(q, k)
    torch.testing.assert_close(found, attend(q, k), rtol=2e-3, atol=2e-3)


NARROW = [
    (target, dtype, narrow)
    for target in ("sm_80", "sm_90", "sm_100")
    for dtype in DTYPES
    for narrow in (torch.float8_e4m3fn, torch.float8_e5m2)
]


@pytest.mark.parametrize("case", slow_but(NARROW, ("sm_80", torch.bfloat16, torch.float8_e4m3fn)), ids=str)
def test_every_number_of_8_bits(case):
    """sm_80 widens e4m3 by its bits."""
    target, dtype, narrow = case
    test_narrow.every_number(lambda call: execute.compiled(call, target), narrow, dtype)


@pytest.mark.parametrize("case", slow_but(NARROW, ("sm_90", torch.bfloat16, torch.float8_e5m2)), ids=str)
def test_keys_and_values_of_8_bits(case):
    target, *dtypes = case
    test_narrow.judged(lambda call: execute.compiled(call, target), 70, *dtypes, "row")


AXES = {
    "descriptors": ("grouped", "forward", ["sm_90", "sm_100"]),
    "coalesced": ("bias", "backward_dq", ["sm_80", "sm_90"]),
}
ON_AXES = [(axis, target, dtype) for axis in AXES for target in AXES[axis][2] for dtype in DTYPES]


@pytest.mark.parametrize("case", slow_but(ON_AXES, ("descriptors", "sm_90", torch.bfloat16)), ids=str)
def test_axis(case):
    axis, target, dtype = case
    name, kernel, _ = AXES[axis]
    launches = check(name, target, dtype, {"configs": {kernel: {axis: 1}}})
    assert any(launch.config.get(axis.upper()) == 1 for launch in launches)
    executed = {i.name for launch in launches for i, count in launch.counts.instructions if count.warps}
    assert axis != "descriptors" or any("cp.async.bulk.tensor" in instruction for instruction in executed)


@pytest.mark.parametrize(
    "sizes", slow_but([(17, 17, 128), (200, 17, 128), (1, 17, 256), (17, 40, 256)], (17, 17, 128)), ids=str
)
def test_one_step_with_tensor_memory(sizes):
    """Triton 3.7.1 would unroll the loop, and set no barrier where sums get the tensor memory of scores."""
    queries, keys, head_dim = sizes
    torch._dynamo.reset()
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, head_dim) for n in (queries, keys, keys))

    def results(call, dtype):
        given = [tensor.to(dtype).requires_grad_() for tensor in (q, k, v)]
        out = call(*given)
        found = torch.autograd.grad(out, given, torch.ones_like(out))
        return dict(zip(["out", "d_query", "d_key", "d_value"], [out.detach(), *found], strict=True))

    found = results(execute.compiled(flex_attention, "sm_100"), torch.bfloat16)
    eager, gold = (results(sdpa, dtype) for dtype in (torch.bfloat16, torch.float64))
    assert_accurate(found, eager, gold, torch.bfloat16)


def test_a_window_whose_size_changes():
    """Its numbers are tensors, which d(key) and d(value) read in a loop over heads."""
    torch._dynamo.reset()
    inputs = [torch.randn(1, heads, 100, 16, requires_grad=True) for heads in (4, 2, 2)]

    def attend(q, k, v, size):
        mask = create_block_mask(sliding_window(size), None, None, 100, 100, "cpu", compact=True)
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

    run = execute.compiled(attend, "sm_80", dynamic=True)
    for size in (20, 30):
        found = (
            [out, *torch.autograd.grad(out.sum(), inputs)]
            for out in (f(*inputs, size) for f in (run, attend))
        )
        torch.testing.assert_close(*found, rtol=0, atol=1e-5)


MASKED = [
    (call, number, target, dtype)
    for call in ("many", "few")
    for number in test_additive_masks.NUMBERS
    for target in ("sm_80", "sm_90")
    for dtype in DTYPES
]


@pytest.mark.parametrize(
    "case",
    slow_but(
        MASKED,
        *(("many", number, "sm_80", torch.float16) for number in (-1e30, -1e9)),
        *(("many", number, "sm_90", torch.bfloat16) for number in (-1e30, -1e9)),
    ),
    ids=str,
)
def test_masked_by_large_numbers(case):
    """A card rounds a product and a difference once, which Triton's interpreter does not: such an exponent of two is off by
    the rounding of the product alone, 18 at -1e9."""
    call, number, target, dtype = case
    sizes = (140, 170, 170) if call == "many" else None
    test_additive_masks.judged(call, number, dtype, lambda f: execute.compiled(f, target), sizes)


def check(name, target, dtype, options=None):
    attend, in_torch, shapes, kernels = CALLS[name]
    # There the forward has tiles of 64 rows too.
    if name == "short" and (target == "sm_90" or dtype == torch.float32):
        kernels = ["forward"]
    backward = "backward_dq" in kernels
    torch._dynamo.reset()
    torch.manual_seed(0)
    rows = [torch.randn(shape, dtype=dtype) for shape in shapes[:3]]
    captures = [torch.rand(shape).to(dtype) for shape in shapes[3:]]
    launches = []

    def results(call, tensors):
        given = [tensor.detach().requires_grad_(backward) for tensor in tensors]
        out = call(*given)
        names = ["d_query", "d_key", "d_value", *(f"d_captures[{i}]" for i in range(len(captures)))]
        above = torch.linspace(-1, 1, out.numel()).to(dtype).to(out.dtype).view_as(out)
        found = torch.autograd.grad(out, given, above) if backward else []
        return {"out": out.detach(), **dict(zip(names, found, strict=False))}

    def executed(q, k, v, *others):
        call = execute.compiled(lambda *given: attend(*given, *others), target, launches, options=options)
        return call(q, k, v)

    gold = results(in_torch, [tensor.double() for tensor in (*rows, *captures)])
    assert_accurate(results(executed, [*rows, *captures]), results(in_torch, [*rows, *captures]), gold, dtype)
    own = [
        launch.kernel.name.removeprefix("flex_inductor_").rpartition("_")[0]
        for launch in launches
        if "flex_inductor_" in launch.kernel.name
    ]
    assert [kernel for kernel in own if kernel in kernels] == kernels
    families = {family for launch in launches for family in launch.counts.by_family()}
    if dtype != torch.float32:
        products = {"sm_80": "mma", "sm_90": "wgmma", "sm_100": "tcgen05"}[target]
        assert families & ({"mma", products} if kernels[0] == "decode" else {products})
    return launches
