"""The CPU kernels' configs: pruned by caches, honoured when asked for, timed under max-autotune."""

from types import SimpleNamespace

import expecttest
import pytest
import sympy
import torch
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code

import flex_inductor
from flex_inductor import create_block_mask, flex_attention
from flex_inductor.backend import flex_inductor as backend
from flex_inductor.lowerings.cpu import configs
from flex_inductor.lowerings.cpu.configs import TABLES, BackwardConfig, Caches, DecodeConfig, ForwardConfig
from flex_inductor.visits import Bounds, TileMap
from flex_inductor.visits.places import SEQUENCE
from tests.lowerings.cpu.helpers import SIZES, check
from tests.support import MODS, attention_of, causal


class Tables(expecttest.TestCase):
    maxDiff = None

    def test_by_cache_and_head_dim(self):
        lines = []
        for first, second, D in ((32, 256, 64), (32, 256, 256), (48, 1024, 64), (48, 2048, 64)):
            problem = SimpleNamespace(dtype=torch.float32, D=D, V=D)
            lines.append(f"L1 {first}K L2 {second}K D{D}")
            for kernel in TABLES:
                fitting, rejected = configs.candidates(kernel, problem, Caches(first << 10, second << 10))
                sizes = " ".join("x".join(map(str, config)) for config in fitting)
                lines.append(f"  {kernel}: {sizes} ({len(rejected)} too large)")
        self.assertExpectedInline(
            "\n".join(lines),
            """\
L1 32K L2 256K D64
  forward: 128x256x16 128x128x32 64x128x32 256x128x32 128x64x64 64x64x32 32x32x32 (1 too large)
  decode: 64x2048 128x2048 64x4096 64x1024 32x1024 (0 too large)
  backward: 64x128 128x64 64x64 32x128 32x32 (2 too large)
L1 32K L2 256K D256
  forward: 64x64x32 32x32x32 (6 too large)
  decode: 64x2048 128x2048 64x4096 64x1024 32x1024 (0 too large)
  backward: 32x32 (6 too large)
L1 48K L2 1024K D64
  forward: 128x256x16 128x128x32 64x128x32 256x128x32 128x64x64 128x256x32 64x64x32 32x32x32 (0 too large)
  decode: 64x2048 128x2048 64x4096 64x1024 32x1024 (0 too large)
  backward: 64x128 128x128 128x64 256x128 64x64 32x128 32x32 (0 too large)
L1 48K L2 2048K D64
  forward: 128x256x16 128x128x32 64x128x32 256x128x32 128x64x64 128x256x32 64x64x32 32x32x32 (0 too large)
  decode: 64x2048 128x2048 64x4096 64x1024 32x1024 (0 too large)
  backward: 256x128 64x128 128x128 128x64 64x64 32x128 32x32 (0 too large)""",
        )

    def test_why_one_is_left_out(self):
        problem = SimpleNamespace(dtype=torch.bfloat16, D=256, V=256)
        _, rejected = configs.candidates("forward", problem, Caches(32 << 10, 256 << 10))
        self.assertExpectedInline(
            "\n".join(f"{config}: {why}" for config, why in rejected),
            """\
ForwardConfig(block_m=128, block_n=256, rows=16): 512 KB in a second-level cache with room for 256
ForwardConfig(block_m=128, block_n=128, rows=32): 384 KB in a second-level cache with room for 256
ForwardConfig(block_m=256, block_n=128, rows=32): 640 KB in a second-level cache with room for 256
ForwardConfig(block_m=128, block_n=64, rows=64): 320 KB in a second-level cache with room for 256
ForwardConfig(block_m=128, block_n=256, rows=32): 36 KB in a first-level cache with room for 24""",
        )


def made():
    """The kernels of the decisions so far."""
    return {choice.kernel: choice for decision in flex_inductor.decisions() for choice in decision.kernels}


def attend(*inputs, kernel="lists", mod=None, captures=(), queries=150, needs_grad=True, **options):
    """Compile one call afresh; its output and the decisions made."""
    torch._dynamo.reset()
    flex_inductor.decisions(clear=True)
    q, k, v = (torch.randn(1, 2, length, 24, requires_grad=needs_grad) for length in (queries, 170, 170))
    mask = create_block_mask(causal, None, None, queries, 170, device="cpu", compact=kernel == "runs")
    compiled = torch.compile(
        lambda q, k, v: flex_attention(q, k, v, mod, mask), backend=backend, dynamic=False, **options
    )
    out = compiled(q, k, v)
    if needs_grad:
        out.sum().backward()
    return made()


def test_sizes_asked_for_are_used():
    asked = {
        "forward": {"block_m": 64, "block_n": 96, "rows": 64},
        "backward": {"block_m": 32, "block_n": 96},
    }
    compiled = torch.compile(
        attention_of(MODS["relative_bias"][1]),
        backend=backend,
        fullgraph=True,
        dynamic=False,
        options={"route": "cpu", "configs": asked},
    )
    flex_inductor.decisions(clear=True)
    check("relative_bias", "causal", attend=compiled)
    assert {kernel: choice.config for kernel, choice in made().items()} == asked
    assert {choice.why for choice in made().values()} == {"asked for"}


def test_sizes_asked_for_are_in_the_code(unbuilt):
    q, k, v = (torch.randn(1, 2, 150, 24) for _ in range(3))
    compiled = torch.compile(
        flex_attention, backend=backend, options={"configs": {"forward": {"block_m": 96}}}, dynamic=False
    )
    _, (code,) = run_and_get_code(compiled, q, k, v)
    assert "constexpr int64_t TILE_M = 96;" in code and "constexpr int64_t TILE_N = 256;" in code


@pytest.mark.parametrize(
    "asked, dtype, message",
    [
        (
            {"foward": {"block_m": 64}},
            torch.float32,
            "has no kernel 'foward' to configure, only forward, dec",
        ),
        (
            {"forward": {"BLOCK_M": 64}},
            torch.float32,
            r"configs\['forward'\] has no 'BLOCK_M', only block_m, b",
        ),
        ({"forward": {"block_m": 40}}, torch.float32, "block_m is 40, and must be a multiple of 32 from 32"),
        ({"forward": {"rows": 0}}, torch.float32, "rows is 0, and must be a multiple of 16 from 16"),
        ({"forward": {"block_m": 64}}, torch.float64, "chunked: has no kernel to configure"),
    ],
)
def test_sizes_that_cannot_be_used_raise(asked, dtype, message):
    q, k, v = (torch.randn(1, 2, 40, 8, dtype=dtype) for _ in range(3))
    compiled = torch.compile(flex_attention, backend=backend, options={"configs": asked})
    with pytest.raises(Exception, match=message) as raised:
        compiled(q, k, v)
    assert "no route can serve this call" in str(raised.value)


@pytest.fixture
def two_of_each(monkeypatch, tmp_path):
    """A folder of its own for what is timed, no cache of graphs, and tables short enough to time in a test."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(TABLES, "forward", [ForwardConfig(128, 128, 32), ForwardConfig(32, 32, 32)])
    monkeypatch.setitem(TABLES, "decode", [DecodeConfig(64, 2048), DecodeConfig(32, 1024)])
    monkeypatch.setitem(TABLES, "backward", [BackwardConfig(64, 128), BackwardConfig(32, 32)])
    with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        yield


TUNED = {"mode": "max-autotune-no-cudagraphs"}
ONCE_AND_AGAIN = "fastest when timed: ", "fastest when timed before: "


def test_max_autotune_times_once_and_what_is_fastest_is_right(two_of_each):
    for why in ONCE_AND_AGAIN:
        torch._dynamo.reset()
        flex_inductor.decisions(clear=True)
        attend = attention_of(MODS["relative_bias"][1])
        compiled = torch.compile(attend, backend=backend, fullgraph=True, dynamic=True, **TUNED)
        for queries in (150, 90):
            sizes = SIZES._replace(queries=queries)
            check("relative_bias", "per_batch", torch.bfloat16, sizes=sizes, attend=compiled)
        assert [*made()] == ["forward", "backward"]
        for choice in made().values():
            assert choice.why.startswith(why) and choice.others[0][1].endswith(" ms")


@pytest.mark.slow
def test_max_autotune_times_runs_and_few_queries(two_of_each):
    for why in ONCE_AND_AGAIN:
        assert attend(kernel="runs", needs_grad=False, **TUNED)["forward"].why.startswith(why)
    decoded = attend(queries=1, needs_grad=False, **TUNED)
    assert decoded["decode"].why.startswith("fastest when timed: ")


def test_sizes_that_a_kernel_meets_late_have_names_of_their_own():
    import torch._inductor.lowering  # noqa: F401  # before what torch imports in a circle

    from flex_inductor.lowerings.cpu.template import NamedSizes

    sizes = NamedSizes()
    sizes.sizevars = {sympy.Symbol("s4"): "ks4"}
    assert len({sizes.size(sympy.Symbol(f"s{i}")) for i in range(4, 9)}) == 5


def test_made_up_sequences_share_all_tiles_out():
    import torch._inductor.lowering

    from flex_inductor.lowerings.cpu import tuner

    problem = SimpleNamespace(B=1, B_kv=4, M=100, N=70, blocks=(16, 32))
    grid = (7, 9)
    for count in (1, 3, 8):
        table = torch.tensor([tuner._example_sequence(n, grid, problem, count) for n in range(count)]).int()
        queries, keys = (tuner._example_map(role, grid, problem, count) for role in ("q_tiles", "kv_tiles"))
        bounds = Bounds(16, 32, None, 0, 0, sequence_table=table)
        partial, full = bounds.all_ends("keys", 0, 0, TileMap(queries, keys), table.device)
        visited = sum(((ends[1] - ends[0]).squeeze(0) for ends in (partial, full)), torch.zeros(7))
        of_keys = keys[:, SEQUENCE].bincount(minlength=count)[queries[:, SEQUENCE]]
        assert ((visited >= 0) & (visited <= of_keys)).all()
        assert visited[-1] == of_keys[-1] > 0  # the last query sees all keys of its sequence


def test_what_made_up_inputs_cannot_run_is_not_timed(two_of_each):
    """Ids that are made up are zeros: looked up less one hundred, they are outside."""
    ids, table = torch.full((150,), 101), torch.randn(4)
    found = attend(
        mod=lambda s, b, h, q_idx, kv_idx: s + table[ids[q_idx] - 100],
        needs_grad=False,
        **TUNED,
    )
    assert found["forward"].why.startswith("first that fits; not timed: ")
