"""A published test's parameters: axes, what it leaves out, and how its cases are numbered and grouped."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

Case = dict[str, Any]


def hashed(*words: Any) -> int:
    """The same number in every process."""
    return int.from_bytes(hashlib.blake2b("-".join(map(str, words)).encode(), digest_size=8).digest(), "big")


class Suite(NamedTuple):
    """One test. `axes` are its parameters; a key with a comma names several, whose values are tuples.

    `kernel` names the axes that need a kernel of their own: cases which share their values are one group.
    `drawn` are what the test loops over or draws itself, one value for each group. `fixed` are its constants.
    """

    name: str
    door: str
    axes: dict[str, tuple]
    kernel: tuple[str, ...]
    skips: Callable[[Case], bool] = lambda case: False
    drawn: Callable[[Case], dict[str, tuple]] = lambda case: {}
    fixed: Mapping[str, Any] = MappingProxyType({})

    def product(self) -> int:
        return math.prod(map(len, self.axes.values()))

    def cases_of_a_group(self) -> int:
        """How many it has at most."""
        return self.product() // math.prod(len(self.axes[name]) for name in self.kernel)

    def case(self, number: int) -> Case:
        """The case with this number, in the order of `axes`, the last changing fastest."""
        left, places = number, []
        for values in reversed(self.axes.values()):
            left, place = divmod(left, len(values))
            places.append(place)
        chosen = {
            name: values[place]
            for (name, values), place in zip(self.axes.items(), reversed(places), strict=True)
        }
        case = self.named(chosen)
        key = [chosen[name] for name in self.kernel]
        for name, values in self.drawn(case).items():
            case[name] = values[hashed(self.name, name, *key) % len(values)]
        return case

    def constants(self, case: Case) -> Case:
        """What all cases of its group share."""
        own = {name for axis in self.axes if axis not in self.kernel for name in axis.split(",")}
        return {name: value for name, value in case.items() if name not in own}

    def named(self, chosen: Case) -> Case:
        """Axes with several names taken apart, and the constants beside them."""
        case = dict(self.fixed)
        for name, value in chosen.items():
            if "," in name:
                case.update(zip(name.split(","), value, strict=True))
            else:
                case[name] = value
        return case

    def places(self, number: int) -> tuple[int, ...]:
        """Of the values of `kernel`, for the group with this number."""
        places = []
        for name in reversed(self.kernel):
            number, place = divmod(number, len(self.axes[name]))
            places.append(place)
        return tuple(reversed(places))

    def group_of(self, number: int) -> Group:
        """The group of the case with this number."""
        of_axes = {}
        for name, values in reversed(self.axes.items()):
            number, of_axes[name] = divmod(number, len(values))
        group = 0
        for name in self.kernel:
            group = group * len(self.axes[name]) + of_axes[name]
        return Group(self, group, self.places(group))

    def groups(self) -> Iterator[Group]:
        for number in range(math.prod(len(self.axes[name]) for name in self.kernel)):
            yield Group(self, number, self.places(number))


class Group(NamedTuple):
    """Cases of one suite that differ in their data alone."""

    suite: Suite
    number: int
    places: tuple[int, ...]  # of the values of the suite's `kernel`

    def cases(self) -> list[int]:
        """The numbers of its cases, in an order of no meaning that is always the same."""
        axes = self.suite.axes
        fixed = dict(zip(self.suite.kernel, self.places, strict=True))
        ranges = [[fixed[name]] if name in fixed else range(len(values)) for name, values in axes.items()]
        numbers = []
        for places in itertools.product(*ranges):
            chosen = {name: values[p] for (name, values), p in zip(axes.items(), places, strict=True)}
            if not self.suite.skips(self.suite.named(chosen)):
                number = 0
                for place, values in zip(places, axes.values(), strict=True):
                    number = number * len(values) + place
                numbers.append(number)
        random.Random(hashed(self.suite.name, self.number)).shuffle(numbers)
        return numbers
