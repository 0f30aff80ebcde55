"""A release as a user has it: run by `make release-check` with the Python of an environment that has the wheel alone.

quick.py VERSION TORCH, from a folder that holds no checkout
"""

import subprocess
import sys
import time
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

import torch

TOKENS = 200


def the_backend_is_listed_without_an_import():
    assert "flex_inductor" in torch._dynamo.list_backends()
    assert "flex_inductor" not in sys.modules


def versions_are_those_asked_for():
    import flex_inductor

    assert Path(flex_inductor.__file__).is_relative_to(sys.prefix), flex_inductor.__file__
    assert find_spec("tests") is None
    assert sys.argv[1:] == [distribution("flex-inductor").version, torch.__version__.partition("+")[0]]


def entry_points_can_be_loaded():
    found = distribution("flex-inductor").entry_points
    assert len(found) == 3 and all(callable(point.load()) for point in found), found


def attend(query, key, value, slopes, mask):
    from flex_inductor import flex_attention

    def alibi(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx)

    return flex_attention(query, key, value, alibi, mask)


def judge(attend):
    """The output and all gradients, against dense attention in fp64."""
    from flex_inductor import create_block_mask

    torch.manual_seed(0)
    tensors = [torch.randn(1, 2, TOKENS, 32) for _ in range(3)] + [torch.tensor([0.5, 0.1])]
    mask = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, TOKENS, TOKENS, "cpu")
    inputs = [tensor.clone().requires_grad_() for tensor in tensors]
    gold = [tensor.double().requires_grad_() for tensor in tensors]
    query, key, value, slopes = gold
    distance = torch.arange(TOKENS) - torch.arange(TOKENS)[:, None]
    scores = query @ key.mT / 32**0.5 + slopes[:, None, None] * distance
    expected = scores.masked_fill(distance > 0, -torch.inf).softmax(-1) @ value
    out = attend(*inputs, mask)
    grad = torch.randn_like(out)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    for got, want in zip(
        torch.autograd.grad(out, inputs, grad),
        torch.autograd.grad(expected, gold, grad.double()),
        strict=True,
    ):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5 * want.abs().max().item())


def eager_calls_are_right():
    judge(attend)


def compiled_calls_are_right():
    import flex_inductor

    flex_inductor.decisions(clear=True)
    judge(torch.compile(attend, backend="flex_inductor", fullgraph=True))
    assert {decision.chosen for decision in flex_inductor.decisions()} == {"cpu"}


def kernels_for_cards_compile():
    import flex_inductor

    query = torch.randn(1, 2, TOKENS, 64, dtype=torch.bfloat16)
    report = str(flex_inductor.inspect(flex_inductor.flex_attention, query, query, query, target="sm_90"))
    assert "1 attention call, 1 kernel for sm_90" in report, report


def commands_run():
    command = Path(sys.prefix, "bin", "flex-inductor")
    for argument in ("--version", "env"):
        done = subprocess.run([command, argument], capture_output=True, text=True)
        assert done.returncode == 0 and sys.argv[1] in done.stdout, done.stdout + done.stderr


if __name__ == "__main__":
    for check in (
        the_backend_is_listed_without_an_import,
        versions_are_those_asked_for,
        entry_points_can_be_loaded,
        eager_calls_are_right,
        compiled_calls_are_right,
        kernels_for_cards_compile,
        commands_run,
    ):
        begun = time.perf_counter()
        check()
        print(f"  {check.__name__.replace('_', ' ')} ({time.perf_counter() - begun:.1f} s)", flush=True)
