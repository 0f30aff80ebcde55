"""`flex-inductor bench static`: the loops it finds in machine code, and what it prints of small kernels."""

import json
from dataclasses import replace

import pytest

from flex_inductor.tools import amdgcn, bench_static, cli
from flex_inductor.tools.bench_static import KINDS, Case, Kernel, Loop, count, misses
from flex_inductor.tools.sass import instructions, loops, main_loops, multiply_adds

# A loop over heads around a main loop, which leaves for a part that lies behind it and comes back; within the
# main loop's addresses lies a way out of it.
NESTED = """
.text.kernel:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_heads:
        /*0010*/                   LDG.E R2, desc[UR4][R2.64] ;
.L_keys:
        /*0020*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT, gsb0 ;
        /*0030*/              @!P0 BRA `(.L_slow) ;
.L_back:
        /*0040*/               @P3 BRA `(.L_rest) ;
        /*0050*/                   BRA `(.L_out) ;
.L_rest:
        /*0060*/                   BRA.U UP0, `(.L_keys) ;
.L_out:
        /*0070*/               @P1 BRA `(.L_heads) ;
        /*0080*/                   EXIT ;
.L_slow:
        /*0090*/                   LDL R3, [R1] ;
        /*00a0*/                   BRA `(.L_back) ;
.L_end:
        /*00b0*/                   BRA `(.L_end);
"""


def addresses(found):
    return [[instruction.address for instruction in loop] for loop in found]


def test_a_loop_is_what_can_come_between_its_start_and_the_way_back():
    code = instructions(NESTED)
    assert len(code) == 12
    main = [0x20, 0x30, 0x40, 0x60, 0x90, 0xA0]
    outer = [0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x90, 0xA0]
    assert addresses(loops(code)) == [outer, main, [0xB0]]
    assert addresses(main_loops(code)) == [main]


def test_a_way_back_that_is_never_taken_makes_no_loop():
    straight = NESTED.replace("BRA.U UP0, `(.L_keys)", "NOP").replace("@P1 BRA `(.L_heads)", "NOP")
    assert main_loops(instructions(straight)) == []


@pytest.mark.parametrize(
    "operation, work",
    [
        ("HMMA.16816.F32.BF16", 16 * 8 * 16),
        ("HMMA.1688.F32.BF16", 16 * 8 * 8),
        ("HGMMA.64x128x16.F32.BF16", 64 * 128 * 16 // 4),
    ],
)
def test_work_of_an_instruction(operation, work):
    (code,) = instructions(f"/*0000*/ {operation} R4, R8, R10, R4 ;")
    assert multiply_adds(code) == work


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
    code = amdgcn.instructions(ROTATED)
    (loop,) = main_loops(code)
    names = [i.operation.split("_", 1)[1] for i in loop]
    assert names[1] == "mfma_f32_32x32x8_bf16" and len(loop) == 9 and len(code) == 12
    assert not {"load_dwordx2", "endpgm"} & {*names}
    found = amdgcn.overlap(loop)
    assert (found.copies, found.barriers) == ((3, 0), 1)
    assert multiply_adds(loop[1]) == 32 * 32 * 8
    assert main_loops(amdgcn.instructions(ROTATED.replace("s_cbranch_scc0 .LBB0_3", "s_endpgm"))) == []


def loop_of(products, blocks, head_dim, more=()):
    """A loop with the tensor-core instructions for one tile."""
    tile = blocks["BLOCK_M"] * blocks["BLOCK_N"]
    tensor = products * tile * head_dim // (16 * 8 * 16) // blocks["num_warps"]
    operations = ["HMMA.16816.F32.BF16"] * tensor + list(more)
    return instructions("\n".join(f"/*{16 * i:04x}*/ {op} R1 ;" for i, op in enumerate(operations)))


@pytest.mark.parametrize(
    "kind, products, work, flops_per_byte, repeated",
    [
        ("forward", 2, "forward", 64, 1),
        ("forward", 3, "forward", 64, 1.5),  # some of it by two warps
        ("backward_dq", 3, "dq", 96, 1),
        ("backward_dq", 4, "dq", 96, 4 / 3),
        ("torch_backward", 3, "dq", 96, 1),
        ("torch_backward", 4, "dkdv", 64, 1),
    ],
)
def test_what_a_loop_computes(kind, products, work, flops_per_byte, repeated):
    blocks = {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4}
    loop = count(loop_of(products, blocks, 64, ["LDL", "FADD"]), KINDS[kind], blocks, 64, "sm_90")
    tensor = products * 16
    loop = replace(loop, cycles={}, copies=(), products=0, barriers=0)
    assert loop == Loop(work, "", tensor + 2, tensor, 1, 16, 64 * 32, flops_per_byte, repeated)


def test_too_little_work_for_a_tile():
    blocks = {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4}
    with pytest.raises(ValueError, match="too few"):
        count(loop_of(1, blocks, 64), KINDS["forward"], blocks, 64, "sm_90")


def kernel(side, **loop):
    case = Case("causal", 64, "sm_90")
    given = {"work": "forward", "blocks": "partial", "instructions": 100, "tensor": 10, "local": 0}
    found = Loop(**{**given, "scores": 10, "area": 1280, "flops_per_byte": 64, "repeated": 1, **loop})
    return Kernel(case, side, "forward", {"BLOCK_M": 64}, 200, 16, 1000, True, [found])


def test_goals():
    torchs = kernel("torch")
    assert misses([kernel("ours", instructions=86), torchs]) == []
    assert misses([kernel("ours", instructions=87), torchs]) == [
        "causal D64 sm_90 forward, partial blocks: 0.86 of torch's that are not for tensor cores"
    ]
    bad = replace(
        kernel("ours", instructions=101, tensor=30, local=2, flops_per_byte=32), fits=False, local_bytes=24
    )
    assert misses([bad, torchs]) == [
        "causal D64 sm_90 forward: 1000 bytes of shared memory are too many",
        "causal D64 sm_90 forward: 24 bytes of local memory",
        "causal D64 sm_90 forward: 2 local loads and stores in a forward loop",
        "causal D64 sm_90 forward, partial blocks: 10.10 instructions per score, torch's 10.00",
        "causal D64 sm_90 forward: 32 flops for a byte loaded in forward, torch's 64",
    ]


def test_both_sides_of_one_case(monkeypatch, capsys, tmp_path):
    for name, value in {"LENGTH": 256, "HEAD_DIMS": (16,), "BATCH": 1, "HEADS": 1}.items():
        monkeypatch.setattr(bench_static, name, value)
    file = tmp_path / "found.json"
    assert cli.main(["bench", "static", "--target", "sm_80", "--only", "causal", "--json", str(file)]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| causal D16 sm_80")]
    assert [row.split(" | ")[1] for row in rows] == ["forward", "backward"] * 2  # the model's table too
    assert "fp32" in rows[2] or "issue" in rows[2]
    kernels = json.loads(file.read_text())["kernels"]
    named = [(k["side"], k["kind"], [(i["work"], i["blocks"]) for i in k["loops"]]) for k in kernels]
    both = ("partial", "full")
    assert named == [
        ("ours", "forward", [("forward", b) for b in both]),
        ("ours", "backward_dq", [("dq", b) for b in both]),
        ("ours", "backward_dkdv", [("dkdv", b) for b in both]),
        ("torch", "forward", [("forward", b) for b in both]),
        ("torch", "torch_backward", [(work, b) for work in ("dq", "dkdv") for b in both]),
    ]
    for found in kernels:
        assert found["fits"] and 0 < found["registers"] <= 255
        for loop in found["loops"]:
            assert 0 < loop["tensor"] < loop["instructions"]
        partial, full = (
            sum(i["instructions"] for i in found["loops"] if i["blocks"] == blocks) for blocks in both
        )
        assert partial > full  # it runs mask_mod


def test_what_is_only_read(monkeypatch, capsys):
    for name, value in {"LENGTH": 256, "HEAD_DIMS": (16,), "BATCH": 1, "HEADS": 1}.items():
        monkeypatch.setattr(bench_static, name, value)
    assert cli.main(["bench", "static", "--target", "gfx942", "--only", "causal"]) == 0
    out = capsys.readouterr().out
    rows = [line.split(" | ") for line in out.splitlines() if line.startswith("| causal D16 gfx942")]
    assert [row[1] for row in rows] == ["forward", "backward_dq", "backward_dkdv"]
    for row in rows:
        partial, full = map(float, row[7:9])
        assert partial > full > 0 and int(row[9]) > 0
    assert "Goals" not in out and "model, not" not in out


def test_unknown_case(capsys):
    assert cli.main(["bench", "static", "--only", "nothing like it"]) == 2
    assert "no case contains 'nothing like it'" in capsys.readouterr().err
