"""Parameters of the tests of FlashAttention 2, 3 and 4: names and values, as published in Dao-AILab/flash-attention.

FlashAttention 2: tests/test_flash_attn.py; 3: hopper/; 4: tests/cute/; at commit 0251105a. Batch and heads are constants
there and small here. Tests of one card's refusals and caches are left out.
"""

from __future__ import annotations

from .suite import Case, Suite

BOTH = (False, True)
HALF = ("float16", "bfloat16")
TYPES = ("mha", "mqa", "gqa")
ODD_DIMS = (32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)
PAIRS = (
    (113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256), (1024, 1024), (1023, 1024), (1024, 1023),
    (2048, 2048),
)  # fmt: skip
CAUSAL_PAIRS = (
    (1, 239), (3, 799), (127, 512), (127, 513), (113, 203), (128, 217), (113, 211), (108, 256), (256, 512),
    (1023, 1024),
)  # fmt: skip
RACE_PAIRS = (
    (1, 239), (239, 1), (3, 799), (799, 3), (1024, 128), (97, 97), (128, 128), (200, 200), (256, 256), (257, 257),
    (384, 384), (512, 512), (768, 768), (1024, 1024),
)  # fmt: skip
CACHE_PAIRS = ((1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (64, 2048), (16, 20000))
LENGTHS = "seqlen_q,seqlen_k"


def _softcap_and_dropout(case: Case) -> bool:
    return case["softcap"] > 0.0 and case["dropout_p"] > 0.0


def _cache_skips(case: Case) -> bool:
    page = case["page_size"]
    return (
        (case["seqlen_q"] > case["seqlen_k"] and case["new_kv"])
        or (not case["new_kv"] and case["rotary_fraction"] > 0.0)
        or (page is not None and (case["has_batch_idx"] or case["has_leftpad"]))
    )


def _cache_skips_3(case: Case) -> bool:
    page = case["page_size"]
    return (
        (page is not None and case["seqlen_k"] % page != 0)
        or (case["seqlen_q"] > case["seqlen_k"] and case["new_kv"])
        or (not case["new_kv"] and case["rotary_fraction"] > 0.0)
    )


def _qv_skips(case: Case) -> bool:
    return case["has_qv"] and (case["d"] != 64 or case["dtype"] == "float8_e4m3fn")


def _local_and_causal(case: Case) -> bool:
    return case["local_enum"] > 0 and case["causal"]


def _value_dims_3(case: Case) -> dict:
    d, dims = case["d"], (case["d"],)
    if case["has_qv"]:
        dims = (256, 512)
    elif case["dtype"] != "float8_e4m3fn":
        dims = (128, d) if 128 < d <= 192 else (256, 512, d) if d <= 64 else (d,)
    # FlashAttention has no chunk without causality or its order of positions; each test draws one, or none.
    return {"value_dim": dims, "chunked": BOTH, "num_splits": (1, 3)}


def _value_dims_4(case: Case) -> dict:
    d = case["d"]
    return {
        "value_dim": (128,) if d == 192 else (64, d) if d == 128 else (d,),
        "num_splits": (1, 3) if d < 192 else (1,),
    }


FLASH_2 = (
    Suite(
        "fa2.qkvpacked",
        "padded",
        {
            "dtype": HALF, "deterministic": BOTH, "alibi": BOTH, "local": BOTH, "causal": BOTH, "d": ODD_DIMS,
            "seqlen": (97, 128, 200, 384, 768, 1024, 1025, 2048), "dropout_p": (0.0, 0.17),
        },
        ("dtype", "alibi", "local", "causal", "d", "dropout_p"),
        fixed={"packing": "qkv", "mha_type": "mha", "grad": True},
    ),
    Suite(
        "fa2.varlen_qkvpacked",
        "packed",
        {
            "dtype": HALF, "deterministic": BOTH, "alibi": BOTH, "local": BOTH, "causal": BOTH,
            "d": (32, 59, 64, 80, 96, 128, 160, 192, 224, 256),
            "seqlen": (97, 128, 200, 257, 384, 512, 768, 1025, 2048), "dropout_p": (0.0, 0.17),
        },
        ("dtype", "alibi", "local", "causal", "d", "dropout_p"),
        fixed={"packing": "qkv", "mha_type": "mha", "grad": True},
    ),
    Suite(
        "fa2.output",
        "padded",
        {
            "kvpacked": (True, False), "dtype": HALF, "mha_type": TYPES, "deterministic": BOTH, "alibi": BOTH,
            "local": BOTH, "causal": BOTH, "d": (32, 40, 59, 64, 96, 111, 128, 160, 192, 224, 256), LENGTHS: PAIRS,
            "dropout_p": (0.0, 0.17), "softcap": (0.0, 50.0),
        },
        ("kvpacked", "dtype", "mha_type", "alibi", "local", "causal", "d", "dropout_p", "softcap"),
        _softcap_and_dropout,
        fixed={"grad": True},
    ),
    Suite(
        "fa2.varlen_output",
        "packed",
        {
            "kvpacked": (True, False), "dtype": HALF, "mha_type": TYPES, "deterministic": BOTH, "alibi": BOTH,
            "local": BOTH, "causal": BOTH, "d": (32, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256),
            LENGTHS: ((1, 147), *PAIRS), "dropout_p": (0.0, 0.17), "softcap": (0.0, 50.0),
        },
        ("kvpacked", "dtype", "mha_type", "alibi", "local", "causal", "d", "dropout_p", "softcap"),
        _softcap_and_dropout,
        fixed={"grad": True},
    ),
    Suite(
        "fa2.causal",
        "padded",
        {"dtype": HALF, "local": BOTH, "d": ODD_DIMS, "swap_sq_sk": BOTH, LENGTHS: CAUSAL_PAIRS},
        ("dtype", "local", "d"),
        fixed={"causal": True, "mha_type": "mha", "grad": True},
    ),
    Suite(
        "fa2.varlen_causal",
        "packed",
        {
            "dtype": HALF, "local": BOTH, "d": ODD_DIMS, "swap_sq_sk": BOTH, LENGTHS: CAUSAL_PAIRS,
            "page_size": (None, 256, 512),
        },
        ("dtype", "local", "d", "page_size"),
        fixed={"causal": True, "mha_type": "mha", "grad": True},
    ),
    Suite(
        "fa2.splitkv",
        "padded",
        {
            "dtype": HALF, "deterministic": BOTH, "alibi": BOTH, "local": BOTH, "causal": BOTH, "d": ODD_DIMS,
            "swap_sq_sk": BOTH,
            LENGTHS: (
                (3, 1024), (1, 339), (64, 800), (3, 799), (64, 2048), (16, 20000), (16, 100000), (128, 128),
                (256, 256),
            ),
        },
        ("dtype", "alibi", "local", "causal", "d"),
        fixed={"mha_type": "mha", "grad": True},
    ),
    Suite(
        "fa2.kvcache",
        "cached",
        {
            "dtype": ("float16",), "num_splits": (1, 0), "mha_type": TYPES, "new_kv": BOTH, "alibi": BOTH,
            "local": BOTH, "causal": BOTH, "seqlen_new_eq_seqlen_q": (True, False), "rotary_interleaved": BOTH,
            "rotary_fraction": (0.0, 0.5, 1.0), "page_size": (None, 256), "has_leftpad": BOTH,
            "has_batch_idx": (False,), "d": (32, 59, 64, 80, 128, 256),
            LENGTHS: (
                (1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (64, 2048), (16, 20000),
                (1, 128 * 1024), (16, 128 * 1024), (128, 128),
            ),
        },
        ("num_splits", "mha_type", "alibi", "local", "causal", "page_size", "has_leftpad", "d"),
        _cache_skips,
    ),
    Suite(
        "fa2.race_condition",
        "padded",
        {"dtype": ("float16",), "causal": BOTH, "d": ODD_DIMS, LENGTHS: RACE_PAIRS, "dropout_p": (0.0, 0.17)},
        ("causal", "d", "dropout_p"),
        fixed={"mha_type": "mha", "grad": True, "twice": True},
    ),
    Suite(
        "fa2.bwd_overflow",
        "padded",
        {"dtype": ("float16",), "causal": BOTH, "d": (16, 32, 64), "seqlen": (1, 2, 5, 17, 128)},
        ("causal", "d"),
        fixed={"mha_type": "mha", "grad": True, "magnitudes": (5.0, 3.0, 3.0), "allowed": (2.0, 5.0, 1e-3)},  # as there
    ),
    Suite(
        "fa2.bwd_transpose",
        "padded",
        {"dtype": HALF, "causal": BOTH, "d": (64, 128), "seqlen": (97, 128, 200, 256)},
        ("dtype", "causal", "d"),
        fixed={"mha_type": "mha", "grad": True, "strided_upstream": True},
    ),
    Suite(
        "fa2.bwd_varlen_overflow",
        "packed",
        {"dtype": ("float16",), "causal": BOTH, "d": (16, 32, 64)},
        ("causal", "d"),
        fixed={
            "mha_type": "mha", "grad": True, "magnitudes": (3.0, 3.0, 3.0), "lengths_q": (76, 34, 146), "lengths_k": (1, 1, 1)
        },
    ),
    Suite(
        "fa2.deterministic",
        "padded",
        {"dtype": HALF, "local": BOTH, "causal": BOTH, "d": ODD_DIMS, "swap_sq_sk": BOTH, LENGTHS: CAUSAL_PAIRS},
        ("dtype", "local", "causal", "d"),
        fixed={"mha_type": "mha", "grad": True, "twice": True},
    ),
    Suite(
        "fa2.varlen_deterministic",
        "packed",
        {"dtype": HALF, "local": BOTH, "causal": BOTH, "d": ODD_DIMS, "swap_sq_sk": BOTH, LENGTHS: CAUSAL_PAIRS},
        ("dtype", "local", "causal", "d"),
        fixed={"mha_type": "mha", "grad": True, "twice": True},
    ),
)  # fmt: skip

PAIRS_3 = (
    (1, 1), (64, 128), (128, 192), (256, 256), (239, 1), (799, 3), (113, 203), (113, 128), (128, 217), (113, 211),
    (108, 256), (256, 512), (384, 256), (640, 128), (512, 256), (1024, 1024), (1023, 1024), (1024, 1023),
    (4096, 4096), (4224, 4224),
)  # fmt: skip
VARLEN_PAIRS_3 = (
    (1, 1), (1, 3), (2, 1), (511, 1), (3, 513), (64, 128), (128, 128), (256, 256), (113, 203), (128, 217), (113, 211),
    (108, 256), (256, 512), (307, 256), (640, 128), (512, 256), (1024, 1024), (1023, 1024), (1024, 1023),
    (1024, 1024), (2048, 2048), (4096, 4096),
)  # fmt: skip
DIMS_3 = (64, 96, 128, 192, 256)
DTYPES_3 = ("bfloat16", "float16", "float8_e4m3fn")
REQUESTS = (1, 3)
FEW_HEADS = ((1, 1), (4, 1), (2, 2), (3, 3), (4, 4), (2, 5), (3, 9), (1, 16), (1, 32))
NOSPLIT_HEADS = ((1, 1), (2, 5), (3, 3), (1, 32), (5, 7), (8, 1), (1, 16), (12, 4), (8, 2))
NOSPLIT_KERNEL = ("causal", "headdim", "nheads_kv,gqa_ratio")

FLASH_3 = (
    Suite(
        "fa3.output",
        "padded",
        {
            "dtype": DTYPES_3, "mha_type": TYPES, "has_qv": BOTH, "deterministic": (False,), "softcap": (0.0, 15.0),
            "local": BOTH, "causal": BOTH, "V_colmajor": (False,), "d": DIMS_3, LENGTHS: PAIRS_3,
        },
        ("dtype", "mha_type", "has_qv", "softcap", "local", "causal", "d"),
        _qv_skips,
        _value_dims_3,
        {"grad": True, "quarter": True},
    ),
    Suite(
        "fa3.varlen_output",
        "packed",
        {
            "dtype": DTYPES_3, "mha_type": TYPES, "has_qv": BOTH, "deterministic": (False,), "softcap": (0.0, 15.0),
            "local": BOTH, "causal": BOTH, "add_unused_qkv": BOTH, "d": DIMS_3, LENGTHS: VARLEN_PAIRS_3,
        },
        ("dtype", "mha_type", "has_qv", "softcap", "local", "causal", "add_unused_qkv", "d"),
        _qv_skips,
        _value_dims_3,
        {"grad": True, "quarter": True, "zero_lengths_k": True},
    ),
    Suite(
        "fa3.kvcache",
        "cached",
        {
            "dtype": ("bfloat16", "float8_e4m3fn"), "mha_type": TYPES, "new_kv": BOTH,
            "causal,local": ((False, False), (True, False), (False, True)), "seqlen_new_eq_seqlen_q": (True, False),
            "has_rotary_seqlens": (False,), "rotary_interleaved": BOTH, "rotary_fraction": (0.0, 0.5, 1.0),
            "page_size": (None, 1, 4, 128), "has_leftpad": BOTH, "has_batch_idx": BOTH, "varlen_q": BOTH,
            "d": (128,), LENGTHS: (*CACHE_PAIRS, (128, 128), (256, 512), (2048, 3577)),
        },
        ("dtype", "mha_type", "causal,local", "page_size", "has_leftpad", "has_batch_idx", "varlen_q"),
        _cache_skips_3,
        lambda case: {"num_splits": (1, 3, 0)},
    ),
    Suite(
        "fa3.kvcache_nosplit",
        "cached",
        {
            "causal": (True, False), "num_requests": (1, 4), "seqlen_q": (1, 8, 120), "seqlen_k": (1024, 3131, 4224),
            "headdim": (64, 128, 256), "gqa_parallel": BOTH, "nheads_kv,gqa_ratio": NOSPLIT_HEADS,
        },
        NOSPLIT_KERNEL,
        fixed={"dtype": "bfloat16", "num_splits": 1},
    ),
    Suite(
        "fa3.kvcache_nosplit_fp8",
        "cached",
        {
            "causal": (True, False), "num_requests": REQUESTS, "seqlen_q": (1, 8, 120),
            "seqlen_k": (1600, 4000, 5555), "headdim": (64, 128, 256), "gqa_parallel": (True, False),
            "nheads_kv,gqa_ratio": NOSPLIT_HEADS,
        },
        NOSPLIT_KERNEL,
        fixed={"dtype": "float8_e4m3fn", "num_splits": 1},
    ),
    *(
        Suite(
            f"fa3.kvcache_output{suffix}",
            "cached",
            {
                "causal": (True, False), "num_requests": REQUESTS, "seqlen_q": (1, 8, 25), "seqlen_k": (1600, 4000, 5555),
                "headdim": (64, 128, 256), "cache_seqlen_rand": (True, False), "gqa_parallel": (True, False),
                "nheads_kv,gqa_ratio": FEW_HEADS,
            },
            NOSPLIT_KERNEL,
            fixed={"dtype": dtype, "num_splits": 0},
        )
        for suffix, dtype in (("", "bfloat16"), ("_fp8", "float8_e4m3fn"))
    ),
    Suite(
        "fa3.cluster",
        "padded",
        {"dtype": ("bfloat16",), "causal": BOTH, "d": (128,), LENGTHS: ((64, 8192),)},
        ("causal",),
        fixed={"mha_type": "mha", "grad": False},
    ),
    Suite(
        "fa3.race_condition",
        "padded",
        {"dtype": ("bfloat16",), "causal": BOTH, "d": ODD_DIMS, LENGTHS: (*RACE_PAIRS, (2048, 2048))},
        ("causal", "d"),
        fixed={"mha_type": "mha", "grad": True, "twice": True},
    ),
    Suite(
        "fa3.bwd_determinism",
        "padded",
        {
            "dtype": ("bfloat16",), "mha_type": TYPES, "has_qv": (False,), "deterministic": BOTH,
            "softcap": (0.0, 15.0), "local": BOTH, "causal": BOTH, "V_colmajor": (False,), "d": DIMS_3,
            LENGTHS: PAIRS_3,
        },
        ("mha_type", "softcap", "local", "causal", "d"),
        lambda case: case["deterministic"] and case["d"] == 256,
        lambda case: _value_dims_3(case) | {"chunked": (False,)},
        {"grad": True, "quarter": True, "twice": True},
    ),
    Suite(
        "fa3.varlen_bwd_determinism",
        "packed",
        {
            "dtype": ("bfloat16",), "mha_type": TYPES, "has_qv": (False,), "deterministic": BOTH,
            "softcap": (0.0, 15.0), "local": BOTH, "causal": BOTH, "add_unused_qkv": BOTH, "d": DIMS_3,
            LENGTHS: VARLEN_PAIRS_3,
        },
        ("mha_type", "softcap", "local", "causal", "add_unused_qkv", "d"),
        lambda case: case["deterministic"] and case["d"] == 256,
        lambda case: _value_dims_3(case) | {"chunked": (False,)},
        {"grad": True, "quarter": True, "zero_lengths_k": True, "twice": True},
    ),
    Suite(
        "fa3.combine",
        "combined",
        {
            "dtype": ("float32", *HALF), "d": (64, 96, 128, 192, 256, 512),
            "seqlen": (1, 2, 3, 32, 64, 256, 113, 108, 640, 1024), "num_splits": (1, 2, 3, 5, 17, 32, 55, 97, 133),
        },
        ("dtype",),
    ),
)  # fmt: skip

PAIRS_4 = (
    (1, 1), (3, 3), (64, 32), (64, 128), (64, 1), (128, 128), (128, 192), (256, 256), (255, 256), (239, 1), (799, 3),
    (113, 203), (113, 128), (128, 217), (113, 211), (108, 256), (256, 512), (384, 256), (640, 128), (512, 256),
    (1024, 1024), (1023, 1024), (1024, 1023), (2048, 2048), (4096, 4096), (4224, 4224),
)  # fmt: skip
VARLEN_PAIRS_4 = (
    (511, 1), (3, 513), (64, 128), (128, 128), (256, 256), (113, 203), (128, 217), (113, 211), (108, 256), (256, 512),
    (307, 256), (640, 128), (512, 256), (1024, 1024), (1023, 1024), (1024, 1023), (2048, 2048), (64, 1), (255, 256),
    (4096, 4096), (4224, 4224),
)  # fmt: skip
ZEROS = ((False, False), (True, False), (False, True), (True, True))
FAST_PAIRS = ((128, 128), (256, 256), (113, 203), (1024, 1024))
UNPADDED = ((True, True), (False, False), (True, False), (False, True))

FLASH_4 = (
    Suite(
        "fa4.output",
        "padded",
        {
            "dtype": ("bfloat16",), "mha_type": TYPES, "has_learnable_sink": BOTH, "has_qv": (False,),
            "deterministic": BOTH, "softcap": (0.0, 15.0), "local_enum": (0, 1, 2, 3), "causal": BOTH,
            "d": (64, 96, 128, 192, 256), LENGTHS: PAIRS_4,
        },
        ("mha_type", "has_learnable_sink", "softcap", "local_enum", "causal", "d"),
        _local_and_causal,
        _value_dims_4,
        {"grad": True, "quarter": True, "negative": True},
    ),
    Suite(
        "fa4.varlen_output",
        "packed",
        {
            "dtype": ("bfloat16",), "mha_type": TYPES, "has_learnable_sink": (False,), "has_qv": (False,),
            "deterministic": BOTH, "softcap": (0.0, 15.0), "local_enum": (0, 1, 2, 3), "causal": BOTH,
            "add_unused_qkv": (False,), "d": (64, 128, 192, 256), LENGTHS: VARLEN_PAIRS_4,
            "varlen_mode": ("random", "third", "full"), "zero_lengths_q,zero_lengths_k": ZEROS,
            "unpad_q,unpad_kv": UNPADDED,
        },
        ("mha_type", "softcap", "local_enum", "causal", "d", "unpad_q,unpad_kv"),
        _local_and_causal,
        _value_dims_4,
        {"grad": True, "quarter": True, "same_lengths": True},
    ),
    Suite(
        "fa4.kvcache",
        "cached",
        {
            "dtype": ("bfloat16",), "mha_type": TYPES, "has_learnable_sink": BOTH, "new_kv": (False,), "local": BOTH,
            "causal": BOTH, "seqlen_new_eq_seqlen_q": (False,), "has_rotary_seqlens": (False,),
            "rotary_interleaved": (True,), "rotary_fraction": (0.0,), "page_size": (None, 1, 4, 128),
            "has_leftpad": (False,), "has_batch_idx": (False,), "varlen_q": BOTH, "d": (64, 128),
            LENGTHS: CACHE_PAIRS,
        },
        ("mha_type", "has_learnable_sink", "local", "causal", "page_size", "varlen_q", "d"),
        _cache_skips_3,
        lambda case: {"num_splits": (1, 3)},
    ),
    Suite(
        "fa4.small_head_dim",
        "padded",
        {"dtype": ("bfloat16",), "causal": BOTH, "d": (8, 16, 32), LENGTHS: ((128, 128), (2048, 2048))},
        ("causal", "d"),
        fixed={"mha_type": "mha", "grad": True},
    ),
    Suite(
        "fa4.lse_grad",
        "padded",
        {"dtype": ("bfloat16",), "causal": BOTH, "d": (64, 128), LENGTHS: ((128, 128), (256, 256))},
        ("causal", "d"),
        fixed={"mha_type": "mha", "grad": True, "lse_grad": True},
    ),
    Suite(
        "fa4.varlen",
        "packed",
        {
            "B": (1, 7, 20), "H": (1, 4, 6), "d": (64, 128, 256),
            "min_seq_len,max_seq_len": tuple(
                (low, high) for low in (1, 32, 128) for high in (8, 64, 2048) if low <= high
            ),
            "causal": (True, False), "softmax_scale": (None, 0.1), "dtype": HALF, "mha_type": TYPES,
        },
        ("H", "d", "causal", "softmax_scale", "dtype", "mha_type"),
        fixed={"grad": True},
    ),
    Suite(
        "fa4.race.output",
        "padded",
        {
            "dtype": ("bfloat16",), "mha_type": TYPES, "has_learnable_sink": (False,), "has_qv": (False,),
            "deterministic": (True,), "softcap": (0.0, 15.0), "local_enum": (0, 1), "causal": BOTH,
            "d": (64, 128, 192), LENGTHS: ((4224, 4224), (2000, 4000)),
        },
        ("mha_type", "softcap", "local_enum", "causal", "d"),
        _local_and_causal,
        _value_dims_4,
        {"grad": True, "quarter": True, "twice": True},
    ),
    Suite(
        "fa4.race.varlen_output",
        "packed",
        {
            "dtype": ("bfloat16",), "mha_type": TYPES, "has_learnable_sink": (False,), "has_qv": (False,),
            "deterministic": (True,), "softcap": (0.0, 15.0), "local_enum": (0, 1), "causal": BOTH,
            "add_unused_qkv": (False,), "d": (64, 128, 192), LENGTHS: ((1024, 1024), (2048, 2048)),
            "varlen_mode": ("random", "third", "full"), "zero_lengths_q,zero_lengths_k": ZEROS,
        },
        ("mha_type", "softcap", "local_enum", "causal", "d"),
        _local_and_causal,
        _value_dims_4,
        {"grad": True, "quarter": True, "same_lengths": True, "twice": True},
    ),
    Suite(
        "fa4.fast.output",
        "padded",
        {
            "dtype": ("bfloat16",), "mha_type": TYPES, "num_splits": (1, 3), "causal": BOTH, "d": (64, 128),
            LENGTHS: FAST_PAIRS,
        },
        ("mha_type", "num_splits", "causal", "d"),
        fixed={"grad": True},
    ),
    Suite(
        "fa4.fast.varlen_output",
        "packed",
        {"dtype": ("bfloat16",), "mha_type": TYPES, "causal": BOTH, "d": (64, 128), "seqlen": (128, 256, 1024)},
        ("mha_type", "causal", "d"),
        fixed={"grad": True},
    ),
    Suite(
        "fa4.fast.varlen_unpad_output",
        "packed",
        {
            "dtype": ("bfloat16",), "mha_type": TYPES, "causal": BOTH, "d": (64, 128), "seqlen": (128, 256),
            "unpad_q,unpad_kv": UNPADDED,
        },
        ("mha_type", "causal", "d", "unpad_q,unpad_kv"),
        fixed={"grad": True},
    ),
    Suite(
        "fa4.fast.combine",
        "combined",
        {"dtype": ("bfloat16",), "d": (64, 128), "seqlen": (32, 256), "num_splits": (2, 5, 17)},
        ("dtype",),
    ),
    Suite(
        "fa4.combine",
        "combined",
        {
            "dtype": ("float32", *HALF), "d": (64, 96, 128, 192, 256, 512),
            "seqlen": (1, 2, 3, 32, 64, 256, 113, 108, 640, 1024), "num_splits": (1, 2, 3, 5, 17, 32, 55, 97, 133),
        },
        ("dtype",),
    ),
)  # fmt: skip
