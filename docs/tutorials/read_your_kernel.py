"""
Read your kernel
================

When attention is slow, look at what was made of it. ``inspect`` compiles a call and runs nothing, so it can do that for
a GPU that is not there. This page reads one call for a CPU and for an H100 (sm_90).
"""

# %%
# The call
# --------
#
# Softcapped scores and a window, in bfloat16.
import re

import torch
from matplotlib import pyplot

import flex_inductor
from flex_inductor import create_block_mask, draw_mask, flex_attention


def softcap(score, b, h, q_idx, kv_idx):
    return 30 * torch.tanh(score / 30)


def window(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 400)


length = 2048
mask = create_block_mask(window, None, None, length, length, device="cpu")


def attend(query, key, value):
    return flex_attention(query, key, value, softcap, mask)


inputs = torch.randn(3, 1, 8, length, 64, dtype=torch.bfloat16)
report = flex_inductor.inspect(attend, *inputs, target="sm_90")
call, (kernel,) = report.calls[0], report.kernels

# %%
# ``print(report)`` prints all there is, and ``report.to_html("report.html")`` makes a page of it. Here are its parts,
# in the order in which I look at them.
#
# First: who serves it?
# ---------------------
#
# ``chunked`` here would be the whole answer: plain operations in place of a kernel. The reason stands beside it.
print(call.decision)

# %%
# Second: what is visited?
# ------------------------
#
# Many partial tiles mean that the mask runs for scores that need none. Blocks of another size may help.
figure = draw_mask(call.mask)

# %%
# Third: what is the least it can take?
# -------------------------------------
#
# From the products over visited tiles, the bytes of the tensors, and the peaks that the card's maker gives. No card was
# asked.
cost = call.cost()["forward"]
print(f"{cost.flops / 1e9:.2f} GFLOP and {cost.bytes / 1e6:.2f} MB")
print(f"at least {cost.seconds * 1e6:.2f} us on {cost.device}, bound by {cost.bound}")

# %%
# Fourth: what did the functions become?
# --------------------------------------
print(call.graphs["score_mod"])

# %%
# In the kernel each line says where in your code it comes from. Dividing by 30 became a product, and the tanh became
# the card's exp2 and reciprocal. The loop over full tiles has the score_mod too, and no mask.
lines = [line.strip() for line in kernel.source.splitlines()]
begin = next(n for n, line in enumerate(lines) if line.startswith("score = tl.dot"))
end = next(n for n, line in enumerate(lines) if line.startswith("score = tl.where"))
print("\n".join(lines[begin : end + 1]))

# %%
# Fifth: does it fit?
# -------------------
#
# Spilled registers go through memory. A loop that has any is slow, whatever else it does.
print(kernel.config)
print(
    kernel.resources.registers, "registers,", kernel.resources.spill_bytes, "bytes spilled"
)
print(kernel.resources.shared_bytes, "bytes of shared memory")
print(kernel.occupancy)

# %%
# The same call on a CPU
# ----------------------
#
# C++ with the mods inlined as vectors. Look for what is computed in the innermost loop: what depends on the query or
# the key alone should not be there.
on_cpu = flex_inductor.inspect(attend, *inputs, target="cpu")
print(on_cpu.calls[0].decision)
source = on_cpu.kernels[0].source
print(re.search(r"[^\n]*score_mod:[^\n]*(\n[^\n]*){6}", source)[0])

# %%
# How much of the time do the functions take? Their share of the instructions is a first guess.
has = dict(kernel.resources.instructions)
figure, axes = pyplot.subplots(figsize=(6.4, 2.6))
axes.barh([*has], [*has.values()])
axes.invert_yaxis()
axes.set(xlabel="instructions in the binary", title="Instructions by class, sm_90")

# %%
# To change a kernel by hand and run it again, ``kernel.save(folder)`` writes a script. All that a report says:
# :doc:`/inspector`. Whether yours fits other cards: :doc:`/fits`.
