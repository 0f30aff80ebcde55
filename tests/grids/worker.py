"""A process that runs cases: a line of JSON in for each group, a line out for each case."""

from __future__ import annotations

import json
import sys
import warnings

from . import one
from .suite import Group
from .tables import SUITES


def main() -> None:
    warnings.simplefilter("ignore")
    one.settings()
    out, sys.stdout = sys.stdout, sys.stderr  # nothing else may write there
    for line in sys.stdin:
        name, number, cases = json.loads(line)
        suite = SUITES[name]
        group = Group(suite, number, suite.places(number))
        for case, (outcome, why) in zip(cases, one.outcomes(group, cases), strict=True):
            print(json.dumps([case, outcome, why]), file=out, flush=True)


if __name__ == "__main__":
    main()
