"""The CPU kernels with AMX tiles, forward and backward. See test_amx.py, which runs this in a process of its own."""

import contextlib
import ctypes
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from torch._inductor.async_compile import AsyncCompile

NATIVE = torch.cpu._init_amx()
KINDS = ("configure", "release", "zero", "load", "store", "multiply")

if not NATIVE:
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/amx.so"
        source = Path(__file__).with_name("amx.c")
        subprocess.run(["gcc", "-O3", "-march=native", "-shared", "-fPIC", source, "-o", library], check=True)
        emulator = ctypes.CDLL(library)
    emulator.amx_emulate()
    # What torch asks about the machine, and whether the system permits tiles. The rest follows from the answers.
    torch.cpu._is_amx_tile_supported = torch.cpu._init_amx = lambda: True

from flex_inductor import create_block_mask, fingerprint, flex_attention  # noqa: E402
from flex_inductor.flash import flash_attn_varlen_func  # noqa: E402
from tests.lowerings.cpu.helpers import fused  # noqa: E402
from tests.support import MASKS, MODS, Sizes, attention_of, dense_of, judge, run  # noqa: E402


@pytest.fixture(autouse=True)
def poisoned_scratch(monkeypatch):
    """What a kernel does not write in memory of its own is NaN: tiles read whole rows of whole tiles."""
    compiled = AsyncCompile.cpp_pybinding

    def poisoned(self, types, source):
        check = "if (!start) throw std::bad_alloc();"
        assert (check in source) == ("struct Scratch" in source)
        return compiled(self, types, source.replace(check, f"{check} std::memset(start, 0xff, bytes);"))

    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", poisoned)


@contextlib.contextmanager
def tiles():
    """What runs here multiplies tiles and gives them back. Four products take four loads, two take three; sums that are added
    to something are loaded too."""
    if NATIVE:
        yield
        return
    counts = (ctypes.c_long * len(KINDS)).in_dll(emulator, "amx_counts")
    before = list(counts)
    yield
    did = {kind: after - old for kind, after, old in zip(KINDS, counts, before, strict=True)}
    assert did["multiply"] > 0 and did["configure"] > 0, did
    assert did["multiply"] <= did["load"] <= 1.5 * did["multiply"] + did["store"], did
    assert did["release"] == did["configure"], did


@pytest.mark.parametrize(
    "mod, mask, sizes",
    [
        ("relative_bias", "causal", Sizes(queries=70, keys=101, head_dim=40, value_dim=24)),
        ("bucketed_bias", "per_head", Sizes(queries=133, keys=150, head_dim=7, value_dim=65, kv_heads=1)),
        ("plain", "none", Sizes(batch=1, queries=64, keys=40, head_dim=64, value_dim=64)),
    ],
)
def test_forward_and_backward(mod, mask, sizes):
    captures, build = MODS[mod]
    inputs, captures, mask = sizes.inputs(torch.bfloat16), captures(sizes), MASKS[mask](sizes)
    attend = fused(attention_of(build), dynamic=False)
    torch.set_num_threads(1)
    with tiles():
        first = judge(attend, dense_of(build), inputs, captures, mask).named()
    torch.set_num_threads(2)
    captures = [c.to(torch.bfloat16) if c.is_floating_point() else c for c in captures]
    again = run(attend, inputs, captures, mask).named()
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("queries, heads, kv_heads", [(1, 8, 8), (3, 12, 2), (4, 20, 1)])
@pytest.mark.parametrize("mod, mask", [("relative_bias", "causal"), ("plain", "none")])
def test_decode(queries, heads, kv_heads, mod, mask):
    sizes = Sizes(queries=queries, keys=101, heads=heads, kv_heads=kv_heads, head_dim=40, value_dim=70)
    captures, build = MODS[mod]
    with tiles():
        judge(
            fused(attention_of(build), dynamic=False),
            dense_of(build),
            sizes.inputs(torch.bfloat16),
            captures(sizes),
            MASKS[mask](sizes),
        )


def test_decode_of_sequences_without_queries():
    """Tiles have a row at least: a processor refuses others."""
    torch.manual_seed(0)
    queries, keys = torch.tensor([1, 0, 1, 0]), torch.tensor([70, 40, 130, 0])
    ends = [torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int() for lengths in (queries, keys)]
    packed = [torch.randn(total, heads, 64).bfloat16() for total, heads in ((2, 8), (240, 2), (240, 2))]
    attend = torch.compile(
        lambda *inputs: flash_attn_varlen_func(*inputs, max_seqlen_q=1, max_seqlen_k=130),
        backend="flex_inductor",
    )
    with torch.no_grad(), tiles():
        found = attend(*packed, *ends)
    for row, (start, stop) in enumerate(((0, 70), (110, 240))):
        query, key, value = (
            x.double() for x in (packed[0][row], packed[1][start:stop], packed[2][start:stop])
        )
        weights = torch.einsum("kgd,nkd->kgn", query.view(2, 4, 64), key).div(8).softmax(-1)
        right = torch.einsum("kgn,nkd->kgd", weights, value).view(8, 64)
        assert (found[row] - right).abs().max() < 0.01 * right.abs().max()


def test_blocks_that_are_no_whole_tiles():
    """Products of tiles read what lies beside a block of 16 keys, and it takes no part."""
    sizes = Sizes(batch=1, queries=40, keys=376)
    seen = torch.tensor([0, 1, 0, 0, 1, 1, 0, 1] * 3, dtype=torch.bool)  # of blocks
    mask = create_block_mask(
        lambda b, h, q, kv: seen[kv // 16], None, None, 40, 376, device="cpu", BLOCK_SIZE=16
    )
    unseen = ~seen.repeat_interleave(16)[:376]
    attend = fused(attention_of(None))
    query, *keys_and_values = sizes.inputs(torch.bfloat16)
    with tiles():
        first = judge(attend, dense_of(None), (query, *keys_and_values), (), mask).named()
        spoiled = [
            x.detach().masked_fill(unseen[:, None], float("nan")).requires_grad_() for x in keys_and_values
        ]
        again = run(attend, (query, *spoiled), (), mask).named()
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_tiles_are_released_when_a_mod_raises():
    bias = torch.randn(50)
    q, k, v = Sizes(queries=64, keys=64).inputs(torch.bfloat16)
    attend = fused(
        lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, q, kv: s + bias[kv], enable_gqa=True)
    )
    with torch.no_grad(), tiles(), pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        attend(q, k, v)


def test_caches_know_of_tiles():
    from flex_inductor.lowerings.cpu import tuner

    assert fingerprint.FINGERPRINT.endswith("+AVX512+AMX")
    assert tuner.device().startswith("cpu AVX512+AMX L1")
