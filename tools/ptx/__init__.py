"""Runs compiled GPU kernels on the CPU, with checks that a card does not make. See README.md."""

from .counts import Count, Counts
from .run import Fault, TensorMap, run, run_compiled, run_text

__all__ = ["Count", "Counts", "Fault", "TensorMap", "run", "run_compiled", "run_text"]
