"""`flex-inductor mask`: one of the library's masks as text, numbers or a picture."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from flex_inductor.masks import library
from flex_inductor.masks.draw import draw_mask
from flex_inductor.masks.library.blockmask import create_block_mask

from .options import at_least_one, count, pairs, to_write
from .users_code import Refused

_NAMES = "causal sliding_window prefix_lm document dilated_window global_local block_diffusion neighborhood"
_NAMES += " shared_prefix tree ragged"
CONSTRUCTORS = {name: getattr(library, name) for name in _NAMES.split()}


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "mask",
        help="draw one of the library's masks",
        description="Draws one of the library's masks. Names: " + ", ".join(CONSTRUCTORS) + ".",
        epilog="Example: flex-inductor mask sliding_window size=1024 --out window.svg --zoom 9 8",
    )
    add = parser.add_argument
    add("name", choices=CONSTRUCTORS, metavar="name", help="see above")
    add("options", nargs="*", metavar="key=value", help="the constructor's; lists with commas")
    add("--length", **count(4096, "queries and keys"))
    add("--keys", type=at_least_one, help="keys, where they are not as many as the queries")
    add("--block", type=int, nargs="+", default=[128], help="one or two sizes (default 128)")
    add("--out", type=to_write, help="a .png or .svg file; without it the mask is printed as text")
    add("--zoom", type=int, nargs=2, metavar=("ROW", "COLUMN"), help="show a tile's tokens")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.zoom and arguments.out is None:
        raise Refused(
            "--zoom: expected --out with it, the file of the drawing. Give it, or leave --zoom out."
        )
    mask_mod = construct(arguments.name, arguments.options)
    block = arguments.block[0] if len(arguments.block) == 1 else tuple(arguments.block)
    keys = arguments.length if arguments.keys is None else arguments.keys
    # What is drawn is the first batch and head.
    schedule = create_block_mask(mask_mod, 1, 1, arguments.length, keys, "cpu", block, compact=True)
    if arguments.out is None:
        print(schedule)
    else:
        draw_mask(schedule, arguments.out, zoom=tuple(arguments.zoom) if arguments.zoom else None)
        print(f"{schedule!r}\nwritten to {arguments.out}")
    return 0


def construct(name: str, options: list[str]) -> Callable:
    """The named mask with its options, which are numbers, lists of numbers, true or false."""
    constructor = CONSTRUCTORS[name]
    parameters = inspect.signature(constructor).parameters
    readers = {key: partial(_value, name, key) for key in parameters}
    if options and not parameters:
        raise Refused(f"{name}: takes no options, got {' '.join(options)}. Leave them out.")
    given = pairs(name, options, readers, f"key=value with a key of {', '.join(parameters)}")
    missing = [k for k, p in parameters.items() if p.default is p.empty and k not in given]
    if missing:
        raise Refused(f"{name}: needs {' '.join(f'{k}=VALUE' for k in missing)}.")
    if name == "document" and "lengths" not in given:
        given = {k: torch.as_tensor(v) if isinstance(v, list) else v for k, v in given.items()}
    if name == "ragged":
        given = {k: torch.tensor(v).reshape(-1) for k, v in given.items()}
    return constructor(**given)


def _value(name: str, key: str, text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise Refused(
            f"{name}: {key}: expected an integer, integers with commas, true or false; got {text!r}."
        ) from None
    return numbers if "," in text else numbers[0]
