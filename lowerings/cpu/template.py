"""One rendered C++ kernel as a node of Inductor's graph, with several outputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any, NamedTuple

import jinja2
import sympy
from torch._dynamo.utils import dynamo_timed
from torch._inductor import ir
from torch._inductor.codegen.common import KernelArgs
from torch._inductor.codegen.cpp_template_kernel import CppTemplateKernel
from torch._inductor.codegen.cpp_utils import cexpr_index
from torch._inductor.select_algorithm import PartialRender
from torch._inductor.utils import Placeholder
from torch._inductor.virtualized import V

from ..observing import observer

TILES = ("q_tiles", "kv_tiles")  # what templates call the tensors of a map of tiles
TABLE = "sequence_table"  # the table of sequences, for bounds
DOCUMENTS = "documents"  # the table of documents


class Argument(NamedTuple):
    """A tensor as C++ expressions."""

    pointer: str
    size: list[str]
    stride: list[str]


class NamedSizes(KernelArgs):
    """Sizes have the names of their symbols. Inductor numbers those that it meets after the declaration, and the number
    may be another symbol's."""

    def size(self, name: sympy.Symbol) -> str:
        return self.sizevars.setdefault(name, f"k{name}")


class TemplateKernel(CppTemplateKernel):
    """Names the kernel's arguments, whatever views of which buffers they are."""

    def __init__(self, inputs: Sequence[Any], outputs: Sequence[Any]):
        super().__init__(str(Placeholder.KERNEL_NAME), num_threads=1)
        self.args = NamedSizes()
        removed = V.graph.removed_buffers | V.graph.removed_operations
        self.tensors = inputs
        self.outputs = {i: t for i, t in enumerate(outputs) if t.get_name() not in removed}

    def declare(self) -> None:
        """Name the arguments, for the rendered text."""
        self.names = {t.get_name(): f"in_{i}" for i, t in enumerate(self.tensors)}
        self.names |= {t.get_name(): f"out_{i}" for i, t in self.outputs.items()}
        by_name = {t.get_name(): t for t in self.tensors}
        inputs = {self.names[name]: tensor for name, tensor in by_name.items()}
        sizes = [
            s
            for t in (*self.tensors, *self.outputs.values())
            for s in (*t.get_size(), *t.get_stride(), t.get_layout().offset)
        ]
        self.declaration = self.def_kernel(
            inputs=inputs,
            outputs={f"out_{i}": t for i, t in self.outputs.items()},
            extra_sizevars=sizes,
        )

    def argument(self, tensor: Any) -> Argument:
        name = self.names[tensor.get_name()]
        offset = self.text(tensor.get_layout().offset)
        pointer = name if offset == "0L" else f"{name} + {offset}"
        return Argument(pointer, [*map(self.text, tensor.get_size())], [*map(self.text, tensor.get_stride())])

    def text(self, expression: Any) -> str:
        return cexpr_index(self.rename_indexing(sympy.sympify(expression)))


def add_node(
    kind: str,
    render: Callable[[TemplateKernel], str],
    read: Sequence[Any],
    layouts: Sequence[ir.Layout],
) -> list[ir.TensorBox]:
    """Add the kernel that `render` writes to the graph; returns its outputs."""
    inputs: list[Any] = [*ir.InputsKernel.unwrap_storage(read)]

    def make_kernel_render(node: Any, flag_template_buffer_has_other_users: bool, epilogue_nodes: Any = None):
        assert not epilogue_nodes, "the kernel writes its outputs itself"
        kernel = TemplateKernel(inputs, node.outputs)

        def rendered() -> str:
            with dynamo_timed("flex_inductor.render"):
                source = finished(kernel, render)
            observer().kernel_rendered(node, kind, kernel, source)
            # Inductor expects no users but outputs. An op that writes into the kernel's inputs is one too: a weak one,
            # only for its place in the order, which is fixed by now.
            buffer = V.graph.scheduler.name_to_buf[node.get_name()]
            buffer.users = [user for user in buffer.users if not user.is_weak]
            return source

        return kernel, rendered

    distinct = list({tensor.get_name(): tensor for tensor in inputs}.values())
    none: Any = None  # the kernel is no template of Inductor's
    node = ir.CppTemplateBuffer(layouts[0], distinct, make_kernel_render, template=none, choice=none)
    V.graph.no_fuse_buffer_names.add(node.get_name())
    node.outputs = [ir.MultiOutput(layout, node, [(list, i)]) for i, layout in enumerate(layouts)]
    node.layout = ir.MultiOutputLayout(device=layouts[0].device)
    return [ir.TensorBox.create(output) for output in node.outputs]


def finished(kernel: TemplateKernel, render: Callable[[TemplateKernel], str]) -> str:
    kernel.declare()
    return PartialRender(render(kernel), kernel.render_hooks).finalize_all()


@functools.cache
def source(name: str) -> jinja2.Template:
    return _environment().get_template(name)


@functools.cache
def _environment() -> jinja2.Environment:
    folder = resources.files("flex_inductor.templates") / "cpu"
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: (folder / name).read_text()),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["headers"] = {
        path.name.removesuffix(".h"): path.read_text()
        for path in folder.iterdir()
        if path.name.endswith(".h")
    }
    return environment
