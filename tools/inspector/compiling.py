"""One compilation of a function, watched: its attention calls, what was decided on each, and the kernels.

Nothing runs, nothing is cached, and the state of Dynamo and Inductor is restored.
"""

from __future__ import annotations

import contextlib
import re
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import fx

from flex_inductor.errors import FlexError
from flex_inductor.lowerings.observing import Observer, observed_by
from flex_inductor.mod_ir.source_lines import last_line

from .. import errors
from ..environment import cpp_unbuilt, triton_on_cpu, triton_unbuilt
from ..generated import GeneratedKernel, load
from ..resources import gpu_target
from .arguments import Launch, of_cpp, of_triton, parts_of
from .lines import Notes, noted, without_notes


@dataclass(eq=False)
class Source:
    """A kernel as Inductor would build it, and what it was made for."""

    name: str
    kind: str
    text: str  # as it is built
    noted: str  # with comments that name lines of the mods
    launch: Launch
    call: int  # the first that has this kernel
    triton: GeneratedKernel | None = None


@dataclass(eq=False)
class Lowered:
    """One direction of one call."""

    call: int
    problem: Any  # AttentionProblem
    decision: Any  # Decision
    kernels: list[Source] = field(default_factory=list)
    # Places of Inductor's buffers in the call's schedule.
    schedule: dict[str, int] = field(default_factory=dict)
    graphs: dict[str, fx.GraphModule] = field(default_factory=dict)  # the call's mods, by name


@dataclass(eq=False)
class Watched:
    """What a compilation showed. `lowered[i]` has what became of call i, by direction."""

    module: fx.GraphModule | None = None  # as Dynamo traced it
    inputs: Sequence[Any] = ()
    calls: list[fx.Node] = field(default_factory=list)
    lowered: dict[int, dict[str, Lowered]] = field(default_factory=lambda: defaultdict(dict))

    @property
    def choices(self) -> dict[Source, Any]:
        """Every distinct kernel, and the Choice of its config (None for one that has only one)."""
        found: dict[Source, Any] = {}
        for one in (one for call in self.lowered.values() for one in call.values()):
            by_kind = {choice.kernel: choice for choice in one.decision.kernels}
            for source in one.kernels:
                found.setdefault(source, by_kind.get(source.kind))
        return found


class _Compiled(Exception):
    """Raised where the compiled function would run."""


def watch(
    fn: Callable, args: Any, kwargs: dict[str, Any], target: str, backward: bool, options: Any = None
) -> Watched:
    """Compile `fn(*args, **kwargs)` for `target`, but build no kernels."""
    import torch._functorch.config as functorch_config
    from torch._dynamo.exc import Unsupported
    from torch._dynamo.utils import counters
    from torch._inductor import metrics

    from flex_inductor.backend import attention_nodes, flex_inductor, prepare_calls
    from flex_inductor.compat import compile_alone
    from flex_inductor.options import BackendOptions

    watched = Watched()

    def stop(*_: Any) -> None:
        raise _Compiled

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable:
        prepare_calls(module, BackendOptions())
        watched.module, watched.inputs = module, inputs
        watched.calls = attention_nodes(module)
        if watched.calls:
            with functorch_config.patch({"force_non_lazy_backward_lowering": True}):
                flex_inductor(module, list(inputs), options=options)
        return stop

    inner: Any = getattr(fn, "_torchdynamo_orig_callable", None) or getattr(fn, "_orig_mod", fn)

    def call(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    # Dynamo keeps compiled code with a function's code: with this copy it is freed.
    fresh = types.FunctionType(call.__code__.replace(), globals(), call.__name__, None, call.__closure__)
    with (
        mock.patch.dict(counters, {name: Counter(counts) for name, counts in counters.items()}),
        mock.patch.object(metrics, "generated_kernel_count", metrics.generated_kernel_count),
        noted() as notes,
        _Watching(watched, notes, target).kernels(),
        torch.set_grad_enabled(backward and torch.is_grad_enabled()),
        # Dynamo also remembers the last call's sizes, and would make those that differ dynamic.
        torch._dynamo.config.patch({"automatic_dynamic_shapes": False}),
        compile_alone(),
    ):
        try:
            torch.compile(fresh, backend=backend, fullgraph=True)(*args, **kwargs)
        except _Compiled:
            return watched
        except Unsupported as error:
            raise _not_traced(str(error)) from None
    return watched


def _not_traced(dynamo: str) -> FlexError:
    """From Dynamo's long text: what the user's code raised, or why tracing stopped."""
    context = re.search(r"^ *Developer debug context: (.+)$", dynamo, flags=re.MULTILINE)
    reason = context[1] if context else dynamo.splitlines()[0]
    line = last_line(dynamo)
    at = f" ({line})" if line else ""
    # The message is bare, or inside ConstantVariable(str: ...) as torch 2.11 has it.
    if raised := re.match(r"raised exception \w+\([^'\"]*(['\"])(.*)\1,?\)", reason):
        return errors.raised_while_tracing(raised[2], at)
    return errors.not_one_graph(reason, at)


class _Watching(Observer):
    """Takes notes where calls are lowered, kernels are defined, and their sources are handed over."""

    records = False

    def __init__(self, watched: Watched, notes: Notes, target: str):
        self.watched, self.notes = watched, notes
        self.target = None if target == "cpu" else target
        # Kernels of the graph under construction: Triton's by name, C++'s by source.
        self.defined: dict[str, list[tuple[Lowered, Launch]]] = defaultdict(list)
        self.rendered: dict[str, tuple[Lowered, str, Launch]] = {}
        self.sources: dict[tuple[str, str], Source] = {}  # by kind and text without names

    @contextlib.contextmanager
    def kernels(self) -> Iterator[None]:
        with observed_by(self), self._cpu() if self.target is None else self._triton(self.target):
            yield

    def lowered(self, call: Any, problem: Any, decision: Any, operations: Sequence[Any]) -> None:
        number, direction = problem.options.number, problem.direction
        if self.target is not None and problem.device.type == "cpu":
            problem, decision = _as_on_the_target(problem, decision)
        # A checkpointed call is lowered twice.
        lowered = self.watched.lowered[number].setdefault(direction, Lowered(number, problem, decision))
        lowered.decision = lowered.decision._replace(kernels=decision.kernels)
        lowered.schedule = parts_of(call.inputs.schedule or ())
        given = {name: getattr(call, name, None) for name in ("score_mod", "mask_mod", "joint")}
        lowered.graphs = {name: g.graph_module for name, g in given.items() if g is not None}
        for operation in operations:
            operation.flex_inductor_lowered = lowered

    def kernel_defined(self, operation: Any, name: str) -> None:
        lowered = operation.flex_inductor_lowered
        self.defined[name].append((lowered, of_triton(operation, lowered.schedule)))

    def kernel_rendered(self, operation: Any, kind: str, kernel: Any, source: str) -> None:
        lowered = operation.flex_inductor_lowered
        self.rendered[source] = (lowered, kind, of_cpp(kernel, lowered.schedule))

    def _add(self, lowered: Lowered, name: str, kind: str, source: str, launch: Launch) -> Source:
        text = without_notes(source)
        made = Source(name, kind, text, self.notes.written(source), launch, lowered.call)
        known = self.sources.setdefault((kind, text.replace(name, "")), made)
        if known not in lowered.kernels:
            lowered.kernels.append(known)
        return known

    @contextlib.contextmanager
    def _triton(self, target: str) -> Iterator[None]:
        """A kernel is named when its call is generated; its source comes when the module is loaded."""

        def keep(name: str, source: str) -> None:
            for lowered, launch in self.defined.pop(name, ()):
                kernel = load(name, without_notes(source))
                kind = kernel.inductor_meta["flex_inductor"]["kind"]
                self._add(lowered, name, kind, source, launch).triton = kernel

        there = torch.cuda.is_available()
        with triton_unbuilt(keep) if there else triton_on_cpu(keep, gpu_target(target)):
            yield

    @contextlib.contextmanager
    def _cpu(self) -> Iterator[None]:
        """A kernel is rendered, then named."""
        from torch._inductor.codegen.cpp import CppScheduling
        from torch._inductor.utils import Placeholder

        define = CppScheduling.define_kernel

        def defining(scheduling: Any, source: str, *args: Any) -> str:
            name = define(scheduling, source, *args)
            if source in self.rendered:
                lowered, kind, launch = self.rendered.pop(source)
                source = source.replace(str(Placeholder.KERNEL_NAME), "kernel")
                self._add(lowered, name, kind, source, launch)
            return name

        with mock.patch.object(CppScheduling, "define_kernel", defining), cpp_unbuilt():
            yield


def _as_on_the_target(problem: Any, decision: Any) -> Any:
    """The same call on a GPU: example tensors on the CPU stand for tensors there."""
    from flex_inductor.lowerings.registry import ROUTES

    there = replace(problem, device=torch.device("cuda"))
    answers = {route.name: route.can_use(there) for route in ROUTES}
    rejected = tuple(
        (name, reason if answers[name][0] or name == "triton" else answers[name][1])
        for name, reason in decision.rejected
    )
    return there, decision._replace(call=there.describe(), rejected=rejected)
