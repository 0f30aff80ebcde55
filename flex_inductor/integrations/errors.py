"""The errors about other libraries."""

from __future__ import annotations

from ..errors import FlexNotImplementedError, FlexValueError

INSTEAD = 'Use attn_implementation="eager" or "sdpa" for it.'


def missing(framework: str, tested: str, error: ImportError) -> ImportError:
    return ImportError(
        f"flex_inductor.integrations.{framework} needs {framework} {tested}: {error}. "
        f"Install flex_inductor[{framework}]."
    )


def untested(framework: str, version: str, tested: str) -> str:
    return (
        f"{framework} {version}: flex_inductor.integrations.{framework} is tested with {tested} alone. "
        "Compare your model with its own attention first."
    )


def own_attention(model: str) -> FlexNotImplementedError:
    return FlexNotImplementedError(
        f'attn_implementation: got "flex_inductor" for {model}, which has attention of its own and does not ask for '
        f"another. {INSTEAD}"
    )


def not_served(module: str, argument: str) -> FlexNotImplementedError:
    return FlexNotImplementedError(f"{argument}: {module} passes it, and it is not served. {INSTEAD}")


def weights_once(module: str) -> str:
    return (
        f"output_attentions=True: attention here has no weights to give, so {module} computes these calls as with "
        'attn_implementation="eager".'
    )


def no_weights(module: str) -> FlexNotImplementedError:
    return FlexNotImplementedError(
        f"output_attentions: attention here has no weights to give, and {module} has no eager attention to ask for "
        'them. Use attn_implementation="eager", or output_attentions=False.'
    )


def mask_shape(argument: str, given: tuple[int, ...], wanted: tuple[int, ...]) -> FlexValueError:
    return FlexValueError(
        f"{argument}: expected a mask that broadcasts to [batch, heads, queries, keys] = {list(wanted)}, got "
        f"{list(given)}. A mask of 4 dimensions also covers the keys in the cache."
    )


def documents_of_rows(batch: int) -> FlexValueError:
    return FlexValueError(
        f"cu_seq_lens_q: expected a batch of 1, whose tokens the offsets divide, got {batch}. Lay the rows one after "
        "the other, as DataCollatorWithFlattening does, or pass position_ids alone."
    )


def mask_twice() -> FlexValueError:
    return FlexValueError(
        "attn_mask: expected one mask of blocks, got two, from attn_mask, is_causal or mods(). "
        "Make one of both with and_masks."
    )


def mods_in_backward() -> FlexNotImplementedError:
    return FlexNotImplementedError(
        "mods: got a call inside a backward, which cannot know the mods of its forward. For gradient checkpointing, "
        "call model.enable_gradient_checkpointing() after register(), or enter mods() inside the function that you "
        "checkpoint."
    )


def context_parallel() -> FlexNotImplementedError:
    return FlexNotImplementedError(
        "parallel_config: diffusers' context parallelism is not served. Use its own attention for it."
    )


def not_in_onnx(names: list[str]) -> FlexNotImplementedError:
    return FlexNotImplementedError(
        f"export to ONNX: got a call with {', '.join(sorted(names))}. Served are plain calls with mods, a block_mask, "
        "scale, enable_gqa, and the logsumexp or maximum."
    )


def dense_in_onnx(reason: str) -> str:
    return (
        f"export to ONNX: a call becomes dense attention, whose memory grows with queries times keys: {reason}, and "
        "FlexAttention has no place for it."
    )


def no_flex_attention(config: str) -> FlexValueError:
    return FlexValueError(
        f"FlexInductorConverter: expected a model with FlexAttention, got {config}, which has none. Build it with "
        'attn_backend="flex".'
    )


def other_vllm(version: str, tested: str) -> FlexNotImplementedError:
    return FlexNotImplementedError(
        f"vllm {version}: its attention backends are no stable interface, and this one serves {tested} alone. Install "
        f"vllm {tested}, or leave FLEX_INDUCTOR_VLLM unset."
    )


def not_served_in_vllm(argument: str, value: str) -> FlexNotImplementedError:
    return FlexNotImplementedError(
        f"{argument}: vLLM asks for {value}, which this attention backend does not serve. Leave FLEX_INDUCTOR_VLLM "
        "unset for this model."
    )


def bad_pattern(pattern: object, error: Exception) -> FlexValueError:
    return FlexValueError(f"register_mods: pattern: expected a regular expression, got {pattern!r}: {error}.")


def not_a_mod(name: str, mod: object) -> FlexValueError:
    return FlexValueError(f"register_mods: {name}: expected a function, got {mod!r}.")


def mods_elsewhere(patterns: list[str], variable: str) -> FlexValueError:
    return FlexValueError(
        f"register_mods: {', '.join(map(repr, patterns))}: registered in the process that started this one, where the "
        f"model does not run. Name a module that registers mods in {variable}, or set VLLM_ENABLE_V1_MULTIPROCESSING=0."
    )


def needs_whole_prompts(pattern: str, option: str) -> FlexNotImplementedError:
    return FlexNotImplementedError(
        f"register_mods({pattern!r}, causal=False): tokens that see later ones need their prompt in one step, which "
        f"{option}=True does not promise. Start vLLM with {option}=False."
    )
