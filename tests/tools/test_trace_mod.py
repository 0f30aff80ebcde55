"""A mod run lane by lane on real scores, every value shown by line."""

import sys

import expecttest
import pytest
import torch

import flex_inductor
from flex_inductor import FlexError, mods, trace_mod
from flex_inductor.reference import over_lanes

SLOPES = torch.tensor([0.5, 0.25])
TABLE = torch.arange(12.0).view(2, 6)


def alibi(score, b, h, q_idx, kv_idx):
    distance = kv_idx - q_idx
    return score + SLOPES[h] * distance + TABLE[h][kv_idx]


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def qk(heads=2, kv_heads=2):
    # Query i and key j meet with the score i * j / 2.
    q, k = torch.zeros(1, heads, 6, 4), torch.zeros(1, kv_heads, 6, 4)
    q[..., 0], k[..., 0] = torch.arange(6.0), torch.arange(6.0)
    return q, k


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python does not know the parts of a line")
class Pages(expecttest.TestCase):
    maxDiff = None

    def test_score_mod(self):
        self.assertExpectedInline(
            str(trace_mod(alibi, *qk(), h=1, q_range=(1, 3), kv_range=(0, 3))),
            """\
alibi on queries 1 to 2 (down) and keys 0 to 2 (across)
    score =
        0 0.5   1
        0   1   2

test_trace_mod.py:18  distance = kv_idx - q_idx
    kv_idx - q_idx =
      -1  0  1
      -2 -1  0

test_trace_mod.py:19  return score + SLOPES[h] * distance + TABLE[h][kv_idx]
    SLOPES[h] = 0.25
    SLOPES[h] * distance =
      -0.25     0  0.25
       -0.5 -0.25     0
    score + SLOPES[h] * distance =
      -0.25   0.5  1.25
       -0.5  0.75     2
    TABLE[h] = [6]
    TABLE[h][kv_idx] =, for each key
      6 7 8
    score + SLOPES[h] * distance + TABLE[h][kv_idx] =
      5.75  7.5 9.25
       5.5 7.75   10""",
        )

    def test_mask_mod(self):
        self.assertExpectedInline(
            str(trace_mod(causal, *qk(), q_range=(0, 2), kv_range=(0, 2))),
            """\
causal on queries 0 to 1 (down) and keys 0 to 1 (across)

test_trace_mod.py:23  return q_idx >= kv_idx
    q_idx >= kv_idx =
       True False
       True  True""",
        )


def test_result_is_what_attention_computes():
    q, k = torch.randn(2, 4, 16, 8), torch.randn(2, 2, 16, 8)
    slopes = mods.alibi_slopes(4)
    mod = mods.alibi(slopes)
    found = trace_mod(mod, q, k, b=1, h=3, q_range=(2, 6), kv_range=(1, 9)).result
    score = (q @ k.repeat_interleave(2, 1).transpose(-1, -2)) / 8**0.5
    b, h, m, n = (torch.arange(size) for size in score.shape)
    want = over_lanes(mod, (0,))(score, b, h, m, n)[1, 3, 2:6, 1:9]
    torch.testing.assert_close(found.float(), want)


def test_prints_and_breakpoints_see_plain_values(capsys, monkeypatch):
    stopped = []
    monkeypatch.setattr(
        sys, "breakpointhook", lambda: stopped.append(sys._getframe(1).f_locals["q_idx"].item())
    )

    def mod(score, b, h, q_idx, kv_idx):
        print("score", score.item())
        breakpoint()
        return score

    trace_mod(mod, *qk(), q_range=(2, 4), kv_range=(1, 2))
    assert capsys.readouterr().out == "score 1.0\nscore 1.5\n"
    assert stopped == [2, 3]


def test_a_line_in_a_loop_is_shown_once_for_each_round():
    def mod(score, b, h, q_idx, kv_idx):
        for _ in range(3):
            score = score + 1
        return score

    trace = trace_mod(mod, *qk(), q_range=(0, 1), kv_range=(0, 2))
    assert [[v.item() for v in step.values.values()] for step in trace.steps] == [
        [0, 0],
        [1, 1],
        [2, 2],
        [3, 3],
    ]


REFUSED = {
    "b": ({"b": 1}, "trace_mod: b: expected 0 to 0, got 1."),
    "h": ({"h": 2}, "trace_mod: h: expected 0 to 1, got 2."),
    "q_range": ({"q_range": (6, 8)}, "trace_mod: q_range: expected (start, stop) within 0 to 6, got (6, 8)."),
    "kv_range": (
        {"kv_range": (3, 3)},
        "trace_mod: kv_range: expected (start, stop) within 0 to 6, got (3, 3).",
    ),
    "q": (
        {"q": torch.zeros(3)},
        "trace_mod: q: expected a tensor of 4 dimensions, got a tensor of shape [3] and ",
    ),
    "arity": ({"mod": lambda a: a}, "score_mod must take 5 arguments, "),
    "result": ({"mod": lambda s, b, h, q, k: s > 0}, "score_mod must return one floating-point score, "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input(name):
    changed, message = REFUSED[name]
    q, k = qk()
    with pytest.raises(FlexError) as error:
        flex_inductor.trace_mod(**{"mod": alibi, "q": q, "k": k, **changed})
    assert str(error.value).startswith(message)
