"""flex_inductor: a torch.compile backend for attention written as a score_mod and a mask_mod."""

import os as _os

__version__ = "0.1.0"

# A wheel has lowerings/, templates/ and tools/ inside this folder; a source checkout has them beside it.
if not _os.path.isdir(_os.path.join(__path__[0], "lowerings")):
    __path__.append(_os.path.dirname(__path__[0]))
