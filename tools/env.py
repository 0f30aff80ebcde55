"""flex-inductor env: what this machine has, and which routes can serve attention on it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Fact(NamedTuple):
    """One line of the page; `ok` is None where there is nothing to pass or fail."""

    name: str
    text: str
    ok: bool | None = None


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("env", help="show versions, devices, compilers and usable routes")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a page")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    sections = collect()
    if args.json:
        print(json.dumps({title: [fact._asdict() for fact in facts] for title, facts in sections.items()}))
    else:
        show(sections)
    return 0


def collect() -> dict[str, list[Fact]]:
    return {
        "versions": list(versions()),
        "cpu": list(cpu()),
        "devices": list(devices()),
        "compilers": [cpp_compiler(), python_headers(), triton_driver()],
        "routes": list(routes()),
    }


def show(sections: dict[str, list[Fact]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    mark = {True: Text("yes", "green"), False: Text("no", "red"), None: Text("")}
    table = Table.grid("", "", "", padding=(0, 2, 0, 0))
    for title, facts in sections.items():
        table.add_row(Text(title, "bold"))
        for fact in facts:
            table.add_row(Text(f"  {fact.name}"), mark[fact.ok], Text(fact.text, overflow="fold"))
    Console().print(table)


def versions() -> Iterator[Fact]:
    from flex_inductor import __version__
    from flex_inductor.lowerings.toolchain import version_of

    yield Fact("flex_inductor", __version__)
    for name in ("torch", "triton"):
        found = version_of(name)
        yield Fact(name, found or "not installed", ok=None if found else False)
    yield Fact("python", f"{platform.python_version()} on {platform.platform()}")


def packages() -> dict[str, str]:
    return {fact.name: fact.text for fact in versions() if fact.name != "python"}


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def cpu() -> Iterator[Fact]:
    import torch

    yield Fact("model", cpu_name())
    yield Fact("cores", f"{os.cpu_count()} logical; torch uses {torch.get_num_threads()} threads")
    yield Fact("vectors", torch.backends.cpu.get_cpu_capability())


def devices() -> Iterator[Fact]:
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None:
        for index in range(torch.accelerator.device_count()):
            yield Fact(f"{device.type}:{index}", describe_device(device.type, index), ok=True)
        return
    built_for = torch.accelerator.current_accelerator(check_available=False)
    if built_for is None:
        why = "this build of torch is for the CPU only (no CUDA, no ROCm)"
    else:
        why = f"torch is built for {built_for.type}, but sees no such device"
        try:
            torch.get_device_module(built_for).init()
        except (RuntimeError, AssertionError, AttributeError) as error:
            why = f"torch is built for {built_for.type}, but: {str(error).splitlines()[0]}"
    yield Fact("accelerator", why, ok=False)


def describe_device(kind: str, index: int) -> str:
    import torch

    if kind != "cuda":
        return "available"
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        platform_name = f"ROCm {torch.version.hip}, {properties.gcnArchName}"
    else:
        platform_name = f"CUDA {torch.version.cuda}, sm_{properties.major}{properties.minor}"
    return f"{properties.name}, {platform_name}, {properties.total_memory / 2**30:.0f} GiB"


def cpp_compiler() -> Fact:
    """Build a one-line extension with the compiler and the flags that Inductor uses for its kernels."""
    from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions, get_cpp_compiler

    try:
        compiler = get_cpp_compiler()
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.cpp")
            source.write_text("#include <vector>\nint probe() { return std::vector<int>(1).size(); }\n")
            CppBuilder("probe", str(source), CppTorchOptions(), folder).build()
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        # Inductor's error is the whole command line, then what the compiler said.
        return Fact("C++ compiler", str(error).rpartition("Output:\n")[2].strip(), ok=False)
    return Fact("C++ compiler", f"{compiler} works: {compiler_version(compiler)}", ok=True)


def compiler_version(compiler: str) -> str:
    """The first line of what it says of itself, or its name."""
    text = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    return (text.splitlines() or [compiler])[0]


def python_headers() -> Fact:
    header = Path(sysconfig.get_path("include"), "Python.h")
    if header.exists():
        return Fact("Python headers", str(header), ok=True)
    return Fact("Python headers", f"{header} is missing: install Python's development package", ok=False)


def triton_driver() -> Fact:
    try:
        from triton.runtime import driver
    except ImportError as error:
        return Fact("triton", str(error), ok=False)
    try:
        target = driver.active.get_current_target()
    except RuntimeError as error:
        return Fact("triton", f"imports, but has no driver: {error}", ok=False)
    return Fact("triton", f"generates code for {target.backend} {target.arch}", ok=True)


def routes() -> Iterator[Fact]:
    from flex_inductor.lowerings.registry import ROUTES

    for route in ROUTES:
        usable, reason = route.available()
        yield Fact(route.name, reason, ok=usable)
