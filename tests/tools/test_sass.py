"""Loops found in machine code, and what is read of them."""

from flex_inductor.tools.sass import Loop, instructions, loops, main_loops

# A loop over heads around a main loop, which leaves for a part that lies behind it and comes back; within the
# main loop's addresses lies a way out of it.
NESTED = """
.text.kernel:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_heads:
        /*0010*/                   DEPBAR.LE SB0, 0x1a ;
.L_keys:
        /*0020*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT, gsb0 ;
        /*0030*/              @!P0 BRA `(.L_slow) ;
.L_back:
        /*0040*/               @P3 BRA `(.L_rest) ;
        /*0050*/                   BRA `(.L_out) ;
.L_rest:
        /*0060*/                   DEPBAR.LE SB0, 0x2 ;
        /*0070*/                   BRA.U UP0, `(.L_keys) ;
.L_out:
        /*0080*/               @P1 BRA `(.L_heads) ;
        /*0090*/                   EXIT ;
.L_slow:
        /*00a0*/                   LDL R3, [R1] ;
        /*00b0*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*00c0*/                   BRA `(.L_back) ;
.L_end:
        /*00d0*/                   BRA `(.L_end);
"""


def addresses(found):
    return [[instruction.address for instruction in loop] for loop in found]


def test_a_loop_is_what_can_come_between_its_start_and_the_way_back():
    code = instructions(NESTED)
    assert len(code) == 14
    main = [2, 3, 4, 6, 7, 10, 11, 12]
    outer = [1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12]
    assert addresses(loops(code)) == [outer, main, [13]]
    (loop,) = main_loops(code)
    assert addresses([loop]) == [main]
    assert Loop.of(loop) == Loop(instructions=8, tensor=1, local=1, copies=(2,), barriers=1)


def test_a_way_back_that_is_never_taken_makes_no_loop():
    straight = NESTED.replace("BRA.U UP0, `(.L_keys)", "NOP").replace("@P1 BRA `(.L_heads)", "NOP")
    assert main_loops(instructions(straight)) == []


# As LLVM writes loops for AMD: their condition, where they are entered, comes last.
ROTATED = """
kernel:
\ts_load_dwordx2 s[2:3], s[0:1], 0x0
\ts_branch .LBB0_2
.LBB0_1:                                ;   in Loop: Header=BB0_2 Depth=1
\ts_waitcnt vmcnt(3) lgkmcnt(0)
\tv_mfma_f32_32x32x8_bf16 v[66:81], v[86:87], v[162:163], 0
\ts_barrier
\ts_waitcnt lgkmcnt(0)
\ts_waitcnt vmcnt(0)
\ts_cbranch_scc0 .LBB0_3
.LBB0_2:                                ; =>This Inner Loop Header: Depth=1
\tbuffer_load_dwordx4 v[2:5], v1, s[4:7], 0 offen
\ts_cbranch_scc1 .LBB0_1
\ts_branch .LBB0_1
.LBB0_3:
\ts_endpgm
\t.section\t.rodata
"""


def test_loops_of_amd():
    code = instructions(ROTATED)
    (loop,) = main_loops(code)
    names = [i.operation.split("_", 1)[1] for i in loop]
    assert names[1] == "mfma_f32_32x32x8_bf16" and len(code) == 12
    assert not {"load_dwordx2", "endpgm"} & {*names}
    assert Loop.of(loop) == Loop(instructions=9, tensor=1, local=0, copies=(3, 0), barriers=1)
    assert main_loops(instructions(ROTATED.replace("s_cbranch_scc0 .LBB0_3", "s_endpgm"))) == []
