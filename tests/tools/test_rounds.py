"""How the benches take their times."""

import pytest

from flex_inductor.tools.rounds import Spread, alternate, over


def test_sides_take_turns_at_coming_first():
    taken = []
    times = alternate({side: lambda side=side: taken.append(side) or len(taken) for side in "abc"}, 3)
    assert "".join(taken) == "abccbaabc"
    assert times == {"a": [1, 6, 7], "b": [2, 5, 8], "c": [3, 4, 9]}


def test_a_slow_side_is_left_out_of_later_rounds():
    times = alternate({"quick": lambda: 1.0, "slow": lambda: 600.0}, 4, most_seconds=1)
    assert times == {"quick": [1.0] * 4, "slow": [600.0] * 2}


def test_half_of_the_values_lie_between():
    spread = Spread.of([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (spread.median, spread.low, spread.high) == (3, 2, 4)
    assert Spread.of([7.0]) == Spread(7, 7, 7)
    assert str(Spread(123.4, 0.01234, 99.95)) == "123 (0.0123 to 100)"


def test_over_ours_is_taken_round_by_round():
    """A machine that is slow for one round is slow for both sides."""
    assert over([2.0, 20.0, 4.0], [1.0, 10.0, 2.0]) == Spread(2, 2, 2)
    with pytest.raises(ValueError):
        over([1.0], [1.0, 2.0])
