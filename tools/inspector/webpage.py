"""The report as one HTML file: no network, light and dark, from a phone's width up."""

from __future__ import annotations

import functools
from typing import Any

import jinja2
from markupsafe import Markup
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import CppLexer, PythonLexer

from flex_inductor.lowerings.decision import config_text

from .page import cost_text, same_as, uses
from .replay import templates

LIGHT, DARK = "friendly", "github-dark"


def webpage(report: Any) -> str:
    users: dict[Any, list[int]] = {}
    for call in report.calls:
        for kernel in call.kernels:
            users.setdefault(kernel, []).append(call.number)
    return _template().render(
        report=report,
        users=users,
        places={kernel: f"kernel-{i}" for i, kernel in enumerate(report.kernels)},
        earlier={call.number: same_as(report.calls, call) for call in report.calls},
        styles={scheme: _style(style) for scheme, style in (("light", LIGHT), ("dark", DARK))},
    )


@functools.cache
def _template() -> jinja2.Template:
    environment = templates(autoescape=True)
    environment.filters |= {
        "python": functools.partial(_coloured, PythonLexer(stripnl=False)),
        "cpp": functools.partial(_coloured, CppLexer(stripnl=False)),
        "config": config_text,
        "cost": cost_text,
        "uses": uses,
    }
    return environment.get_template("webpage.html.jinja")


def _coloured(lexer: Any, source: str) -> Markup:
    """`source` in spans, escaped."""
    return Markup(highlight(source, lexer, HtmlFormatter(nowrap=True)))


def _style(name: str) -> Markup:
    formatter = HtmlFormatter(style=name, nobackground=True)
    return Markup(formatter.get_style_defs("pre"))
