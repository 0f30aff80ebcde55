"""What a call returns beside its output."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as of_torch
from torch.utils import _pytree as pytree

from . import dropout
from .arguments import RngState, Softmax

# The op's further results: the entropy of a row's weights, and the kv_idx of its largest score, or -1
# where it sees none. COLUMN_SUMS, the sum of the weights that a key takes, is a call of the backward op.
COLUMN_SUMS = "column_sums"
MORE = ("entropy", "max_indices", COLUMN_SUMS)


class AuxRequest(NamedTuple):
    """What a call returns beside its output: torch's AuxRequest, and what only flex_inductor has.

    Args:
        lse: the logsumexp of each row.
        max_scores: the largest score of each row.
        rng_state: of dropout; None where nothing is dropped.
        dropout_mask: which weights dropout keeps, for tests: it takes a byte for each score.
        head_max_scores: each head's largest score over all batches and rows, for QK-clip.
        column_sums: of each key's weights, over the rows and heads that share it; no gradient.
        entropy: of each row's weights; a sink's weight is one of them.
        max_indices: the kv_idx of each row's largest score: the first, -1 where a row sees none.

    Example:
        >>> query = torch.zeros(1, 2, 4, 8)  # so that all weights are equal
        >>> request = flex_inductor.AuxRequest(entropy=True, column_sums=True)
        >>> out, aux = flex_attention(query, query, query, return_aux=request)
        >>> aux.entropy[0, 0].exp(), aux.column_sums[0, 0]
        (tensor([4., 4., 4., 4.]), tensor([1., 1., 1., 1.]))
    """

    lse: bool = False
    max_scores: bool = False
    rng_state: bool = False
    dropout_mask: bool = False
    head_max_scores: bool = False
    column_sums: bool = False
    entropy: bool = False
    max_indices: bool = False

    @property
    def maxima(self) -> bool:
        """Whether rows' largest scores are needed."""
        return self.max_scores or self.head_max_scores

    @property
    def reads_lse(self) -> bool:
        """Whether rows' logsumexps are needed."""
        return self.lse or self.entropy or self.column_sums

    @property
    def more(self) -> tuple[str, ...]:
        """The op's further results."""
        if not (self.entropy or self.max_indices or self.column_sums):
            return ()  # what follows takes Dynamo half a millisecond
        return tuple(itertools.compress(MORE, (self.entropy, self.max_indices, self.column_sums)))


class AuxOutput(NamedTuple):
    """What a call returned beside its output. None for what was not asked for.

    Args:
        lse: [B, H, M], in natural logarithm.
        max_scores: [B, H, M].
        rng_state: (seed, offset), two int64 tensors without dimensions.
        dropout_mask: bool [B, H, M, N].
        head_max_scores: [H].
        column_sums: like key without its last dimension.
        entropy: [B, H, M].
        max_indices: int64 [B, H, M].

    Example:
        >>> query = torch.randn(1, 2, 4, 8)
        >>> request = flex_inductor.AuxRequest(lse=True, max_indices=True)
        >>> _, aux = flex_attention(query, query, query, return_aux=request)
        >>> aux.lse.shape, aux.max_indices.shape, aux.entropy
        (torch.Size([1, 2, 4]), torch.Size([1, 2, 4]), None)
    """

    lse: Tensor | None = None
    max_scores: Tensor | None = None
    rng_state: RngState | None = None
    dropout_mask: Tensor | None = None
    head_max_scores: Tensor | None = None
    column_sums: Tensor | None = None
    entropy: Tensor | None = None
    max_indices: Tensor | None = None


# So that programs saved by torch.export may return it.
pytree._register_namedtuple(AuxOutput, serialized_type_name="flex_inductor.AuxOutput")
REQUESTS = (of_torch.AuxRequest, AuxRequest)
_OUTPUT, _LSE = AuxRequest(), AuxRequest(lse=True)  # which most calls ask for
OF_ROWS = ("lse", "max_scores", "entropy", "max_indices")  # have a number for each row


def asked(request: Any, return_lse: bool) -> AuxRequest:
    """All that a call asks for. What has another type is refused by checks."""
    if not isinstance(request, REQUESTS):
        return _LSE if return_lse else _OUTPUT
    return AuxRequest(*request)  # checks refuse return_lse beside it


def over_rows(max_scores: Any) -> Tensor:
    """The largest of each head [B, H, M], -inf where there is none."""
    of_head = max_scores.detach().transpose(0, 1).flatten(1)
    return torch.nn.functional.pad(of_head, (0, 1), value=-torch.inf).amax(1)


def answer(
    request: Any,
    return_lse: bool,
    results: Sequence[Any],
    softmax: Softmax,
    kept: Tensor | None = None,
    packed: bool = False,
) -> Any:
    """What the user gets from the op's results. `kept` is dropout's mask.

    Rows of `packed` sequences are in one batch, which the user does not see.
    """
    out, lse, max_scores, *_ = results
    if request is None and not packed:  # what Dynamo traces takes time
        return (out, lse) if return_lse else out
    wanted = asked(request, return_lse)
    more = dict(zip(wanted.more, results[3:], strict=True))
    found = AuxOutput(lse, max_scores, softmax.rng_state, kept, **more)
    if wanted.head_max_scores:
        found = found._replace(head_max_scores=over_rows(found.max_scores))
    if packed:
        out = out.squeeze(0).transpose(0, 1)
        named = {name: rows for name in OF_ROWS if (rows := getattr(found, name)) is not None}
        found = found._replace(**{name: rows.squeeze(0) for name, rows in named.items()})
    if request is None:
        return (out, found.lse) if return_lse else out
    values: list[Any] = [value if want else None for value, want in zip(found, wanted, strict=True)]
    answered = AuxOutput(*values)
    return out, of_torch.AuxOutput(*answered[:2]) if isinstance(request, of_torch.AuxRequest) else answered


def dropout_mask(
    softmax: Softmax, lanes: tuple[Tensor, Tensor, Tensor, Tensor], query: Tensor
) -> Tensor | None:
    """Which weights are kept at these indices, which broadcast."""
    if not softmax.dropout_p:
        return None
    return dropout.keeps(softmax.inputs(query)["dropout"], *lanes)
