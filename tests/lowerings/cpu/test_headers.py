"""The C++ that all CPU kernels share, compiled by itself and checked in C++: headers.cpp."""

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions
from torch._inductor.cpu_vec_isa import pick_vec_isa

import flex_inductor.templates
from flex_inductor.lowerings.cpu.call import has_amx

SOURCE = Path(__file__).with_name("headers.cpp")
HEADERS = Path(flex_inductor.templates.__file__).parent / "cpu"


@pytest.mark.parametrize(
    "element, narrow, decodes",
    [
        ("float", 0, True),
        ("float", 4, True),
        ("at::BFloat16", 0, True),
        ("at::BFloat16", 5, True),
        ("at::BFloat16", 5, False),
        ("at::Half", 0, True),
    ],
)
def test_the_headers(element, narrow, decodes, tmp_path):
    """As kernels that decode include them, or as others do: decode copies narrow keys into floats, not into bf16."""
    macros = {
        "FLEX_ELEMENT": element,
        "FLEX_IS_FLOAT": int(element == "float"),
        "FLEX_IS_BF16": int(element == "at::BFloat16" and not (decodes and narrow)),
        "FLEX_HAS_AMX": int(has_amx() and not decodes),
        "FLEX_NARROW": narrow,
        "DECODES": int(decodes),
    }
    source = tmp_path / "headers.cpp"
    defines = "".join(f"#define {name} {value}\n" for name, value in macros.items())
    source.write_text(defines + SOURCE.read_text())
    options = CppTorchOptions(vec_isa=pick_vec_isa(), warning_all=False)
    builder = CppBuilder("headers", [str(source)], options, str(tmp_path))
    command = f"{builder.get_command_line()} -I{HEADERS}"
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    torch.cpu._init_amx()  # asks the system for tiles
    library = ctypes.CDLL(builder.get_target_file_path())
    library.name_of.restype, library.holds.restype = ctypes.c_char_p, ctypes.c_bool
    found = {}
    while name := library.name_of(len(found)):
        found[name.decode()] = library.holds(len(found))
    assert len(found) == 14 + 3 * decodes + bool(narrow) and found == dict.fromkeys(found, True)
