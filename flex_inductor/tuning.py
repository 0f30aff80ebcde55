"""What a call's options tell the autotuner: the share of blocks visited, and which results were imported."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from . import upward
from .op import AttentionCall
from .options import tuning_options
from .visits import TileMap

_LEAST_SHARE = 2.0**-12


def tell_tuner(module: fx.GraphModule, calls: Sequence[fx.Node], inputs: Sequence[Any]) -> None:
    """Complete the options of the calls in a Dynamo graph and in those inside it, whose inputs are not known."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    values = dict(zip(placeholders, inputs, strict=True))
    imported = upward.imported_tuning()
    for node in calls:
        call = AttentionCall.read(*node.args)
        shares = _visited(call, values)
        node.args = call._replace(options=tuning_options(call.options, imported, shares)).wire()
    for graph in {node.graph for node in calls}:
        graph.owning_module.recompile()


def _visited(call: AttentionCall, values: Mapping[Any, Any]) -> tuple[float, float] | None:
    """The shares of partial and of full blocks, rounded to powers of the square root of two."""
    schedule = call.inputs.schedule
    if schedule is None:
        return None
    given: Any = type(schedule)(*(values.get(field, field) for field in schedule))
    tile_map = call.inputs.tile_map
    if tile_map is not None:  # only the number of keys matters, and they may be a value of the graph
        queries: Any = values.get(tile_map.queries, tile_map.queries)
        tile_map = TileMap(queries, torch.empty(_size(tile_map.keys, 0), 0))
    if not all(map(_is_here, (*given, *(tile_map or ())))):
        return None
    partial, full = given.shares(_size(call.query, 2), _size(call.key, 2), tile_map)
    return _coarse(partial), _coarse(full)


def _size(tensor: Any, dim: int) -> int:
    size = tensor.meta["example_value"].size(dim)
    return size if isinstance(size, int) else size.node.hint


def _is_here(value: Any) -> bool:
    return not isinstance(value, fx.Node | torch._subclasses.FakeTensor)


def _coarse(share: float) -> float:
    return 0.0 if share == 0 else round(2 ** (round(2 * math.log2(max(share, _LEAST_SHARE))) / 2), 6)
