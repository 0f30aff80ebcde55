"""Keys and values of 8 bits, and queries: what multiplies them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import errors

NARROW = (torch.float8_e4m3fn, torch.float8_e5m2)


def is_narrow(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.dtype in NARROW


class Scales(NamedTuple):
    """The arguments as the user gave them; None is 1."""

    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    def check(self, query: Tensor, key: Tensor, by_head: tuple[Any, ...], tokens: tuple[Any, ...]) -> None:
        """Refuse what does not fit. `by_head` is the shape of a number for each KV head, `tokens` for each row."""
        if not is_narrow(key):
            for name, scale in zip(self._fields, self, strict=True):
                if scale is not None:
                    raise errors.scale_of_wide(name, key.dtype)
            return
        if torch.is_grad_enabled():
            for name, tensor in {"query": query, "k_scale": self.k_scale, "v_scale": self.v_scale}.items():
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    raise errors.narrow_needs_grad(name, key.dtype)
        if self.q_scale is not None and not is_narrow(query):
            raise errors.scale_of_wide("q_scale", query.dtype)
        of_kv = ((), by_head, tokens)
        shapes = {"q_scale": ((), tuple(query.shape[:2])), "k_scale": of_kv, "v_scale": of_kv}
        for name, scale in self._asdict().items():
            if scale is None:
                continue
            fits = isinstance(scale, Tensor) and tuple(scale.shape) in map(tuple, shapes[name])
            if not fits or not scale.is_floating_point():
                raise errors.bad_narrow_scale(name, scale, shapes[name])
            if scale.device != key.device:
                raise errors.scale_device(name, scale.device, key.device)

    def widened(self, query: Tensor) -> Tensor:
        """The query [B, H, M, D] in a type that products take."""
        if not is_narrow(query):
            return query
        wide = query.to(torch.float32)
        if self.q_scale is not None:
            wide = wide * (self.q_scale if self.q_scale.dim() == 0 else self.q_scale[..., None, None])
        return wide.to(torch.bfloat16)

    def of_rows(self, key: Tensor, in_rows: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """The op's input: those of keys and of values, [B, K, N] like the key [B, K, N, D]. `in_rows` gives one that is
        not the same for all a shape that broadcasts to this."""
        if not is_narrow(key):
            return {}
        ones = torch.ones((), dtype=torch.float32, device=key.device)
        given = (ones if scale is None else scale.to(torch.float32) for scale in (self.k_scale, self.v_scale))
        return {"kv_scales": tuple((in_rows(s) if s.dim() else s).expand(key.shape[:3]) for s in given)}
