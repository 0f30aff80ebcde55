"""`from-source`: functions and classes of a module that cannot be imported here, from its text."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from textwrap import indent

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.ext.napoleon import GoogleDocstring
from sphinx.util.docutils import SphinxDirective


class FromSource(SphinxDirective):
    """The argument is a module; its `__all__` says what is shown."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        module = self.arguments[0]
        spec = importlib.util.find_spec(module)
        assert spec is not None and spec.origin is not None
        self.env.note_dependency(spec.origin)
        body = ast.parse(Path(spec.origin).read_text()).body
        (names,) = (
            ast.literal_eval(n.value)
            for n in body
            if isinstance(n, ast.Assign) and "__all__" in ast.unparse(n)
        )
        parts = [part for part in body if getattr(part, "name", None) in names]
        return self.parse_text_to_nodes("\n".join(self._described(module, part) for part in parts))

    def _described(self, owner: str, node: ast.stmt, kind: str = "function") -> str:
        assert isinstance(node, ast.FunctionDef | ast.ClassDef)
        name, is_class = f"{owner}.{node.name}", isinstance(node, ast.ClassDef)
        text = str(GoogleDocstring(ast.get_docstring(node) or "", self.config))
        if is_class:
            methods = (child for child in node.body if isinstance(child, ast.FunctionDef))
            public = (child for child in methods if not child.name.startswith("_"))
            text += "\n\n" + "\n".join(self._described(name, child, "method") for child in public)
            return f".. py:class:: {name}(config)\n\n{indent(text, '   ')}\n"
        arguments = ast.parse(ast.unparse(node)).body[0].args  # a copy, without types
        every = [
            *arguments.posonlyargs,
            *arguments.args,
            *arguments.kwonlyargs,
            arguments.vararg,
            arguments.kwarg,
        ]
        for argument in filter(None, every):
            argument.annotation = None
        shown = ast.unparse(arguments).removeprefix("self, ")
        return f".. py:{kind}:: {name}({shown})\n\n{indent(text, '   ')}\n"


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("from-source", FromSource)
    return {"parallel_read_safe": True}
