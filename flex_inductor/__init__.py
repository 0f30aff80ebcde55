"""flex_inductor: a torch.compile backend for attention written as a score_mod and a mask_mod."""

from importlib import import_module as _import_module
from pathlib import Path as _Path
from typing import Any as _Any

# A wheel has lowerings/, templates/ and tools/ inside this folder; a source checkout has them beside it.
if not (_Path(__path__[0]) / "lowerings").is_dir():
    __path__.append(str(_Path(__path__[0]).parent))

from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    and_masks,
    noop_mask,
    or_masks,
)

from . import masks, mods
from .attention import flex_attention
from .build import VERSION as __version__
from .errors import FlexError
from .masks import RunSchedule, create_block_mask, draw_mask, not_mask, offset
from .takeover import take_over

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "FlexError",
    "RunSchedule",
    "__version__",
    "and_masks",
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
    "take_over",
    "trace_mod",
]

_LAZY = {
    "decisions": "flex_inductor.lowerings.decision",
    "inspect": "flex_inductor.tools.inspector",
    "trace_mod": "flex_inductor.tools.trace_mod",
}


def __getattr__(name: str) -> _Any:
    if name in _LAZY:
        return getattr(_import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'flex_inductor' has no attribute {name!r}")
