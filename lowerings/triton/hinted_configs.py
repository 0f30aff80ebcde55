"""Torch's kernel hints, as changes to a config."""

from __future__ import annotations

from typing import Any

from flex_inductor.options import NUM_SPLITS

from ..hints import says_something
from .configs import Config

# Field of Config -> the hint's name, without torch's prefixes fwd_ and bwd_. In torch's backward, tiles
# numbered 1 belong to the pass for keys and values, those numbered 2 to the one for queries.
_TILES = {
    "forward": {"block_m": "BLOCK_M", "block_n": "BLOCK_N"},
    "decode": {"block_n": "BLOCK_N"},
    "backward_dq": {"block_m": "BLOCK_M2", "block_n": "BLOCK_N2"},
    "backward_magnitudes": {"block_m": "BLOCK_M2", "block_n": "BLOCK_N2"},
    "backward_dkdv": {"block_m": "BLOCK_M1", "block_n": "BLOCK_N1"},
    "backward_dk": {"block_m": "BLOCK_M1", "block_n": "BLOCK_N1"},
    "backward_dv": {"block_m": "BLOCK_M1", "block_n": "BLOCK_N1"},
    "backward_onepass": {"block_m": "BLOCK_M1", "block_n": "BLOCK_N1"},
}
_LAUNCH = {"warps": "num_warps", "stages": "num_stages"}


def hinted(config: Config, kind: str, hints: dict[str, Any]) -> Config:
    """`config` with what the hints ask of this kind of kernel; a prefixed hint outranks a plain one."""
    prefix = "bwd_" if kind.startswith("backward") else "fwd_"
    for field, name in (_TILES[kind] | _LAUNCH).items():
        value = hints.get(prefix + name, hints.get(name))
        if value is not None:
            config = config._replace(**{field: int(value)})
    return config


def without_effect(hints: dict[str, Any]) -> list[str]:
    """The hints that mean something to torch's kernels and nothing to these."""
    known = {NUM_SPLITS, *(name for names in (*_TILES.values(), _LAUNCH) for name in names.values())}
    return sorted(
        name
        for name, value in hints.items()
        if name.removeprefix("fwd_").removeprefix("bwd_") not in known and says_something(name, value)
    )
