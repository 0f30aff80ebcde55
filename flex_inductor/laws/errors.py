"""What laws say: of what is wrong, of what does not apply, and of arguments that cannot be served."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import FlexTypeError, FlexValueError

OURS = "Mods cannot cause this: please report it, with the call."

# Why a law does not apply.

NO_CALLS = "the function calls no flex_attention"
PACKED = "a packed or paged call, whose keys lie in tiles: give documents, for the law of that name"
DROPOUT = "dropout leaves out weights by their places: check without it"
PART = "a part of a call over several ranks: check it on one"
NARROW = "keys of 8 bits hold no NaN and no fp64: check with wider ones"
NOTHING_MASKED = "every query sees every key"
ONE_KEY = "one key has no order"
NO_SCHEDULE = "no block mask: all is visited"
NO_MASK_MOD = "the block mask has no mask_mod: its blocks are the mask"
NO_DOCUMENTS = "no documents were given"
ONE_DOCUMENT = "there is one document, which has no neighbours"
NOT_FINITE = "what the function gives in fp64 is not finite"
NO_PADDING = "the batch has no padding (attention_mask has no 0)"
ONE_ROW_OF_ALL = "the batch is one row, packed by cu_seq_lens: it takes no other row beside it"


def too_many(sizes: Sequence[int], most: int) -> str:
    return f"{' x '.join(map(str, sizes))} pairs are more than the {most:,} that are looked at: give smaller inputs"


def no_mods(implementation: str) -> str:
    return f'the model\'s attention is "{implementation}", which makes no call of flex_attention with mods'


def no_float64(error: Exception) -> str:
    return f"the model does not run in fp64: {type(error).__name__}: {error}"


def documents_unknown(keys: Sequence[str]) -> str:
    return (
        "the batch does not say where documents begin: no cu_seq_lens_q, no attention_mask with numbers above 1, no "
        f"position_ids that begin again; it has {', '.join(keys)}"
    )


def scattered(gradient: Any) -> str:
    found = gradient.found
    return (
        f"{gradient.name}: differences scatter by {found.off:.2g} around {found.value:.4g}, as where a function "
        "computes in fp32 or jumps"
    )


# What was looked at, where a law holds.

DIFFERENCES = "Every tensor's gradient in fp64, captured ones too, along a random direction."
COMPILED = "Outputs and gradients, by torch.compile and without it."
BATCH = "Entries alone, among others, and with others replaced."


def counted(calls: int, kinds: int) -> str:
    return f"{calls} call{'s' * (calls != 1)} of {kinds} kind{'s' * (kinds != 1)}."


def documents_judged(count: int, perturbed: int) -> str:
    return f"{count} documents, of which {perturbed} were replaced, each by itself."


# What is wrong.


def masked(name: str, at: object, keys: str, by_mod: bool) -> str:
    cure = (
        "score_mod gives -inf for such pairs, which leaves 0 * NaN: rule them out in mask_mod, by create_block_mask."
        if by_mod
        else OURS
    )
    return f"{name} {at}. Only keys that it does not see held NaN and Inf there: {keys}. {cure}"


def shift(name: str, constant: float, at: object, largest: float) -> str:
    return f"{name} {at}, after {constant:.4g} was added to every score. {_of_size(largest)}"


def _of_size(largest: float) -> str:
    if largest < 1e4:
        return OURS
    return (
        f"Scores reach {largest:.3g}, where fp32 cannot tell neighbours apart, so that rounding decides weights. Have "
        "score_mod give smaller scores, such as softcap * tanh(score / softcap), or lower scale."
    )


def permutation(name: str, at: object) -> str:
    return (
        f"{name} {at}, after keys changed their order and mods saw each under its old kv_idx. Have mods depend on "
        f"nothing but their arguments and what they capture. Else: {OURS}"
    )


def left_out(pair: tuple[int, ...], blocks: tuple[int, int], count: int, shared: Sequence[str]) -> str:
    return (
        f"{_pair(pair)}: mask_mod lets it through, and the block that holds it, row {pair[2] // blocks[0]} and column "
        f"{pair[3] // blocks[1]} of blocks of {blocks[0]} x {blocks[1]}, is not visited; {count:,} such pairs. "
        f"{_anew(shared)}"
    )


def not_masked(pair: tuple[int, ...], blocks: tuple[int, int], count: int, shared: Sequence[str]) -> str:
    return (
        f"{_pair(pair)}: mask_mod rules it out, and the block that holds it, row {pair[2] // blocks[0]} and column "
        f"{pair[3] // blocks[1]} of blocks of {blocks[0]} x {blocks[1]}, is visited whole, without mask_mod; {count:,} "
        f"such pairs. {_anew(shared)}"
    )


def _pair(pair: tuple[int, ...]) -> str:
    return "batch {}, head {}, row {}, key {}".format(*pair)


def _anew(shared: Sequence[str]) -> str:
    sizes = f", with {' and '.join(shared)}, which it has for one alone" if shared else ""
    return f"Make the block mask by create_block_mask{sizes}, and anew when something changes that mask_mod reads."


def gradient(gradient: Any, worst: tuple[tuple[int, ...], float, float]) -> str:
    at, got, want = worst
    return (
        f"d {gradient.name}, along a random direction: the backward gives {gradient.claimed:.6g}, differences of the "
        f"function {gradient.found.value:.6g}; at {list(at)}: {got:.6g} came, {want:.6g} was expected. {_BACKWARD}"
    )


def parameters(gradient: Any, names: Sequence[str], right: Sequence[str]) -> str:
    return (
        f"d parameters, along a random direction: the backward gives {gradient.claimed:.6g}, differences of the model "
        f"{gradient.found.value:.6g}. Wrong for {', '.join(names) or 'all together'}; right for "
        f"{', '.join(right) or 'none'}. {_BACKWARD}"
    )


_BACKWARD = (
    "Mend the backward of the autograd.Function or the detach() on the way; leave this law out (laws=, --law) where "
    "the gradient is to be another."
)


def neighbours(document: str, moved: Sequence[str]) -> str:
    more = f" and {len(moved) - MOST_NAMES} more" if len(moved) > MOST_NAMES else ""
    return f"after {document} was replaced. Moved with it: {', '.join(moved[:MOST_NAMES])}{more}."


MOST_NAMES = 8
APART = (
    "Have mask_mod ask that query and key are of one document (masks.document), and let nothing else mix the tokens of "
    "several."
)


def model_document(source: str, implementation: str) -> str:
    return (
        f"{source} says that they are packed, and the model (attn_implementation={implementation!r}) does not keep "
        "them apart. transformers reads position_ids with use_cache=False and no attention_mask; cu_seq_lens_q is "
        'read by flash attention and by attn_implementation="flex_inductor".'
    )


def compiled(name: str, at: object) -> str:
    return (
        f"{name} {at}: by torch.compile, and without it. Have the function and its mods not ask whether they are being "
        f"compiled, and change nothing outside. Else: {OURS}"
    )


def compiled_gradient(name: str, is_none: bool) -> str:
    came, expected = ("none", "one") if is_none else ("one", "none")
    return f"{name}: {came} came by torch.compile, {expected} was expected, as without it. {OURS}"


def batch(name: str, at: object, size: int) -> str:
    around = "alone" if size == 1 else f"in a batch of {size}"
    return f"{name} {at}: this entry {around}, and as it was given. {OURS}"


def others_replaced(name: str, entry: int, at: object) -> str:
    return (
        f"{name} {at}, after all entries of the batch but {entry} were replaced. Something is shared by the "
        "batch, such as a capture that is computed of all entries: compute it for each, and look it up by b."
    )


def model_rows(row: int, at: object, change: str) -> str:
    return (
        f"logits {at}, after {change}, while row {row} stayed as it was. Something in the model mixes the rows of a "
        "batch, such as a statistic of all or a capacity that they share."
    )


def model_padding(name: str, at: object) -> str:
    return (
        f"{name} {at}, after the tokens at which attention_mask is 0 were replaced by others. The model does not mask "
        "its padding: look for the mask on the way from attention_mask to its attention."
    )


# Arguments.


def unknown_law(name: str, laws: Sequence[str]) -> FlexValueError:
    return FlexValueError(f"laws: got {name!r}, expected some of {', '.join(laws)}.")


def law_without_list(laws: str) -> FlexTypeError:
    return FlexTypeError(f"laws: expected a list of names, got {laws!r}. Pass laws=[{laws!r}].")


def no_numbers(inputs: Any) -> FlexTypeError:
    return FlexTypeError(
        f"inputs: expected a tuple or a dict with floating-point tensors for the function, got {type(inputs).__name__} "
        "without any. Give the tensors that it is called with."
    )


def not_on_cpu(device: Any) -> FlexValueError:
    return FlexValueError(f"inputs: expected tensors on the CPU, got one on {device}. Move them by .cpu().")


def documents_shape(given: Any) -> FlexValueError:
    return FlexValueError(
        f"documents: expected lengths, such as [100, 156], or a tensor of integers, [tokens] or [batch, tokens], got "
        f"{given}."
    )


def documents_do_not_fit(tokens: int, rows: int, shapes: Sequence[Any]) -> FlexValueError:
    of_rows = f" in each of {rows} rows" if rows > 1 else ""
    return FlexValueError(
        f"documents: they have {tokens} tokens{of_rows}, and no input has a dimension of that size: "
        f"{', '.join(str(list(shape)) for shape in shapes)}. Give an id for each token, or lengths that add up to them."
    )


def not_a_model(model: Any) -> FlexTypeError:
    return FlexTypeError(
        f"model: expected a model of transformers (with get_input_embeddings and a config), got {type(model).__name__}."
        " For a function that calls flex_attention there is flex_inductor.check(fn, inputs)."
    )


def no_tokens(batch: Any) -> FlexTypeError:
    return FlexTypeError(
        f"batch: expected a dict with input_ids or inputs_embeds of [batch, tokens], got "
        f"{', '.join(batch) if hasattr(batch, 'keys') else type(batch).__name__}."
    )


def no_logits(model: Any) -> FlexTypeError:
    return FlexTypeError(
        f"model: expected one that returns numbers for each token, as logits or last_hidden_state, but {model} returns "
        "none of [batch, tokens, ...]."
    )


def named(fn: Any) -> str:
    return getattr(fn, "__name__", None) or type(fn).__name__
