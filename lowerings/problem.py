"""The facts about one attention call that routes decide on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from flex_inductor.mod_ir.arguments import score_dtype
from flex_inductor.mod_ir.split import Programs
from flex_inductor.options import CallOptions

Size: TypeAlias = Any  # int, or sympy.Expr where it is dynamic


@dataclass(frozen=True)
class AttentionProblem:
    """One call, forward or backward. Sizes are sympy expressions where they are dynamic.

    B batch  H query heads  K key/value heads  M queries  N keys  D, V head dims
    """

    direction: str  # "forward" or "backward"
    device: torch.device
    dtype: torch.dtype  # of the query
    kv_dtype: torch.dtype
    B: Size
    B_kv: Size
    H: Size
    K: Size
    M: Size
    N: Size
    D: Size
    V: Size
    aligned: bool  # whether rows of query, key, value and the output's gradient are whole units of 16 bytes
    schedule: str | None  # its form, one of FORMS; None if everything is visited
    blocks: tuple[int, int] | None  # its block sizes
    heads_alike: bool  # whether all heads visit what the first one visits
    lists_queries: bool  # whether the schedule also says which query blocks visit a KV block
    map_tiles: tuple[Size, Size] | None  # numbers of tiles of queries and of keys, with a map
    programs: Programs  # the mods, without guards
    inputs: tuple[str, ...]  # the names of the optional inputs that the call has
    score_captures: tuple[tuple[torch.dtype, tuple[Size, ...]], ...]
    mask_captures: tuple[tuple[torch.dtype, tuple[Size, ...]], ...]
    outputs: tuple[str, ...]  # forward: which of lse, max_scores, MORE; backward: which of query, key, value
    options: CallOptions

    @property
    def scattered(self) -> bool:
        """Whether a map's tiles of keys lie anywhere."""
        return "scattered" in self.inputs

    @property
    def missing(self) -> str | None:
        """What no kernel does of the call."""
        narrow = self.direction == "backward" and self.kv_dtype.itemsize == 1
        return "no gradients beside keys of 8 bits" if narrow else None

    @property
    def result_dtype(self) -> torch.dtype:
        """The dtype of the output and of the gradients of query, key and value."""
        return score_dtype(self.dtype) if "partial" in self.inputs else self.dtype

    def describe(self) -> str:
        """The call in a line."""
        heads = f"{self.H}" if self.H == self.K else f"{self.H}:{self.K}"
        dims = f"{self.D}" if self.D == self.V else f"{self.D}/{self.V}"
        keys = "" if self.kv_dtype == self.dtype else f" with keys in {dtype_name(self.kv_dtype)}"
        parts = [
            f"{self.direction} {dtype_name(self.dtype)}{keys} on {self.device.type}",
            f"B{self.B} H{heads} M{self.M} N{self.N} D{dims}",
        ]
        for name in ("score", "mask"):
            if getattr(self.programs, name) is not None:
                captures = len(getattr(self, f"{name}_captures"))
                parts.append(f"{name}_mod" + (f" ({captures} captured)" if captures else ""))
        parts += [name for name in ("sinks", "dropout") if name in self.inputs]
        if self.blocks is not None:
            form = "" if self.schedule == "lists" else f" in {self.schedule}"
            mapped = "" if self.map_tiles is None else " where a map says"
            parts.append(f"blocks {self.blocks[0]}x{self.blocks[1]}{form}{mapped}")
        return ", ".join(parts)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
