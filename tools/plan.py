"""`flex-inductor plan`: how a sequence is best shared out over ranks, by a model."""

from __future__ import annotations

import argparse
import inspect as signatures
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .options import at_least_one, to_write
from .users_code import Refused, found, running

if TYPE_CHECKING:
    from flex_inductor.distributed.cost import CostModel, Estimate, MethodChoice
    from flex_inductor.distributed.work import TileWork

LENGTH = 131072
LISTED = 16  # ranks that are printed one by one
MOST_RANKS = 4096  # a ring is modelled by what each rank has to do with each other


class Row(NamedTuple):
    balance: str
    made: Estimate


class Planned(NamedTuple):
    """What the command shows."""

    masks: str
    work: TileWork
    ranks: int
    model: CostModel
    rows: list[Row]  # every method under every balance
    refused: dict[str, str]  # methods that cannot run, and why
    balance: str  # of those rows that are chosen
    owner: tuple[int, ...]
    choice: MethodChoice


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="share a sequence out over ranks: methods and balancers side by side, by a model",
        description=(
            "Shows what each method and balancer of context parallelism would take for a mask: one of those that "
            "`flex-inductor mask` names, documents (log-normal; mean=16384 sigma=1 seed=0), none, or "
            "path/to/script.py:function, a mask_mod or a function that returns a mask or a dict of masks. "
            "It is a model: nothing is measured."
        ),
        epilog="Example: flex-inductor plan documents mean=16384 --length 1048576 --ranks 64 --out plan.svg",
    )
    parser.add_argument("mask", help="see above")
    parser.add_argument("options", nargs="*", metavar="key=value", help="the mask's; lists with commas")
    parser.add_argument(
        "--length", type=at_least_one, help=f"of the whole sequence (default {LENGTH}, or the mask's own)"
    )
    parser.add_argument("--ranks", type=at_least_one, default=8, help="(default %(default)s)")
    parser.add_argument(
        "--tile", type=at_least_one, help="tokens that stay together (default 128, or the mask's blocks)"
    )
    parser.add_argument(
        "--weight",
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        help="of a dict's mask, such as how many layers use it (default 1)",
    )
    model = parser.add_argument_group("the model")
    for name, default in (("heads", 128), ("kv-heads", 8), ("head-dim", 128), ("batch", 1)):
        model.add_argument(f"--{name}", type=at_least_one, default=default, help=f"(default {default})")
    for name, rate, what in (("tflops", 550.0, "of"), ("gigabytes", 45.0, "a second, each way, of")):
        text = f"{what} a rank (default {rate:g})"
        model.add_argument(f"--{name}", type=_above_zero, default=rate, help=text)
    model.add_argument(
        "--memory", type=_above_zero, metavar="GIB", help="the most that a call may hold; any by default"
    )
    parser.add_argument(
        "--out",
        type=to_write,
        help="a .png or .svg file: the mask coloured by rank, work and bytes of each rank",
    )
    parser.add_argument("--json", type=to_write, metavar="FILE", help="write everything as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.out is not None and Path(arguments.out).suffix not in (".png", ".svg"):
        raise Refused(f"--out: expected a name ending in .png or .svg, got {arguments.out!r}")
    planned = plan(arguments)
    print(page(planned))
    if arguments.out is not None:
        from .plan_picture import draw

        title = f"{planned.masks}: {planned.ranks} ranks, {planned.balance}"
        draw(title, planned.work, planned.owner, per_rank(planned), arguments.out)
    if arguments.json is not None:
        Path(arguments.json).write_text(json.dumps(to_dict(planned), indent=1) + "\n")
    for path in filter(None, (arguments.out, arguments.json)):
        print(f"written to {path}")
    return 0


def plan(arguments: argparse.Namespace) -> Planned:
    from flex_inductor.distributed.balance import BALANCERS, best, owners
    from flex_inductor.distributed.cost import METHODS, CostModel, choose_method, estimate, groups, refusal
    from flex_inductor.distributed.work import TileWork

    model = CostModel(
        heads=arguments.heads,
        kv_heads=arguments.kv_heads,
        head_dim=arguments.head_dim,
        batch=arguments.batch,
        flops=arguments.tflops * 1e12,
        bandwidth=arguments.gigabytes * 1e9,
        memory=None if arguments.memory is None else arguments.memory * 2**30,
    )
    if arguments.ranks > MOST_RANKS:
        raise Refused(f"--ranks: expected at most {MOST_RANKS}, got {arguments.ranks}")
    if model.heads % model.kv_heads:
        raise Refused(f"--heads: expected a multiple of --kv-heads, {model.kv_heads}, got {model.heads}")
    name, masks = _masks(arguments.mask, arguments.options, arguments.length or LENGTH)
    every = list(masks.values()) if isinstance(masks, dict) else [masks]
    length = arguments.length
    if length is None and any(mask is None or callable(mask) for mask in every):
        length = LENGTH
    work = TileWork.of(
        masks,
        length,
        weights=_weights(arguments.weight, masks),
        tile=arguments.tile,
        batch=arguments.batch,
        heads=arguments.heads,
    )
    ranks = arguments.ranks
    rows: list[Row] = []
    refused: dict[str, str] = {}
    for method in METHODS:
        reason = refusal(method, ranks, model)
        if reason is not None:
            refused[method] = reason
            continue
        sharing = groups(method, ranks, model)
        for other in [b for b in BALANCERS if b != "auto"] if method != "ulysses" else ["any"]:
            held = owners(other, work, sharing) if method != "ulysses" else ()
            rows.append(Row(other, estimate(work, held, ranks, method, model)))
    choice = choose_method(work, best(work, ranks, model)[1], ranks, model)
    balance, owner = best(work, ranks, model, choice.chosen)
    if choice.chosen == "ulysses":
        balance = "any"
    return Planned(name, work, ranks, model, rows, refused, balance, tuple(owner), choice)


def _masks(name: str, options: list[str], length: int) -> tuple[str, Any]:
    """What the masks are called, and a mask or a dict of them."""
    from flex_inductor.distributed.cost import log_normal_documents
    from flex_inductor.masks.library import document

    from .mask import CONSTRUCTORS, construct

    text = " ".join([name, *options])
    if ":" in name:
        if options:
            raise Refused(f"{name}: takes no options, got {' '.join(options)}")
        return text, _users_masks(name)
    if name in CONSTRUCTORS:
        return text, construct(name, options)
    if name == "none" and not options:
        return text, None
    if name == "documents":
        return text, document(lengths=log_normal_documents(length, **_numbers(options)))
    known = ", ".join([*CONSTRUCTORS, "documents", "none"])
    raise Refused(f"mask: expected one of {known}, or path/to/script.py:function; got {text!r}")


def _numbers(options: list[str]) -> dict[str, Any]:
    types: dict[str, Callable] = {"mean": float, "sigma": float, "seed": int}
    given = {}
    for option in options:
        key, _, text = option.partition("=")
        try:
            given[key] = types[key](text)
        except (KeyError, ValueError):
            raise Refused(
                f"documents: expected mean=, sigma= or seed= and a number, got {option!r}"
            ) from None
    if given.get("mean", 1) < 1 or given.get("sigma", 0) < 0:
        raise Refused(
            f"documents: expected a mean of at least 1 and no sigma below 0, got {' '.join(options)}"
        )
    return given


def _users_masks(where: str) -> Any:
    function = found(where)
    needed = [p for p in signatures.signature(function).parameters.values() if p.default is p.empty]
    if len(needed) == 4:
        return function  # a mask_mod
    if needed:
        raise Refused(
            f"{where}: expected a mask_mod of (b, h, q_idx, kv_idx), or a function of nothing that returns masks; it "
            f"takes {', '.join(p.name for p in needed)}"
        )
    with running(where):
        return function()


def _weights(given: list[str], masks: Any) -> dict[str, float] | None:
    if not given:
        return None
    weights = dict.fromkeys(masks, 1.0) if isinstance(masks, dict) else {}
    for option in given:
        name, _, text = option.partition("=")
        try:
            if name not in weights:
                raise ValueError
            weights[name] = float(text)
        except ValueError:
            known = ", ".join(weights) or "none, as there is one mask without a name"
            raise Refused(f"--weight: expected NAME=NUMBER with a name of: {known}; got {option!r}") from None
    return weights


def _above_zero(text: str) -> float:
    """The type of an argument that is a rate or an amount."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}.")
    return number


def page(planned: Planned) -> str:
    from flex_inductor.distributed.cost import amount

    work, model, choice = planned.work, planned.model, planned.choice
    lines = [
        f"{planned.masks}: {work.length} tokens in {work.tiles} tiles of {work.tile}, {planned.ranks} ranks; "
        f"a query's tile reads {float(work.cost.mean()) / sum(m.weight for m in work.masks):.1f} tiles",
        f"A model, not a measurement: {model.heads} heads, {model.kv_heads} of keys, dimension {model.head_dim}, batch "
        f"{model.batch}, bf16; {model.flops / 1e12:g} TFLOP/s and {model.bandwidth / 1e9:g} GB/s a rank.",
        "",
        f"{'':21}{'':16}{'work':>9} {'bytes of the busiest rank':>26} {'':>9}  {'share of perfect scaling':>25}",
        f"{'method':21}{'balance':16}{'max/mean':>9} {'forward':>13}{'backward':>13} {'memory':>9}  "
        f"{'forward':>13}{'backward':>12}",
    ]
    for balance, made in planned.rows:
        mark = "*" if (made.method, balance) == (choice.chosen, planned.balance) else ""
        lines.append(
            f"{made.method + mark:21}{balance:16}{made.imbalance:9.3f} {amount(made.forward.bytes):>13}"
            f"{amount(made.backward.bytes):>13} {amount(made.memory):>9}  {_share(made.forward):>13}"
            f"{_share(made.backward):>12}"
        )
    lines += [f"{method:21}{reason}" for method, reason in planned.refused.items()]
    lines += [
        "",
        "Two shares: exchanges do not overlap with attention at all, or as far as they fit. * is chosen by "
        'method="auto" and balance="auto":',
        f"{choice.chosen}, {planned.balance}: {choice.why}",
        "",
        *_ranks(planned),
    ]
    return "\n".join(lines)


def _share(phase: Any) -> str:
    return f"{100 * phase.efficiency_exposed:.0f}-{100 * phase.efficiency:.0f}%"


def _ranks(planned: Planned) -> list[str]:
    """The work of each rank with the chosen balance, and what cast moves; the ends of many."""
    from flex_inductor.distributed.cost import amount

    facts = per_rank(planned)
    lines = [f"{'rank':8}{'tokens':>9}{'tiles of work':>15}{'cast: gets':>13}{'sends':>12}"]

    def line(name: str, values: list[float]) -> str:
        tokens, done, received, sent = values
        return f"{name:8}{tokens:9.0f}{done:15.0f}{amount(received):>13}{amount(sent):>12}"

    if planned.ranks <= LISTED:
        return lines + [
            line(str(rank), list(values)) for rank, values in enumerate(zip(*facts.values(), strict=True))
        ]
    for name, function in (("least", min), ("mean", lambda x: sum(x) / len(x)), ("most", max)):
        lines.append(line(name, [function(values) for values in facts.values()]))
    return lines


def per_rank(planned: Planned) -> dict[str, list[float]]:
    """Tokens, work in tiles, and the bytes that cast receives and sends, of each rank with the chosen balance."""
    from flex_inductor.distributed.layout import Layout

    work = planned.work
    loads = work.loads(planned.owner, planned.ranks)
    size = planned.model.bytes_of_tile(work.tile)
    return {
        "tokens": [float(n) for n in Layout(work.length, work.tile, planned.ranks, planned.owner).lengths],
        "work": (loads.weights @ loads.work).tolist(),
        "received": (loads.weights @ loads.received * size).tolist(),
        "sent": (loads.weights @ loads.sent * size).tolist(),
    }


def to_dict(planned: Planned) -> dict[str, Any]:
    def row(balance: str, made: Any) -> dict[str, Any]:
        found = {name: getattr(made, name) for name in ("method", "imbalance", "memory")}
        for name in ("forward", "backward"):
            phase = getattr(made, name)
            shares = {of: getattr(phase, of) for of in ("efficiency", "efficiency_exposed")}
            found[name] = {**phase._asdict(), **shares}
        return {**found, "balance": balance}

    return {
        "is": "a model, not a measurement",
        **{name: getattr(planned, name) for name in ("masks", "ranks", "refused", "balance", "owner")},
        **{name: getattr(planned.work, name) for name in ("length", "tile")},
        "model": asdict(planned.model),
        "plans": [row(*each) for each in planned.rows],
        "method": planned.choice._asdict(),
        "per_rank": per_rank(planned),
    }
