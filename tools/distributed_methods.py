"""What `flex-inductor bench distributed` measures, in processes of its own."""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flex_inductor import create_block_mask, flex_attention
from flex_inductor.distributed.context import context_parallel
from flex_inductor.distributed.cost import amount
from flex_inductor.masks import document

from .bench_cpu import machine
from .cases import selected
from .rounds import Spread, alternate, milliseconds

METHODS = ("cast", "all_gather", "ring", "ulysses", "ring_ulysses")
TORCH = "torch's flex"
SECONDS = 600  # that ranks wait for each other, at most while one compiles
BLOCK, HEADS, KV_HEADS, DIM = 128, 4, 2, 64


@dataclass(frozen=True)
class Case:
    """Packed documents, causal or within a window."""

    name: str
    window: int = 0
    bias: bool = False

    @property
    def title(self) -> str:
        return self.name

    def mask_mod(self, length: int) -> Callable[..., Tensor]:
        if self.window:
            return lambda b, h, q, kv: (q >= kv) & (q - kv < self.window)
        ends = torch.rand(length // 512, generator=torch.Generator().manual_seed(0)) * length
        return document(torch.bucketize(torch.arange(length), ends.sort().values, right=True))

    def score_mod(self, table: Tensor) -> Any:
        length = table.size(1) // 2
        return (lambda s, b, h, q, kv: s + table[h, q - kv + length]) if self.bias else None

    def tensors(self, length: int) -> list[Tensor]:
        """Query, key, value and a table of biases."""
        generator = torch.Generator().manual_seed(1)
        rows = [
            torch.randn(1, heads, length, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)
        ]
        return [*rows, torch.randn(HEADS, 2 * length, generator=generator)]


CASES = (Case("documents"), Case("documents, learnt bias", bias=True), Case("window of 512", window=512))


@dataclass(frozen=True)
class Result:
    case: str
    side: str
    forward: Spread | None = None
    both: Spread | None = None  # with the backward
    sent: tuple[int, int] | None = None
    error: float | None = None
    note: str = ""


def run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    chosen = selected(CASES, arguments.only)
    if not chosen:
        return 2
    found = measure(chosen, arguments)
    Console().print(table_of(found, arguments))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"machine": machine(), "results": [asdict(r) for r in found]}, file, indent=2)
    return 0


def measure(cases: Sequence[Case], arguments: argparse.Namespace) -> list[Result]:
    """By processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        for at, case in enumerate(cases):
            torch.save(_gold(case, arguments.length), f"{folder}/gold{at}.pt")
        mp.spawn(_rank, (cases, arguments, folder), arguments.ranks)
        ranks = [torch.load(f"{folder}/{rank}.pt") for rank in range(arguments.ranks)]
    results = []
    for at, side in ranks[0]:
        name, found = cases[at].name, [rank[at, side] for rank in ranks]
        if isinstance(found[0], str):
            results.append(Result(name, side, note=found[0]))
            continue
        forward, both, sent, error = zip(*found, strict=True)
        busiest = max(way[0] for way in sent), max(way[1] for way in sent)
        results.append(Result(name, side, _slowest(forward), _slowest(both), busiest, max(error)))
    return results


def _slowest(times: Sequence[list[float] | None]) -> Spread | None:
    """Of the slowest rank in each round."""
    known = [of_rank for of_rank in times if of_rank is not None]
    return Spread.of([max(of_round) for of_round in zip(*known, strict=True)]) if known else None


def _attend(
    case: Case,
    attention: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    mask: Any,
) -> Tensor:
    return attention(query, key, value, case.score_mod(table), mask, enable_gqa=True)


def _step(attend: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """The output and the gradients of query, key, value and the table."""
    out = attend(*tensors)
    grads = torch.autograd.grad(out.square().sum(), tensors, allow_unused=True)
    return [
        out.detach(),
        *(torch.zeros_like(t) if g is None else g for t, g in zip(tensors, grads, strict=True)),
    ]


def _gold(case: Case, length: int) -> list[Tensor]:
    tensors = [tensor.double().requires_grad_() for tensor in case.tensors(length)]
    mask = create_block_mask(case.mask_mod(length), None, None, length, length, "cpu", BLOCK, compact=True)
    return _step(partial(_attend, case, flex_attention, mask=mask), tensors)


def _rank(rank: int, cases: Sequence[Case], arguments: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=arguments.ranks,
        timeout=timedelta(seconds=SECONDS),
    )
    found: dict[tuple[int, str], Any] = {}
    torch._dynamo.config.recompile_limit = 4 * len(METHODS)  # of one function, by all sides
    for at, case in enumerate(cases):
        torch._dynamo.reset()
        gold = torch.load(f"{folder}/gold{at}.pt")
        found |= {(at, side): facts for side, facts in _measured(case, gold, arguments).items()}
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def _measured(case: Case, gold: list[Tensor], arguments: argparse.Namespace) -> dict[str, Any]:
    """By side: this rank's times, bytes and error, or why there are none."""
    sides = {method: partial(_ours, method) for method in METHODS} | {TORCH: _torchs}
    found: dict[str, Any] = dict.fromkeys(sides)
    ready: dict[str, Side] = {}
    errors: dict[str, float] = {}
    for name, make in sides.items():
        try:
            side = make(case, arguments.length, gold, arguments.eager)
            errors[name] = side.error()
            side.forward()
            ready[name] = side
        except Exception as error:  # on all ranks alike, or those that wait end by their timeout
            found[name] = f"does not run: {str(error).splitlines()[0]}"
    forward = {name: partial(_timed, side.forward) for name, side in ready.items()}
    both = {name: partial(_timed, side.both) for name, side in ready.items() if side.both is not None}
    times, all_times = alternate(forward, arguments.rounds), alternate(both, arguments.rounds)
    return found | {n: (times[n], all_times.get(n), side.sent, errors[n]) for n, side in ready.items()}


def _timed(call: Callable[[], Any]) -> float:
    dist.barrier()
    return milliseconds(call)


@dataclass(frozen=True)
class Side:
    forward: Callable[[], Any]
    both: Callable[[], Any] | None
    sent: tuple[int, int]
    results: Callable[[], list[Tensor]]
    gold: list[Tensor]

    def error(self) -> float:
        """Of what this rank has."""
        pairs = zip(self.results(), self.gold, strict=True)
        return max(float((got - want).abs().max() / want.abs().max().clamp(min=1e-30)) for got, want in pairs)


def _ours(method: str, case: Case, length: int, gold: list[Tensor], eager: bool) -> Side:
    cp = context_parallel(_mesh() if method == "ring_ulysses" else dist.group.WORLD, method)
    mask = create_block_mask(case.mask_mod(length), None, None, length, length, "cpu", BLOCK, compact=True)
    planned = cp.plan(mask)
    *rows, table = case.tensors(length)
    tensors = [tensor.requires_grad_() for tensor in (*cp.shard(rows, 2), table)]
    attention = (
        flex_attention
        if eager
        else torch.compile(flex_attention, backend="flex_inductor", fullgraph=True, dynamic=False)
    )
    attend = partial(_attend, case, attention, mask=planned)

    def results() -> list[Tensor]:
        *local, d_table = _step(attend, tensors)
        dist.all_reduce(d_table)
        return [*local, d_table]

    return Side(
        partial(attend, *tensors),
        partial(_step, attend, tensors),
        tuple(planned.bytes_sent(*tensors[:3])),
        results,
        [*cp.shard(gold[:4], 2), gold[4]],
    )


def _mesh() -> DeviceMesh:
    """All ranks as rows of two, or as one row."""
    ranks = torch.arange(dist.get_world_size())
    pairs = ranks.view(-1, 2 if len(ranks) % 2 == 0 else len(ranks))
    return DeviceMesh("cpu", pairs, mesh_dim_names=("ring", "heads"))


def _torchs(case: Case, length: int, gold: list[Tensor], eager: bool) -> Side:
    """torch's own context parallelism: keys and values are gathered, the mask is made anew for this rank's rows."""
    from torch.distributed.tensor.experimental._context_parallel import _attention
    from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer
    from torch.nn.attention.flex_attention import flex_attention as torchs

    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    *rows, table = case.tensors(length)
    balance = _HeadTailLoadBalancer(length, mesh.size(), "cpu")
    parts: list[Any] = _attention._context_parallel_shard(mesh, [*rows, gold[0]], [2] * 4, balance)
    query, key, value, want = parts
    mask = _attention._create_cp_block_mask(case.mask_mod(length), 1, 1, length, length, mesh, balance)
    attention = torchs if eager else torch.compile(torchs, fullgraph=True, dynamic=False)

    @torch.no_grad()
    def forward() -> Tensor:
        keys, values = _attention.flex_cp_allgather(key, value, 2, mesh.get_group().group_name)
        return _attend(case, attention, query, keys, values, table, mask)

    sent = (mesh.size() - 1) * (key.nbytes + value.nbytes)
    return Side(forward, None, (sent, 0), lambda: [forward()], [want])


def table_of(results: list[Result], arguments: argparse.Namespace) -> Any:
    from rich.table import Table

    facts = machine()
    kind = "torch operations in chunks" if arguments.eager else "compiled"
    table = Table(
        title=f"{arguments.ranks} ranks, {arguments.length:,} tokens, B1 H{HEADS} of {KV_HEADS} D{DIM} fp32, {kind}; "
        f"{facts['cpu']}, {facts['vectors']}, torch {facts['torch']}"
    )
    table.add_column("case")
    table.add_column("side")
    for column in ("forward ms", "with backward", "sent forward", "backward", "error"):
        table.add_column(column, justify="right")
    last = None
    for result in results:
        if last not in (None, result.case):
            table.add_section()
        case, last = (result.case if result.case != last else ""), result.case
        if result.sent is None or result.error is None:
            table.add_row(case, result.side, result.note)
            continue
        sent = [amount(size) for size in result.sent]
        both = "none on the CPU" if result.both is None else str(result.both)
        table.add_row(case, result.side, str(result.forward), both, *sent, f"{result.error:.1e}")
    return table
