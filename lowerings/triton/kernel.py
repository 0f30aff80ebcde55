"""A rendered Triton kernel as a node of Inductor's graph: it writes buffers that the lowering allocated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import sympy
import torch
from torch._inductor import ir
from torch._inductor.codegen.common import ConstexprArg, SizeArg, TensorArg
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.codegen.triton_utils import config_of, signature_to_meta
from torch._inductor.codegen.wrapper import ArgName, cexpr, pexpr
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.utils import sympy_subs
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

from flex_inductor.softmax import NARROW

from ..observing import observer
from .configs import Config
from .fitting import Chosen

INT_MAX = 2**31 - 1


class Tensor(NamedTuple):
    """A tensor argument as the source spells it."""

    name: str
    size: list[str]
    stride: list[str]
    offsets: str  # tl.int32 where every offset into one [rows, columns] slice fits, else tl.int64


class Arguments:
    """A kernel's parameters: tensors by name, then those sizes and strides that are not constants."""

    def __init__(self) -> None:
        self.tensors: dict[str, Any] = {}  # buffers, and views of them
        self.captures: dict[str, str] = {}  # names of Inductor's buffers -> names of arguments
        self.written: list[str] = []
        self.sizes: dict[sympy.Expr, str] = {}

    def tensor(self, name: str, value: Any, *, written: bool = False) -> Tensor:
        self.tensors[name] = ir.InputsKernel.unwrap_storage_for_input(value)
        if written:
            self.written.append(name)
        size, stride = value.get_size(), value.get_stride()
        # The last two dimensions are walked by one instance: their offsets are computed for every lane.
        inner = [(n - 1) * s for n, s in zip(size[-2:], stride[-2:], strict=True)]
        offsets = "tl.int32" if fits_int32(sum(inner, sympy.S.Zero)) else "tl.int64"
        return Tensor(name, [*map(self.size, size)], [*map(self.size, stride)], offsets)

    def capture(self, value: Any) -> None:
        """Pass a tensor that lanes read, from its buffer's start: Inductor's index expressions count from there."""
        buffer = V.graph.get_buffer(value.get_name())
        if buffer.get_name() not in self.captures:
            name = f"captured_{len(self.captures)}"
            self.captures[buffer.get_name()] = name
            self.tensors[name] = ir.InputsKernel.unwrap_storage_for_input(buffer)

    def size(self, expression: Any) -> str:
        """The text for a size: a number, or a parameter that carries it."""
        expression = V.graph.sizevars.simplify(sympy.sympify(expression))
        if expression.is_Integer:
            return str(expression)
        return self.sizes.setdefault(expression, f"size_{len(self.sizes)}")

    @property
    def names(self) -> list[str]:
        return [*self.tensors, *self.sizes.values()]


def fits_int32(expression: Any) -> bool:
    """Whether `expression` is below 2**31 for every size that this compilation serves."""
    from torch._inductor.utils import expr_fits_within_32bit

    expression = sympy.sympify(expression)
    if expression.is_Integer:
        return int(expression) <= INT_MAX
    if not expr_fits_within_32bit(expression):
        return False
    V.graph.sizevars.check_leq(expression, sympy.Integer(INT_MAX))
    return True


LARGEST_GRID = 65535  # instances that CUDA numbers along the second and third axis of a launch, each


class Launch(NamedTuple):
    """What a template writes for an instance's place on three axes, and for the first and last lengths.

    Instances are numbered along one axis instead where the second or third would be too long for CUDA.
    """

    folded: bool
    first: str = "tl.program_id(0)"
    second: str = "tl.program_id(1)"
    third: str = "tl.program_id(2)"
    firsts: str = "tl.num_programs(0)"
    thirds: str = "tl.num_programs(2)"

    def grid(self, first: Any, second: Any, third: Any) -> tuple[Any, ...]:
        return (first * second * third, 1, 1) if self.folded else (first, second, third)


def launch(firsts: str, second: Any, third: Any, size: Callable[[Any], str]) -> Launch:
    """How instances are numbered; `firsts` is the length of the first axis as the template spells it."""
    if _numbered(second) and _numbered(third):
        return Launch(False)
    place, seconds = "tl.program_id(0)", size(second)
    return Launch(
        True,
        f"({place} % {firsts})",
        f"({place} // {firsts} % {seconds})",
        f"({place} // ({firsts} * {seconds}))",
        firsts,
        size(third),
    )


def _numbered(length: Any) -> bool:
    """Whether the second or third axis of a launch may be so long, for every size that this compilation serves."""
    length = sympy.sympify(length)
    if V.graph.sizevars.optimization_hint(length, fallback=LARGEST_GRID + 1) > LARGEST_GRID:
        return False
    V.graph.sizevars.check_leq(length, sympy.Integer(LARGEST_GRID))
    return True


def empty(size: Sequence[Any], stride: Sequence[Any] | None, dtype: torch.dtype, device: torch.device) -> Any:
    """An unfilled buffer for a kernel to write."""
    from torch._inductor.lowering import empty_strided

    return empty_strided([*map(sympy.sympify, size)], stride, dtype=dtype, device=device)


class KernelCall(ir.ExternKernel):
    """One launch. `render(name, decorators)` gives the source; the autotuner times configs where there are several."""

    def __init__(
        self,
        render: Callable[[str, str], str],
        arguments: Arguments,
        chosen: Chosen,
        grid: Callable[[Config], Sequence[Any]],
        accumulated: Sequence[str] = (),
    ):
        tensors = list(arguments.tensors.values())
        self.device = tensors[0].get_device()
        super().__init__(None, ir.NoneLayout(device=self.device), tensors, tuple(arguments.sizes))
        self.kind, self.render, self.arguments = chosen.kind, render, arguments
        self.configs, self.axes = chosen.configs, chosen.axes
        self.grids = {
            config: [*map(sympy.sympify, grid(config))] for config in [*chosen.configs, *chosen.spare]
        }
        self.accumulated = list(accumulated)  # arguments that the kernel adds to
        self.mutation_outputs = [
            ir.MutationOutput(ir.NoneLayout(device=self.device), arguments.tensors[name], self)
            for name in arguments.written
        ]
        V.graph.register_operation(self)

    def get_outputs(self) -> list[ir.Buffer]:
        return list(self.mutation_outputs)

    def get_device(self) -> torch.device:
        return self.device

    def get_unbacked_symbol_defs(self) -> Any:
        return OrderedSet()

    def codegen(self, wrapper: Any) -> None:
        launch_symbols = self._launch_symbols()
        triton_meta, inductor_meta = self._triton_meta(), self._inductor_meta(launch_symbols)
        name = self._define(wrapper, triton_meta, inductor_meta)
        observer().kernel_defined(self, name)
        sizes = [*self.arguments.sizes, *launch_symbols]
        wrapper.generate_kernel_call(
            name,
            [*(tensor.codegen_reference() for tensor in self.arguments.tensors.values()), *sizes],
            arg_types=[*(t.get_dtype() for t in self.arguments.tensors.values()), *map(type, sizes)],
            raw_args=[*self.arguments.tensors.values(), *sizes],
            raw_keys=[*self.arguments.names, *("" for _ in launch_symbols)],
            triton_meta=triton_meta,
            inductor_meta=inductor_meta,
            triton=True,
            device=self.device,
        )

    def _launch_symbols(self) -> dict[sympy.Symbol, sympy.Symbol]:
        symbols = {s for grid in self.grids.values() for axis in grid for s in axis.free_symbols}
        ordered = sorted(symbols, key=str)
        return {symbol: sympy.Symbol(f"_launch_{i}") for i, symbol in enumerate(ordered)}

    def _triton_meta(self) -> dict[str, Any]:
        signature: list[Any] = []
        for name, tensor in self.arguments.tensors.items():
            viewed = isinstance(tensor, ir.ReinterpretView)
            owner = tensor.data if viewed else tensor
            offset = tensor.layout.offset if viewed else sympy.S.Zero
            dtype = tensor.get_dtype()
            # As bytes, which every card can load.
            dtype = torch.uint8 if dtype in NARROW else dtype
            signature.append(TensorArg(name, owner.get_name(), dtype, offset))
        signature += [SizeArg(name, size) for size, name in self.arguments.sizes.items()]
        signature += [ConstexprArg(name) for name in self.configs[0].constants(self.axes)]
        argdefs = [ArgName(argument.name) for argument in signature]
        return {
            "signature": signature_to_meta(signature, size_dtype=None, argdefs=argdefs),
            "device": DeviceProperties.create(self.device),
            "constants": {},
            "configs": [config_of(signature)],
        }

    def _inductor_meta(self, launch_symbols: dict[sympy.Symbol, sympy.Symbol]) -> dict[str, Any]:
        by_tile = {tuple(config.constants().items()): grid for config, grid in self.grids.items()}
        grids: list[dict[str, Any]] = []
        for tile, grid in by_tile.items():
            axes = [sympy_subs(axis, launch_symbols) for axis in grid]
            python, cpp = [*map(pexpr, axes)], [*map(cexpr, axes)]
            grids.append({"config": dict(tile), "python": python, "cpp": cpp, "python_slow": python})
        return {
            **TritonKernel.inductor_meta_common(),
            "grid_type": "PrecomputedGrid",
            "precomputed_grids": grids,
            "extra_launcher_args": [*map(str, launch_symbols.values())],
            "declared_constexpr_names": [*self.configs[0].constants(self.axes)],
            "mutated_arg_names": self.accumulated,
            "dynamic_disable_pipelining": False,  # a config that cannot run has others to follow it
            "flex_inductor": {"kind": self.kind},
        }

    def _define(self, wrapper: Any, triton_meta: dict[str, Any], inductor_meta: dict[str, Any]) -> str:
        """The kernel's name in the generated module, which has one definition for equal kernels."""
        key = (self.render("kernel", ""), str(triton_meta), str(inductor_meta))
        known = wrapper.user_defined_kernel_cache
        if key not in known:
            name = f"flex_inductor_{self.kind}_{len(known)}"
            inductor_meta["kernel_name"] = name
            source = "\n".join(
                [
                    TritonKernel.gen_common_triton_imports(),
                    self.render(name, self._heuristics(triton_meta, inductor_meta)),
                ]
            )
            assert "'''" not in source
            source = source.replace("\\", "\\\\")
            text = f"async_compile.triton({name!r}, '''\n{source}\n''', device_str={self.device.type!r})"
            wrapper.define_kernel(name, text, f"# {self.kind}")
            known[key] = (name, triton_meta, inductor_meta)
        return known[key][0]

    def _heuristics(self, triton_meta: dict[str, Any], inductor_meta: dict[str, Any]) -> str:
        return (
            f"@triton_heuristics.user_autotune(\n"
            f"    configs={[config.launch(self.axes) for config in self.configs]!r},\n"
            f"    inductor_meta={inductor_meta!r},\n"
            f"    triton_meta={triton_meta!r},\n"
            f"    filename=__file__,\n"
            f"    custom_kernel=True,\n"
            f")"
        )
