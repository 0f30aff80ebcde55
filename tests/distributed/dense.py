"""What tests of the planner compare with: tiles and ranks one by one, from the mask of all pairs of tokens."""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import create_mask

RAGGED = [300, 1, 700, 40, 128, 355, 500]
LENGTH = sum(RAGGED)


def tiles_read(mask_mod, length, tile, heads=1, batch=1):
    """bool [batch, heads, tiles, tiles]: whether any query of a row tile sees any key of a column tile."""
    tokens = create_mask(mask_mod, batch, heads, length, length, "cpu")
    padded = torch.nn.functional.pad(tokens, (0, -length % tile, 0, -length % tile))
    return padded.unflatten(3, (-1, tile)).unflatten(2, (-1, tile)).any(5).any(3)


def loads(read, owner, ranks):
    """(work, read, received, sent) of each rank; `read` is bool [batch, heads, rows, columns]."""
    work, every, received, sent = ([0.0] * ranks for _ in range(4))
    needed = read.any(1).any(0)
    for row, rank in enumerate(owner):
        work[rank] += float(read[:, :, row].sum()) / (read.shape[0] * read.shape[1])
    for rank in range(ranks):
        mine = [row for row, holder in enumerate(owner) if holder == rank]
        for column in needed[mine].any(0).nonzero().flatten().tolist():
            every[rank] += 1
            if owner[column] != rank:
                received[rank] += 1
                sent[owner[column]] += 1
    return work, every, received, sent


def between(read, owner, ranks):
    """(work, whether anything is read) of each reader and holder; a row has the same work with each tile it reads."""
    work, reads = torch.zeros(ranks, ranks), torch.zeros(ranks, ranks, dtype=torch.bool)
    needed = read.any(1).any(0)
    share = needed * (read.double().mean((0, 1)).sum(1) / needed.sum(1).clamp(min=1))[:, None]
    for row, column in share.nonzero().tolist():
        work[owner[row], owner[column]] += share[row, column]
        reads[owner[row], owner[column]] = True
    return work, reads
