"""What tuning times: the table's tiles with every number of stages, the axes on them, other warps."""

import pytest

from flex_inductor.lowerings.triton.configs import LAST, Config, Shape, axes_of, candidates, misfit
from flex_inductor.lowerings.triton.device import known_device
from flex_inductor.lowerings.triton.fitting import MOST, to_time
from flex_inductor.lowerings.triton.tables import TABLES


def timed(kind, arch, shape):
    table, cost = TABLES[kind]
    device = known_device(arch)
    fitting, rejected = candidates(table, cost, device, shape)
    return to_time(kind, fitting, [config for config, _ in rejected], cost, device, shape)


def test_tuning_reaches_the_largest_tile_with_copies_by_descriptor():
    found = timed("forward", "sm_90", Shape(128, 128, 2))
    assert found[0] == Config(64, 64, 4, 3, descriptors=1)
    assert {Config(128, 128, 8, 3), Config(128, 128, 8, 3, descriptors=1)} <= {*found}


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90", "sm_100", "gfx942"])
def test_every_tile_is_tried_with_every_number_of_stages_that_fits(arch):
    device = known_device(arch)
    for kind, (table, cost) in TABLES.items():
        for head_dim in (64, 128, 256):
            shape = Shape(head_dim, head_dim, 2, rows=16 if kind == "decode" else None)
            rows = [c for c in candidates(table, cost, device, shape)[0] if c not in LAST]
            found = timed(kind, arch, shape)
            assert len({*found}) == len(found) <= MOST
            for config in rows:
                for stages in (1, 2) if arch == "gfx942" else (1, 2, 3, 4):
                    other = config._replace(stages=stages)
                    assert other in found or misfit(other, cost, device, shape), (kind, head_dim, other)


def test_tiles_that_the_estimate_of_registers_just_refuses_are_tried():
    """Compiled for causal masks they take 255 and 243, with no local memory."""
    shape = Shape(128, 128, 2)
    found = timed("backward_dq", "sm_80", shape)
    for tried in (Config(128, 64, 8, 3), Config(64, 64, 4, 3)):
        assert tried in found and "registers" in misfit(
            tried, TABLES["backward_dq"][1], known_device("sm_80"), shape
        )


@pytest.mark.parametrize(
    "kind, arch, changes, axes",
    [
        ("forward", "sm_80", {}, []),
        ("forward", "sm_90", {}, ["descriptors"]),
        ("forward", "sm_90", {"aligned": False}, []),
        ("forward", "sm_90", {"mapped": True}, []),
        ("backward_dkdv", "sm_90", {}, []),
        ("backward_dq", "sm_90", {"score_adds": 1, "score_loads": 1}, ["coalesced"]),
        ("backward_dq", "gfx942", {"score_adds": 1}, []),
    ],
)
def test_axes_that_are_tried(kind, arch, changes, axes):
    assert axes_of(timed(kind, arch, Shape(128, 128, 2)._replace(**changes))) == axes


def test_additions_in_place_are_tried_where_they_are_not_the_first_choice():
    first, *others = timed("backward_dq", "sm_100", Shape(128, 128, 2, score_loads=1, score_adds=1))
    assert first.coalesced and first._replace(coalesced=0) in others
