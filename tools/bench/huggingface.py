"""`flex-inductor bench huggingface`: transformers models with attn_implementation="flex_inductor", next to sdpa.

A Llama of 6 layers and hidden size 512 from a config made on the spot, fp32. The sides take turns, in the opposite
order every second round; shown are the median and the middle half, and how many times as long as ours sdpa takes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ..files import to_write
from .harness import Result, Spread, alternate, milliseconds, over, results_of, run_cases

OURS, SDPA = "flex_inductor", "sdpa"
BACKENDS = {OURS: "flex_inductor", SDPA: "inductor"}
LAYERS, HIDDEN, HEADS, VOCAB = 6, 512, 8, 1000
CACHED, ROOM = 512, 1024  # tokens in the cache, and a static cache's length
LENGTH, DOCUMENTS = 2048, 4  # of a training step
ALONE = " alone"  # the attention of a training step
ROUNDS = {"mask": 50, "decode": 100, "static": 100, "training": 5}

Sides = dict[str, Callable[[], float]]


def register(kinds: Any) -> None:
    parser = kinds.add_parser("huggingface", help="transformers models, next to sdpa", description=__doc__)
    parser.add_argument("--only", choices=ROUNDS, nargs="+", default=list(ROUNDS), help="default: all")
    parser.add_argument("--json", metavar="FILE", type=to_write, help="write the results")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if find_spec("transformers") is None:
        print("this needs transformers: pip install 'flex-inductor[transformers]'")
        return 2
    chosen, arguments.only = arguments.only, None
    run_cases(chosen, measure, arguments, title=str)
    return 0


def measure(name: str) -> list[Result]:
    from torch._dynamo.utils import counters

    sides = CASES[name]()
    graphs = counters["stats"]["unique_graphs"]
    times = alternate(sides, ROUNDS[name])
    found = results_of(name, {side: times[side] for side in BACKENDS})
    if name == "training":
        found += results_of("attention alone", {side: times[side + ALONE] for side in BACKENDS})
        found.append(Result("attention alone", "its share", note=share(times)))
    if counters["stats"]["unique_graphs"] != graphs:
        found.append(Result(name, "", note="compiled again while timed"))
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
    config: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN * 11 // 4,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": LENGTH,
        "attn_implementation": side,
    }
    return LlamaForCausalLM(LlamaConfig(**config)).eval()


def mask_sides() -> Sides:
    """The mask of a decode step, of a batch that is padded."""
    from transformers import masking_utils

    padding = torch.ones(2, CACHED + 1, dtype=torch.int64)
    padding[0, :100] = 0

    def side(name: str) -> Callable[[], float]:
        config, embeddings, past = (
            llama(name).config,
            torch.empty(2, 1, 0),
            filled("dynamic", llama(name), batch=2),
        )
        return lambda: milliseconds(
            lambda: masking_utils.create_causal_mask(config, embeddings, padding, past)
        )

    return {name: side(name) for name in BACKENDS}


@torch.no_grad()
def filled(kind: str, model: Any, batch: int = 1) -> Any:
    from transformers import DynamicCache, StaticCache

    config = model.config
    past = (
        DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=ROOM)
    )
    model(torch.ones(batch, CACHED, dtype=torch.int64), past_key_values=past)
    return past


def decode_sides() -> Sides:
    """A step, eagerly."""

    @torch.no_grad()
    def step(model: Any, past: Any) -> float:
        took = milliseconds(lambda: model(torch.ones(1, 1, dtype=torch.int64), past_key_values=past))
        past.crop(-1)
        return took

    models = {name: llama(name) for name in BACKENDS}
    return {name: partial(step, model, filled("dynamic", model)) for name, model in models.items()}


def static_sides() -> Sides:
    """A step, compiled, with a static cache that goes on filling."""

    def side(name: str) -> Callable[[], float]:
        model = llama(name)
        past, token = filled("static", model), torch.ones(1, 1, dtype=torch.int64)
        compiled = torch.compile(model, backend=BACKENDS[name], fullgraph=True)

        @torch.no_grad()
        def step() -> float:
            return milliseconds(lambda: compiled(token, past_key_values=past))

        step(), step()
        return step

    return {name: side(name) for name in BACKENDS}


def documents() -> tuple[Tensor, Tensor]:
    """Of each token its position, and its document."""
    generator = torch.Generator().manual_seed(0)
    borders = torch.randint(1, LENGTH, (DOCUMENTS - 1,), generator=generator).sort().values
    document = torch.searchsorted(borders, torch.arange(LENGTH), right=True)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), borders])
    return torch.arange(LENGTH) - starts[document], document


def attention_sides() -> Sides:
    """The attention of a training step alone: each layer's forward and backward, compiled."""
    from flex_inductor import create_block_mask, flex_attention
    from flex_inductor.masks import document

    ids = documents()[1]
    dense = (ids[:, None] == ids) & torch.ones(LENGTH, LENGTH).tril().bool()
    blocks = create_block_mask(document(ids), None, None, LENGTH, LENGTH, "cpu")
    calls = {
        OURS: lambda q, k, v: flex_attention(q, k, v, block_mask=blocks),
        SDPA: lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, dense[None, None]),
    }

    def side(name: str) -> Callable[[], float]:
        attend = torch.compile(calls[name], backend=BACKENDS[name], fullgraph=True)
        shape = (1, LENGTH, HEADS, HIDDEN // HEADS)  # as projections give them
        inputs = [torch.randn(shape, requires_grad=True) for _ in range(3)]
        gradient = torch.randn(shape).transpose(1, 2)

        def layers() -> None:
            for _ in range(LAYERS):
                attend(*(t.transpose(1, 2) for t in inputs)).backward(gradient)

        layers()
        return lambda: milliseconds(layers)

    return {name + ALONE: side(name) for name in BACKENDS}


def training_sides() -> Sides:
    """Forward and backward of packed documents, compiled, and of their attention alone."""
    positions = documents()[0][None]
    ids = torch.randint(0, VOCAB, (1, LENGTH))

    def side(name: str) -> Callable[[], float]:
        model = llama(name).train()
        compiled = torch.compile(model, backend=BACKENDS[name], fullgraph=True)

        def step() -> None:
            compiled(ids, position_ids=positions, labels=ids, use_cache=False).loss.backward()
            model.zero_grad()

        step()
        return lambda: milliseconds(step)

    return {name: side(name) for name in BACKENDS} | attention_sides()


CASES: dict[str, Callable[[], Sides]] = {
    "mask": mask_sides,
    "decode": decode_sides,
    "static": static_sides,
    "training": training_sides,
}
