"""vLLM's attention by this package: an attention backend, chosen with FLEX_INDUCTOR_VLLM=1 or `register()`.

vLLM imports it in each of its processes, by the entry point of vllm_plugin.py. Each step, the builder makes
one `Sequences` from a group's block table, and each layer attends by a kernel that its start-up has compiled. Layers
may have mods of the user's: see `register_mods`.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..mods import alibi, softcap
from ..sequences import Sequences
from ..sequences.mask import FEW, sequence_mask
from ..sequences.repeated import Repeated, Step
from ..visits.window import Window
from . import ASK_VLLM, errors

try:
    import vllm
    from vllm.distributed import get_tensor_model_parallel_rank
    from vllm.platforms import current_platform
    from vllm.v1.attention.backend import (
        AttentionBackend,
        AttentionImpl,
        AttentionMetadataBuilder,
        AttentionType,
        MultipleOf,
    )
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.kv_cache_interface import KVCacheLayout
except ImportError as error:
    raise errors.missing("vllm", "0.32", error) from error

__all__ = ["register", "register_mods"]

NAME = "FLEX_INDUCTOR"
TESTED = "0.32"
MODS_FROM = "FLEX_INDUCTOR_VLLM_MODS"  # modules to import in each process, separated by commas
_EXPECTED = "FLEX_INDUCTOR_VLLM_EXPECTED"  # the patterns that another process has registered
PAGE = 16  # vLLM refuses a cache whose blocks have no multiple of as many tokens


class Mods(NamedTuple):
    score_mod: Callable[..., Tensor] | None = None
    mask_mod: Callable[..., Tensor] | None = None
    causal: bool = True


_mods: dict[str, Mods] = {}


def register() -> None:
    """Have vLLM use this backend, in this process and in those that it starts.

    On a CPU it takes the place of vLLM's own; elsewhere it is the choice `attention_backend="FLEX_INDUCTOR"`.

    Raises:
        FlexNotImplementedError: another version of vLLM than was tested.

    Example:
        >>> # vLLM brings its own build of torch: not among what these examples run with
        >>> import vllm  # doctest: +SKIP
        >>> from flex_inductor.integrations.vllm import register  # doctest: +SKIP
        >>> register()  # doctest: +SKIP
        >>> llm = vllm.LLM("my-llama", dtype="float32")  # doctest: +SKIP
    """
    if not vllm.__version__.startswith(f"{TESTED}."):
        raise errors.other_vllm(vllm.__version__, TESTED)
    for module in filter(None, os.environ.get(MODS_FROM, "").split(",")):
        importlib.import_module(module.strip())
    os.environ[ASK_VLLM] = "1"
    path = f"{__name__}.FlexInductorBackend"
    if NAME not in AttentionBackendEnum.__members__:
        register_backend(NAME, path)
    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, path)
        for latent in (AttentionBackendEnum.CPU_MLA, AttentionBackendEnum.AMX_MLA):
            register_backend(latent, f"{__name__}.LatentBackend")


def register_mods(
    pattern: str,
    *,
    score_mod: Callable[..., Tensor] | None = None,
    mask_mod: Callable[..., Tensor] | None = None,
    causal: bool = True,
) -> None:
    """Give layers mods of your own, before vLLM starts.

    Mods see (sequence, h, q_idx, kv_idx), where a sequence is a request's place in the step, h is a head of the whole
    model, and indices are positions in the request. They are traced at start-up: a captured tensor may change in place,
    nothing else that they read.

    Args:
        pattern: a regular expression, searched in "ModelClass/layer.name", such as
            "LlamaForCausalLM/model.layers.0.self_attn.attn". Of several that are found the last one registered counts.
        score_mod: `score_mod(score, sequence, h, q_idx, kv_idx)`, after the model's softcap and ALiBi.
        mask_mod: beside the causal mask and the layer's window.
        causal: False lets mask_mod alone decide what a token sees, later ones too. vLLM must then compute prompts
            whole: enable_prefix_caching=False and enable_chunked_prefill=False.

    Raises:
        FlexValueError: the pattern is no regular expression, or a mod is no function.

    Example:
        >>> # vLLM brings its own build of torch: not among what these examples run with
        >>> from flex_inductor.integrations.vllm import register_mods  # doctest: +SKIP
        >>> register_mods("LlamaForCausalLM", score_mod=mods.softcap(30.0))  # doctest: +SKIP
        >>> window = masks.sliding_window(1024)  # doctest: +SKIP
        >>> register_mods(r"layers[.][0-3][.]", mask_mod=window)  # doctest: +SKIP
    """
    try:
        re.compile(pattern)
    except (TypeError, re.error) as error:
        raise errors.bad_pattern(pattern, error) from None
    for name, mod in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if mod is not None and not callable(mod):
            raise errors.not_a_mod(name, mod)
    _mods.pop(pattern, None)
    _mods[pattern] = Mods(score_mod, mask_mod, causal)
    os.environ[_EXPECTED] = "\n".join(_mods)


class FlexInductorBackend(AttentionBackend):
    forward_includes_kv_cache_update = True
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]  # noqa: RUF012
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16"]  # noqa: RUF012

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[Layer]:
        # Asked where the model runs. vLLM also has processes that only look at the class of a model.
        missing = [p for p in os.environ.get(_EXPECTED, "").split("\n") if p and p not in _mods]
        if missing:
            raise errors.mods_elsewhere(missing, MODS_FROM)
        return Layer

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(PAGE)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBNHC,)  # a token's heads side by side, each with its key and its value

    supports_sink = supports_sliding_window = supports_non_causal = classmethod(lambda cls: True)


class LatentBackend(AttentionBackend):
    """In the place of those for MLA, which would serve it beside this backend unnoticed."""

    get_name = get_builder_cls = staticmethod(lambda: NAME)

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @staticmethod
    def get_impl_cls() -> Any:
        raise errors.not_served_in_vllm("MLA", "a model with latent attention")


class Metadata:
    """A step of all layers that share a block table."""

    def __init__(self, sequences: Sequences, causal: bool):
        self.sequences, self.causal = sequences, causal
        self.slots: Tensor  # where new tokens go
        self._steps: dict[Any, Step] = {}

    def step(self, layer: Layer, keys: Tensor, values: Tensor) -> Step:
        """One for each window, mask_mod and number of heads."""
        causal = self.causal and layer.mods.causal
        right = 0 if causal and self.sequences.max_q > 1 else math.inf  # a single query is the last token
        key = layer.left, right, layer.mods.mask_mod, layer.num_heads
        found = self._steps.get(key)
        if found is None:
            window = Window(layer.left, right)
            mask = sequence_mask(self.sequences, layer.mods.mask_mod, layer.num_heads, None, window)
            found = self._steps[key] = Step(mask, keys, values)
        return found

    def move_to(self, used: Tensor, pages: Tensor, causal: bool) -> bool:
        """Whether it could be made that of the next step of decoding."""
        steps = self._steps.values()
        return bool(steps) and causal == self.causal and all(step.move_to(used, pages) for step in steps)


class Builder(AttentionMetadataBuilder[Metadata]):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.page_size = kv_cache_spec.block_size
        if getattr(kv_cache_spec, "page_size_padded", None):
            raise errors.not_served_in_vllm("page_size_padded", "a cache with room between its blocks")
        self.last: Metadata | None = None
        layers = vllm_config.compilation_config.static_forward_context
        for name in layer_names:
            layers[name].impl.start(name, kv_cache_spec, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        step = common_attn_metadata
        if isinstance(step.causal, Tensor):
            raise errors.not_served_in_vllm("causal", "a tensor that says which requests are causal")
        pages = step.block_table_tensor[: step.num_reqs, : -(-step.max_seq_len // self.page_size)]
        used, tokens = step.seq_lens, step.num_actual_tokens
        decodes = (step.max_query_len, tokens) == (1, step.num_reqs)
        if not (decodes and self.last is not None and self.last.move_to(used, pages, step.causal)):
            longest = step.max_query_len, step.max_seq_len
            sequences = _sequences(step.query_start_loc, used, pages, self.page_size, *longest, tokens)
            self.last = Metadata(sequences, step.causal)
        # Padding has no slot, -1. The first page is nobody's.
        self.last.slots = _until(tokens, step.slot_mapping).clamp(min=0)
        return self.last


class Layer(AttentionImpl[Metadata]):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **others: Any,
    ):
        if attn_type != AttentionType.DECODER:
            raise errors.not_served_in_vllm("attn_type", f"{attn_type} attention")
        if kv_cache_dtype not in FlexInductorBackend.supported_kv_cache_dtypes:
            raise errors.not_served_in_vllm("kv_cache_dtype", kv_cache_dtype)
        for name, value in others.items():
            raise errors.not_served_in_vllm(name, repr(value))
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.left = math.inf if sliding_window is None else sliding_window - 1
        self.appends = kv_sharing_target_layer_name is None
        self.sinks, self.mods = sinks, Mods()
        self._cache: Tensor | None = None
        self.own = [] if not logits_soft_cap else [softcap(float(logits_soft_cap))]
        if alibi_slopes is not None:
            self.own.append(alibi(torch.tensor(alibi_slopes, dtype=torch.float32)))

    def start(self, name: str, spec: Any, vllm_config: Any, device: torch.device) -> None:
        """What is known only when the whole model is: the layer's mods. Compiles kernels for its steps."""
        model, cache = vllm_config.model_config, vllm_config.cache_config
        if model.is_mm_prefix_lm:
            raise errors.not_served_in_vllm("is_mm_prefix_lm", "images that see all of themselves")
        if spec.dtype != model.dtype:
            raise errors.not_served_in_vllm("kv_cache_dtype", f"a cache in {spec.dtype} beside {model.dtype}")
        whole = f"{model.architecture}/{name}"
        matching = [pattern for pattern in _mods if re.search(pattern, whole)]
        if matching:
            score_mod, mask_mod, causal = _mods[matching[-1]]
            if not causal:
                for option, given in (
                    ("enable_prefix_caching", cache.enable_prefix_caching),
                    ("enable_chunked_prefill", vllm_config.scheduler_config.enable_chunked_prefill),
                ):
                    if given:
                        raise errors.needs_whole_prompts(matching[-1], option)
            first = get_tensor_model_parallel_rank() * self.num_heads
            self.mods = Mods(_from_head(score_mod, first), _from_head(mask_mod, first), causal)
        mods = [*self.own, *filter(None, [self.mods.score_mod])]
        self.attend = Repeated(_in_turn(mods) if mods else None, self.scale, self.sinks)
        self._run_once(spec, model, vllm_config.scheduler_config.max_num_seqs, device)

    def _run_once(self, spec: Any, model: Any, requests: int, device: torch.device) -> None:
        """A step of each kind, in which mods see the last position and the last request that there may be."""
        make: Any = {"dtype": model.dtype, "device": device}
        ints: Any = {"dtype": torch.int32, "device": device}
        page, longest, dims = spec.block_size, model.max_model_len, (self.head_size, spec.head_size_v)
        cache = torch.zeros(2, page, self.num_kv_heads, sum(dims), **make).transpose(1, 2)
        pages = torch.zeros(requests, -(-longest // page), **ints)
        used = torch.ones(requests, **ints)
        used[0] = longest
        for queries in (1, FEW, FEW + 1):
            queries = min(queries, longest)
            starts = torch.arange(queries - 1, queries + requests, **ints)
            starts[0] = 0
            tokens = queries + requests - 1
            metadata = Metadata(_sequences(starts, used, pages, page, queries, longest, tokens), True)
            metadata.slots = torch.zeros(tokens, dtype=torch.int64, device=device)
            q, out = (torch.zeros(tokens, self.num_heads, dim, **make) for dim in dims)
            k, v = (torch.zeros(tokens, self.num_kv_heads, dim, **make) for dim in dims)
            self.forward(None, q, k, v, cache, metadata, out)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if attn_metadata is None:  # the step that measures memory
            return output.zero_()
        tokens = attn_metadata.sequences.total_q
        if kv_cache is not self._cache:
            self._cache = kv_cache
            sizes = [self.head_size, kv_cache.size(3) - self.head_size]
            self._pages = kv_cache.transpose(1, 2).split(sizes, 3)
            self._rows = [pages.view(-1, *pages.shape[2:]) for pages in self._pages]
        if self.appends and key is not None and value is not None:
            # By one thread, which is quicker than indexing by several.
            for rows, new in zip(self._rows, (key, value), strict=True):
                rows.index_copy_(0, attn_metadata.slots, _until(tokens, new))
        keys, values = self._pages
        step = attn_metadata.step(self, keys, values)
        out = self.attend(_until(tokens, query), keys, values, step)
        _until(tokens, output).copy_(out)
        return output


def _until(tokens: int, rows: Tensor) -> Tensor:
    return rows if rows.size(0) == tokens else rows[:tokens]


def _in_turn(mods: list[Callable[..., Tensor]]) -> Callable[..., Tensor]:
    def score_mod(score, b, h, q_idx, kv_idx):
        for mod in mods:
            score = mod(score, b, h, q_idx, kv_idx)
        return score

    return score_mod


@functools.cache  # layers with the same mask_mod share its masks
def _from_head(mod: Any, first: int) -> Any:
    """The same for heads of which this process has those from `first` on."""
    if mod is None or not first:
        return mod

    def of_whole_model(*args):
        *score, b, h, q_idx, kv_idx = args
        return mod(*score, b, h + first, q_idx, kv_idx)

    return of_whole_model


def _sequences(
    starts: Tensor, used: Tensor, pages: Tensor, page_size: int, max_q: int, max_k: int, tokens: int
) -> Sequences:
    numbers = {"page_size": page_size, "max_q": max_q, "max_k": max_k, "total_q": tokens, "total_k": 0}
    return Sequences.unchecked(starts, None, used_k=used, pages=pages, **numbers)
