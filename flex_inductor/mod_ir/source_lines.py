"""Where in somebody's code a traced operation is written.

Files are named without their folders, so that a report shows nothing of the machine it was made on.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from torch import fx


class Line(NamedTuple):
    file: str  # its name, without folders
    number: int
    function: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


class Frame(NamedTuple):
    path: str
    line: Line

    @property
    def is_wrapper(self) -> bool:
        """Whether this is flex_attention itself, ours or torch's, or varlen_attention."""
        named = (
            self.line.file in ("attention.py", "flex_attention.py") and "flex_attention" in self.line.function
        )
        return named or self.path in (f"{_OWN}/attention.py", f"{_OWN}/sequences/attention.py")

    @property
    def is_users(self) -> bool:
        return not self.path.startswith(_NOT_USERS)

    @property
    def may_call(self) -> bool:
        """Whether users call attention there, and no function of ours does it for them."""
        return self.is_users and not self.path.startswith(_CALLERS)


_tools = find_spec("flex_inductor.tools")
assert _tools is not None and _tools.origin is not None, "flex_inductor.tools is not installed"
_OWN = Path(__file__).parent.parent
_NOT_USERS = (
    f"{Path(torch.__file__).parent}/",
    f"{Path(_tools.origin).parent}/",
    *(f"{_OWN}/{name}" for name in ("mod_ir/", "op/", "attention.py", "take_over.py")),
)
_CALLERS = tuple(f"{_OWN}/{name}/" for name in ("sequences", "flash", "distributed", "integrations", "laws"))
_FRAME = re.compile(r'^ *File "([^"]+)", line (\d+), in (.+)\n(.*)$', flags=re.MULTILINE)


def frames_in(text: str) -> list[Frame]:
    """Those of a stack trace, the outermost first."""
    return [
        Frame(path, Line(Path(path).name, int(number), function, line.strip()))
        for path, number, function, line in _FRAME.findall(text)
    ]


def frames(node: fx.Node) -> list[Frame]:
    return frames_in(node.meta.get("stack_trace") or "")


def last_line(text: str) -> Line | None:
    """The last line of the user's in a stack trace."""
    users = [frame.line for frame in frames_in(text) if frame.is_users]
    return users[-1] if users else None


def call_line(node: fx.Node) -> Line | None:
    """Where the user calls attention."""
    found = frames(node)
    wrapper = next((i for i, frame in enumerate(found) if frame.is_wrapper), len(found))
    return calling_line(found[:wrapper])


def calling_line(found: Sequence[Frame]) -> Line | None:
    """The last of `found` where users may call attention."""
    return next((frame.line for frame in reversed(found) if frame.may_call), None)


def line_raising(error: BaseException) -> Line | None:
    """The last line of the user's from which `error` was raised."""
    stack = getattr(error, "real_stack", None) or traceback.extract_tb(error.__traceback__)
    return last_line("".join(traceback.format_list(stack)))
