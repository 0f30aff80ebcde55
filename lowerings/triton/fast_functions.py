"""Functions of fp32 in few instructions, exact enough for 16-bit inputs.

Results are those of an argument moved by two units in its last place, or have a relative error of at most 2**-16; that
of tanh is off by 2e-7. The call's inputs are rounded to 2**-9 or 2**-12 of themselves. Infinities, NaN and both ends of
the range are as in the library, but subnormal numbers count as zero.
"""

from __future__ import annotations

import math

_LOG2_E = math.log2(math.e)
_LN_2 = math.log(2)
# Nearer to 0 a few terms of a series are more exact than the hardware's function minus 1, or at 1 plus the argument.
_NEAR = 2.0**-6

OF_MULTIPLES = ("exp", "exp2", "sigmoid", "tanh")  # a factor in the argument costs no instruction
OTHERS = ("expm1", "log", "log10", "log1p", "log2", "sqrt")


class Rough:
    """Each function, and a power, of a variable's name as text."""

    def __init__(self, nvidia: bool):
        # Triton's log2 has 23 instructions there. `reciprocal` is in tiles.jinja.
        self._log2 = "libdevice.fast_log2f" if nvidia else "tl.log2"
        self._reciprocal = "reciprocal(" if nvidia else "libdevice.fast_dividef(1.0, "

    def exp(self, x: str, factor: float = 1.0) -> str:
        return self.exp2(x, _LOG2_E * factor)

    def exp2(self, x: str, factor: float = 1.0) -> str:
        return f"tl.exp2({x} * {factor!r})"

    def expm1(self, x: str) -> str:
        series = f"{x} * (1.0 + {x} * (0.5 + {x} * {1 / 6!r}))"
        return f"tl.where(tl.abs({x}) < {_NEAR!r}, {series}, {self.exp(x)} - 1.0)"

    def log(self, x: str) -> str:
        return f"{self.log2(x)} * {_LN_2!r}"

    def log10(self, x: str) -> str:
        return f"{self.log2(x)} * {math.log10(2)!r}"

    def log1p(self, x: str) -> str:
        series = f"{x} * (1.0 - {x} * (0.5 - {x} * {1 / 3!r}))"
        return f"tl.where(tl.abs({x}) < {_NEAR!r}, {series}, {self.log(f'{x} + 1.0')})"

    def log2(self, x: str) -> str:
        return f"{self._log2}({x})"

    def sigmoid(self, x: str, factor: float = 1.0) -> str:
        return f"{self._reciprocal}{self.exp(x, -factor)} + 1.0)"

    def sqrt(self, x: str) -> str:
        return f"tl.sqrt({x})"

    def tanh(self, x: str, factor: float = 1.0) -> str:
        return f"1.0 - 2.0 * {self._reciprocal}{self.exp(x, 2 * factor)} + 1.0)"

    def power(self, x: str, exponent: float) -> str:
        """For an exponent that is not whole, so that negative numbers and -inf give NaN."""
        return f"tl.exp2({self.log2(x)} * {exponent!r})"
