"""Choices of the random tests of NVIDIA/cudnn-frontend, test/python/test_mhas_v2.py, level 0.

A case is a test number, from which everything is drawn with the published weights. Tests of pages and of 8 bits are left
out: FlashAttention's suites have both.
"""

from __future__ import annotations

from .suite import Suite

MASKED = {"causal": 10, "left_window_only": 5, "right_window_only": 5, "band_around_diag": 10, "no_mask": 10}
UNMASKED = {"no_mask": 10}
EITHER = {"top_left": 1, "bottom_right": 1}
TOP_LEFT = {"top_left": 1, "bottom_right": 0}
WIDE = ((64, 64), (128, 128), (192, 128), (256, 256))
DIMS = ((64, 64), (128, 128), (192, 128))
FEW_DIMS = ((128, 128), (192, 128))
SOMETIMES = {True: 1, False: 3}


def _suite(name: str, tests: int, **choices: object) -> Suite:
    common = {
        "batches": (1, 8), "likely_batches": (1, 4), "s_q": (1, 1024), "s_kv": (1, 1024),
        "lengths": {"s_q=1": 0, "s_q=s_kv": 5, "s_q=random": 10}, "d_qk": (1, 256), "d_v": (1, 256),
        "dims": {"d_qk=d_v": 1, "d_qk=random": 1}, "likely_dims": WIDE, "heads": (1, 8), "head_groups": (1, 4, 1),
        "dtypes": {"float16": 1, "bfloat16": 2}, "masks": MASKED, "alignment": EITHER,
        "layout": {"ragged": 0, "padded": 1, "full": 1}, "sinks": SOMETIMES, "grad": False,
    }  # fmt: skip
    return Suite(
        f"cudnn.{name}", "cudnn", {"test_no": tuple(range(tests))}, ("test_no",), fixed=common | choices
    )


BACKWARD = {
    "batches": (8, 16), "likely_batches": None, "d_qk": (1, 192), "d_v": (1, 128), "dims": {"d_qk=d_v": 5, "d_qk=random": 1},
    "likely_dims": DIMS, "layout": {"ragged": 0, "padded": 4, "full": 1}, "grad": True,
}  # fmt: skip
ONE_QUERY = {
    "batches": (1, 32), "likely_batches": None, "s_q": (1, 1), "lengths": {"s_q=1": 100, "s_q=s_kv": 1, "s_q=random": 0},
    "d_qk": (1, 128), "d_v": (1, 128), "likely_dims": FEW_DIMS, "heads": (1, 32), "masks": UNMASKED,
    "layout": {"ragged": 0, "padded": 0, "full": 1}, "sinks": {False: 1},
}  # fmt: skip
LEAN = {
    "s_kv": (513, 2048), "lengths": {"s_q=1": 100, "s_q=s_kv": 0, "s_q=random": 0},
    "layout": {"ragged": 0, "padded": 1, "full": 1},
}  # fmt: skip
RAGGED = {"ragged": 1, "padded": 0, "full": 0}
BIASED = {"masks": UNMASKED, "alignment": TOP_LEFT, "bias": {True: 1}, "sinks": {False: 1}}

CUDNN = (
    _suite("fwd", 128),
    _suite("fwd_unified", 128, bias=SOMETIMES, alibi=SOMETIMES, dropout=SOMETIMES),
    _suite("bwd", 256, **BACKWARD),
    _suite("sq1", 128, **ONE_QUERY),
    _suite("sq1_unified", 32, **ONE_QUERY | {"likely_dims": DIMS, "alignment": TOP_LEFT}),
    _suite("lean_attn", 128, **ONE_QUERY | LEAN | {"likely_dims": DIMS}),
    _suite("lean_attn_unified", 128, **ONE_QUERY | LEAN | {"alignment": TOP_LEFT}),
    _suite("fwd_ragged", 128, layout=RAGGED),
    _suite(
        "fwd_ragged_unified", 128, layout=RAGGED, masks=UNMASKED, alignment=TOP_LEFT, dropout=SOMETIMES,
        likely_dims=(*FEW_DIMS, (256, 256)),
    ),
    _suite("bwd_ragged", 256, **BACKWARD | {"layout": RAGGED, "sinks": {False: 1}}),
    _suite(
        "fwd_unified_block_mask", 32, d_qk=(1, 128), d_v=(1, 128), likely_dims=FEW_DIMS, masks=UNMASKED,
        alignment=TOP_LEFT, layout={"ragged": 0, "padded": 0, "full": 1}, sinks={False: 1}, tiles={True: 1},
    ),
    _suite("fwd_bias", 32, d_qk=(1, 128), d_v=(1, 128), likely_dims=DIMS, **BIASED),
    _suite("bwd_bias", 32, **BACKWARD | BIASED),
)  # fmt: skip
