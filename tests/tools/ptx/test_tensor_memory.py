"""Tensor memory of sm_100, instruction by instruction: exact products of small integers, and what is not allowed."""

import re

import pytest
import torch

from flex_inductor.tools import ptx
from tests.marks import slow_but
from tests.tools.ptx import kernels

N = 64
TYPES = {torch.float16: ("f16", 0, 16), torch.bfloat16: ("f16", 1, 16), torch.float32: ("tf32", 2, 8)}
SWIZZLES = {16: 0, 128: 2, 64: 4, 32: 6}  # by bytes of a swizzled row


def numbers(*shape, dtype=torch.float16):
    return torch.randint(-4, 5, shape).to(dtype)


def placed(matrix, width, wide_dim):
    """Bytes of a matrix [lines, k] as shared memory holds it, and its descriptor but for the address.

    `wide_dim` is the dimension whose neighbours lie side by side, in rows of `width` bytes. The 16-byte pieces of a row
    change their places by the line of 128 bytes in which the row is.
    """
    if wide_dim == 0:
        matrix = matrix.T
    per_row = width // matrix.element_size()
    blocks = matrix.unflatten(1, (-1, per_row)).transpose(0, 1).contiguous()  # [block, row, in row]
    pieces = blocks.view(torch.uint8).unflatten(-1, (-1, 16))
    rows, in_row = pieces.shape[1:3]
    line = torch.arange(rows) * width // 128 % in_row
    at = torch.arange(in_row) ^ line[:, None]
    found = torch.empty_like(pieces)
    found[:, torch.arange(rows)[:, None], at] = pieces
    between_blocks, between_eights = rows * width, 8 * width
    leading, stride = between_blocks, between_eights
    if width == 16 and wide_dim == 0:  # without a swizzle `leading` is along k
        leading, stride = between_eights, between_blocks
    return found.flatten(), leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | SWIZZLES[width] << 61


def text(m, products, about, kind, columns=256, left=0, adds=True, offsets=(0, 0)):
    """`products`: for each the descriptors, or the column of tensor memory for the left one, and addresses to add."""
    half = m == 64
    shape, count, split = ("16x32bx2", N // 2, f" {N // 2},") if half else ("32x32b", N, "")
    values = ", ".join(f"%v{i}" for i in range(count))
    left_shape, left_count = ("16x32bx2", left // 2) if half else ("32x32b", left)
    left_split = f" {left // 2}," if half else ""
    left_values = ", ".join(f"%v{i}" for i in range(left_count))
    mma = []
    for number, (a, b) in enumerate(products):
        first = f"[%mem + {N + a[1]}]" if a[0] is None else "%da"
        for name, (descriptor, offset) in (("a", a), ("b", b)):
            if descriptor is not None:
                mma.append(
                    f"add.u32 %t, %smem, {offset}; shr.u32 %t, %t, 4; cvt.u64.u32 %d{name}, %t; "
                    f"or.b64 %d{name}, %d{name}, {descriptor};"
                )
        flag = "%yes" if adds or number else "%no"
        mma.append(
            f"@%first tcgen05.mma.cta_group::1.kind::{kind} [%mem + 0], {first}, %db, {about}, {flag};"
        )
    return f"""
.version 8.7
.target sm_100a
.address_size 64
.extern .shared .align 16 .b8 smem[];
.visible .entry product(.param .u64 image, .param .u64 left, .param .u64 sum, .param .u64 out, .param .u32 size) .reqntid 128
{{
.reg .pred %p<9>, %first, %warp0, %yes, %no, %more, %done; .reg .b32 %v<256>, %t<9>, %t, %smem, %mem, %lane, %warp, %row, %column, %size, %tid, %mine;
.reg .b64 %da, %db, %image, %left, %sum, %out, %a;
ld.param.b64 %image, [image]; ld.param.b64 %left, [left]; ld.param.b64 %sum, [sum]; ld.param.b64 %out, [out];
ld.param.b32 %size, [size];
mov.u32 %tid, %tid.x; mov.u32 %smem, smem; and.b32 %lane, %tid, 31; shr.u32 %warp, %tid, 5;
setp.eq.u32 %first, %tid, 0; setp.lt.u32 %warp0, %tid, 32; setp.eq.u32 %yes, 0, 0; setp.ne.u32 %no, 0, 0;
mul.lo.u32 %t1, %tid, 16;
copy:
setp.lt.u32 %more, %t1, %size;
@!%more bra copied;
cvt.u64.u32 %a, %t1; add.s64 %a, %a, %image;
ld.global.v4.b32 {{%t2, %t3, %t4, %t5}}, [%a];
add.u32 %t6, %smem, %t1;
st.shared.v4.b32 [%t6], {{%t2, %t3, %t4, %t5}};
add.u32 %t1, %t1, 2048;
bra copy;
copied:
add.u32 %t7, %smem, %size;
@%warp0 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%t7], {columns};
@%first mbarrier.init.shared::cta.b64 [%t7 + 8], 1;
fence.proxy.async.shared::cta;
bar.sync 0;
ld.shared.b32 %mem, [%t7];
@%warp0 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
shl.b32 %t8, %warp, 21; add.u32 %mine, %mem, %t8;
{"and.b32 %t, %lane, 15; mad.lo.u32 %row, %warp, 16, %t; shr.u32 %column, %lane, 4;" if half else "mov.u32 %row, %tid; mov.u32 %column, 0;"}
mad.lo.u32 %t, %row, {N}, 0; mad.lo.u32 %t, %column, {N // 2}, %t;
mad.wide.u32 %out, %t, 4, %out; mad.wide.u32 %sum, %t, 4, %sum;
{" ".join(f"ld.global.b32 %v{i}, [%sum + {4 * i}];" for i in range(count))}
tcgen05.st.sync.aligned.{shape}.x{count}.b32 [%mine + 0],{split} {{{values}}};
mad.lo.u32 %t, %row, {left}, 0; mad.lo.u32 %t, %column, {left // 2}, %t; mad.wide.u32 %left, %t, 4, %left;
{" ".join(f"ld.global.b32 %v{i}, [%left + {4 * i}];" for i in range(left_count))}
{f"tcgen05.st.sync.aligned.{left_shape}.x{left_count}.b32 [%mine + {N}],{left_split} {{{left_values}}};" if left else ""}
tcgen05.wait::st.sync.aligned;
tcgen05.fence::before_thread_sync;
bar.sync 0;
tcgen05.fence::after_thread_sync;
{chr(10).join(mma)}
@%first tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%t7 + 8];
wait:
mbarrier.try_wait.parity.shared::cta.b64 %done, [%t7 + 8], 0;
@!%done bra wait;
tcgen05.ld.sync.aligned.{shape}.x{count}.b32 {{{values}}}, [%mine + 0]{f", {N // 2}" if half else ""};
tcgen05.wait::ld.sync.aligned;
{" ".join(f"st.global.b32 [%out + {4 * i}], %v{i};" for i in range(count))}
bar.sync 0;
@%warp0 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %mem, {columns};
ret;
}}
"""


def about(m, dtype, transposed=(False, False), negated=(0, 0)):
    kind = TYPES[dtype][1]
    flags = negated[0] << 13 | negated[1] << 14 | transposed[0] << 15 | transposed[1] << 16
    return 1 << 4 | kind << 7 | kind << 10 | flags | N // 8 << 17 | m // 16 << 24


def product(m, dtype, widths, wide, from_tensor=False, adds=True, negated=(0, 0), change=None, **options):
    """A product by the machine, and what it must be. `wide` names the dimensions of both that lie side by side."""
    torch.manual_seed(0)
    kind, _, step = TYPES[dtype]
    k = max([step, *(width // dtype.itemsize for width, dim in zip(widths, wide, strict=True) if dim == 1)])
    a, b, before = numbers(m, k, dtype=dtype), numbers(N, k, dtype=dtype), numbers(m, N, dtype=torch.float32)
    images, sides, left = [], [], a.view(torch.int32)
    for matrix, width, dim in zip((a, b), widths, wide, strict=True):
        image, descriptor = placed(matrix, width, dim)
        # A step of k is 32 bytes, or whole rows.
        by = (
            step * width if dim == 0 else 32 if width > 16 else step * dtype.itemsize // 16 * len(matrix) * 16
        )
        sides.append([(descriptor, sum(map(len, images)) + i * by) for i in range(k // step)])
        images.append(image)
    if from_tensor:
        sides[0] = [(None, i * 8) for i in range(k // step)]
    words = text(
        m, list(zip(*sides, strict=True)), about(m, dtype, [dim == 0 for dim in wide], negated), kind,
        left=left.size(1) if from_tensor else 0, adds=adds,
    )  # fmt: skip
    if change is not None:
        changed = change(words)
        assert changed != words, "the text has nothing to change"
        words = changed
    image, out = torch.cat(images), torch.full((m, N), float("nan"))
    args = [image, left, before, out, len(image)]
    counts = ptx.run_text(
        words, "product", 1, args, num_warps=4, shared_bytes=len(image) + 16, unwritten=[out], most_steps=100_000,
        **options,
    )  # fmt: skip
    assert counts.total.products == m * N * k
    return out, adds * before + (-1) ** sum(negated) * (a.float() @ b.float().T)


CASES = [
    *((m, torch.float16, (width, width), (1, 1)) for m in (64, 128) for width in (16, 32, 64, 128)),
    *((m, torch.bfloat16, widths, (0, 0)) for m in (64, 128) for widths in ((32, 128), (64, 64), (128, 32), (16, 16))),
    (128, torch.float16, (128, 64), (1, 0)),
    (64, torch.bfloat16, (32, 16), (0, 1)),
    *((m, torch.float32, (width, width), (1, 1)) for m in (64, 128) for width in (16, 32, 128)),
]  # fmt: skip


@pytest.mark.parametrize("case", slow_but(CASES, (128, torch.float16, (128, 64), (1, 0))), ids=str)
def test_products(case):
    for when in ("late", "early", "random"):
        found, want = product(*case, when=when)
        assert torch.equal(found, want)


LEFT = [(m, dtype) for m in (64, 128) for dtype in TYPES]


@pytest.mark.parametrize("case", slow_but(LEFT, (64, torch.bfloat16)), ids=str)
def test_the_left_one_in_tensor_memory(case):
    found, want = product(*case, (128, 128), (1, 1), from_tensor=True)
    assert torch.equal(found, want)


@pytest.mark.slow
def test_signs_and_sums():
    for negated in ((0, 1), (1, 0), (1, 1)):
        found, want = product(128, torch.float16, (64, 64), (1, 1), adds=False, negated=negated)
        assert torch.equal(found, want)


def without(pattern):
    return lambda words: re.sub(pattern, "", words)


def instead(pattern, other):
    return lambda words: re.sub(pattern, other, words)


def with_descriptor(bits):
    """The right one's, those bits changed."""
    return lambda words: re.sub(
        r"or.b64 %db, %db, (\d+);", lambda found: f"or.b64 %db, %db, {int(found[1]) ^ bits};", words
    )


ALLOCATE = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32"
KNOWN = about(128, torch.float16)
BROKEN = {
    "stores are not waited for": (without(r"tcgen05\.wait::st[^;]*;"), "race", "a copy to it is under way"),
    "loads are not waited for": (without(r"tcgen05\.wait::ld[^;]*;"), "race", "while a read of it is under way"),
    "the product is not waited for": (without(r"@!%done bra wait;"), "race", "is read without a barrier after a product"),
    "nothing is committed": (without(r"@%first tcgen05\.commit[^;]*;"), "deadlock", "waits"),
    "another barrier is committed": (instead(r"b64 \[%t7 \+ 8\];\nwait", "b64 [%t7];\nwait"), "unwritten", "mbarrier"),
    "no fence of the async proxy": (without(r"fence\.proxy\.async[^;]*;"), "race", "async proxy"),
    "no barrier before the product": (
        without(r"bar\.sync 0;(?=\ntcgen05.fence::after)"), "race", "without a barrier after warp",
    ),
    "it is given back too early": (without(r"bar\.sync 0;(?=\n@%warp0 tcgen05.dealloc)"), "race", "read"),
    "it is not given back": (without(r"@%warp0 tcgen05\.dealloc[^;]*;"), "deadlock", "the block keeps tensor memory"),
    "a number of columns that is not": (instead(r", 256;", ", 96;"), "out_of_bounds", "96 columns"),
    "columns that are not its": (instead(r", 256;", ", 32;"), "out_of_bounds", "did not allocate"),
    "more than there are": (
        instead(r", 256;\n@%first", f", 512; @%warp0 {ALLOCATE} [%t7], 32;\n@%first"), "deadlock", "waits",
    ),
    "an allocation after the last": (
        instead(r"(@%warp0 tcgen05.relinquish[^;]*;)", r"\1 @%warp0 " + ALLOCATE + " [%t7], 32;"), "deadlock", "permit",
    ),
    "lanes of another warp": (instead(r"shl.b32 %t8, %warp, 21;", "mov.u32 %t8, 0;"), "out_of_bounds", "is not the warp's"),
    "what nobody wrote": (without(r"tcgen05\.st\.[^;]*;"), "unwritten", "tensor memory is read that nobody wrote"),
    "a descriptor of another version": (with_descriptor(3 << 46), "unknown_instruction", "descriptor of shared memory"),
    "a descriptor with a base offset": (with_descriptor(1 << 49), "unknown_instruction", "descriptor of shared memory"),
    "a swizzle that is not": (with_descriptor(1 << 61), "unknown_instruction", "descriptor of shared memory"),
    "sparse": (instead(str(KNOWN), str(KNOWN | 4)), "unknown_instruction", "instruction descriptor"),
    "sums of 16 bits": (instead(str(KNOWN), str(KNOWN & ~16)), "unknown_instruction", "instruction descriptor"),
    "two blocks' product": (instead("mma.cta_group::1", "mma.cta_group::2"), "unknown_instruction", "cta_group::2"),
    "another shape": (instead("32x32b", "16x64b"), "unknown_instruction", "16x64b"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_broken(name):
    change, kind, message = BROKEN[name]
    with pytest.raises(ptx.Fault, match=re.escape(message)) as caught:
        product(128, torch.float16, (64, 64), (1, 1), change=change)
    assert caught.value.kind == kind


@pytest.mark.slow
def test_stores_need_their_fence():
    change, _, message = BROKEN["no fence of the async proxy"]
    with pytest.raises(ptx.Fault, match=message):
        product(128, torch.float16, (64, 64), (1, 1), change=change, fences="stores")


def test_registers_are_read_before_the_wait_for_their_load():
    """Triton 3.9 waits only where the memory is used again."""
    change = instead(
        r"(?s)(tcgen05\.wait::ld[^;]*;)(.*)(?=\nbar\.sync 0;\n@%warp0 tcgen05.dealloc)", r"\2\n\1"
    )
    found, want = product(128, torch.float16, (64, 64), (1, 1), change=change)
    assert torch.equal(found, want)


def test_what_nobody_wrote_may_be_nan():
    change, *_ = BROKEN["what nobody wrote"]
    found, _ = product(128, torch.float16, (64, 64), (1, 1), change=change, poison=True)
    assert found.isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize("when", ["late", "early", "random"])
def test_with_bulk_copies(when):
    a, b = torch.randn(100, 96, dtype=torch.float16), torch.randn(72, 96, dtype=torch.float16)
    out = torch.full((100, 72), float("nan"), dtype=torch.float16)
    counts = ptx.run(
        kernels.transposed_product, (2, 2), a, b, out, 100, 72, 96, target="sm_100", when=when, unwritten=[out],
        BM=64, BN=64, BK=32,
    )  # fmt: skip
    assert (out - a.double() @ b.double().T).abs().max() < 0.02
    names = {i.name for i, count in counts.instructions if count.warps}
    assert any(".bulk.tensor" in name for name in names) and "tcgen05" in counts.by_family()
