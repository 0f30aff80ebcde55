"""Serve several requests with a small transformer: pages of a shared cache, and requests that join and leave.

Each step is one call of the model: the prompts of requests that have joined, and one token of each of the others. One
that finds no free page gives its pages back and starts again later. Each gets the tokens that it gets alone.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flex_inductor import Sequences, append_kv, decisions, varlen_attention

VOCAB, WIDTH, HEADS, HEAD_DIM, LAYERS = 64, 64, (4, 2, 2), 16, 2  # heads of queries, keys and values
PAGES, PAGE, MOST_KEYS = 8, 16, 96  # of the pool, tokens of a page, tokens of a request
MOST_REQUESTS, MOST = 3, 128  # of a step: all have tensors of one size, so one kernel serves them
ANGLE = torch.arange(MOST_KEYS)[:, None] * 10000 ** (-torch.arange(HEAD_DIM // 2) * 2 / HEAD_DIM)


@dataclass
class Request:
    tokens: list[int]  # the prompt, then the answer
    end: int  # how many there will be
    cached: int = 0  # tokens whose keys are in the cache
    pages: list[int] = field(default_factory=list)

    def grow(self, free: list[int]) -> bool:
        """Take the pages that the next tokens need, if there are as many."""
        needed = -(-len(self.tokens) // PAGE) - len(self.pages)
        self.pages += [free.pop() for _ in range(needed if needed <= len(free) else 0)]
        return len(self.pages) * PAGE >= len(self.tokens)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, sum(HEADS) * HEAD_DIM) for _ in range(LAYERS))
        self.out = nn.ModuleList(nn.Linear(HEADS[0] * HEAD_DIM, WIDTH) for _ in range(LAYERS))

    def forward(self, tokens: Tensor, sequences: Sequences, mask, caches: list) -> Tensor:
        x = self.embedding(tokens)
        for qkv, out, cache in zip(self.qkv, self.out, caches, strict=True):
            q, k, v = qkv(F.layer_norm(x, (WIDTH,))).unflatten(-1, (-1, HEAD_DIM)).split(HEADS, 1)
            q = append_kv(*cache, k, v, sequences, (ANGLE.cos(), ANGLE.sin()), q=q)
            y = varlen_attention(q, *cache, sequences, block_mask=mask, enable_gqa=True)
            x = x + out(y.flatten(1))
        return self.head(x).argmax(-1)  # the most likely token after each


def step(model, requests: list[Request], caches: list) -> None:
    counts, used = torch.zeros(2, MOST_REQUESTS, dtype=torch.int32)
    pages = torch.zeros(MOST_REQUESTS, MOST_KEYS // PAGE, dtype=torch.int32)
    for n, one in enumerate(requests):
        counts[n], used[n] = len(one.tokens) - one.cached, len(one.tokens)
        pages[n, : len(one.pages)] = torch.tensor(one.pages)
    offsets = F.pad(counts.cumsum(0), (1, 0)).int()
    sequences = Sequences(offsets, used_k=used, pages=pages, page_size=PAGE, max_q=MOST, max_k=MOST_KEYS)
    new = torch.tensor([token for one in requests for token in one.tokens[one.cached :]])
    causal = sequences.mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)
    found = model(F.pad(new, (0, MOST - len(new))), sequences, causal, caches)
    for one, end in zip(requests, offsets[1:].tolist(), strict=False):
        one.cached = len(one.tokens)
        one.tokens.append(int(found[end - 1]))


def serve(model, requests: list[Request]) -> int:  # how many steps it took
    caches = [[torch.zeros(PAGES, PAGE, HEADS[1], HEAD_DIM) for _ in "kv"] for _ in range(LAYERS)]
    waiting, running, free, steps = list(requests), [], list(range(PAGES)), 0
    while waiting or running:
        while waiting and len(running) < MOST_REQUESTS and waiting[0].grow(free):
            running.append(waiting.pop(0))
        step(model, running, caches)
        steps += 1
        for one in sorted(running, key=lambda one: len(one.tokens) < one.end):  # first those that have ended
            if (ended := len(one.tokens) == one.end) or not one.grow(free):
                running.remove(one)
                free += one.pages
                one.pages, one.cached = [], 0
                waiting[:0] = [] if ended else [one]
    return steps


def main() -> None:
    torch.manual_seed(0)
    run = torch.compile(Model().eval(), backend="flex_inductor", fullgraph=True)
    sizes = [(40, 30), (3, 12), (17, 20), (1, 40), (33, 3)]  # of prompts and answers
    together = [Request(torch.randint(VOCAB, (prompt,)).tolist(), prompt + more) for prompt, more in sizes]
    with torch.no_grad():
        print(f"{len(sizes)} requests, {sum(more for _, more in sizes)} tokens, {serve(run, together)} steps")
        for one, (prompt, _) in zip(together, sizes, strict=True):
            serve(run, [alone := Request(one.tokens[:prompt], one.end)])
            assert one.tokens == alone.tokens
    print("each has the tokens that it has alone;", *{f"route: {found.chosen}" for found in decisions()})


if __name__ == "__main__":
    main()
