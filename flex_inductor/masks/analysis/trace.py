"""mask_mod as a graph of aten ops on four 0-d integers.

The integers have the dtype that they have in kernels, so that sums and products wrap around as they do there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx

from ...errors import FlexError
from ...mod_ir import errors as mod_errors
from ...mod_ir.arguments import INDEX_DTYPE
from ...mod_ir.capture import names_in
from ...mod_ir.indexing import LaneIndexing
from ...mod_ir.recorder import READS, Recorder
from ...mod_ir.replay import Recording
from ...mod_ir.source_lines import line_raising
from .. import errors

INDEX_NAMES = ("b", "h", "q", "kv")


class MaskGraph:
    """The graph of one mask_mod, and what it captures."""

    def __init__(self, graph: fx.Graph, captures: dict[fx.Node, Tensor], name: str, device: torch.device):
        self.graph, self.captures, self.name, self.device = graph, captures, name, device
        self.indices = graph.find_nodes(op="placeholder")
        self.output: fx.Node = graph.output_node().args[0]
        self.run: Recording | None = None  # the torch functions called, if they can be kept

    @property
    def reads(self) -> frozenset[str]:
        return self.output.meta[READS]

    def needed(self, wanted: Iterable[fx.Node]) -> list[fx.Node]:
        """The nodes that `wanted` are computed from, themselves included, in order."""
        marked = set(wanted)
        for node in reversed(self.graph.nodes):
            if node in marked:
                marked.update(node.all_input_nodes)
        return [node for node in self.graph.nodes if node in marked]

    def function(self, *wanted: fx.Node) -> Callable[[Tensor, Tensor, Tensor, Tensor], Any]:
        """The value of the `wanted` nodes as a function of four 0-d integers, ready for vmap."""
        calls = [node for node in self.needed(wanted) if node.op == "call_function"]

        def run(*indices: Tensor) -> Any:
            values: dict[fx.Node, Any] = dict(self.captures)
            values.update((node, x.to(INDEX_DTYPE)) for node, x in zip(self.indices, indices, strict=True))
            for node in calls:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
            found = tuple(values[node] for node in wanted)
            return found[0] if len(found) == 1 else found

        return run

    def __str__(self) -> str:
        """One line for each node: its value, and the indices that value depends on."""
        names = {node: node.target for node in self.indices}

        def show(argument: Any) -> str:
            if isinstance(argument, (list, tuple)):
                return "[" + ", ".join(map(show, argument)) + "]"
            return names[argument] if isinstance(argument, fx.Node) else str(argument)

        lines = [f"{self.name}(b, h, q, kv):"]
        for node in self.needed([self.output]):
            if node in names:
                continue
            names[node] = f"%{len(lines) - 1}"
            if node in self.captures:
                value = self.captures[node]
                what = f"captured {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
            else:
                given = [*map(show, node.args), *(f"{k}={show(v)}" for k, v in node.kwargs.items())]
                what = f"{getattr(node.target, '__name__', node.target)}({', '.join(given)})"
            depends = ", ".join(name for name in INDEX_NAMES if name in node.meta[READS]) or "nothing"
            lines.append(f"  {names[node]} = {what}  # {depends}")
        return "\n".join([*lines, f"  return {names[self.output]}"])


def is_joint(node: fx.Node) -> bool:
    return node.meta[READS] >= {"q", "kv"}


def dtype_of(node: fx.Node) -> torch.dtype | None:
    """The dtype of a 0-d tensor; None for another tensor, or for several."""
    value = node.meta.get("val")
    return value.dtype if isinstance(value, Tensor) and value.dim() == 0 else None


def name_of(mask_mod: Callable) -> str:
    return getattr(mask_mod, "__name__", type(mask_mod).__name__)


def trace_mask(mask_mod: Callable, device: torch.device) -> MaskGraph:
    """Traces on every call: a cache could not see a changed Python number in a closure."""
    mod_errors.check_arity("mask_mod", mask_mod, INDEX_NAMES)
    name = f"mask_mod {name_of(mask_mod)}"
    lanes = {index: torch.zeros((), dtype=INDEX_DTYPE, device=device) for index in INDEX_NAMES}
    run = Recording([*lanes.values()])

    def flat(*indices: Tensor) -> Any:
        with LaneIndexing():
            return mask_mod(*indices)

    def recorded(*indices: Tensor) -> Any:
        with LaneIndexing(), run:  # which shows indexing as it is written
            return mask_mod(*indices)

    def capture_name(tensor: Tensor) -> str:
        return dict(names_in(mask_mod)).get(id(tensor), "a tensor")

    with torch.no_grad():
        recorder = Recorder(name, capture_name)
        try:
            result = recorder.run(recorded, lanes)
            if recorder.writes:
                recorder = Recorder(name, capture_name)
                result = recorder.run(torch.func.functionalize(flat), lanes)
                run.give_up()
        except FlexError:
            raise
        except Exception as failure:
            _check_devices(recorder, device)
            return _untraceable(mask_mod, flat, name, failure, device)
    _check_devices(recorder, device)
    mod_errors.check_mod_result(name, result)
    traced = MaskGraph(recorder.graph, recorder.captures, name_of(mask_mod), device)
    run.ended(result)
    traced.run = run
    return traced


def _check_devices(recorder: Recorder, device: torch.device) -> None:
    """torch lets a 0-d CPU tensor be used with tensors of any device."""
    for tensor in recorder.captures.values():
        if tensor.device != device and not (tensor.dim() == 0 and tensor.device.type == "cpu"):
            raise errors.capture_elsewhere(recorder.mod, recorder.name_of(tensor), tensor.device, device)


def _untraceable(
    mask_mod: Callable, flat: Callable, name: str, failure: Exception, device: torch.device
) -> MaskGraph:
    """The graph of a function that cannot be traced: one call. Only the indices that it reads are known.

    `captured.max().item()` cannot be traced but can be evaluated; `if q_idx > kv_idx:` can do neither.
    """
    four = torch.zeros((4, 1), dtype=INDEX_DTYPE, device=device)
    try:
        value = torch.vmap(flat)(*four)
    except Exception as error:
        text = f"{failure} {error}"
        if "data-dependent" in text or ".item()" in text:
            raise mod_errors.needs_a_value(name, line_raising(error)) from error
        raise errors.cannot_be_evaluated(name, error) from error
    mod_errors.check_mod_result(name, value[0] if isinstance(value, Tensor) else value)
    graph = fx.Graph()
    indices = [graph.placeholder(name) for name in INDEX_NAMES]
    for node, index in zip(indices, INDEX_NAMES, strict=True):
        node.meta[READS] = frozenset([index])
    whole = graph.call_function(flat, tuple(indices))
    reads = {"q", "kv", *(index for index in "bh" if _varies_with(flat, index, device))}
    whole.meta.update({"val": value[0].to("meta"), READS: frozenset(reads)})
    graph.output(whole)
    return MaskGraph(graph, {}, name_of(mask_mod), device)


def _varies_with(flat: Callable, name: str, device: torch.device) -> bool:
    """Whether the value depends on an index: along others vmap's result has stride 0."""
    varied = tuple(0 if name == index else None for index in INDEX_NAMES)
    lanes = [torch.zeros((2,) if at == 0 else (), dtype=INDEX_DTYPE, device=device) for at in varied]
    return torch.vmap(flat, varied)(*lanes).stride(0) != 0
