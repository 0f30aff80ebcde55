"""
A bias that learns
==================

Relative position biases, learnt slopes, gates: tensors that a score_mod looks up. They are parameters like any other,
and the backward of attention gives each its gradient. Nothing is declared: what the function reads is found.
"""

# %%
# A teacher and a student
# -----------------------
#
# The teacher adds a bias that depends on the distance, with waves. The student has the same form, and zeros.
import torch
from matplotlib import pyplot

from flex_inductor import create_block_mask, flex_attention, masks

torch.manual_seed(0)
heads, length, dim = 2, 128, 16
distance = torch.arange(length)
teacher = torch.stack([2 * (distance / 9).cos(), 1 - distance / 20])
student = torch.nn.Parameter(torch.zeros(heads, length))


def biased(table):
    def score_mod(score, b, h, q_idx, kv_idx):
        return score + table[h, q_idx - kv_idx]

    return score_mod


# %%
# ``q_idx - kv_idx`` is negative above the diagonal. The causal mask rules these pairs out, and what a mask rules out
# is never looked up.
mask = create_block_mask(
    masks.causal(), None, None, length, length, device="cpu", BLOCK_SIZE=32
)


@torch.compile(backend="flex_inductor")
def attend(table, query, key, value):
    return flex_attention(query, key, value, biased(table), block_mask=mask)


def loss_of(table):
    query, key, value = torch.randn(3, 4, heads, length, dim)
    wanted = flex_attention(query, key, value, biased(teacher), block_mask=mask)
    return (attend(table, query, key, value) - wanted).square().mean()


# %%
# Is the gradient right?
# ----------------------
#
# Dense attention in float64 says what it should be.
query, key, value = torch.randn(3, 4, heads, length, dim)
attend(student, query, key, value).square().sum().backward()

table = torch.zeros(heads, length, dtype=torch.float64, requires_grad=True)
row, column = torch.arange(length)[:, None], torch.arange(length)
scores = (
    query.double() @ key.double().transpose(-1, -2) / dim**0.5
    + table[:, (row - column).clamp(min=0)]
)
weights = scores.masked_fill(row < column, -torch.inf).softmax(-1)
(weights @ value.double()).square().sum().backward()

print(f"largest entry of the gradient: {table.grad.abs().max():.1e}")
print(f"largest error:                 {(student.grad - table.grad).abs().max():.1e}")

# %%
# Train it
# --------
optimizer = torch.optim.Adam([student], lr=0.1)
losses = []
for _ in range(80):
    optimizer.zero_grad()
    loss = loss_of(student)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss: {losses[0]:.4f} at first, {losses[-1]:.6f} at last")

# %%
# A bias is known up to a constant for each head, because the softmax does not see one. So we compare without means.
figure, (left, right) = pyplot.subplots(1, 2, figsize=(7.4, 2.8), layout="constrained")
left.semilogy(losses)
left.set(xlabel="step", title="Loss")
for head in range(heads):
    colour = f"C{head}"
    right.plot(
        teacher[head, :64] - teacher[head, :64].mean(),
        ":",
        color=colour,
        label=f"teacher, head {head}",
    )
    learnt = student.detach()[head, :64]
    right.plot(learnt - learnt.mean(), color=colour, label=f"student, head {head}")
right.set(xlabel="distance", title="Bias, without its mean")
right.legend(fontsize="small")

# %%
# The compiled call has two kernels, one forward and one backward, and no matrix of scores. What else a call may
# learn: :doc:`sinks </softmax>`. How the gradient is made of your function: :doc:`concepts </concepts>`.
