"""`flex-inductor bench huggingface`: transformers models with attn_implementation="flex_inductor", next to sdpa.

A Llama of 6 layers and hidden size 512 from a config made on the spot, fp32. The sides take turns, in the opposite
order every second round; shown are the median and the middle half, and how many times as long as ours sdpa takes.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from flex_inductor import create_block_mask, flex_attention
from flex_inductor.masks import document

from ..users_code import Refused
from .call import documents
from .harness import Result, Spread, alternate, milliseconds, over, results_of

HELP = "transformers models, next to sdpa"
OPTIONS: dict[str, Any] = {}
COLUMNS = ("side", "ms", "over ours")
OURS, SDPA = "flex_inductor", "sdpa"
BACKENDS = {OURS: "flex_inductor", SDPA: "inductor"}
LAYERS, HIDDEN, HEADS, VOCAB = 6, 512, 8, 1000
CACHED, ROOM = 512, 1024  # tokens in the cache, and a static cache's length
LENGTH, DOCUMENTS = 2048, 4  # of a training step
ALONE = " alone"  # the attention of a training step


class Case(NamedTuple):
    title: str
    rounds: int
    step: Callable[[str], Callable[[], float]]  # of a side, prepared: its milliseconds


def cases(_: Namespace) -> tuple[Case, ...]:
    if find_spec("transformers") is None:
        raise Refused("this needs transformers: pip install 'flex-inductor[transformers]'")
    return CASES


def measure(case: Case, _: Namespace) -> list[Result]:
    from torch._dynamo.utils import counters

    sides = {side: case.step(side) for side in BACKENDS}
    if case.step is training:
        sides |= {side + ALONE: attention(side) for side in BACKENDS}
    graphs = counters["stats"]["unique_graphs"]
    times = alternate(sides, case.rounds)
    found = results_of(case.title, {side: times[side] for side in BACKENDS})
    if case.step is training:
        found += results_of("attention alone", {side: times[side + ALONE] for side in BACKENDS})
        found.append(Result("attention alone", "its share", note=share(times)))
    if counters["stats"]["unique_graphs"] != graphs:
        found.append(Result(case.title, "", note="compiled again while timed"))
    return found


def share(times: dict[str, list[float]]) -> str:
    """What of the time that attention alone saves is saved in a step."""

    def saved(theirs: str, ours: str) -> list[float]:
        return [sdpa - own for sdpa, own in zip(times[theirs], times[ours], strict=True)]

    step, alone = saved(SDPA, OURS), saved(SDPA + ALONE, OURS + ALONE)
    shares = ", ".join(f"{side} {1 / over(times[side], times[side + ALONE]).median:.0%}" for side in BACKENDS)
    return f"{shares} of a step; saved of the {Spread.of(alone)} ms it allows: {over(step, alone)}"


def llama(side: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    import_module("flex_inductor.integrations.transformers")  # makes our side known
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN * 11 // 4,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": LENGTH,
        "attn_implementation": side,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes)).eval()


@torch.no_grad()
def filled(model: Any, room: int | None = None, batch: int = 1) -> Any:
    """A cache, static if it has a length."""
    from transformers import DynamicCache, StaticCache

    config = model.config
    past = StaticCache(config=config, max_cache_len=room) if room else DynamicCache(config=config)
    model(torch.ones(batch, CACHED, dtype=torch.int64), past_key_values=past)
    return past


def mask(side: str) -> Callable[[], float]:
    """The mask of a decode step, of a batch that is padded."""
    from transformers import masking_utils

    padding = torch.ones(2, CACHED + 1, dtype=torch.int64)
    padding[0, :100] = 0
    model = llama(side)
    given = model.config, torch.empty(2, 1, 0), padding, filled(model, batch=2)
    return partial(milliseconds, partial(masking_utils.create_causal_mask, *given))


def decode(side: str) -> Callable[[], float]:
    """A step, eagerly."""
    model = llama(side)
    past, token = filled(model), torch.ones(1, 1, dtype=torch.int64)

    @torch.no_grad()
    def step() -> float:
        took = milliseconds(lambda: model(token, past_key_values=past))
        past.crop(-1)
        return took

    return step


def static(side: str) -> Callable[[], float]:
    """A step, compiled, with a static cache that goes on filling."""
    model = llama(side)
    past, token = filled(model, ROOM), torch.ones(1, 1, dtype=torch.int64)
    compiled = torch.compile(model, backend=BACKENDS[side], fullgraph=True)

    @torch.no_grad()
    def step() -> float:
        return milliseconds(lambda: compiled(token, past_key_values=past))

    step(), step()
    return step


def training(side: str) -> Callable[[], float]:
    """Forward and backward of packed documents, compiled."""
    ids = documents(LENGTH, DOCUMENTS)
    positions = torch.arange(LENGTH) - torch.searchsorted(ids, ids)
    tokens = torch.randint(0, VOCAB, (1, LENGTH))
    model = llama(side).train()
    compiled = torch.compile(model, backend=BACKENDS[side], fullgraph=True)

    def step() -> None:
        compiled(tokens, position_ids=positions[None], labels=tokens, use_cache=False).loss.backward()
        model.zero_grad()

    step()
    return partial(milliseconds, step)


def attention(side: str) -> Callable[[], float]:
    """The attention of a training step alone: each layer's forward and backward, compiled."""
    ids = documents(LENGTH, DOCUMENTS)
    dense = (ids[:, None] == ids) & torch.ones(LENGTH, LENGTH).tril().bool()
    blocks = create_block_mask(document(ids), None, None, LENGTH, LENGTH, "cpu")
    calls = {
        OURS: lambda q, k, v: flex_attention(q, k, v, block_mask=blocks),
        SDPA: lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, dense[None, None]),
    }
    attend = torch.compile(calls[side], backend=BACKENDS[side], fullgraph=True)
    shape = (1, LENGTH, HEADS, HIDDEN // HEADS)  # as projections give them
    inputs = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    gradient = torch.randn(shape).transpose(1, 2)

    def layers() -> None:
        for _ in range(LAYERS):
            attend(*(t.transpose(1, 2) for t in inputs)).backward(gradient)

    layers()
    return partial(milliseconds, layers)


CASES = (
    Case("mask", 50, mask),
    Case("decode", 100, decode),
    Case("static", 100, static),
    Case("training", 5, training),
)
