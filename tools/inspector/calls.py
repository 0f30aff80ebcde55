"""An attention call in its author's words: where it is written, its tensors, its mods and what they capture."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from flex_inductor.masks import RunSchedule
from flex_inductor.masks.runs import Extent
from flex_inductor.masks.window_schedule import runs_of
from flex_inductor.mod_ir.names import capture_names
from flex_inductor.mod_ir.source_lines import Line, call_line
from flex_inductor.op import AttentionCall, attention
from flex_inductor.visits import Bounds

from .lines import mod_lines


@dataclass(frozen=True)
class TensorFacts:
    name: str
    shape: tuple[int, ...]
    dtype: str
    needs_grad: bool

    def __str__(self) -> str:
        grad = ", needs a gradient" if self.needs_grad else ""
        return f"{self.name} [{', '.join(map(str, self.shape))}] {self.dtype}{grad}"


@dataclass(frozen=True)
class ModFacts:
    name: str
    lines: tuple[Line, ...]  # those that compute something
    captures: tuple[TensorFacts, ...]

    @property
    def where(self) -> str:
        """The files and the span of lines in each."""
        found = []
        for file, lines in itertools.groupby(self.lines, lambda line: line.file):
            first, *others = (line.number for line in lines)
            found.append(f"{file}:{first}" + (f"-{others[-1]}" if others else ""))
        return ", ".join(found)


@dataclass(frozen=True)
class CallFacts:
    """What the author wrote. `values` is the call with what the graph knows of it before it runs."""

    where: Line | None
    tensors: tuple[TensorFacts, ...]  # query, key, value
    score_mod: ModFacts | None
    mask_mod: ModFacts | None
    mask: RunSchedule | None
    no_mask: str  # why there is none
    values: AttentionCall


def facts_of(node: fx.Node, module: fx.GraphModule, inputs: Sequence[Any]) -> CallFacts:
    """What Dynamo's graph `module` says of the call at `node`, in it or in a graph inside."""
    call = AttentionCall.read(*node.args)
    around: Any = node.graph.owning_module
    examples = {name: _example(getattr(call, name)) for name in ("query", "key", "value")}
    found, reason = _values((call.inputs.schedule, call.inputs.tile_map), module, inputs)
    schedule, tile_map = found or (None, call.inputs.tile_map)
    if call.inputs.ring is not None:
        schedule, reason = None, "in parts, one for each step of a ring of ranks"
    values = call._replace(**examples).with_inputs(schedule=schedule, tile_map=tile_map)
    captures, _ = _values(call.inputs.mask_captures, module, inputs)
    return CallFacts(
        call_line(node),
        tuple(_tensor(name, value) for name, value in examples.items()),
        _mod(call.score_mod, call.inputs.score_captures, around),
        _mod(call.mask_mod, call.inputs.mask_captures, around),
        _mask(call, values, captures, around),
        "every query sees every key" if call.inputs.schedule is None else reason,
        values,
    )


def _example(value: Any) -> Any:
    return value.meta["example_value"] if isinstance(value, fx.Node) else value


def _number(size: Any) -> int:
    """A size, or the one at hand where it is dynamic."""
    return int(size) if isinstance(size, int) else int(size.node.hint)


def _tensor(name: str, value: Any) -> TensorFacts:
    if not isinstance(value, Tensor):  # a number that changes from call to call
        return TensorFacts(name, (), type(value).__name__, False)
    dtype = str(value.dtype).removeprefix("torch.")
    return TensorFacts(name, tuple(map(_number, value.shape)), dtype, value.requires_grad)


def _mod(mod: fx.Node | None, captures: Sequence[Any], module: fx.GraphModule) -> ModFacts | None:
    if mod is None:
        return None
    graph: Any = module.get_submodule(str(mod.target))
    name, lines = mod_lines(graph)
    names = capture_names(graph, len(captures))
    found = tuple(_tensor(n, _example(capture)) for n, capture in zip(names, captures, strict=True))
    return ModFacts(name, tuple(lines), found)


def _mask(
    call: AttentionCall, values: AttentionCall, captures: Any, module: fx.GraphModule
) -> RunSchedule | None:
    schedule: Any = values.inputs.schedule
    if schedule is None:
        return None
    from torch.nn.attention.flex_attention import BlockMask, noop_mask

    from flex_inductor.mod_ir.indexing import LaneIndexing

    mask_mod: Any = noop_mask
    if call.mask_mod is not None and captures is not None:
        target: Any = call.mask_mod
        graph: Any = module.get_submodule(str(target.target))

        def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            with LaneIndexing():
                return graph(b, h, q_idx, kv_idx, *captures)

    lengths = (_number(values.query.size(2)), _number(values.key.size(2)))
    blocks = (int(schedule.q_block), int(schedule.kv_block))
    tile_map: Any = values.inputs.tile_map
    if tile_map is not None:  # tiles as they are visited, wherever they lie
        rows, columns = (lines.size(0) for lines in tile_map)
        lengths = (rows * blocks[0], columns * blocks[1])
    if isinstance(schedule, Bounds):
        bounds = schedule.with_numbers(lambda n: n if n is None or isinstance(n, Tensor) else _number(n))
        runs = runs_of(bounds, lengths, tile_map, values.query.device)
        return RunSchedule.from_runs(
            runs, bounds.grids, Extent(bounds.grids[0], 1, lengths, blocks), mask_mod
        )
    if schedule.of_one:
        (counts, places), (full_counts, full_places) = schedule.tables[:2]
        given: dict[str, Any] = {"BLOCK_SIZE": blocks, "mask_mod": mask_mod, "seq_lengths": lengths}
        lists = BlockMask.from_kv_blocks(
            counts, places, full_counts, full_places, compute_q_blocks=False, **given
        )
        return RunSchedule.from_block_mask(lists)
    # There may be room for more runs than there are.
    tensors: Any = [t for offsets, runs in schedule.tables for t in (offsets, runs[: int(offsets.max())])]
    return RunSchedule(*(*tensors, *schedule.grids, lengths, blocks, mask_mod, True))


def _values(nodes: Any, module: fx.GraphModule, inputs: Sequence[Any]) -> tuple[Any, str]:
    """What `nodes` will be when the graph runs on `inputs`, or None and why that is not known before."""
    known = dict(zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True))
    passed = dict(_passed(module))

    def value(node: fx.Node) -> Any:
        if node not in known:
            if node.target is attention:
                raise _NotKnown("it depends on what an earlier attention call gives")
            if node in passed:
                known[node] = fx.node.map_arg(passed[node], value)
            elif node.op == "placeholder":
                raise _NotKnown("it is made where this part of the graph is called from")
            else:
                args = fx.node.map_arg(node.args, value)
                kwargs = fx.node.map_arg(node.kwargs, value)
                interpreter: Any = fx.Interpreter(node.graph.owning_module)
                known[node] = getattr(interpreter, node.op)(node.target, args, kwargs)
        return known[node]

    try:
        with torch.no_grad():
            return fx.node.map_arg(nodes, value), ""
    except _NotKnown as error:
        return None, str(error)


class _NotKnown(Exception):
    pass


def _passed(module: fx.GraphModule) -> Iterator[tuple[fx.Node, Any]]:
    """The inputs of graphs inside `module`, such as checkpointed regions, each with what it is given there."""
    for node in module.graph.nodes:
        for i, argument in enumerate(node.args):
            if isinstance(argument, fx.Node) and argument.op == "get_attr" and node.target is not attention:
                inner = getattr(module, str(argument.target), None)
                if isinstance(inner, fx.GraphModule):
                    given = node.args[i + 1 :]
                    inputs = inner.graph.find_nodes(op="placeholder")
                    if len(given) == len(inputs):
                        yield from zip(inputs, given, strict=True)
                    yield from _passed(inner)
