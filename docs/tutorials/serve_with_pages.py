"""
Serve with pages
================

A server has requests of all lengths, and they grow by a token a step. Their keys and values lie in *pages* of a common
pool, so that nothing moves when one grows. One call attends for all requests: prompts, and single tokens.
"""

# %%
# A pool, and who has which pages
# -------------------------------
import torch
from matplotlib import pyplot

from flex_inductor import Sequences, append_kv, varlen_attention

torch.manual_seed(0)
HEADS, KV_HEADS, DIM, PAGES, PAGE, MOST = 4, 2, 16, 12, 8, 4  # MOST pages a request
k_cache, v_cache = torch.zeros(2, PAGES, PAGE, KV_HEADS, DIM)
free = list(range(PAGES))
table = torch.zeros(3, MOST, dtype=torch.int32)  # of three requests
used = torch.zeros(3, dtype=torch.int32)  # tokens of each
owned = [0, 0, 0]  # pages of each
history = [[], [], []]  # their queries, keys and values, to compare with


def causal(sequence, h, q_idx, kv_idx):
    return q_idx >= kv_idx


# %%
# A step
# ------
#
# ``counts`` says how many new tokens each request has. ``append_kv`` writes their keys and values where the table
# says, and the attention reads them there. The mask is made once a step, for all layers of a model.
def step(counts):
    for request, count in enumerate(counts):
        used[request] += count
        while owned[request] * PAGE < used[request]:
            table[request, owned[request]] = free.pop(0)
            owned[request] += 1
    q = torch.randn(sum(counts), HEADS, DIM)
    k, v = torch.randn(2, sum(counts), KV_HEADS, DIM)
    for request, new in enumerate(zip(*(x.split(counts) for x in (q, k, v)), strict=True)):
        history[request].append(new)
    sequences = Sequences(
        torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
        used_k=used.clone(),
        pages=table.clone(),
        page_size=PAGE,
    )
    with torch.no_grad():
        append_kv(k_cache, v_cache, k, v, sequences)
        mask = sequences.mask(causal)
        return varlen_attention(
            q, k_cache, v_cache, sequences, block_mask=mask, enable_gqa=True
        )


# %%
# Two prompts begin. A third request joins when they are decoding, in the same call.
shares = []
for counts in [(11, 5, 0), (1, 1, 0), (1, 1, 14), *[(1, 1, 1)] * 6]:
    out = step(counts)
    shares.append([*used.tolist()])
print(
    "tokens:",
    used.tolist(),
    " pages:",
    [row[:n].tolist() for row, n in zip(table, owned, strict=True)],
)

# %%
# Is it right?
# ------------
#
# The last token of each request, against dense attention to all keys that the request ever had.
for request, steps in enumerate(history):
    q, k, v = (torch.cat(x).double() for x in zip(*steps, strict=True))
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    weights = torch.einsum("hd,nhd->hn", q[-1], k).div(DIM**0.5).softmax(-1)
    expected = torch.einsum("hn,nhd->hd", weights, v)
    print(f"request {request}: largest error {(out[request] - expected).abs().max():.1e}")

# %%
# The pool at the end
# -------------------
owner = torch.full((PAGES,), -1)
filled = torch.zeros(PAGES)
for request, pages in enumerate(owned):
    for n, page in enumerate(table[request, :pages].tolist()):
        owner[page] = request
        filled[page] = min(PAGE, used[request] - n * PAGE)
figure, axes = pyplot.subplots(figsize=(6.4, 2.2))
for request in range(3):
    its = owner == request
    axes.bar(torch.arange(PAGES)[its], filled[its], label=f"request {request}")
axes.axhline(PAGE, linestyle=":", color="C3")
axes.set(
    xticks=range(PAGES),
    xlabel="page",
    ylabel="tokens",
    title="Pages of the pool and their tokens",
)
axes.legend(loc="upper right", fontsize="small")

# %%
# ``examples/serve.py`` is a small server of this kind, with a model, rotary positions and requests that wait for pages.
# For compiled models give ``max_q`` and ``max_k``, so that all steps share one kernel. What pages cost:
# :doc:`/sequences`.
