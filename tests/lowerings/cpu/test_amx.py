"""The CPU kernels for AMX. A machine without it runs the instructions in software (amx.c): they raise SIGILL there."""

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def missing():
    """What the kernels or the stand-in need beside AMX and this machine does not have."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return "not an x86-64 machine with Linux"
    if not (torch.cpu._is_avx512_bf16_supported() and torch.cpu._is_vnni_supported()):
        return "no AVX-512 for bf16, which AMX never comes without"
    if shutil.which("gcc") is None:
        return "gcc not installed"
    known = ["gcc", "-mamx-tile", "-mamx-bf16", "-fsyntax-only", "-x", "c", "/dev/null"]
    return "a gcc that does not know AMX" if subprocess.run(known, capture_output=True).returncode else None


@pytest.mark.skipif(missing() is not None, reason=f"{missing()}")
def test_products_of_tiles():
    file = HERE / "emulated_amx.py"
    alone = ["-p", "no:cacheprovider", "-p", "no:xdist"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *alone, file],
        cwd=HERE.parents[2],
        # The second spares probes that compile torch's headers.
        env={**os.environ, "ATEN_CPU_CAPABILITY": "avx512", "TORCHINDUCTOR_VEC_ISA_OK": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert re.search(r"\b13 passed\b", result.stdout) and "skipped" not in result.stdout, result.stdout
