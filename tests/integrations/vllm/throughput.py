"""Tokens a second of 32 requests by this backend and by vLLM's own, in turn: medians, and quartiles of ratios in a round.

.venv-vllm/bin/python -m tests.integrations.vllm.throughput [--rounds 21] [--eager]
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REQUESTS, NEW = 32, 64
ENGINES = ("vllm", "flex_inductor", "flex_inductor with a score_mod")


def serve(folder: str, engine_name: str, eager: bool) -> None:
    """A process of one engine: a line asks for a round, and is answered by its seconds and those of all threads."""
    from flex_inductor.integrations.vllm import register_mods
    from tests.integrations.vllm.engines import engine, tokens_of
    from tests.integrations.vllm.models import prompts

    lengths = random.Random(0).choices((8, 30, 100, 200, 440), k=REQUESTS)
    options = {"max_num_seqs": REQUESTS, "enforce_eager": eager, "enable_prefix_caching": False}
    if engine_name == ENGINES[2]:
        register_mods("Llama", score_mod=lambda score, b, h, q_idx, kv_idx: score + (kv_idx - q_idx) * 0.01)
    with engine(folder, ours=engine_name != ENGINES[0], **options) as llm:
        for _ in range(2):
            tokens_of(llm, prompts(lengths), NEW)
        print("ready", flush=True)
        for line in sys.stdin:
            start, work = time.perf_counter(), time.process_time()
            tokens_of(llm, prompts(lengths, seed=int(line)), NEW)
            print(time.perf_counter() - start, time.process_time() - work, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--serve", nargs=2)
    given = parser.parse_args()
    if given.serve:
        serve(*given.serve, given.eager)
        return
    from tests.integrations.vllm.models import llama, save

    with tempfile.TemporaryDirectory() as folder:
        save(
            llama(
                hidden_size=256,
                intermediate_size=512,
                num_attention_heads=8,
                num_key_value_heads=4,
                num_hidden_layers=4,
            ),
            Path(folder),
        )
        workers = {name: start(folder, name, given.eager) for name in ENGINES}
        taken: dict[str, list[list[float]]] = {name: [] for name in ENGINES}
        for turn in range(given.rounds):
            for name in ENGINES if turn % 2 else ENGINES[::-1]:
                workers[name].stdin.write(f"{turn + 2}\n")
                workers[name].stdin.flush()
                taken[name].append(list(map(float, answer(workers[name]).split())))
        for worker in workers.values():
            worker.stdin.close()
            worker.wait()
    for kind, what in enumerate(("a second", "a second of CPU time")):
        for name, rounds in taken.items():
            rate = statistics.median(REQUESTS * NEW / each[kind] for each in rounds)
            ratios = [own[kind] / each[kind] for own, each in zip(taken[ENGINES[0]], rounds, strict=True)]
            quarters = statistics.quantiles(ratios)
            print(
                f"{name}: {rate:,.0f} tokens {what}; {quarters[1]:.2f} times vllm's ({quarters[0]:.2f} to {quarters[2]:.2f})"
            )


def start(folder: str, name: str, eager: bool) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        __spec__.name,
        "--serve",
        folder,
        name,
        *["--eager"] * eager,
    ]
    worker = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    while answer(worker) != "ready":
        pass
    return worker


def answer(worker: subprocess.Popen[str]) -> str:
    line = worker.stdout.readline()
    if not line:
        raise SystemExit("an engine has ended")
    return line.strip()


if __name__ == "__main__":
    main()
