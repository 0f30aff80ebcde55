"""Serve several requests with a small transformer: pages of a shared cache, and requests that join and leave.

Each step is one call of the model for all requests at once: prompts of those that have joined, and one token of each of
the others. The weights are random; what is shown is that each request gets the tokens that it gets when it is alone.
"""

from __future__ import annotations

import dataclasses
import sys

import torch
from torch import Tensor, nn

import flex_inductor
from flex_inductor import Sequences, append_kv, varlen_attention

VOCAB, WIDTH, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 64, 4, 2, 16, 2
PAGES, PAGE, MOST_PAGES = 8, 16, 6  # of the pool, tokens of a page, of a request
MOST_REQUESTS, MOST_TOKENS = 3, 128  # of a step


@dataclasses.dataclass
class Request:
    prompt: list[int]
    wanted: int  # new tokens
    tokens: list[int] = dataclasses.field(default_factory=list)
    cached: int = 0  # tokens whose keys are in the cache
    pages: list[int] = dataclasses.field(default_factory=list)

    @property
    def next(self) -> list[int]:
        """What the model has not seen yet."""
        return (self.prompt + self.tokens)[self.cached :]


class Pages:
    """Which pages of the pool are free."""

    def __init__(self) -> None:
        self.free = list(range(PAGES))

    def grow(self, request: Request) -> bool:
        """Give a request the pages that its next tokens need, if there are as many."""
        needed = -(-(request.cached + len(request.next)) // PAGE) - len(request.pages)
        if needed > len(self.free):
            return False
        request.pages += [self.free.pop() for _ in range(needed)]
        return True

    def release(self, request: Request) -> None:
        self.free += request.pages
        request.pages = []


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        for name in ("k_cache", "v_cache"):
            self.register_buffer(name, torch.zeros(PAGES, PAGE, KV_HEADS, HEAD_DIM))

    def forward(self, x: Tensor, sequences: Sequences, mask, rotary: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = (
            self.qkv(self.norms[0](x)).unflatten(-1, (-1, HEAD_DIM)).split((HEADS, KV_HEADS, KV_HEADS), 1)
        )
        q = append_kv(self.k_cache, self.v_cache, k, v, sequences, rotary, q=q)
        y = varlen_attention(q, self.k_cache, self.v_cache, sequences, block_mask=mask, enable_gqa=True)
        x = x + self.out(y.flatten(1))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        angle = torch.arange(MOST_PAGES * PAGE)[:, None] * 10000 ** (
            -torch.arange(HEAD_DIM // 2) * 2 / HEAD_DIM
        )
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, tokens: Tensor, sequences: Sequences, mask) -> Tensor:
        """The most likely token after each."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, sequences, mask, (self.cos, self.sin))
        return self.head(x).argmax(-1)


def causal(sequence, head, q_idx, kv_idx):
    return q_idx >= kv_idx


def step(model, requests: list[Request]) -> None:
    """One more token for each. All steps have tensors of one size, so that there is one kernel for all of them."""
    counts = [len(request.next) for request in requests] + [0] * (MOST_REQUESTS - len(requests))
    used = [request.cached + count for request, count in zip(requests, counts, strict=False)]
    table = torch.zeros(MOST_REQUESTS, MOST_PAGES, dtype=torch.int32)
    tokens = torch.zeros(MOST_TOKENS, dtype=torch.int64)
    for n, request in enumerate(requests):
        table[n, : len(request.pages)] = torch.tensor(request.pages)
    tokens[: sum(counts)] = torch.tensor([token for request in requests for token in request.next])
    sequences = Sequences(
        torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
        used_k=torch.tensor(used + [0] * (MOST_REQUESTS - len(used)), dtype=torch.int32),
        pages=table,
        page_size=PAGE,
        max_q=MOST_TOKENS,
        max_k=MOST_PAGES * PAGE,
    )
    found = model(tokens, sequences, sequences.mask(causal))
    for request, count, last in zip(requests, counts, sequences.cu_q[1:].tolist(), strict=False):
        request.cached += count
        request.tokens.append(int(found[last - 1]))


def serve(model, requests: list[Request]) -> int:
    """Run all requests to their end; returns how many steps that took."""
    waiting, running, pages, steps = list(requests), [], Pages(), 0
    while waiting or running:
        while waiting and len(running) < MOST_REQUESTS and pages.grow(waiting[0]):
            running.append(waiting.pop(0))
        step(model, running)
        steps += 1
        for request in [r for r in running if len(r.tokens) == r.wanted]:
            running.remove(request)
            pages.release(request)
        for request in list(running):
            if not pages.grow(request):  # which starts again once another has ended
                running.remove(request)
                pages.release(request)
                request.cached = 0
                waiting.insert(0, request)
    return steps


def main(compiled: bool = True) -> None:
    torch.manual_seed(0)
    model = Model().eval()
    run = torch.compile(model, backend="flex_inductor", fullgraph=True) if compiled else model
    sizes = [(40, 30), (3, 12), (17, 20), (1, 40), (33, 3)]
    prompts = [torch.randint(VOCAB, (length,)).tolist() for length, _ in sizes]
    with torch.no_grad():
        together = [Request(prompt, wanted) for prompt, (_, wanted) in zip(prompts, sizes, strict=True)]
        steps = serve(run, together)
        for request in together:
            alone = Request(request.prompt, request.wanted)
            serve(run, [alone])
            assert alone.tokens == request.tokens, (alone.tokens, request.tokens)
    produced = sum(wanted for _, wanted in sizes)
    print(
        f"{len(together)} requests, {produced} tokens in {steps} steps; each has the tokens that it has alone"
    )
    if compiled:
        kernels = {
            (found.chosen, choice.kernel) for found in flex_inductor.decisions() for choice in found.kernels
        }
        print("attention:", ", ".join(f"{route}, {kernel} kernel" for route, kernel in sorted(kernels)))


if __name__ == "__main__":
    main(compiled="--eager" not in sys.argv)
