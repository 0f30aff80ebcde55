"""`messages`: every error message in the sources, by folder and class."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import flex_inductor
from flex_inductor.errors import FlexError

SOURCES = Path(flex_inductor.__file__).parent


class Messages(SphinxDirective):
    """The argument is a folder of the package, "." for its own files; the messages of folders inside are with it."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        folder = SOURCES / self.arguments[0]
        files = folder.glob("*.py") if folder == SOURCES else folder.rglob("*.py")
        known = _classes(FlexError)
        found: dict[str, list[str]] = defaultdict(list)
        for file in sorted(files):
            self.env.note_dependency(str(file))
            for call in ast.walk(ast.parse(file.read_text())):
                kind = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
                if kind in known and (text := _text(call.args[0])):
                    found[kind].append(text)
        shown: list[nodes.Node] = []
        for kind, texts in sorted(found.items()):
            shown.append(nodes.paragraph("", "", nodes.strong("", kind)))
            shown.append(nodes.bullet_list("", *(nodes.list_item("", nodes.paragraph("", t)) for t in texts)))
        return shown


def _classes(kind: type) -> set[str]:
    return {kind.__name__}.union(*map(_classes, kind.__subclasses__()))


def _text(argument: ast.expr) -> str:
    """The message, with an ellipsis for what it puts in."""
    if isinstance(argument, ast.Constant):
        return str(argument.value)
    parts = argument.values if isinstance(argument, ast.JoinedStr) else []
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "\u2026" for part in parts)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("messages", Messages)
    return {"parallel_read_safe": True}
