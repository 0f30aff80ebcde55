"""The calls that are measured on a card, most telling first, the sides that serve each, and how they are timed."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import platform
import time
import types
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

from flex_inductor import decisions, flex_attention

from . import harness
from .call import WINDOW, Call, Made, documents
from .harness import OURS, Result, alternate, check, results_of

FLEX, FLEX_FLASH, FLASH, CUDNN = "torch flex", "torch flex FLASH", "SDPA flash", "SDPA cuDNN"
FORWARD, BACKWARD = "forward", "backward"
TOKENS = 16384  # in a batch, so that every length does comparable work
TUNED = "max-autotune-no-cudagraphs"


@dataclass(frozen=True)
class Case(Call):
    """One call, forward and backward timed apart; aims are by pass and side."""

    def title_of(self, which: str) -> str:
        return f"{self.title} {which}"

    @property
    def passes(self) -> tuple[str, ...]:
        return (FORWARD, BACKWARD) if self.backward else (FORWARD,)

    @property
    def pairs(self) -> float:
        """How many (query, key) pairs of a head the mask leaves."""
        n = self.length
        if self.decoding:
            return n
        if self.variant == "window":
            return WINDOW * n - WINDOW * (WINDOW - 1) / 2
        parts = documents(n).bincount() if self.variant == "documents" else torch.tensor([n])
        return (parts * (parts + 1) / 2).sum().item()

    def work(self, which: str) -> float:
        """Operations, so that dividing by milliseconds gives TFLOP/s; for decode bytes read, for GB/s."""
        if self.decoding:
            return 2 * self.batch * self.kv_heads * self.length * self.head_dim * 2 / 1e6
        products = 2 if which == FORWARD else 5
        return self.batch * self.heads * self.pairs * self.head_dim * 2 * products / 1e9

    def small(self) -> Case:
        """The same kind of call, small enough for an interpreter, whose bf16 products are wrong."""
        sizes: dict[str, Any] = {"head_dim": 16, "length": 64, "heads": 2, "kv_heads": 1 if self.gqa else 2}
        return replace(self, **sizes, batch=1, dtype=torch.float32)


def _case(variant: str, head_dim: int, length: int, heads: int = 16, kv_heads: int = 16, **aims: Any) -> Case:
    decoding = variant == "decode"
    return Case(
        variant,
        length,
        head_dim,
        heads,
        kv_heads,
        batch=4 if decoding else max(1, TOKENS // length),
        backward=not decoding,
        aims={(which, side): aim for which, sides in aims.items() for side, aim in sides.items()},
    )


CASES = (
    _case("causal", 128, 8192, forward={FLEX: 1.5, CUDNN: 0.9}, backward={FLEX: 2, CUDNN: 0.85}),
    _case("documents", 128, 8192, forward={FLEX: 1.8}, backward={FLEX: 2.5}),
    _case("bias", 128, 8192, backward={FLEX: 3}),
    _case("decode", 128, 32768, 64, 8, forward={OURS: "75% of a copy"}),
    _case("causal", 64, 8192),
    _case("GQA 8:1", 128, 8192, 16, 2),
    _case("alibi", 128, 8192),
    _case("window", 128, 8192),
    _case("causal", 256, 8192),
    _case("causal", 128, 2048),
    _case("causal", 128, 16384),
    _case("bias", 64, 8192),
    _case("documents", 64, 8192),
    _case("alibi", 64, 8192),
    _case("window", 64, 16384),
    _case("decode", 64, 8192, 64, 8),
    _case("GQA 8:1", 64, 16384, 16, 2),
    _case("causal", 64, 2048),
    _case("causal", 256, 2048),
    _case("documents", 256, 8192),
    _case("alibi", 256, 8192),
    _case("bias", 256, 8192),
    _case("causal", 128, 4096),
)


@dataclass(frozen=True)
class Side:
    """One implementation; ours with the config that is asked for a kernel, if one is."""

    who: str = OURS
    kernel: str = ""
    config: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, kernel: str, **sizes: int) -> Side:
        return cls(OURS, kernel, tuple(sizes.items()))

    def sizes(self, kernel: str) -> dict[str, int]:
        return dict(self.config) if kernel == self.kernel else {}

    @property
    def configs(self) -> dict[str, dict[str, int]] | None:
        """As `options={"configs": ...}` takes it."""
        return {self.kernel: dict(self.config)} if self.kernel else None

    @property
    def name(self) -> str:
        shown = " ".join(f"{name}={size}" for name, size in self.config) or "as it is"
        return f"{self.kernel} {shown}" if self.kernel else self.who


def sides_of(case: Case) -> list[Side]:
    """Ours first, then those of others that can serve the call."""
    sides = [Side(), Side(FLEX)]
    if importlib.util.find_spec("flash_attn") and importlib.util.find_spec("flash_attn.cute"):
        sides.append(Side(FLEX_FLASH))
    if case.variant in ("causal", "decode", "GQA 8:1"):
        sides += [Side(FLASH), Side(CUDNN)]
    return sides


@dataclass(frozen=True)
class Setting:
    """How cases are run. On "cpu" Triton's interpreter runs our kernels, slowly."""

    device: str = "cuda"
    rounds: int = 6
    mode: str | None = None  # of torch.compile


@dataclass(frozen=True)
class Limits:
    """What this card does at most, measured: a matrix product's TFLOP/s, and GB/s that a copy reads and writes."""

    matrix: float
    copy: float


def facts(setting: Setting) -> tuple[dict[str, str], Limits]:
    """Facts to print above a table, and the card's limits."""
    import triton

    on_card = setting.device == "cuda"
    n, dtype = (8192, torch.bfloat16) if on_card else (256, torch.float32)
    square = torch.randn(n, n, dtype=dtype, device=setting.device)
    much = torch.empty(1 << (30 if on_card else 16), dtype=torch.uint8, device=setting.device)
    product = 2 * n**3 / milliseconds(lambda: square @ square, setting) / 1e9
    copy = 2 * much.numel() / milliseconds(much.clone, setting) / 1e6
    found = {
        "device": torch.cuda.get_device_name() if on_card else "cpu",
        "torch": f"torch {torch.__version__}",
        "triton": f"triton {triton.__version__}",
        "python": f"Python {platform.python_version()}",
        "date": time.strftime("%Y-%m-%d"),
        "matrix": f"matrix product {product:.0f} TFLOP/s",
        "copy": f"copy {copy:.0f} GB/s",
    }
    return found, Limits(product, copy)


def milliseconds(call: Callable[[], Any], setting: Setting) -> float:
    """The median time of one call."""
    if setting.device == "cuda":
        from triton.testing import do_bench

        return do_bench(call, warmup=20, rep=80, quantiles=[0.5])
    return harness.milliseconds(call)


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


@functools.lru_cache(maxsize=1)  # the next side of a case has the same tensors
def _made(case: Case, setting: Setting) -> tuple[Made, list[Tensor]]:
    """The case's tensors, and what uncompiled attention makes of them."""
    torch.manual_seed(0)
    made = Made(case, setting.device)
    return made, made.gold(torch.float32)


def attend_of(side: Side, made: Made, setting: Setting) -> Callable:
    """The function of query, key and value that is measured."""
    on_card, gqa = setting.device == "cuda", made.call.gqa
    if side.who == OURS:
        return compiled(partial(flex_attention, **made.options), setting, side.configs)
    backends = {FLASH: SDPBackend.FLASH_ATTENTION, CUDNN: SDPBackend.CUDNN_ATTENTION}
    if side.who in backends:
        only = partial(sdpa_kernel, backends[side.who]) if on_card else nullcontext
        return partial(_sdpa, only, not made.call.decoding, gqa)
    hints = {"BACKEND": "FLASH"} if side.who == FLEX_FLASH else None
    attend = _apart(partial(torch_flex_attention, **made.options, kernel_options=hints))
    backend = "inductor" if on_card else "eager"  # which compiles nothing
    return torch.compile(attend, backend=backend, mode=setting.mode, dynamic=False)


def _sdpa(only: Callable, causal: bool, gqa: bool, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with only():
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return sdpa(query, key, value, is_causal=causal, enable_gqa=gqa)


def prepare(case: Case, side: Side, setting: Setting) -> None:
    """Compile what is to be timed, which leaves it in the caches on disk.

    Raises where the side gives what is wrong, or is served by another route than is measured.
    """
    torch._dynamo.reset()
    with _keeping_buffers():
        made, gold = _made(case, setting)
        decisions(clear=True)
        found = made.results(attend_of(side, made, setting))
    routes = [decision.chosen for decision in decisions()]
    if side.who == OURS and routes != ["triton"] * len(case.passes):
        raise RuntimeError(f"served by {', '.join(routes) or 'no route'}, not by triton")
    check(found, gold, torch.bfloat16)


def measure(case: Case, sides: Sequence[Side], limits: Limits, setting: Setting) -> list[Result]:
    """Time sides that have been prepared. Ratios are to the first."""
    torch._dynamo.reset()
    with _keeping_buffers():
        made, _ = _made(case, setting)
        calls: dict[str, dict[str, Callable[[], float]]] = {which: {} for which in case.passes}
        for side in sides:
            attend = attend_of(side, made, setting)
            runs = {FORWARD: partial(attend, *made.inputs)}
            if case.backward:
                wanted = [*made.inputs, *made.captures]
                runs[BACKWARD] = partial(
                    torch.autograd.grad, attend(*made.inputs), wanted, made.grad, retain_graph=True
                )
            for which, run in runs.items():
                calls[which][side.name] = partial(milliseconds, run, setting)

        def rates(which: str, side: str, times: list[float]) -> dict[str, Any]:
            rate = case.work(which) / harness.Spread.of(times).median
            most, unit = (limits.copy, "GB/s") if case.decoding else (limits.matrix, "TFLOP/s")
            aim = case.aims.get((which, side), "")
            return {"rate": f"{rate:.0f} {unit}", "share": f"{rate / most:.0%}", "aim": aim}

        return [
            result
            for which in case.passes
            for result in results_of(
                case.title_of(which), alternate(calls[which], setting.rounds), partial(rates, which)
            )
        ]


def _keeping_buffers() -> Any:
    """A backward that is timed alone runs many times on what one forward saved."""
    import torch._functorch.config as functorch_config

    return functorch_config.patch(donated_buffer=False)
