"""How a case is compiled, checked and timed: functions for a worker process (tools/workers.py)."""

from __future__ import annotations

import functools
import itertools
import platform
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

from flex_inductor import create_block_mask, decisions, flex_attention

from .. import rounds as in_rounds
from ..rounds import Spread, alternate, over
from .cases import BACKWARD, CUDNN, FLASH, FLEX_FLASH, FORWARD, OURS, Case, Side, mods_of, tensors_of

TUNED = "max-autotune-no-cudagraphs"


@dataclass(frozen=True)
class Setting:
    """How cases are run. On "cpu" Triton's interpreter runs our kernels, slowly."""

    device: str = "cuda"
    rounds: int = 6
    mode: str | None = None  # of torch.compile

    @property
    def dtype(self) -> torch.dtype:
        return (
            torch.float32 if self.device == "cpu" else torch.bfloat16
        )  # the interpreter's bf16 products are wrong


@dataclass(frozen=True)
class Limits:
    """What this card does at most, measured: a matrix product's TFLOP/s, and GB/s that a copy reads and writes."""

    matrix: float
    copy: float


@dataclass(frozen=True)
class Result:
    case: str
    which: str  # forward or backward
    side: str
    ms: Spread | None  # None where the side cannot serve
    ratio: Spread | None = None  # its time over the first side's
    rate: float | None = None  # TFLOP/s; GB/s for decode, which reads
    share: float | None = None  # of a large matrix product's TFLOP/s, or of a copy's GB/s, on this card
    note: str = ""


def machine(setting: Setting) -> tuple[dict[str, str], Limits]:
    """Facts to print above a table, and the card's limits."""
    import triton

    on_card = setting.device == "cuda"
    n = 8192 if on_card else 256
    square = torch.randn(n, n, dtype=setting.dtype, device=setting.device)
    much = torch.empty(1 << (30 if on_card else 16), dtype=torch.uint8, device=setting.device)
    product = 2 * n**3 / milliseconds(lambda: square @ square, setting) / 1e9
    copy = 2 * much.numel() / milliseconds(much.clone, setting) / 1e6
    facts = {
        "device": torch.cuda.get_device_name() if on_card else "cpu",
        "torch": f"torch {torch.__version__}",
        "triton": f"triton {triton.__version__}",
        "python": f"Python {platform.python_version()}",
        "date": time.strftime("%Y-%m-%d"),
        "matrix": f"matrix product {product:.0f} TFLOP/s",
        "copy": f"copy {copy:.0f} GB/s",
    }
    return facts, Limits(product, copy)


def milliseconds(call: Callable[[], Any], setting: Setting) -> float:
    """The median time of one call."""
    if setting.device == "cuda":
        from triton.testing import do_bench

        return do_bench(call, warmup=20, rep=80, quantiles=[0.5])
    return in_rounds.milliseconds(call)


def compiled(fn: Callable, setting: Setting, configs: dict[str, Any] | None = None) -> Callable:
    """`fn` compiled by the backend, whether or not the package is installed."""
    from flex_inductor.backend import flex_inductor

    fn = _apart(fn)
    options = None if configs is None else {"configs": configs}
    if setting.device == "cpu":
        from ..interpret import compiled as interpreted

        return interpreted(fn, options=options, dynamic=False)
    backend = partial(flex_inductor, mode=setting.mode, options=options)
    return torch.compile(fn, backend=backend, dynamic=False)


def _apart(fn: Callable) -> Callable:
    """A copy of `fn` with its own bytecode: after eight compilations of one function Dynamo stops compiling it."""

    def attend(*args: Any) -> Any:
        return fn(*args)

    code = attend.__code__.replace(co_name=f"attend_{next(_numbers)}")
    return types.FunctionType(code, attend.__globals__, code.co_name, None, attend.__closure__)


_numbers = itertools.count()


class _Call:
    """The tensors of a case, and what uncompiled attention makes of them in fp32."""

    def __init__(self, case: Case, setting: Setting):
        torch.manual_seed(0)
        self.case, self.setting = case, setting
        *self.inputs, self.grad = tensors_of(case, setting.device, setting.dtype)
        score_mod, captures, mask_mod = mods_of(case, setting.device)
        self.wanted = () if case.decoding else (*self.inputs, *captures)
        lengths = self.inputs[0].size(2), case.length
        block_mask = mask_mod and create_block_mask(mask_mod, None, None, *lengths, device=setting.device)
        self.options = {
            "score_mod": score_mod,
            "block_mask": block_mask,
            "enable_gqa": case.heads != case.kv_heads,
        }
        wide = [t.detach().float().requires_grad_(not case.decoding) for t in self.inputs]
        wide_wanted = (*wide, *captures) if self.wanted else ()
        out = flex_attention(wide[0], wide[1], wide[2], **self.options)
        self.gold = self._results(out, wide_wanted, self.grad.float())

    def attend(self, side: Side) -> Callable:
        """The function of query, key and value that is measured."""
        if side.who == OURS:
            return compiled(partial(flex_attention, **self.options), self.setting, side.configs)
        backends = {FLASH: SDPBackend.FLASH_ATTENTION, CUDNN: SDPBackend.CUDNN_ATTENTION}
        if side.who in backends:
            only = partial(sdpa_kernel, backends[side.who]) if self.setting.device == "cuda" else nullcontext
            return partial(_sdpa, only, not self.case.decoding, self.options["enable_gqa"])
        hints = {"BACKEND": "FLASH"} if side.who == FLEX_FLASH else None
        attend = _apart(partial(torch_flex_attention, **self.options, kernel_options=hints))
        backend = "inductor" if self.setting.device == "cuda" else "eager"  # which compiles nothing
        return torch.compile(attend, backend=backend, mode=self.setting.mode, dynamic=False)

    def check(self, side: Side) -> None:
        """Raise where what the side gives is wrong, or comes from another route than is measured."""
        decisions(clear=True)
        out = self.attend(side)(*self.inputs)
        found = self._results(out, self.wanted, self.grad)
        routes = [decision.chosen for decision in decisions()]
        if side.who == OURS and routes != ["triton"] * len(self.case.passes):
            raise RuntimeError(f"served by {', '.join(routes) or 'no route'}, not by triton")
        bound = 8 * torch.finfo(torch.bfloat16).eps
        for got, want in zip(found, self.gold, strict=True):
            error = (got.float() - want).abs().max() / want.abs().max()
            if not error < bound:
                raise RuntimeError(f"wrong: relative error {error:.2g}, expected below {bound:.2g}")

    def calls(self, side: Side) -> dict[str, Callable[[], Any]]:
        """What is timed, by pass."""
        attend = self.attend(side)
        found: dict[str, Callable[[], Any]] = {FORWARD: partial(attend, *self.inputs)}
        if self.wanted:
            found[BACKWARD] = partial(
                torch.autograd.grad, attend(*self.inputs), self.wanted, self.grad, retain_graph=True
            )
        return found

    @staticmethod
    def _results(out: Tensor, wanted: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
        """The output, and the gradients that are wanted."""
        return [out.detach(), *(torch.autograd.grad(out, wanted, grad) if wanted else ())]


_call_of = functools.lru_cache(maxsize=1)(_Call)  # the next side of a case has the same tensors


def _sdpa(only: Callable, causal: bool, gqa: bool, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with only():
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return sdpa(query, key, value, is_causal=causal, enable_gqa=gqa)


def prepare(case: Case, side: Side, setting: Setting) -> None:
    """Compile what is to be timed, which leaves it in the caches on disk, and check what it gives."""
    torch._dynamo.reset()
    with _keeping_buffers():
        _call_of(case, setting).check(side)


def measure(case: Case, sides: Sequence[Side], setting: Setting, limits: Limits) -> list[Result]:
    """Time sides that have been prepared. Ratios are to the first."""
    torch._dynamo.reset()
    with _keeping_buffers():
        call = _call_of(case, setting)
        calls = {side.name: call.calls(side) for side in sides}
        return [result for which in case.passes for result in _timed(case, which, calls, setting, limits)]


def _keeping_buffers() -> Any:
    """A backward that is timed alone runs many times on what one forward saved."""
    import torch._functorch.config as functorch_config

    return functorch_config.patch(donated_buffer=False)


def _timed(
    case: Case, which: str, calls: dict[str, dict[str, Callable]], setting: Setting, limits: Limits
) -> Iterator[Result]:
    sides = {side: partial(milliseconds, of_side[which], setting) for side, of_side in calls.items()}
    times = alternate(sides, setting.rounds)
    first = next(iter(times.values()))
    for side, found in times.items():
        ms = Spread.of(found)
        rate = case.work(which) / ms.median
        share = rate / (limits.copy if case.decoding else limits.matrix)
        yield Result(case.title, which, side, ms, over(found, first), rate, share)
