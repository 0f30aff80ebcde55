"""What tuning times, in two steps: first tiles with every number of stages, then all axes on the fastest tile.

All that fits by the estimates is reached, and each step has an end: MOST configs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from .configs import COALESCED, LAST, STAGED, VARIANTS, Config, Cost, Device, Shape, misfit

MOST = 32  # configs that a step times; a config takes some seconds to compile

ROUGH = 1.3  # as far off as estimates of registers were found to be: the assembler often finds a way

_STAGES = {"amd": (1, 2), "interpreter": (1,)}

T = TypeVar("T")


def tiles(
    fitting: Sequence[Config], rejected: Sequence[Config], cost: Cost, device: Device, shape: Shape
) -> list[Config]:
    """The first step, best guess first: `fitting`, then their tiles and those `rejected` for registers, with other
    stages and with 4 or 8 warps."""
    wanted = [config for config in [*fitting, *rejected] if config not in LAST] or fitting
    stages = _STAGES.get(device.family, (3, 2, 4, 1))
    others = [c._replace(stages=n) for c in wanted for n in stages]
    others += [c._replace(warps=4 if c.warps == 8 else 8) for c in others]
    fit = [config for config in others if misfit(config, cost, device, shape, ROUGH) is None]
    return [*dict.fromkeys([*fitting, *fit])][:MOST]


def with_axes(
    kind: str, plain: Sequence[Config], cost: Cost, device: Device, shape: Shape
) -> Iterator[Config]:
    """The second step, for every tile of the first one: all combinations of axes that fit."""
    choices = [[(), *VARIANTS.get(kind, ())]]
    choices += [
        [(), (axis,)] for axis, has in ((STAGED, shape.score_loads), (COALESCED, shape.score_adds)) if has
    ]
    for config in plain:
        for axes in itertools.product(*choices):
            turned = {axis: 1 - getattr(config, axis) for axis in itertools.chain(*axes)}
            if turned and misfit(config._replace(**turned), cost, device, shape, ROUGH) is None:
                yield config._replace(**turned)


def on_the_fastest(later: Sequence[T], fastest: Any, sizes: Callable[[Any], Config]) -> list[T]:
    """Of the second step what has the tile of the config that won the first; those with its stages first."""
    won = sizes(fastest)
    found = [config for config in later if sizes(config)[:3] == won[:3]]
    return sorted(found, key=lambda config: sizes(config).stages != won.stages)[:MOST]
