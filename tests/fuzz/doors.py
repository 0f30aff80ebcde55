"""Further doors of a call: each makes of one function of tensors another that gives the same."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch


def vmapped(attend: Callable) -> Callable:
    """Each batch by itself, as torch.vmap has it: all of them see b = 0."""

    def call(scale, shift, query, key, value, captures, block_mask):
        def one(*qkv):
            results = attend(scale, shift, *(t.unsqueeze(0) for t in qkv), captures, block_mask)
            return tuple(t.squeeze(0) for t in results)

        return torch.vmap(one)(query, key, value)

    return call


def exported(attend: Callable) -> Callable:
    """The program that torch.export makes of each call."""

    def call(scale, shift, query, key, value, captures, block_mask):
        class Module(torch.nn.Module):
            def forward(self, query, key, value, captures):
                return attend(scale, shift, query, key, value, captures, block_mask)

        given = query, key, value, tuple(captures)
        return torch.export.export(Module(), given, strict=False).module()(*given)

    return call


DOORS: dict[str, Callable] = {"": lambda attend: attend, "vmap": vmapped, "export": exported}


def names_batches(*texts: str | None) -> bool:
    """Whether mods see the batch."""
    return any(re.search(r"\bb\b", text or "") for text in texts)


def applies_functions(*texts: str | None) -> bool:
    """Whether mods apply autograd.Functions, which are refused in transforms that are compiled."""
    return any(
        name in (text or "") for text in texts for name in ("straight_through", "clamped_gradient", "shifted")
    )
