"""Milliseconds of host work in a decoding step with 64 sequences: all of `build` and `forward` but the kernels.

.venv-vllm/bin/python -m tests.integrations.vllm.host_work [--layers 4]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from flex_inductor.integrations.vllm import Builder, Layer
from flex_inductor.sequences.repeated import Repeated
from tests.integrations.vllm.engines import engine, tokens_of
from tests.integrations.vllm.models import llama, prompts, save

SEQUENCES, NEW = 64, 200


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=4)
    layers = parser.parse_args().layers
    torch.set_num_threads(1)
    steps: list[list[float]] = []
    build, forward, known = Builder.build, Layer.forward, Repeated._known

    def timed_build(self: Any, *args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        found = build(self, *args, **options)
        steps.append([time.perf_counter() - start])
        return found

    def timed_forward(self: Any, *args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        found = forward(self, *args, **options)
        if steps:
            steps[-1].append(time.perf_counter() - start)
        return found

    def with_timed_kernel(*args: Any) -> Any:
        found = known(*args)

        def run(tensors: Any) -> Any:
            start = time.perf_counter()
            out = found.run(tensors)
            if steps:
                steps[-1].append(start - time.perf_counter())
            return out

        return found._replace(run=run)

    with tempfile.TemporaryDirectory() as folder:
        config = llama(num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
        save(config, Path(folder))
        with engine(folder, ours=True, max_num_seqs=SEQUENCES) as llm:
            tokens_of(llm, prompts([8] * SEQUENCES), 4)
            Builder.build, Layer.forward, Repeated._known = timed_build, timed_forward, with_timed_kernel  # type: ignore[method-assign]
            steps.clear()
            tokens_of(llm, prompts([8] * SEQUENCES, seed=2), NEW)
    decoding = [1e3 * sum(step) for step in steps[1:] if len(step) == 1 + 2 * layers]
    tenths = statistics.quantiles(decoding, n=10)
    print(
        f"{layers} layers, {len(decoding)} steps: {tenths[4]:.2f} ms in half, {tenths[0]:.2f} in a tenth, {min(decoding):.2f} at best"
    )


if __name__ == "__main__":
    main()
