"""flash_attn_with_kvcache against one dense call for each sequence, and the arguments that FlashAttention 3 added."""

import itertools

import pytest
import torch
from support import served_by

from flex_inductor import decisions, flash, set_eager_kernels
from flex_inductor.errors import FlexError
from tests.sequences.appended import int32, turned
from tests.sequences.flash_dense import dense

HEADS, KV_HEADS, DIM, VALUE_DIM, BATCH, ROOM = 4, 2, 12, 5, 3, 256
USED = [41, 0, 130]  # before new keys
PADS = [4, 0, 101]
MASKS = {
    "all": {},
    "causal": {"causal": True},
    "window": {"window_size": (7, 2)},
    "left": {"causal": True, "window_size": (5, -1)},
    "chunk": {"attention_chunk": 16, "causal": True},
    "chunk of a window": {"attention_chunk": 9, "window_size": (5, 3)},
}
SCORES = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": (HEADS,)},
    "both": {"softcap": 3.0, "alibi_slopes": (BATCH, HEADS), "softmax_scale": 0.4},
}
# Where keys are, how many queries and new keys, rotary (None, interleaved or not), mask, scores, splits.
CASES = [
    ("rows", 1, 1, True, "causal", "plain", 0),
    ("rows", 4, 0, None, "window", "both", 2),
    ("rows", 20, 7, False, "all", "alibi", 0),
    ("padded", 1, 4, False, "chunk", "softcap", 3),
    ("padded", 4, 4, True, "left", "alibi", 0),
    ("padded", 20, 0, None, "causal", "plain", 0),
    (1, 1, 0, None, "left", "softcap", 0),
    (1, 4, 4, True, "chunk of a window", "plain", 1),
    (16, 1, 1, True, "all", "both", 3),
    (16, 20, 20, False, "causal", "softcap", 0),
    (64, 4, 1, None, "chunk", "alibi", 0),
    (64, 1, 4, True, "window", "plain", 2),
    (256, 4, 4, False, "causal", "both", 0),
    (256, 20, 0, None, "all", "softcap", 0),
]


class Case:
    """The call's arguments, and what each sequence's keys and values then are."""

    def __init__(
        self, kind, queries, new, interleaved, mask, scores, splits, dtype=torch.float64, used=USED, room=ROOM
    ):
        generator = torch.Generator().manual_seed(1)

        def drawn(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        self.mask, self.kind, self.used, self.new, batch = MASKS[mask], kind, used, new, len(used)
        self.scores = dict(SCORES[scores])
        if "alibi_slopes" in self.scores:
            slopes = drawn(*self.scores["alibi_slopes"]).abs().float()
            self.scores["alibi_slopes"] = slopes if slopes.dim() == 1 else slopes.repeat(2, 1)[:batch]
        self.pads = PADS if kind == "padded" else [0] * batch
        self.q, self.tables = drawn(batch, queries, HEADS, DIM), None
        self.k, self.v = (drawn(batch, new, KV_HEADS, d) if new else None for d in (DIM, VALUE_DIM))
        where = {}
        if kind in ("rows", "padded"):
            self.rows = [2, 4, 0] if kind == "padded" else [0, 1, 2]
            shape = (5, room)
            if kind == "padded":
                where = {"cache_batch_idx": int32(self.rows), "cache_leftpad": int32(PADS)}
        else:
            pages = torch.randperm(batch * room // kind, generator=generator)
            self.rows = pages.view(batch, -1)
            shape = (pages.numel(), kind)
            where = {"block_table": self.rows.int()}
            if kind == 64:  # FlashAttention 3's name, and its rows of a table that has more
                rows = torch.cat([self.rows[:1], self.rows.flip(0)]).int()
                where = {"page_table": rows, "cache_batch_idx": int32(range(batch, 0, -1))}
        self.k_cache, self.v_cache = (drawn(*shape, KV_HEADS, d) for d in (DIM, VALUE_DIM))
        self.arguments = {
            **self.mask,
            **self.scores,
            **where,
            "num_splits": splits,
            "return_softmax_lse": True,
        }
        self.arguments["cache_seqlens"] = int32(used)
        if interleaved is not None:
            angle = drawn(room, 4).double()
            self.tables = (angle.cos().to(dtype), angle.sin().to(dtype))
            rotary = dict(zip(("rotary_cos", "rotary_sin"), self.tables, strict=True))
            self.arguments |= rotary | {"rotary_interleaved": interleaved}
        self.interleaved = interleaved

    def run(self, function=flash.flash_attn_with_kvcache):
        return function(self.q, self.k_cache, self.v_cache, self.k, self.v, **self.arguments)

    def place(self, b, position):
        if isinstance(self.rows, list):
            return self.rows[b], position
        return int(self.rows[b, position // self.kind]), position % self.kind

    def dense(self, dtype=torch.float64):
        """(out, lse) of each sequence, with its new keys written, and the caches then."""
        k_cache, v_cache, q = (x.to(dtype).clone() for x in (self.k_cache, self.v_cache, self.q))
        found = []
        local = bool(self.mask)
        for b, (used, pad) in enumerate(zip(self.used, self.pads, strict=True)):
            for t in range(self.new):
                key = self.k[b, t].to(dtype)
                if self.tables:
                    key = turned(key.double(), self.tables, used + t, self.interleaved).to(dtype)
                place = self.place(b, used + t)
                k_cache[place], v_cache[place] = key, self.v[b, t].to(dtype)
            for t in range(q.size(1)) if self.tables else ():
                q[b, t] = turned(q[b, t].double(), self.tables, used + t * local, self.interleaved).to(dtype)
            keys, values = (
                torch.stack([cache[self.place(b, i)] for i in range(pad, used + self.new)])
                if used + self.new > pad
                else cache[0, :0]
                for cache in (k_cache, v_cache)
            )
            own = {name: x for name, x in (self.mask | self.scores).items() if name != "attention_chunk"}
            if "alibi_slopes" in own and own["alibi_slopes"].dim() == 2:
                own["alibi_slopes"] = own["alibi_slopes"][b]
            size = self.mask.get("attention_chunk")
            seen = (lambda i, j, size=size: i // size == j // size) if size else None
            found.append(dense(q[b : b + 1], keys[None], values[None], **own, seen=seen))
        return *(torch.cat(parts) for parts in zip(*found, strict=True)), k_cache, v_cache


def grid():
    for i, (kind, queries, mask, scores) in enumerate(
        itertools.product(("rows", "padded", 1, 16, 64, 256), (1, 4, 20), MASKS, SCORES)
    ):
        new = (0, 1, 4, queries)[i % 4]
        yield kind, queries, new, (True, False, None)[i % 3] if new else None, mask, scores, i % 3


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(c, marks=pytest.mark.slow) for c in grid())], ids=str
)
def test_every_argument(case):
    case = Case(*case)
    wanted = case.dense()
    out, lse = case.run()
    torch.testing.assert_close((out, lse, case.k_cache, case.v_cache), wanted)
    assert not case.k_cache.isnan().any()


def test_packed_queries():
    """A prompt, a step and nothing, in one call; rotary and new keys by the same offsets."""
    case = Case(16, 4, 4, True, "causal", "alibi", 0)
    counts = [4, 1, 0]
    cu = torch.nn.functional.pad(int32(counts).cumsum(0), (1, 0)).int()
    taken = torch.tensor([0, 1, 2, 3, 4])
    q, k, v = (x.flatten(0, 1)[taken] for x in (case.q, case.k, case.v))
    found = flash.flash_attn_with_kvcache(
        q, case.k_cache, case.v_cache, k, v, **case.arguments, cu_seqlens_q=cu, max_seqlen_q=4
    )
    alone = Case(16, 4, 4, True, "causal", "alibi", 0)
    caches = (alone.k_cache, alone.v_cache)
    parts = []
    for b, count in enumerate(counts[:2]):
        own = {
            n: x[b : b + 1] if n in ("cache_seqlens", "block_table") else x
            for n, x in alone.arguments.items()
        }
        parts.append(flash.flash_attn_with_kvcache(
            alone.q[b : b + 1, :count], *caches, alone.k[b : b + 1, :count], alone.v[b : b + 1, :count], **own))  # fmt: skip
    torch.testing.assert_close(found[0], torch.cat([out[0] for out, _ in parts]))
    torch.testing.assert_close(found[1], torch.cat([lse[0] for _, lse in parts], 1))
    assert torch.equal(case.k_cache, alone.k_cache)


def test_compiled():
    """By FlashAttention's rule for errors. After two calls no lengths, tables or batches compile again."""
    compiled = torch.compile(flash.flash_attn_with_kvcache, backend="flex_inductor", fullgraph=True)
    made = []
    with served_by("cpu"), torch.no_grad():
        for used, room in ((USED, 256), ([0, 200], 272), ([5, 6, 7, 90, 80], 96), ([1] * 4, 112)):
            case = Case(16, 1, 1, True, "chunk", "both", 3, torch.bfloat16, used, room)
            gold, same_dtype = case.dense(), case.dense(torch.bfloat16)
            found = (*case.run(compiled), case.k_cache, case.v_cache)
            for got, right, other in zip(found, gold, same_dtype, strict=True):
                off = [(x.double() - right).abs().max() for x in (got, other)]
                assert off[0] <= 2 * off[1] + 1e-5
            made.append(len(decisions()))
    assert made[1:] == made[1:2] * 3, made
    (choice,) = {config for kernel in decisions()[-1].kernels for config in [kernel.kernel]}
    assert choice == "decode" and not any("num_splits" in note for note in decisions()[-1].notes)


def test_in_a_graph_for_any_sizes():
    """Sizes of pages too are numbers that change, as far as Dynamo knows."""
    compiled = torch.compile(flash.flash_attn_with_kvcache, backend="eager", fullgraph=True, dynamic=True)
    cases = [Case(16, 4, 4, True, "causal", "softcap", 0) for _ in range(2)]
    found = [
        case.run(run) for case, run in zip(cases, (compiled, flash.flash_attn_with_kvcache), strict=True)
    ]
    torch.testing.assert_close(*found)


def test_eager_calls_get_kernels():
    """Counted by their tiles: a page has few keys."""
    case = Case(16, 1, 1, True, "causal", "plain", 0, torch.float32)
    before = set_eager_kernels("always")
    try:
        with served_by("cpu"), torch.no_grad():
            out, _ = case.run()
    finally:
        set_eager_kernels(before)
    torch.testing.assert_close(
        out.double(),
        Case(16, 1, 1, True, "causal", "plain", 0, torch.float32).dense()[0],
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("dynamic", [None, True])  # a hint is no symbol even where every integer may be
def test_splits_are_not_left_out_without_a_word(dynamic):
    q, k = torch.randn(1, 40, 1, 16), torch.randn(1, 40, 1, 16)
    compiled = torch.compile(
        flash.flash_attn_func, backend="flex_inductor", options={"route": "chunked"}, dynamic=dynamic
    )
    with served_by("chunked"):
        compiled(q, k, k, num_splits=4)
    assert (
        "num_splits: keys are in one part; only kernels for few queries split them" in decisions()[-1].notes
    )


def test_parts_put_together():
    leaves = [torch.randn(2, n, 4, 8, dtype=torch.float64, requires_grad=True) for n in (3, 20, 20)]
    q, k, v = leaves
    parts = []
    for at in (slice(0, 7), slice(7, 7), slice(7, 20)):
        out, lse, _ = flash.flash_attn_func(q, k[:, at], v[:, at], return_attn_probs=True)
        parts.append((out, lse.transpose(1, 2)))
    out, lse = flash.flash_attn_combine(*(torch.stack(part) for part in zip(*parts, strict=True)))
    whole = flash.flash_attn_func(q, k, v, return_attn_probs=True)
    torch.testing.assert_close((out, lse.transpose(1, 2)), whole[:2])
    torch.testing.assert_close(*(torch.autograd.grad(x.sin().sum(), leaves) for x in (out, whole[0])))
    dead = flash.flash_attn_combine(
        torch.ones(2, 3, 5), torch.full((2, 3), -torch.inf), out_dtype=torch.float64
    )
    assert not dead[0].any() and dead[0].dtype == torch.float64 and (dead[1] == -torch.inf).all()
    into = torch.empty(3, 5, dtype=torch.bfloat16)
    assert (
        flash.flash_attn_combine(torch.ones(2, 3, 5), torch.zeros(2, 3), into)[0] is into
        and (into == 1).all()
    )


def test_used_lengths_of_packed_sequences():
    q, k, v = (torch.randn(12, h, 8, dtype=torch.float64) for h in (4, 2, 2))
    cu, used_q, used_k = int32([0, 5, 12]), [3, 0], [4, 7]
    given = {
        "seqused_q": int32(used_q),
        "seqused_k": int32(used_k),
        "causal": True,
        "return_attn_probs": True,
    }
    out, lse, _ = flash.flash_attn_varlen_func(q, k, v, cu, cu, 7, 7, **given)
    want, want_lse = dense(q[None, :3], k[None, :4], v[None, :4], causal=True)
    torch.testing.assert_close((out[:3], lse[:, :3]), (want[0], want_lse[0]))
    assert not out[3:].any()
    chunked = flash.flash_attn_varlen_func(q, k, v, cu, cu, 7, 7, attention_chunk=3)
    padded = flash.flash_attn_func(q[None, :5], k[None, :5], v[None, :5], attention_chunk=3)
    torch.testing.assert_close(chunked[:5], padded[0])
    want, _ = dense(q[None, :5], k[None, :5], v[None, :5], seen=lambda i, j: i // 3 == j // 3)
    torch.testing.assert_close(padded, want)


def refusals():
    case = Case("rows", 1, 1, True, "causal", "plain", 0)
    right = {
        "q": case.q,
        "k_cache": case.k_cache,
        "v_cache": case.v_cache,
        "k": case.k,
        "v": case.v,
        **case.arguments,
    }
    table = int32([[0]] * 3)
    grad = case.k_cache.clone().requires_grad_()
    for changed, text in (
        ({"v": None}, "^v: is not given, and k is; expected both or none"),
        ({"q": [1]}, "^q must be a torch.Tensor"),
        ({"k": [1]}, "^k must be a torch.Tensor"),
        ({"cache_batch_idx": None, "k_cache": case.k_cache[:2], "v_cache": case.v_cache[:2]}, "^k_cache: has 2 rows for 3 sequences"),
        ({"k": None}, "^k: is not given, and v is"),
        ({"cache_seqlens": None}, "^cache_seqlens: expected the lengths before the new keys"),
        ({"cache_seqlens": int32([1])}, r"^cache_seqlens: expected an int32 tensor with an entry for each of 3 sequences"),
        ({"cache_seqlens": 5.0}, "^cache_seqlens: expected an int32 tensor of 3 entries, or an integer from 0 on, got 5.0"),
        ({"block_table": table[0]}, r"^block_table: expected an int32 tensor \[sequences"),
        ({"rotary_interleaved": "x"}, "^rotary_interleaved: expected True or False, got 'x'"),
        ({"cu_seqlens_k_new": int32([0, 1, 2, 3])}, r"^cu_seqlens_k_new: expected none with k and v \[batch, length"),
        ({"cache_seqlens": -3}, "^cache_seqlens: expected an int32 tensor of 3 entries, or an integer from 0 on, got -3"),
        ({"cache_seqlens": 300}, "^cache_seqlens: 301 tokens do not fit into a room of 256"),
        ({"cache_seqlens": 256}, "^cache_seqlens: 257 tokens do not fit into a room of 256"),
        ({"k": None, "v": None}, "^rotary_cos: expected new keys k and v with it"),
        ({"rotary_sin": None}, "^rotary_sin: expected rotary_cos and rotary_sin, got only one"),
        ({"rotary_cos": torch.ones(256, 7), "rotary_sin": torch.ones(256, 7)}, "^rotary: rotates 7 pairs, and heads have 12 dim"),
        ({"rotary_cos": torch.ones(9, 4), "rotary_sin": torch.ones(9, 4)}, "^rotary: has 9 positions, and sequences may have 256"),
        ({"block_table": table, "cache_batch_idx": int32([0, 1])}, "^cache_batch_idx: "),
        ({"block_table": table, "cache_leftpad": int32([0, 1, 2])}, "^cache_leftpad: expected none with block_table"),
        ({"block_table": table, "page_table": table}, "^page_table: is another name of block_table"),
        ({"block_table": table[:2]}, r"^block_table: expected an int32 tensor \[sequences"),
        ({"k": case.k[:2], "v": case.v[:2]}, "^k: has batch 2, and q has 3"),
        ({"k": case.k[0], "v": case.v[0]}, r"^k: has shape \[1, 2, 12\] and q \[3, 1, 4, 12\]"),
        ({"k": case.k.expand(3, 257, -1, -1), "v": case.v.expand(3, 257, -1, -1)}, "^k: 257 tokens do not fit"),
        ({"k_cache": grad}, "^k_cache: requires grad and lies in a cache"),
        ({"k": case.k.clone().requires_grad_()}, "^k: requires grad, and there is no gradient through"),
        ({"q": case.q[0], "k": case.k[0], "v": case.v[0], "cu_seqlens_q": int32([0, 1])}, "^cu_seqlens_q: expected max_seqlen_q with it"),
        ({"attention_chunk": -1}, "^attention_chunk: expected a number of tokens, 0 for any, got -1"),
        ({"num_splits": 129}, r"^kernel_options\['num_splits'\] is 129; expected an integer from 0 to 128"),
        ({"num_splits": True}, r"^kernel_options\['num_splits'\] is True"),
    ):  # fmt: skip
        yield right | changed, text
    packed = {
        "q": torch.zeros(5, 1, 8),
        "k": torch.zeros(5, 1, 8),
        "v": torch.zeros(5, 1, 8),
        "max_seqlen_q": 5,
        "max_seqlen_k": 5,
    }
    cu = int32([0, 5])
    offsets = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    for changed, text in (
        (
            {"cu_seqlens_q": cu.long()},
            "^cu_seqlens_q: expected an int32 tensor of one dimension, got a tensor .* torch.int64",
        ),
        ({"cu_seqlens_k": None}, "^cu_seqlens_k: expected an int32 tensor of one dimension, got None"),
        ({"cu_seqlens_k": int32([0, 2, 5])}, "^cu_seqlens_k: has 2 sequences and cu_q has 1"),
        ({"seqused_k": cu}, "^seqused_k: expected an int32 tensor with an entry for each of 1 sequences"),
        ({"page_table": cu}, "^block_table: expected an int32 tensor"),
        ({"max_seqlen_k": "x"}, "^max_seqlen_k: expected an integer from 0 on, got 'x'"),
        ({"max_seqlen_q": -1}, "^max_seqlen_q: expected an integer from 0 on, got -1"),
        ({"softcap": "x"}, "^softcap: expected a number, 0 or less for none, got 'x'"),
        ({"score_mod": 3}, "^score_mod must be a function"),
        ({"window_size": (1.5, 2)}, r"^window_size: expected a pair \(left, right\) of token counts"),
        ({"alibi_slopes": [1.0]}, "^alibi_slopes must be a torch.Tensor"),
        (
            {"alibi_slopes": torch.ones(2)},
            r"^alibi_slopes: expected a slope for each head, shape \[1\] or \[1, 1\], got \[2\]",
        ),
    ):
        yield packed | offsets | changed, text


@pytest.mark.parametrize("given, text", [*refusals()])
def test_wrong_calls(given, text):
    function = flash.flash_attn_varlen_func if "max_seqlen_k" in given else flash.flash_attn_with_kvcache
    with pytest.raises(FlexError, match=text):
        function(**given)


def test_wrong_parts():
    parts, lse = torch.zeros(2, 3, 5), torch.zeros(2, 3)
    for arguments, text in (
        ((parts, lse[:1]), r"^lse_partial: expected the shape of out_partial without its last dimension"),
        ((parts[:0], lse[:0]), r"^lse_partial: expected .* a part or more"),
        ((parts, [1]), "^lse_partial: expected a float tensor, got list"),
        ((parts, lse, "x"), "^out: expected a float tensor, got str"),
        ((parts, lse, parts), r"^out: expected shape \[3, 5\], that of a part"),
    ):
        with pytest.raises(FlexError, match=text):
            flash.flash_attn_combine(*arguments)
