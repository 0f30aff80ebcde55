import dataclasses
import functools
import math
import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Generated code gets its buffers full of NaN: what a kernel leaves out shows."""
    guards = torch._C._dynamo.guards
    unfilled = guards._empty_strided_cpu

    def empty_strided_cpu(size, stride, dtype):
        buffer = unfilled(size, stride, dtype)
        if dtype == torch.bool:
            return buffer.fill_(True)
        return buffer.fill_(float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max)

    monkeypatch.setattr(guards, "_empty_strided_cpu", empty_strided_cpu)
    torch._dynamo.reset()


@pytest.fixture
def kinds(monkeypatch):
    """The kinds of the kernels that are generated, in order."""
    from flex_inductor.lowerings.triton.kernel import KernelCall

    heuristics, found = KernelCall._heuristics, []

    def noting(call, *metas):
        found.append(call.kind)
        return heuristics(call, *metas)

    monkeypatch.setattr(KernelCall, "_heuristics", noting)
    return found


@pytest.fixture(scope="session", autouse=INTERPRETED)
def types_are_made_once():
    """The interpreter makes the same few shapes and types again for each operation, which takes a tenth of its time."""
    from triton.language import core
    from triton.runtime import interpreter

    @functools.cache
    def constants(shape):
        return core.tuple([core.constexpr(n) for n in shape]), core.constexpr(math.prod(shape))

    def tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = constants(tuple(type.shape) if type.is_block() else ())

    numpy_types, numpy_type = {}, interpreter._get_np_dtype

    def numpy_type_by_name(type):
        if type.name not in numpy_types:
            numpy_types[type.name] = numpy_type(type)
        return numpy_types[type.name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core.tensor, "__init__", tensor)
        patch.setattr(interpreter, "_get_np_dtype", numpy_type_by_name)
        yield


@pytest.fixture(autouse=INTERPRETED)
def only_mods_are_checked_for_overflow(request, monkeypatch):
    """The interpreter does each sum and product of whole numbers again in 64 bits, which takes half of its time."""
    from triton.runtime.interpreter import interpreter_builder

    checked = request.module.__name__.endswith("interpreted_mods")
    options = dataclasses.replace(interpreter_builder.options, sanitize_overflow=checked)
    monkeypatch.setattr(interpreter_builder, "options", options)
