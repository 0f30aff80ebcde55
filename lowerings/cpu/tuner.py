"""Times a CPU kernel's candidates on made-up tensors of the call's shapes, before the graph's code is written."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch._inductor import ir
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import Placeholder
from torch._inductor.virtualized import V

from flex_inductor import fingerprint
from flex_inductor.visits.bounds import SequenceEntry
from flex_inductor.visits.places import COLUMNS

from ..choice import size_hint
from ..problem import AttentionProblem
from . import template
from .configs import Caches

ENOUGH_SECONDS = 0.5  # for each candidate
MOST_ROUNDS = 20
LIKELY_SHARE = 0.5  # share of blocks visited, if unknown


class Builder(AsyncCompile):
    """Builds the kernels to time, even if those of the graph itself are not built."""


def device() -> str:
    """The device that the timings hold for."""
    caches = Caches.of_this_machine()
    sizes = f"L1 {caches.first >> 10}K L2 {caches.second >> 10}K"
    return f"cpu {fingerprint.instruction_set()} {sizes} {torch.get_num_threads()} threads"


def times(
    problem: AttentionProblem,
    render: Callable[[Any], Callable[[template.TemplateKernel], str]],
    tensors: Mapping[str, Any],
    mod_tensors: Sequence[Any],
    layouts: Sequence[ir.Layout],
    configs: Sequence[Any],
) -> list[float]:
    """Seconds of the kernel that `render(config)` writes, for each config."""
    inputs: list[Any] = [*ir.InputsKernel.unwrap_storage([*tensors.values(), *mod_tensors])]
    roles = dict(zip((tensor.get_name() for tensor in inputs), tensors, strict=False))
    outputs = [ir.Buffer(name=f"tuned_{i}", layout=layout) for i, layout in enumerate(layouts)]
    owners = {tensor.get_name(): _owner(tensor) for tensor in (*inputs, *outputs)}
    compiled = []
    for config in configs:
        source, types, names, sizes = _source(render(config), inputs, outputs)
        compiled.append(Builder().cpp_pybinding(types, source))
    grid = _grid(problem, tensors)
    sequences = (
        max(size_hint(tensors[template.TABLE].get_size()[0]) - 1, 1) if template.TABLE in tensors else None
    )
    arguments = [
        size_hint(sizes[name])
        if name in sizes
        else _example(owners[name], roles.get(name), problem, grid, sequences)
        for name in names
    ]
    kernels = [kernel.result() if hasattr(kernel, "result") else kernel for kernel in compiled]
    return _alternating([functools.partial(kernel, *arguments) for kernel in kernels])


def _source(
    render: Callable[[template.TemplateKernel], str], inputs: Sequence[Any], outputs: Sequence[Any]
) -> tuple[str, list[str], list[str], dict[str, Any]]:
    """The kernel's source, the types and names of its arguments, and those that are sizes."""
    dtypes = {output.get_name(): output.get_dtype() for output in outputs}
    known = V.graph.get_dtype
    with (
        mock.patch.object(V.graph, "get_dtype", lambda name: dtypes.get(name) or known(name)),
        V.graph.set_current_device(torch.device("cpu")),
        template.TemplateKernel(inputs, outputs) as kernel,
    ):
        source = template.finished(kernel, render)
        _, names, types = kernel.args.cpp_argdefs()
        sizes = {str(size): size for size in kernel.args.sizevars}
    source = source.replace(str(Placeholder.KERNEL_NAME), "kernel").replace(
        str(Placeholder.DESCRIPTIVE_NAME), "kernel"
    )
    return source.replace("#pragma CMT", "//"), types, names, sizes


def _owner(tensor: Any) -> Any:
    """The buffer that a view reads."""
    return tensor.data if isinstance(tensor, ir.ReinterpretView) else tensor


def _grid(problem: AttentionProblem, tensors: Mapping[str, Any]) -> tuple[int, int]:
    """How many rows and columns of blocks there are."""
    if problem.blocks is None:
        return 1, 1
    if "tile_map" in problem.inputs:
        rows, columns = (size_hint(tensors[name].get_size()[0]) for name in template.TILES)
    else:
        lengths = zip((problem.M, problem.N), problem.blocks, strict=True)
        rows, columns = (-(-size_hint(length) // block) for length, block in lengths)
    return rows, columns


def _example(
    buffer: Any,
    role: str | None,
    problem: AttentionProblem,
    grid: tuple[int, int],
    sequences: int | None,
) -> torch.Tensor:
    layout = buffer.get_layout()
    size, stride = [*map(size_hint, layout.size)], [*map(size_hint, layout.stride)]
    dtype = buffer.get_dtype()
    if role is not None and role.removeprefix("full_") in ("counts", "indices", "offsets", "runs"):
        return _example_list(role, size, problem, grid)
    if role in template.TILES:
        return _example_map(role, grid, problem, sequences)
    if role == template.TABLE:
        return torch.tensor([_example_sequence(n, grid, problem, sequences) for n in range(size[0])]).int()
    if role == template.DOCUMENTS:
        return _example_documents(size, problem)
    tensor = torch.empty_strided(size, stride, dtype=dtype)
    if role == "lse":
        return tensor.fill_(10)  # so that weights stay below one
    return tensor.normal_() if dtype.is_floating_point else tensor.zero_()


def _example_documents(size: list[int], problem: AttentionProblem) -> torch.Tensor:
    """Documents of a length that gives the share of visited blocks."""
    tokens = max(round(sum(problem.options.visited or (LIKELY_SHARE,)) * size[1]), 1)
    begin = torch.arange(size[1], dtype=torch.int32) // tokens * tokens
    ends = (begin + tokens).clamp(max=size[1])
    return torch.stack((begin, ends), 1).expand(size).contiguous()


def _example_list(
    role: str, size: list[int], problem: AttentionProblem, grid: tuple[int, int]
) -> torch.Tensor:
    """Lists or runs in which every row visits as many blocks, partial ones after full ones."""
    shares = problem.options.visited or (LIKELY_SHARE / 8, LIKELY_SHARE * 7 / 8)
    rows, columns = grid
    full = round(shares[1] * columns)
    partial = max(1, min(round(shares[0] * columns), columns - full))
    first, count = (0, full) if role.startswith("full") else (full, partial)
    if problem.schedule == "runs":
        if role.endswith("offsets"):
            return torch.arange(size[-1], dtype=torch.int32).expand(size).contiguous()
        return torch.tensor([[first, first + count]], dtype=torch.int32).repeat(rows, 1)
    if role.endswith("counts"):
        return torch.full(size, count, dtype=torch.int32)
    return (
        (first + torch.arange(size[-1], dtype=torch.int32)).clamp(max=columns - 1).expand(size).contiguous()
    )


def _example_sequence(
    n: int, grid: tuple[int, int], problem: AttentionProblem, sequences: int | None
) -> SequenceEntry:
    """One of the sequences that share the tiles."""
    assert problem.blocks is not None and sequences is not None
    starts = [[-(-i * tiles // sequences) for i in (n, n + 1)] for tiles in grid]
    (query_tile, query_stop), (key_tile, key_stop) = starts
    q_block, kv_block = problem.blocks
    keys, queries = (key_stop - key_tile) * kv_block, (query_stop - query_tile) * q_block
    return SequenceEntry(key_tile, keys, query_tile, queries)


def _example_map(
    role: str, grid: tuple[int, int], problem: AttentionProblem, sequences: int | None
) -> torch.Tensor:
    """Tiles of one sequence in each batch, shared evenly; or of that many sequences, with their positions."""
    assert problem.blocks is not None
    side = template.TILES.index(role)
    batches, length = ((problem.B, problem.M), (problem.B_kv, problem.N))[side]
    per_batch = -(-grid[side] // max(size_hint(batches), 1))
    lines = []
    for tile in range(grid[side]):
        batch, place = divmod(tile, per_batch)
        start, stop = (size_hint(length) * i // per_batch for i in (place, place + 1))
        sequence, index = batch, start
        if sequences is not None:
            sequence = tile * sequences // grid[side]
            of = _example_sequence(sequence, grid, problem, sequences)
            first, shift = (of.query_tile, of.keys - of.queries) if side == 0 else (of.key_tile, 0)
            index = (tile - first) * problem.blocks[side] + shift
        lines.append([batch, start, sequence, 0, index, min(stop - start, problem.blocks[side])])
    return torch.tensor(lines, dtype=torch.int32).view(-1, COLUMNS)


def _alternating(kernels: Sequence[Callable[[], Any]]) -> list[float]:
    """The least time of each, over rounds in which each runs once."""
    best = [float("inf")] * len(kernels)
    deadline = time.perf_counter() + ENOUGH_SECONDS * len(kernels)
    for _ in range(MOST_ROUNDS):
        for i, kernel in enumerate(kernels):
            start = time.perf_counter()
            kernel()
            best[i] = min(best[i], time.perf_counter() - start)
        if time.perf_counter() > deadline:
            break
    return best
