"""Kernels for CPUs, rendered through Inductor's C++ template machinery."""
