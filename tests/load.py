"""Calls of all kinds from eight threads, while another compiles: each result is checked, and memory must not grow.

`make load MINUTES=60`. New mods are compiled during the first half; what they leave in torch's caches stays, so memory is
judged in the second.
"""

from __future__ import annotations

import argparse
import itertools
import random
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from flex_inductor import Sequences, create_block_mask, flex_attention, varlen_attention

THREADS = 8
MOST_GROWTH = 1.0  # MiB a minute


def one_at_a_time(function: Callable) -> Callable:
    """Compiled. Dynamo's guards of one function race: called by several threads, it is compiled again and again."""
    lock, attend = threading.Lock(), torch.compile(function, backend="flex_inductor", dynamic=True)

    def call(*args: Any) -> Any:
        with lock:
            return attend(*args)

    return call


compiled, compiled_packed = one_at_a_time(flex_attention), one_at_a_time(varlen_attention)


def inputs(length: int, seed: int, heads: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, heads, length, 16, generator=generator, requires_grad=True) for _ in range(3)]


def trained(attention: Callable, score_mod: Any, mask_mod: Any) -> Callable[[int], list[torch.Tensor]]:
    def call(seed: int) -> list[torch.Tensor]:
        qkv = inputs(40 + seed % 3 * 50, seed)
        length = qkv[0].size(2)
        mask = mask_mod and create_block_mask(mask_mod, None, None, length, length, "cpu", 16)
        out = attention(*qkv, score_mod, mask)
        return [out, *torch.autograd.grad(out.sin().sum(), qkv)]

    return call


def packed(attention: Callable) -> Callable[[int], list[torch.Tensor]]:
    def call(seed: int) -> list[torch.Tensor]:
        lengths = [5 + seed % 7, 30, 1]
        sequences = Sequences.from_lengths(lengths)
        qkv = [t[0].transpose(0, 1) for t in inputs(sum(lengths), seed)]
        mask = sequences.mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)
        return [attention(*qkv, sequences, None, mask)]

    return call


def decoded(attention: Callable) -> Callable[[int], list[torch.Tensor]]:
    def call(seed: int) -> list[torch.Tensor]:
        query, key, value = (t.detach() for t in inputs(300 + seed % 5, seed))
        with torch.no_grad():
            return [attention(query[:, :, :1], key, value, softcapped)]

    return call


def biased(score, b, h, q_idx, kv_idx):
    return score - 0.1 * (q_idx - kv_idx).abs()


def softcapped(score, b, h, q_idx, kv_idx):
    return 2 * torch.tanh(score / 2)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


CALLS = {
    "eager": trained(flex_attention, biased, causal),
    "compiled": trained(compiled, biased, causal),
    "compiled without mods": trained(compiled, None, None),
    "packed": packed(varlen_attention),
    "packed, compiled": packed(compiled_packed),
    "decoded": decoded(compiled),
}
SEEDS = range(12)


def resident() -> float:
    """MiB of memory that the process has."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20


def slope(points: list[tuple[float, float]]) -> float:
    """By least squares."""
    times, values = (torch.tensor(side, dtype=torch.float64) for side in zip(*points, strict=True))
    times = times - times.mean()
    return float((times * values).sum() / times.square().sum())


def load(minutes: float) -> list[str]:
    """What went wrong."""
    began = time.monotonic()
    half, end = began + 30 * minutes, began + 60 * minutes
    wrong: list[str] = []
    done: Counter[str] = Counter()
    expected = {(name, seed): call(seed) for name, call in CALLS.items() for seed in SEEDS}
    print(f"{time.monotonic() - began:.0f} s until everything has been called once", flush=True)

    def repeat(number: int) -> None:
        draw = random.Random(number)
        while time.monotonic() < end and not wrong:
            name, seed = draw.choice([*expected])
            try:
                for got, want in zip(CALLS[name](seed), expected[name, seed], strict=True):
                    torch.testing.assert_close(got, want)
                done[name] += 1
            except Exception:
                wrong.append(f"{name}, seed {seed}:\n{traceback.format_exc()}")

    def compile_more() -> None:
        for number in itertools.count():
            if time.monotonic() > half or wrong:
                return
            try:
                factor = 1 + number / 1000
                mod = eval(f"lambda score, b, h, q_idx, kv_idx: score * {factor} + h")
                names = {"flex_attention": flex_attention, "mod": mod}
                call = eval("lambda q, k, v: flex_attention(q, k, v, mod)", names)  # a code of its own
                attend = torch.compile(call, backend="flex_inductor")
                qkv = inputs(64, number)
                torch.testing.assert_close(attend(*qkv), flex_attention(*qkv, mod))
                done["compilations"] += 1
            except Exception:
                wrong.append(f"compilation {number}:\n{traceback.format_exc()}")

    threads = [threading.Thread(target=repeat, args=(i,), daemon=True) for i in range(THREADS)]
    threads.append(threading.Thread(target=compile_more, daemon=True))
    for thread in threads:
        thread.start()
    points: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    while any(thread.is_alive() for thread in threads):
        now = time.monotonic()
        if now > end + 300:
            return [*wrong, "threads are still running five minutes after the end"]
        points[now > half].append(((now - began) / 60, resident()))
        time.sleep(1)
    print(", ".join(f"{name} {count}" for name, count in sorted(done.items())))
    for late, found in points.items():
        if len(found) > 10:
            growth = slope(found[len(found) // 4 :])
            print(
                f"{'calls alone' if late else 'with compilations'}: {found[-1][1]:.0f} MiB, {growth:+.2f} MiB a minute"
            )
            if late and growth > MOST_GROWTH:
                wrong.append(f"memory grows by {growth:.2f} MiB a minute; at most {MOST_GROWTH} is expected")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.load", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    wrong = load(parser.parse_args().minutes)
    print("\n".join(wrong) or "nothing went wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
