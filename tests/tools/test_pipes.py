"""The model of a loop's speed: what instructions ask of each pipe, and the bounds that follow."""

import pytest

from flex_inductor.tools.pipes import CARDS, bound, busiest, cycles, overlap
from flex_inductor.tools.sass import instructions

LOOP = """
.L_loop:
        /*0000*/                   DEPBAR.LE SB0, 0x2 ;
        /*0010*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0020*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT, gsb0 ;
        /*0030*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0040*/                   FFMA R1, R2, R3, R4 ;
        /*0050*/                   MUFU.EX2 R1, R2 ;
        /*0060*/                   FMNMX R1, R2, R3, PT ;
        /*0070*/                   LDSM.16.M88.4 R4, [R1] ;
        /*0080*/                   LDS.128 R4, [R1] ;
        /*0090*/                   UIADD3 UR4, UR4, 0x1, URZ ;
        /*00a0*/                   BRA `(.L_loop) ;
"""


def test_cycles_of_a_multiprocessor():
    found = cycles(instructions(LOOP), 4, "sm_90")
    # 4 warps: a product of 64 x 128 x 16, 32 lanes of each other instruction.
    assert found == {
        "tensor": 64 * 128 * 16 / 2048, "fp32": 1, "integer": 2, "special": 8, "shared": 32, "issue": 11,
    }  # fmt: skip
    assert cycles(instructions(LOOP), 8, "sm_80")["fp32"] == 4
    assert busiest(found) == "tensor 64, shared 32, issue 11"


def test_tf32_has_half_the_rate():
    tf32 = LOOP.replace("64x128x16.F32.BF16", "64x128x8.F32.TF32")
    assert cycles(instructions(tf32), 4, "sm_90")["tensor"] == 64


def test_what_goes_on_while_it_waits():
    found = overlap(instructions(LOOP))
    assert (found.copies, found.products, found.barriers) == ((2,), 1, 1)
    assert overlap(instructions(LOOP.replace("gsb0, 0x1", "gsb0, 0x0"))).products == 0


@pytest.mark.parametrize("target, peak", [("sm_80", 312e12), ("sm_90", 989e12)])
def test_the_bounds(target, peak):
    """Products alone have the published peak; as long again in another pipe, half of it if both take turns."""
    card = CARDS[target]
    alone = bound({"tensor": 100.0, "issue": 100.0}, 2 * 100 * card.multiply_adds, target)
    assert alone.pipe == "tensor" and alone.at_most == pytest.approx(peak, rel=1e-2)
    assert alone.in_step == pytest.approx(peak / 2, rel=1e-2)
    slower = bound({"tensor": 100.0, "special": 200.0}, 2 * 100 * card.multiply_adds, target)
    assert slower.pipe == "special" and slower.at_most == pytest.approx(peak / 2, rel=1e-2)
