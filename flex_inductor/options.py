"""The options a user can give: torch's kernel hints, and the few of the backend's own."""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

from . import compat, errors, fingerprint

# The one hint beside torch's: into how many parts decoding kernels cut the keys; 0 for any number.
NUM_SPLITS = "num_splits"
_MOST_SPLITS = 128
_BACKENDS = ("AUTO", "TRITON", "TRITON_DECODE", "FLASH")


class BackendOptions(NamedTuple):
    """What `torch.compile(..., backend="flex_inductor", options={...})` takes beyond Inductor's options."""

    route: str | None = None  # the one route to use, by name; refused calls raise
    configs: dict[str, dict[str, int]] | None = (
        None  # tile sizes and the like, by kernel and name; one that cannot be used raises
    )
    verify: bool = False  # check what each call computes, and its gradients, when it runs


def split_options(options: dict[str, Any] | None) -> tuple[BackendOptions, dict[str, Any]]:
    """The backend's own options, and those that are Inductor's."""
    own, inductors = {}, {}
    known = compat.inductor_option_names()
    for name, value in (options or {}).items():
        if name in BackendOptions._fields:
            own[name] = value
        elif name.replace("-", "_") in known:
            inductors[name.replace("-", "_")] = value
        else:
            raise errors.unknown_option(
                'torch.compile(backend="flex_inductor", options=...)',
                name,
                [*BackendOptions._fields, "any of torch._inductor.list_options()"],
            )
    if own.get("route") is not None and not isinstance(own["route"], str):
        raise errors.bad_option("options", "route", own["route"], "the name of a route")
    if own.get("configs") is not None and not _are_configs(own["configs"]):
        raise errors.bad_option(
            "options", "configs", own["configs"], "sizes by kernel, like {'forward': {'block_m': 64}}"
        )
    if not isinstance(own.get("verify", False), bool):
        raise errors.bad_option("options", "verify", own["verify"], "True or False")
    return BackendOptions(**own), inductors


def _are_configs(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(kernel, str)
        and isinstance(sizes, dict)
        and all(isinstance(name, str) and type(size) is int for name, size in sizes.items())
        for kernel, sizes in value.items()
    )


def check_kernel_options(kernel_options: dict[str, Any] | None) -> None:
    """Refuse unknown hints. Whether a known one applies is for the route to say."""
    if kernel_options is None:
        return
    if not isinstance(kernel_options, dict):
        raise errors.no_options(kernel_options)
    for name, value in kernel_options.items():
        if (
            not isinstance(name, str)
            or name.removeprefix("fwd_").removeprefix("bwd_") not in compat.KERNEL_HINTS
        ) and name != NUM_SPLITS:
            raise errors.unknown_option("kernel_options", name, {NUM_SPLITS, *compat.KERNEL_HINTS})
        if name not in ("BACKEND", NUM_SPLITS) and not isinstance(value, numbers.Integral | None):
            raise errors.bad_option("kernel_options", name, value, "a whole number, True or False")
    splits = kernel_options.get(NUM_SPLITS, 0)
    if type(splits) is not int or not 0 <= splits <= _MOST_SPLITS:
        raise errors.bad_option("kernel_options", NUM_SPLITS, splits, f"an integer from 0 to {_MOST_SPLITS}")
    backend = kernel_options.get("BACKEND", "AUTO")
    if backend not in _BACKENDS:
        raise errors.bad_option("kernel_options", "BACKEND", backend, f"one of {', '.join(_BACKENDS)}")


class CallOptions(NamedTuple):
    """The constants of one call. Everything that sets one is in this file."""

    hints: tuple[tuple[str, Any], ...] = ()  # the call's kernel_options
    lse: bool = True  # whether the caller reads it
    max_scores: bool = True
    more: tuple[str, ...] = ()  # further results, in the order of softmax.MORE
    build: str = ""  # the build's hash: every compile cache misses on new code
    # The backend adds these, the first three from its own options.
    route: str = ""
    configs: tuple[tuple[str, tuple[tuple[str, int], ...]], ...] = ()
    verify: bool = False
    number: int = 0  # the call's place among those of Dynamo's graph
    # Both are set only where kernels are timed.
    imported: str = ""  # which tuning results were imported
    visited: tuple[float, float] | None = None  # the shares of partial and of full blocks
    eager: bool = False  # whether the call was made eagerly, and its class is compiled

    @property
    def hinted(self) -> dict[str, Any]:
        return dict(self.hints)


def call_options(
    kernel_options: dict[str, Any] | None, *, lse: bool, max_scores: bool, more: tuple[str, ...] = ()
) -> CallOptions:
    """Those of a call of flex_attention."""
    hints = tuple((kernel_options or {}).items())
    return CallOptions(hints, lse, max_scores, more, fingerprint.FINGERPRINT)


def torch_call_options(options: dict[str, Any]) -> CallOptions:
    """Those of a call of torch's op, which has hints and outputs in one table."""
    hints = {
        name: value
        for name, value in options.items()
        if name.removeprefix("fwd_").removeprefix("bwd_") in compat.KERNEL_HINTS
    }
    return call_options(
        hints, lse=options.get("OUTPUT_LOGSUMEXP", False), max_scores=options.get("OUTPUT_MAX", False)
    )


def backend_options(options: CallOptions, backend: BackendOptions, number: int) -> CallOptions:
    """A call's options once the backend compiles it."""
    configs = tuple((kernel, tuple(sizes.items())) for kernel, sizes in (backend.configs or {}).items())
    return options._replace(
        build=fingerprint.FINGERPRINT,
        route=backend.route or "",
        configs=configs,
        verify=backend.verify,
        number=number,
    )


def tuning_options(options: CallOptions, imported: str, visited: tuple[float, float] | None) -> CallOptions:
    """A call's options where kernels are timed."""
    return options._replace(imported=imported, visited=visited)
