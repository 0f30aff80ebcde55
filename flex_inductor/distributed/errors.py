"""The errors about context parallelism."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..errors import FlexNotImplementedError, FlexRuntimeError, FlexTypeError, FlexValueError


class ContextParallelError(FlexValueError):
    """An argument of context parallelism has a value that cannot be served.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> try:
        ...     flex_inductor.context_parallel(dist.group.WORLD, method="broadcast")
        ... except flex_inductor.FlexError as error:
        ...     print(error)
        method: expected one of auto, cast, all_gather, ulysses, ring, ring_ulysses, got 'broadcast'.
        >>> dist.destroy_process_group()
    """


def unknown(name: str, value: Any, known: Iterable[str]) -> ContextParallelError:
    return ContextParallelError(f"{name}: expected one of {', '.join(known)}, got {value!r}.")


def not_a_group(value: Any) -> FlexTypeError:
    if isinstance(value, int) and value == dist.GroupMember.NON_GROUP_MEMBER:
        return FlexTypeError(
            f"context_parallel: got {value}, which torch gives for a group that this process is not in. Call it on the "
            "group's ranks alone."
        )
    return FlexTypeError(
        "context_parallel: expected a DeviceMesh of one or two dimensions or a process group, got "
        f'{_described(value)}. Pass the dimension of a larger mesh, mesh["cp"].'
    )


def mesh_without_names() -> ContextParallelError:
    return ContextParallelError(
        "context_parallel: the dimensions of the mesh have no names, and torch joins only dimensions with names. "
        'Pass mesh_dim_names=("ring", "heads") where the mesh is made.'
    )


def mesh_order(ranks: Tensor) -> ContextParallelError:
    return ContextParallelError(
        f'context_parallel: method "ring_ulysses": the mesh is {ranks.tolist()}; expected ranks that ascend along '
        "both dimensions, as torch numbers those of a group. Sort them where the mesh is made."
    )


def bad_placement(name: str, placements: Any, mesh: Any) -> ContextParallelError:
    return ContextParallelError(
        f"{name}: a DTensor with placements {tuple(placements)} on {mesh}; expected Shard(2), the sequence, on "
        "the plan's mesh dimension, and Shard(0), Shard(1) or Replicate() on others, the same for query, key and "
        f"value. Redistribute it, or pass {name}.to_local()."
    )


def capture_placement(placements: Any) -> ContextParallelError:
    return ContextParallelError(
        f"score_mod: looks up a DTensor with placements {tuple(placements)}; expected Replicate() or Shard on the "
        "plan's mesh dimension. Redistribute it to Replicate()."
    )


def capture_length(got: int, expected: int, rank: int) -> ContextParallelError:
    return ContextParallelError(
        f"score_mod: looks up a DTensor that is sharded along the plan's mesh dimension, with {got} entries on rank "
        f"{rank}; expected {expected}, those of its tokens. Shard it with the shard() of the plan's layout, or "
        "redistribute it to Replicate()."
    )


def sharded_parameter(placements: Any) -> ContextParallelError:
    return ContextParallelError(
        f"score_mod: looks up a parameter with placements {tuple(placements)}, which torch cuts into consecutive "
        "chunks; the plan gives this rank other tokens. Redistribute it to Replicate() before the call, or make it "
        "Replicate()."
    )


def unlike_placements(name: str, placements: Any, query: Any) -> FlexValueError:
    return FlexValueError(
        f"{name}: a DTensor with placements {tuple(placements)}, or on another mesh; expected query's, {tuple(query)}. "
        "Redistribute it."
    )


def unserved_placement(name: str, placements: Any) -> FlexValueError:
    return FlexValueError(
        f"{name}: a DTensor with placements {tuple(placements)}; expected Shard(0), batches, Shard(1), heads, or "
        "Replicate(). Redistribute it. For a sequence that is spread over ranks use flex_inductor.context_parallel."
    )


def parts_do_not_match(name: str, what: str, size: int, of_query: int, ranks: int) -> FlexValueError:
    return FlexValueError(
        f"{name}: {size} {what} in {ranks} parts, beside query's {of_query}; expected a number that {ranks} divides, "
        f"so that each rank has the {what} that its queries read. Redistribute all three, or repeat those of {name}."
    )


def dropout_of_dtensors(placements: Any) -> FlexValueError:
    return FlexValueError(
        f"dropout_p: queries are DTensors with placements {tuple(placements)}; expected rng_state beside it, the same "
        "on every rank, and batches that are whole. Pass rng_state, and Shard(1) or Replicate() alone."
    )


def not_a_dtensor(name: str) -> FlexTypeError:
    return FlexTypeError(
        f"{name}: expected a DTensor like the others of query, key and value, got a plain tensor. "
        "Pass all three as DTensors, or their to_local()."
    )


def heads_under_tp(heads: int) -> ContextParallelError:
    return ContextParallelError(
        f"block_mask: planned for {heads} heads, but tensor parallelism leaves this rank only some of them. "
        "Plan a mask that is the same for all heads, or plan those of this rank."
    )


def local_capture(length: int, local: int) -> ContextParallelError:
    return ContextParallelError(
        "a mod looked up a captured tensor beyond its end. Mods see indices of the whole sequence, "
        f"{length} tokens, of which this rank has {local}: captures need the length of the whole. "
        "Do not shard what mods look up."
    )


def needs_two_dimensions() -> ContextParallelError:
    return ContextParallelError(
        'context_parallel: method "ring_ulysses": expected a DeviceMesh of two dimensions, the ring and the ranks that '
        'share heads. Pass one, or method="ring".'
    )


def no_plan(what: str) -> ContextParallelError:
    return ContextParallelError(
        f"{what}: nothing is planned yet, so no layout is known. Call plan first, or pass layout=."
    )


def wrong_length(name: str, length: Any, dim: int, expected: int) -> ContextParallelError:
    return ContextParallelError(
        f"{name}: expected {expected} in dimension {dim}, the whole sequence, got {length}."
    )


def wrong_local_length(name: str, got: Any, expected: Any, rank: int, length: int) -> ContextParallelError:
    return ContextParallelError(
        f"{name}: the mask was planned for a sequence of {length}, of which rank {rank} has {expected}, but {name} has "
        f"length {got}. Shard the model's inputs with the shard() of the plan's layout."
    )


def other_ranks(planned: tuple[int, int], here: tuple[int, int]) -> ContextParallelError:
    return ContextParallelError(
        f"block_mask was planned for rank {planned[0]} of {planned[1]}, but this is rank {here[0]} of {here[1]}. "
        "Each rank plans with its own context_parallel object, of the same mesh."
    )


def batch(name: str, planned: int, got: Any) -> ContextParallelError:
    return ContextParallelError(f"block_mask was planned for {planned} {name}, but query has {got}.")


def heads_do_not_divide(heads: Any, ranks: int) -> ContextParallelError:
    return ContextParallelError(
        f"ulysses: query has {heads} heads, which {ranks} ranks cannot share alike. Use a number of ranks that divides "
        f'{heads}, or method="cast", which does not divide heads.'
    )


def attention_mask() -> ContextParallelError:
    return ContextParallelError(
        "scaled_dot_product_attention: attn_mask: got a tensor inside of `with context_parallel(...)`, where it would "
        "be this rank's part alone. Write it as a mask_mod or score_mod and call flex_attention with a planned mask."
    )


def checkpointed() -> ContextParallelError:
    return ContextParallelError(
        "scaled_dot_product_attention: called by torch.utils.checkpoint inside of `with context_parallel(...)`. The "
        "recomputation in the backward would be outside of it. Enter `with cp:` in the checkpointed function, or call "
        "flex_attention with a planned mask."
    )


def flex_of_torch() -> ContextParallelError:
    return ContextParallelError(
        "torch's flex_attention was called inside of `with context_parallel(...)`, where it would attend to this "
        "rank's part alone. Call flex_inductor.flex_attention with a planned mask."
    )


def weights_of_heads() -> ContextParallelError:
    return ContextParallelError(
        "multi_head_attention_forward: need_weights: got True inside of `with context_parallel(...)`, where weights "
        "would be of this rank's part alone. Pass need_weights=False."
    )


def other_group(group: str) -> ContextParallelError:
    return ContextParallelError(
        f"block_mask was planned for the process group {group!r}, which this process does not have. "
        "Plan with a context_parallel object of this run's mesh."
    )


def ranks_differ(what: str, found: list[Any]) -> FlexRuntimeError:
    listed = ", ".join(f"rank {rank} {value}" for rank, value in enumerate(found))
    return FlexRuntimeError(
        f"context_parallel: ranks call with different {what}: {listed}. "
        "All ranks must make the same calls, with masks that are planned from the same mask and for the same method."
    )


def peer_gone(group: str) -> FlexRuntimeError:
    return FlexRuntimeError(
        f"context_parallel: an exchange in the process group {group!r} failed: a rank is gone, or makes other calls "
        "than this one. The error of torch.distributed is above."
    )


def bad_positions(name: str, value: Any, batch: Any, length: Any) -> ContextParallelError:
    what = f"{_described(value)} of {value.dtype}" if isinstance(value, Tensor) else _described(value)
    return ContextParallelError(
        f"decode: {name}: expected whole numbers of shape [{length}] or [{batch}, {length}], got {what}."
    )


def no_gradient(what: str, given: str) -> FlexNotImplementedError:
    return FlexNotImplementedError(
        f"{what}: has no gradient, but {given} requires one. Call it under torch.no_grad()."
    )


def other_lse(lse: Tensor, out: Tensor) -> ContextParallelError:
    return ContextParallelError(
        f"merge: lse: expected shape {list(out.shape[:-1])}, that of out without its last dimension, got "
        f"{list(lse.shape)}. Transpose it."
    )


def other_count(name: str, count: int, expected: int) -> ContextParallelError:
    return ContextParallelError(f"{name}: expected one for each of {expected}, got {count}.")


def shared_storage(index: int) -> ContextParallelError:
    return ContextParallelError(
        f"sharded_buffers: buffers[{index}]: shares its memory with another tensor, which sharding in place would "
        "overwrite. Pass each buffer once, and buffers that are no views: clone them."
    )


def other_form(name: str, given: Iterable[str], expected: Iterable[str]) -> ContextParallelError:
    """Of places such as "['causal']"; that of a single one is empty."""
    places, wanted = (
        ", ".join(place or "a single one" for place in of) or "none" for of in (given, expected)
    )
    return ContextParallelError(f"{name}: expected {wanted}, got {places}.")


def no_masks() -> ContextParallelError:
    return ContextParallelError(
        "masks: expected at least one mask, got an empty mapping. Pass {'full': None} for no mask."
    )


def not_a_mask(name: str, value: Any) -> FlexTypeError:
    return FlexTypeError(
        f"{name}: expected a BlockMask, a RunSchedule, Sequences, a mask_mod or None, got {_described(value)}. "
        "Make one with create_block_mask(mask_mod, B, H, length, length)."
    )


def no_length(name: str) -> ContextParallelError:
    return ContextParallelError(
        f"{name}: a mask_mod or None does not say how long the sequence is. Pass length=, of all ranks together."
    )


def bad_tile(tile: Any, least: int) -> ContextParallelError:
    return ContextParallelError(f"tile: expected a multiple of {least}, of all block sizes, got {tile!r}.")


def other_weights(given: Any, names: Sequence[str]) -> ContextParallelError:
    return ContextParallelError(
        f"weights: expected one for each mask ({', '.join(names)}), got {given!r}. Leave it out for 1 each."
    )


def bad_weight(name: str, value: Any) -> ContextParallelError:
    return ContextParallelError(
        f"weights: {name}: expected a number above 0, such as how many layers use the mask, got {value!r}."
    )


def not_packed(name: str) -> ContextParallelError:
    return ContextParallelError(
        f"{name}: expected sequences whose queries and keys are packed alike, got ones with keys elsewhere or "
        "tokens left out. Pass Sequences(cu_q), with nothing else."
    )


def bad_ranks(value: Any) -> ContextParallelError:
    return ContextParallelError(f"ranks: expected an integer of at least 1, got {value!r}.")


def unknown_balance(value: Any, known: Iterable[str]) -> ContextParallelError:
    return ContextParallelError(
        f"balance: expected one of {', '.join(known)}, a function (work, ranks) -> owners, or one of torch's load "
        f"balancers, got {value!r}."
    )


def bad_owners(name: str, what: str, tiles: int, ranks: int) -> ContextParallelError:
    return ContextParallelError(
        f"balance {name}: expected a rank from 0 to {ranks - 1} for each of {tiles} tiles, got {what}."
    )


def splits_tiles(name: str, tile: int, one: int, other: int) -> ContextParallelError:
    return ContextParallelError(
        f"balance {name}: its order of tokens gives tokens of one tile of {tile} to several ranks, such as {one} and "
        f"{other}. Use lengths that divide by 2 * ranks * {tile}, smaller blocks, or balance='head_tail' or "
        "'documents', which cut between tiles."
    )


def other_order(name: str, what: str, expected: int) -> ContextParallelError:
    return ContextParallelError(
        f"balance {name}: expected one order of {expected} tokens, the same for all batches, got {what}. "
        "A layout is one for all batches and heads: plan batches that differ by themselves."
    )


def other_length(name: str, queries: int, keys: int, expected: int) -> ContextParallelError:
    return ContextParallelError(
        f"{name}: expected {expected} queries and keys, one length for all masks, got {queries} x {keys}. "
        "Plan sequences of other lengths by themselves."
    )


def planned_twice(name: str) -> FlexTypeError:
    return FlexTypeError(f"{name} is planned already. Plan the mask that it was made from.")


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"{type(value).__name__} {value!r}"[:120]
