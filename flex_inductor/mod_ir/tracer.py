"""From a function of tensors to its FX graph of aten ops, in any thread.

torch's make_fx gives the same graph, but while it runs it patches nn.Module and tells all threads that a trace is going
on. Two traces at once would leave both changed for good, and meanwhile no thread may call compiled code. This trace
changes only its own thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    PythonKeyTracer,
    disable_autocast_cache,
    track_tensor_tree,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map_only


class Tracer(PythonKeyTracer):
    """One trace. `graph` then has the nodes, and `root` the tensors that the graph holds as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.root = torch.nn.Module()
        self.graph = fx.Graph(tracer_cls=PythonKeyTracer)
        self.tensor_attrs: dict[Any, str] = {}
        self._line: str | None = None  # of the user's code, as a stack trace
        self._placed: set[Any] = set()  # autograd's nodes whose line is known

    def trace_call(self, fn: Callable, args: Sequence[Any]) -> fx.Graph:
        """The graph of `fn(*args)`."""
        inputs = [self.create_proxy("placeholder", f"arg{i}_1", (), {}) for i in range(len(args))]
        track_tensor_tree(list(args), inputs, constant=None, tracer=self)
        with disable_autocast_cache(), ProxyTorchDispatchMode(self, "real"), _without_nan_checks():
            result = fn(*args)
        self._line = None
        result = tree_map_only(Tensor, self.unwrap_proxy, result)
        self.create_node("output", "output", (self.create_arg(result),), {})
        return self.graph

    def create_node(self, kind, target, args, kwargs, name=None, type_expr=None):
        # fx's own method reads the line from a global of the process.
        node = self.graph.create_node(kind, target, args, kwargs, name, type_expr)
        if self._line:
            node.stack_trace = self._line
        return node

    def keeping_lines(self, mod: Callable) -> Callable:
        """`mod`; if it is a graph, a trace of it keeps the line of the user's code that each node comes from."""
        return _KeepingLines(mod, self).run if isinstance(mod, fx.GraphModule) else mod

    def at_line(self, line: str | None) -> None:
        """Set the line for what is traced from now on."""
        self._line = line

    def place_backward(self, value: Any) -> None:
        """Set the present line for the derivatives of `value` that have none yet."""
        line = self._line
        nodes = [tensor.grad_fn for tensor in tree_iter(value) if isinstance(tensor, Tensor)]
        while nodes:
            node = nodes.pop()
            if node is None or node in self._placed:
                continue
            self._placed.add(node)
            node.register_prehook(lambda _grads: self.at_line(line))
            nodes += [before for before, _ in node.next_functions]


def _without_nan_checks() -> Any:
    """Anomaly mode, where it is on, would look for NaN in the gradients of a trace, which has no values."""
    checks = torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
    return _NoneIsTrue() if checks else contextlib.nullcontext()


class _NoneIsTrue(TorchDispatchMode):
    """Answers autograd's question whether a gradient has a NaN: no."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._is_any_true.default:
            with _disable_current_modes():
                return torch.zeros((), dtype=torch.bool)
        return func(*args, **(kwargs or {}))


class _KeepingLines(fx.Interpreter):
    """Runs a graph and tells a tracer where each node comes from."""

    def __init__(self, module: fx.GraphModule, tracer: Tracer):
        super().__init__(module)
        self.tracer = tracer

    def run_node(self, node: fx.Node) -> Any:
        self.tracer.at_line(node.stack_trace)
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        value = getattr(self, node.op)(node.target, args, kwargs)
        self.tracer.place_backward(value)
        return value
