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
        f"{list(given)}. A mask of 4 dimensions is for the keys in the cache too."
    )


def mask_twice() -> FlexValueError:
    return FlexValueError(
        "attn_mask: expected one mask of blocks, got two, from attn_mask, is_causal or mods(). "
        "Make one of both with and_masks."
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
