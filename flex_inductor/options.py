"""The options a user can give: torch's kernel hints, and the few of the backend's own."""

from __future__ import annotations

from typing import Any, NamedTuple

from . import build, compat, errors

_BACKENDS = ("AUTO", "TRITON", "TRITON_DECODE", "FLASH")


class BackendOptions(NamedTuple):
    """What `torch.compile(..., backend="flex_inductor", options={...})` takes beyond Inductor's options."""

    route: str | None = None  # the one route to use, by name; refused calls raise
    configs: dict[str, dict[str, int]] | None = (
        None  # sizes of kernels, by kernel and name; refused ones raise
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
            inductors[name] = value
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
    """Refuse hints that nobody knows; whether one applies is for the route to say."""
    if kernel_options is None:
        return
    for name in kernel_options:
        if (
            not isinstance(name, str)
            or name.removeprefix("fwd_").removeprefix("bwd_") not in compat.KERNEL_HINTS
        ):
            raise errors.unknown_option("kernel_options", name, compat.KERNEL_HINTS)
    backend = kernel_options.get("BACKEND", "AUTO")
    if backend not in _BACKENDS:
        raise errors.bad_option("kernel_options", "BACKEND", backend, f"one of {', '.join(_BACKENDS)}")


def op_options(kernel_options: dict[str, Any] | None, *, lse: bool, max_scores: bool) -> dict[str, Any]:
    """The op's constant options. The build's hash among them makes every compile cache miss on new code."""
    return {
        **(kernel_options or {}),
        "OUTPUT_LOGSUMEXP": lse,
        "OUTPUT_MAX": max_scores,
        "build": build.FINGERPRINT,
    }


def hints(options: dict[str, Any]) -> dict[str, Any]:
    """The tuning hints among an op's options."""
    return {
        name: value
        for name, value in options.items()
        if name.removeprefix("fwd_").removeprefix("bwd_") in compat.KERNEL_HINTS
    }


def own_constants(options: BackendOptions) -> dict[str, Any]:
    """What the backend adds to the constant options of every call it compiles."""
    constants: dict[str, Any] = {"build": build.FINGERPRINT}
    if options.route is not None:
        constants["route"] = options.route
    if options.verify:
        constants["verify"] = True
    if options.configs:
        constants["configs"] = tuple(
            (kernel, tuple(sizes.items())) for kernel, sizes in options.configs.items()
        )
    return constants
