"""NaN and infinities in the fused CPU kernels: where nobody attends to them, and where somebody does."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from flex_inductor import create_block_mask
from flex_inductor.backend import flex_inductor as backend
from flex_inductor.lowerings.cpu.configs import TABLES
from tests.support import LAYOUTS, Sizes, attention_of, dense_of, judge

SIZES = Sizes(batch=2, heads=4, kv_heads=2, queries=70, keys=100, head_dim=16, value_dim=24)
FEW = SIZES._replace(queries=3, keys=300)
GARBAGE = (math.nan, math.inf, -math.inf)
NAMES = ("out", "lse", "d_query", "d_key", "d_value", "d_captures")


def biased(bias):
    return lambda score, b, h, q_idx, kv_idx: score + bias[kv_idx]


def tail(sizes):
    """Sequences that end within a block."""
    return (torch.arange(sizes.keys) < torch.tensor([50, 83])[:, None, None, None]).expand(
        2, sizes.heads, sizes.queries, -1
    )


def scattered(sizes):
    """Whole blocks, empty ones, and others where some queries attend to some keys and nobody to the rest."""
    generator = torch.Generator().manual_seed(5)
    rows, keys = torch.arange(sizes.queries)[:, None], torch.arange(sizes.keys)
    allowed = torch.rand(2, sizes.heads, sizes.queries, sizes.keys, generator=generator) < 0.3
    allowed &= torch.rand(2, 1, 1, sizes.keys, generator=generator) < 0.6
    return (allowed | (keys < 32)) & (keys // 8 != 4) & (rows != sizes.queries - 2)


def table_mask(allowed, block, compact):
    return create_block_mask(
        lambda b, h, q_idx, kv_idx: allowed[b, h, q_idx, kv_idx],
        *allowed.shape,
        device="cpu",
        BLOCK_SIZE=block,
        compact=compact,
    )


class Call:
    """One compiled call, whose inputs get other contents."""

    def __init__(
        self,
        dtype,
        build,
        block,
        compact=False,
        sizes=SIZES,
        layout="contiguous",
        backward=True,
        configs=None,
    ):
        self.build, self.sizes, self.backward = build, sizes, backward
        self.attend = torch.compile(
            attention_of(build),
            backend=backend,
            fullgraph=True,
            dynamic=False,
            options={"route": "cpu", "configs": configs},
        )
        self.schedules = [
            (allowed, table_mask(allowed, block, compact)) for allowed in (tail(sizes), scattered(sizes))
        ]
        bias = [torch.randn(sizes.keys).to(dtype)] if build else []
        upstream = torch.randn(sizes.batch, sizes.heads, sizes.queries, sizes.value_dim)
        self.tensors = [LAYOUTS[layout](t) for t in (*sizes.inputs(dtype), upstream.to(dtype))] + bias

    def keys_of(self, lanes):
        """Which keys have any of these lanes, [KV batch, KV head, key]."""
        keys = lanes.any(2).unflatten(1, (self.sizes.kv_heads, -1)).any(2)
        return keys if self.sizes.kv_batch is None else keys.any(0, keepdim=True)

    def run(self, tensors, mask):
        if not self.backward:
            with torch.no_grad():
                out, lse, _ = self.attend(*tensors[:3], tuple(tensors[4:]), mask)
            return {"out": out, "lse": lse}
        wanted = [t.detach().requires_grad_() for t in (*tensors[:3], *tensors[4:])]
        out, lse, _ = self.attend(*wanted[:3], tuple(wanted[3:]), mask)
        grads = torch.autograd.grad(out, wanted, tensors[3])
        return dict(zip(NAMES, (out.detach(), lse.detach(), *grads), strict=False))

    def check_what_nobody_attends_to(self):
        for (allowed, mask), shift in itertools.product(self.schedules, range(3)):
            clean = self.run(self.tensors, mask)
            assert all(t.isfinite().all() for name, t in clean.items() if name != "lse")
            spoilt = [t.clone() for t in self.tensors]
            dead = ~self.keys_of(allowed)
            dead_rows = ~allowed.any(-1)
            which = [[1], [2], [0, 1, 2, 3, 4]][shift]
            for i, at in enumerate((dead_rows, dead, dead, dead_rows, dead.flatten(0, 1).all(0))):
                if i in which and i < len(spoilt):
                    places = (torch.arange(at.sum()) + shift) % 3
                    spoilt[i][at] = torch.tensor(GARBAGE, dtype=spoilt[i].dtype)[places].reshape(
                        -1, *(1,) * (spoilt[i].dim() - at.dim())
                    )
            for name, tensor in self.run(spoilt, mask).items():
                assert torch.equal(tensor, clean[name]), (name, which)

    def check_what_somebody_attends_to(self):
        """It spoils what it reaches, as in dense attention, and no more."""
        for (allowed, mask), (place, what) in zip(
            itertools.cycle(self.schedules), itertools.product(range(4), GARBAGE[:2])
        ):
            clean, spoilt = self.run(self.tensors, mask), [t.clone() for t in self.tensors]
            at = 0 if place in (0, 3) else 11
            spoilt[place][:, :, at] = what
            spoilt_rows = torch.zeros(allowed.shape[:3], dtype=torch.bool)
            if place in (0, 3):
                spoilt_rows[:, :, at] = allowed[:, :, at].any(-1)
            else:
                spoilt_rows = allowed[..., at]
            attended = self.keys_of(spoilt_rows[..., None] & allowed)
            expected = {
                "out": spoilt_rows & (place != 3),
                "lse": spoilt_rows & (place < 2),
                "d_query": spoilt_rows,
                "d_key": attended,
                "d_value": attended & (place != 2),
                "d_captures": attended.any(0).any(0),
            }
            for name, tensor in self.run(spoilt, mask).items():
                hit = expected[name]
                tensor, wanted = (t.reshape(*hit.shape, -1) for t in (tensor, clean[name]))
                assert not tensor[hit].isfinite().all(-1).any(), (name, place, what)
                assert torch.equal(tensor[~hit], wanted[~hit]), (name, place, what)


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(
    "dtype, build, block, compact, layout, kv_batch",
    [
        (torch.float32, biased, 32, False, "bshd", None),
        (torch.bfloat16, None, (24, 7), True, "head_dim_stride", None),
        pytest.param(torch.float16, biased, (16, 128), True, "contiguous", 1, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, biased, 32, False, "bshd", 1, marks=pytest.mark.slow),
        pytest.param(torch.float32, None, (8, 5), False, "head_dim_stride", None, marks=pytest.mark.slow),
    ],
)
def test_forward_and_backward(dtype, build, block, compact, layout, kv_batch):
    call = Call(dtype, build, block, compact, SIZES._replace(kv_batch=kv_batch), layout)
    judge(call.attend, dense_of(build), call.tensors[:3], call.tensors[4:], call.schedules[1][1])
    call.check_what_nobody_attends_to()
    call.check_what_somebody_attends_to()


@pytest.mark.parametrize(
    "dtype, build, layout, kv_batch",
    [
        (torch.float32, biased, "contiguous", None),
        pytest.param(torch.bfloat16, None, "head_dim_stride", 1, marks=pytest.mark.slow),
        (torch.float16, biased, "bshd", None),
    ],
)
def test_decode(dtype, build, layout, kv_batch):
    configs = {"decode": {"block_n": 64, "split": 128}}
    sizes = FEW._replace(kv_batch=kv_batch)
    call = Call(dtype, build, 32, False, sizes, layout, backward=False, configs=configs)
    call.check_what_nobody_attends_to()
    call.check_what_somebody_attends_to()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "forward, backward", [*itertools.zip_longest(TABLES["forward"], TABLES["backward"])], ids=str
)
def test_every_tile_size(forward, backward, dtype):
    asked = {"forward": forward._asdict(), "backward": (backward or TABLES["backward"][0])._asdict()}
    call = Call(dtype, None, 64, configs=asked)
    call.check_what_nobody_attends_to()
    call.check_what_somebody_attends_to()


@pytest.mark.slow
@pytest.mark.parametrize("config", TABLES["decode"], ids=str)
def test_every_tile_size_of_decode(config):
    call = Call(torch.float32, None, 64, sizes=FEW, backward=False, configs={"decode": config._asdict()})
    call.check_what_nobody_attends_to()
    call.check_what_somebody_attends_to()
