"""The list of tests that take long."""

import re

from tests import long


def test_the_slowest_are_left_out_until_the_others_fit():
    times = {"a": 5.0, "b": 1.0, "c": 3.0, "d": 2.0}
    assert long.chosen(times, 3) == {"a", "c"}
    assert long.chosen(times, 11) == set()


def test_names_in_a_report(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuite><testcase classname="tests.test_long" name="test_one[a.b]" time="1.5"/>'
        '<testcase classname="tests.distributed.test_overlap.Overlap" name="test_ulysses" time="2"/></testsuite>'
    )
    assert long.times_in([report]) == {
        "tests/test_long.py::test_one[a.b]": 1.5,
        "tests/distributed/test_overlap.py::Overlap::test_ulysses": 2.0,
    }


def test_each_is_there():
    assert len(long.listed()) > 100
    for name in long.listed():
        file, *_, function = name.partition("[")[0].split("::")
        assert re.search(rf"def {function}\(", (long.ROOT / file).read_text()), name
