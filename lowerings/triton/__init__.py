"""Triton kernels for GPUs: forward and backward."""
