"""Which lines a mod consists of, and which of them a line of a generated kernel comes from."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

from torch import fx

from flex_inductor.mod_ir.source_lines import Frame, Line, frames


def _mod_frames(node: fx.Node) -> list[Frame]:
    found = frames(node)
    wrappers = [i for i, frame in enumerate(found) if frame.is_wrapper]
    return found[wrappers[-1] + 1 :] if wrappers else []


def mod_line(node: fx.Node) -> Line | None:
    """Where in a mod its operation is written."""
    found = _mod_frames(node)
    users = [frame.line for frame in found if frame.is_users]
    return users[-1] if users else found[-1].line if found else None


def mod_lines(module: fx.GraphModule) -> tuple[str, list[Line]]:
    """A mod's name and the lines of its operations. Lines in torch are left out unless there are no others."""
    name, found = "", {}
    for node in module.graph.nodes:
        if node.op in ("call_function", "call_method"):
            inside = _mod_frames(node)
            name = name or (inside[0].line.function if inside else "")
            if (line := mod_line(node)) is not None:
                found[line.file, line.number] = (line, any(frame.is_users for frame in inside))
    own = [key for key, (_, users) in found.items() if users] or found
    return name, [found[key][0] for key in sorted(own)]


class Notes:
    """Comments that say which line of a mod a line of a kernel is.

    Until a kernel is complete each comment is a number: words might be taken for names of the kernel.
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

    @property
    def words(self) -> dict[int, str]:
        return {number: f"{mod}: {line}" for (mod, line), number in self.numbers.items()}

    def rows(self, source: str) -> dict[int, str]:
        """The mod's line for each row of a kernel that has one, counted from 1."""
        found = ((row, _NOTE.search(line)) for row, line in enumerate(source.splitlines(), 1))
        return {row: self.words[int(note[2])] for row, note in found if note}

    def written(self, source: str) -> str:
        """`source` with comments in words, one for the first of several lines in a row."""
        words = self.words
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

    notes = Notes()
    run_node, generate = PointwiseSubgraphLowering.run_node, CSE.generate
    create_node = LightTracer.create_node

    def noting_results(self: Any, node: fx.Node) -> Any:
        if node.op != "call_function":
            return run_node(self, node)
        number = notes.number(node)
        with notes.at(number):
            result = run_node(self, node)
        return evaluated_at(result, number)

    def evaluated_at(value: Any, number: int | None) -> Any:
        """`value`, noted when its operations are traced, which may be later."""
        pointwise = getattr(getattr(value, "data", None), "data", None)
        if not isinstance(value, ir.TensorBox) or not isinstance(pointwise, ir.Pointwise):
            return value

        def inner_fn(index: Any) -> Any:
            with notes.at(number):
                return pointwise.inner_fn(index)

        return ir.TensorBox.create(replace(pointwise, inner_fn=inner_fn))

    def noting_node(self: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = create_node(self, *args, **kwargs)
        node.meta["flex_inductor_note"] = notes.current
        return node

    def noting_line(self: Any, buffer: Any, *args: Any, **kwargs: Any) -> Any:
        statements = getattr(buffer, "statements", None)  # of our printer for Triton
        lines = buffer._lines if statements is None else statements
        before = len(lines)
        variable = generate(self, buffer, *args, **kwargs)
        number = notes.current
        if number is None:
            node = getattr(V.interpreter, "current_node", None)
            number = None if node is None else node.meta.get("flex_inductor_note")
        if number is None or len(lines) == before:
            return variable
        note = f"  {'//' if self.suffix == ';' else '#'} @{number}"
        if statements is not None:
            made = statements[str(variable)]
            statements[made.name] = made._replace(text=made.text + note)
        elif isinstance(lines[-1], str):
            lines[-1] += note
        return variable

    with (
        mock.patch.object(PointwiseSubgraphLowering, "run_node", noting_results),
        mock.patch.object(LightTracer, "create_node", noting_node),
        mock.patch.object(CSE, "generate", noting_line),
    ):
        yield notes
