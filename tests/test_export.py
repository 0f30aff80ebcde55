"""torch.export of modules with attention: in memory, as files read by another process, as packages."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths

import flex_inductor
from flex_inductor import create_block_mask, flex_attention, masks
from flex_inductor.errors import FlexNotImplementedError, FlexValueError
from flex_inductor.reference import reference

LENGTH = torch.export.Dim("length", min=2, max=140)
DYNAMIC = ({2: LENGTH},) * 3


def inputs(length=64):
    return tuple(torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3))


def saved_and_loaded(module, args, dynamic_shapes=None, strict=False):
    file = io.BytesIO()
    torch.export.save(torch.export.export(module, args, dynamic_shapes=dynamic_shapes, strict=strict), file)
    file.seek(0)
    return torch.export.load(file).module()


class Documents(torch.nn.Module):
    """A mask made in the graph, for as many tokens as there are, and a learnt bias."""

    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.linspace(-1, 1, 300))
        self.register_buffer("document", torch.arange(140) // 40)

    def score_mod(self, score, b, h, q_idx, kv_idx):
        return score + self.bias[q_idx - kv_idx + 150]

    def mask_mod(self, b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (self.document[q_idx] == self.document[kv_idx])

    def mask_of(self, q, k):
        return create_block_mask(self.mask_mod, None, None, q.shape[2], k.shape[2], q.device, BLOCK_SIZE=32)

    def forward(self, q, k, v):
        return flex_attention(q, k, v, self.score_mod, self.mask_of(q, k))

    def expected(self, q, k, v):
        return reference(q, k, v, self.score_mod, self.mask_of(q, k))[0]


def unfused(score, b, h, q_idx, kv_idx):
    return torch.special.polygamma(1, score.abs() + 1)


def near(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx).abs() < 9


class Packaged(Documents):
    """Two calls more: one that no kernel inlines, and one of a mask; neither captures anything."""

    def forward(self, q, k, v):
        window = create_block_mask(near, None, None, q.shape[2], k.shape[2], q.device, BLOCK_SIZE=32)
        return flex_attention(flex_attention(super().forward(q, k, v), k, v, unfused), k, v, None, window)

    def expected(self, q, k, v):
        window = create_block_mask(near, None, None, q.shape[2], k.shape[2], q.device, BLOCK_SIZE=32)
        second = reference(super().expected(q, k, v), k, v, unfused)[0]
        return reference(second, k, v, None, window)[0]


LOAD = """
import sys, torch, flex_inductor
from pathlib import Path
folder = Path(sys.argv[1])
inputs = torch.load(folder / "inputs")
found = {}
for path in folder.glob("*.pt2"):
    package = path.stem == "package"
    run = torch._inductor.aoti_load_package(str(path)) if package else torch.export.load(path).module()
    dynamic = package or path.stem.endswith("True")
    found[path.stem] = {n: run(*args).detach() for n, args in inputs.items() if dynamic or n == 64}
torch.save(found, folder / "found")
"""


def test_files_that_another_process_loads(tmp_path):
    """Exported both ways, for one length and for many, and compiled into a package."""
    args, module = inputs(), Documents()
    for strict in (True, False):
        for dynamic in (True, False):
            program = torch.export.export(
                module, args, dynamic_shapes=DYNAMIC if dynamic else None, strict=strict
            )
            torch.export.save(program, tmp_path / f"strict={strict} dynamic={dynamic}.pt2")
    flex_inductor.decisions(clear=True)
    packaged = Packaged()
    # What is compiled once is done sooner than headers for it.
    with torch.no_grad(), torch._inductor.config.patch({"aot_inductor.precompile_headers": False}):
        program = torch.export.export(packaged, args, dynamic_shapes=DYNAMIC, strict=False)
        torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "package.pt2"))
    assert [decision.chosen for decision in flex_inductor.decisions()] == ["cpu", "chunked", "cpu"]

    # One tile of queries, several with a rest, and no more than one query beside none.
    by_length = {n: tuple(t.detach() for t in inputs(n)) for n in (64, 100, 20, 2)}
    torch.save(by_length, tmp_path / "inputs")
    command = [sys.executable, "-W", "ignore", "-c", LOAD, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "found")
    assert sorted(map(len, found.values())) == [1, 1, 4, 4, 4]
    for name, outputs in found.items():
        of = packaged if name == "package" else module
        for n, out in outputs.items():
            want = of.expected(*by_length[n]).detach()
            assert torch.allclose(out, want, rtol=1e-5, atol=1e-5), (name, n, (out - want).abs().max())


class Held(torch.nn.Module):
    """A learnt bias, and a mask that the module holds: kernels alone, nothing of ours runs."""

    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.linspace(-1, 1, 2))
        self.mask = create_block_mask(masks.causal(), None, None, 64, 64, compact=True)

    def score_mod(self, score, b, h, q_idx, kv_idx):
        return score + self.bias[h] * (kv_idx - q_idx)

    def forward(self, q, k, v):
        return flex_attention(q, k, v, self.score_mod, self.mask)


WITHOUT = """
import sys
sys.modules["flex_inductor"] = None  # as where it is not installed
import torch
folder = sys.argv[1]
run = torch._inductor.aoti_load_package(f"{folder}/package.pt2")
torch.save(run(*torch.load(f"{folder}/inputs")), f"{folder}/found")
"""

PROGRAM = """
#include <ATen/ops/allclose.h>
#include <ATen/ops/from_file.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

int main(int, char** argv) {
  const std::string folder = argv[1];
  const auto read = [&](const char* name) {
    return at::from_file(folder + "/" + name, false, 1 * 2 * 64 * 8, at::kFloat).view({1, 2, 64, 8});
  };
  torch::inductor::AOTIModelPackageLoader model(folder + "/package.pt2");
  std::vector<at::Tensor> inputs{read("query"), read("key"), read("value")};
  return at::allclose(model.run(inputs)[0], read("wanted"), 1e-5, 1e-5) ? 0 : 1;
}
"""


def test_a_package_of_kernels_runs_without_us_and_in_cxx(tmp_path):
    args, module = tuple(t.detach() for t in inputs()), Held()
    flex_inductor.decisions(clear=True)
    with torch.no_grad(), torch._inductor.config.patch({"aot_inductor.precompile_headers": False}):
        program = torch.export.export(module, args, strict=False)
        torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "package.pt2"))
        wanted = reference(*args, module.score_mod, create_block_mask(masks.causal(), None, None, 64, 64))[0]
    assert [decision.chosen for decision in flex_inductor.decisions()] == ["cpu"]

    torch.save(args, tmp_path / "inputs")
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(torch.load(tmp_path / "found"), wanted, rtol=1e-5, atol=1e-5)

    for name, tensor in zip(("query", "key", "value", "wanted"), (*args, wanted), strict=True):
        tensor.contiguous().numpy().tofile(tmp_path / name)
    (tmp_path / "main.cpp").write_text(PROGRAM)
    libraries = str(Path(torch.__file__).parent / "lib")
    build = ["g++", "-std=c++20", "main.cpp", "-o", "main", *(f"-I{path}" for path in include_paths())]
    build += [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ltorch", "-ltorch_cpu", "-lc10"]
    subprocess.run(build, cwd=tmp_path, check=True)
    assert subprocess.run([tmp_path / "main", tmp_path]).returncode == 0
    (torch.from_numpy(wanted.numpy()) * 2).contiguous().numpy().tofile(tmp_path / "wanted")
    assert subprocess.run([tmp_path / "main", tmp_path]).returncode == 1


class Rounded(torch.autograd.Function):
    """A derivative that no graph of its forward has."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


class Numbers(torch.nn.Module):
    """Mods that close over numbers which change with the length, and one with a derivative of its own."""

    def forward(self, q, k, v):
        length = q.shape[2]

        def score_mod(score, b, h, q_idx, kv_idx):
            return Rounded.apply(4 * score) + step * q_idx / 7 + kv_idx / half

        width, step, slope, half = length // 3, length // 2, length * 0.01, length * 0.5
        block_mask = create_block_mask(
            lambda b, h, q_idx, kv_idx: ((q_idx - kv_idx).abs() <= width) & (q_idx * slope < 90),
            None, None, length, length, q.device, BLOCK_SIZE=16,
        )  # fmt: skip
        return flex_attention(q, k, v, score_mod, block_mask, scale=slope, return_lse=True)


def check_with_gradients(ours, theirs, args):
    got, want = ours(*args), theirs(*args)
    assert len(got) == len(want)
    upstream = [torch.randn_like(t) for t in want]
    for one, other in zip(
        (*got, *torch.autograd.grad(got, args, upstream)),
        (*want, *torch.autograd.grad(want, args, upstream)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_changing_numbers_and_derivatives_of_their_own():
    loaded = saved_and_loaded(Numbers(), inputs(48), DYNAMIC)
    for length in (48, 7, 100):
        check_with_gradients(loaded, Numbers(), inputs(length))


class Unchanged(torch.nn.Module):
    """Mods that give back what they are given."""

    def __init__(self):
        super().__init__()
        self.number = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, q, k, v):
        first = flex_attention(q, k, v, lambda score, b, h, q_idx, kv_idx: score)
        return first, flex_attention(q, k, v, lambda score, b, h, q_idx, kv_idx: self.number)


def test_mods_that_give_back_an_argument():
    check_with_gradients(saved_and_loaded(Unchanged(), inputs()), Unchanged(), inputs())


class Halved(torch.nn.Module):
    def __init__(self, masked):
        super().__init__()
        self.masked = masked

    def forward(self, q, k, v):
        length = q.shape[2]
        if not self.masked:
            return flex_attention(q, k, v, lambda score, b, h, q_idx, kv_idx: score * (length // 2))
        mask = create_block_mask(lambda b, h, q, kv: q < length // 2, None, None, length, length, "cpu", 16)
        return flex_attention(q, k, v, None, mask)


@pytest.mark.parametrize("masked", [False, True])
def test_arithmetic_on_a_length_inside_a_mod(masked):
    with pytest.raises(
        FlexNotImplementedError, match=r"Compute it before the mod \(half = length // 2\), or export w"
    ):
        torch.export.export(Halved(masked), inputs(), dynamic_shapes=DYNAMIC, strict=False)
    program = torch.export.export(Halved(masked), inputs(), dynamic_shapes=DYNAMIC, strict=True)
    args = inputs(30)
    torch.testing.assert_close(program.module()(*args), Halved(masked)(*args))


class WrittenOut(torch.nn.Module):
    """Tables of several dtypes inside of mods: in a score, in its derivative, in the masks of a call and of its schedule."""

    def forward(self, q, k, v):
        def score_mod(score, b, h, q_idx, kv_idx):
            return torch.tensor([1.5, -2.0])[h] * score**2 + torch.tensor([], dtype=torch.int64).sum()

        def mask_mod(b, h, q_idx, kv_idx):
            return torch.tensor([True, False, True])[kv_idx % 3] | (q_idx < torch.tensor([40, 70])[h])

        length = q.shape[2]
        mask = create_block_mask(mask_mod, None, 2, length, length, "cpu", 32)
        return (flex_attention(q, k, v, score_mod, mask),)


def test_tables_that_are_written_out_in_mods():
    check_with_gradients(saved_and_loaded(WrittenOut(), inputs(), DYNAMIC), WrittenOut(), inputs(100))


class Given(torch.nn.Module):
    """Schedules of both kinds that were there before, and grouped heads."""

    def __init__(self):
        super().__init__()
        self.masks = [
            create_block_mask(near, None, None, 48, 48, "cpu", 16, compact=compact) for compact in (0, 1)
        ]

    def forward(self, q, k, v):
        k, v = k[:, :1], v[:, :1]
        hints = {"BLOCK_M": 32}
        return tuple(
            flex_attention(q, k, v, None, m, enable_gqa=True, kernel_options=hints) for m in self.masks
        )


@pytest.mark.parametrize("strict", [True, False])
def test_schedules_that_were_there_before(strict):
    check_with_gradients(saved_and_loaded(Given(), inputs(48), strict=strict), Given(), inputs(48))


def test_a_loaded_program_compiles_to_fused_kernels():
    loaded = saved_and_loaded(Documents(), inputs())
    flex_inductor.decisions(clear=True)
    args = tuple(t.detach() for t in inputs())
    with torch.no_grad():
        out = torch.compile(loaded, backend="flex_inductor", fullgraph=True)(*args)
    torch.testing.assert_close(out, Documents().expected(*args).detach())
    assert [decision.chosen for decision in flex_inductor.decisions()] == ["cpu"]


@pytest.mark.parametrize(
    "change, match",
    [
        (lambda text: "import os", "Expecting value"),
        (lambda text: text.replace('"inputs":{}', '"inputs":{"os":null}'), "inputs are"),
        (lambda text: text.replace('"inputs":{}', '"inputs":{"score_captures":[{"tensor":0}]}'), "there is no tensor 0"),
        (lambda text: text.replace('"lse":', '"lse":"os","lse_":'), "expected hints, lse, max_scores"),
        (lambda text: text.replace('"lse":false', '"lse":"os"'), "the options are"),
        (lambda text: text.replace('"scale":0.5', '"scale":"1"'), "the scale is 1"),
        (lambda text: text.replace('"hints":{}', '"hints":{"a":[]}'), "the options are"),
        (lambda text: text.replace("aten::neg", "os.getpid"), "'os.getpid', which is not an operator registered"),
    ],
)  # fmt: skip
def test_a_saved_call_is_data(change, match):
    class Negated(torch.nn.Module):
        def forward(self, q):
            return flex_attention(q, q, q, lambda score, *_: -score, scale=0.5)

    q = torch.randn(1, 1, 2, 4)
    (node,) = torch.export.export(Negated(), (q,)).graph.find_nodes(
        op="call_function", target=torch.ops.flex_inductor.saved_attention.default
    )
    text = node.args[4]
    torch.ops.flex_inductor.saved_attention(q, q, q, [], text)
    with pytest.raises(FlexValueError, match=match):
        torch.ops.flex_inductor.saved_attention(q, q, q, [], change(text))


class WithRows(torch.nn.Module):
    def forward(self, q, k, v):
        return flex_attention(q, k, v, return_aux=flex_inductor.AuxRequest(lse=True, entropy=True))


def test_saved_programs_return_what_was_asked_for():
    args = inputs()
    out, aux = saved_and_loaded(WithRows(), args)(*args)
    want, beside = WithRows()(*args)
    assert isinstance(aux, flex_inductor.AuxOutput) and aux.max_scores is None
    torch.testing.assert_close([out, aux.lse, aux.entropy], [want, beside.lse, beside.entropy])
