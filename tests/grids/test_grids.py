"""The machinery of grids: numbers of cases, the dense reference, what the judge finds, and records."""

import json
import re
from pathlib import Path

import pytest
import torch

from flex_inductor import flash, reference
from flex_inductor.verify.dropout import factors
from tests.grids import crew, judge, one, padded
from tests.grids.__main__ import sample, whole
from tests.grids.dense import Meaning, Sequence, dense, kept
from tests.grids.numbers import Numbers
from tests.grids.record import OtherTables, Record
from tests.grids.suite import Group
from tests.grids.tables import SUITES
from tests.grids.work import check

SMALL = [name for name, suite in SUITES.items() if suite.product() < 2000]


@pytest.mark.parametrize("name", SMALL)
def test_each_case_is_in_the_group_that_it_names(name):
    suite = SUITES[name]
    found = [(number, group.number) for group in suite.groups() for number in group.cases()]
    wanted = [n for n in range(suite.product()) if not suite.skips(suite.case(n))]
    assert sorted(number for number, _ in found) == wanted
    assert all(suite.group_of(number).number == group for number, group in found)
    for number, _ in found[:20]:
        case = suite.case(number)
        assert suite.constants(case).items() <= case.items()


def test_docs_have_the_counts():
    table = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()
    rows = re.findall(r"^\| (fa2|fa3|fa4|torch|cudnn) .*\| ([\d,]+) \| ([\d,]+) \|$", table, re.M)
    assert [name for name, *_ in rows] == ["fa2", "fa3", "fa4", "torch", "cudnn"]
    for prefix, product, cases in rows:
        suites = [suite for name, suite in SUITES.items() if name.startswith(prefix + ".")]
        assert int(product.replace(",", "")) == sum(suite.product() for suite in suites)
        assert int(cases.replace(",", "")) == sum(len(g.cases()) for suite in suites for g in suite.groups())


def test_a_sample_is_the_same_each_time_and_has_what_was_asked_for():
    chosen = sample(150, list(SUITES))
    assert sum(len(cases) for _, cases in chosen) == 150
    again = sample(150, list(SUITES))
    assert [(g.suite.name, g.number, c) for g, c in chosen] == [(g.suite.name, g.number, c) for g, c in again]


# The reference.


@pytest.mark.parametrize("dropout_p, softcap", [(0.0, 0.0), (0.3, 0.0), (0.0, 2.0)])
def test_dense_is_what_autograd_makes_of_the_reference(dropout_p, softcap):
    numbers = Numbers("dense")
    q, k, v, up = (
        numbers.normal(*shape).double() for shape in ((9, 4, 8), (33, 2, 8), (33, 2, 6), (9, 4, 6))
    )
    slopes = torch.tensor([0.1, 0.2, 0.3, 0.4])
    meaning = Meaning(0.4, softcap, left=20, right=0, dropout_p=dropout_p, rng_state=(7, 3))
    leaves = [t.transpose(0, 1)[None].detach().requires_grad_() for t in (q, k, v)]

    def score_mod(score, b, h, q_idx, kv_idx):
        score = softcap * torch.tanh(score / softcap) if softcap else score
        at = q_idx + 24
        score = score - slopes[h] * (at - kv_idx).abs()
        return torch.where((kv_idx <= at) & (kv_idx >= at - 20), score, -torch.inf)

    each = torch.eye(33, dtype=torch.float64).expand(1, 2, 33, 33)
    weights, lse, _ = reference.reference(*leaves[:2], each, score_mod, None, 0.4)
    if dropout_p:
        given = torch.tensor([7, 3, 0, round(dropout_p * 65536)])
        lanes = {
            "b": torch.tensor([5]),
            "h": torch.arange(4),
            "q_idx": torch.arange(9),
            "kv_idx": torch.arange(33),
        }
        weights = weights * factors(given, lanes)
        lane = torch.arange(4).view(-1, 1, 1), torch.arange(9).unsqueeze(1), torch.arange(33)
        assert torch.equal(factors(given, lanes)[0] > 0, kept(meaning, 5, *lane))
    out = weights @ leaves[2].repeat_interleave(2, 1)
    grads = torch.autograd.grad(out, leaves, up.transpose(0, 1)[None])
    named = {"out": out, "lse": lse} | dict(zip(("d_query", "d_key", "d_value"), grads, strict=True))
    for head in range(2):
        right, _ = dense(Sequence(5, q, k, v, slopes, up), meaning, head, torch.float64)
        heads = slice(2 * head, 2 * head + 2)
        for name, want in named.items():
            got = want[0, head] if name in ("d_key", "d_value") else want[0, heads]
            torch.testing.assert_close(right[name], got.detach(), msg=lambda m, name=name: f"{name}: {m}")


# What is found.


def _smallest(name):
    """A case of few scores, of the first groups."""
    suite = SUITES[name]
    cases = [number for number in range(min(suite.product(), 400)) if not suite.skips(suite.case(number))]
    lengths = ("seqlen", "seqlen_q", "seqlen_k", "max_seq_len")
    return suite, min(cases, key=lambda number: sum(suite.case(number).get(key, 0) for key in lengths))


@pytest.mark.parametrize(
    "name",
    [
        "fa2.output", "fa2.varlen_qkvpacked", "fa2.varlen_causal", "fa2.kvcache", "fa3.output", "fa3.varlen_output",
        "fa3.kvcache", "fa4.output", "fa4.varlen_output", "fa4.lse_grad", "fa3.combine", "torch.seqlen_lt_block",
        "fa4.score_mods_backward_with_aux", "cudnn.fwd",
    ],
)  # fmt: skip
def test_each_door_serves_a_case(name, monkeypatch):
    monkeypatch.setattr(one, "way_of", lambda group: "chunks")
    suite, number = _smallest(name)
    ((outcome, why),) = one.outcomes(suite.group_of(number), [number])
    assert (outcome, why) == ("ok", "")


def _shifted(function, **changed):
    return lambda *args, **kwargs: function(*args, **kwargs | changed)


def _off(function, place):
    """One number of the output is off by what rounds away in a mean."""

    def off(*args, **kwargs):
        out, lse, *rest = function(*args, **kwargs)
        change = torch.zeros_like(out)
        change[place] = 0.05
        return out + change, lse, *rest

    return off


@pytest.mark.parametrize(
    "wrong, found",
    [
        (lambda f: f, None),
        (lambda f: _shifted(f, causal=False), "lse: error"),
        (lambda f: _shifted(f, softmax_scale=0.18), "out: error"),
        (lambda f: _off(f, (1, 96, 1, 3)), "out: error"),
        (lambda f: lambda q, k, v, **rest: f(q, k.roll(1, 1), v.roll(1, 1), **rest), "d_key: error"),
        (lambda f: lambda q, k, v, **rest: f(q, k, v.detach() + 0 * v, **rest), "d_value: error"),
        (lambda f: lambda *args, **rest: (lambda out, *more: (out * torch.nan, *more))(*f(*args, **rest)), "not all"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_found(monkeypatch, wrong, found):
    monkeypatch.setattr(flash, "flash_attn_func", wrong(flash.flash_attn_func))
    case = {"dtype": "float16", "d": 32, "seqlen": 97, "causal": True, "mha_type": "mha", "grad": True}
    draws = Numbers("wrong")
    problems = check(padded.attend(case), padded.work(case, draws), draws)
    assert any(problem.startswith(found) for problem in problems) if found else not problems


def test_the_judge_wants_infinities_where_they_are():
    right = torch.tensor([1.0, -torch.inf])
    assert judge.wrong("lse", right.clone(), right, right, 1.0) is None
    assert judge.wrong("lse", torch.tensor([-torch.inf, 1.0]), right, right, 1.0)
    assert judge.wrong("lse", torch.tensor([torch.nan, -torch.inf]), right, right, 1.0)


# Records and workers.


def test_a_record_goes_on_after_a_torn_line(tmp_path):
    path = tmp_path / "record"
    suite = SUITES["fa2.bwd_overflow"]
    record = Record(path)
    record.write_done(suite.name, 3, 2, {"not there": 1})
    record.write_failed(f"{suite.name}-5", "off")
    with path.open("a") as file:
        file.write('["done", "fa2.bwd_over')
    again = Record(path)
    assert again.done == {(suite.name, 3): 2} and again.failed == {f"{suite.name}-5": "off"}
    assert again.reasons() == {(suite.name, "not there"): 1}
    left = {group.number: cases for group, cases in whole([suite.name], again)}
    everything = {group.number: group.cases() for group in suite.groups()}
    assert left == everything | {3: everything[3][2:]}
    again.write_done(suite.name, 3, 5, {})
    assert {group.number for group, _ in whole([suite.name], Record(path))} == everything.keys() - {3}
    path.write_text(json.dumps(["tables", "others"]) + "\n")
    with pytest.raises(OtherTables, match="is of other tables"):
        Record(path)


class _Dies:
    """A worker that ends without a word at every third case."""

    started = 0

    def __init__(self):
        _Dies.started += 1

    def send(self, group):
        self.cases = iter(group[2])

    def receive(self):
        number = next(self.cases)
        return (
            None
            if number % 3 == 2
            else [number, "refused" if number % 3 else "ok", "why" if number % 3 else ""]
        )

    def death(self):
        return "the process died, by signal 11"

    def end(self):
        pass


def test_a_case_that_ends_its_process_has_failed_and_the_rest_runs(monkeypatch):
    monkeypatch.setattr(crew, "_Process", _Dies)
    record, suite = Record(None), SUITES["fa2.bwd_overflow"]
    group = Group(suite, 0, suite.places(0))
    crew.run(iter([(group, [0, 1, 2, 3, 5])]), record, 1, 0, 5)
    assert set(record.failed) == {"fa2.bwd_overflow-2", "fa2.bwd_overflow-5"} and _Dies.started == 2
    assert record.done == {(suite.name, 0): 5} and record.reasons() == {(suite.name, "why"): 1}
