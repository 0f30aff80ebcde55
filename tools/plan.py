"""`flex-inductor plan`: how a sequence is best shared out over ranks, by a model."""

from __future__ import annotations

import argparse
import inspect as signatures
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .options import MOST, above_zero, at_least_one, count, file, pairs
from .users_code import Refused, found, running

if TYPE_CHECKING:
    from flex_inductor.distributed.cost import CostModel, Estimate, MethodChoice
    from flex_inductor.distributed.work import TileWork

LENGTH = 131072
LISTED = 16  # ranks that are printed one by one
MOST_RANKS = 4096  # a ring is modelled by what each rank has to do with each other
DESCRIPTION = (
    "Shows what each method and balancer of context parallelism would take for a mask: one of those that "
    "`flex-inductor mask` names, documents (log-normal; mean=16384 sigma=1 seed=0), none, or "
    "path/to/script.py:function, a mask_mod or a function that returns a mask or a dict of masks. "
    "It is a model: nothing is measured."
)


class Planned(NamedTuple):
    """What the command shows."""

    masks: str
    work: TileWork
    ranks: int
    model: CostModel
    rows: list[tuple[str, Estimate]]  # every method under every balance
    refused: dict[str, str]  # methods that cannot run, and why
    balance: str  # of those rows that are chosen
    owner: tuple[int, ...]
    choice: MethodChoice


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="share a sequence out over ranks: methods and balancers side by side, by a model",
        description=DESCRIPTION,
        epilog="Example: flex-inductor plan documents mean=16384 --length 1048576 --ranks 64 --out plan.svg",
    )
    add = parser.add_argument
    add("mask", help="see above")
    add("options", nargs="*", metavar="key=value", help="the mask's; lists with commas")
    add("--length", type=at_least_one, help=f"of the whole sequence (default {LENGTH}, or the mask's own)")
    add("--ranks", **count(8))
    add("--tile", type=at_least_one, help="tokens that stay together (default 128, or the mask's blocks)")
    weight = "of a dict's mask, such as how many layers use it (default 1)"
    add("--weight", action="append", default=[], metavar="NAME=NUMBER", help=weight)
    add("--out", **file("a .png or .svg file: the mask coloured by rank, work and bytes of each rank"))
    add("--json", **file("write everything as JSON"))
    add = parser.add_argument_group("the model").add_argument
    for name, default in (("heads", 128), ("kv-heads", 8), ("head-dim", 128), ("batch", 1)):
        add(f"--{name}", **count(default))
    for name, rate, what in (("tflops", 550.0, "of"), ("gigabytes", 45.0, "a second, each way, of")):
        add(f"--{name}", type=above_zero, default=rate, help=f"{what} a rank (default {rate:g})")
    add("--memory", type=above_zero, metavar="GIB", help="the most that a call may hold; any by default")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.out is not None and Path(arguments.out).suffix not in (".png", ".svg"):
        raise Refused(f"--out: expected a name ending in .png or .svg, got {arguments.out!r}")
    planned = plan(arguments)
    facts = per_rank(planned)
    print(page(planned, facts))
    if arguments.out is not None:
        from .plan_picture import draw

        title = f"{planned.masks}: {planned.ranks} ranks, {planned.balance}"
        draw(title, planned.work, planned.owner, facts, arguments.out)
    if arguments.json is not None:
        text = json.dumps({**to_dict(planned), "per_rank": facts}, indent=1)
        Path(arguments.json).write_text(text + "\n")
    for path in filter(None, (arguments.out, arguments.json)):
        print(f"written to {path}")
    return 0


def plan(arguments: argparse.Namespace) -> Planned:
    from flex_inductor.distributed.balance import BALANCERS, best, owners
    from flex_inductor.distributed.cost import METHODS, CostModel, choose_method, estimate, groups, refusal
    from flex_inductor.distributed.work import TileWork

    ranks, length = arguments.ranks, arguments.length
    model = CostModel(
        **{name: getattr(arguments, name) for name in ("heads", "kv_heads", "head_dim", "batch")},
        flops=arguments.tflops * 1e12,
        bandwidth=arguments.gigabytes * 1e9,
        memory=None if arguments.memory is None else arguments.memory * 2**30,
    )
    if ranks > MOST_RANKS:
        raise Refused(f"--ranks: expected at most {MOST_RANKS}, got {ranks}")
    if model.heads % model.kv_heads:
        raise Refused(f"--heads: expected a multiple of --kv-heads, {model.kv_heads}, got {model.heads}")
    name = " ".join([arguments.mask, *arguments.options])
    masks = _masks(arguments.mask, arguments.options, length or LENGTH)
    named = masks if isinstance(masks, dict) else {}
    if length is None and any(mask is None or callable(mask) for mask in [*named.values()] or [masks]):
        length = LENGTH
    known = f"NAME=NUMBER with a name of: {', '.join(named) or 'none, as there is one mask without a name'}"
    weights = dict.fromkeys(named, 1.0) | pairs(
        "--weight", arguments.weight, dict.fromkeys(named, float), known
    )
    sizes = {"tile": arguments.tile, "batch": model.batch, "heads": model.heads}
    work = TileWork.of(masks, length, weights=weights or None, **sizes)
    rows: list[tuple[str, Estimate]] = []
    refused: dict[str, str] = {}
    for method in METHODS:
        reason = refusal(method, ranks, model)
        if reason is not None:
            refused[method] = reason
        elif method == "ulysses":
            rows.append(("any", estimate(work, (), ranks, method, model)))
        else:
            sharing = groups(method, ranks, model)
            held = {balance: owners(balance, work, sharing) for balance in BALANCERS if balance != "auto"}
            rows += [(b, estimate(work, owner, ranks, method, model)) for b, owner in held.items()]
    choice = choose_method(work, best(work, ranks, model)[1], ranks, model)
    balance, owner = best(work, ranks, model, choice.chosen)
    if choice.chosen == "ulysses":
        balance = "any"
    return Planned(name, work, ranks, model, rows, refused, balance, tuple(owner), choice)


def _masks(name: str, given: list[str], length: int) -> Any:
    """A mask or a dict of them."""
    from flex_inductor.distributed.cost import log_normal_documents
    from flex_inductor.masks.library import document

    from .mask import CONSTRUCTORS, construct

    if ":" in name:
        if given:
            raise Refused(f"{name}: takes no options, got {' '.join(given)}")
        return _users_masks(name)
    if name in CONSTRUCTORS:
        return construct(name, given)
    if name == "none" and not given:
        return None
    if name == "documents":
        numbers = {"mean": float, "sigma": float, "seed": int}
        found = pairs(name, given, numbers, "mean=, sigma= or seed= and a number")
        mean, sigma, seed = (found.get(key, 1) for key in numbers)
        if not 1 <= mean <= MOST or not 0 <= sigma <= 10 or abs(seed) > MOST:
            raise Refused(
                f"documents: expected a mean from 1 and a seed up to {MOST} and a sigma from 0 to 10, got "
                f"{' '.join(given)}"
            )
        return document(lengths=log_normal_documents(length, **found))
    known = ", ".join([*CONSTRUCTORS, "documents", "none"])
    text = " ".join([name, *given])
    raise Refused(f"mask: expected one of {known}, or path/to/script.py:function; got {text!r}")


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


ROW = "{:21}{:16}{:>9} {:>13}{:>13} {:>9}  {:>13}{:>12}"
RANK = "{:8}{:>9}{:>15}{:>13}{:>12}"


def page(planned: Planned, facts: dict[str, list[float]]) -> str:
    from flex_inductor.distributed.cost import amount

    def share(phase: Any) -> str:
        return f"{100 * phase.efficiency_exposed:.0f}-{100 * phase.efficiency:.0f}%"

    def row(balance: str, made: Any) -> str:
        mark = "*" if (made.method, balance) == (choice.chosen, planned.balance) else ""
        moved = (amount(size) for size in (made.forward.bytes, made.backward.bytes, made.memory))
        shares = share(made.forward), share(made.backward)
        return ROW.format(made.method + mark, balance, f"{made.imbalance:.3f}", *moved, *shares)

    work, model, choice = planned.work, planned.model, planned.choice
    lines = [
        f"{planned.masks}: {work.length} tokens in {work.tiles} tiles of {work.tile}, {planned.ranks} ranks; "
        f"a query's tile reads {float(work.cost.mean()) / sum(m.weight for m in work.masks):.1f} tiles",
        f"A model, not a measurement: {model.heads} heads, {model.kv_heads} of keys, dimension {model.head_dim}, batch "
        f"{model.batch}, bf16; {model.flops / 1e12:g} TFLOP/s and {model.bandwidth / 1e9:g} GB/s a rank.",
        "",
        f"{'work':>46} {'bytes of the busiest rank':>26} {'':>9}  {'share of perfect scaling':>25}",
        ROW.format(
            "method", "balance", "max/mean", *("forward", "backward", "memory", "forward", "backward")
        ),
        *(row(*each) for each in planned.rows),
        *(f"{method:21}{reason}" for method, reason in planned.refused.items()),
        "",
        "Two shares: exchanges do not overlap with attention at all, or as far as they fit. * is chosen by "
        'method="auto" and balance="auto":',
        f"{choice.chosen}, {planned.balance}: {choice.why}",
        "",
        RANK.format("rank", "tokens", "tiles of work", "cast: gets", "sends"),
    ]
    ranks: dict[Any, Any] = dict(enumerate(zip(*facts.values(), strict=True)))
    if planned.ranks > LISTED:  # the ends of many
        ends: dict[str, Any] = {"least": min, "mean": lambda values: sum(values) / len(values), "most": max}
        ranks = {name: tuple(map(of, facts.values())) for name, of in ends.items()}
    for rank, (tokens, done, received, sent) in ranks.items():
        lines.append(RANK.format(str(rank), f"{tokens:.0f}", f"{done:.0f}", amount(received), amount(sent)))
    return "\n".join(lines)


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
    }
