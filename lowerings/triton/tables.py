"""Tile sizes and launch parameters by card family and head dim, best first."""

from __future__ import annotations

from .configs import (
    LAST,
    Config,
    Cost,
    Table,
    decode_cost,
    dk_cost,
    dkdv_cost,
    dq_cost,
    dv_cost,
    forward_cost,
)


def ahead(*tiles: tuple[int, int, int]) -> list[Config]:
    """Tiles (and warps) with three stages, which copy two tiles of a tensor while one is computed, then with two, which
    copy none meanwhile: for calls that leave less memory or fewer registers."""
    return [Config(*tile, stages) for stages in (3, 2) for tile in tiles]


FORWARD: Table = {
    "interpreter": {1024: LAST},
    "exact": {
        64: [Config(64, 32, 8, 2), Config(32, 32, 4, 2), Config(64, 64, 8, 2), Config(32, 64, 4, 2)],
        128: [Config(32, 64, 8, 2), Config(64, 16, 8, 2), Config(32, 16, 8, 2), Config(64, 32, 8, 2)],
        256: [Config(32, 32, 8, 1), Config(32, 16, 8, 2), Config(64, 16, 8, 1), Config(16, 16, 4, 1)],
        1024: [Config(16, 16, 8, 1)],
    },
    "ampere": {
        64: [*ahead((128, 128, 8)), Config(128, 64, 4, 3), Config(128, 64, 8, 3), Config(64, 64, 4, 3)],
        128: [*ahead((128, 64, 8), (128, 32, 8)), *ahead((128, 128, 8), (64, 64, 4))],
        256: [
            Config(32, 64, 4, 3),
            Config(64, 128, 8, 1),
            Config(64, 64, 8, 1),
            *ahead((64, 32, 4)),
            *ahead((32, 32, 4)),
        ],
        1024: [Config(32, 16, 8, 1)],
    },
    "hopper": {
        64: [*ahead((128, 128, 8), (128, 64, 8)), Config(64, 64, 4, 3)],
        128: [*ahead((128, 128, 8), (128, 64, 8)), Config(64, 64, 4, 3)],
        256: [
            Config(128, 32, 8, 3),
            Config(128, 64, 8, 2),
            Config(128, 32, 8, 2),
            Config(64, 64, 4, 3),
            Config(64, 64, 8, 2),
            *ahead((64, 32, 8)),
        ],
        1024: [Config(32, 16, 8, 1)],
    },
    "consumer": {
        64: [Config(64, 64, 4, 3), Config(128, 32, 4, 3), Config(64, 32, 4, 3)],
        128: [Config(64, 32, 4, 3), Config(64, 64, 4, 2), *ahead((32, 32, 4))],
        256: [Config(64, 32, 8, 1), Config(32, 32, 4, 1)],
        1024: [Config(16, 16, 4, 1)],
    },
    "amd": {
        64: [Config(128, 64, 4, 1), Config(64, 64, 4, 1)],
        128: [Config(128, 64, 4, 1), Config(64, 64, 4, 1)],
        256: [Config(64, 32, 4, 1), Config(32, 32, 4, 1)],
        1024: [Config(16, 16, 4, 1)],
    },
}
FORWARD["blackwell"] = {
    **FORWARD["hopper"],
    64: [Config(128, 64, 8, 3), Config(128, 128, 8, 3), Config(64, 64, 4, 3)],
    128: [
        Config(128, 64, 8, 3),
        Config(128, 64, 8, 2),
        Config(128, 32, 8, 3),
        *ahead((128, 128, 8)),
        Config(64, 64, 4, 3),
    ],
    256: [Config(128, 32, 8, 3), Config(64, 64, 8, 2), *ahead((64, 32, 8))],
}

# For d(query): a tile of queries walks tiles of keys.
DQ: Table = {
    "interpreter": {1024: LAST},
    "exact": {
        64: [Config(64, 32, 8, 2), Config(32, 64, 8, 2), Config(32, 32, 8, 2), Config(32, 32, 4, 2)],
        128: [Config(32, 32, 8, 2), Config(64, 16, 8, 2), Config(16, 32, 8, 2), Config(64, 32, 8, 2)],
        256: [Config(32, 16, 8, 2), Config(16, 16, 4, 2), Config(16, 32, 8, 2), Config(32, 32, 8, 2)],
        1024: [Config(16, 16, 8, 2)],
    },
    "ampere": {
        64: [*ahead((128, 64, 8), (128, 32, 8)), *ahead((64, 32, 4))],
        128: [*ahead((128, 32, 8), (64, 32, 4)), *ahead((32, 32, 4)), *ahead((128, 64, 8), (64, 64, 4))],
        256: [Config(64, 32, 4, 3), Config(64, 64, 8, 1), Config(32, 32, 8, 1), Config(32, 16, 4, 1)],
        1024: [Config(16, 16, 8, 1)],
    },
    "hopper": {
        64: [*ahead((128, 64, 8), (128, 32, 8)), *ahead((128, 128, 8), (64, 64, 4))],
        128: [*ahead((128, 64, 8), (128, 32, 8)), *ahead((64, 64, 4), (32, 32, 4))],
        256: [*ahead((128, 32, 8)), Config(32, 32, 8, 1), Config(32, 16, 4, 1)],
        1024: [Config(16, 16, 8, 1)],
    },
    "consumer": {
        64: [*ahead((64, 32, 4), (32, 32, 4))],
        128: [*ahead((32, 32, 4)), Config(32, 32, 4, 1)],
        256: [Config(32, 32, 4, 1), Config(16, 16, 4, 1)],
        1024: [Config(16, 16, 4, 1)],
    },
    "amd": {
        64: [Config(128, 64, 4, 1), Config(128, 32, 4, 1), Config(64, 64, 4, 1), Config(32, 32, 4, 1)],
        128: [Config(128, 32, 4, 1), Config(64, 32, 4, 1), Config(32, 32, 4, 1)],
        256: [Config(128, 16, 4, 1), Config(64, 16, 4, 1)],
        1024: [Config(16, 16, 4, 1)],
    },
}
DQ["blackwell"] = {
    **DQ["hopper"],
    256: [Config(128, 32, 8, 2), *ahead((64, 32, 8)), *DQ["hopper"][256][2:]],
}

# For d(key) and d(value): a tile of keys walks tiles of queries.
DKDV: Table = {
    **DQ,
    "exact": {
        64: [Config(16, 64, 8, 2), Config(32, 32, 8, 2), Config(64, 32, 4, 2), Config(32, 64, 4, 1)],
        128: [Config(32, 32, 8, 2), Config(16, 32, 8, 2), Config(16, 64, 8, 2), Config(32, 64, 8, 1)],
        256: [Config(16, 32, 8, 2), Config(32, 16, 8, 2), Config(16, 16, 4, 2), Config(16, 16, 8, 2)],
        1024: [Config(16, 16, 8, 2)],
    },
    "ampere": {
        **DQ["ampere"],
        64: [*ahead((64, 128, 8)), *ahead((64, 64, 4), (32, 64, 4))],
        128: [
            *ahead((32, 64, 4)),
            *ahead((64, 64, 8), (32, 32, 4)),
            *ahead((64, 64, 4)),
            Config(32, 128, 8, 2),
        ],
        256: [Config(32, 64, 8, 1), Config(32, 32, 8, 1), Config(32, 16, 4, 1)],
    },
    "hopper": {
        **DQ["hopper"],
        64: [*ahead((64, 128, 8), (32, 128, 8)), *ahead((64, 64, 4))],
        128: [*ahead((64, 128, 8), (32, 128, 8)), *ahead((32, 32, 4))],
        256: [Config(32, 32, 8, 1), Config(32, 16, 4, 1)],
    },
    "consumer": {**DQ["consumer"], 64: [*ahead((32, 64, 4), (32, 32, 4))]},
    "amd": {
        128: [Config(32, 128, 4, 1), Config(16, 128, 4, 1), Config(16, 64, 4, 1), Config(32, 32, 4, 1)],
        1024: [Config(16, 16, 4, 1)],
    },
}
# With a map both sums leave tensor memory after every run: 64 keys where 128 have no registers for that.
DKDV["blackwell"] = {
    **DKDV["hopper"],
    128: [*DKDV["hopper"][128][:2], Config(64, 64, 8, 3), *DKDV["hopper"][128][2:]],
}

# d(key) and d(value) in a kernel each, for wide heads.
DK: Table = {
    **DKDV,
    "ampere": {
        **DKDV["ampere"],
        256: [Config(32, 64, 4, 3), Config(64, 64, 8, 1), *DKDV["ampere"][256]],
    },
    "hopper": {**DKDV["hopper"], 256: [*ahead((32, 128, 8)), Config(64, 64, 8, 1), *DKDV["hopper"][256]]},
}
DK["amd"] = {**DKDV["amd"], 256: [Config(16, 128, 4, 1), Config(16, 64, 4, 1)]}
DK["blackwell"] = DK["hopper"]
DV: Table = {
    **DKDV,
    "ampere": {
        **DKDV["ampere"],
        256: [Config(32, 64, 4, 3), Config(64, 64, 8, 1), Config(64, 128, 8, 1), *DKDV["ampere"][256]],
    },
    "hopper": {
        **DKDV["hopper"],
        256: [
            Config(32, 128, 8, 3),
            Config(64, 128, 8, 2),
            Config(32, 128, 8, 2),
            *DKDV["hopper"][256],
        ],
    },
}
DV["consumer"] = {**DKDV["consumer"], 256: [Config(32, 64, 4, 1), Config(16, 16, 4, 1)]}
DV["amd"] = {**DKDV["amd"], 256: [Config(32, 128, 4, 1), Config(16, 64, 4, 1)]}
DV["blackwell"] = DV["hopper"]

# A tile holds all queries of a call: their number sets block_m. More queries take more warps.
DECODE: Table = {
    "exact": {
        64: [Config(16, 64, 4, 2), Config(16, 32, 4, 2), Config(16, 64, 8, 2), Config(16, 32, 8, 2)],
        128: [Config(16, 32, 4, 2), Config(16, 32, 8, 2)],
        256: [Config(16, 16, 4, 2), Config(16, 16, 8, 2)],
        1024: [Config(16, 16, 8, 1)],
    },
    "interpreter": {1024: [Config(16, 32, 4, 1)]},
    "ampere": {
        128: [Config(16, 64, 4, 3), Config(16, 64, 4, 2), Config(16, 64, 8, 3), Config(16, 64, 8, 2)],
        256: [*ahead((16, 32, 4)), Config(16, 32, 4, 1), *ahead((16, 32, 8)), Config(16, 32, 8, 1)],
        1024: [Config(16, 16, 4, 1), Config(16, 16, 8, 1)],
    },
    "hopper": {
        128: [Config(16, 64, 4, 4), Config(16, 64, 4, 3), Config(16, 64, 8, 3)],
        256: [*ahead((16, 64, 4), (16, 32, 4)), *ahead((16, 64, 8), (16, 32, 8))],
        1024: [Config(16, 16, 4, 1), Config(16, 16, 8, 1)],
    },
    "amd": {
        128: [Config(16, 64, 4, 1)],
        256: [Config(16, 32, 4, 1), Config(16, 16, 4, 1)],
        1024: [Config(16, 16, 4, 1)],
    },
}
DECODE["blackwell"] = DECODE["hopper"]
DECODE["consumer"] = {
    128: [Config(16, 32, 4, 3), Config(16, 32, 4, 2), Config(16, 32, 8, 2)],
    256: [Config(16, 32, 4, 1), Config(16, 16, 4, 1)],
    1024: [Config(16, 16, 4, 1), Config(16, 16, 8, 1)],
}

TABLES: dict[str, tuple[Table, Cost]] = {
    "forward": (FORWARD, forward_cost),
    "decode": (DECODE, decode_cost),
    "backward_dq": (DQ, dq_cost),
    "backward_magnitudes": (DQ, dq_cost),
    "backward_dkdv": (DKDV, dkdv_cost),
    "backward_dk": (DK, dk_cost),
    "backward_dv": (DV, dv_cost),
}
