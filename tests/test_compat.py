"""What differs between versions of torch."""

import pytest
import torch

from flex_inductor.lowerings.triton.kernel_builder import dot_precision

matmul = torch.backends.cuda.matmul


@pytest.mark.parametrize(
    "setting, value, expected",
    [
        ("fp32_precision", "tf32", "tf32"),
        ("fp32_precision", "ieee", "ieee"),
        ("allow_tf32", True, "tf32"),
        ("allow_tf32", False, "ieee"),
        ("set_float32_matmul_precision", "highest", "ieee"),
        ("set_float32_matmul_precision", "high", "tf32"),
        ("set_float32_matmul_precision", "medium", "tf32"),
    ],
)
def test_tf32_is_found_however_it_was_set(setting, value, expected):
    before = matmul.fp32_precision
    try:
        if hasattr(torch, setting):
            getattr(torch, setting)(value)
        else:
            setattr(matmul, setting, value)
        assert (dot_precision(torch.float32), dot_precision(torch.bfloat16)) == (expected, "tf32")
    finally:
        matmul.fp32_precision = "ieee"
        torch.set_float32_matmul_precision("highest")
        matmul.fp32_precision = before
