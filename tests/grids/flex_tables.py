"""Parameters of torch's tests of FlexAttention, and of FlashAttention 4's tests of mods.

torch: test/inductor/test_flex_attention.py and test_flex_decoding.py; FlashAttention 4: tests/cute/test_mask_mod.py and
test_score_mod.py. Where torch has dtypes for a device, those of CUDA and of the CPU are here. Batch and heads are
constants there and small here, unless they are parameters.
"""

from __future__ import annotations

from .suite import Suite

BOTH = (False, True)
DTYPES = ("float32", "bfloat16", "float16")
FAST = ("float16", "float32")
HALF = ("float16", "bfloat16")
MODS = ("identity", "times_two", "squared", "causal", "inverse_causal", "rel_bias", "rel_causal", "alibi")
LENGTHS = "seqlen_q,seqlen_k"
SQUARE = ((2048, 2048),)
BLOCKS = (128, 256, (128, 256), (256, 128))
SHAPE = {"d": 64, "mha_type": "mha", "grad": True}
HEADS = "nheads_kv,gqa_ratio"
SEVERAL_HEADS = ((2, 2), (1, 4))
DECODE_HEADS = ((1, 16), (2, 4), (16, 1))
DECODE = {"d": 64, "grad": False, "mask": "noop", "block": 128}
COMPREHENSIVE = (
    (1, 1), (64, 128), (128, 192), (256, 256), (239, 1), (799, 3), (113, 203), (113, 128), (128, 217), (113, 211),
    (108, 256), (256, 512), (384, 256), (640, 128), (512, 256), (1024, 1024), (1023, 1024), (1024, 1023),
    (4096, 4096), (4224, 4224),
)  # fmt: skip
SMOKE = ((128, 128), (256, 256), (113, 203), (1024, 1024), (128, 8192))
MODS_4 = (
    "identity", "causal", "distance", "twice_distance", "times_two", "alibi_4", "sliding_window", "block_diagonal",
    "causal_v2",
)  # fmt: skip

TORCH = (
    Suite(
        "torch.builtin_score_mods",
        "flex",
        {"dtype": DTYPES, "score_mod": MODS, LENGTHS: SQUARE},
        ("dtype", "score_mod"),
        fixed=SHAPE | {"mask": "noop"},
    ),
    Suite(
        "torch.score_mask_mod",
        "flex",
        {
            "dtype": DTYPES,
            "score_mod,mask": tuple(
                (mod, {"causal": "causal", "rel_causal": "causal", "inverse_causal": "inverse_causal"}.get(mod, "noop"))
                for mod in MODS
            ),
            LENGTHS: (*SQUARE, (1024, 1024), (512, 512)),
        },
        ("dtype", "score_mod,mask"),
        fixed=SHAPE,
    ),
    Suite(
        "torch.different_seqlen",
        "flex",
        {"dtype": FAST, "score_mod": MODS, LENGTHS: ((1024, 2048),)},
        ("dtype", "score_mod"),
        fixed=SHAPE | {"mask": "noop"},
    ),
    Suite(
        "torch.seqlen_lt_block",
        "flex",
        {"dtype": FAST, "score_mod": MODS, LENGTHS: ((16, 16),), "block": (128, 256)},
        ("dtype", "score_mod", "block"),
        fixed=SHAPE | {"mask": "causal"},
    ),
    Suite(
        "torch.different_block_size",
        "flex",
        {"dtype": DTYPES, "score_mod": MODS, "block": BLOCKS, LENGTHS: SQUARE},
        ("dtype", "score_mod", "block"),
        fixed=SHAPE | {"mask": "noop"},
    ),
    Suite(
        "torch.kv_batch_broadcast",
        "flex",
        {
            "dtype": FAST, "Bq,Bkv": ((3, 1), (4, 1), (5, 1)), HEADS: SEVERAL_HEADS, "score_mod": MODS,
            "mask": ("noop", "causal"), LENGTHS: SQUARE,
        },
        ("dtype", HEADS, "score_mod", "mask"),
        fixed=SHAPE | {"grad": False},  # that of keys is a sum over batches, which the judge does not take
    ),
    Suite(
        "torch.gqa",
        "flex",
        {"dtype": DTYPES, "score_mod": MODS, HEADS: ((2, 4),), LENGTHS: ((256, 2048),)},
        ("dtype", "score_mod"),
        fixed=SHAPE,
    ),
    Suite(
        "torch.decoding",
        "flex",
        {"dtype": DTYPES, "score_mod": MODS, HEADS: DECODE_HEADS, LENGTHS: ((1, 2048),)},
        ("dtype", "score_mod", HEADS),
        fixed=DECODE,
    ),
    Suite(
        "torch.decoding_page_size",
        "flex",
        {"dtype": FAST, "score_mod": MODS, HEADS: DECODE_HEADS, "block": (64, 128, 256), LENGTHS: ((1, 2048),)},
        ("dtype", "score_mod", HEADS, "block"),
        fixed=DECODE | {"mask": "offset"},
    ),
    Suite(
        "torch.decoding_block_size",
        "flex",
        {"dtype": DTYPES, "score_mod": MODS, "block": BLOCKS, LENGTHS: ((1, 2048),)},
        ("dtype", "score_mod", "block"),
        fixed=DECODE | {"mha_type": "mha"},
    ),
    Suite(
        "torch.decoding_batch_broadcast",
        "flex",
        {
            "dtype": FAST, HEADS: DECODE_HEADS, "Bq,Bkv": ((3, 1), (4, 1), (5, 1)), "score_mod": MODS,
            LENGTHS: ((1, 2048),),
        },
        ("dtype", "score_mod", HEADS),
        fixed=DECODE,
    ),
)  # fmt: skip

FLASH_4_MODS = (
    Suite(
        "fa4.static_masks",
        "flex",
        {
            LENGTHS: COMPREHENSIVE, "nheads": (16,), "mha_type": ("mha", "gqa", "mqa"), "d": (128,),
            "dtype": ("bfloat16",), "use_block_sparsity": (True, False), "mask": ("block_diagonal", "mini_causal"),
            "block": (128, (128, 112)),
        },
        ("mha_type", "mask", "block"),
        fixed={"score_mod": "identity", "grad": True},
    ),
    Suite(
        "fa4.parameterized_masks",
        "flex",
        {
            LENGTHS: SMOKE, "nheads": (16,), "mha_type": ("mha", "gqa"), "d": (128,), "dtype": ("bfloat16",),
            "use_block_sparsity": (True, False),
            "mask": (
                "aligned_causal", "block_causal", "sliding_window_128", "sliding_window_256", "sliding_window_512",
                "document",
            ),
            "block": (128, (128, 112), (64, 128)), "use_autograd": (True, False),
        },
        ("mha_type", "mask", "block"),
        fixed={"score_mod": "identity", "grad": True},
    ),
    Suite(
        "fa4.write_order_masks",
        "flex",
        {
            LENGTHS: ((512, 512), (1024, 1024), (2048, 2048)),
            "mask": ("block_diagonal", "mini_causal", "prefix_lm", "dilated_sliding_window"), "spt": BOTH,
        },
        ("mask",),
        fixed={"score_mod": "identity", "dtype": "bfloat16", "d": 128, "grad": True, "twice": True},
    ),
    Suite(
        "fa4.score_mods",
        "flex",
        {LENGTHS: COMPREHENSIVE, HEADS: ((2, 1), (2, 4)), "dtype": HALF, "score_mod": MODS_4},
        (HEADS, "dtype", "score_mod"),
        fixed={"d": 128, "grad": False},
    ),
    Suite(
        "fa4.score_mods_with_aux",
        "flex",
        {
            LENGTHS: COMPREHENSIVE, HEADS: ((1, 1), (2, 4)), "dtype": HALF,
            "score_mod": ("batch_bias", "dual_buffer"),
        },
        (HEADS, "dtype", "score_mod"),
        fixed={"d": 128, "grad": False},
    ),
    Suite(
        "fa4.score_mods_backward",
        "flex",
        {
            LENGTHS: (
                (64, 64), (128, 128), (256, 256), (512, 512), (799, 3), (3, 799), (128, 256), (256, 128), (113, 203),
            ),
            "d": (64, 128), "dtype": HALF, "score_mod": ("times_two", "distance", "squared", "causal"),
            "use_autograd": (True, False),
        },
        ("d", "dtype", "score_mod"),
        fixed={"mha_type": "mha", "grad": True},
    ),
    Suite(
        "fa4.score_mods_backward_with_aux",
        "flex",
        {
            LENGTHS: ((64, 64), (128, 128), (256, 128)), "d": (64, 128), "dtype": HALF,
            "score_mod": ("batch_bias", "dual_buffer"),
        },
        ("d", "dtype", "score_mod"),
        fixed={"mha_type": "mha", "grad": True},
    ),
)  # fmt: skip
