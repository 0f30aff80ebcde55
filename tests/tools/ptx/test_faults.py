"""Right kernels made wrong on purpose: each is caught, by the check that is meant for it."""

import contextlib
import re

import pytest
import torch

from flex_inductor.tools import ptx
from flex_inductor.tools.ptx.run import compiled_for
from tests.marks import slow_but
from tests.tools.ptx import kernels

K = 96


def matmul(target, change, **options):
    """Run it with a text that `change` has made of its own."""
    # In one piece of memory with `out` last: no other tensor can lie where a store beyond its end goes.
    a, b, out = torch.randn(2 * 64 * K + 2 * 64 * 64).half().split([64 * K, 64 * K, 2 * 64 * 64])
    a, b, out = a.view(64, K), b.view(K, 64), out.view(torch.float32).view(64, 64).fill_(float("nan"))
    args = (a, b, out, 64, 64, K)
    compiled, given = compiled_for(kernels.matmul, args, target, 4, 3, {"BM": 64, "BN": 64, "BK": 32})
    text = compiled.asm["ptx"]
    changed = change(text)
    assert changed != text, "the text has nothing to change"
    ptx.run_text(
        changed, "matmul", 1, [*given, 0, 0], num_warps=4, shared_bytes=compiled.metadata.shared,
        unwritten=[out], most_steps=1_000_000, **options,
    )  # fmt: skip


def without(pattern, count=0):
    return lambda text: re.sub(pattern, "", text, count=count)


def without_fences(text):
    """Triton 3.6 writes none."""
    return without(r"fence\.proxy\.async[^;]*;")(text) + "\n"


def last_without(pattern):
    """Without the last one."""

    def change(text):
        *_, last = re.finditer(pattern, text)
        return text[: last.start()] + text[last.end() :]

    return change


def instead(pattern, other, count=1):
    return lambda text: re.sub(pattern, other, text, count=count, flags=re.DOTALL)


BROKEN = {
    "a copy is not waited for": ("sm_80", without(r"cp\.async\.wait_group[^;]*;"), "race", "a copy to it is under way"),
    "too few copies are waited for": (
        "sm_80", instead(r"cp\.async\.wait_group\s+\d;", "cp.async.wait_group 9;", 0), "race", "under way",
    ),
    "a barrier is missing": ("sm_80", last_without(r"bar\.sync[^;]*;"), "race", "without a barrier"),
    "there are no barriers": ("sm_80", without(r"bar\.sync[^;]*;"), "unwritten", "nobody wrote"),
    "a store is beyond the end": (
        "sm_80", instead(r"(st\.global\S*\s*\[\s*%rd\d+\s*\+\s*)0", r"\g<1>65536"), "out_of_bounds", "of no tensor",
    ),
    "a load is beyond shared memory": (
        "sm_80", instead(r"(ldmatrix\S*\s*\{[^}]*\},\s*\[%r\d+)\+?\d*\]", r"\1+1048576]"), "out_of_bounds", "shared memory",
    ),
    "an address is not a multiple": (
        "sm_80", instead(r"(st\.global\S*\s*\[\s*%rd\d+\s*\+\s*)0", r"\g<1>2"), "misaligned", "multiple",
    ),
    "a copy is left out": (
        "sm_80", instead(r"cp\.async\.cg\.shared\.global[^;]*;", "", 0), "unwritten", "nobody wrote",
    ),
    "one warp waits for all": (
        "sm_80",
        instead(r"ret;", "{ .reg .pred w; .reg .b32 t; mov.u32 t, %tid.x; setp.lt.u32 w, t, 32; @w bar.sync 1; } ret;"),
        "deadlock", "waits",
    ),
    "an instruction that nobody knows": ("sm_80", instead(r"ret;", "quux.f32 %r1; ret;"), "unknown_instruction", "quux.f32"),
    "products are not waited for": (
        "sm_90", without(r"wgmma\.wait_group[^;]*;"), "race", "while a read of it is under way",
    ),
    "the last product is not waited for": (
        "sm_90", last_without(r"wgmma\.wait_group[^;]*;"), "race", "a register is used",
    ),
    "no fence before a product": ("sm_90", without(r"wgmma\.fence[^;]*;"), "race", "wgmma.fence"),
    "a product's register is computed behind the fence": (
        "sm_90",
        instead(
            r"wgmma\.fence\.sync\.aligned;(.*?)(wgmma\.mma_async\S*\s*\{)(%r\d+)",
            r"wgmma.fence.sync.aligned;\1add.f32 \3, \3, \3; \2\3",
        ),
        "race", "computed after the last wgmma.fence",
    ),
    "a load from tensor memory is not waited for": (
        "sm_100", without(r"tcgen05\.wait::ld[^;]*;"), "race", "while a read of it is under way",
    ),
    "a product of tensor memory is not waited for": (
        "sm_100", without(r"@!complete bra\.uni waitLoop;"), "race", "is written without a barrier after a product read it",
    ),
    # Its rows are longer: it reads what the next step is copied to.
    "a descriptor has another swizzle": (
        "sm_100", instead(r"or\.b64(\s+%rd\d+, %rd\d+, )-9223301530671644672;", rf"or.b64\1 {0x4000404000000000};"),
        "race", "is read while a copy to it is under way",
    ),
    "no fence of the async proxy": ("sm_90", without_fences, "race", "async proxy"),
}  # fmt: skip


@pytest.mark.parametrize("name", slow_but(BROKEN, *(name for name in BROKEN if BROKEN[name][0] != "sm_100")))
def test_broken(name):
    target, change, kind, text = BROKEN[name]
    with pytest.raises(ptx.Fault, match=re.escape(text)) as caught:
        matmul(target, change, fences="all" if change is without_fences else kernels.FENCES)
    assert caught.value.kind == kind
    assert "matmul: " in str(caught.value) and "kernels.py:" in str(caught.value)


def test_copies_without_a_fence():
    matmul("sm_90", without_fences, fences="stores")
    with pytest.raises(ValueError, match="fences: expected all or stores, got 'none'"):
        matmul("sm_90", without_fences, fences="none")


def attention_with(pattern: str, added: str):
    """What an attention kernel for sm_90 does with `added` to the text that matches first."""
    tensors = [torch.randn(64, 16).half() for _ in range(3)]
    args = (*tensors, torch.empty(64, 16), 64)
    compiled, given = compiled_for(kernels.attention, args, "sm_90", 4, 1, {"D": 16, "BM": 64, "BN": 64})
    text, count = re.subn(pattern, added, compiled.asm["ptx"], count=1, flags=re.DOTALL)
    assert count == 1
    ptx.run_text(text, "attention", 1, [*given, 0, 0], num_warps=4, shared_bytes=compiled.metadata.shared)


# A product of registers with weights, of which the first is named.
WEIGHTED = r"wgmma\.mma_async[^;{]*\{[^}]*\},\s*\{(%r\d+)[^;]*;"


@pytest.mark.parametrize(
    "change, found", [(r"mov.b32 t, \2;", None), (r"add.u32 \2, \2, 1;", "has changed while")]
)
def test_weights_that_a_product_reads(change, found):
    """They may be read before the wait, as LLVM does, but not change."""
    with pytest.raises(ptx.Fault, match=found) if found else contextlib.nullcontext():
        attention_with(rf"({WEIGHTED}.*?wgmma\.commit_group[^;]*;)", rf"\1 {{ .reg .b32 t; {change} }}")


@pytest.mark.parametrize("behind_a_product", [False, True])
def test_weights_that_are_computed_behind_the_fence(behind_a_product):
    """The assembler moves the fence right before a group's first product, and no further."""
    change = r" add.u32 \5, \5, 0; "
    added = rf"\1\3{change}\4" if behind_a_product else rf"{change}\1\3\4"
    late = pytest.raises(ptx.Fault, match="computed after the last")
    with late if behind_a_product else contextlib.nullcontext():
        attention_with(rf"({WEIGHTED})([^;]*?)({WEIGHTED})", added)


def test_two_blocks_write_one_place():
    with pytest.raises(ptx.Fault, match="by two blocks") as caught:
        ptx.run(kernels.last, (4,), torch.zeros(1, dtype=torch.int32), target="sm_80")
    assert caught.value.kind == "race"


def test_a_value_that_nobody_wrote():
    a, b, out = *torch.randn(2, 64), torch.zeros(64)
    with pytest.raises(ptx.Fault, match="nobody wrote") as caught:
        ptx.run(kernels.add, (1,), a, b, out, 64, target="sm_80", BLOCK=64, unwritten=[b])
    assert caught.value.kind == "unwritten"


# Both warps load a number and add to it, the second one late.
IN_PLACE = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry in_place(.param .u64 x)
.reqntid 64
{
  .reg .pred %p<3>;
  .reg .b32 %r<4>;
  .reg .b64 %rd<4>;
  ld.param.u64 %rd1, [x];
  mov.u32 %r1, %tid.x;
  setp.lt.u32 %p1, %r1, 32;
  mov.u32 %r2, 0;
  @%p1 bra behind;
again:
  add.u32 %r2, %r2, 1;
  setp.lt.u32 %p2, %r2, 1000;
  @%p2 bra again;
behind:
  and.b32 %r1, %r1, 31;
  mul.wide.u32 %rd2, %r1, 4;
  add.u64 %rd3, %rd1, %rd2;
  ld.global.b32 %r3, [%rd3];
  add.u32 %r3, %r3, 1;
  @STORES st.global.b32 [%rd3], %r3;
  ret;
}
"""


def test_numbers_that_are_read_too_late():
    """Triton has several warps compute what one of them stores."""
    x = torch.zeros(32, dtype=torch.int32)
    ptx.run_text(IN_PLACE.replace("STORES", "%p1"), "in_place", 1, [x], num_warps=2)
    assert (x == 1).all()
    with pytest.raises(ptx.Fault, match=r"read without a barrier: warp 0 .*warp 1, lane 0") as caught:
        ptx.run_text(IN_PLACE.replace("@STORES", ""), "in_place", 1, [x], num_warps=2)
    assert (caught.value.kind, "ld.global.b32" in str(caught.value)) == ("race", True)
