"""`command-line`: a section for each subcommand of flex-inductor, from its parsers."""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Iterator

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from flex_inductor.tools.cli import make_parser


class CommandLine(SphinxDirective):
    def run(self) -> list[nodes.Node]:
        return list(_sections(make_parser()))


def _sections(parser: argparse.ArgumentParser) -> Iterator[nodes.section]:
    for commands in (action for action in parser._actions if isinstance(action, argparse._SubParsersAction)):
        for (name, command), listed in zip(commands.choices.items(), commands._choices_actions, strict=True):
            section = nodes.section("", nodes.title("", name), ids=[nodes.make_id(command.prog)])
            section += nodes.paragraph("", "", *_words(command.description or listed.help or ""))
            usage = command.format_usage().removeprefix("usage: ").strip()
            section += nodes.literal_block("", usage, language="none")
            section += nodes.bullet_list("", *_options(command))
            section += list(_sections(command))
            yield section


def _options(parser: argparse.ArgumentParser) -> Iterator[nodes.list_item]:
    formatter = parser._get_formatter()
    for action in parser._actions:
        if not isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
            called = nodes.literal("", formatter._format_action_invocation(action))
            words = _words(f": {formatter._expand_help(action)}") if action.help else []
            yield nodes.list_item("", nodes.paragraph("", "", called, *words))


def _words(text: str) -> list[nodes.Node]:
    """What is in backticks, and options, are code."""
    parts = re.split(r"`([^`]+)`|(--[a-z][a-z-]+)", text)
    kinds = itertools.cycle((nodes.Text, _code, _code))
    return [kind(part) for part, kind in zip(parts, kinds, strict=False) if part]


def _code(text: str) -> nodes.literal:
    return nodes.literal("", text)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("command-line", CommandLine)
    return {"parallel_read_safe": True}
