"""FlexInductorConverter: a torchtitan model whose FlexAttention runs here.

Importing this changes two things of torchtitan. Selective activation checkpointing saves this project's attention too.
And context parallelism of models that were converted is this project's: masks are planned, and each rank is sent the
keys that it reads. Other models keep torchtitan's.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from importlib.metadata import version
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..attention import flex_attention
from ..distributed.context import context_parallel
from ..op import attention
from ..softmax import AuxRequest
from . import check_version, errors

try:
    import spmd_types as spmd
    import torchtitan.distributed.activation_checkpoint as checkpointing
    import torchtitan.distributed.context_parallel as titan_cp
    from spmd_types.runtime import get_partition_spec
    from torchtitan.distributed.compile import maybe_regional_inductor
    from torchtitan.distributed.parallel_dims import ParallelDims
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.protocols.model import ModelConfigConverter
    from torchtitan.protocols.module import Module
except ImportError as error:
    raise errors.missing("torchtitan", "0.3", error) from error

__all__ = ["FlexInductorAttention", "FlexInductorConverter"]

TESTED = "0.3"
SERVED = "_flex_inductor_cp"  # of a mesh: the ContextParallel of the model that is spread over it
BALANCERS = {None: "contiguous", "headtail": "head_tail", "ptrr": "work"}  # torchtitan's names


class FlexInductorAttention(FlexAttention):
    """Attend in place of torchtitan's FlexAttention, with the same layouts. `FlexInductorConverter` puts it there.

    Args:
        config: of torchtitan's module, and `cp_method`, the `method` of flex_inductor.context_parallel.

    Example:
        >>> from flex_inductor.integrations.torchtitan import FlexInductorAttention
        >>> attend = FlexInductorAttention(FlexInductorAttention.Config())
        >>> query = torch.randn(1, 64, 2, 16)
        >>> mask = create_block_mask(masks.causal(), None, None, 64, 64)
        >>> attend.forward(query, query, query, attention_masks=mask).shape
        torch.Size([1, 64, 2, 16])
        >>> from torchtitan.distributed.parallel_dims import ParallelDims
        >>> ones = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep"), 1)
        >>> alone = ParallelDims(**ones, world_size=1)
        >>> attend.parallelize(alone)  # torchtitan calls it on each process
    """

    _sharding_config: Any

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        cp_method: str = "auto"  # of context_parallel

    # Saved by name where a block is checkpointed, as torchtitan's own.
    options: ClassVar[dict[str, Any]] = {"wrap_inductor_compiled_regions": True}
    compiled: ClassVar[Callable] = torch.compile(flex_attention, backend="flex_inductor", options=options)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.cp_method = config.cp_method

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        """Keep keys where they are: each call brings those that it reads.

        Args:
            parallel_dims: of torchtitan.
        """
        if parallel_dims.cp_enabled:
            serve(parallel_dims.get_mesh("cp"), self.cp_method)
            if (sharding := self._sharding_config) is not None and sharding.local_map is not None:
                own = sharding.in_src_shardings
                kept = replace(sharding.local_map, in_grad_placements=tuple(own.values()))
                self._sharding_config = replace(sharding, in_dst_shardings=own, local_map=kept)
        super().parallelize(parallel_dims)

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Any,
        score_mod: Callable | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Attend in one layer.

        Args:
            q_BLNH: [B, L, N, H], batch, length, heads and head_dim.
            k_BLNH: the same; fewer heads, dividing N, with `enable_gqa`.
            v_BLNH: the same as k.
            attention_masks: a BlockMask, or one that context_parallel has planned.
            score_mod: as in flex_attention.
            scale: as in flex_attention.
            enable_gqa: as in flex_attention.
            out_transform: a function of the output and the logsumexp [B, L, N] that gives the output.
            kwargs: others that torchtitan passes; they have no effect.

        Returns:
            Tensor: [B, L, N, H].
        """
        query, key, value = (side.transpose(1, 2) for side in (q_BLNH, k_BLNH, v_BLNH))
        with maybe_regional_inductor(self.options), spmd.no_typecheck():
            out, aux = FlexInductorAttention.compiled(
                query,
                key,
                value,
                score_mod,
                attention_masks,
                scale,
                enable_gqa,
                kernel_options=self.kernel_options,
                return_aux=AuxRequest(lse=out_transform is not None),
            )
        if spmd.is_type_checking():
            _type_like(query, out, aux.lse)
        out = out.transpose(1, 2)
        return out if out_transform is None else out_transform(out, aux.lse.transpose(1, 2))


def _type_like(query: Tensor, out: Tensor, lse: Tensor | None) -> None:
    """Results are sharded as queries are."""
    kind, parts = spmd.get_local_type(query), get_partition_spec(query)
    spmd.assert_type(out, kind, parts)
    if lse is not None:
        spmd.assert_type(lse, kind, None if parts is None else spmd.PartitionSpec(*parts[:-1]))


class FlexInductorConverter(ModelConfigConverter):
    """Exchange each FlexAttention of a model's config for FlexInductorAttention.

    Args:
        config: `FlexInductorConverter.Config(cp_method="auto")`, the `method` of flex_inductor.context_parallel.

    Example:
        >>> from flex_inductor.integrations.torchtitan import FlexInductorConverter
        >>> from torchtitan.models.llama3 import model_registry
        >>> converters = [FlexInductorConverter.Config()]
        >>> model = model_registry("debugmodel", converters=converters).model
        >>> type(model.layers[0].attention.inner_attention).__qualname__
        'FlexInductorAttention.Config'
        >>> converter = FlexInductorConverter(FlexInductorConverter.Config(cp_method="ring"))
        >>> converter.convert(model).layers[0].attention.inner_attention.cp_method
        'ring'
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        cp_method: str = "auto"
        """How ranks of a context-parallel group share a sequence: the `method` of flex_inductor.context_parallel."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config: Module.Config) -> Module.Config:
        """Exchange them in this config.

        Args:
            model_config: of the whole model, changed in place.

        Returns:
            Module.Config: `model_config`.

        Raises:
            FlexValueError: there is no FlexAttention in it.
        """
        found = list(model_config.traverse(FlexAttention.Config))
        if not found:
            raise errors.no_flex_attention(type(model_config).__qualname__)
        for _, own, parent, name in found:
            given = {field.name: getattr(own, field.name) for field in fields(own) if field.init}
            converted = FlexInductorAttention.Config(**given | {"cp_method": self.config.cp_method})
            if isinstance(parent, list):
                parent[name] = converted
            else:
                setattr(parent, name, converted)
        return model_config


def serve(mesh: DeviceMesh, method: str) -> None:
    """Plan masks on this mesh from now on. Each layer of a model comes here."""
    served = getattr(mesh, SERVED, None)
    if served is None or served.method != method:
        setattr(mesh, SERVED, context_parallel(mesh, method))


_apply, _prepare = titan_cp.apply_cp_to_forward, titan_cp.prepare_context_parallel_input


@functools.wraps(_apply)
def _apply_cp(attention_modules: Sequence[torch.nn.Module], cp_mesh: DeviceMesh) -> None:
    if all(isinstance(module, FlexInductorAttention) for module in attention_modules):
        serve(cp_mesh, attention_modules[0].cp_method)  # type: ignore[arg-type]
    else:
        setattr(cp_mesh, SERVED, None)  # another model may have been spread over it before
        _apply(attention_modules, cp_mesh)


@functools.wraps(_prepare)
def _prepare_input(
    inputs: Tensor,
    labels: Tensor,
    extra_kwargs: dict[str, Any],
    cp_mesh: DeviceMesh,
    device: torch.device,
    load_balancer_type: str | None = "headtail",
    ptrr_mask_key: str | None = None,
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    cp = getattr(cp_mesh, SERVED, None)
    if cp is None:
        return _prepare(inputs, labels, extra_kwargs, cp_mesh, device, load_balancer_type, ptrr_mask_key)
    cp.balance = BALANCERS.get(load_balancer_type, load_balancer_type)
    masks = cp.plan(extra_kwargs["attention_masks"])
    inputs, labels, positions = cp.shard((inputs, labels, extra_kwargs["positions"]), 1)
    return inputs, labels, {**extra_kwargs, "attention_masks": masks, "positions": positions}


_save_ops = checkpointing._get_default_save_ops


@functools.wraps(_save_ops)
def _save_ours_too() -> set[Any]:
    return _save_ops() | {attention}


def _put(new: Callable) -> None:
    """In place of the function that it wraps, wherever torchtitan has imported that."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "torchtitan" and vars(module).get(new.__name__) is new.__wrapped__:  # type: ignore[attr-defined]
            setattr(module, new.__name__, new)


check_version("torchtitan", version("torchtitan"), TESTED)
for _function in (_apply_cp, _prepare_input, _save_ours_too):
    _put(_function)
