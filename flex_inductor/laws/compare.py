"""Whether something moved, and where most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

ROUNDINGS = {4: 64, 8: 64}  # of sums in fp32 and fp64, in units of the largest number
FEW = 4  # of a result in 16 bits: it is summed in fp32 and rounded once
OUT, KEYS = ("batch", "head", "row", "column"), ("batch", "head", "key", "column")
TOKENS = ("row", "token", "entry")


class Moved(NamedTuple):
    """The element that is furthest from where it should be."""

    at: tuple[int, ...]
    got: float
    want: float
    allowed: float
    elements: int  # that are too far
    axes: Sequence[str] = ()  # what the indices count, where that is known

    def __str__(self) -> str:
        named = zip(self.axes, self.at, strict=False)
        place = ", ".join(f"{name} {i}" for name, i in named) if self.axes else str(list(self.at))
        others = f", and {self.elements - 1:,} others" if self.elements > 1 else ""
        numbers = f"{self.got:.6g} came, {self.want:.6g} was expected, {self.allowed:.2g} apart at most"
        return f"at {place}: {numbers}{others}"


def upstream(out: Tensor) -> Tensor:
    """A gradient of `out`, the same each time."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)


def rounding(want: Tensor) -> float:
    """How far from `want` rounding alone may lead."""
    finite = want[want.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    times = ROUNDINGS.get(want.element_size(), FEW)
    return times * torch.finfo(want.dtype).eps * largest


def moved(
    got: Tensor,
    want: Tensor,
    where: Tensor | None = None,
    allowed: float | None = None,
    axes: Sequence[str] = (),
) -> Moved | None:
    """Of the elements that `where`, which broadcasts, names: the one that is furthest from `want`, if it is too far."""
    got, want = got.detach(), want.detach()
    allowed = rounding(want) if allowed is None else allowed
    wide, expected = got.double(), want.double()
    right = (wide == expected) | (wide.isnan() & expected.isnan()) | ((wide - expected).abs() <= allowed)
    wrong = ~right if where is None else ~right & where.expand(right.shape)
    if not wrong.any():
        return None
    off = (wide - expected).abs().nan_to_num(torch.inf, torch.inf)
    worst = int(torch.where(wrong, off, -1.0).argmax())
    at = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), off.shape))
    return Moved(at, float(wide[at]), float(expected[at]), allowed, int(wrong.sum()), axes)


def is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def floats(tree: Any) -> list[Tensor]:
    """The tensors of numbers in what a function takes or returns."""
    return [leaf for leaf in tree_iter(tree) if is_float(leaf)]


def noise_like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Other numbers of about the same size, for what may hold anything."""
    finite = tensor.detach().double()
    spread = float(finite.std()) if finite.numel() > 1 else 1.0
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    return (noise * 2 * (spread or 1.0)).to(tensor.dtype)


def spread(count: int, most: int) -> list[int]:
    """At most `most` of `count`, with the first and the last."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def numbered(numbers: Sequence[int]) -> str:
    """1, 2, 3, 7 as "1 to 3, 7"."""
    return ", ".join(
        str(first) if first == last else f"{first} to {last}" for first, last in _runs(sorted(numbers))
    )


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    first = last = None
    for number in numbers:
        if last is None or number != last + 1:
            if first is not None and last is not None:
                yield first, last
            first = number
        last = number
    if first is not None and last is not None:
        yield first, last
