"""`flex-inductor check`: the laws of attention, on somebody's function or model."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from typing import Any

from .options import file
from .users_code import Refused, add_inputs, called, running


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "check",
        help="hold a function or a model to the laws of attention",
        description=(
            "Holds a function that calls flex_attention, or a model of transformers, to the laws of attention, on the "
            "CPU. Without --input the function takes nothing and returns (fn, args), or (model, batch); with --input "
            "it is itself called, with random numbers of those shapes."
        ),
        epilog=(
            "Exit status: 0 if all laws hold that apply, 1 if one is broken, 2 if one could not run. "
            "Example: flex-inductor check train.py:attend --input q=2x4x96x32 --input k=... --documents 40,56"
        ),
    )
    add = parser.add_argument
    add("function", help="path/to/script.py:function or module:function")
    add_inputs(parser, "q=2x4x96x32", backward=False)
    add("--documents", type=_lengths, metavar="N,N,...", help="how many tokens each packed document has")
    add("--law", action="append", metavar="NAME", help="only this law; may be given again (default: all)")
    add("--json", **file("write the report as JSON"))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    import torch
    from rich.console import Console

    from flex_inductor.laws import Report, check, check_model

    torch.manual_seed(0)
    fn, args, kwargs = called(arguments.function, arguments.input)
    if arguments.input:
        kwargs = {name: _filled(tensor) for name, tensor in kwargs.items()}
    # What torch and the user's code print on the way is hidden; an error that ends the check is still shown.
    with running(arguments.function), contextlib.redirect_stderr(io.StringIO()):
        if _is_model(fn):
            if arguments.documents:
                raise Refused(
                    "--documents: a model's batch says itself where documents begin: leave them out"
                )
            report: Report = check_model(fn, kwargs, laws=arguments.law)
        else:
            report = check(fn, kwargs or args, arguments.documents, laws=arguments.law)
    if arguments.json:
        report.to_json(arguments.json)
    if sys.stdout.isatty():
        report.show(Console(highlight=False))
    else:
        print(report)
    return 1 if report.failures else 2 if report.not_run else 0


def _is_model(fn: Any) -> bool:
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(fn, transformers.PreTrainedModel)


def _filled(tensor: Any) -> Any:
    """With random numbers, where it has numbers: laws say nothing of zeros."""
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().normal_().requires_grad_(tensor.requires_grad)


def _lengths(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"expected lengths such as 40,56, got {text!r}.")
    return [int(part) for part in parts]
