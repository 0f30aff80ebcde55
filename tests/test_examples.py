"""The examples run; what they show they assert themselves."""

import runpy
from pathlib import Path

import torch

from flex_inductor import set_eager_kernels

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def test_serve(capsys):
    before = set_eager_kernels("never")  # a kernel takes longer to compile than all steps together
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several would wait for each other most of the time
    try:
        runpy.run_path(str(EXAMPLES / "serve.py"))["main"](compiled=False)
    finally:
        torch.set_num_threads(threads)
        set_eager_kernels(before)
    assert capsys.readouterr().out.startswith("5 requests, 105 tokens in 52 steps")
