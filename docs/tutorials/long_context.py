"""
Long context on four processes
==============================

A sequence that does not fit one machine is spread over several. Mods stay as they are and see the whole sequence. Here
four processes on one CPU talk by gloo; on a cluster the same script is started by ``torchrun`` too.
"""

# %%
# What each process runs
# ----------------------
#
# ``context_parallel`` takes the group. ``plan`` looks at the mask, decides who has which tokens and what is sent, and
# returns a mask to call with. ``shard`` takes this rank's tokens out of a whole tensor.
import json
import os
import subprocess
import sys

import torch
import torch.distributed as dist
from matplotlib import pyplot

from flex_inductor import context_parallel, create_block_mask, flex_attention, masks

LENGTHS, HEADS, DIM, BLOCK = [700, 60, 40, 150, 1010, 88], 4, 16, 32
LENGTH = sum(LENGTHS)


def run_rank():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same numbers on all ranks
    query, key, value = torch.randn(3, 1, HEADS, LENGTH, DIM)
    slopes = torch.rand(HEADS, requires_grad=True)

    def fade(score, b, h, q_idx, kv_idx):  # positions of the whole sequence
        return score - slopes[h] * (q_idx - kv_idx)

    whole = create_block_mask(
        masks.document(lengths=LENGTHS), None, None, LENGTH, LENGTH, "cpu", BLOCK
    )
    cp = context_parallel(dist.group.WORLD, balance="work_and_bytes")
    mine = cp.plan(whole)
    part = cp.shard([query, key, value], 2)
    out = flex_attention(*part, fade, block_mask=mine)
    out.square().sum().backward()
    dist.all_reduce(slopes.grad)  # as a parameter's
    together, gradient = cp.unshard(out.detach(), 2), slopes.grad.clone()

    if cp.rank == 0:
        slopes.grad = None
        expected = flex_attention(query, key, value, fade, block_mask=whole)
        expected.square().sum().backward()
        print(f"method: {cp.choice.chosen}, {cp.choice.why}")
        print(f"output, apart from one process: {(together - expected).abs().max():.1e}")
        error = (gradient - slopes.grad) / slopes.grad
        print(f"gradient of slopes, relative:   {error.abs().max():.1e}")
    sent = {}
    for method in ("all_gather", "ring", "ulysses", "cast"):
        other = context_parallel(dist.group.WORLD, method, "work_and_bytes")
        found, plan = [None] * cp.ranks, other.plan(whole)
        dist.all_gather_object(found, plan.bytes_sent(*part).forward / 1024)
        sent[method] = max(found)
    if cp.rank == 0:
        print("FACTS", json.dumps({"owner": cp.layout.owner, "sent": sent}))
    dist.destroy_process_group()


# %%
# Start four
# ----------
#
# This file starts itself: a process that torchrun started finds its number in the environment.
if "RANK" in os.environ:
    run_rank()
    sys.exit()

this_file = run_rank.__code__.co_filename
torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
done = subprocess.run([*torchrun, this_file], capture_output=True, text=True, check=True)
said, facts = done.stdout.split("FACTS ")
print(said)

# %%
# Who has what
# ------------
#
# Tiles of 32 tokens, coloured by rank, and where documents end. Each rank has as many tiles as the others and about
# the same work: tiles late in a long document read many keys, and go with tiles that read few.
facts = json.loads(facts)
figure, (top, bottom) = pyplot.subplots(
    2, 1, figsize=(6.4, 4), height_ratios=[1, 2], layout="constrained"
)
extent = (0, LENGTH, 0, 1)
top.imshow([facts["owner"]], aspect="auto", extent=extent, interpolation="nearest")
for end in torch.tensor(LENGTHS).cumsum(0)[:-1]:
    top.axvline(int(end), color="#c25757", linewidth=1.5)
top.set(yticks=[], xlabel="token", title="Rank of each tile, and where documents end")
bottom.barh([*facts["sent"]], [*facts["sent"].values()])
bottom.set(xlabel="KiB", title="Sent by the busiest rank, forward")

# %%
# What holds, what may be sharded otherwise and how it meets FSDP: :doc:`/context_parallel`. How the planner weighs
# work and bytes: :doc:`/context_parallel_plan`.
