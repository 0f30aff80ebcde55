"""Which line of whose file a traced operation, or a line of a generated kernel, comes from.

Files go by their name alone: a report may be shown to anybody.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import fx

from flex_inductor import attention, op, takeover, tools


class Line(NamedTuple):
    file: str  # its name, without folders
    number: int
    function: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


class _Frame(NamedTuple):
    path: str
    line: Line

    @property
    def is_wrapper(self) -> bool:
        """Whether this is flex_attention itself, ours or torch's."""
        return (
            self.line.file in ("attention.py", "flex_attention.py") and "flex_attention" in self.line.function
        )

    @property
    def is_users(self) -> bool:
        return not any(self.path.startswith(folder) for folder in _NOT_USERS)


_NOT_USERS = (
    *(f"{Path(module.__file__).parent}/" for module in (torch, op, tools)),
    *(str(module.__file__) for module in (attention, takeover)),
)
_FRAME = re.compile(r'^ *File "([^"]+)", line (\d+), in (.+)\n(.*)$', flags=re.MULTILINE)


def _frames_in(text: str) -> list[_Frame]:
    return [
        _Frame(path, Line(Path(path).name, int(number), function, line.strip()))
        for path, number, function, line in _FRAME.findall(text)
    ]


def _frames(node: fx.Node) -> list[_Frame]:
    return _frames_in(node.meta.get("stack_trace") or "")


def last_line(text: str) -> Line | None:
    """The last line of the user's in a stack trace."""
    users = [frame.line for frame in _frames_in(text) if frame.is_users]
    return users[-1] if users else None


def call_line(node: fx.Node) -> Line | None:
    """Where the user calls attention."""
    frames = _frames(node)
    wrapper = next((i for i, frame in enumerate(frames) if frame.is_wrapper), len(frames))
    return next((frame.line for frame in reversed(frames[:wrapper]) if frame.is_users), None)


def _mod_frames(node: fx.Node) -> list[_Frame]:
    frames = _frames(node)
    wrappers = [i for i, frame in enumerate(frames) if frame.is_wrapper]
    return frames[wrappers[-1] + 1 :] if wrappers else []


def mod_line(node: fx.Node) -> Line | None:
    """Where in a mod its operation is written."""
    frames = _mod_frames(node)
    users = [frame.line for frame in frames if frame.is_users]
    return users[-1] if users else frames[-1].line if frames else None


def mod_lines(module: fx.GraphModule) -> tuple[str, list[Line]]:
    """A mod's name and the lines that it consists of, as far as operations tell; torch's own only if all are."""
    name, found = "", {}
    for node in module.graph.nodes:
        if node.op in ("call_function", "call_method"):
            frames = _mod_frames(node)
            name = name or (frames[0].line.function if frames else "")
            if (line := mod_line(node)) is not None:
                found[line.file, line.number] = (line, any(frame.is_users for frame in frames))
    own = [key for key, (_, users) in found.items() if users] or found
    return name, [found[key][0] for key in sorted(own)]


class Notes:
    """Comments that say which line of a mod a line of a kernel is.

    While kernels are made a comment is a number, so that nothing takes its words for names of the kernel.
    """

    def __init__(self) -> None:
        self.numbers: dict[tuple[str, str], int] = {}
        self.current: int | None = None

    def number(self, node: fx.Node) -> int | None:
        line = mod_line(node)
        if line is None:
            return None
        lanes = {n.name for n in node.graph.find_nodes(op="placeholder")}
        mod = "score_mod" if "score" in lanes else "mask_mod"
        return self.numbers.setdefault((mod, str(line)), len(self.numbers))

    @contextlib.contextmanager
    def at(self, number: int | None) -> Iterator[None]:
        before, self.current = self.current, number
        try:
            yield
        finally:
            self.current = before

    def written(self, source: str) -> str:
        """`source` with comments in words, one for the first of several lines in a row."""
        words = {number: f"{mod}: {line}" for (mod, line), number in self.numbers.items()}
        lines, last = [], None
        for line in source.splitlines():
            found = _NOTE.search(line)
            number = int(found[2]) if found else None
            if found:
                line = line[: found.start()]
                if number != last:
                    line += f"  {found[1]} {words[int(found[2])]}"
            last = number
            lines.append(line)
        return "\n".join(lines) + "\n"


_NOTE = re.compile(r"  (#|//) @(\d+)$", flags=re.MULTILINE)


def without_notes(source: str) -> str:
    return _NOTE.sub("", source)


@contextlib.contextmanager
def noted() -> Iterator[Notes]:
    """Kernels made inside say in numbered comments which operation of a mod each of their lines is."""
    from torch._inductor import ir
    from torch._inductor.codegen.common import CSE
    from torch._inductor.loop_body import LightTracer
    from torch._inductor.subgraph_lowering import PointwiseSubgraphLowering
    from torch._inductor.virtualized import V

    from flex_inductor.lowerings.triton.lanes import _Lowering

    notes = Notes()

    def lowering(run_node: Any) -> Any:
        def run(self: Any, node: fx.Node) -> Any:
            if node.op != "call_function":
                return run_node(self, node)
            number = notes.number(node)
            with notes.at(number):
                result = run_node(self, node)
            return evaluated_at(result, number)

        return run

    def evaluated_at(value: Any, number: int | None) -> Any:
        """`value`, noted when its operations are traced, which may be later."""
        pointwise = getattr(getattr(value, "data", None), "data", None)
        if not isinstance(value, ir.TensorBox) or not isinstance(pointwise, ir.Pointwise):
            return value

        def inner_fn(index: Any) -> Any:
            with notes.at(number):
                return pointwise.inner_fn(index)

        return ir.TensorBox.create(replace(pointwise, inner_fn=inner_fn))

    create_node, generate = LightTracer.create_node, CSE.generate

    def noting_node(self: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = create_node(self, *args, **kwargs)
        node.meta["flex_inductor_note"] = notes.current
        return node

    def noting_line(self: Any, buffer: Any, *args: Any, **kwargs: Any) -> Any:
        before = len(buffer._lines)
        variable = generate(self, buffer, *args, **kwargs)
        number = notes.current
        if number is None:
            node = getattr(V.interpreter, "current_node", None)
            number = None if node is None else node.meta.get("flex_inductor_note")
        if number is not None and len(buffer._lines) > before and isinstance(buffer._lines[-1], str):
            buffer._lines[-1] += f"  {'//' if self.suffix == ';' else '#'} @{number}"
        return variable

    with contextlib.ExitStack() as patches:
        for owner in (PointwiseSubgraphLowering, _Lowering):
            patches.enter_context(mock.patch.object(owner, "run_node", lowering(owner.run_node)))
        patches.enter_context(mock.patch.object(LightTracer, "create_node", noting_node))
        patches.enter_context(mock.patch.object(CSE, "generate", noting_line))
        yield notes
