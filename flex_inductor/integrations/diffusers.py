"""diffusers' models with our attention, by a name that diffusers knows after `register()`."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ..checks import check_block_mask, check_options, check_tensors, refuse_untested, refused
from ..errors import FlexError
from ..kept import Kept
from ..masks import RunSchedule, causal, create_block_mask
from ..op import untraced
from ..softmax import Softmax
from . import check_version, errors
from .tables import attend_tables

try:
    import diffusers
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
    from diffusers.models.modeling_utils import ModelMixin
except ImportError as error:
    raise errors.missing("diffusers", "0.42", error) from error

__all__ = ["attend", "mods", "register"]

NAME = "flex_inductor"
TESTED = "0.42"


def register(*, instead_of_flex: bool = False) -> None:
    """Let diffusers take attention from here.

    `model.set_attention_backend("flex_inductor")` and `with attention_backend("flex_inductor"):` then choose it.

    Args:
        instead_of_flex: also serve the name "flex", which some models choose by themselves, for the whole process.

    Example:
        >>> from diffusers.models.attention_dispatch import attention_backend
        >>> from diffusers.models.attention_dispatch import dispatch_attention_fn
        >>> from flex_inductor.integrations import diffusers as ours
        >>> ours.register()
        >>> query = torch.randn(1, 24, 2, 8)  # [B, M, H, D]
        >>> with attention_backend("flex_inductor"):
        ...     dispatch_attention_fn(query, query, query).shape
        torch.Size([1, 24, 2, 8])
    """
    check_version("diffusers", diffusers.__version__, TESTED)
    names = [_our_name(), *([AttentionBackendName.FLEX] if instead_of_flex else [])]
    for name in names:
        _AttentionBackendRegistry.register(name)(attend)
    ModelMixin._set_gradient_checkpointing = _set_gradient_checkpointing


@contextlib.contextmanager
def mods(
    block_mask: BlockMask | RunSchedule | None = None, score_mod: Callable[..., Tensor] | None = None
) -> Iterator[None]:
    """Give a mask and a score_mod to models that have no place for them, in this thread, until the block ends.

    They are for the calls with as many queries and keys as `block_mask` has, or, without one, as many queries as keys.
    So cross attention to a text of another length stays as it is. A call's own mask holds too. The backward may run
    after the block, also with `enable_gradient_checkpointing`.

    Args:
        block_mask: a BlockMask or a RunSchedule.
        score_mod: as in flex_attention.

    Example:
        >>> from flex_inductor.integrations import diffusers as ours
        >>> window = masks.neighborhood((4, 6), (3, 3))
        >>> query = torch.randn(1, 24, 2, 8)
        >>> with ours.mods(create_block_mask(window, None, None, 24, 24)):
        ...     near = ours.attend(query, query, query)
        >>> torch.equal(near, ours.attend(query, query, query))
        False
    """
    global _used
    _used = _used or block_mask is not None or score_mod is not None
    before = _given.block_mask, _given.score_mod, _given.backward
    _given.block_mask, _given.score_mod, _given.backward = block_mask, score_mod, _backward()
    try:
        yield
    finally:
        _given.block_mask, _given.score_mod, _given.backward = before


class _Given(threading.local):
    block_mask: Any = None
    score_mod: Any = None
    backward: int = -1  # the one that `mods` was entered in


_given = _Given()
_used = False
_own_set_gradient_checkpointing = ModelMixin._set_gradient_checkpointing
_causal: Kept[RunSchedule] = Kept(16)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | BlockMask | RunSchedule | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    score_mod: Callable[..., Tensor] | None = None,
    _parallel_config: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend in one call. diffusers calls it for the backend "flex_inductor".

    Args:
        query: [B, M, H, D].
        key: [B, N, Hk, D]; fewer heads, dividing H, with `enable_gqa`.
        value: [B, N, Hk, V].
        attn_mask: a BlockMask, a RunSchedule, or a tensor [N], [B, N], [B, M, N] or [B, H, M, N], of booleans or added
            to scores.
        dropout_p: the part of the weights that is left out.
        is_causal: the first query stands at the first key, and none sees later keys.
        scale: 1/sqrt(D) by default.
        enable_gqa: let groups of query heads share a head of keys and values.
        return_lse: return (out, logsumexp).
        score_mod: of a model's `attention_kwargs`; that of `mods` by default.
        _parallel_config: how diffusers would spread the call over ranks, which must be None.

    Returns:
        Tensor: [B, M, H, V], or (out, logsumexp [B, M, H]).

    Raises:
        FlexValueError: shapes, dtypes or devices do not fit, or there are two masks of blocks.
        FlexNotImplementedError: diffusers spreads the call over ranks, or a backward computes it again without knowing
            its mods.

    Example:
        >>> from flex_inductor.integrations import diffusers as ours
        >>> query = torch.randn(1, 24, 2, 8)
        >>> seen = torch.arange(24) < 20
        >>> out, lse = ours.attend(query, query, query, attn_mask=seen, return_lse=True)
        >>> out.shape, lse.shape
        (torch.Size([1, 24, 2, 8]), torch.Size([1, 24, 2]))
    """
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    lengths = (query.size(2), key.size(2))
    softmax = Softmax(None, dropout_p)
    given_mask, given_mod = _for_lengths(lengths)
    refuse_untested()
    try:
        untraced(_check_mods_known)
        untraced(check_tensors, query, key, value, enable_gqa)
        untraced(check_options, query, score_mod, scale, False, None, None)
        softmax.check(query)
        if _parallel_config is not None:
            raise errors.context_parallel()
        if isinstance(attn_mask, Tensor):
            attn_mask = _of_four(attn_mask, (query.size(0), query.size(1), *lengths))
        of_blocks = [
            mask for mask in (attn_mask, given_mask) if not (mask is None or isinstance(mask, Tensor))
        ]
        for mask in of_blocks:
            untraced(check_block_mask, mask, query, key)
        if len(of_blocks) + is_causal > 1 or (is_causal and attn_mask is not None):
            raise errors.mask_twice()
    except FlexError as error:
        refused(error)
    blocks = of_blocks[0] if of_blocks else _causal_mask(lengths, query.device) if is_causal else None
    biases = []
    if isinstance(attn_mask, Tensor) and attn_mask.dtype != torch.bool:
        biases, attn_mask = [attn_mask], None
    elif isinstance(attn_mask, Tensor) and blocks is not None:
        biases = [torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -math.inf)]
    out, lse = attend_tables(
        query,
        key,
        value,
        attn_mask if blocks is None else blocks,
        biases,
        1.0 / math.sqrt(query.size(-1)) if scale is None else scale,
        score_mod or given_mod,
        softmax.drawn(query),
        return_lse,
    )
    return (out.transpose(1, 2), lse.transpose(1, 2)) if lse is not None else out.transpose(1, 2)


def _for_lengths(lengths: tuple[int, int]) -> tuple[Any, Any]:
    """What `mods` gives to a call of these lengths."""
    mask = _given.block_mask
    ours = lengths[0] == lengths[1] if mask is None else lengths == tuple(mask.seq_lengths)
    return (mask, _given.score_mod) if ours else (None, None)


def _backward() -> int:
    """The number of the backward that runs in this thread, or -1."""
    return -1 if torch.compiler.is_dynamo_compiling() else torch._C._current_graph_task_id()


def _check_mods_known() -> None:
    """Refuse a call inside a backward that has not entered `mods`: it may be of a forward that had others."""
    if _used and _backward() not in (-1, _given.backward):
        raise errors.mods_in_backward()


def _set_gradient_checkpointing(
    self: ModelMixin,
    enable: bool = True,
    gradient_checkpointing_func: Callable[..., Any] = torch.utils.checkpoint.checkpoint,
) -> None:
    """diffusers' own, with a function that keeps the mods."""
    _own_set_gradient_checkpointing(
        self, enable, functools.partial(_checkpointed, gradient_checkpointing_func)
    )


def _checkpointed(
    checkpoint: Callable[..., Any], block: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Checkpoint a block that has the mods of its forward when the backward computes it again, in any thread."""
    if torch.compiler.is_dynamo_compiling():  # the graph has them
        return checkpoint(block, *args, **kwargs)
    given = _given.block_mask, _given.score_mod

    def with_mods(*args: Any, **kwargs: Any) -> Any:
        with mods(*given):
            return block(*args, **kwargs)

    return checkpoint(with_mods, *args, **kwargs)


def _causal_mask(lengths: tuple[int, int], device: torch.device) -> RunSchedule:
    def make() -> RunSchedule:
        return create_block_mask(causal(), None, None, *lengths, device, compact=True)

    return make() if torch.compiler.is_dynamo_compiling() else _causal.once((*lengths, str(device)), make)


def _of_four(mask: Tensor, wanted: tuple[int, int, int, int]) -> Tensor:
    """A mask [N], [B, N], [B, M, N] or [B, H, M, N], all of which may be 1."""
    shape = tuple(mask.shape)
    if mask.dim() == 3:
        mask = mask.unsqueeze(1)
    elif mask.dim() in (1, 2):
        mask = mask.view(-1, 1, 1, mask.size(-1))
    if mask.dim() != 4 or any(own not in (1, size) for own, size in zip(mask.shape, wanted, strict=True)):
        raise errors.mask_shape("attn_mask", shape, wanted)
    return mask


def _our_name() -> AttentionBackendName:
    """A member of diffusers' closed enumeration."""
    known = AttentionBackendName._value2member_map_.get(NAME)
    if known is not None:
        return known
    member = str.__new__(AttentionBackendName, NAME)
    member._name_, member._value_ = NAME.upper(), NAME
    AttentionBackendName._member_names_.append(member._name_)
    AttentionBackendName._member_map_[member._name_] = member
    AttentionBackendName._value2member_map_[NAME] = member
    return member
