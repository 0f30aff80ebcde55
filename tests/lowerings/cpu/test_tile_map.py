"""The CPU kernels where a map says where tiles lie: what has no tile holds NaN, and is neither read nor left unwritten."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
import torch._inductor.lowering  # before the tuner, which imports it as well
from torch import Tensor
from torch._functorch import config
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code

import flex_inductor
from flex_inductor import compat, create_block_mask
from flex_inductor.backend import flex_inductor as backend
from flex_inductor.lowerings import winners
from flex_inductor.lowerings.cpu import tuner
from flex_inductor.op import Inputs, attention
from flex_inductor.reference import reference
from flex_inductor.visits.places import BATCH, COUNT, ROW, SEQUENCE
from tests.support import assert_accurate, assert_within, bounded, causal, judge, run
from tests.tile_maps import Part, packed

SCALE, HEAD, BATCHES = 0.3, 2, (2, 3)
PARTS = [Part(20, 70), Part(1, 33), Part(70, 32), Part(33, 100, 60, 0), Part(40, 40, 90, 64)]
TABLE = 128  # differences of positions, in each direction


class Case(NamedTuple):
    """A call whose tiles lie anywhere, and which mask_mod its schedule is of."""

    inputs: Inputs
    mask_mod: Callable | None
    tensors: list[Tensor]


def made(
    mask_mod: Callable | None,
    parts: Sequence[Part],
    block: tuple[int, int],
    *,
    dtype: torch.dtype = torch.float32,
    heads: tuple[int, int] = (4, 2),
    counts: dict[int, int] | None = None,
    lie: str = "anywhere",
) -> Case:
    """All parts in one call. Tiles lie anywhere over several batches and some rows apart, or "in order" or "backwards"
    without gaps in the first batch. `counts` shortens tiles of keys."""
    inputs, _ = packed(mask_mod, parts, block, HEAD, scattered=True)
    generator = torch.Generator().manual_seed(len(parts))
    lines, lengths = [], []
    for side, step, batches in zip(inputs.tile_map, block, BATCHES, strict=True):
        side = side.clone()
        if lie == "backwards":
            side[:, ROW] = side[:, COUNT].sum() - side[:, ROW] - side[:, COUNT]
        if lie == "anywhere":
            place = torch.randperm(len(side), generator=generator).int()
            side[:, BATCH], side[:, ROW] = place % batches, place // batches * (step + 3)
        lines.append(side)
        lengths.append(int(side[:, ROW].max()) + step + 3)
    for tile, count in (counts or {}).items():
        lines[1][tile, COUNT] = count
    shapes = [
        (BATCHES[0], heads[0], lengths[0], 24),
        *((BATCHES[1], heads[1], lengths[1], width) for width in (24, 40)),
    ]
    tensors = [torch.full(shape, torch.nan, dtype=dtype) for shape in shapes]
    for tensor, side in zip(tensors, (lines[0], lines[1], lines[1]), strict=True):
        batch, row, _ = rows_of(side)
        numbers = torch.randn(len(batch), *tensor.shape[1::2], dtype=torch.float64, generator=generator)
        tensor[batch, :, row] = numbers.to(dtype)
    return Case(
        inputs._replace(tile_map=inputs.tile_map._replace(queries=lines[0], keys=lines[1])), mask_mod, tensors
    )


def rows_of(lines: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Batch and row in memory, and the index that mods see, of every row of these tiles."""
    found = [
        (batch, row + i, index + i) for batch, row, _, _, index, count in lines.tolist() for i in range(count)
    ]
    batch, row, index = torch.tensor(found).view(-1, 3).unbind(1)
    return batch, row, index


def dense_of(build: Callable | None) -> Callable:
    """The reference, sequence by sequence."""

    def attend(query, key, value, captures, case):
        out = query.new_zeros(*query.shape[:3], value.size(3))
        lse, peak = (torch.full(query.shape[:3], -torch.inf, dtype=query.dtype) for _ in range(2))
        queries, keys = case.inputs.tile_map
        for sequence in queries[:, SEQUENCE].unique().tolist():
            batch, row, q_index = rows_of(queries[queries[:, SEQUENCE] == sequence])
            kv_batch, kv_row, kv_index = rows_of(keys[keys[:, SEQUENCE] == sequence])

            def seen(h, q, kv, sequence=sequence, q_index=q_index, kv_index=kv_index):
                return sequence, h + HEAD, q_index[q], kv_index[kv]

            def score_mod(score, b, h, q, kv, seen=seen):
                b, h, q, kv = seen(h, q, kv)
                return build(*captures)(score, h * 0 + b, h, q, kv)

            mask = None
            if case.mask_mod is not None and len(kv_index):

                def mask_mod(b, h, q, kv, seen=seen):
                    return case.mask_mod(*seen(h, q, kv))

                mask = create_block_mask(mask_mod, 1, 1, len(q_index), len(kv_index), device="cpu")
            found = reference(
                query[batch, :, row].transpose(0, 1)[None],
                key[kv_batch, :, kv_row].transpose(0, 1)[None],
                value[kv_batch, :, kv_row].transpose(0, 1)[None],
                build and score_mod, mask, SCALE,
            )  # fmt: skip
            for into, result in zip((out, lse, peak), found, strict=True):
                into[batch, :, row] = result[0].transpose(0, 1)
        return out, lse, peak

    return attend


def mapped(build: Callable | None, mask_mod: Callable | None, **options) -> Callable:
    """Called as `dense_of(build)`; compiled, for any number of tiles."""

    def attend(query, key, value, captures, inputs):
        for tensor in (query, key, value):  # as flex_attention does
            torch._dynamo.mark_static(tensor, 1)
            torch._dynamo.mark_static(tensor, 3)
        score_mod = None if build is None else build(*captures)
        return attention(query, key, value, score_mod, mask_mod, SCALE, inputs)

    compiled = torch.compile(
        attend, backend=backend, fullgraph=True, dynamic=True, options={"route": "cpu", **options}
    )

    def call(query, key, value, captures, case):
        schedule, tile_map = case.inputs.schedule, case.inputs.tile_map
        # As those who make them do.
        for tensor in (*(t for table in schedule.tables for t in table), *tile_map):
            compat.mark_changing(tensor, tensor.dim() - 1 if tensor.dim() == 3 else 0)
        return compiled(query, key, value, captures, case.inputs)

    return call


def biased(table, by_query, by_key):
    """Reads every index."""
    return lambda score, b, h, q_idx, kv_idx: (
        score + table[b, h, q_idx - kv_idx] + by_query[b, q_idx] * by_key[h, kv_idx]
    )


def biases(parts: Sequence[Part], heads: int = 4) -> list[Tensor]:
    """As long as they are looked up, so that one index beyond raises."""
    last_query = max(part.first_query + part.queries for part in parts)
    last_key = max(part.first_key + part.keys for part in parts)
    generator = torch.Generator().manual_seed(1)
    sizes = ((len(parts), heads + HEAD, 2 * TABLE), (len(parts), last_query), (heads + HEAD, last_key))
    return [torch.randn(size, dtype=torch.float64, generator=generator) for size in sizes]


def kernels() -> list[str]:
    return [choice.kernel for decision in flex_inductor.decisions() for choice in decision.kernels]


def judged_forward(attend: Callable, build: Callable | None, case: Case, captures: Sequence[Tensor]) -> None:
    captures = [capture.to(case.tensors[0].dtype) for capture in captures]
    with torch.no_grad():
        ours = attend(*case.tensors, captures, case)
        wide, names = [tensor.double() for tensor in case.tensors], ("out", "lse", "max_scores")
        allowed = bounded(
            case.tensors[0].dtype,
            captures,
            lambda captures, _: dict(zip(names, dense_of(build)(*wide, captures, case), strict=True)),
        )
    assert_within(dict(zip(names, ours, strict=True)), *allowed)


def test_any_place_and_any_number_of_tiles():
    """Causal, with biases that have gradients; the blocks are smaller than the kernels' tiles."""
    attend = mapped(biased, causal)
    flex_inductor.decisions(clear=True)
    for parts, changed in (
        (PARTS, {}),
        (PARTS, {"lie": "backwards"}),
        (PARTS[:4], {"counts": {6: 0, 7: 3}}),  # a row of the schedule visits these and the next
        ([*PARTS, Part(5, 37, 3, 1), Part(96, 64)], {"counts": {3: 0}}),
    ):
        case = made(causal, parts, (32, 32), **changed)
        judge(attend, dense_of(biased), case.tensors, biases(parts), case)
    assert kernels() == ["forward", "backward"]


@pytest.mark.parametrize(
    "mask_mod, block, dtype, sizes",
    [
        (None, (16, 48), torch.bfloat16, {}),
        (
            causal,
            (96, 80),
            torch.float32,
            {
                "forward": {"block_m": 32, "block_n": 32, "rows": 32},
                "backward": {"block_m": 32, "block_n": 32},
            },
        ),
    ],
    ids=["small", "large"],
)
def test_block_sizes(mask_mod, block, dtype, sizes):
    case = made(mask_mod, PARTS, block, dtype=dtype)
    flex_inductor.decisions(clear=True)
    judge(mapped(None, mask_mod, configs=sizes), dense_of(None), case.tensors, (), case)
    assert kernels() == ["forward", "backward"]


def decoded(lengths: Sequence[int], queries: int = 1) -> list[Part]:
    return [Part(queries, length, length - queries) for length in lengths]


def test_decode():
    """One query of each sequence, from pages."""
    attend = mapped(biased, causal)
    flex_inductor.decisions(clear=True)
    for lengths, counts in (((70, 33, 5, 120, 20), {2: 2}), ((40, 64, 1, 16, 17, 30, 44), {0: 0})):
        parts = decoded(lengths)
        case = made(causal, parts, (1, 16), heads=(8, 2), counts=counts)
        judged_forward(attend, biased, case, biases(parts, 8))
    assert kernels() == ["decode"]


def test_decode_of_several_queries():
    """Of as many as a block has and of fewer, in bf16; keys that lie side by side over several tiles and splits."""
    attend = mapped(None, causal, configs={"decode": {"block_n": 64, "split": 128}})
    flex_inductor.decisions(clear=True)
    for lie in ("in order", "anywhere"):
        parts = [*decoded((700, 90), 3), *decoded((200,), 4), *decoded((64,))]
        case = made(causal, parts, (4, 32), dtype=torch.bfloat16, lie=lie)
        judged_forward(attend, None, case, ())
    assert kernels() == ["decode"]


def in_chunks(query, key, value, captures, case):
    return attention(query, key, value, biased(*captures), case.mask_mod, SCALE, case.inputs)


def spoilt(case: Case, sequence: int, **at: int) -> Case:
    """With NaN in the tensors that `at` names, at the row that mods see as this index."""
    for name, position in at.items():
        side = case.inputs.tile_map[0 if name == "query" else 1]
        batch, row, index = rows_of(side[side[:, SEQUENCE] == sequence])
        where = index == position
        case.tensors[("query", "key", "value").index(name)][batch[where], :, row[where]] = torch.nan
    return case


def test_not_a_number_reaches_what_attends_to_it_alone():
    case = spoilt(made(causal, PARTS, (32, 32)), 4, value=100, key=103, query=95)
    captures = biases(PARTS)
    narrow = [capture.float() for capture in captures]
    gold = run(in_chunks, [tensor.double() for tensor in case.tensors], captures, case)
    assert gold.out.isnan().any() and gold.d_value.isnan().any() and not gold.d_value.isnan().all()
    eager, ours = (run(attend, case.tensors, narrow, case) for attend in (in_chunks, mapped(biased, causal)))
    assert_accurate(ours.named(), eager.named(), gold.named(), torch.float32)


def test_decode_without_what_is_not_a_number():
    parts = [Part(1, length, length - 8) for length in (70, 33, 9, 120, 20)]
    case = spoilt(made(causal, parts, (1, 16), heads=(8, 2)), 3, value=114, key=116)
    narrow = [capture.float() for capture in biases(parts, 8)]
    with torch.no_grad():
        gold = in_chunks(*(tensor.double() for tensor in case.tensors), [c.double() for c in narrow], case)
        found = mapped(biased, causal)(*case.tensors, narrow, case)
    for got, want in zip(found, gold, strict=True):
        assert not want.isnan().any()
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_what_mods_see_may_be_out_of_range():
    """There are fewer batches than sequences: an index below the first need not be one of the second."""

    def of_sequence(table):
        return lambda score, b, h, q_idx, kv_idx: score + table[b]

    parts = decoded((70, 33, 5, 120, 20))
    case = made(None, parts, (1, 16), heads=(8, 2))
    with torch.no_grad(), pytest.raises(RuntimeError, match="index out of bounds"):
        mapped(of_sequence, None)(*case.tensors, [torch.zeros(BATCHES[0])], case)


def test_maps_that_cannot_be_are_refused():
    case = made(causal, PARTS, (32, 32))
    attend = mapped(biased, causal)
    captures = [capture.float().requires_grad_() for capture in biases(PARTS)]
    tensors = [tensor.nan_to_num().requires_grad_() for tensor in case.tensors]

    def with_line(side, line, columns):
        lines = getattr(case.inputs.tile_map, side).clone()
        for column, value in columns.items():
            lines[line, column] = value
        tile_map = case.inputs.tile_map._replace(**{side: lines})
        return attend(*tensors, captures, case._replace(inputs=case.inputs._replace(tile_map=tile_map)))

    for side, line, columns, message in (
        ("keys", 3, {BATCH: 3, ROW: 0, COUNT: 5}, "has 5 rows from row 0 of batch 3; expected at most"),
        ("queries", 2, {ROW: -1, BATCH: 0, COUNT: 1}, "has 1 rows from row -1 of batch 0; expected"),
        ("keys", 0, {COUNT: 33}, "has 33 rows from row .* the schedule's block of 32, within 3 batches of"),
    ):
        with pytest.raises(RuntimeError, match=rf"tile_map.{side}, line {line}, {message}"):
            with_line(side, line, columns)

    places = [lines[0, [BATCH, ROW]].tolist() for lines in case.inputs.tile_map]
    with pytest.raises(RuntimeError, match=r"tile_map.queries, line 4, has rows that an earlier line has"):
        with_line("queries", 4, dict(zip((BATCH, ROW), places[0], strict=True)))
    out, _, _ = with_line("keys", 1, dict(zip((BATCH, ROW), places[1], strict=True)))
    with pytest.raises(RuntimeError, match=r"tile_map.keys, line 1, has rows that an earlier line has"):
        out.sum().backward()


def test_what_is_timed_gets_a_map(monkeypatch):
    """One that kernels accept: tiles that lie in their tensors, apart."""
    made_up = []

    def recorded(self, types, source):
        return lambda *arguments: made_up.append(arguments)

    monkeypatch.setattr(tuner.AsyncCompile, "cpp_pybinding", recorded)
    monkeypatch.setattr(winners, "find", lambda *_: None)
    monkeypatch.setattr(winners, "keep", lambda *_: None)
    parts = decoded((70, 33, 5, 120))
    case = made(causal, parts, (1, 16), heads=(8, 2))
    captures = [capture.float() for capture in biases(parts, 8)]
    with torch.no_grad(), inductor_config.patch(fx_graph_cache=False):
        mapped(biased, causal, max_autotune=True)(*case.tensors, captures, case)
    maps = [t for t in made_up[0] if isinstance(t, Tensor) and t.shape[1:] == (6,)]
    for lines, tensor, block in zip(maps, case.tensors, (1, 16), strict=False):
        batch, row, _ = rows_of(lines)
        places = batch * tensor.size(2) + row
        assert len(places.unique()) == len(places) > len(lines) // 2
        assert (
            (row < tensor.size(2)).all() and (batch < tensor.size(0)).all() and lines[:, COUNT].max() <= block
        )
    assert [len(lines) for lines in maps] == [len(lines) for lines in case.inputs.tile_map]


@pytest.mark.usefixtures("unbuilt")
def test_lookups_are_checked_once_for_a_tile():
    """Lane by lane only where a tile has an index that is out of range, or negative."""
    case = made(causal, PARTS, (32, 32))
    captures = [capture.float().requires_grad_() for capture in biases(PARTS)]
    with config.patch(force_non_lazy_backward_lowering=True):
        _, sources = run_and_get_code(mapped(biased, causal), *case.tensors, captures, case)
    found = [
        (quick, checked)
        for source in sources
        for quick, checked in re.findall(
            r"TILE_COLUMNS\) \{\n[^\n]*\n?if \((.*?)\n\} else \{\n(.*?)\n  \};", source, re.DOTALL
        )
    ]
    # Scores, once more and gradients in the backward, what captures get.
    assert len(found) == 2 + 4 + len(captures)
    for quick, checked in found:
        assert "index out of bounds" not in quick and "index out of bounds" in checked
