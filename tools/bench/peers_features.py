"""What this project and its peers have, each with the file or page that says so.

Looked up in November 2026 in the sources of the versions named. "no" means that neither the public functions nor their
kernels have it; the source is where it would be.
"""

from __future__ import annotations

from typing import NamedTuple

from flex_inductor import __version__

PEERS = {
    "flex_inductor": __version__,
    "torch FlexAttention": "2.15.0",
    "torch SDPA": "2.15.0",
    "FlashAttention": "2.8.4, 3.0.0, 4 (commit 0251105)",
    "MagiAttention": "1.1.1 (commit 2c64135)",
    "cuDNN frontend": "1.23.0",
}


class Claim(NamedTuple):
    says: str
    source: str


FLEX = "torch/nn/attention/flex_attention.py"
FLEX_FLASH = "torch/_inductor/kernel/flex/flex_flash_attention.py"
SDPA = "torch/nn/functional.py, scaled_dot_product_attention"
VARLEN = "torch/nn/attention/varlen.py"
TORCH_CP = "torch/distributed/tensor/experimental/_context_parallel/_attention.py"
FA2 = "flash_attn/flash_attn_interface.py"
FA3 = "hopper/flash_attn_interface.py"
FA4 = "flash_attn/cute/interface.py"
FA_README = "README.md"
MAGI = "magi_attention/functional/flex_flash_attn.py, flex_flash_attn_func"
MAGI_README = "README.md"
MAGI_INSTALL = "docs/source/user_guide/install.md"
MAGI_JIT = "magi_attention/functional/_flex_flash_attn_jit.py"
CUDNN = "include/cudnn_frontend/graph_properties.h"
CUDNN_README = "README.md"

FEATURES: dict[str, tuple[Claim, ...]] = {
    "Scores changed by any function": (
        Claim("yes", "docs/design.md"),
        Claim("yes", FLEX),
        Claim("no; a table that is added", f"{SDPA}, attn_mask"),
        Claim("4: yes, in CuTe, sm_90 and newer", f"{FA4}, score_mod"),
        Claim("no; softcap", MAGI),
        Claim("yes, as nodes of a cuDNN graph", "python/pygraph/sdpa.cpp, score_mod"),
    ),
    "Masks by any function": (
        Claim("yes", "docs/masks.md"),
        Claim("yes", FLEX),
        Claim("no; a table", f"{SDPA}, attn_mask"),
        Claim("4: yes, in CuTe", f"{FA4}, mask_mod"),
        Claim("no; ranges, each full or causal in three ways", f"{MAGI}, attn_type_map"),
        Claim("no; blocks of a table, causal, windows", f"{CUDNN}, set_block_mask"),
    ),
    "Forward on a CPU": (
        Claim("yes, fused", "docs/cpu.md"),
        Claim("yes, fused", "torch/_inductor/kernel/flex/flex_cpu.py"),
        Claim("yes, fused", "aten/src/ATen/native/cpu/FlashAttentionKernel.cpp"),
        Claim("no", f"{FA_README}, requirements"),
        Claim("no", MAGI_INSTALL),
        Claim("no", CUDNN_README),
    ),
    "Backward on a CPU": (
        Claim("yes, fused", "docs/cpu.md"),
        Claim("no, refused", f"{FLEX}, _validate_device"),
        Claim("yes, fused", "aten/src/ATen/native/cpu/FlashAttentionKernel.cpp"),
        Claim("no", f"{FA_README}, requirements"),
        Claim("no", MAGI_INSTALL),
        Claim("no", CUDNN_README),
    ),
    "GPUs": (
        Claim("NVIDIA: half an hour on an H200; AMD: compiled, **never run**", "docs/triton.md"),
        Claim("NVIDIA, AMD, Intel; Apple: forward", f"{FLEX}, _validate_device"),
        Claim("yes", SDPA),
        Claim("NVIDIA; 2: AMD too", FA_README),
        Claim("NVIDIA: Hopper, Blackwell; 1.1.1: Ampere by FlashAttention 4", MAGI_README),
        Claim("NVIDIA", CUDNN_README),
    ),
    "Types": (
        Claim("fp64, fp32, bf16, fp16", "README.md"),
        Claim("fp32, bf16, fp16", "torch/_inductor/kernel/flex/flex_cpu.py and flex_attention.py"),
        Claim("fp64, fp32, bf16, fp16", SDPA),
        Claim("bf16, fp16", FA_README),
        Claim("bf16, fp16", f"{MAGI_JIT}, sanity_check"),
        Claim("bf16, fp16, fp8", CUDNN_README),
    ),
    "Gradients of captured tensors": (
        Claim("yes", "docs/design.md"),
        Claim("on GPUs; not with FLASH", f"{FLEX_FLASH}, input_buffers_require_grads"),
        Claim("of the added table", SDPA),
        Claim("no", f"{FA4}, _flash_attn_bwd"),
        Claim("no captures", MAGI),
        Claim("of a bias", f"{CUDNN}, set_dbias"),
    ),
    "Learnt sinks, with gradients": (
        Claim("yes", "docs/softmax.md"),
        Claim("no", FLEX),
        Claim("no", SDPA),
        Claim("4: yes", f"{FA4}, learnable_sink"),
        Claim("yes", f"{MAGI}, sink"),
        Claim("yes", f"{CUDNN}, set_sink_token, set_dsink_token"),
    ),
    "Dropout": (
        Claim("yes", "docs/softmax.md"),
        Claim("no", FLEX),
        Claim("yes", f"{SDPA}, dropout_p"),
        Claim("2: yes", f"{FA2}, dropout_p"),
        Claim("no", MAGI),
        Claim("yes", f"{CUDNN}, set_dropout"),
    ),
    "Keys and values of 8 bits": (
        Claim("yes, with scales; no gradients", "docs/softmax.md"),
        Claim("no; mixed types are refused on CPUs", "torch/_inductor/kernel/flex/flex_cpu.py"),
        Claim(
            "forward, experimental",
            "torch/nn/attention/experimental/_scaled_dot_product_attention_quantized.py",
        ),
        Claim("3: forward; 4: forward, sm_100", f"{FA3}, q_descale; {FA4}"),
        Claim("no", f"{MAGI_JIT}, sanity_check"),
        Claim("yes", CUDNN_README),
    ),
    "Packed sequences": (
        Claim("yes, with any mods", "docs/sequences.md"),
        Claim("as a mask; nested tensors are refused", f"{FLEX}, _validate_no_nested_tensors"),
        Claim("beside it: varlen_attn, on GPUs", VARLEN),
        Claim("yes", f"{FA2}, flash_attn_varlen_func"),
        Claim("yes, as ranges", MAGI),
        Claim("yes", f"{CUDNN}, set_ragged_offset"),
    ),
    "Paged caches": (
        Claim("yes, with any mods", "docs/sequences.md"),
        Claim(
            "experimental: pages are undone in mods", "torch/nn/attention/experimental/_paged_attention.py"
        ),
        Claim("beside it: varlen_attn, on GPUs", f"{VARLEN}, block_table"),
        Claim("yes", f"{FA2}, block_table; {FA3} and {FA4}, page_table"),
        Claim("no", MAGI),
        Claim("yes", f"{CUDNN}, set_paged_attention_k_table"),
    ),
    "One sequence over several ranks": (
        Claim("yes, with any mods; run on CPUs", "docs/context_parallel.md"),
        Claim("experimental: all keys gathered, lengths that divide", f"{TORCH_CP}, flex_input_fn"),
        Claim("experimental: full or causal", TORCH_CP),
        Claim("no", FA_README),
        Claim("yes, with its masks, on GPUs", MAGI_README),
        Claim("no", CUDNN),
    ),
    "Second derivatives": (
        Claim("yes, in chunks", "docs/derivatives.md"),
        Claim("not on CPUs", f"{FLEX}, _validate_device"),
        Claim("by its math backend", "torch.autograd.gradgradcheck, run on a CPU"),
        Claim("no", f"{FA2}, autograd.Functions with kernels as backward"),
        Claim("no", f"{MAGI}, likewise"),
        Claim("no", CUDNN),
    ),
    "ONNX": (
        Claim("yes", "docs/export.md"),
        Claim("no", "torch/onnx, which does not name flex_attention"),
        Claim("yes", "torch/onnx/_internal/exporter/_torchlib/ops/nn.py"),
        Claim("no", FA_README),
        Claim("no", MAGI_README),
        Claim("no", CUDNN_README),
    ),
    "The same bits from run to run": (
        Claim("on CPUs; on GPUs where torch asks for it", "docs/design.md, docs/triton.md"),
        Claim(
            "all but captured gradients, by atomics", "torch/_inductor/kernel/flex/common.py, scatter_mode"
        ),
        Claim("by backend", SDPA),
        Claim("on request", f"{FA2}, {FA3} and {FA4}, deterministic"),
        Claim("on request", f"{MAGI}, deterministic"),
        Claim("on request", f"{CUDNN}, set_deterministic_algorithm"),
    ),
    "A report of what a call compiles to, without its GPU": (
        Claim("yes", "docs/inspector.md"),
        Claim("no; TORCH_LOGS=output_code shows sources", FLEX),
        Claim("no", SDPA),
        Claim("no", FA_README),
        Claim("no", MAGI_README),
        Claim("no", CUDNN_README),
    ),
    "Calls checked against fp64 as they run": (
        Claim("yes", 'README.md, options={"verify": True}'),
        Claim("no", FLEX),
        Claim("no", SDPA),
        Claim("no", FA_README),
        Claim("no", MAGI_README),
        Claim("no", CUDNN_README),
    ),
    "Published speed on GPUs": (
        Claim("one H200, for half an hour", "docs/benchmarks/h200.md"),
        Claim("yes", "pytorch.org/blog/flexattention"),
        Claim("its backends: FlashAttention, cuDNN", SDPA),
        Claim("yes", FA_README),
        Claim("yes", MAGI_README),
        Claim("yes", "benchmark/sdpa_benchmark_training/README.md"),
    ),
}
