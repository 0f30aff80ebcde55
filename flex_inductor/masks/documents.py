"""Documents that follow each other, read off the document of each position."""

from __future__ import annotations

import torch
from torch import Tensor

_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def may_be_ids(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.dtype in _DTYPES


def table_of(ids: Tensor, positions: int) -> Tensor | None:
    """Where the document of each position begins and ends, int32 [rows, positions, 2].

    None where there are too few ids, or a document goes on after another one.
    """
    if ids.size(1) < positions or not positions:
        return None
    ids = ids[:, :positions]
    begins = torch.ones(ids.shape, dtype=torch.bool, device=ids.device)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    begin = begins.flatten().nonzero().squeeze(1)
    row = begin // positions
    if _any_twice(row, ids.flatten()[begin]):
        return None
    tokens = torch.cat((begin[1:], begin.new_tensor([ids.numel()]))) - begin
    begin = begin - row * positions
    table = torch.stack((begin, begin + tokens), 1).to(torch.int32)
    return table.repeat_interleave(tokens, 0, output_size=ids.numel()).view(*ids.shape, 2)


def _any_twice(row: Tensor, document: Tensor) -> bool:
    """Whether a row has a document in two places."""
    document = document.long()
    same_row = row[1:] == row[:-1]
    if not bool((same_row & (document[1:] < document[:-1])).any()):
        return False  # mostly: they ascend
    order = document.argsort(stable=True)
    order = order[row[order].argsort(stable=True)]
    row, document = row[order], document[order]
    return bool(((row[1:] == row[:-1]) & (document[1:] == document[:-1])).any())
