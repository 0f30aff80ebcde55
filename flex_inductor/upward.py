"""The one place where this package calls modules that import it: lowerings and tools, imported at the call."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from . import compat

_PACKAGE = "flex_inductor"
_LOWERINGS, _TOOLS = f"{_PACKAGE}.lowerings", f"{_PACKAGE}.tools"


def register_lowerings() -> None:
    """Have Inductor know how to lower the ops once it is imported."""
    compat.when_imported("torch._inductor.lowering", lambda _: import_module(f"{_LOWERINGS}.lower"))


def route_names() -> list[str]:
    return [route.name for route in import_module(f"{_LOWERINGS}.registry").ROUTES]


def missing_for_cpp() -> str | None:
    """Why no C++ can be compiled here, with the command that mends it."""
    return import_module(f"{_LOWERINGS}.toolchain").missing_for_cpp()


def compilation(nodes: list[Any]) -> Any:
    """Around the compilation of a graph with these calls: for the record that `inspect --last` reads."""
    return import_module(f"{_LOWERINGS}.record_file").compilation(nodes)


def compiled(call: Any, its_class: Any = None) -> Any:
    """A function that runs the call's kernel: see lowerings/compiled.py. Imports Inductor and compiles."""
    register_lowerings()
    return import_module(f"{_LOWERINGS}.compiled").compiled(call, its_class)


def kernels_of(call: Any) -> Any:
    """A function that chooses the kernel for tensors of a call like this one."""
    register_lowerings()
    return import_module(f"{_LOWERINGS}.compiled").kernels_of(call)


def record_eager(call: Any, why: str) -> None:
    """Say in the decisions that an eager call goes in chunks."""
    import_module(f"{_LOWERINGS}.decision_log").record_eager(call, why)


def record_plan(choice: Any) -> None:
    """Say in the decisions by which method masks are planned: a MethodChoice of distributed/cost.py."""
    import_module(f"{_LOWERINGS}.decision_log").record_plan(choice)


def self_check(way: str) -> None:
    """Raise where this torch was not tested and fails a call that is made this way."""
    import_module(f"{_PACKAGE}.self_check").self_check(way)


def import_dtensors() -> None:
    """Have flex_attention serve DTensors outside of a plan."""
    import_module(f"{_PACKAGE}.distributed.sharded")


def exchange() -> Any:
    """The module that lowers exchanges between ranks: importing it tells Inductor of them."""
    return import_module(f"{_LOWERINGS}.exchange")


def imported_tuning() -> str:
    """Changes with every import of tuning results."""
    return import_module(f"{_LOWERINGS}.winners").stamp()


def public(name: str) -> Any:
    """The names that `flex_inductor` exports from modules that import it, or that are imported late."""
    return getattr(import_module(PUBLIC[name]), name)


PUBLIC = {
    "check": f"{_PACKAGE}.laws",
    "check_model": f"{_PACKAGE}.laws",
    "context_parallel": f"{_PACKAGE}.distributed.context",
    "decisions": f"{_LOWERINGS}.decision_log",
    "inspect": f"{_TOOLS}.inspector",
    "trace_mod": f"{_TOOLS}.trace_mod",
}
