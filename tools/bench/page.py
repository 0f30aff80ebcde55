"""`flex-inductor bench`: one web page with what the kinds of measurement found, drawn.

Each kind runs in a process of its own, one after another, and leaves its results in a folder. A kind whose results are
there is not measured again, so a page can be made of results from several days: delete a file to have it measured
anew.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from flex_inductor.masks.draw import load_matplotlib

from ..options import to_write
from .harness import Result, Spread

HELP = "measure; without a KIND: all on CPUs, on one page"


def add_options(parser: argparse.ArgumentParser, kinds: list[str]) -> None:
    parser.add_argument(
        "--out", type=to_write, default="bench.html", metavar="FILE", help="the page (bench.html)"
    )
    parser.add_argument(
        "--results",
        default="bench_results",
        metavar="FOLDER",
        help="results, kept (bench_results)",
    )
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds, metavar="KIND", help="not all")


def run(kinds: dict[str, Any], arguments: argparse.Namespace) -> int:
    load_matplotlib()  # says what to install before anything is measured
    folder = Path(arguments.results)
    folder.mkdir(parents=True, exist_ok=True)
    sections = []
    for name in arguments.kinds:
        file = folder / f"{name}.json"
        if not file.exists():
            print(f"== {name}", flush=True)
            partial_file = file.with_suffix(".part")
            command = [sys.executable, "-W", "ignore", "-m", "flex_inductor.tools.cli", "bench", name]
            if subprocess.run([*command, "--json", str(partial_file)]).returncode:
                print(f"{name} failed: it is not on the page", file=sys.stderr)
                continue
            partial_file.rename(file)
        sections.append(section(name, kinds[name], json.loads(file.read_text())))
    Path(arguments.out).write_text(rendered(sections))
    print(f"written: {arguments.out}")
    return 0 if len(sections) == len(arguments.kinds) else 1


def section(name: str, kind: Any, found: dict[str, Any]) -> dict[str, Any]:
    """What the page says of one kind."""
    results = [*map(read, found["results"])]
    first, *rest = kind.__doc__.strip().split("\n\n")
    return {
        "name": name,
        "title": first.partition(": ")[2].strip().replace("\n", " "),
        "text": " ".join(rest[0].split()) if rest else "",
        "headline": kind.headline(results) if hasattr(kind, "headline") else "",
        "picture": picture(kind, results, found["options"]) if hasattr(kind, "plot") else "",
        "columns": ["case", *kind.COLUMNS],
        "rows": [[r.case, *(str(cell) for cell in r.cells)] for r in results],
        "machine": ", ".join(found["machine"].values()),
        "date": found.get("date", ""),
    }


def read(result: dict[str, Any]) -> Result:
    """A result of a file of `--json`."""

    def spread(value: Any) -> Any:
        return Spread(**value) if isinstance(value, dict) else value

    facts = {name: spread(value) for name, value in result["facts"].items()}
    return Result(result["case"], result["side"], spread(result["ms"]), result["note"], facts)


def picture(kind: Any, results: list[Result], options: dict[str, Any]) -> str:
    """The plot as SVG with text, whose black is the page's colour."""
    matplotlib = load_matplotlib()
    figure = matplotlib.figure.Figure(layout="tight")
    axis = figure.subplots()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        kind.plot(axis, results, argparse.Namespace(**options))
        axis.legend(frameon=False)
        to = io.StringIO()
        figure.savefig(to, format="svg", transparent=True)
    return to.getvalue()[to.getvalue().index("<svg") :].replace("#000000", "currentColor")


def rendered(sections: list[dict[str, Any]]) -> str:
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template("page.html.jinja").render(sections=sections)
