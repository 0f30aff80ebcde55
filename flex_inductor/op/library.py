"""Where ops of ours are registered with torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LIBRARY = torch.library.Library("flex_inductor", "FRAGMENT")

# The schemas of ops that are a whole call: `tensors` and the text `call` hold its mods and inputs.
FORWARD = "(Tensor query, Tensor key, Tensor value, Tensor[] tensors, str call) -> Tensor[]"
BACKWARD = (
    "(Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, Tensor? grad_out, Tensor? grad_lse, "
    "Tensor[] tensors, str call) -> Tensor[]"
)


def define(
    name: str,
    schema: str,
    compute: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    tags: tuple[torch.Tag, ...] = (torch.Tag.cudagraph_unsafe,),
) -> None:
    """The op `flex_inductor::{name}`: `compute` gives its results on any device, `fake` tensors of their shapes.

    Most ops read tensors on the host, so no CUDA graph holds them.
    """
    LIBRARY.define(f"{name}{schema}", tags=tags)
    LIBRARY.impl(name, compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flex_inductor::{name}", fake, lib=LIBRARY)
