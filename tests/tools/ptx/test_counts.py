"""What is counted of kernels whose counts are known, and what the model of time makes of them."""

import pytest
import torch

from flex_inductor.tools import ptx, scoreboard
from tests.tools.ptx import kernels


@pytest.mark.parametrize("stride, sectors", [(1, 4), (2, 8), (8, 32), (100, 32)])
def test_sectors_of_a_request(stride, sectors):
    x, out = torch.randn(128 * 100), torch.empty(128)
    counts = ptx.run(kernels.copy_with_stride, 1, x, out, stride, target="sm_80", BLOCK=128)
    assert torch.equal(out, x[: 128 * stride : stride])
    found = counts.by_family()
    loads = [c for i, c in counts.instructions if i.name.startswith("ld.global")]
    assert sum(c.requests for c in loads) == 4
    assert sum(c.sectors for c in loads) == 4 * sectors
    assert sum(c.fewest_sectors for c in loads) == 16 and found["st"].sectors == 16
    assert counts.total.read_bytes == counts.total.written_bytes == 512


# Every lane stores four bytes, so many bytes apart, and loads them again.
SHARED = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry apart(.param .u64 out)
.reqntid 32
{
  .reg .b32 %r<4>;
  .shared .align 16 .b8 room[8192];
  mov.u32 %r1, %tid.x;
  mad.lo.s32 %r2, %r1, STRIDE, room;
  st.shared.b32 [%r2], %r1;
  ld.shared.b32 %r3, [%r2];
  ret;
}
"""


@pytest.mark.parametrize("stride, wavefronts", [(4, 1), (8, 2), (64, 16), (128, 32), (132, 1)])
def test_bank_conflicts(stride, wavefronts):
    text = SHARED.replace("STRIDE, room", f"{stride}, 1024")
    counts = ptx.run_text(text, "apart", 1, [0], num_warps=1)
    assert (counts.total.wavefronts, counts.total.conflicts) == (2 * wavefronts, 2 * wavefronts - 2)


def test_products_and_the_model_of_time():
    a, b, out = torch.randn(64, 64).half(), torch.randn(64, 64).half(), torch.empty(64, 64)
    counts = ptx.run(kernels.matmul, 1, a, b, out, 64, 64, 64, target="sm_80", BM=64, BN=64, BK=32)
    assert counts.total.products == 64**3
    time = scoreboard.time(counts, together=1)
    assert time.card.name == "A100"
    assert time.bound == "latency"  # one block: nothing hides what a warp waits for
    assert time.bounds["tensor cores"] == 64**3 / 1024
    assert time.bounds["latency"] == pytest.approx(sum(time.spent))
    # It has to wait for its first tiles to come from the cache, and for products of one step before the next.
    assert time.bounds["latency"] > time.card.cached and {"copies", "tensor cores"} & time.stalls.keys()


def test_strided_loads_take_longer_and_unknown_cards_have_no_time():
    x, out = torch.randn(128 * 100), torch.empty(128)

    def counts(stride):
        return ptx.run(kernels.copy_with_stride, 1, x, out, stride, target="sm_80", BLOCK=128)

    near, far = counts(1), counts(100)
    assert scoreboard.time(far, 1).bounds["global memory"] > scoreboard.time(near, 1).bounds["global memory"]
    near.target = "sm_75"
    assert scoreboard.time(near, 1) is None
