"""`torch.compile(model, backend="flex_inductor")`: Inductor, with attention lowered by this project."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import fx

from . import compat, errors, supported, upward
from .op import AttentionCall, attention
from .options import BackendOptions, backend_options, split_options
from .sequences.append import verify_appends
from .torch_calls import replace_torch_calls
from .tuning import tell_tuner


def flex_inductor(
    module: fx.GraphModule,
    example_inputs: list[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    inner_compile: Callable | None = None,
) -> Any:
    """The backend. `mode` and `options` are Inductor's, plus the few of options.BackendOptions.

    `inner_compile` stands in for Inductor's compile_fx_inner, which compiles the forward and the backward graph.
    """
    with supported.importing():
        import torch._inductor
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    compat.drop_guards_on_constants(__package__)
    own, inductors = split_options(options)
    prepare_calls(module, own)
    calls = attention_nodes(module)
    if supported.UNTESTED and calls:
        try:
            upward.self_check("compiled")
        except errors.FlexError as error:
            raise compat.through_dynamo(error) from None
    names = upward.route_names()
    if own.route not in (None, *names):
        raise errors.bad_option("options", "route", own.route, f"one of {', '.join(names)}")
    config = {**(torch._inductor.list_mode_options(mode) if mode else {}), **inductors}
    if _has_exchanges(module):
        config = {**config, **upward.exchange().patches(config)}
    if config.get("max_autotune", torch._inductor.config.max_autotune):
        tell_tuner(module, calls, example_inputs)
    inner = _with_own_errors(compile_fx_inner if inner_compile is None else inner_compile, calls)
    try:
        with upward.compilation(calls):
            return compile_fx(module, example_inputs, inner_compile=inner, config_patches=config or None)
    except Exception as error:
        ours = _own_error(error, calls)
        if ours is None:
            raise
    raise compat.through_dynamo(ours)


def prepare_calls(module: fx.GraphModule, options: BackendOptions) -> None:
    """Make torch's calls ours in a Dynamo graph; put the backend's options and its number on each call."""
    replace_torch_calls(module)
    for number, node in enumerate(attention_nodes(module)):
        call = AttentionCall.read(*node.args)
        node.args = call._replace(options=backend_options(call.options, options, number)).wire()
    for inner in module.modules():
        if isinstance(inner, fx.GraphModule):
            if options.verify:
                verify_appends(inner)
            if options.verify or any(node.target is attention for node in inner.graph.nodes):
                inner.recompile()


def attention_nodes(module: fx.GraphModule) -> list[fx.Node]:
    """Our op's nodes in a Dynamo graph and the graphs inside it, in the order in which they run."""
    found: dict[fx.Node, None] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr" and isinstance(inner := getattr(module, node.target, None), fx.GraphModule):
            found |= dict.fromkeys(attention_nodes(inner))
        elif node.target is attention:
            found[node] = None
    return list(found)


def _has_exchanges(module: fx.GraphModule) -> bool:
    """Whether ranks send each other anything: see distributed/exchange.py."""
    graphs = (inner.graph for inner in module.modules() if isinstance(inner, fx.GraphModule))
    return any("flex_inductor.send_rows" in str(node.target) for graph in graphs for node in graph.nodes)


def _own_error(error: Exception, calls: list[fx.Node]) -> errors.FlexError | None:
    """What to raise instead, if the failure is ours to explain."""
    ours = errors.own_error_in(error)
    if ours is not None or not calls:
        return ours
    if compat.is_cpp_failure(error) and (reason := upward.missing_for_cpp()):
        return errors.cannot_compile(reason)
    if supported.UNTESTED:
        return errors.FlexRuntimeError(supported.refused("compiling a graph with attention", error))
    return None


def _with_own_errors(inner_compile: Callable, calls: list[fx.Node]) -> Callable:
    """`inner_compile`, whose errors that are ours come out of Inductor as they are, also when a backward runs."""

    @functools.wraps(inner_compile)
    def compile_graph(*args: Any, **kwargs: Any) -> Any:
        try:
            return inner_compile(*args, **kwargs)
        except Exception as error:
            ours = _own_error(error, calls)
            if ours is None:
                raise
        raise ours.with_traceback(None)

    return compile_graph
