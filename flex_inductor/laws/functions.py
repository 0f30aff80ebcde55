"""Laws of a function as a whole, and `check`."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..compat import compile_alone
from ..take_over import take_over
from . import errors, gradients, of_calls
from .calls import Call, capture, of_each_kind
from .compare import KEYS, OUT, floats, moved, noise_like, rounding, spread, upstream
from .documents import Documents
from .report import Law, NotApplicable, Report, judged

LAWS = ("masked", "shift", "permutation", "documents", "schedule", "gradients", "compiled", "batch")
DOCUMENTS = 16  # that are perturbed
ENTRIES = 3  # of a batch


def check(
    fn: Callable,
    inputs: Sequence[Any] | Mapping[str, Any],
    documents: Tensor | Sequence[int] | None = None,
    *,
    laws: Iterable[str] | None = None,
) -> Report:
    """Hold `fn(*inputs)`, or `fn(**inputs)`, to the laws of attention, on the CPU. See docs/check.md.

    Args:
        fn: a function or a module that calls flex_attention, ours or torch's.
        inputs: what it is called with, as a sequence or by name. Some must be float tensors.
        documents: which tokens belong together, where they are packed: their lengths in order, or a tensor of ids,
            [tokens] or [batch, tokens].
        laws: the names of those to judge by, all by default.

    Returns:
        flex_inductor.laws.Report: what became of each law; `report.ok` says whether all that apply hold.

    Raises:
        FlexValueError: a law has no such name, `documents` do not fit, or an input is on another device.
        FlexTypeError: no input is a float tensor.

    Example:
        >>> def two_documents(query, key, value):
        ...     forgets = create_block_mask(masks.causal(), None, None, 8, 8)
        ...     return flex_attention(query, key, value, block_mask=forgets)
        >>> inputs = [torch.randn(1, 1, 8, 16) for _ in range(3)]
        >>> laws = ["documents"]
        >>> report = flex_inductor.check(two_documents, inputs, documents=[4, 4], laws=laws)
        >>> report.ok, report.failures[0].law
        (False, 'documents')
    """
    inner: Any = getattr(fn, "_torchdynamo_orig_callable", None) or getattr(fn, "_orig_mod", fn)
    function = _Function(inner, inputs)
    with torch.random.fork_rng(devices=[]):
        calls = function.calls
        packed = None if documents is None else Documents.given(documents)
        if packed is not None:
            packed.check(function.numbers)
        each = of_calls.laws_of(calls, errors.NO_CALLS)
        found: dict[str, Law] = {
            **each,
            "documents": lambda: function.documents(packed),
            "gradients": of_calls.of_all(calls, errors.NO_CALLS, gradients.of_call, errors.DIFFERENCES),
            "compiled": function.eager_equals_compiled,
            "batch": lambda: function.batch(calls),
        }
        return judged(errors.named(inner), {name: found[name] for name in LAWS}, laws)


class _Function:
    """A function with its inputs, as numbers in and numbers out."""

    def __init__(self, fn: Callable, inputs: Sequence[Any] | Mapping[str, Any]):
        self.fn = fn
        self.args, self.kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
        self.numbers = floats((self.args, self.kwargs))
        if not self.numbers:
            raise errors.no_numbers(inputs)
        for tensor in self.numbers:
            if tensor.device.type != "cpu":
                raise errors.not_on_cpu(tensor.device)
        self.generator = torch.Generator().manual_seed(1)

    def names(self, outs: Sequence[Tensor]) -> list[str]:
        """Of what it returns, then of the gradients of what it takes."""
        taken = list(self.kwargs.items())
        try:
            taken = [*inspect.signature(self.fn).bind_partial(*self.args).arguments.items(), *taken]
        except (TypeError, ValueError):
            taken = [*((f"input {i}", value) for i, value in enumerate(self.args)), *taken]
        each = [(name, len(floats(value))) for name, value in taken]
        inputs = [f"{name}[{i}]" if n > 1 else name for name, n in each for i in range(n)]
        outputs = ["output"] if len(outs) == 1 else [f"output {i}" for i in range(len(outs))]
        return [*outputs, *(f"gradient of {name}" for name in inputs)]

    def axes(self, tensor: Tensor) -> Sequence[str]:
        """What the indices of a result count, where it looks like a tensor of the first call."""
        for call in self.calls[:1]:
            for sizes, axes in ((call.query.shape[:3], OUT), (call.key.shape[:3], KEYS)):
                if tensor.shape[:3] == sizes:
                    return axes
        return ()

    @functools.cached_property
    def calls(self) -> list[Call]:
        return capture(self.fn, self.args, self.kwargs)[1]

    def run(
        self,
        given: Sequence[Tensor] | None = None,
        fn: Callable | None = None,
        others: Sequence[Tensor] = (),
        counts: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """What it gives for these tensors, and the gradients of them and of others. Each run draws the same numbers.

        `counts` flags the part of a result whose gradient counts.
        """
        leaves = [t.detach().clone().requires_grad_() for t in (self.numbers if given is None else given)]
        left = iter(leaves)
        args, kwargs = tree_map_only(
            Tensor, lambda t: next(left) if t.is_floating_point() else t, (self.args, self.kwargs)
        )
        torch.default_generator.manual_seed(1)
        with take_over(), torch.enable_grad():
            results = floats((fn or self.fn)(*args, **kwargs))
            differentiable = [result for result in results if result.requires_grad]
            if not differentiable:
                return results, []
            grad_outs = [upstream(r) if counts is None else upstream(r) * counts(r) for r in differentiable]
            wanted = [*leaves, *others]
            grads = torch.autograd.grad(differentiable, wanted, grad_outs, allow_unused=True)
        return [result.detach() for result in results], list(grads)

    def documents(self, packed: Documents | None) -> tuple[str, list[str]]:
        """A document knows nothing of its neighbours."""
        if packed is None:
            raise NotApplicable(errors.NO_DOCUMENTS)
        if packed.count < 2:
            raise NotApplicable(errors.ONE_DOCUMENT)

        def counts(result: Tensor) -> Tensor:
            own = packed.of(result)  # what padding gives counts for nothing: it may see any document
            return torch.ones(()) if own is None else own >= 0

        outs, grads = self.run(counts=counts)
        named = zip(self.names(outs), [*outs, *grads], strict=False)
        results = [(name, result) for name, result in named if result is not None]
        judged_at = [(name, want, own) for name, want in results if (own := packed.of(want)) is not None]
        wrong = []
        for document in spread(packed.count, DOCUMENTS):
            given = []
            for tensor in self.numbers:
                own = packed.of(tensor)
                noise = noise_like(tensor, self.generator)
                given.append(tensor if own is None else torch.where(own == document, noise, tensor))
            found_outs, found_grads = self.run(given, counts=counts)
            found = iter([*found_outs, *(grad for grad in found_grads if grad is not None)])
            by_name = {name: got for (name, _), got in zip(results, found, strict=True)}
            others: set[int] = set()
            first: str | None = None
            for name, want, own in judged_at:
                if at := moved(by_name[name], want, (own != document) & (own >= 0), axes=self.axes(want)):
                    first = first or f"{name} {at}"
                    others |= packed.moved(by_name[name], want, document)
            if first is not None:
                wrong.append(f"{first}, {packed.neighbours(document, others)} {errors.APART}")
        return errors.documents_judged(packed.count, min(packed.count, DOCUMENTS)), wrong

    def eager_equals_compiled(self) -> tuple[str, list[str]]:
        """torch.compile changes nothing but roundings."""
        learnt = self._learnt()
        others = [tensor for _, tensor in learnt]
        outs, grads = self.run(others=others)
        exact = self._exact(others, torch.get_rng_state())
        found = self.run(fn=compiled(self.fn), others=others)
        names = [*self.names(outs), *(f"gradient of {name}" for name, _ in learnt)]
        wanted = [*outs, *grads]
        axes = [() if result is None else self.axes(result) for result in wanted]
        return errors.COMPILED, differences(names, [*found[0], *found[1]], wanted, exact, axes)

    def _learnt(self) -> list[tuple[str, Tensor]]:
        """Parameters, and what score_mods capture beside them that needs a gradient."""
        named = list(self.fn.named_parameters()) if isinstance(self.fn, torch.nn.Module) else []
        named += [(f"captured {name}", t) for call in self.calls for name, t in call.captures]
        known = {id(t): (name, t) for name, t in reversed(named) if isinstance(t, Tensor)}
        return [(name, t) for name, t in known.values() if t.requires_grad and t.is_leaf]

    def _exact(self, others: Sequence[Tensor], drawn: Tensor) -> list[Tensor | None] | None:
        """The same in fp64, where the function takes that: eager results are that far off themselves.

        None where it draws other random numbers than those that left the generator as `drawn`.
        """
        try:
            outs, grads = self.run([tensor.double() for tensor in self.numbers], others=others)
        except Exception:  # such as parameters in fp32, which meet no fp64
            return None
        return [*outs, *grads] if torch.equal(torch.get_rng_state(), drawn) else None

    def batch(self, calls: Sequence[Call]) -> tuple[str, list[str]]:
        """An entry of a batch knows nothing of the others."""
        if not calls:
            raise NotApplicable(errors.NO_CALLS)
        if reasons := {call.not_plain for call in calls if call.not_plain}:
            raise NotApplicable("; ".join(sorted(reasons)))
        wrong = [
            f"{call.name}: {text}"
            for call in of_each_kind(calls)[: of_calls.KINDS]
            for text in of_calls.alone_and_in_company(call)
        ]
        sizes = {call.sizes[0] for call in calls}
        if len(sizes) == 1 and (batch := sizes.pop()) > 1:
            wrong += self._others_replaced(batch)
        return errors.BATCH, wrong

    def _others_replaced(self, batch: int) -> list[str]:
        outs, _ = self.run()
        for entry in spread(batch, ENTRIES):
            own = torch.arange(batch) == entry
            given = [
                torch.where(own.view(-1, *(1,) * (t.dim() - 1)), t, noise_like(t, self.generator))
                if t.dim() > 1 and t.size(0) == batch
                else t
                for t in self.numbers
            ]
            for i, (got, want) in enumerate(zip(self.run(given)[0], outs, strict=True)):
                if want.dim() and want.size(0) == batch:
                    of_entry = own.view(-1, *(1,) * (want.dim() - 1))
                    if at := moved(got, want, of_entry, axes=self.axes(want)):
                        return [errors.others_replaced(self.names(outs)[i], entry, at)]
        return []


def compiled(fn: Callable) -> Callable:
    """By torch.compile with this backend, under sizes that are constants, with eager's random numbers."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    # Dynamo keeps compiled code with a function's code: with this copy it is freed.
    fresh = types.FunctionType(call.__code__.replace(), globals(), call.__name__, None, call.__closure__)
    found = torch.compile(fresh, backend="flex_inductor", dynamic=False, options={"fallback_random": True})

    def run(*args: Any, **kwargs: Any) -> Any:
        with compile_alone():
            return found(*args, **kwargs)

    return run


def differences(
    names: Sequence[str], got: Sequence[Any], want: Sequence[Any], exact: Any, axes: Sequence[Sequence[str]]
) -> list[str]:
    """What torch.compile makes different. `exact` are the results in fp64, from which eager ones are off too."""
    wrong = []
    for i, (name, found, expected) in enumerate(zip(names, got, want, strict=False)):
        if found is None or expected is None:
            if found is not expected:
                wrong.append(errors.compiled_gradient(name, found is None))
            continue
        allowed = rounding(expected)
        if exact is not None and exact[i] is not None and expected.numel():
            off = (expected.double() - exact[i].double()).abs().nan_to_num(0.0, 0.0, 0.0)
            allowed = max(allowed, 4 * float(off.max()))
        if at := moved(found, expected, None, allowed, axes[i]):
            wrong.append(errors.compiled(name, at))
    return wrong
