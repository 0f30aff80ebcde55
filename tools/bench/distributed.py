"""`flex-inductor bench distributed`: methods of context parallelism side by side, over processes of this machine.

All sides of a case take turns, in the opposite order every second round; a time is that of the slowest rank. Processes
are joined by gloo: times say how much each method computes and copies, not what it takes over a network of GPUs. Bytes
are those that the busiest rank sends to others. An error is the largest against one fp64 process, over the largest
value, of outputs and of all gradients.
"""

from __future__ import annotations

import tempfile
import warnings
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flex_inductor import create_block_mask, flex_attention
from flex_inductor.distributed.cost import METHODS
from flex_inductor.masks import document

from ..options import count
from .call import documents
from .harness import Result, Spread, alternate, milliseconds, results_of, rounds

HELP = "methods of context parallelism, over processes on the CPU"
OPTIONS: dict[str, Any] = {
    **rounds(5),
    "--ranks": count(4, "processes"),
    "--length": count(8192, "tokens"),
    "--eager": {"action": "store_true", "help": "compile nothing: torch operations in chunks"},
}
COLUMNS = ("side", "ms", "over cast", "with backward", "MiB sent", "in the backward", "error")
TORCH = "torch's flex"
SECONDS = 600  # that ranks wait for each other, at most while one compiles
BLOCK, HEADS, KV_HEADS, DIM = 128, 4, 2, 64


@dataclass(frozen=True)
class Case:
    """Packed documents, causal or within a window."""

    title: str
    window: int = 0
    bias: bool = False

    def mask(self, length: int) -> Any:
        mask_mod = self.mask_mod(length)
        return create_block_mask(mask_mod, None, None, length, length, "cpu", BLOCK, compact=True)

    def mask_mod(self, length: int) -> Callable[..., Tensor]:
        if self.window:
            return lambda b, h, q, kv: (q >= kv) & (q - kv < self.window)
        return document(documents(length, max(1, length // 512)))

    def attend(self, attention: Callable[..., Tensor], mask: Any, *tensors: Tensor) -> Tensor:
        query, key, value, table = tensors
        length = table.size(1) // 2
        mod = (lambda s, b, h, q, kv: s + table[h, q - kv + length]) if self.bias else None
        return attention(query, key, value, mod, mask, enable_gqa=True)

    def tensors(self, length: int) -> list[Tensor]:
        """Query, key, value and a table of biases."""
        random = partial(torch.randn, generator=torch.Generator().manual_seed(1))
        rows = [random(1, heads, length, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        return [*rows, random(HEADS, 2 * length)]

    def gold(self, length: int) -> list[Tensor]:
        tensors = [tensor.double().requires_grad_() for tensor in self.tensors(length)]
        return _step(partial(self.attend, flex_attention, self.mask(length)), tensors)


CASES = (Case("documents"), Case("documents, learnt bias", bias=True), Case("window of 512", window=512))


def measure(case: Case, arguments: Namespace) -> list[Result]:
    """By processes of their own."""
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        torch.save(case.gold(arguments.length), f"{folder}/gold.pt")
        mp.spawn(_rank, (case, arguments, folder), arguments.ranks)
        found = [torch.load(f"{folder}/{rank}.pt") for rank in range(arguments.ranks)]
    return together(case.title, found)


def together(title: str, ranks: Sequence[dict[str, Any]]) -> list[Result]:
    """What each rank measured of each side: the slowest in each round, the busiest, and the largest error."""
    refused = {side: why for side, why in ranks[0].items() if isinstance(why, str)}
    sides = {side: [rank[side] for rank in ranks] for side in ranks[0] if side not in refused}

    def slowest(times: Sequence[list[float]]) -> list[float]:
        return [max(of_round) for of_round in zip(*times, strict=True)]

    def facts(side: str, times: list[float]) -> dict[str, Any]:
        _, both, sent, error = zip(*sides[side], strict=True)
        way, back = (max(each) / 2**20 for each in zip(*sent, strict=True))
        full = Spread.of(slowest(both)) if both[0] else "none on the CPU"
        return {"both": full, "sent_mib": way, "sent_mib_backward": back, "error": max(error)}

    times = {side: slowest([rank[0] for rank in of]) for side, of in sides.items()}
    return results_of(title, times, facts) + [Result(title, side, note=why) for side, why in refused.items()]


def _step(attend: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """The output and the gradients of query, key, value and the table."""
    out = attend(*tensors)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), tensors, materialize_grads=True)]


def _rank(rank: int, case: Case, arguments: Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
    store, timeout = dist.FileStore(f"{folder}/store"), timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=arguments.ranks, timeout=timeout)
    torch._dynamo.config.recompile_limit = 4 * len(METHODS)  # of one function, by all sides
    gold = torch.load(f"{folder}/gold.pt")
    found = measured(case, gold, arguments.length, arguments.rounds, arguments.eager)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@dataclass(frozen=True)
class Side:
    forward: Callable[[], Any]
    both: Callable[[], Any] | None  # with the backward
    sent: tuple[int, int]  # forward and backward
    results: Callable[[], list[Tensor]]
    gold: list[Tensor]

    def error(self) -> float:
        """Of what this rank has."""
        pairs = zip(self.results(), self.gold, strict=True)
        return max(float((got - want).abs().max() / want.abs().max().clamp(min=1e-30)) for got, want in pairs)


def measured(case: Case, gold: list[Tensor], length: int, rounds: int, eager: bool) -> dict[str, Any]:
    """By side: this rank's times, bytes and error, or why there are none."""
    sides = {method: partial(_ours, method) for method in METHODS} | {TORCH: _torchs}
    found: dict[str, Any] = dict.fromkeys(sides)
    ready: dict[str, Side] = {}
    for name, make in sides.items():
        try:
            side = make(case, length, gold, eager)
            found[name] = side.error()
            side.forward()
            ready[name] = side
        except Exception as error:  # on all ranks alike, or those that wait end by their timeout
            found[name] = f"does not run: {str(error).splitlines()[0]}"
    forward = {name: partial(_timed, side.forward) for name, side in ready.items()}
    both = {name: partial(_timed, side.both) for name, side in ready.items() if side.both is not None}
    times, all_times = alternate(forward, rounds), alternate(both, rounds)
    return found | {n: (times[n], all_times.get(n), side.sent, found[n]) for n, side in ready.items()}


def _timed(call: Callable[[], Any]) -> float:
    dist.barrier()
    return milliseconds(call)


def _ours(method: str, case: Case, length: int, gold: list[Tensor], eager: bool) -> Side:
    from flex_inductor.distributed.context import context_parallel

    cp = context_parallel(_mesh() if method == "ring_ulysses" else dist.group.WORLD, method)
    planned = cp.plan(case.mask(length))
    *rows, table = case.tensors(length)
    tensors = [tensor.requires_grad_() for tensor in (*cp.shard(rows, 2), table)]
    compiled = partial(torch.compile, backend="flex_inductor", fullgraph=True, dynamic=False)
    attend = partial(case.attend, flex_attention if eager else compiled(flex_attention), planned)

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


def _mesh() -> Any:
    """All ranks as rows of two, or as one row."""
    ranks = dist.get_world_size()
    shape = (-1, 2 if ranks % 2 == 0 else ranks)
    return DeviceMesh("cpu", torch.arange(ranks).view(shape), mesh_dim_names=("ring", "heads"))


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
        return case.attend(attention, mask, query, keys, values, table)

    sent = (mesh.size() - 1) * (key.nbytes + value.nbytes)
    return Side(forward, None, (sent, 0), lambda: [forward()], [want])
