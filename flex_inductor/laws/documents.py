"""Which tokens belong together, in tensors of any layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import errors
from .compare import moved, numbered

# Where tokens may lie, by the number of dimensions; what comes first counts where sizes are equal.
TOKENS = {4: (2, 1, 0, 3), 3: (1, 0, 2), 2: (0, 1), 1: (0,)}


class Documents:
    """Numbers of documents, [rows, tokens]: from 0, each for itself in every row, -1 for padding."""

    def __init__(self, ids: Tensor):
        ids = ids if ids.dim() == 2 else ids.unsqueeze(0)
        rows = torch.arange(ids.size(0)).unsqueeze(1).expand_as(ids)
        pairs = torch.stack([rows, ids.long()], -1).flatten(0, 1)
        unpadded = (ids >= 0).flatten()
        found, numbers = torch.unique(pairs[unpadded], dim=0, return_inverse=True)
        self.numbers = torch.full(ids.shape, -1).flatten().masked_scatter(unpadded, numbers).view(ids.shape)
        self.count = len(found)

    @classmethod
    def given(cls, documents: Tensor | Sequence[int]) -> Documents:
        if not isinstance(documents, Tensor):
            lengths = list(documents)
            if not lengths or not all(isinstance(n, int) and n > 0 for n in lengths):
                raise errors.documents_shape(documents)
            return cls(torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)))
        if documents.is_floating_point() or documents.dim() not in (1, 2):
            raise errors.documents_shape(f"{documents.dtype} {list(documents.shape)}")
        return cls(documents)

    def check(self, tensors: Sequence[Tensor]) -> None:
        if all(self.of(tensor) is None for tensor in tensors):
            rows, tokens = self.numbers.shape
            raise errors.documents_do_not_fit(tokens, rows, [tensor.shape for tensor in tensors])

    def of(self, tensor: Tensor) -> Tensor | None:
        """The document of each entry, which broadcasts; None for a tensor that has no tokens."""
        rows, tokens = self.numbers.shape
        places = TOKENS.get(tensor.dim(), ())
        dim = next((d for d in places if tensor.size(d) == tokens), None)
        if dim is None or (rows > 1 and (dim == 0 or tensor.size(0) != rows)):
            return None
        shape = [1] * tensor.dim()
        shape[dim] = tokens
        if rows > 1:
            shape[0] = rows
        return self.numbers.view(shape)

    def moved(self, got: Tensor, want: Tensor, but: int) -> set[int]:
        """The documents, except one, in which anything moved."""
        own = self.of(want)
        assert own is not None
        return {
            other
            for other in range(self.count)
            if other != but and moved(got, want, own == other) is not None
        }

    def neighbours(self, document: int, others: set[int]) -> str:
        """In words, what moved with a document."""
        return errors.neighbours(self.name(document), [self.name(other) for other in sorted(others)])

    def name(self, document: int) -> str:
        row, tokens = (t.tolist() for t in (self.numbers == document).nonzero(as_tuple=True))
        of_row = f"row {row[0]}, " if self.numbers.size(0) > 1 else ""
        return f"document {document} ({of_row}tokens {numbered(tokens)})"


def of_batch(batch: Mapping[str, Any], padding: Tensor) -> tuple[str, Documents] | None:
    """What in a model's batch says where documents begin, and the documents. `padding` are flags [rows, tokens]."""
    rows, tokens = padding.shape
    for name in ("cu_seq_lens_q", "cu_seqlens"):
        if isinstance(ends := batch.get(name), Tensor):
            ids = torch.bucketize(torch.arange(rows * tokens), ends.flatten()[1:].long(), right=True)
            return name, Documents(ids.view(rows, tokens).masked_fill(padding, -1))
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == padding.shape and mask.max() > 1:
        return "attention_mask", Documents(mask.long() - 1)
    positions = batch.get("position_ids")
    if isinstance(positions, Tensor) and positions.dim() == 2 and positions.size(1) == tokens:
        begins = torch.nn.functional.pad(positions.diff(dim=-1) != 1, (1, 0)).expand(rows, -1)
        return "position_ids", Documents(begins.long().cumsum(-1).masked_fill(padding, -1))
    return None
