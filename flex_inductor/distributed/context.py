"""context_parallel: one sequence over several ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask, noop_mask
from torch.utils import _pytree as pytree

from .. import compat, upward
from ..masks import RunSchedule, causal, create_block_mask
from ..masks.ordinary import ordinary_tensors
from ..masks.planned import enter, leave
from ..sequences import SequenceMask, Sequences
from ..softmax import Softmax
from . import errors
from .balance import BALANCERS, owners
from .cost import METHODS, CostModel, MethodChoice, choose_method
from .decode import decode, merge
from .exchange import unshard
from .layout import Layout
from .methods import CpGroup, Groups, PlannedMask, plan_mask
from .serving import Serving
from .work import TileWork, schedule_of

BLOCK = 128


class ContextParallel:
    """Plans the masks of a model for several ranks, before the tensors are sharded. Made by `context_parallel`.

    As a context manager it refuses calls of this thread without a planned mask, and serves
    `torch.nn.functional.scaled_dot_product_attention`.

    Args:
        group: the process group of all ranks.
        method: of `context_parallel`.
        balance: of `context_parallel`.
        mesh: of two dimensions, for "ring_ulysses".

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> cp = flex_inductor.context_parallel(dist.group.WORLD)
        >>> both = {"local": masks.sliding_window(64), "global": masks.causal()}
        >>> planned = cp.plan(both, length=256)
        >>> tokens = torch.arange(256)[None]
        >>> cp.shard(tokens, dims=1).shape, cp.next_tokens(tokens)[0, -3:].tolist()
        (torch.Size([1, 256]), [254, 255, -100])
        >>> query = cp.shard(torch.randn(1, 2, 256, 16), dims=2)
        >>> out = flex_attention(query, query, query, block_mask=planned["local"])
        >>> cp.unshard(out, dim=2).shape
        torch.Size([1, 2, 256, 16])
        >>> from torch.nn.functional import scaled_dot_product_attention
        >>> with cp:
        ...     dense = scaled_dot_product_attention(query, query, query, is_causal=True)
        >>> step = torch.randn(1, 2, 1, 16)
        >>> places = {"positions": torch.arange(256), "at": torch.tensor([255])}
        >>> cp.decode(step, query, query, **places).shape
        torch.Size([1, 2, 1, 16])
        >>> out, lse = flex_attention(step, query, query, return_lse=True)
        >>> [part.shape for part in cp.merge(out, lse)]
        [torch.Size([1, 2, 1, 16]), torch.Size([1, 2, 1])]
        >>> dist.destroy_process_group()
    """

    def __init__(self, group: dist.ProcessGroup, method: str, balance: Any, mesh: DeviceMesh | None = None):
        self.groups = Groups(group.group_name) if mesh is None else _groups(mesh, group, method)
        self.group, self.rank, self.ranks = group.group_name, dist.get_rank(group), dist.get_world_size(group)
        self.method, self.balance = method, balance
        self.layout: Layout | None = None
        self.choice: MethodChoice | None = None  # of the last plan
        self.device: torch.device | str | None = None
        self.dense: dict[bool, Any] = {}  # masks of scaled_dot_product_attention: causal, and not
        self.dense_layout: Layout | None = None
        self._begin()

    def _begin(self) -> None:
        """Set what belongs to this object alone, and not to copies of it."""
        # Compiled code guards on the masks, which further plans replace. An argument would have to be a constant.
        self._have_dense = compat.run_while_traced(lambda: _make_dense(self))
        self._modes: list[Serving] = []

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_have_dense", "_modes")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    @ordinary_tensors
    def plan(
        self,
        masks: Any,
        length: int | None = None,
        *,
        batch: int | None = None,
        heads: int | None = None,
        weights: Any = None,
        block: int = BLOCK,
        model: CostModel | None = None,
        device: torch.device | str | None = None,
    ) -> Any:
        """Make this rank's parts of masks, under one layout.

        Args:
            masks: a BlockMask, a RunSchedule, Sequences, a mask_mod or None for no mask; or a dict, list or tuple of
                these.
            length: of the whole sequence, if no mask has it.
            batch: the number of batches that mask_mods tell apart.
            heads: the number of heads that mask_mods tell apart.
            weights: in the form of `masks`, how many layers use each; 1 by default.
            block: tokens of a tile, for masks that are made here.
            model: the sizes of the model, by which method "auto" and the balancers weigh bytes and work.
            device: of the tensors; that of the masks by default.

        Returns:
            PlannedMask: for the block_mask of flex_attention, in the form of `masks`.

        Raises:
            ContextParallelError: masks differ in length, none has one, or the method or balance cannot serve them.
            FlexTypeError: one is no mask.
        """
        paths, spec = pytree.tree_flatten_with_path(masks, is_leaf=_is_mask)
        found = {
            name: schedule_of(name, mask, length, batch, heads, block, device)
            for name, mask in ((f"masks{pytree.keystr(path)}", mask) for path, mask in paths)
        }
        counts = [1] * len(found) if weights is None else _in_form("plan: weights", weights, masks)
        work = TileWork.of(found, length, weights=dict(zip(found, counts, strict=True)))
        owner = owners(
            self.balance, work, self.ranks, model, "cast" if self.method == "auto" else self.method
        )
        self.layout = layout = Layout(work.length, work.tile, self.ranks, owner)
        node = None if self.groups.heads is None else self.groups.heads.size
        self.choice = choose_method(work, owner, self.ranks, model, asked=self.method, node=node)
        upward.record_plan(self.choice)
        planned = [self._planned(self.choice.chosen, mask, layout) for mask in found.values()]
        for mask in planned:
            mask.choice = self.choice
        self.device = next(iter(found.values())).device
        if self.dense:
            self._have_dense()
        return pytree.tree_unflatten(planned, spec)

    def shard(self, tensors: Any, dims: Any, layout: Layout | PlannedMask | None = None) -> Any:
        """Take this rank's parts of tensors.

        Args:
            tensors: with the whole sequence; one, or a dict, list or tuple.
            dims: the dimension of the sequence in each, or in all.
            layout: that of the last plan made here by default, or a mask that was planned in another process.

        Returns:
            Tensor: in the form of `tensors`.

        Raises:
            ContextParallelError: nothing is planned, or a tensor has another length.
        """
        own = self._layout("shard", layout)
        leaves, spec = pytree.tree_flatten(tensors)
        given = [dims] * len(leaves) if isinstance(dims, int) else _in_form("shard: dims", dims, tensors)
        positions = own.positions(self.rank)
        parts = []
        for i, (tensor, dim) in enumerate(zip(leaves, given, strict=True)):
            if tensor.size(dim) != own.length:
                raise errors.wrong_length(f"shard: tensor {i}", tensor.size(dim), dim, own.length)
            parts.append(tensor.index_select(dim, positions.to(tensor.device)))
        return pytree.tree_unflatten(parts, spec)

    def unshard(
        self, tensor: Tensor, dim: int, layout: Layout | PlannedMask | None = None, *, partial: bool = False
    ) -> Tensor:
        """Give the whole sequence, on every rank.

        Every rank is expected to compute the same loss, hence the same gradient: a rank keeps its own part of it.

        Args:
            tensor: this rank's part.
            dim: the dimension of the sequence.
            layout: as in `shard`.
            partial: each rank has a part of the gradient, as for tensors that a mod looks up: the backward sums the
                parts of all ranks.

        Raises:
            ContextParallelError: nothing is planned, or the tensor has another length.
        """
        own = self._layout("unshard", layout)
        expected = own.lengths[self.rank]
        if tensor.size(dim) != expected:
            raise errors.wrong_local_length(
                "unshard: tensor", tensor.size(dim), expected, self.rank, own.length
            )
        return unshard(tensor, dim, own, self.rank, self.group, partial)

    def next_tokens(self, tokens: Tensor, dim: int = -1, ignore: int = -100) -> Tensor:
        """Give the labels of this rank's tokens: the token after each.

        Shift before sharding, never after: a rank's next token may be on another rank. A mean over all labels is the
        sum of the ranks' sums over the number of labels of all ranks that are not `ignore`.

        Args:
            tokens: integer tensor with the whole sequence.
            dim: the dimension of the sequence.
            ignore: the label after the last token.

        Raises:
            ContextParallelError: nothing is planned, or `tokens` has another length.
        """
        length = self._layout("next_tokens", None).length
        if tokens.size(dim) != length:
            raise errors.wrong_length("next_tokens: tokens", tokens.size(dim), dim, length)
        after = tokens.roll(-1, dim)
        after.select(dim, -1).fill_(ignore)
        return self.shard(after, dim)

    def decode(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Any = None,
        mask_mod: Any = None,
        *,
        positions: Tensor,
        at: Tensor,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        sinks: Tensor | None = None,
    ) -> Any:
        """Attend with queries that all ranks have to keys that are spread over the ranks. All get the whole result.

        Needs no plan. Each rank sends the others its own result, one row for each query and head.

        Args:
            query: [B, H, M, D], the same on all ranks.
            key, value: [B, K, N, D] of this rank's cache; N may differ between ranks, or be 0.
            score_mod, mask_mod: of the whole sequence, as one process has them.
            positions: int32 or int64 [N] or [B, N], where each key is in the whole sequence; below 0 there is none.
            at: [M] or [B, M], where each query is.
            scale, enable_gqa, return_lse, sinks: as in flex_attention; sinks count once for all ranks.

        Returns:
            Tensor: [B, H, M, V], or with `return_lse` (out, logsumexp [B, H, M]).

        Raises:
            ContextParallelError: `positions` or `at` has another form.
            FlexNotImplementedError: a tensor requires a gradient.
        """
        rest = (positions, at, scale, enable_gqa, self.ranks, self.group, Softmax(sinks))
        out, lse = decode(query, key, value, score_mod, mask_mod, *rest)
        return (out, lse) if return_lse else out

    def merge(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Merge results of attention to this rank's keys into that to all ranks' keys.

        For calls that `decode` does not make, such as varlen_attention over pages.

        Args:
            out: [..., V]. Pass both in fp32 to avoid a second rounding.
            lse: [...], the logsumexp.

        Returns:
            tuple: (out, logsumexp), the same on all ranks.

        Raises:
            ContextParallelError: the shapes do not fit.
            FlexNotImplementedError: a tensor requires a gradient.
        """
        if lse.shape != out.shape[:-1]:
            raise errors.other_lse(lse, out)
        if torch.is_grad_enabled() and (out.requires_grad or lse.requires_grad):
            raise errors.no_gradient("merge", "out or lse")
        return merge(out, lse, self.ranks, self.group)

    def _layout(self, what: str, given: Any) -> Layout:
        found = given.layout if isinstance(given, PlannedMask) else given
        found = self.layout if found is None else found
        if found is None:
            raise errors.no_plan(what)
        return found

    def __enter__(self) -> ContextParallel:
        """Calls of this thread without a planned mask raise; scaled_dot_product_attention is served."""
        self._have_dense()
        mode = Serving(self.dense)
        mode.__enter__()
        self._modes.append(mode)
        enter()
        return self

    def __exit__(self, *error: Any) -> None:
        mode = self._modes.pop()
        leave()
        mode.__exit__(*error)

    def _planned(self, method: str, mask: RunSchedule, layout: Layout) -> PlannedMask:
        return plan_mask(method, mask, layout, self.rank, self.groups).to(mask.device)


def _make_dense(cp: ContextParallel) -> None:
    """Have masks of the last plan's layout for scaled_dot_product_attention."""
    layout = cp._layout("with context_parallel(...)", None)
    if cp.dense_layout is layout:
        return
    method = "cast" if cp.method == "auto" else cp.method
    for is_causal, mask_mod in ((True, causal()), (False, noop_mask)):
        mask = create_block_mask(
            mask_mod, None, None, layout.length, layout.length, cp.device, layout.tile, compact=True
        )
        cp.dense[is_causal] = cp._planned(method, mask, layout)
    cp.dense_layout = layout


compat.compile_no_frame_of(_make_dense, calls=True)  # after a graph break


def context_parallel(group: Any, method: str = "auto", balance: Any = "auto") -> ContextParallel:
    """Spread one sequence over the ranks of `group`.

    Args:
        group: a DeviceMesh or a process group of the ranks that share each sequence; of a mesh of two dimensions, all
            of them.
        method: "cast" sends each rank the keys that it reads, "all_gather" all of them; "ring" sends them from rank to
            rank; "ulysses" shares out heads; "ring_ulysses" does so along the second dimension of a mesh, and is a ring
            along the first. "auto" chooses by the plan's work and bytes.
        balance: "auto", "contiguous", "head_tail", "documents", "work" or "work_and_bytes"; a function of the work and
            the number of ranks that gives the rank of each tile; or one of torch's load balancers.

    Returns:
        ContextParallel: plans masks and shards tensors.

    Raises:
        ContextParallelError: a method or a balance has no such name, or a mesh has no names or too few dimensions.
        FlexTypeError: `group` is neither a mesh nor a process group.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> cp = flex_inductor.context_parallel(dist.group.WORLD, method="ring")
        >>> mask = cp.plan(masks.causal(), length=512)
        >>> whole = torch.randn(1, 2, 512, 16)
        >>> query = cp.shard(whole, dims=2)
        >>> out = flex_attention(query, query, query, block_mask=mask)
        >>> cp.unshard(out, dim=2).shape
        torch.Size([1, 2, 512, 16])
        >>> dist.destroy_process_group()
    """
    mesh = group if isinstance(group, DeviceMesh) and group.ndim == 2 else None
    if mesh is not None and mesh.mesh_dim_names is None:
        raise errors.mesh_without_names()
    if isinstance(group, DeviceMesh) and group.ndim <= 2:
        group = (group if mesh is None else group._flatten()).get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise errors.not_a_group(group)
    if method not in ("auto", *METHODS):
        raise errors.unknown("method", method, ("auto", *METHODS))
    if isinstance(balance, str) and balance not in BALANCERS:
        raise errors.unknown_balance(balance, BALANCERS)
    if method == "ring_ulysses" and mesh is None:
        raise errors.needs_two_dimensions()
    return ContextParallel(group, method, balance, mesh)


def _groups(mesh: DeviceMesh, group: dist.ProcessGroup, method: str) -> Groups:
    """The groups of a mesh of two dimensions. torch numbers the ranks of each group in ascending order."""
    rows = mesh.mesh
    ring, heads = (rows.argsort(dim).argsort(dim) for dim in (0, 1))  # each rank's numbers in its groups
    if (ring != ring[:, :1]).any() or (heads != heads[:1]).any():
        if method == "ring_ulysses":
            raise errors.mesh_order(rows)
        return Groups(group.group_name)
    holders = ring.flatten()[rows.flatten().argsort()].tolist()
    return Groups(group.group_name, _group_of(mesh, 0), _group_of(mesh, 1), tuple(holders))


def _group_of(mesh: DeviceMesh, dim: int) -> CpGroup:
    group = mesh.get_group(dim)
    return CpGroup(group.group_name, dist.get_rank(group), mesh.size(dim))


def _in_form(name: str, given: Any, of: Any) -> list[Any]:
    """The leaves of `given`, in the order of those of `of`."""
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(of, is_leaf=_is_mask)[0]]
    found = {pytree.keystr(path): leaf for path, leaf in pytree.tree_flatten_with_path(given)[0]}
    if found.keys() != set(paths):
        raise errors.other_form(name, found, paths)
    return [found[path] for path in paths]


def _is_mask(value: Any) -> bool:
    return value is None or isinstance(
        value, BlockMask | RunSchedule | PlannedMask | Sequences | SequenceMask
    )
