"""What the tests of the CPU kernels share."""

from __future__ import annotations

import torch

from flex_inductor.backend import flex_inductor as backend
from tests.support import LAYOUTS, MASKS, MODS, Sizes, attention_of, dense_of, judge

SIZES = Sizes(queries=150, keys=170, head_dim=40, value_dim=24)


def fused(attend, **options):
    """Compiled; served by the CPU kernels or not at all."""
    return torch.compile(attend, backend=backend, fullgraph=True, options={"route": "cpu"}, **options)


def check(mod, mask, dtype=torch.float32, layout="contiguous", sizes=SIZES, attend=None):
    """Forward and backward, judged by fp64."""
    captures, build = MODS[mod]
    attend = attend or fused(attention_of(build), dynamic=False)
    inputs = [LAYOUTS[layout](t) for t in sizes.inputs(dtype)]
    return judge(attend, dense_of(build), inputs, captures(sizes), MASKS[mask](sizes))
