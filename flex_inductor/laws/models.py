"""Laws of a model of transformers, whatever computes its attention."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..take_over import take_over
from . import errors, of_calls
from .calls import Call, capture
from .compare import TOKENS, floats, is_float, moved, noise_like, spread, upstream
from .documents import of_batch
from .functions import DOCUMENTS, ENTRIES, LAWS, compiled, differences
from .gradients import along_directions
from .report import Law, NotApplicable, Note, Report, judged


def check_model(model: Any, batch: Mapping[str, Any], *, laws: Iterable[str] | None = None) -> Report:
    """Hold `model(**batch)`, a model of transformers, to the laws of attention, on the CPU. See docs/check.md.

    It works for any attn_implementation. Documents are what cu_seq_lens_q, attention_mask or position_ids of the batch
    say. The model is in eval mode meanwhile; its parameters, their gradients and the generator of random numbers stay
    as they are.

    Args:
        model: of transformers, on the CPU.
        batch: its arguments by name, with input_ids or inputs_embeds.
        laws: the names of those to judge by, all by default.

    Returns:
        flex_inductor.laws.Report: as `check` returns.

    Raises:
        FlexTypeError: it is no model of transformers, or the batch has no tokens.
        FlexValueError: a law has no such name, or a tensor is on another device.

    Example:
        >>> import transformers
        >>> config = transformers.LlamaConfig(
        ...     hidden_size=32, intermediate_size=32, vocab_size=64,
        ...     num_hidden_layers=1, num_attention_heads=2)
        >>> model = transformers.LlamaForCausalLM(config)
        >>> tokens = torch.arange(16)[None]
        >>> batch = {"input_ids": tokens, "attention_mask": (tokens > 3).long()}  # padded
        >>> report = flex_inductor.check_model(model, batch, laws=["masked"])
        >>> report.results[0].outcome, report.results[0].text.partition(".")[0]
        ('holds', 'Padding replaced by other tokens')
    """
    if not hasattr(model, "get_input_embeddings") or not hasattr(model, "config"):
        raise errors.not_a_model(model)
    training = {module: module.training for module in model.modules()}
    with torch.random.fork_rng(devices=[]), take_over():  # torch's flex_attention has no gradients on a CPU
        try:
            watched = _Model(model.eval(), batch)
            calls = watched.calls
            implementation = str(getattr(model.config, "_attn_implementation", None))
            each = of_calls.laws_of(calls, errors.no_mods(implementation))
            found: dict[str, Law] = {
                **each,
                "masked": lambda: watched.masked(each["masked"]),
                "documents": lambda: watched.documents(implementation),
                "gradients": watched.gradients,
                "compiled": watched.eager_equals_compiled,
                "batch": watched.batch_law,
            }
            subject = f"{type(model).__name__}, {implementation}"
            return judged(subject, {name: found[name] for name in LAWS}, laws)
        finally:
            for module, mode in training.items():
                module.training = mode


RESULTS = ("logits", "gradient of the embeddings")


class _Model:
    """A model with its batch, as tokens in, logits and gradients of the tokens' embeddings out."""

    def __init__(self, model: Any, batch: Mapping[str, Any]):
        tokens = next((name for name in ("input_ids", "inputs_embeds") if _has(batch, name)), None)
        if tokens is None:
            raise errors.no_tokens(batch)
        self.model, self.batch, self.tokens = model, dict(batch), tokens
        self.rows, self.length = batch[tokens].shape[:2]
        for tensor in [*self.batch.values(), *model.parameters()]:
            if isinstance(tensor, Tensor) and tensor.device.type != "cpu":
                raise errors.not_on_cpu(tensor.device)
        self.generator = torch.Generator().manual_seed(1)

    @functools.cached_property
    def calls(self) -> list[Call]:
        return capture(self.model, (), self.batch)[1]

    def run(self, batch: Mapping[str, Any] | None = None, fn: Any = None) -> Tensor:
        """The logits, or what the model gives for each token instead."""
        batch = self.batch if batch is None else batch
        results = (fn or self.model)(**batch)
        shape = batch[self.tokens].shape[:2]
        named = [getattr(results, name, None) for name in ("logits", "last_hidden_state")]
        if not isinstance(results, Tensor):
            named += floats(tuple(results.values()) if hasattr(results, "values") else results)
        else:
            named.append(results)
        for found in named:
            if isinstance(found, Tensor) and found.dim() > 2 and found.shape[:2] == shape:
                return found
        raise errors.no_logits(type(self.model).__name__)

    def with_gradients(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
        """The logits, and the gradient of what the tokens are embedded as."""
        embedded: list[Tensor] = []

        def kept(module: Any, args: Any, output: Tensor) -> Tensor:
            if output.shape[:2] != batch[self.tokens].shape[:2]:
                return output
            embedded.append(output.detach().requires_grad_())
            return embedded[-1]

        if self.tokens == "inputs_embeds":
            embedded.append(batch["inputs_embeds"].detach().clone().requires_grad_())
            batch = {**batch, "inputs_embeds": embedded[0]}
        handle = self.model.get_input_embeddings().register_forward_hook(kept)
        try:
            with torch.enable_grad():
                logits = self.run(batch)
                # What padding gives counts for nothing: it may see any document.
                grad_out = upstream(logits) * ~self.padding.unsqueeze(-1)
                if not embedded or not logits.requires_grad:
                    return logits.detach(), None
                (grad,) = torch.autograd.grad(logits, embedded[:1], grad_out, allow_unused=True)
        finally:
            handle.remove()
        return logits.detach(), grad

    @functools.cached_property
    def padding(self) -> Tensor:
        """Flags [rows, length]."""
        mask = self.batch.get("attention_mask")
        if isinstance(mask, Tensor) and mask.shape == (self.rows, self.length):
            return mask == 0
        return torch.zeros(self.rows, self.length, dtype=torch.bool)

    @functools.cached_property
    def baseline(self) -> tuple[Tensor, Tensor | None]:
        return self.with_gradients(self.batch)

    def replaced(self, where: Tensor, batch: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The batch with other tokens `where` flags [rows, length] say."""
        batch = dict(self.batch if batch is None else batch)
        tokens = batch[self.tokens]
        if self.tokens == "inputs_embeds":
            batch["inputs_embeds"] = torch.where(
                where.unsqueeze(-1), noise_like(tokens, self.generator), tokens
            )
            return batch
        known = self.model.get_input_embeddings().num_embeddings
        others = torch.randint(1, max(known, 2), tokens.shape, generator=self.generator)
        batch["input_ids"] = torch.where(where, (tokens + others) % known, tokens)  # never the same
        return batch

    def masked(self, of_its_calls: Law) -> tuple[str, Sequence[str]]:
        """Padding may be any tokens; in calls of flex_attention what is masked may be NaN."""
        padding, said = self.padding, []
        wrong: list[str] = []
        left: list[Note] = []
        if not padding.any():
            left.append(Note(errors.NO_PADDING))
        else:
            said.append("Padding replaced by other tokens.")
            found = self.with_gradients(self.replaced(padding))
            for name, got, want in zip(RESULTS, found, self.baseline, strict=True):
                if got is None or want is None:
                    continue
                if at := moved(got, want, ~padding.unsqueeze(-1), axes=TOKENS):
                    wrong.append(errors.model_padding(name, at))
                    break
        try:
            looked_at, texts = of_its_calls()
            said.append(looked_at)
            wrong += texts
        except NotApplicable as error:
            left.append(Note(error))
        if not said:
            raise NotApplicable("; ".join(left))
        return " ".join(said), [*wrong, *left]

    def documents(self, implementation: str) -> tuple[str, Sequence[str]]:
        """A document's logits and gradients know nothing of its neighbours."""
        found = of_batch(self.batch, self.padding)
        if found is None:
            raise NotApplicable(errors.documents_unknown(list(self.batch)))
        source, packed = found
        if packed.count <= int((packed.numbers >= 0).any(-1).sum()):
            raise NotApplicable(f"{source}: each row is one document")
        results = [(name, t) for name, t in zip(RESULTS, self.baseline, strict=True) if t is not None]
        wrong = []
        for document in spread(packed.count, DOCUMENTS):
            after = self.with_gradients(self.replaced(packed.numbers.expand(self.rows, -1) == document))
            others: set[int] = set()
            first: str | None = None
            for (name, want), got in zip(results, after, strict=False):
                own = packed.of(want)
                assert got is not None and own is not None
                if at := moved(got, want, (own != document) & (own >= 0), axes=TOKENS):
                    first = first or f"{name} {at}"
                    others |= packed.moved(got, want, document)
            if first is not None:
                neighbours = packed.neighbours(document, others)
                wrong.append(f"{first}, {neighbours} {errors.model_document(source, implementation)}")
        count = min(packed.count, DOCUMENTS)
        return f"By {source}: {errors.documents_judged(packed.count, count)}", wrong

    def gradients(self) -> tuple[str, Sequence[str]]:
        """Those of all parameters, in fp64."""
        wide, batch = self.in_float64()
        for module in wide.modules():
            if isinstance(module, torch.nn.Embedding):
                module.padding_idx = None  # whose gradient torch leaves out on purpose
        try:
            self.run(batch, wide)
        except Exception as error:  # such as operators that take no fp64
            raise NotApplicable(errors.no_float64(error)) from None
        named = [(name, p.detach()) for name, p in wide.named_parameters()]
        sizes, shapes = [p.numel() for _, p in named], [p.shape for _, p in named]
        upstream: list[Tensor] = []

        def loss(tensors: Sequence[Tensor]) -> Tensor:
            parameters = {name: tensor for (name, _), tensor in zip(named, tensors, strict=True)}

            def function(**given: Any) -> Any:
                return torch.func.functional_call(wide, parameters, (), given)

            logits = self.run(batch, function).double()
            if not upstream:
                upstream.append(torch.randn(logits.shape, generator=self.generator, dtype=torch.float64))
            return (logits * upstream[0]).sum()

        def loss_of_all(tensors: Sequence[Tensor]) -> Tensor:
            split = tensors[0].split(sizes)
            return loss([part.view(shape) for part, shape in zip(split, shapes, strict=True)])

        together = torch.cat([p.flatten() for _, p in named])
        (one,) = along_directions(loss_of_all, [("all parameters", together)], self.generator)
        if one.is_right:
            if one.is_unknown:
                raise NotApplicable(errors.scattered(one))
            return errors.DIFFERENCES, []
        each = along_directions(loss, named, self.generator)
        names = {is_right: [g.name for g in each if g.is_right == is_right] for is_right in (True, False)}
        return errors.DIFFERENCES, [errors.parameters(one, names[False], names[True])]

    def in_float64(self) -> tuple[Any, dict[str, Any]]:
        """A copy of the model, and its batch."""
        batch = {name: t.double() if is_float(t) else t for name, t in self.batch.items()}
        return copy.deepcopy(self.model).double(), batch

    def eager_equals_compiled(self) -> tuple[str, Sequence[str]]:
        """torch.compile changes nothing but roundings."""
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        fn = compiled(self.model)
        results = [self._with_parameters(named, each) for each in (None, fn)]
        axes = [TOKENS, *(() for _ in named)]
        names = ["logits", *(f"gradient of {name}" for name, _ in named)]
        return errors.COMPILED, differences(names, results[1], results[0], self._exact(named), axes)

    def _with_parameters(self, named: Sequence[tuple[str, Tensor]], fn: Any, batch: Any = None) -> list[Any]:
        with torch.enable_grad():
            logits = self.run(batch, fn)
            parameters = [p for _, p in named]
            return [
                logits.detach(),
                *torch.autograd.grad(logits, parameters, upstream(logits), allow_unused=True),
            ]

    def _exact(self, named: Sequence[tuple[str, Tensor]]) -> list[Any] | None:
        """In fp64, where the model takes that."""
        wide, batch = self.in_float64()
        parameters = dict(wide.named_parameters())
        try:
            return self._with_parameters([(name, parameters[name]) for name, _ in named], wide, batch)
        except Exception:  # such as weights that a layer casts itself
            return None

    def batch_law(self) -> tuple[str, Sequence[str]]:
        """A row's logits know nothing of the other rows."""
        if self.rows == 1 and any("cu_seq" in name for name in self.batch):
            raise NotApplicable(errors.ONE_ROW_OF_ALL)
        return errors.BATCH, list(self._of_rows())

    @torch.no_grad()
    def _of_rows(self) -> Iterator[str]:
        logits = self.run()
        for row in spread(self.rows, ENTRIES):
            twice = {name: self._row(t, [row, row]) for name, t in self.batch.items()}
            stranger = torch.tensor([[False], [True]]).expand(2, self.length)
            changes = [("a row of other tokens was put beside it", self.replaced(stranger, twice), 0)]
            if self.rows > 1:
                alone = {name: self._row(t, [row]) for name, t in self.batch.items()}
                others = (torch.arange(self.rows) != row).unsqueeze(1).expand(-1, self.length)
                changes += [
                    ("it was given alone", alone, 0),
                    ("the tokens of all other rows were replaced", self.replaced(others), row),
                ]
            for change, batch, at in changes:
                if moves := moved(self.run(batch)[at, None], logits[row, None], axes=TOKENS):
                    yield errors.model_rows(row, moves._replace(at=(row, *moves.at[1:])), change)
                    break

    def _row(self, value: Any, rows: list[int]) -> Any:
        has_rows = isinstance(value, Tensor) and value.dim() > 0 and value.size(0) == self.rows
        return value[rows] if has_rows else value


def _has(batch: Any, name: str) -> bool:
    return isinstance(batch, Mapping) and isinstance(batch.get(name), Tensor) and batch[name].dim() >= 2
