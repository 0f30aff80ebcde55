"""Each change of the mutants can still be made: its place is in the product, and its tests are there."""

from pathlib import Path

import pytest

from tests.mutants.changes import CHANGES

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.name)
def test_can_be_made(change):
    assert (ROOT / change.file).read_text().count(change.old) == 1
    paths, *_ = change.tests.split(" -k ")
    for path in paths.split():
        assert (ROOT / path.partition("::")[0]).is_file()
