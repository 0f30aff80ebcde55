"""The blocks that a kernel goes through, as its template writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from flex_inductor.op.schedule import Visits

from .bounds import Ends


class Walk(NamedTuple):
    """One pass over blocks: those that the schedule names, in its form, or all without one."""

    title: str
    masked: bool  # whether mask_mod decides in these blocks
    form: str | None = None
    counts: Any = None  # or the offsets into runs
    blocks: Any = None  # indices, or runs, or what these are called
    whole: bool = False  # whether it goes through a map's full tiles, which have all their rows
    # Of bounds: the tensors that are read first, and what is computed from them, by name.
    numbers: Mapping[str, Any] | None = None
    lines: Sequence[tuple[str, str]] = ()
    ends: Sequence[str] = ()  # and where runs begin and end, in turn


def walks(
    form: str | None,
    visits: Visits | None,
    side: str,
    masked: bool,
    argument: Callable[[str, Any], Any],
    mapped: bool = False,
) -> list[Walk]:
    """Passes over what one side of a schedule visits: partial blocks, and full ones if there are.

    `argument(field, tensor)` makes the tensor an argument of the kernel; `field` is its name in Visits.
    """
    if visits is None:
        return [Walk(f"All {side}.", masked)]
    title = f"Blocks of {side} where mask_mod decides." if masked else f"Listed blocks of {side}."
    fields = {name: argument(name, tensor) for name, tensor in visits._asdict().items() if tensor is not None}
    found = [Walk(title, masked, form, fields["partial_counts"], fields["partial_blocks"])]
    if visits.full_counts is not None:
        counts, blocks = fields["full_counts"], fields["full_blocks"]
        found.append(Walk(f"Full blocks of {side}.", False, form, counts, blocks, whole=mapped))
    return found


def walks_in(ends: Ends, side: str, masked: bool, mapped: bool = False) -> list[Walk]:
    """The same where bounds say what a line visits. The second pass knows what the first has computed."""
    title = f"Blocks of {side} where mask_mod decides." if masked else f"Blocks of {side} that are not full."
    return [
        Walk(title, masked, "bounds", None, "partial_blocks", False, *ends[:3]),
        Walk(f"Full blocks of {side}.", False, "bounds", None, "full_blocks", mapped, {}, ends=ends.full),
    ]
