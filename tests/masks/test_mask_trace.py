"""The abstract trace: which step depends on which index. Read the snapshots as the specification."""

from __future__ import annotations

import gc
import textwrap
import weakref

import torch

from flex_inductor.masks.analysis.rectangles import MaskBounds, Rectangles
from flex_inductor.masks.analysis.trace import trace_mask
from flex_inductor.masks.library.algebra import and_masks
from flex_inductor.masks.library.blockmask import create_block_mask
from flex_inductor.masks.runs import Extent

CPU = torch.device("cpu")
DOCUMENTS = torch.arange(4096) // 300


def causal(b, h, q, kv):
    return q >= kv


def documents(b, h, q, kv):
    return DOCUMENTS[q] == DOCUMENTS[kv]


def windowed_heads(b, h, q, kv):
    distance = q - kv
    return (distance >= 0) & (distance < 64 * (h + 1)) & (q - kv != 7)


def snapshot(mask_mod, expected: str) -> None:
    assert str(trace_mask(mask_mod, CPU)) == textwrap.dedent(expected).strip()


def test_causal():
    snapshot(
        causal,
        """
        causal(b, h, q, kv):
          %0 = ge.Tensor(q, kv)  # q, kv
          return %0
        """,
    )


def test_documents_are_two_one_sided_tables_and_one_comparison():
    snapshot(
        and_masks(causal, documents),
        """
        and_mask(b, h, q, kv):
          %0 = new_ones.default(b, [], dtype=torch.bool, pin_memory=False)  # nothing
          %1 = ge.Tensor(q, kv)  # q, kv
          %2 = bitwise_and.Tensor(%0, %1)  # q, kv
          %3 = captured int64[4096]  # nothing
          %4 = index.Tensor(%3, [q])  # q
          %5 = index.Tensor(%3, [kv])  # kv
          %6 = eq.Tensor(%4, %5)  # q, kv
          %7 = bitwise_and.Tensor(%2, %6)  # q, kv
          return %7
        """,
    )


def test_equal_steps_are_one():
    snapshot(
        windowed_heads,
        """
        windowed_heads(b, h, q, kv):
          %0 = sub.Tensor(q, kv)  # q, kv
          %1 = ge.Scalar(%0, 0)  # q, kv
          %2 = add.Tensor(h, 1)  # h
          %3 = mul.Tensor(%2, 64)  # h
          %4 = lt.Tensor(%0, %3)  # h, q, kv
          %5 = bitwise_and.Tensor(%1, %4)  # h, q, kv
          %6 = ne.Scalar(%0, 7)  # q, kv
          %7 = bitwise_and.Tensor(%5, %6)  # h, q, kv
          return %7
        """,
    )


def test_numbers_that_python_calls_equal_stay_apart():
    def mask(b, h, q, kv):
        return (q - kv < 1) & (q - kv < 1.0) & (q + kv > True)

    assert "1.0)" in str(trace_mask(mask, CPU)) and "True)" in str(trace_mask(mask, CPU))


def test_captures_do_not_outlive_the_mask():
    def freed():
        ids = torch.arange(300) % 7
        create_block_mask(lambda b, h, q, kv: ids.double()[q] == ids[kv], None, None, 300, 300, "cpu")
        return weakref.ref(ids)

    gc.disable()
    try:
        assert freed()() is None
    finally:
        gc.enable()


def decided(mask_mod, scale: int, q: int, kv: int, h: int = 0) -> str:
    bounds = MaskBounds(trace_mask(mask_mod, CPU), Extent(1, 4, (4096, 4096), (128, 128)))
    place = [torch.tensor([x]) for x in (0, h, q, kv)]
    always, possible = bounds.over(Rectangles(scale, *place))
    return "always" if always.item() else "mixed" if possible.item() else "never"


def test_rectangles_are_decided_without_evaluating_them():
    assert decided(causal, 4, 1, 0) == "always"
    assert decided(causal, 4, 0, 1) == "never"
    assert decided(causal, 4, 1, 1) == "mixed"
    assert decided(documents, 1, 2, 2) == "mixed"
    assert decided(documents, 1, 3, 3) == "always"
    assert decided(documents, 4, 0, 4) == "never"
    assert decided(windowed_heads, 1, 4, 1, h=0) == "never"
    assert decided(windowed_heads, 1, 4, 2, h=3) == "mixed"
    assert decided(lambda b, h, q, kv: q // 512 == kv // 512, 4, 3, 3) == "always"
    assert decided(lambda b, h, q, kv: (q - q % 512) > kv, 4, 3, 2) == "always"
    assert decided(lambda b, h, q, kv: torch.sin(q) > 2, 32, 0, 0) == "never"
    assert decided(lambda b, h, q, kv: torch.sin(q - kv) > 2, 1, 0, 0) == "mixed"
