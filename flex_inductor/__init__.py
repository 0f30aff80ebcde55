"""flex_inductor: a torch.compile backend for attention written as a score_mod and a mask_mod."""

import sys as _sys
from importlib.machinery import PathFinder as _PathFinder
from pathlib import Path as _Path
from typing import Any as _Any


class _Beside:
    """A wheel has lowerings/, templates/ and tools/ inside this folder; a source checkout has them beside it."""

    folder = _Path(__path__[0]).parent
    names = tuple(f"{__name__}.{name}" for name in ("lowerings", "templates", "tools"))

    @classmethod
    def find_spec(cls, name: str, path: _Any = None, target: _Any = None) -> _Any:
        return _PathFinder.find_spec(name, [str(cls.folder)]) if name in cls.names else None


if not (_Path(__path__[0]) / "lowerings").is_dir():
    _sys.meta_path.insert(0, _Beside)  # before an editable install of another checkout

from . import supported as _supported

_supported.check()
with _supported.importing():
    from torch.nn.attention.flex_attention import (
        BlockMask,
        and_masks,
        noop_mask,
        or_masks,
    )

    from . import masks, mods
    from . import upward as _upward
    from .attention import flex_attention
    from .errors import FlexError
    from .fingerprint import VERSION as __version__
    from .masks import RunSchedule, create_block_mask, draw_mask, not_mask, offset
    from .op.eager.kernels import set_eager_kernels
    from .sequences import Sequences, append_kv, pad, unpad, varlen_attention
    from .softmax import AuxOutput, AuxRequest
    from .take_over import take_over

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "FlexError",
    "RunSchedule",
    "Sequences",
    "__version__",
    "and_masks",
    "append_kv",
    "check",
    "check_model",
    "context_parallel",
    "create_block_mask",
    "decisions",
    "draw_mask",
    "flex_attention",
    "inspect",
    "masks",
    "mods",
    "noop_mask",
    "not_mask",
    "offset",
    "or_masks",
    "pad",
    "set_eager_kernels",
    "take_over",
    "trace_mod",
    "unpad",
    "varlen_attention",
]


def __getattr__(name: str) -> _Any:
    if name in _upward.PUBLIC:
        return _upward.public(name)
    raise AttributeError(f"module 'flex_inductor' has no attribute {name!r}")
