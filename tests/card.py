"""What the Triton kernels must get right on a card, as plain functions: `tools/gpu_check.sh` runs them without pytest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from support import MASKS, MODS, Sizes, attention_of, dense_of, judge

from flex_inductor import create_block_mask, decisions, flex_attention
from flex_inductor.tools.bench.gpu_calls import TUNED, Setting, compiled

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

    def _mask(self) -> Any:
        if self.block is None:
            return MASKS[self.mask](self.sizes)
        lengths = self.sizes.queries, self.sizes.keys
        device = torch.get_default_device()
        return create_block_mask(
            lambda b, h, q, k: q >= k, None, None, *lengths, device, BLOCK_SIZE=self.block
        )

    def check(self, setting: Setting) -> None:
        """Raise where the call is less right than dense attention, or other kernels served than it is about."""
        torch._dynamo.reset()
        decisions(clear=True)
        mod = MODS[self.mod]
        compiled_call = compiled(
            attention_of(mod.build), replace(setting, mode=TUNED if self.tuned else None), self.configs
        )
        with torch.device(setting.device):
            mask_there = self._mask()

        def attend(query, key, value, captures, _):
            given = [tensor.to(setting.device) for tensor in (query, key, value, *captures)]
            return tuple(t.cpu() for t in compiled_call(*given[:3], tuple(given[3:]), mask_there))

        inputs, captures = self.sizes.inputs(self.dtype), mod.captures(self.sizes)
        judge(attend, dense_of(mod.build), inputs, captures, self._mask())
        found = decisions()
        assert [decision.chosen for decision in found] == ["triton", "triton"], found
        made = {kernel.kernel: kernel.why for decision in found for kernel in decision.kernels}
        missing = {*self.kernels, *(self.configs or {})} - made.keys()
        assert not missing, f"no {missing}, but {made}"
        for kernel in self.configs or {}:
            assert made[kernel] == "asked for", f"{kernel}: {made[kernel]}"


def _in_turn(*kinds: Any) -> Iterator[tuple]:
    """Every member of the first with members of the others in turn: few enough to compile in some minutes."""
    first, *others = map(list, kinds)
    for i, each in enumerate(first):
        yield (each, *(other[i % len(other)] for other in others))


def _asked_for() -> Iterator[dict[str, dict[str, int]]]:
    yield {"forward": {"descriptors": 1}}
    yield {"backward_dq": {"coalesced": 1}}
    yield {"backward_dk": {}, "backward_dv": {}}


def _decoding(keys: int) -> Sizes:
    return Sizes(batch=1, heads=32, kv_heads=8, queries=1, keys=keys, head_dim=128, value_dim=128)


WIDE = Sizes(queries=300, keys=300, head_dim=256, value_dim=256)


class Place(NamedTuple):
    """Where a call is made, rather than what it computes."""

    title: str
    check: Callable[[Setting], None]
    cards: int = 1
    dtype: torch.dtype = BF16

    def small(self) -> Place:
        return self


def _causal(length: int, device: str) -> Any:
    return create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device=device)


def _served_as_eagerly(
    setting: Setting, inputs: Sequence[Any], mask: Any, attend: Any, times: int = 1
) -> None:
    """Outputs and gradients of compiled calls are those of an uncompiled one."""
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    want = flex_attention(*inputs, block_mask=mask)
    wanted = torch.autograd.grad(want.float().square().sum(), inputs)
    for _ in range(times):
        out = attend(*inputs, mask)
        found = out, *torch.autograd.grad(out.float().square().sum(), inputs)
        for got, like in zip(found, (want, *wanted), strict=True):
            error = (got.float() - like.float()).abs().max() / like.float().abs().max()
            assert error < 0.03, f"relative error {error:.2g}"


def _compiled(setting: Setting, mode: str | None = None) -> Any:
    torch._dynamo.reset()
    return compiled(
        lambda q, k, v, mask: flex_attention(q, k, v, block_mask=mask), replace(setting, mode=mode)
    )


def _drawn(setting: Setting, *size: int, device: str | None = None) -> list[torch.Tensor]:
    dtype = BF16 if setting.device == "cuda" else FP32
    return [torch.randn(size, dtype=dtype, device=device or setting.device) for _ in range(3)]


def on_a_side_stream(setting: Setting) -> None:
    stream = torch.cuda.Stream() if setting.device == "cuda" else None
    with torch.cuda.stream(stream):
        _served_as_eagerly(
            setting, _drawn(setting, 2, 4, 64, 64), _causal(64, setting.device), _compiled(setting)
        )


def on_the_second_card(setting: Setting) -> None:
    device = "cuda:1" if setting.device == "cuda" else setting.device
    inputs = _drawn(setting, 2, 4, 64, 64, device=device)
    _served_as_eagerly(setting, inputs, _causal(64, device), _compiled(setting))


def in_a_cuda_graph(setting: Setting) -> None:
    """Once recorded, a graph reads what the schedule's tensors hold at the time."""
    inputs, attend = _drawn(setting, 2, 4, 256, 64), _compiled(setting, mode="reduce-overhead")
    window = torch.tensor(256, device=setting.device)
    mask = create_block_mask(lambda b, h, q, k: q - k < window, None, None, 256, 256, setting.device, 64)
    _served_as_eagerly(setting, inputs, mask, attend, times=3)
    window.fill_(32)
    narrow = create_block_mask(mask.mask_mod, None, None, 256, 256, setting.device, 64)
    for name in LISTS:
        getattr(mask, name).copy_(getattr(narrow, name))
    _served_as_eagerly(setting, inputs, mask, attend)


LISTS = [
    f"{full}{side}_{what}"
    for full in ("", "full_")
    for side, what in (("kv", "num_blocks"), ("kv", "indices"), ("q", "num_blocks"), ("q", "indices"))
]


def far_offsets(setting: Setting) -> None:
    """The last head lies beyond 2**31 elements, and is as it would be alone."""
    heads, length = (130, 1 << 17) if setting.device == "cuda" else (3, 64)
    inputs = _drawn(setting, 1, heads, length, 128 if setting.device == "cuda" else 16)
    mask = create_block_mask(
        lambda b, h, q, k: (q >= k) & (q - k < 128), None, None, length, length, setting.device
    )
    attend = _compiled(setting)
    for tensor in inputs:
        tensor.requires_grad_()
    found = torch.autograd.grad(attend(*inputs, mask).float().square().sum(), inputs)
    alone = [tensor[:, -1:].detach().requires_grad_() for tensor in inputs]
    wanted = torch.autograd.grad(flex_attention(*alone, block_mask=mask).float().square().sum(), alone)
    for got, like in zip(found, wanted, strict=True):
        error = (got[:, -1:].float() - like.float()).abs().max() / like.float().abs().max()
        assert error < 0.03, f"relative error {error:.2g}"


def long_grid(setting: Setting) -> None:
    batch = 70_000 if setting.device == "cuda" else 3
    inputs = _drawn(setting, batch, 1, 16, 16)
    _served_as_eagerly(setting, inputs, _causal(16, setting.device), _compiled(setting))


# Those in fp32 compile for long: they come last.
CALLS: list[Call | Place] = sorted(
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
        *(Call(sizes=_decoding(keys), kernels=("decode",)) for keys in (1000, 8192)),
        Place("on a side stream", on_a_side_stream),
        Place("in a CUDA graph, the mask refreshed in place", in_a_cuda_graph),
        Place("more than 2**31 elements", far_offsets),
        Place("more heads and batches than a grid has room for", long_grid),
        Place("on the second card, the first one current", on_the_second_card, cards=2),
    ],
    key=lambda call: call.dtype == FP32,
)


def without(call: Call | Place, capability: tuple[int, int], cards: int) -> str | None:
    """What a machine with so many cards of this compute capability lacks for the call."""
    if isinstance(call, Place):
        return None if call.cards <= cards else f"needs {call.cards} cards"
    axes = {axis for chosen in (call.configs or {}).values() for axis in chosen}
    if "descriptors" in axes and capability < (9, 0):
        return "tensor descriptors are there from sm_90 on"
    return None


def check(call: Call | Place, setting: Setting) -> None:
    """Raise where the call is wrong."""
    call.check(setting)
