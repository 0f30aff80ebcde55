"""The Triton kernel of append_kv, compiled for cards that are not there."""

import pytest
import torch
import triton
from triton.compiler import ASTSource

from flex_inductor.sequences import append_kernel
from flex_inductor.tools.resources import gpu_target, resources

TYPES = {torch.bfloat16: "*bf16", torch.int32: "*i32"}


def paged():
    """With all that there may be."""
    cache, new, q = (
        torch.zeros(shape, dtype=torch.bfloat16) for shape in ((9, 16, 8, 128), (3, 8, 128), (3, 32, 128))
    )
    numbers, table = torch.zeros(4, dtype=torch.int32), torch.zeros(3, 4, dtype=torch.int32)
    return (
        cache,
        cache,
        new,
        new,
        q,
        *[cache[0, :, 0]] * 2,
        numbers,
        numbers,
        None,
        numbers,
        None,
        None,
        table,
        True,
        True,
    )


def rows():
    cache, new, numbers = torch.zeros(4, 60, 2, 80), torch.zeros(3, 2, 80), torch.zeros(4, dtype=torch.int32)
    cache, new = cache.bfloat16(), new.bfloat16()
    return cache, cache, new, new, None, None, None, numbers, None, *[numbers] * 4, None, False, True


@pytest.mark.parametrize("given, target", [(paged, "sm_80"), (paged, "sm_90"), (rows, "sm_90")])
def test_it_compiles_without_local_memory(given, target, monkeypatch):
    launched = []

    class Launched:
        def __getitem__(self, grid):
            return lambda *args, **constants: launched.append((args, constants))

    kernel = append_kernel.append
    monkeypatch.setattr(append_kernel, "append", Launched())
    append_kernel.launch(*given())
    ((args, constants),) = launched
    values = dict(zip(kernel.arg_names, args, strict=False)) | constants
    signature = {
        name: TYPES[value.dtype]
        if isinstance(value, torch.Tensor)
        else "constexpr"
        if name in constants or value is None
        else "i32"
        for name, value in values.items()
    }
    numbered = [*enumerate(kernel.arg_names)]
    fixed = {(i,): values[name] for i, name in numbered if signature[name] == "constexpr"}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in numbered if signature[name].startswith("*")}
    compiled = triton.compile(ASTSource(kernel, signature, fixed, aligned), target=gpu_target(target))
    found = resources(compiled)
    assert found.spill_bytes == 0 and found.registers <= 128, found
