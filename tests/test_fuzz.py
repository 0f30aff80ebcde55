"""What the fuzzer makes of a failure, and weights that its oracle must allow to be flushed."""

import pytest

from tests.fuzz import plain
from tests.fuzz.__main__ import script
from tests.fuzz.smaller import smaller


def test_a_failure_is_made_small():
    def check(program, several):
        assert program.heads % program.kv_heads == 0
        for values in several:
            assert "tanh" not in (program.score or "") or values.keys < 30, "out: error"

    program = plain.Program("torch.tanh(score * 2) + score", "q_idx >= kv_idx", heads=6, sinks=True)
    calls = [plain.Values(3, 20, keys, 1.0) for keys in (5, 77, 10)]
    found, several = smaller(check, program, calls)
    assert found == plain.Program("torch.tanh", heads=1, head_dim=1, value_dim=1, block=1)
    assert several == [plain.Values(1, 1, 30, seed=0)]
    text = script("cpu", "plain", found, several)
    assert len(text.splitlines()) < 30
    ran: list = []
    known = {"__name__": "__main__", "checked": lambda *call: ran.append(call)}
    exec(compile(text.replace("plain.check", "checked"), "script", "exec"), known)
    assert ran == [("cpu", found, several)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("below", [70, 81, 86, 88])
def test_the_entropy_may_count_weights_that_are_nearly_flushed(below, dtype):
    program = plain.Program(f"score - {below}", dtype=dtype, sinks=True, entropy=True)
    plain.check("eager", program, [plain.Values()])
