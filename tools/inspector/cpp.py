"""What will build a C++ kernel."""

from __future__ import annotations

import functools
import subprocess


@functools.cache
def built_with() -> str:
    """The compiler that Inductor uses here, and its vectors."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    compiler = get_cpp_compiler()
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout.splitlines()
    isa = pick_vec_isa()
    vectors = f"{isa} vectors of {isa.bit_width()} bits" if isa else "no vectors"
    return f"{version[0] if version else compiler}, {vectors}"
