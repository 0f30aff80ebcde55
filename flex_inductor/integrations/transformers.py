"""Importing this replaces PreTrainedModel.get_correct_attn_implementation of Hugging Face transformers.

From then on attn_implementation="flex_inductor" is a choice, "local/flex_inductor/attention" the same one; both are
refused for models with attention of their own.
Transformers asks for two functions: `make_mask`, once in each step for each kind of mask, and `attend`, in each layer.
A mask for few queries is a plain tensor of booleans, one for many is a BlockMask.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from .. import mods
from ..checks import check_block_mask, check_options, check_tensors, refused
from ..errors import FlexError
from ..kept import Kept
from ..masks import RunSchedule, create_block_mask
from ..op import untraced
from ..softmax import Scales, Softmax, is_narrow
from . import check_version, errors
from .tables import attend_tables

try:
    import transformers
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
except ImportError as error:
    raise errors.missing("transformers", "5", error) from error

__all__ = ["attend", "make_mask"]

NAME = "flex_inductor"
# For frameworks that take names with a slash alone. One slash would be a kernel to download.
WITH_SLASHES = "local/flex_inductor/attention"
TESTED = "5.24"
FEW = 32  # queries: their mask is quicker to compute than to analyse


# Models that compute with their masks before attention, by the config's model_type. They get the tensors that
# attn_implementation="sdpa" or "eager" gives them, for any number of queries.
_OF_TENSORS: dict[str, Callable] = {
    **dict.fromkeys(
        [
            "axk2",
            "deepseek_v32",
            "doge",
            "dots3_note_text",
            "glm_moe_dsa",
            "hy_v4",
            "hy_v4_vl_text",
            "mistral_large4_text",
            "nemotron_asr_streaming_encoder",
            "qwen4_exp_text",
            "t5gemma2_decoder",
        ],
        masking_utils.sdpa_mask,
    ),
    **dict.fromkeys(
        ["bigbird_pegasus", "deepseek_v4", "gemma4_audio", "git", "informer"], masking_utils.eager_mask
    ),
}


class Mask(BlockMask):
    """A BlockMask where `generate` and models treat masks as tensors."""

    ndim = 4

    @classmethod
    def of(cls, block_mask: BlockMask) -> Mask:
        mask = cls.__new__(cls)
        mask.__dict__.update(block_mask.__dict__)
        return mask

    def contiguous(self) -> Mask:
        return self

    def __getitem__(self, index: Any) -> Any:
        """Rows of the whole mask, as Gemma 4 takes them for the tokens whose logits are kept."""
        if not (isinstance(index, tuple) and len(index) == self.ndim):
            return super().__getitem__(index)
        batch, heads, queries, keys = self.shape
        return create_mask(self.mask_mod, batch, heads, queries, keys, self.kv_num_blocks.device)[index]


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,  # an integer, or the live counter of a static cache
    kv_offset: int = 0,
    mask_function: Callable = masking_utils.causal_mask_function,
    attention_mask: Tensor | RunSchedule | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | BlockMask | RunSchedule | None:
    """Make the mask of a step, in the form that `attend` takes.

    transformers calls it, with the arguments of its `sdpa_mask`.

    Args:
        batch_size, q_length, kv_length: the sizes.
        q_offset: how many tokens are before the queries: an integer, or the counter of a static cache.
        kv_offset: how many tokens are before the keys.
        mask_function: transformers' mask, a mask_mod.
        attention_mask: bool [B, N], True where there is a token; or a RunSchedule, which is the whole mask.
        local_size: the window of the layer.
        allow_is_causal_skip: return None for a single query that sees all.
        allow_is_bidirectional_skip: return None where all see all.
        device: of the tensors.
        kwargs: others that `sdpa_mask` takes, and the model's config.

    Returns:
        BlockMask: or a tensor that broadcasts to [B, H, M, N] for up to 32 queries, and for models that compute with
            their masks; or None.

    Example:
        >>> from flex_inductor.integrations import transformers as ours
        >>> ours.make_mask(2, 256, 256).shape
        (2, 1, 256, 256)
        >>> ours.make_mask(2, 4, 256, q_offset=252).shape  # few queries: a tensor
        torch.Size([2, 1, 4, 256])
    """
    if isinstance(attention_mask, RunSchedule):
        return attention_mask
    of_tensors = _OF_TENSORS.get(getattr(kwargs.get("config"), "model_type", ""))
    if of_tensors is not None or q_length <= FEW:
        return (of_tensors or masking_utils.sdpa_mask)(
            batch_size,
            q_length,
            kv_length,
            q_offset,
            kv_offset,
            mask_function,
            attention_mask,
            local_size=local_size,
            allow_is_causal_skip=allow_is_causal_skip and q_length == 1,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip,
            device=device,
            **kwargs,
        )
    tracing = torch.compiler.is_dynamo_compiling()
    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None and not tracing and bool(padding.all()):
        padding = None
    if allow_is_bidirectional_skip and padding is None and (local_size is None or kv_length < local_size):
        return None
    if padding is not None:
        mask_function = masking_utils.and_masks(mask_function, masking_utils.padding_mask_function(padding))
    if isinstance(q_offset, Tensor):
        q_offset = q_offset.clone()  # a static cache counts on in it before the mask is read
    mask_mod = masking_utils.add_offsets_to_mask_function(mask_function, q_offset, kv_offset)
    sizes = (batch_size, q_length, kv_length, str(device))
    if tracing:
        return _block_mask(mask_mod, *sizes)
    meaning = _meaning(mask_mod) if _keeps() else None
    if meaning is None:
        return Mask.of(_block_mask(mask_mod, *sizes))
    return _masks.once((meaning, *sizes), lambda: Mask.of(_block_mask(mask_mod, *sizes)))


_masks: Kept[Mask] = Kept(16)
# What `_within_documents` made last, by the mask that it was made of.
_documents: weakref.WeakKeyDictionary[Any, tuple[Any, ...]] = weakref.WeakKeyDictionary()


def _keeps() -> bool:
    """Whether masks are kept: not what a trace makes, nor a mode, as under FakeTensorMode."""
    return not (torch.compiler.is_dynamo_compiling() or _len_torch_dispatch_stack())


def _block_mask(mask_mod: Callable, batch: int, queries: int, keys: int, device: str) -> BlockMask:
    return create_block_mask(mask_mod, batch, None, queries, keys, device)


def _meaning(value: Any) -> Any:
    """A key that is equal for mask functions that mean the same; None if unknown, as with a tensor inside."""
    if isinstance(value, int):
        return value
    if isinstance(value, tuple):
        parts = tuple(map(_meaning, value))
    elif getattr(value, "__module__", None) == masking_utils.__name__ and hasattr(value, "__code__"):
        parts = (value.__code__, *(_meaning(cell.cell_contents) for cell in value.__closure__ or ()))
    else:
        return None
    return None if None in parts else parts


NOT_SERVED = {"cache": "continuous batching (cache)", "block_indices": "block_indices"}
IN_THE_MASK = {"sliding_window"}  # eager attention may take it, and the mask has it already


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | RunSchedule | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend in one layer. transformers calls it for attn_implementation="flex_inductor".

    Args:
        module: the layer, whose is_causal counts.
        query: [B, H, M, D].
        key: [B, Hk, N, D]; Hk divides H.
        value: [B, Hk, N, V].
        attention_mask: of `make_mask`, a BlockMask or RunSchedule of M queries and N keys, or a tensor that broadcasts
            to [B, H, M, N], of booleans or added to scores.
        scaling: 1/sqrt(D) by default.
        dropout: the part of the weights that is left out.
        is_causal: instead of the layer's.
        softcap: bends scores into (-softcap, softcap).
        s_aux: float [H], sinks.
        position_bias: added to scores; broadcasts to [B, H, M, N].
        kwargs: cu_seq_lens_q, cu_seq_lens_k, indices and output_attentions count. Offsets of documents are for a batch
            of 1; indices [B, M, K] are the only keys that a query may see, as DeepSeek-V3.2 chooses them.

    Returns:
        tuple: ([B, M, H, V], weights or None).

    Raises:
        FlexNotImplementedError: the layer passes something that is not served.
        FlexValueError: shapes, dtypes or devices do not fit.

    Example:
        >>> import transformers
        >>> import flex_inductor.integrations.transformers
        >>> config = transformers.LlamaConfig(
        ...     hidden_size=32, intermediate_size=32, vocab_size=64,
        ...     num_hidden_layers=1, num_attention_heads=2)
        >>> config._attn_implementation = "flex_inductor"
        >>> transformers.LlamaForCausalLM(config)(torch.arange(48)[None]).logits.shape
        torch.Size([1, 48, 64])
    """
    mask: Any = attention_mask
    try:
        untraced(check_tensors, query, key, value, True, True)
        Scales().check(query, key, (), ())
        untraced(check_options, query, None, scaling, False, None, None)
        softmax = Softmax(s_aux, dropout)
        softmax.check(query)
        names = tuple(name for name, argument in kwargs.items() if argument is not None)
        untraced(_check_names, type(module), names)
        if kwargs.get("cu_seq_lens_q") is not None and query.size(0) != 1:
            raise errors.documents_of_rows(query.size(0))
        _check_mask(query, key, mask)
    except FlexError as error:
        refused(error)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if mask is None and causal and query.size(2) > 1:
        mask = _mask_of_lengths(masking_utils.causal_mask_function, query, key)
    if kwargs.get("indices") is not None:
        mask = _among(mask, kwargs["indices"], key.size(2))
    if kwargs.get("cu_seq_lens_q") is not None:
        mask = _within_documents(mask, query, key, kwargs["cu_seq_lens_q"], kwargs.get("cu_seq_lens_k"))
    if kwargs.get("output_attentions"):
        given = {"softcap": softcap, "s_aux": s_aux, "position_bias": position_bias}
        given = {name: argument for name, argument in given.items() if argument is not None}
        return _with_weights(
            module, query, key, value, mask, scaling=scaling, dropout=dropout, **given, **kwargs
        )
    scale = 1.0 / math.sqrt(query.size(-1)) if scaling is None else scaling
    biases = [] if position_bias is None else [position_bias]
    if isinstance(mask, Tensor) and mask.dtype != torch.bool:
        biases, mask = [*biases, mask], None
    if not dropout and _is_small(query, key, value, mask, s_aux, *biases):
        out = _few_queries(query, key, value, mask, biases, scale, softcap, s_aux)
    else:
        score_mod = None if softcap is None else mods.softcap(softcap)
        out, _ = attend_tables(query, key, value, mask, biases, scale, score_mod, softmax.drawn(query))
    return out.transpose(1, 2).contiguous(), None


def _is_small(query: Tensor, key: Tensor, value: Tensor, mask: Any, *others: Tensor | None) -> bool:
    """Whether a call is so small that the op's own rules and checks would take longer than its arithmetic."""
    of_op = isinstance(mask, (BlockMask, RunSchedule)) or is_narrow(key)
    # torch's own has no forward mode.
    derived = torch.compiler.is_dynamo_compiling() or forward_ad._current_level >= 0
    if query.size(2) > FEW or of_op or derived:
        return False
    tensors = (query, key, value, *others)
    return not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors))


def _few_queries(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    biases: list[Tensor],
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """By torch's own operations. Query heads that share keys become more queries of one head."""
    batch, heads, queries, _ = query.shape
    groups = heads // key.size(1)

    def folded(table: Tensor) -> Tensor:
        if groups == 1 or (queries == 1 and table.size(1) == 1):
            return table
        table = table.expand(-1, heads, queries, -1)
        return table.reshape(table.size(0), key.size(1), groups * queries, -1)

    bias = functools.reduce(torch.add, map(folded, biases)) if biases else None
    mask = None if mask is None else folded(mask)
    if bias is not None and mask is not None:
        bias = bias.masked_fill(~mask, -math.inf)
    if softcap is None and sinks is None:
        given = mask if bias is None else bias.to(query.dtype)
        out = F.scaled_dot_product_attention(folded(query), key, value, given, scale=scale)
        return out.reshape(batch, heads, queries, -1)
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = folded(query).to(wide) @ key.to(wide).mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    elif mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    if sinks is not None:
        column = folded(sinks.to(wide).view(1, -1, 1, 1)).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], -1)
    weights = torch.ops.aten._safe_softmax(scores, -1)[..., : key.size(2)]  # 0 where a query sees nothing
    return (weights @ value.to(wide)).to(query.dtype).reshape(batch, heads, queries, -1)


def _check_names(layer: type, given: tuple[str, ...]) -> None:
    """Refuse arguments that change attention and that `attend` does not know."""
    eager = getattr(sys.modules.get(layer.__module__), "eager_attention_forward", None)
    unknown = _parameters(eager) - IN_THE_MASK
    for argument in given:
        if argument in NOT_SERVED or argument in unknown:
            raise errors.not_served(layer.__name__, NOT_SERVED.get(argument, argument))


@functools.lru_cache(1024)
def _parameters(function: Callable | None) -> frozenset[str]:
    return frozenset() if function is None else frozenset(inspect.signature(function).parameters)


def _check_mask(query: Tensor, key: Tensor, mask: Any) -> None:
    wanted = (query.size(0), query.size(1), query.size(2), key.size(2))
    if isinstance(mask, Tensor):
        if mask.dim() != 4 or any(own not in (1, size) for own, size in zip(mask.shape, wanted, strict=True)):
            raise errors.mask_shape("attention_mask", tuple(mask.shape), wanted)
    elif mask is not None and not isinstance(mask, Mask):  # a Mask was made for these lengths
        untraced(check_block_mask, mask, query, key)


def _mask_of_lengths(function: Callable, query: Tensor, key: Tensor) -> Any:
    """A mask for models that ask for none: the first query is at the first key, the same for the whole batch."""
    return make_mask(
        1,
        query.size(2),
        key.size(2),
        mask_function=function,
        allow_is_causal_skip=False,
        device=query.device,
    )


def _among(mask: Any, indices: Tensor, keys: int) -> Tensor:
    """`mask` where the key is one of the query's `indices`. A model that has them has made them with a tensor."""
    chosen = torch.zeros(*indices.shape[:2], keys, dtype=torch.bool, device=indices.device)
    return _both(mask, chosen.scatter(-1, indices.long(), True).unsqueeze(1))


def _both(mask: Tensor | None, seen: Tensor) -> Tensor:
    if mask is None:
        return seen
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -math.inf)


def _within_documents(mask: Any, query: Tensor, key: Tensor, cu_q: Tensor, cu_k: Tensor | None) -> Any:
    """`mask` where query and key are of one document. Made once for all layers that share the mask."""
    cu_k = cu_q if cu_k is None else cu_k
    if mask is None:
        mask = _mask_of_lengths(masking_utils.bidirectional_mask_function, query, key)
    queries, keys = (
        torch.bucketize(torch.arange(side.size(2), device=query.device), cu[1:], right=True)
        for side, cu in ((query, cu_q), (key, cu_k))
    )
    if isinstance(mask, Tensor):
        return _both(mask, queries[:, None] == keys)

    whole = mask.mask_mod  # not the mask, which would then never go from `_documents`

    def mask_mod(b, h, q_idx, kv_idx):
        return whole(b, h, q_idx, kv_idx) & (queries[q_idx] == keys[kv_idx])

    sizes = mask.shape[0], query.size(2), key.size(2), str(query.device)
    state = (_state(cu_q), _state(cu_k)) if _keeps() else None
    if state is None or None in state:
        return _block_mask(mask_mod, *sizes)
    last = _documents.get(mask)
    if last is None or last[0] != state:
        last = _documents[mask] = state, (cu_q, cu_k), _block_mask(mask_mod, *sizes)
    return last[2]


def _state(cu: Tensor) -> Any:
    """What tells offsets apart; None if nothing does. Reading those of another device would wait for it."""
    if cu.device.type == "cpu":
        return cu.tolist()
    return None if cu.is_inference() else (id(cu), cu._version)


def _with_weights(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """By the model's own attention: only that returns weights."""
    name = type(module).__name__
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        refused(errors.no_weights(name))
    if not torch.compiler.is_dynamo_compiling():
        _warn_once(errors.weights_once(name))
    if isinstance(mask, (BlockMask, RunSchedule)):
        mask = create_mask(mask.mask_mod, query.size(0), 1, query.size(2), key.size(2), query.device)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
    return eager(module, query, key, value, mask, **kwargs)


@functools.cache
def _warn_once(text: str) -> None:
    warnings.warn(text, stacklevel=2)


def _has_own_attention(model: type[PreTrainedModel]) -> bool:
    """By the model's source, as transformers does it. A model without a file counts as supported."""
    has_file = getattr(sys.modules.get(model.__module__), "__file__", None) is not None
    return has_file and not model._can_set_attn_implementation()


_choose = PreTrainedModel.get_correct_attn_implementation


@functools.wraps(_choose)
def _choose_or_refuse(
    self: PreTrainedModel, requested_attention: str | None, *args: Any, **kwargs: Any
) -> str:
    if requested_attention in (NAME, WITH_SLASHES) and _has_own_attention(type(self)):
        raise errors.own_attention(type(self).__name__)
    return _choose(self, requested_attention, *args, **kwargs)


check_version("transformers", transformers.__version__, TESTED)
for _name in (NAME, WITH_SLASHES):
    AttentionInterface.register(_name, attend)
    AttentionMaskInterface.register(_name, make_mask)
PreTrainedModel.get_correct_attn_implementation = _choose_or_refuse  # type: ignore[method-assign]
