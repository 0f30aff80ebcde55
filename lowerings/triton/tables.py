"""Tile sizes and launch parameters by kind of kernel, card family and largest head dim, best first."""

from __future__ import annotations

from .configs import (
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

# Queries x keys / warps / stages / axes. With three stages two tiles of a tensor are copied while one is computed, with
# two stages none: these are for calls that leave less memory or fewer registers. Hopper's first ones were measured on
# H200: two instances of 4 warps on a multiprocessor beat one of 8, since one multiplies while the other exponentiates.
_TEXT = """
forward
    interpreter 1024: 32x32/4/1 16x32/4/1 32x16/4/1 16x16/4/1
    exact 64: 64x32/8/2 32x32/4/2 64x64/8/2 32x64/4/2
    exact 128: 32x64/8/2 64x16/8/2 32x16/8/2 64x32/8/2
    exact 256: 32x32/8/1 32x16/8/2 64x16/8/1 16x16/4/1
    exact 1024: 16x16/8/1
    ampere 64: 128x128/8/3 128x128/8/2 128x64/4/3 128x64/8/3 64x64/4/3
    ampere 128: 128x64/8/3 128x32/8/3 128x64/8/2 128x32/8/2 128x128/8/3 64x64/4/3 128x128/8/2 64x64/4/2
    ampere 256: 32x64/4/3 64x128/8/1 64x64/8/1 64x32/4/3 64x32/4/2 32x32/4/3 32x32/4/2
    ampere/hopper/blackwell 1024: 32x16/8/1
    hopper 64: 64x128/4/2/descriptors 64x64/4/3 128x64/4/3 128x128/8/3 128x64/8/3 128x128/8/2 128x64/8/2
    hopper 128: 64x64/4/3/descriptors 64x64/4/3 128x128/8/3 128x64/8/3 128x128/8/2 128x64/8/2
    hopper 256: 128x32/8/3 128x64/8/2 128x32/8/2 64x64/4/3 64x64/8/2 64x32/8/3 64x32/8/2
    blackwell 64: 128x64/8/3 128x64/8/2 128x128/8/3 64x64/4/3
    blackwell 128: 128x64/8/3 128x64/8/2 128x32/8/3 128x128/8/3 128x128/8/2 64x64/4/3
    blackwell 256: 128x32/8/3 64x64/8/2 64x32/8/3 64x32/8/2
    consumer 64: 64x64/4/3 128x32/4/3 64x32/4/3
    consumer 128: 64x32/4/3 64x64/4/2 32x32/4/3 32x32/4/2
    consumer 256: 64x32/8/1 32x32/4/1
    consumer/amd 1024: 16x16/4/1
    amd 64: 128x64/4/1 64x64/4/1
    amd 128: 128x64/4/1 64x64/4/1
    amd 256: 64x32/4/1 32x32/4/1

# A tile holds all queries of a call: their number sets its rows. More of them take more warps.
decode
    interpreter 1024: 16x32/4/1
    exact 64: 16x64/4/2 16x32/4/2 16x64/8/2 16x32/8/2
    exact 128: 16x32/4/2 16x32/8/2
    exact 256: 16x16/4/2 16x16/8/2
    exact 1024: 16x16/8/1
    ampere 128: 16x64/4/3 16x64/4/2 16x64/8/3 16x64/8/2
    ampere 256: 16x32/4/3 16x32/4/2 16x32/4/1 16x32/8/3 16x32/8/2 16x32/8/1
    ampere/hopper/blackwell/consumer 1024: 16x16/4/1 16x16/8/1
    hopper/blackwell 128: 16x64/4/4 16x64/4/3 16x64/8/3
    hopper/blackwell 256: 16x64/4/3 16x32/4/3 16x64/4/2 16x32/4/2 16x64/8/3 16x32/8/3 16x64/8/2 16x32/8/2
    consumer 128: 16x32/4/3 16x32/4/2 16x32/8/2
    consumer/amd 256: 16x32/4/1 16x16/4/1
    amd 128: 16x64/4/1
    amd 1024: 16x16/4/1

backward_dq, backward_magnitudes
    interpreter 1024: 32x32/4/1 16x32/4/1 32x16/4/1 16x16/4/1
    exact 64: 64x32/8/2 32x64/8/2 32x32/8/2 32x32/4/2
    exact 128: 32x32/8/2 64x16/8/2 16x32/8/2 64x32/8/2
    exact 256: 32x16/8/2 16x16/4/2 16x32/8/2 32x32/8/2
    exact 1024: 16x16/8/2
    ampere 64: 128x64/8/3 128x32/8/3 128x64/8/2 128x32/8/2 64x32/4/3 64x32/4/2
    ampere 128: 128x32/8/3 64x32/4/3 128x32/8/2 64x32/4/2 32x32/4/3 32x32/4/2 128x64/8/3 64x64/4/3 128x64/8/2 64x64/4/2
    ampere 256: 64x32/4/3 64x64/8/1 32x32/8/1 32x16/4/1
    ampere/hopper/blackwell 1024: 16x16/8/1
    hopper 64: 64x64/4/3 128x64/8/3 128x32/8/3 128x64/8/2 128x32/8/2 128x128/8/3 64x64/4/2
    blackwell 64: 128x64/8/3 128x32/8/3 128x64/8/2 128x32/8/2 128x128/8/3 64x64/4/3 128x128/8/2 64x64/4/2
    hopper/blackwell 128: 128x64/8/3 128x32/8/3 128x64/8/2 128x32/8/2 64x64/4/3 32x32/4/3 64x64/4/2 32x32/4/2
    hopper 256: 128x32/8/3 128x32/8/2 32x32/8/1 32x16/4/1
    blackwell 256: 128x32/8/2 64x32/8/3 64x32/8/2 32x32/8/1 32x16/4/1
    consumer 64: 64x32/4/3 32x32/4/3 64x32/4/2 32x32/4/2
    consumer 128: 32x32/4/3 32x32/4/2 32x32/4/1
    consumer 256: 32x32/4/1 16x16/4/1
    consumer/amd 1024: 16x16/4/1
    amd 64: 128x64/4/1 128x32/4/1 64x64/4/1 32x32/4/1
    amd 128: 128x32/4/1 64x32/4/1 32x32/4/1
    amd 256: 128x16/4/1 64x16/4/1

backward_dkdv
    interpreter 1024: 32x32/4/1 16x32/4/1 32x16/4/1 16x16/4/1
    exact 64: 16x64/8/2 32x32/8/2 64x32/4/2 32x64/4/1
    exact 128: 16x32/8/2 32x32/8/2 16x64/8/2 32x64/8/1
    exact 256: 16x32/8/2 32x16/8/2 16x16/4/2 16x16/8/2
    exact 1024: 16x16/8/2
    ampere 64: 64x128/8/3 64x128/8/2 64x64/4/3 32x64/4/3 64x64/4/2 32x64/4/2
    ampere 128: 32x64/4/3 32x64/4/2 64x64/8/3 32x32/4/3 64x64/8/2 32x32/4/2 64x64/4/3 64x64/4/2 32x128/8/2
    ampere 256: 32x64/8/1 32x32/8/1 32x16/4/1
    ampere/hopper/blackwell 1024: 16x16/8/1
    hopper 64: 64x64/4/3 64x64/4/2 64x128/8/3 32x128/8/3 64x128/8/2 32x128/8/2
    blackwell 64: 64x128/8/3 32x128/8/3 64x128/8/2 32x128/8/2 64x64/4/3 64x64/4/2
    hopper 128: 64x64/4/2 64x128/8/3 32x128/8/3 64x128/8/2 32x128/8/2 32x32/4/3 32x32/4/2
    hopper/blackwell 256: 32x32/8/1 32x16/4/1
    # With a map both sums leave tensor memory after every run: 64 keys where 128 have no registers for that.
    blackwell 128: 64x128/8/3 32x128/8/3 64x64/8/3 64x128/8/2 32x128/8/2 32x32/4/3 32x32/4/2
    consumer 64: 32x64/4/3 32x32/4/3 32x64/4/2 32x32/4/2
    consumer 128: 32x32/4/3 32x32/4/2 32x32/4/1
    consumer 256: 32x32/4/1 16x16/4/1
    consumer/amd 1024: 16x16/4/1
    amd 128: 32x128/4/1 16x128/4/1 16x64/4/1 32x32/4/1

# In a kernel each for wide heads.
backward_dk like backward_dkdv
    ampere 256: 32x64/4/3 64x64/8/1 32x64/8/1 32x32/8/1 32x16/4/1
    hopper/blackwell 256: 32x128/8/3 32x128/8/2 64x64/8/1 32x32/8/1 32x16/4/1
    blackwell 128: 64x128/8/3 32x128/8/3 64x128/8/2 32x128/8/2 32x32/4/3 32x32/4/2
    amd 256: 16x128/4/1 16x64/4/1

backward_dv like backward_dk
    ampere 256: 32x64/4/3 64x64/8/1 64x128/8/1 32x64/8/1 32x32/8/1 32x16/4/1
    hopper/blackwell 256: 32x128/8/3 64x128/8/2 32x128/8/2 32x32/8/1 32x16/4/1
    consumer 256: 32x64/4/1 16x16/4/1
    amd 256: 32x128/4/1 16x64/4/1
"""


def _read(text: str) -> dict[str, Table]:
    tables: dict[str, Table] = {}
    for kernel in text.strip().split("\n\n"):
        header, *rows = (line.strip() for line in kernel.splitlines() if "#" not in line)
        kinds, _, like = header.partition(" like ")
        table = {family: {**widths} for family, widths in tables.get(like, {}).items()}
        for row in rows:
            where, tiles = row.split(": ")
            families, width = where.split()
            for family in families.split("/"):
                table.setdefault(family, {})[int(width)] = [*map(_config, tiles.split())]
        tables |= dict.fromkeys(kinds.split(", "), table)
    return tables


def _config(text: str) -> Config:
    tile, warps, stages, *axes = text.split("/")
    m, n = map(int, tile.split("x"))
    return Config(m, n, int(warps), int(stages), **dict.fromkeys(axes, 1))


_COSTS: dict[str, Cost] = {
    "forward": forward_cost,
    "decode": decode_cost,
    "backward_dq": dq_cost,
    "backward_magnitudes": dq_cost,
    "backward_dkdv": dkdv_cost,
    "backward_dk": dk_cost,
    "backward_dv": dv_cost,
}

TABLES: dict[str, tuple[Table, Cost]] = {kind: (table, _COSTS[kind]) for kind, table in _read(_TEXT).items()}
