"""What differs between versions of torch, and what docs/torch.md says of it."""

import ast
import re
import subprocess
from collections import defaultdict
from importlib.metadata import version
from inspect import signature
from pathlib import Path

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from flex_inductor import compat, create_block_mask, flex_attention, supported
from flex_inductor.lowerings.triton.kernel_builder import dot_precision
from tests.forks import forks

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "torch.md").read_text()
matmul = torch.backends.cuda.matmul


@pytest.mark.parametrize(
    "setting, value, expected",
    [
        ("fp32_precision", "tf32", "tf32"),
        ("fp32_precision", "ieee", "ieee"),
        ("allow_tf32", True, "tf32"),
        ("allow_tf32", False, "ieee"),
        ("set_float32_matmul_precision", "highest", "ieee"),
        ("set_float32_matmul_precision", "high", "tf32"),
        ("set_float32_matmul_precision", "medium", "tf32"),
    ],
)
def test_tf32_is_found_however_it_was_set(setting, value, expected):
    before = matmul.fp32_precision
    try:
        if hasattr(torch, setting):
            getattr(torch, setting)(value)
        else:
            setattr(matmul, setting, value)
        assert (dot_precision(torch.float32), dot_precision(torch.bfloat16)) == (expected, "tf32")
    finally:
        matmul.fp32_precision = "ieee"
        torch.set_float32_matmul_precision("highest")
        matmul.fp32_precision = before


BOUND_BEFORE = """
import torch

class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad

doubled = Doubled.apply
from flex_inductor import flex_attention
q, k, v = (torch.randn(1, 1, 6, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
slope = torch.randn((), dtype=torch.float64, requires_grad=True)

def gradients(score_mod, *wanted):
    try:
        return torch.autograd.grad(flex_attention(q, k, v, score_mod).sin().sum(), wanted)
    except RuntimeError as error:
        print(error)

of_score = gradients(lambda score, b, h, i, j: doubled(score) + slope * j, q, slope)
honest = gradients(lambda score, b, h, i, j: 2 * score + slope * j, q, slope)
print(torch.allclose(of_score[0], 1.5 * honest[0]), torch.allclose(of_score[1], honest[1]))
of_capture = gradients(lambda score, b, h, i, j: 2 * score + doubled(slope / 2) * j, slope)
print(torch.allclose(of_capture[0], 1.5 * honest[1]))
of_capture = gradients(lambda score, b, h, i, j: 2 * score + doubled(slope) * j / 2, slope)
print(of_capture is not None and torch.allclose(of_capture[0], 1.5 * honest[1]))
"""


def test_functions_bound_before_the_import():
    """From torch 2.14 on a capture that is passed as it is gets no gradient there: that is refused."""
    with forks() as new:
        *said, of_capture = new.run(BOUND_BEFORE, ROOT).splitlines()
    assert said[:2] == ["True True", "True"]
    if supported.TORCH < (2, 14):
        assert (said[2:], of_capture) == ([], "True")
    else:
        assert of_capture == "False"
        assert re.fullmatch(
            r"A mod passes the captured tensor `slope` to a torch.autograd.Function \(DoubledBackward\) by a name that "
            r"was bound before flex_inductor was imported.* Call the Function's own .apply, or import .*",
            said[2],
        )


def test_a_sliced_mask_has_the_length_of_its_rows():
    query, key = torch.randn(2, 1, 2, 300, 8)
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 300, 300, device="cpu")
    last = mask[:, :, 2]
    last.mask_mod = lambda b, h, q, k: q + 256 >= k
    rows = query[:, :, 256:]
    if supported.TORCH < (2, 14):
        with pytest.raises(ValueError, match=r"made for Q_LEN=300 .* but query has length 44"):
            flex_attention(rows, key, key, block_mask=last)
    else:
        found, whole = flex_attention(rows, key, key, None, last), flex_attention(query, key, key, None, mask)
        torch.testing.assert_close(found, whole[:, :, 256:])


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def table(title: str) -> list[list[str]]:
    """The cells of the table under a heading of docs/torch.md, without its head."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_each_difference_has_its_test():
    rows = table("What differs")
    assert len(rows) >= 11
    for *_, test in rows:
        path, _, name = test.strip("`").partition("::")
        assert f"def {name}(" in (ROOT / path).read_text(), test
    named = {name for _, _, where, _ in rows for name in re.findall(r"`compat\.(\w+)`", where)}
    assert len(named) == 8 and all(hasattr(compat, name) for name in named)


OWN = ("sinks", "dropout_p", "rng_state", "head_offset", "q_scale", "k_scale", "v_scale")


def test_torchs_arguments_are_ours_and_listed():
    torchs = signature(torch_flex.flex_attention).parameters
    assert [*signature(flex_attention).parameters] == [*torchs, *OWN]
    assert {*signature(torch_flex.create_block_mask).parameters} <= {*signature(create_block_mask).parameters}
    listed = re.findall(r"`(\w+)`", section("FlexAttention's arguments"))
    assert {*torchs, *compat.KERNEL_HINTS} <= {*listed}


@pytest.mark.parametrize(
    "torchs, tritons",
    [("2.12.0", "3.7.0"), ("2.12.1", "3.7.1"), (torch.__version__.partition("+")[0], version("triton"))],
)
def test_an_environment_with_another_torch_gets_its_triton(torchs, tritons):
    command = ["make", "--dry-run", "--always-make", f"build/constraints-{torchs}.txt"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"/torch=={torchs}/" in said and f"/triton=={tritons}/" in said


def private_names() -> dict[str, set[str]]:
    """What the code uses of torch's private parts, by module."""
    found = defaultdict(set)
    for folder in ("flex_inductor", "lowerings", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            names = {name for node in ast.walk(ast.parse(path.read_text())) for name in torchs(node)}
            for name in names:
                if not any(other.startswith(f"{name}.") for other in names):
                    module, _, attribute = name.rpartition(".")
                    found[module].add(attribute)
    return found


def torchs(node: ast.AST) -> list[str]:
    """The private parts of torch that a node of the source names."""
    names = []
    if isinstance(node, ast.ImportFrom) and not node.level:
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    elif isinstance(node, ast.Import):
        names = [f"{alias.name}." for alias in node.names]
    elif isinstance(node, ast.Attribute):
        names = [ast.unparse(node)]
    return [name for name in names if re.fullmatch(r"torch(\.\w*)*?\._(?!_)[\w.]*", name)]


def test_private_functions_are_listed():
    listed = {
        module.strip("`"): set(re.findall(r"`(\w+)`", names)) or {""}
        for module, names, _ in table("Private functions")
    }
    found = {module: {name for name in names if name} or {""} for module, names in private_names().items()}
    assert listed == found
