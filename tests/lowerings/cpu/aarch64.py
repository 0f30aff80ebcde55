"""A stand-in for an aarch64 machine: Inductor writes its code for one, a cross compiler builds it, qemu runs it."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import torch
from torch._inductor import config, cpu_vec_isa
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.cpp_builder import CppTorchOptions

COMPILER, EMULATOR, LIBRARIES = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
# Where arm64's libsleef-dev is unpacked, if anywhere. Without it torch's vector functions fall back to libm.
SLEEF = Path(os.environ.get("AARCH64_SLEEF", "/usr"))

MAIN = """
#include <cstdio>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

// The arguments: a file with the tensors, then an offset into it for each tensor and the others as they are.
int main(int, char** text) {{
  const int file = open(text[1], O_RDWR);
  struct stat status;
  fstat(file, &status);
  char* memory = (char*)mmap(nullptr, status.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  try {{
    kernel({arguments});
  }} catch (const std::exception& error) {{
    return std::fputs(error.what(), stderr), 1;
  }}
}}
"""


def missing() -> str | None:
    """What the stand-in needs and the machine does not have."""
    absent = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]
    return f"{' and '.join(absent)} not installed" if absent else None


def build(isa: cpu_vec_isa.VecISA, types: Sequence[str], source: str, folder: Path) -> Path:
    """The kernel as a program in a folder of its own."""
    options = CppTorchOptions(vec_isa=isa, compiler=COMPILER, warning_all=False)
    sleef = (SLEEF / "include/aarch64-linux-gnu/sleef.h").exists()
    defines = [name.strip() for name in options.get_definitions()]
    flags = [f"-D{name}" for name in defines if sleef or "SLEEF" not in name]
    flags += [f"-{flag}" for flag in options.get_cflags() if flag not in ("march=native", "shared", "g1")]
    flags += " ".join(options.get_passthrough_args()).split()
    if sleef:
        flags += [f"-I{SLEEF / 'include/aarch64-linux-gnu'}", f"-L{SLEEF / 'lib/aarch64-linux-gnu'}"]
        flags += [f"-Wl,-rpath,{SLEEF / 'lib/aarch64-linux-gnu'}"]
    flags += [f"-I{folder}" for folder in options.get_include_dirs()]
    arguments = [
        f"({name})(memory + atoll(text[{i}]))" if name.endswith("*") else f"({name})atoll(text[{i}])"
        for i, name in enumerate(types, 2)
    ]
    folder = Path(tempfile.mkdtemp(dir=folder))
    file, program = folder / "kernel.cpp", folder / "kernel"
    file.write_text(source + MAIN.format(arguments=", ".join(arguments)))
    command = [COMPILER, *flags, str(file), "-o", str(program), *(["-lsleef"] if sleef else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:20000]
    return program


def call(cpu: str, program: Path, *arguments: torch.Tensor | int) -> None:
    """Run the program on these tensors and numbers; what it writes is in the tensors afterwards."""
    texts, tensors, size = [], [], 0
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            texts.append(str(size))
            tensors.append((size, bytes_of(argument)))
            size = -(-(size + tensors[-1][1].numel()) // 64) * 64
        else:
            assert isinstance(argument, int)
            texts.append(str(argument))
    with tempfile.NamedTemporaryFile(dir=program.parent) as file:
        memory = torch.from_file(file.name, shared=True, size=max(size, 1), dtype=torch.uint8)
        for start, tensor in tensors:
            memory[start : start + tensor.numel()] = tensor
        command = [EMULATOR, "-cpu", cpu, "-L", LIBRARIES, str(program), file.name, *texts]
        # Emulated threads that wait for each other by spinning take all the time there is.
        environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise RuntimeError(done.stderr or f"{EMULATOR} ended with {done.returncode}")
        for start, tensor in tensors:
            tensor.copy_(memory[start : start + tensor.numel()])


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory from a tensor's first element to its last, as bytes."""
    elements = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    elements = elements if tensor.numel() else 0
    return tensor.detach().as_strided((elements,), (1,)).view(torch.uint8)


@contextlib.contextmanager
def machine(isa: cpu_vec_isa.VecISA, cpu: str, folder: Path) -> Iterator[None]:
    """While this lasts, what Inductor compiles for CPUs is for such a machine and runs there: `cpu` as qemu names it."""

    def cpp_pybinding(_: AsyncCompile, types: Sequence[str], source: str) -> Callable[..., None]:
        return functools.partial(call, cpu, build(isa, types, source, folder))

    torch._dynamo.reset()
    with (
        mock.patch.object(AsyncCompile, "cpp_pybinding", cpp_pybinding),
        mock.patch.object(cpu_vec_isa, "valid_vec_isa_list", lambda: [isa]),
        config.patch({"cpp.vec_isa_ok": True, "force_disable_caches": True}),
    ):
        yield
    torch._dynamo.reset()
