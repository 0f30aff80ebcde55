"""
A mod that is slow, refused or wrong
====================================

What to ask when a call takes long, raises, or gives numbers that you do not believe. In this order: which route served
it, what the function computed, whether the kernel agrees with float64, and whether the whole keeps the laws of
attention.
"""

# %%
# Slow: ask for the decision
# --------------------------
#
# ``decisions()`` holds every call of the process. This score_mod makes a tensor of two numbers to sort them, and
# kernels inline only what computes one number at a time.
import torch
from matplotlib import pyplot

import flex_inductor
from flex_inductor import create_block_mask, flex_attention, masks

torch.manual_seed(0)
query, key, value = torch.randn(3, 1, 2, 64, 16)
bias = torch.randn(2)


def by_sorting(score, b, h, q_idx, kv_idx):
    return torch.stack([score, bias[h]]).sort().values[0]


def attend(query, key, value, mod=by_sorting):
    return flex_attention(query, key, value, mod)


torch.compile(attend, backend="flex_inductor")(query, key, value)
print(flex_inductor.decisions()[-1])

# %%
# It ran in chunks, which is right and slow. The line of the kernel's route says why. Ask for that route by name, and
# such a call is an error: use this in tests of a model that must be fast.
try:
    torch.compile(attend, backend="flex_inductor", options={"route": "cpu"})(
        query, key, value
    )
except Exception as error:
    print(error)


# %%
# The smaller of two numbers needs no sort.
def by_minimum(score, b, h, q_idx, kv_idx):
    return torch.minimum(score, bias[h])


fast = torch.compile(
    attend, backend="flex_inductor", options={"route": "cpu", "verify": True}
)
out = fast(query, key, value, by_minimum)
print(flex_inductor.decisions()[-1])

# %%
# ``verify`` compared this call with float64 as it ran, every element within a bound of its own, and was silent. A
# wrong kernel would have raised and named the tile.
#
# Wrong numbers: trace the function
# ---------------------------------
#
# KERPLE's bias falls with the logarithm of the distance. This one gives NaN.


def kerple(score, b, h, q_idx, kv_idx):
    distance = q_idx - kv_idx
    return score - torch.log(1 + 0.5 * distance)


mask = create_block_mask(
    masks.sliding_window(8, causal=False), None, None, 64, 64, device="cpu", BLOCK_SIZE=16
)
print(
    "NaN in the output:",
    flex_attention(query, key, value, kerple, mask).isnan().any().item(),
)
trace = flex_inductor.trace_mod(kerple, query, key, q_range=(4, 7), kv_range=(4, 10))
print(trace)

# %%
# The picture shows where: above the diagonal, where the distance is negative. The mask lets some of these pairs
# through. ``distance.abs()`` mends it.
result = trace.result
figure, axes = pyplot.subplots(figsize=(5, 2.6))
picture = axes.imshow(
    result.masked_fill(~result.isfinite(), torch.nan), extent=(3.5, 9.5, 6.5, 3.5)
)
for row, column in (~result.isfinite()).nonzero().tolist():
    axes.text(column + 4, row + 4, f"{result[row, column]:.0f}", ha="center", va="center")
axes.set(xlabel="key", ylabel="query", title="What the score_mod returns", yticks=[4, 5, 6])
figure.colorbar(picture)

# %%
# Wrong in a way that nobody sees: check the laws
# -----------------------------------------------
#
# Two documents in one row, and a mask that forgot them. Every number is finite, and the loss falls. ``check`` replaces
# one document and looks at the other.
causal = create_block_mask(masks.causal(), None, None, 64, 64, device="cpu", BLOCK_SIZE=16)


def packed(query, key, value):
    return flex_attention(query, key, value, block_mask=causal)


report = flex_inductor.check(
    packed, (query, key, value), documents=[40, 24], laws=["masked", "shift", "documents"]
)
print(report)

# %%
# All laws, and models as a whole: :doc:`/check`. What the last process compiled, and why it compiled again:
# ``flex-inductor inspect --last`` (:doc:`/inspector`).
