"""What the generated kernels do, in the lines that a reader looks for: loops, loads, products, mods, stores."""

import re

import expecttest
import torch
from support import causal, sliding_window

from flex_inductor import AuxRequest, create_block_mask, flex_attention
from flex_inductor.tools.inspector import attention_kernels, kind

LENGTH = 256


def outline(source: str) -> str:
    """A kernel without addresses, masks and the softmax."""
    body = source[source.index("\ndef flex_inductor_") :]
    # Calls over several lines.
    body = re.sub(r",?\n +\)", ")", re.sub(r"\(\n +", "(", body)).replace(",\n", ", ")
    kept = []
    for line in body.splitlines()[2:]:
        text = line.strip()
        if re.match(
            r"(for |# (Blocks|Full|All|Listed))|(score|mask)_\d+ = |tl\.atomic_add|add_per_score|run_st|(full_)?st(art|op) = ",
            text,
        ):
            kept.append(line)
        elif re.search(r"\b(load_tile|store_tile|tl\.(dot|load|store))\(", text):
            kept.append(_without_addresses(line))
    return re.sub(r"^    ", "", "\n".join(kept), flags=re.MULTILINE)


def _without_addresses(line: str) -> str:
    line = re.sub(r", input_precision='\w+'", "", line)
    line = re.sub(r"(load_tile|tl\.load|tl\.store)\(([a-z_]+)\b.*\)(?!,)", r"\1(\2)", line)
    return re.sub(r"store_tile\(([a-z_]+) .*, (.+)\)$", r"store_tile(\1, \2)", line)


def outlines(score_mod=None, mask_mod=None, queries=LENGTH, grad=False, compact=False) -> dict[str, str]:
    shape = (1, 2, LENGTH, 64)
    q = torch.randn(1, 2, queries, 64, dtype=torch.bfloat16, requires_grad=grad)
    k, v = (torch.randn(shape, dtype=torch.bfloat16, requires_grad=grad) for _ in "kv")
    mask = mask_mod and create_block_mask(mask_mod, None, None, queries, LENGTH, "cpu", compact=compact)

    def attend(q, k, v):
        return flex_attention(q, k, v, score_mod, mask)

    kernels = attention_kernels(attend, q, k, v, target="sm_90")
    return {kind(kernel): outline(kernel.source) for kernel in kernels}


class Outlines(expecttest.TestCase):
    maxDiff = None

    def test_window(self):
        """Of which an instance computes what it visits."""
        self.assertExpectedInline(
            outlines(mask_mod=sliding_window, compact=True)["forward"],
            """\
q = load_tile(query)
mask_0 = each_alone(q_idx)
mask_4 = tl.full([], 20, tl.int32)
# Blocks of keys where mask_mod decides.
start = begin // 128
stop = tl.maximum(tl.where(begin < end, tl.where(tokens > 0, (end + 127) // 128, 0), 0), start)
full_start = tl.minimum(tl.maximum((tl.maximum(most - 19, 0) + 127) // 128, start), stop)
full_stop = tl.maximum(tl.where(tokens == 128, tl.minimum(tl.maximum(least + 1, 0), 256) // 128, 0), full_start)
for run in range(tl.where(full_stop < stop, 2, 1)):
    run_start = each_alone(tl.where(run == 0, start, full_stop)) * 128
    run_stop = each_alone(tl.minimum(tl.where(run == 0, full_start, stop) * 128, 256).to(tl.int32))
    for start_n in range(run_start, run_stop, BLOCK_N):
            k = load_tile(key_head)
        score = tl.dot(q, tl.trans(k))
            mask_1 = each_alone(kv_idx)
            mask_2 = mask_0 >= mask_1
            mask_3 = q_idx - kv_idx
            mask_5 = each_alone(mask_3)
            mask_6 = mask_5 < mask_4
            mask_7 = mask_2 & mask_6
            v = load_tile(value_head)
        acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None])
# Full blocks of keys.
run_start = each_alone(full_start) * 128
run_stop = each_alone(tl.minimum(full_stop * 128, 256).to(tl.int32))
for start_n in range(run_start, run_stop, BLOCK_N):
        k = load_tile(key_head)
    score = tl.dot(q, tl.trans(k))
        v = load_tile(value_head)
    acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None])
store_tile(out, acc)""",
        )

    def test_causal(self):
        self.assertExpectedInline(
            outlines(mask_mod=causal)["forward"],
            """\
q = load_tile(query)
mask_0 = each_alone(q_idx)
# Blocks of keys where mask_mod decides.
last = tl.load(counts) * TILES
block = tl.load(row_blocks)
for step in range(0, last):
    block = tl.load(row_blocks)
        k = load_tile(key_head)
    score = tl.dot(q, tl.trans(k))
        mask_1 = each_alone(kv_idx)
        mask_2 = mask_0 >= mask_1
        v = load_tile(value_head)
    acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None])
# Full blocks of keys.
last = tl.load(full_counts) * TILES
block = tl.load(row_blocks)
for step in range(0, last):
    block = tl.load(row_blocks)
        k = load_tile(key_head)
    score = tl.dot(q, tl.trans(k))
        v = load_tile(value_head)
    acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None])
store_tile(out, acc)""",
        )

    def test_alibi(self):
        slopes = torch.rand(2)
        found = outlines(lambda s, b, h, q_idx, kv_idx: s + slopes[h] * (kv_idx - q_idx))
        self.assertExpectedInline(
            found["forward"],
            """\
q = load_tile(query)
score_0 = tl.load(captured_0 + (h))
score_3 = as_mantissa(q_idx)
# All keys.
for start_n in range(0, 256, BLOCK_N):
        k = load_tile(key_head)
    score = tl.dot(q, tl.trans(k))
    score_1 = kv_idx - q_idx
    score_2 = as_mantissa(kv_idx)
    score_4 = score_2 - score_3
    score_5 = score_0 * score_4
    score_6 = score + score_5
        v = load_tile(value_head)
    acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None])
store_tile(out, acc)""",
        )

    def test_softcap(self):
        found = outlines(lambda s, b, h, q_idx, kv_idx: 30.0 * torch.tanh(s / 30.0))
        self.assertExpectedInline(
            found["forward"],
            """\
q = load_tile(query)
score_0 = tl.full([], 0.03333333333333333, tl.float32)
score_3 = tl.full([], 30.0, tl.float32)
# All keys.
for start_n in range(0, 256, BLOCK_N):
        k = load_tile(key_head)
    score = tl.dot(q, tl.trans(k))
    score_1 = score * score_0
    score_2 = 1.0 - 2.0 * reciprocal(tl.exp2(score * 0.09617966939259756) + 1.0)
    score_4 = score_2 * score_3
        v = load_tile(value_head)
    acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None])
store_tile(out, acc)""",
        )

    def test_documents(self):
        document = torch.arange(LENGTH) // 100
        found = outlines(mask_mod=lambda b, h, q_idx, kv_idx: document[q_idx] == document[kv_idx])
        self.assertExpectedInline(
            found["forward"],
            """\
q = load_tile(query)
mask_0 = tl.load(captured_0 + (q_idx))
# Blocks of keys where mask_mod decides.
last = tl.load(counts) * TILES
block = tl.load(row_blocks)
for step in range(0, last):
    block = tl.load(row_blocks)
        k = load_tile(key_head)
    score = tl.dot(q, tl.trans(k))
    mask_1 = tl.load(captured_0 + (kv_idx))
    mask_2 = mask_0 == mask_1
        v = load_tile(value_head)
    acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None])
# Full blocks of keys.
last = tl.load(full_counts) * TILES
block = tl.load(row_blocks)
for step in range(0, last):
    block = tl.load(row_blocks)
        k = load_tile(key_head)
    score = tl.dot(q, tl.trans(k))
        v = load_tile(value_head)
    acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None])
store_tile(out, acc)""",
        )

    def test_decode(self):
        found = outlines(mask_mod=lambda b, h, q_idx, kv_idx: kv_idx < 200, queries=1)
        self.assertExpectedInline(
            "\n\n".join(found.values()),
            """\
q = tl.load(query)
mask_0 = tl.full([], 200, tl.int32)
# Blocks of keys where mask_mod decides.
steps = tl.load(counts) * KV_TILES
block = tl.load(row_blocks)
for step in range(first, last):
    block = tl.load(row_blocks)
    k = load_tile(key_head)
    score = tl.dot(q, tl.trans(k))
    mask_1 = each_alone(kv_idx)
    mask_2 = mask_1 < mask_0
    v = load_tile(value_head)
    acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None])
# Full blocks of keys.
steps = tl.load(full_counts) * KV_TILES
block = tl.load(row_blocks)
for step in range(first, last):
    block = tl.load(row_blocks)
    k = load_tile(key_head)
    score = tl.dot(q, tl.trans(k))
    v = load_tile(value_head)
    acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None])
tl.store(part_acc)
tl.store(part_peak)
tl.store(part_total)

for part in range(0, 4):
    found = tl.load(part_peak)
    of_part = tl.load(part_total)
    values = tl.load(part_acc)
store_tile(out, acc)""",
        )

    def test_packed_heads(self):
        """A group of 4 in a tile, all keys in one part: what an instance finds is the output."""
        slopes = torch.rand(8)
        q = torch.randn(64, 8, 16, 64, dtype=torch.bfloat16)
        k = torch.randn(64, 2, 128, 64, dtype=torch.bfloat16)

        def attend(q, k):
            def score_mod(s, b, h, q_idx, kv_idx):
                return s + slopes[h] * (kv_idx - q_idx)

            aux = AuxRequest(lse=True)
            return flex_attention(q, k, k, score_mod, enable_gqa=True, return_aux=aux)

        (kernel,) = attention_kernels(attend, q, k, target="sm_90")
        self.assertExpectedInline(
            outline(kernel.source),
            """\
q = tl.load(query)
score_0 = tl.load(captured_0 + (h))
score_3 = as_mantissa(q_idx)
# All keys.
for step in range(first, last):
    k = load_tile(key_head)
    score = tl.dot(q, tl.trans(k))
    score_1 = kv_idx - q_idx
    score_2 = as_mantissa(kv_idx)
    score_4 = score_2 - score_3
    score_5 = score_0 * score_4
    score_6 = score + score_5
    v = load_tile(value_head)
    acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None])
tl.store(out)
tl.store(lse)""",
        )

    def test_backward_of_a_learnable_relative_bias(self):
        bias = torch.randn(2 * LENGTH, requires_grad=True)
        found = outlines(lambda s, b, h, q_idx, kv_idx: s + bias[q_idx - kv_idx + LENGTH], causal, grad=True)
        assert set(found) == {"forward", "backward_dq", "backward_dkdv"}
        self.assertExpectedInline(
            found["backward_dq"],
            """\
q = load_tile(query)
d_out = load_tile(grad_out)
row_lse = tl.load(lse)
row_delta = tl.load(delta)
score_1 = tl.full([], 256, tl.int32)
mask_0 = each_alone(q_idx)
# Blocks of keys where mask_mod decides.
last = tl.load(counts) * TILES
block = tl.load(row_blocks)
for step in range(0, last):
    block = tl.load(row_blocks)
    k = load_tile(key_head)
    score = tl.dot(q, tl.trans(k))
    score_0 = q_idx - kv_idx
    score_2 = score_0 + score_1
    score_3 = per_score(captured_0 + (score_2))
    score_4 = score + score_3
    mask_1 = each_alone(kv_idx)
    mask_2 = mask_0 >= mask_1
    v = load_tile(value_head)
    d_weight = tl.dot(d_out, tl.trans(v))
    add_per_score(sum_0 + (score_2), contribution, live, COALESCED)
    dq = tl.dot(d_score.to(k.dtype), k, dq)
# Full blocks of keys.
last = tl.load(full_counts) * TILES
block = tl.load(row_blocks)
for step in range(0, last):
    block = tl.load(row_blocks)
    k = load_tile(key_head)
    score = tl.dot(q, tl.trans(k))
    score_0 = q_idx - kv_idx
    score_2 = score_0 + score_1
    score_3 = per_score(captured_0 + (score_2))
    score_4 = score + score_3
    v = load_tile(value_head)
    d_weight = tl.dot(d_out, tl.trans(v))
    add_per_score(sum_0 + (score_2), contribution, live, COALESCED)
    dq = tl.dot(d_score.to(k.dtype), k, dq)
store_tile(d_query, dq * 0.125)""",
        )
        self.assertExpectedInline(
            found["backward_dkdv"],
            """\
k = load_tile(key)
v = load_tile(value)
for head in range(0, 1):
    score_1 = tl.full([], 256, tl.int32)
    mask_1 = each_alone(kv_idx)
    # Blocks of queries where mask_mod decides.
    last = tl.load(counts) * TILES
    block = tl.load(row_blocks)
    for step in range(0, last):
        block = tl.load(row_blocks)
        q = load_tile(query_head)
        row_lse = tl.load(lse)
        row_delta = tl.load(delta)
        score = tl.dot(k_scaled, tl.trans(q))
        score_0 = q_idx - kv_idx
        score_2 = score_0 + score_1
        score_3 = per_score(captured_0 + (score_2))
        score_4 = score + score_3
        mask_0 = each_alone(q_idx)
        mask_2 = mask_0 >= mask_1
        d_out = load_tile(d_out_head)
        dv_acc = tl.dot(weight.to(d_out.dtype), d_out, dv_acc)
        d_weight = tl.dot(v, tl.trans(d_out))
        dk_acc = tl.dot(d_score.to(q.dtype), q, dk_acc)
    # Full blocks of queries.
    last = tl.load(full_counts) * TILES
    block = tl.load(row_blocks)
    for step in range(0, last):
        block = tl.load(row_blocks)
        q = load_tile(query_head)
        row_lse = tl.load(lse)
        row_delta = tl.load(delta)
        score = tl.dot(k_scaled, tl.trans(q))
        score_0 = q_idx - kv_idx
        score_2 = score_0 + score_1
        score_3 = per_score(captured_0 + (score_2))
        score_4 = score + score_3
        d_out = load_tile(d_out_head)
        dv_acc = tl.dot(weight.to(d_out.dtype), d_out, dv_acc)
        d_weight = tl.dot(v, tl.trans(d_out))
        dk_acc = tl.dot(d_score.to(q.dtype), q, dk_acc)
store_tile(d_key, dk_acc * 0.125)
store_tile(d_value, dv_acc)""",
        )
