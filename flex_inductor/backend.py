"""`torch.compile(model, backend="flex_inductor")`: Inductor, with attention lowered by this project."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import fx

from . import compat, errors
from .lowerings import last
from .lowerings.routes import ROUTES
from .options import split_options
from .takeover import attention_nodes, replace_torch_nodes
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
    import torch._inductor
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    own, inductors = split_options(options)
    names = [route.name for route in ROUTES]
    if own.route not in (None, *names):
        raise errors.bad_option("options", "route", own.route, f"one of {', '.join(names)}")
    config = {**(torch._inductor.list_mode_options(mode) if mode else {}), **inductors}
    replace_torch_nodes(module, own)
    if config.get("max_autotune", torch._inductor.config.max_autotune):
        tell_tuner(module, example_inputs)
    inner = _with_own_errors(compile_fx_inner if inner_compile is None else inner_compile)
    try:
        with last.compilation(attention_nodes(module)):
            return compile_fx(module, example_inputs, inner_compile=inner, config_patches=config or None)
    except Exception as error:
        ours = errors.own_error_in(error)
        if ours is None:
            raise
    raise compat.through_dynamo(ours)


def _with_own_errors(inner_compile: Callable) -> Callable:
    """`inner_compile`, whose errors that are ours come out of Inductor as they are, also when a backward runs."""

    @functools.wraps(inner_compile)
    def compile_graph(*args: Any, **kwargs: Any) -> Any:
        try:
            return inner_compile(*args, **kwargs)
        except Exception as error:
            ours = errors.own_error_in(error)
            if ours is None:
                raise
        raise ours.with_traceback(None)

    return compile_graph
