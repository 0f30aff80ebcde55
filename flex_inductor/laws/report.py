"""What `flex_inductor.check` returns."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import FlexError
from . import errors

HOLDS, BROKEN, NOT_APPLICABLE, NOT_RUN = "holds", "broken", "not applicable", "could not run"
WIDTH = 120  # of a file
COLOURS = {HOLDS: "green", BROKEN: "bold red", NOT_APPLICABLE: "yellow", NOT_RUN: "bold magenta"}


class NotApplicable(Exception):
    """Raised by a law; its words say why."""


@dataclass(frozen=True)
class Result:
    """What became of one law.

    Args:
        law: its name.
        outcome: "holds", "broken", "not applicable" or "could not run".
        text: what was looked at, what is wrong, or why it was not judged.

    Example:
        >>> report = flex_inductor.check(lambda x: x, [torch.zeros(3)], laws=["gradients"])
        >>> report.results[0].outcome, report.results[0].law
        ('not applicable', 'gradients')
    """

    law: str
    outcome: str
    text: str


@dataclass(frozen=True)
class Report:
    """What `check` found: the laws in the order in which they were asked. `print(report)` is a page; see docs/check.md.

    Args:
        subject: the function or model.
        results: a Result for each law, or more where several things are wrong.

    Example:
        >>> def attend(query, key, value):
        ...     return flex_attention(query, key, value, mods.softcap(20.0))
        >>> inputs = [torch.randn(1, 2, 16, 8) for _ in range(3)]
        >>> report = flex_inductor.check(attend, inputs, laws=["shift", "batch"])
        >>> print(report)
        Laws of attend
        holds  shift  A constant added to all scores. 1 call of 1 kind.
        holds  batch  Entries alone, among others, and with others replaced.
        holds 2
        >>> report.ok, report.failures, report.not_run
        (True, [], [])
        >>> report.to_dict()["laws"][1]["outcome"]
        'holds'
    """

    subject: str
    results: Sequence[Result]

    @property
    def failures(self) -> list[Result]:
        """Laws that are broken, each with `.law` and `.text`."""
        return [result for result in self.results if result.outcome == BROKEN]

    @property
    def not_run(self) -> list[Result]:
        """Laws that raised an error."""
        return [result for result in self.results if result.outcome == NOT_RUN]

    @property
    def ok(self) -> bool:
        """Whether no law is broken and every one that applies has run."""
        return not self.failures and not self.not_run

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        self.show(Console(file=text, width=WIDTH, highlight=False))
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    def show(self, screen: Any) -> None:
        """Print the report in colours.

        Args:
            screen: a Console of rich.

        Example:
            >>> from rich.console import Console
            >>> report = flex_inductor.check(lambda x: 2 * x, [torch.ones(3)], laws=["shift"])
            >>> report.show(Console(width=100))
            Laws of <lambda>
            not applicable  shift  the function calls no flex_attention
            not applicable 1
        """
        from rich.table import Table
        from rich.text import Text

        screen.print(f"Laws of {self.subject}", markup=False)
        table = Table.grid(padding=(0, 2, 0, 0))
        for result in self.results:
            outcome = Text(result.outcome, style=COLOURS[result.outcome])
            table.add_row(outcome, Text(result.law, style="bold"), Text(result.text))
        screen.print(table)
        outcomes = list({result.law: result.outcome for result in self.results}.values())
        said = [f"{outcome} {outcomes.count(outcome)}" for outcome in COLOURS if outcome in outcomes]
        screen.print(Text(", ".join(said), style=COLOURS[HOLDS] if self.ok else COLOURS[BROKEN]))

    def to_dict(self) -> dict[str, Any]:
        """Give the report as what JSON can hold.

        Returns:
            dict: `subject`, `ok` and `laws`, each with `law`, `outcome` and `text`.
        """
        return {"subject": self.subject, "ok": self.ok, "laws": [asdict(result) for result in self.results]}

    def to_json(self, path: str | Path) -> None:
        """Write the report as JSON.

        Args:
            path: of the file.

        Example:
            >>> import json, pathlib, tempfile
            >>> report = flex_inductor.check(lambda x: 2 * x, [torch.ones(3)], laws=["shift"])
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = pathlib.Path(folder, "laws.json")
            ...     report.to_json(path)
            ...     sorted(json.loads(path.read_text()))
            ['laws', 'ok', 'subject']
        """
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")


class Note(str):
    """What a law could not judge, among the texts of what is wrong."""


# A law returns what it looked at and the texts of what is wrong.
Law = Callable[[], tuple[str, Sequence[str]]]


def judged(subject: str, laws: dict[str, Law], wanted: Iterable[str] | None) -> Report:
    """Run the laws that are wanted, all by default."""
    if isinstance(wanted, str):
        raise errors.law_without_list(wanted)
    asked = list(laws) if wanted is None else list(wanted)
    if unknown := [name for name in asked if name not in laws]:
        raise errors.unknown_law(unknown[0], list(laws))
    results: list[Result] = []
    for name in (name for name in laws if name in asked):
        try:
            looked_at, texts = laws[name]()
        except NotApplicable as error:
            results.append(Result(name, NOT_APPLICABLE, str(error)))
        except FlexError as error:
            results.append(Result(name, NOT_RUN, str(error)))
        except Exception as error:  # a law runs the user's code, which may raise anything
            results.append(Result(name, NOT_RUN, f"{type(error).__name__}: {error}"))
        else:
            wrong = [Result(name, BROKEN, text) for text in texts if not isinstance(text, Note)]
            notes = "".join(f" Not judged: {text}." for text in texts if isinstance(text, Note))
            results += wrong or [Result(name, HOLDS, f"{looked_at}{notes}")]
    return Report(subject, results)
