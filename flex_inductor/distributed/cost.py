"""A model of what attention over several ranks takes: no measurement."""

from __future__ import annotations

from dataclasses import dataclass

FP32 = 4


@dataclass(frozen=True)
class CostModel:
    """The sizes of a model's attention, and the rates of a rank. Rates are assumed to be reached."""

    heads: int = 128
    kv_heads: int = 8
    head_dim: int = 128
    value_dim: int | None = None  # head_dim by default
    batch: int = 1
    itemsize: int = 2  # of keys and values; their gradients are fp32
    flops: float = 550e12  # a second
    bandwidth: float = 45e9  # bytes a second, in each direction
    memory: float | None = (
        None  # bytes that the keys, values and their gradients of one call may take; None for any
    )

    @property
    def dims(self) -> tuple[int, int]:
        return self.head_dim, self.head_dim if self.value_dim is None else self.value_dim

    def seconds_of_tile(self, tile: int, backward: bool = False) -> float:
        """Of the scores of one tile: two products of matrices forward, five backward."""
        score, value = self.dims
        products = 3 * score + 2 * value if backward else score + value
        return 2 * products * self.heads * self.batch * tile**2 / self.flops

    def bytes_of_tile(self, tile: int) -> int:
        """The keys and values of one tile."""
        return sum(self.dims) * self.kv_heads * self.batch * tile * self.itemsize

    def gradient_bytes_of_tile(self, tile: int) -> int:
        return self.bytes_of_tile(tile) // self.itemsize * FP32


def amount(size: float) -> str:
    """Bytes in words."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1000:
            break
        size, unit = size / 1024, larger
    return f"{size:.3g} {unit}"
