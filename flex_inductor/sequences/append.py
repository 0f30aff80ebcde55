"""Writes new keys and values into a cache, for attention to read.

An op of its own that writes in place: compiled graphs and CUDA graphs keep it before the attention that reads.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, fx

from ..checks import refused
from ..errors import FlexError
from ..op.library import LIBRARY, define
from . import errors
from .sequences import Sequences

Rotary = tuple[Tensor, Tensor]


def append_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences,
    rotary: Rotary | None = None,
    *,
    interleaved: bool = True,
    q: Tensor | None = None,
) -> Tensor | None:
    """Write the keys and values of a step's tokens into the cache, in place.

    Nothing is written outside of a row or of the pages.

    Args:
        k_cache: [rows, length, H, D], or with pages [pages, page_size, H, D].
        v_cache: the same with V in the place of D.
        k: [T, H, D], packed as `sequences.cu_q` says.
        v: [T, H, V].
        sequences: those of the step's attention: `used_k` counts the new tokens, which come last.
        rotary: cos and sin [positions, R], by which the first 2 R dimensions of k and q are rotated. A token's position
            is its place in the row, padding counted, or in the sequence's pages.
        interleaved: whether neighbours are rotated together, or dimension i with i + R.
        q: [T, query heads, D], to be rotated beside.

    Returns:
        Tensor: q rotated, or None without it.

    Raises:
        SequencesError: the caches, the new tokens and the sequences do not fit, or something requires a gradient.
        FlexTypeError: an argument has another type.

    Example:
        >>> k_cache, v_cache = torch.zeros(2, 8, 1, 4), torch.zeros(2, 8, 1, 4)
        >>> starts = torch.tensor([0, 1, 2], dtype=torch.int32)  # a new token each,
        >>> used = torch.tensor([3, 5], dtype=torch.int32)  # the third and the fifth
        >>> sequences = Sequences(starts, used_k=used)
        >>> new = torch.ones(2, 1, 4)
        >>> flex_inductor.append_kv(k_cache, v_cache, new, new, sequences)
        >>> k_cache[:, :, 0, 0]
        tensor([[0., 0., 1., 0., 0., 0., 0., 0.],
                [0., 0., 0., 0., 1., 0., 0., 0.]])
    """
    try:
        if not isinstance(sequences, Sequences):
            raise errors.not_sequences(sequences)
        check_append(k_cache, v_cache, k, v, sequences, rotary, q)
        for name, tensor in (("k", k), ("v", v), ("q", q)):
            if tensor is not None and tensor.size(0) < sequences.total_q:
                raise errors.too_few_tokens(name, tensor.size(0), sequences.total_q)
        if q is not None and rotary is None:
            raise errors.without_rotary()
    except FlexError as error:
        refused(error)
    assert sequences.used_k is not None
    turned = write(
        k_cache, v_cache, k, v, sequences, sequences.cu_q, sequences.used_q, sequences.used_k, rotary,
        interleaved, q,
    )  # fmt: skip
    return None if q is None else turned


def write(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences,
    starts: Tensor,
    counts: Tensor | None,
    ends: Tensor,
    rotary: Rotary | None,
    interleaved: bool,
    q: Tensor | None,
    q_starts: Tensor | None = None,
    q_moves: bool = True,
) -> Tensor:
    """`append_kv` for tokens that begin at `starts`, with places that end at `ends`; returns q rotated.

    The queries begin at `q_starts`, and without `q_moves` all of them have the position of the first new token.
    """
    cos, sin = (None, None) if rotary is None else rotary
    return torch.ops.flex_inductor.append_kv.default(
        k_cache, v_cache, k, v, q, cos, sin, starts, q_starts, counts, ends, sequences.left_pad_k,
        sequences.cache_rows, sequences.pages, interleaved, q_moves,
    )  # fmt: skip


def check_append(
    k_cache: Any, v_cache: Any, k: Any, v: Any, sequences: Sequences, rotary: Any, q: Any
) -> None:
    """Checks everything but values and numbers of tokens."""
    if sequences.cu_k is not None:
        raise errors.append_to_packed()
    for name, tensor in (("k", k), ("v", v), ("q", q)):
        if (name != "q" or tensor is not None) and (not isinstance(tensor, Tensor) or tensor.dim() != 3):
            raise errors.not_new_tokens(name, tensor)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if not isinstance(cache, Tensor) or cache.dim() != 4:
            raise errors.not_a_cache(name, cache, sequences.pages is not None)
    if k_cache.shape[:3] != v_cache.shape[:3]:
        raise errors.caches_differ(k_cache, v_cache)
    for name, tensor, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if tensor.shape[1:] != cache.shape[2:] or tensor.dtype != cache.dtype:
            raise errors.not_as_the_cache(name, tensor, cache)
    if v.size(0) != k.size(0):
        raise errors.new_tokens_differ(k, v)
    given = {"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "q": q}
    for name, tensor in given.items():
        if tensor is not None and tensor.device != sequences.device:
            raise errors.other_device(name, tensor.device, sequences.device)
        if torch.is_grad_enabled() and tensor is not None and tensor.requires_grad:
            raise errors.append_needs_grad(name)
    sequences.check_cache("k_cache", *k_cache.shape[:2])
    if rotary is not None:
        check_rotary(rotary, k, q, sequences)


def check_rotary(rotary: Any, k: Tensor, q: Tensor | None, sequences: Sequences) -> None:
    if not isinstance(rotary, tuple | list) or len(rotary) != 2 or not all(map(_is_table, rotary)):
        raise errors.bad_rotary(rotary)
    cos, sin = rotary
    if cos.shape != sin.shape or cos.dtype != sin.dtype:
        raise errors.rotary_differ(cos, sin)
    if cos.device != sequences.device:
        raise errors.other_device("rotary", cos.device, sequences.device)
    if 2 * cos.size(1) > k.size(2):
        raise errors.rotary_too_wide(cos.size(1), k.size(2))
    if cos.size(0) < max(sequences.max_k, 1):
        raise errors.rotary_too_short(cos.size(0), sequences.max_k)
    if q is not None and q.size(2) != k.size(2):
        raise errors.not_as_k(q, k)


def verify_appends(module: fx.GraphModule) -> None:
    """Make a graph's appends check values first."""
    for node in module.graph.nodes:
        if node.target is torch.ops.flex_inductor.append_kv.default:
            node.target = torch.ops.flex_inductor.verified_append_kv.default


def check_values(
    k_cache: Tensor, ends: Tensor, pads: Tensor | None, rows: Tensor | None, pages: Tensor | None
) -> None:
    """Reads them on the host."""
    batches, length = k_cache.shape[:2]
    room = length if pages is None else length * pages.size(1)
    for at in ((ends < 0) | (ends > room)).nonzero().flatten().tolist():
        raise errors.used_beyond_room("used_k", at, int(ends[at]), room)
    if pads is not None:
        for at in ((pads < 0) | (pads > ends)).nonzero().flatten().tolist():
            raise errors.left_pad_beyond(at, int(pads[at]), int(ends[at]))
    if rows is not None or (pages is None and ends.numel() > batches):
        found = torch.arange(ends.numel()) if rows is None else rows
        for at in ((found < 0) | (found >= batches)).nonzero().flatten().tolist():
            raise errors.row_beyond(at, int(found[at]), batches)
    if pages is not None:
        needed = torch.arange(pages.size(1), device=ends.device) * length < ends[:, None]
        for at, place in (((pages < 0) | (pages >= batches)) & needed).nonzero().tolist():
            raise errors.page_beyond(at, place, int(pages[at, place]), batches)


def _is_table(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2 and value.is_floating_point()


_ARGUMENTS = (
    "(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor? q, Tensor? cos, Tensor? sin, Tensor starts, "
    "Tensor? q_starts, Tensor? counts, Tensor ends, Tensor? pads, Tensor? rows, Tensor? pages, bool interleaved, "
    "bool q_moves) -> Tensor"
)


def _with_torch(
    k_cache,
    v_cache,
    k,
    v,
    q,
    cos,
    sin,
    starts,
    q_starts,
    counts,
    ends,
    pads,
    rows,
    pages,
    interleaved,
    q_moves,
):
    if starts.numel() == 1:
        return k.new_empty(0) if q is None else q.clone()
    lengths = starts.diff() if counts is None else torch.minimum(starts.diff(), counts)
    lengths = lengths.long().clamp_(min=0)
    first = ends - lengths
    sequence, within, there = _places(starts, k.size(0))
    position = first[sequence] + within
    room = k_cache.size(1) * (1 if pages is None else pages.size(1))
    least = 0 if pads is None else pads.clamp(min=0)[sequence]
    there &= (within >= 0) & (within < lengths[sequence]) & (position >= least) & (position < room)
    if not there.all():
        sequence, position, k, v = (x[there] for x in (sequence, position, k, v))
    row, place = _in_cache(sequence, position, k_cache.size(1), rows, pages)
    there = (row >= 0) & (row < k_cache.size(0))
    if not there.all():
        row, place, position, k, v = (x[there] for x in (row, place, position, k, v))
    k_cache[row, place] = k if cos is None else _rotated(k, cos, sin, position, interleaved)
    v_cache[row, place] = v
    if q is None:
        return k.new_empty(0)
    sequence, within, _ = _places(starts if q_starts is None else q_starts, q.size(0))
    position = first[sequence] + within if q_moves else first[sequence]
    return _rotated(q, cos, sin, position.clamp_(min=0), interleaved)


@functools.cache
def _on_cuda():
    try:
        from .append_kernel import launch
    except ImportError:  # on Windows torch brings no Triton
        return _with_torch
    return launch


def _with_triton(*args):
    return _on_cuda()(*args)


def _verified(k_cache, v_cache, *rest):
    ends, pads, rows, pages = rest[8:12]
    check_values(k_cache, ends, pads, rows, pages)
    return torch.ops.flex_inductor.append_kv.default(k_cache, v_cache, *rest)


def _fake(k_cache, v_cache, k, v, q, *_):
    return k.new_empty(0) if q is None else q.new_empty(q.shape)


def _noting_the_change(op, keys, k_cache, v_cache, *rest):
    """Count the caches' versions up, so that autograd notices if it saved one."""
    torch.autograd.graph.increment_version((k_cache, v_cache))
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return op.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, k_cache, v_cache, *rest)


define("append_kv", _ARGUMENTS, _with_torch, _fake, tags=())
LIBRARY.impl("append_kv", _with_triton, "CUDA")
define("verified_append_kv", _ARGUMENTS, _verified, _fake)
for _name in ("append_kv", "verified_append_kv"):
    _op = getattr(torch.ops.flex_inductor, _name).default
    LIBRARY.impl(_name, functools.partial(_noting_the_change, _op), "ADInplaceOrView", with_keyset=True)


def _places(starts: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Each token's sequence, its number there, and whether any sequence reaches that far."""
    at = torch.arange(tokens, device=starts.device)
    sequence = torch.searchsorted(starts[1:], at, right=True)
    last = starts.numel() - 2
    there = sequence <= last
    sequence = sequence.clamp_(max=last)
    return sequence, at - starts[sequence], there


def _in_cache(
    sequence: Tensor, position: Tensor, length: int, rows: Tensor | None, pages: Tensor | None
) -> tuple[Tensor, Tensor]:
    if pages is not None:
        return pages[sequence, position // length].long(), position % length
    return (sequence if rows is None else rows[sequence].long()), position


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, position: Tensor, interleaved: bool) -> Tensor:
    position = position.clamp(max=cos.size(0) - 1)
    wide, pairs = torch.float64 if x.dtype == torch.float64 else torch.float32, cos.size(1)
    cos, sin = (table[position].to(wide)[:, None] for table in (cos, sin))
    own = x[..., : 2 * pairs].to(wide)
    if interleaved:
        product = torch.view_as_complex(own.unflatten(-1, (-1, 2)).contiguous()) * torch.complex(cos, sin)
        turned = torch.view_as_real(product).flatten(-2)
    else:
        a, b = own[..., :pairs], own[..., pairs:]
        turned = torch.empty(own.shape, dtype=wide, device=x.device)
        torch.mul(a, cos, out=turned[..., :pairs]).addcmul_(b, sin, value=-1)
        torch.mul(b, cos, out=turned[..., pairs:]).addcmul_(a, sin)
    turned = turned.to(x.dtype)
    return turned if 2 * pairs == x.size(-1) else torch.cat([turned, x[..., 2 * pairs :]], -1)
