"""What a call visits and where it lies: one protocol, `Schedule`, for torch's block lists, runs and bounds.

protocol.py  what every schedule answers       window.py  windows, and what their tiles visit, as expressions
runs.py      blocks and runs as tables         places.py  where tiles lie in memory
bounds.py    runs that follow from numbers     band.py    some rows as flags
                                               text.py    the same for the text of kernels
"""

from .bounds import Bounds
from .places import TileMap
from .protocol import FORMS, KINDS, Schedule, kind_of
from .runs import BlockRuns

__all__ = ["FORMS", "KINDS", "BlockRuns", "Bounds", "Schedule", "TileMap", "kind_of"]
