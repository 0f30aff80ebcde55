"""Dropout: with every route against fp64 with the same weights left out, and that it is the same weights."""

import functools
import math

import pytest
import torch
from support import Sizes, judge_call, logits, served_by
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint

from flex_inductor import (
    AuxRequest,
    FlexError,
    Sequences,
    create_block_mask,
    flex_attention,
    varlen_attention,
)
from flex_inductor.verify.dropout import factors, philox

SIZES = Sizes(batch=2, heads=4, kv_heads=2, queries=70, keys=70)
FEW = SIZES._replace(queries=2, keys=300)
P = 0.3


def state(seed=(5 << 40) + 3, offset=7):
    return torch.tensor(seed), torch.tensor(offset)


def kept(shape, p=P, rng_state=None, head_offset=0, first_b=0):
    """The weights' factors [B, H, M, N], by the rule written for `verify`."""
    given = torch.stack([*(rng_state or state()), torch.tensor(head_offset), torch.tensor(round(p * 65536))])
    lanes = dict(zip(("b", "h", "q_idx", "kv_idx"), map(torch.arange, shape), strict=True))
    return factors(given, lanes | {"b": lanes["b"] + first_b})


def test_philox_gives_its_published_numbers():
    """Those of Random123 for 7 rounds."""
    zeros, ones = [0] * 4, [0xFFFFFFFF] * 4
    assert philox(zeros, [0, 0]) == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    assert philox(ones, [0xFFFFFFFF] * 2) == [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]


def dense(build, query, key, value, captures, block_mask):
    scores = logits(build, query, key, captures, block_mask)
    value = value.repeat_interleave(query.size(1) // value.size(1), 1)
    weights = torch.softmax(scores, -1).nan_to_num(0.0) * kept(scores.shape).to(scores.dtype)
    return weights.to(value.dtype) @ value, scores.logsumexp(-1), scores.amax(-1)


def attend(build, query, key, value, captures, block_mask):
    mod = None if build is None else build(*captures)
    given = {"enable_gqa": True, "return_aux": AuxRequest(lse=True, max_scores=True)}
    out, aux = flex_attention(query, key, value, mod, block_mask, **given, dropout_p=P, rng_state=state())
    return out, aux.lse, aux.max_scores


CALLS = {  # score_mod, mask, sizes, dtype
    "plain": (None, "none", SIZES, torch.float32),
    "bias": ("relative_bias", "causal", SIZES, torch.float16),
    "bf16": (None, "causal", SIZES._replace(queries=150, keys=300), torch.bfloat16),
    "few": ("alibi", "causal", FEW, torch.float16),
    "few, in parts": (None, "none", FEW._replace(batch=1), torch.float32),
}


def judged(call, compile):
    judge_call(CALLS[call], attend, dense, compile)


@pytest.mark.parametrize(
    "route, call",
    [
        ("cpu", "plain"),
        ("cpu", "bias"),
        ("cpu", "bf16"),
        ("cpu", "few"),
        ("chunked", "bias"),
    ],
)
def test_compiled(route, call):
    options = {"route": route, "verify": True}
    with served_by(route):
        judged(
            call, functools.partial(torch.compile, backend="flex_inductor", dynamic=False, options=options)
        )


@pytest.mark.parametrize("call", CALLS)
def test_eager(call):
    judged(call, lambda given: given)


# Which weights are kept. Where all weights are equal and the values are the identity, the output shows it.


def shown(attend, batch, heads, queries, keys):
    zeros = torch.zeros(batch, heads, queries, 16), torch.zeros(batch, heads, keys, 16)
    value = torch.eye(keys).expand(batch, heads, keys, keys)
    return attend(*zeros, value) > 0


def compiled(**options):
    return functools.partial(torch.compile, backend="flex_inductor", dynamic=False, options=options)


def eager(function):
    return function


@pytest.mark.parametrize(
    "compile, block, tile",
    [
        (eager, 48, None),
        (compiled(route="chunked"), 128, None),
        (compiled(route="cpu"), 128, (32, 64)),
        (compiled(route="cpu"), 48, (16, 16)),
        (compiled(route="cpu"), 7, None),
    ],
)
def test_every_route_tiling_and_number_of_threads_keeps_the_same(compile, block, tile):
    mask = create_block_mask(lambda b, h, q, kv: q >= -1, None, None, 100, 90, "cpu", BLOCK_SIZE=block)
    hints = tile and {"BLOCK_M": tile[0], "BLOCK_N": tile[1]}

    def call(*qkv):
        return flex_attention(*qkv, block_mask=mask, kernel_options=hints, dropout_p=P, rng_state=state())

    run, want, before = compile(call), kept((2, 3, 100, 90)) > 0, torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert torch.equal(shown(run, 2, 3, 100, 90), want)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("compile", [eager, compiled(route="cpu")])
def test_packed_sequences_and_shards_of_heads_keep_the_same(compile):
    lengths = [30, 1, 90]
    sequences = Sequences.from_lengths(lengths)

    def packed(*qkv, head_offset=0):
        return varlen_attention(*qkv, sequences, dropout_p=P, rng_state=state(), head_offset=head_offset)

    run = compile(packed)
    query = torch.zeros(121, 4, 16)
    value = torch.cat([torch.eye(n, 90) for n in lengths]).unsqueeze(1).expand(-1, 4, -1)
    out = run(query, query, value)
    shard = run(query[:, :2], query[:, :2], value[:, :2], head_offset=2)
    assert torch.equal(shard, out[:, 2:])
    want = kept((3, 4, 90, 90)) > 0
    for i, part in enumerate(out.split(lengths)):
        n = lengths[i]
        assert torch.equal(part.transpose(0, 1)[..., :n] > 0, want[i, :, :n, :n])


def test_queries_at_the_end_of_their_keys_see_positions():
    """Query i of 5 with 20 keys is at 15 + i: it loses what it loses in a call with 20 queries."""
    few, many = Sequences.from_lengths([5], [20]), Sequences.from_lengths([20])
    query, key, value = (torch.randn(20, 2, 16) for _ in range(3))
    given = {"dropout_p": P, "rng_state": state()}
    whole = varlen_attention(query, key, value, many, **given)
    for compile in (eager, compiled(route="cpu")):
        part = compile(lambda *qkv: varlen_attention(*qkv, few, **given))(query[15:], key, value)
        torch.testing.assert_close(part, whole[15:], rtol=0, atol=1e-6)


def test_a_tile_may_begin_between_two_groups_of_bits():
    """Blocks of 48 keys: kernels draw 32 columns at a time."""
    sequences = Sequences.from_lengths([20, 70, 37])
    mask = sequences.mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, block_size=(16, 48))
    qkv = [torch.randn(127, 2, 16, requires_grad=True) for _ in range(3)]
    found = []
    for compile in (eager, compiled(route="cpu")):
        run = compile(
            lambda *qkv: varlen_attention(*qkv, sequences, None, mask, dropout_p=P, rng_state=state())
        )
        out = run(*qkv)
        found.append([out, *torch.autograd.grad(out.sin().sum(), qkv)])
    torch.testing.assert_close(found[1], found[0])


def test_the_mask_that_aux_gives():
    query, key = torch.randn(2, 3, 20, 16), torch.randn(2, 3, 30, 16)
    request = AuxRequest(dropout_mask=True, rng_state=True)
    for run in (flex_attention, torch.compile(flex_attention, backend="flex_inductor")):
        _, aux = run(query, key, key, dropout_p=P, rng_state=state(), return_aux=request)
        assert torch.equal(aux.dropout_mask, kept((2, 3, 20, 30)) > 0)
        assert [int(part) for part in aux.rng_state] == [int(part) for part in state()]
        assert aux.lse is None
    assert not any(flex_attention(query, key, key, return_aux=request)[1])
    sequences = Sequences.from_lengths([4, 9], [6, 9])
    packed = torch.randn(15, 3, 16)
    _, aux = varlen_attention(
        packed[:13], packed, packed, sequences, dropout_p=P, rng_state=state(), return_aux=request
    )
    want = kept((2, 3, 11, 9)) > 0
    assert torch.equal(aux.dropout_mask[0, :, :4, :6], want[0, :, 2:6, :6])
    assert torch.equal(aux.dropout_mask[1], want[1, :, :9, :9])


# Randomness.


def share_and_pairs(p, seed):
    """1M scores: the share that is kept, and for neighbours 1 to 32 apart how far pairs are from independent."""
    mask = (kept((1, 4, 512, 512), p, state(seed)) > 0).double()
    share = mask.mean().item()
    worst = 0.0
    for dim in (2, 3):
        for apart in range(1, 33):
            size = mask.size(dim) - apart
            both = (mask.narrow(dim, 0, size) * mask.narrow(dim, apart, size)).sum().item()
            pairs = 4 * 512 * size
            deviation = math.sqrt(pairs * share**2 * (1 - share**2))
            worst = max(worst, abs(both - pairs * share**2) / deviation)
    return share, worst


@pytest.mark.parametrize(
    "p", [0.1, pytest.param(0.5, marks=pytest.mark.slow), pytest.param(0.9, marks=pytest.mark.slow)]
)
def test_it_keeps_as_many_as_it_says_and_neighbours_know_nothing_of_each_other(p):
    share, worst = share_and_pairs(p, seed=11)
    assert abs(share - (1 - round(p * 65536) / 65536)) < 0.002
    assert worst < 4.5  # of 64 normal deviations


def test_seed_offset_batch_and_head_all_count():
    base = kept((2, 2, 64, 64)) > 0
    others = [base[0, 1], base[1, 0], base[1, 1]]
    others += [
        kept((1, 1, 64, 64), rng_state=state(*other))[0, 0] > 0
        for other in ((4, 7), ((6 << 40) + 3, 7), ((5 << 40) + 3, 8))
    ]
    for other in others:
        agree = (other == base[0, 0]).double().mean().item()
        assert abs(agree - ((1 - P) ** 2 + P**2)) < 0.03


def test_torchs_generator_repeats_a_run():
    query = torch.randn(1, 2, 40, 16)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(flex_attention(query, query, query, dropout_p=0.5))
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])
    again = flex_attention(query, query, query, dropout_p=0.5)
    assert not torch.equal(again, runs[2])


@pytest.mark.parametrize("compile", [eager, compiled(route="cpu")])
def test_checkpointing_repeats_its_bits(compile):
    torch._dynamo.reset()  # which stops compiling a function that was compiled often, here flex_attention
    query, key, value = (torch.randn(1, 2, 60, 16, requires_grad=True) for _ in range(3))

    def run(*qkv, again):
        torch.manual_seed(3)
        call = functools.partial(flex_attention, dropout_p=0.4)
        out = checkpoint(call, *qkv, use_reentrant=False) if again else call(*qkv)
        return [out, *torch.autograd.grad(out.square().sum(), qkv)]

    def model(query, key, value):
        return checkpoint(
            functools.partial(flex_attention, dropout_p=0.4, rng_state=state()),
            query,
            key,
            value,
            use_reentrant=False,
        )

    for one, other in zip(
        run(query, key, value, again=True), run(query, key, value, again=False), strict=True
    ):
        assert torch.equal(one, other)
    out = compile(model)(query, key, value)
    plain = compile(functools.partial(flex_attention, dropout_p=0.4, rng_state=state()))(query, key, value)
    grads = [torch.autograd.grad(o.square().sum(), (query, key, value)) for o in (out, plain)]
    assert torch.equal(out, plain) and all(map(torch.equal, *grads))


def test_gradcheck():
    query, key, value = (torch.randn(1, 2, 9, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def call(*qkv):
        return flex_attention(*qkv, return_lse=True, dropout_p=0.4, rng_state=state())

    gradcheck(call, (query, key, value))


def test_with_sinks():
    query, key, value = (torch.randn(2, 4, 50, 16, dtype=torch.float64) for _ in range(3))
    sinks = torch.randn(4, dtype=torch.float64)
    scores = torch.cat([query @ key.mT / 4, sinks.view(1, 4, 1, 1).expand(2, 4, 50, 1)], -1)
    want = scores.softmax(-1)[..., :-1] * kept((2, 4, 50, 50)) @ value
    got = flex_attention(query, key, value, sinks=sinks, dropout_p=P, rng_state=state())
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"dropout_p": 1.0}, "dropout_p: expected a number from 0 to less than 1, got 1.0."),
        ({"dropout_p": -0.1}, "dropout_p: expected a number from 0 to less than 1, got -0.1."),
        ({"dropout_p": float("nan")}, "dropout_p: expected a number from 0 to less than 1, got nan."),
        ({"dropout_p": "some"}, "dropout_p: expected a number from 0 to less than 1, got a str."),
        ({"dropout_p": 0.1, "rng_state": torch.tensor(1)}, "rng_state: expected (seed, offset)"),
        ({"dropout_p": 0.1, "rng_state": (1, 2)}, "rng_state: expected (seed, offset)"),
        ({"rng_state": (torch.zeros(1), torch.zeros(1))}, "rng_state: expected (seed, offset)"),
        (
            {"dropout_p": 0.1, "rng_state": (torch.zeros((), dtype=torch.int64, device="meta"),) * 2},
            "rng_state: expected tensors on cpu, as query is, got one on meta",
        ),
        ({"head_offset": -1}, "head_offset: expected the number of query's first head among all"),
        (
            {"dropout_p": 0.1, "head_offset": 2045},
            "dropout_p: expected at most 2048 heads, got 4 from head 2045 on",
        ),
    ],
)
@pytest.mark.parametrize("compile", [False, True])
def test_bad_arguments_are_refused_by_name(given, message, compile):
    run = torch.compile(flex_attention, backend="flex_inductor") if compile else flex_attention
    with pytest.raises(FlexError) as error:
        run(*(torch.randn(1, 4, 8, 16) for _ in range(3)), **given)
    assert str(error.value).startswith(message)


def test_vmap_is_refused_by_name():
    query = torch.randn(3, 1, 2, 8, 16)
    with pytest.raises(FlexError, match=r"dropout_p: torch.func.vmap is not served with dropout"):
        torch.func.vmap(lambda q: flex_attention(q, q, q, dropout_p=0.1, rng_state=state()))(query)
