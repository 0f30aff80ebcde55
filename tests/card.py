"""What the Triton kernels must get right on a card, as plain functions: `tools/gpu_check.sh` runs them without pytest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from support import MASKS, MODS, Sizes, attention_of, dense_of, judge

from flex_inductor import create_block_mask, decisions
from flex_inductor.tools.gpu.measure import Setting, compiled

SIZES = (Sizes(queries=300, keys=300, head_dim=64, value_dim=64), Sizes(queries=200, keys=333, head_dim=80))
BF16, FP16, FP32 = DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TWO_PASSES = ("backward_dq", "backward_dkdv")


class Call(NamedTuple):
    """One compiled call and its gradients, to be compared with dense attention."""

    mod: str = "plain"
    mask: str = "none"
    dtype: torch.dtype = BF16
    sizes: Sizes = SIZES[0]
    configs: dict[str, dict[str, int]] | None = None  # asked for; these kernels must have them
    block: int | None = None  # of a causal mask, in place of `mask`
    tuned: bool = False
    kernels: tuple[str, ...] = ()  # which must have been made

    @property
    def title(self) -> str:
        given = zip(self._fields, self, strict=True)
        return " ".join(
            f"{name}={value}" if name not in ("mod", "mask", "dtype") else str(value).removeprefix("torch.")
            for name, value in given
            if value != self._field_defaults[name] or name in ("mod", "mask", "dtype")
        )

    def small(self) -> Call:
        """The same kind of call, small enough for an interpreter, which has no 16-bit products."""
        p = self.sizes
        queries, keys = min(p.queries, 33), 300 if p.queries == 1 else min(p.keys, 40)
        head_dim = 130 if p.head_dim > 128 else 16
        sizes = Sizes(1, 2, 1, queries, keys, head_dim, value_dim=16)
        return self._replace(dtype=FP32, sizes=sizes, block=self.block and 16)


def _in_turn(*kinds: Any) -> Iterator[tuple]:
    """Every member of the first with members of the others in turn: few enough to compile in some minutes."""
    first, *others = map(list, kinds)
    for i, each in enumerate(first):
        yield (each, *(other[i % len(other)] for other in others))


def _asked_for() -> Iterator[dict[str, dict[str, int]]]:
    yield {"forward": {"persistent": 1}}
    yield {kernel: {"descriptors": 1} for kernel in ("forward", *TWO_PASSES)}
    yield {"forward": {"descriptors": 1, "persistent": 1}}
    yield {"forward": {"descriptors": 1, "persistent": 1, "held": 1}}
    yield {kernel: {"descriptors": 1, "specialized": 1} for kernel in ("forward", *TWO_PASSES)}
    yield {"backward_onepass": {}}
    yield {"backward_onepass": {"descriptors": 1}}
    yield {"backward_dk": {}, "backward_dv": {}}


def _decoding(keys: int) -> Sizes:
    return Sizes(batch=1, heads=32, kv_heads=8, queries=1, keys=keys, head_dim=128, value_dim=128)


WIDE = Sizes(queries=300, keys=300, head_dim=256, value_dim=256)

# Those in fp32 compile for long: they come last.
CALLS: list[Call] = sorted(
    [
        *(Call(mod, mask, dtype, sizes) for mod, mask, dtype, sizes in _in_turn(MODS, MASKS, DTYPES, SIZES)),
        *(
            Call(mod, mask, dtype, sizes)
            for mask, mod, dtype, sizes in _in_turn(MASKS, [*MODS][::-1], DTYPES[::-1], SIZES[::-1])
        ),
        *(
            Call("relative_bias", mask, configs=configs)
            for configs in _asked_for()
            for mask in ("causal", "per_head")
        ),
        Call(sizes=Sizes(queries=1000, keys=1000, head_dim=64), block=512),  # tiles that a mask chooses whole
        Call("relative_bias", "causal", tuned=True, kernels=("forward", *TWO_PASSES)),
        Call("alibi", "causal", sizes=WIDE, kernels=("forward", "backward_dq", "backward_dk", "backward_dv")),
        *(Call(sizes=_decoding(keys), kernels=("decode", "combine")) for keys in (1000, 8192)),
    ],
    key=lambda call: call.dtype == FP32,
)


def without(call: Call, capability: tuple[int, int]) -> str | None:
    """What a card of this compute capability lacks for the call."""
    axes = {axis for chosen in (call.configs or {}).values() for axis in chosen}
    if "specialized" in axes and capability[0] != 10:
        return "warps are specialized on sm_100 alone"
    if "descriptors" in axes and capability < (9, 0):
        return "tensor descriptors are there from sm_90 on"
    return None


def check(call: Call, setting: Setting) -> None:
    """Raise where the call is less right than dense attention, or other kernels served than it is about."""
    torch._dynamo.reset()
    decisions(clear=True)
    with torch.device(setting.device):
        if call.block is not None:
            lengths = call.sizes.queries, call.sizes.keys
            mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, *lengths, BLOCK_SIZE=call.block)
        else:
            mask = MASKS[call.mask](call.sizes)
    mod = MODS[call.mod]
    attend = compiled(attention_of(mod.build), replace(setting, tuned=call.tuned), call.configs)
    inputs = [tensor.to(setting.device) for tensor in call.sizes.inputs(call.dtype)]
    captures = [capture.to(setting.device) for capture in mod.captures(call.sizes)]
    judge(attend, dense_of(mod.build), inputs, captures, mask)
    found = decisions()
    assert [decision.chosen for decision in found] == ["triton", "triton"], found
    made = {kernel.kernel: kernel.why for decision in found for kernel in decision.kernels}
    missing = {*call.kernels, *(call.configs or {})} - made.keys()
    assert not missing, f"no {missing}, but {made}"
    for kernel in call.configs or {}:
        assert made[kernel] == "asked for", f"{kernel}: {made[kernel]}"
