"""Masks of several texts in one sequence, and of batches with padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import described
from ..errors import MaskArgumentError
from ..ordinary import ordinary_tensors
from .algebra import MaskMod
from .sizes import positive


@ordinary_tensors
def document(
    ids: Tensor | None = None,
    *,
    lengths: Tensor | Sequence[int] | None = None,
    cu_seqlens: Tensor | None = None,
    causal: bool = True,
) -> MaskMod:
    """Let tokens see their own document only, where several are in one sequence.

    Give one of the first three. Lengths 2, 1 and 3, not causal::

        ##....
        ##....
        ..#...
        ...###

    Args:
        ids: integer tensor [length] or [batch, length], the document of each token, in any order.
        lengths: of consecutive documents, as a list or an integer tensor.
        cu_seqlens: where consecutive documents begin and the last one ends, as an integer tensor.
        causal: False sees later tokens of the document too.

    Raises:
        MaskArgumentError: not exactly one of the three is given, or it has another type or shape, or negative lengths.

    Example:
        >>> mask_mod = masks.document(lengths=[2, 1, 3])
        >>> index = torch.arange(6)
        >>> mask_mod(0, 0, index[:, None], index).int()
        tensor([[1, 0, 0, 0, 0, 0],
                [1, 1, 0, 0, 0, 0],
                [0, 0, 1, 0, 0, 0],
                [0, 0, 0, 1, 0, 0],
                [0, 0, 0, 1, 1, 0],
                [0, 0, 0, 1, 1, 1]], dtype=torch.int32)
    """
    given = [x is not None for x in (ids, lengths, cu_seqlens)]
    if sum(given) != 1:
        raise MaskArgumentError(
            f"document: expected exactly one of ids, lengths and cu_seqlens, got {sum(given)} of them."
        )
    for name, tensor in (("ids", ids), ("cu_seqlens", cu_seqlens)):
        if tensor is not None and not _of_integers(tensor):
            raise MaskArgumentError(f"document: {name}: expected an integer tensor, got {described(tensor)}.")
    if ids is None:
        if cu_seqlens is not None:
            if cu_seqlens.dim() != 1 or cu_seqlens[:1].tolist() != [0]:
                raise MaskArgumentError(
                    f"document: cu_seqlens: expected ascending ends from 0 on, got {cu_seqlens.tolist()}."
                )
            counts = torch.diff(cu_seqlens)
        else:
            counts = _lengths(lengths)
        if counts.dim() != 1 or bool((counts < 0).any()):
            raise MaskArgumentError(
                "document: lengths: expected a 1-d list of lengths (cu_seqlens: ascending ends from 0 on), "
                f"got {counts.tolist()}."
            )
        ids = torch.repeat_interleave(torch.arange(counts.numel(), device=counts.device), counts)
    if ids.dim() not in (1, 2):
        raise MaskArgumentError(
            f"document: ids: expected [length] or [batch, length], got shape {tuple(ids.shape)}."
        )

    def document(b, h, q_idx, kv_idx):
        same = ids[q_idx] == ids[kv_idx] if ids.dim() == 1 else ids[b, q_idx] == ids[b, kv_idx]
        return same & (q_idx >= kv_idx) if causal else same

    return document


def _lengths(given: Any) -> Tensor:
    try:
        counts = given if isinstance(given, Tensor) else torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        counts = None
    if counts is None or not (_of_integers(counts) or counts.numel() == 0):
        raise MaskArgumentError(f"document: lengths: expected integers, got {given!r}.")
    return counts.long()


def _of_integers(value: Any) -> bool:
    return isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())


def ragged(q_lengths: Tensor, kv_lengths: Tensor | None = None) -> MaskMod:
    """Leave the padding of a batch out.

    Lengths 3 and 2::

        ###.                ##..
        ###.                ##..
        ###.                ....
        ....                ....

    Args:
        q_lengths: integer tensor [batch], the queries of each sequence.
        kv_lengths: the same of keys; `q_lengths` by default.

    Raises:
        MaskArgumentError: one of both is no tensor of one dimension.

    Example:
        >>> mask_mod = masks.ragged(torch.tensor([300, 40]))
        >>> schedule = create_block_mask(mask_mod, 2, None, 512, 512, compact=True)
        >>> schedule[0].sparsity(), schedule[1].sparsity()
        (43.75, 93.75)
    """
    kv_lengths = q_lengths if kv_lengths is None else kv_lengths
    for name, lengths in (("q_lengths", q_lengths), ("kv_lengths", kv_lengths)):
        if not _of_integers(lengths) or lengths.dim() != 1:
            raise MaskArgumentError(f"ragged: {name}: expected an integer tensor [batch], got {lengths!r}.")

    def ragged(b, h, q_idx, kv_idx):
        return (q_idx < q_lengths[b]) & (kv_idx < kv_lengths[b])

    return ragged


def shared_prefix(prefix: int, suffix: int) -> MaskMod:
    """Put several answers behind one prompt. They do not see each other.

    Prefix 2, suffix 2::

        #.....
        ##....
        ###...
        ####..
        ##..#.
        ##..##

    Args:
        prefix: tokens of the prompt.
        suffix: tokens of each answer.

    Raises:
        MaskArgumentError: `suffix` is no positive integer.

    Example:
        >>> mask_mod = masks.shared_prefix(prefix=2, suffix=2)
        >>> mask_mod(0, 0, 5, torch.arange(6)).int().tolist()  # does not see the first answer
        [1, 1, 0, 0, 1, 1]
    """
    positive("shared_prefix", suffix=suffix)

    def shared_prefix(b, h, q_idx, kv_idx):
        same_answer = (q_idx - prefix) // suffix == (kv_idx - prefix) // suffix
        return (q_idx >= kv_idx) & ((kv_idx < prefix) | same_answer)

    return shared_prefix


@ordinary_tensors
def tree(parents: Sequence[int] | Tensor, context: int | Tensor = 0) -> MaskMod:
    """Let a node of a speculation tree see the keys before the tree, its ancestors and itself.

    Query i is node i; key `context + i` is node i. Parents (-1, 0, 0, 1), context 2::

        ###...
        ####..
        ###.#.
        ####.#

    Args:
        parents: of each node, -1 for a root. A parent comes before its children.
        context: how many keys come before the tree, or an integer tensor [batch] with a number for each batch.

    Raises:
        MaskArgumentError: there are no nodes, a parent does not come before its child, or a tensor `context` does not
            have one dimension.

    Example:
        >>> mask_mod = masks.tree([-1, 0, 0, 1], context=100)
        >>> seen = mask_mod(0, 0, torch.arange(4)[:, None], torch.arange(104))
        >>> seen.sum(1).tolist()  # how many keys each node sees
        [101, 102, 102, 103]
    """
    if isinstance(context, Tensor) and context.dim() != 1:
        raise MaskArgumentError(
            f"tree: context: expected an integer or a [batch] tensor, got shape {tuple(context.shape)}."
        )
    listed = parents.tolist() if isinstance(parents, Tensor) else list(parents)
    device = parents.device if isinstance(parents, Tensor) else None
    if not listed:
        raise MaskArgumentError("tree: parents: expected at least one node, got none.")
    nodes = len(listed)
    sees = torch.eye(nodes, dtype=torch.bool)
    for node, parent in enumerate(listed):
        if not -1 <= parent < node:
            raise MaskArgumentError(
                f"tree: parents: expected node {node}'s parent to come before it "
                f"(or -1 for a root), got {parent}."
            )
        if parent >= 0:
            sees[node] |= sees[parent]
    sees = sees.to(device)

    def tree(b, h, q_idx, kv_idx):
        start = context[b] if isinstance(context, Tensor) else context
        node = kv_idx - start
        within = (node >= 0) & (node < nodes) & (q_idx < nodes)
        return (node < 0) | (within & sees[q_idx.clamp(0, nodes - 1), node.clamp(0, nodes - 1)])

    return tree


def block_diffusion(length: int, block: int) -> MaskMod:
    """Train block diffusion: `length` noised tokens, then the same `length` tokens clean.

    A noised block sees itself and the clean blocks before it; a clean block sees clean blocks up to itself. Length 4,
    blocks of 2::

        ##.. ....
        ##.. ....
        ..## ##..
        ..## ##..
        .... ##..
        .... ##..
        .... ####
        .... ####

    Args:
        length: of the text; queries and keys have twice as many.
        block: tokens of a block.

    Raises:
        MaskArgumentError: one of both is no positive integer.

    Example:
        >>> mask_mod = masks.block_diffusion(length=2048, block=256)
        >>> create_block_mask(mask_mod, None, None, 4096, 4096, compact=True).sparsity()
        71.875
    """
    positive("block_diffusion", length=length, block=block)

    def block_diffusion(b, h, q_idx, kv_idx):
        q_block, kv_block = q_idx % length // block, kv_idx % length // block
        q_noised, kv_noised = q_idx < length, kv_idx < length
        own = q_noised & kv_noised & (q_block == kv_block)
        past = ~kv_noised & torch.where(q_noised, kv_block < q_block, kv_block <= q_block)
        return own | past

    return block_diffusion
