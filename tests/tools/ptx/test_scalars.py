"""Scalar instructions against torch and Python, lane by lane."""

import pytest
import torch

from flex_inductor.tools import ptx

SIZES = {
    torch.int32: "b32",
    torch.int16: "b16",
    torch.float32: "b32",
    torch.int64: "b64",
    torch.bfloat16: "b16",
    torch.float16: "b16",
}
REGISTERS = {"b16": "%h", "b32": "%r", "b64": "%d"}


def apply(instruction, out, *inputs):
    """`out` of an instruction that is applied to every entry; its text has `$0` for the result, then the operands."""
    tensors = (out, *inputs)
    kinds = [SIZES[tensor.dtype] for tensor in tensors]
    names = [f"{REGISTERS[kind]}{i}" for i, kind in enumerate(kinds)]
    loads = [
        f"mad.wide.u32 %a{i}, %index, {tensor.element_size()}, %p{i}; ld.global.{kind} {name}, [%a{i}];"
        for i, (tensor, kind, name) in enumerate(zip(tensors, kinds, names, strict=True))
    ]
    for i, name in enumerate(names):
        instruction = instruction.replace(f"${i}", name)
    text = f"""
.version 8.7
.target sm_80
.address_size 64
.visible .entry apply({", ".join(f".param .u64 p{i}" for i in range(len(tensors)))}) .reqntid 32
{{
.reg .pred %c<4>; .reg .b16 %h<9>; .reg .b32 %r<9>, %t, %b, %index; .reg .b64 %d<9>, %a<9>, %p<9>;
{" ".join(f"ld.param.b64 %p{i}, [p{i}];" for i in range(len(tensors)))}
mov.u32 %t, %tid.x; mov.u32 %b, %ctaid.x; mad.lo.s32 %index, %b, 32, %t;
{" ".join(loads[1:])}
mad.wide.u32 %a0, %index, {out.element_size()}, %p0;
{instruction}
st.global.{kinds[0]} [%a0], {names[0]};
ret;
}}
"""
    assert out.numel() % 32 == 0
    ptx.run_text(text, "apply", out.numel() // 32, list(tensors), num_warps=1, unwritten=[out])
    return out


def floats():
    """Of all magnitudes: zeros, subnormals, what rounds to even or to infinity, infinities."""
    torch.manual_seed(0)
    special = [
        0.0,
        -0.0,
        1e-45,
        6e-8,
        5.9e-8,
        65519.0,
        65520.0,
        3.39e38,
        1 + 2**-8,
        1 + 3 * 2**-8,
        float("inf"),
    ]
    found = torch.randint(-(2**31), 2**31, (1024,), dtype=torch.int64).to(torch.int32).view(torch.float32)
    found = torch.where(found.isnan(), 1.0, found)
    found[: len(special)] = torch.tensor(special)
    found[len(special) : 2 * len(special)] = -torch.tensor(special)
    return found


def integers(dtype=torch.int32):
    torch.manual_seed(1)
    bits = 31 if dtype == torch.int32 else 63
    found = torch.randint(-(2**bits), 2**bits - 1, (1024,)).to(dtype)
    found[:6] = torch.tensor([0, 1, -1, 2**bits - 1, -(2**bits), 7], dtype=dtype)
    return found


def same(found, want):
    torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype, name", [(torch.bfloat16, "bf16"), (torch.float16, "f16")])
def test_small_floats(dtype, name):
    x = floats()
    narrow = apply(f"cvt.rn.{name}.f32 $0, $1;", torch.empty(1024, dtype=dtype), x)
    same(narrow, x.to(dtype))
    same(apply(f"cvt.f32.{name} $0, $1;", torch.empty(1024), narrow), narrow.float())
    a, b = narrow, narrow.roll(5)
    for operation in ("add", "mul", "max"):
        found = apply(f"{operation}.{name} $0, $1, $2;", torch.empty(1024, dtype=dtype), a, b)
        same(found, {"add": torch.add, "mul": torch.mul, "max": torch.maximum}[operation](a, b))
    pair = apply(f"cvt.rn.{name}x2.f32 $0, $1, $2;", torch.empty(1024, dtype=torch.int32), x, x.roll(1))
    same(pair.view(dtype).view(-1, 2), torch.stack([x.roll(1), x], 1).to(dtype))


@pytest.mark.parametrize("name, dtype", [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_pairs_of_numbers_of_8_bits(name, dtype):
    pairs = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)[: 1 << 13].repeat(2)
    pairs[1 << 13 :] ^= -1
    found = apply(f"cvt.rn.f16x2.{name}x2 $0, $1;", torch.empty(1 << 14, dtype=torch.int32), pairs)
    same(found.view(torch.float16), pairs.view(dtype).to(torch.float16))


@pytest.mark.parametrize(
    "table, of",
    [(0xC0, lambda a, b, c: a & b), (0xF8, lambda a, b, c: a | (b & c)), (0x96, lambda a, b, c: a ^ b ^ c)],
)
def test_any_function_of_three_bits(table, of):
    x = integers()
    given = x, x.roll(1), x.roll(2)
    same(
        apply(f"lop3.b32 $0, $1, $2, $3, {table};", torch.empty(1024, dtype=torch.int32), *given), of(*given)
    )


@pytest.mark.parametrize("name", ["add", "sub", "min", "max"])
def test_pairs_of_small_integers(name):
    """In halves that do not carry into each other."""
    x = torch.randint(-(2**31), 2**31, (1024,)).int()
    y = x.flip(0)
    found = apply(f"{name}.s16x2 $0, $1, $2;", torch.empty(1024, dtype=torch.int32), x, y)
    of = {"add": torch.add, "sub": torch.sub, "min": torch.minimum, "max": torch.maximum}[name]
    same(found.view(torch.int16), of(x.view(torch.int16), y.view(torch.int16)))


def test_floats():
    x, y = floats(), floats().roll(7)
    for name, want in (
        ("add.f32 $0, $1, $2;", x + y),
        ("mul.f32 $0, $1, $2;", x * y),
        ("sub.f32 $0, $1, $2;", x - y),
        ("div.rn.f32 $0, $1, $2;", (x.double() / y.double()).float()),
        ("sqrt.rn.f32 $0, $1;", x.double().sqrt().float()),
        ("neg.f32 $0, $1;", -x),
        ("abs.f32 $0, $1;", x.abs()),
        ("min.f32 $0, $1, $2;", torch.minimum(x, y)),
        ("cvt.rni.f32.f32 $0, $1;", x.round()),
        ("fma.rn.f32 $0, $1, $2, $1;", (x.double() * y.double() + x.double()).float()),
    ):
        found = apply(name, torch.empty(1024), *((x, y) if "$2" in name else (x,)))
        if name.startswith("fma"):  # torch rounds twice
            torch.testing.assert_close(found, want, equal_nan=True)
        else:
            same(found, want)
    ftz = apply("add.ftz.f32 $0, $1, $2;", torch.empty(1024), torch.full((1024,), 1e-39), torch.zeros(1024))
    same(ftz, torch.zeros(1024))


@pytest.mark.parametrize("word", ["rm", "rp", "rz"])
def test_directed_roundings(word):
    x, y = torch.randn(1024), torch.randn(1024)
    exact = x.double() * y.double()
    near = exact.float()
    down = torch.where(near.double() > exact, near.nextafter(torch.tensor(-torch.inf)), near)
    up = torch.where(near.double() < exact, near.nextafter(torch.tensor(torch.inf)), near)
    want = {"rm": down, "rp": up, "rz": torch.where(exact > 0, down, up)}[word]
    same(apply(f"mul.{word}.f32 $0, $1, $2;", torch.empty(1024), x, y), want)
    same(apply(f"fma.{word}.ftz.f32 $0, $1, $2, 0f00000000;", torch.empty(1024), x, y), want)
    assert not torch.equal(want, near)


@pytest.mark.parametrize("name, of_two", [("max", torch.maximum), ("min", torch.minimum)])
def test_largest_and_least_of_three(name, of_two):
    x, y = torch.randn(1024), torch.randn(1024)
    found = apply(f"{name}.f32 $0, $1, $2, 0f3E800000;", torch.empty(1024), x, y)
    same(found, of_two(of_two(x, y), torch.tensor(0.25)))


def test_integers():
    x, y = integers(), integers().roll(3)
    wide, bits = x.long() * y.long(), x.long() & 0xFFFFFFFF
    for name, want in (
        ("add.s32 $0, $1, $2;", x + y),
        ("mul.lo.s32 $0, $1, $2;", x * y),
        ("mul.hi.s32 $0, $1, $2;", (wide >> 32).int()),
        ("mad.lo.s32 $0, $1, $2, $1;", x * y + x),
        ("and.b32 $0, $1, $2;", x & y),
        ("xor.b32 $0, $1, $2;", x ^ y),
        ("not.b32 $0, $1;", ~x),
        ("shl.b32 $0, $1, 5;", x << 5),
        ("shr.s32 $0, $1, 5;", x >> 5),
        ("shr.u32 $0, $1, 5;", (bits >> 5).int()),
        ("shr.s32 $0, $1, 40;", x >> 31),
        ("shl.b32 $0, $1, 32;", torch.zeros_like(x)),
        ("bfe.u32 $0, $1, 4, 9;", (bits >> 4 & 511).int()),
        ("bfe.s32 $0, $1, 4, 9;", ((x << 19) >> 23)),
        ("bfi.b32 $0, $1, $2, 4, 9;", (y & ~(511 << 4)) | (x & 511) << 4),
        ("bfi.b32 $0, $1, $2, 28, 9;", (y & ~(15 << 28)) | (x << 28)),
        ("min.s32 $0, $1, $2;", torch.minimum(x, y)),
        ("shf.l.wrap.b32 $0, $1, $2, 8;", (((y.long() & 0xFFFFFFFF) << 8) | (bits >> 24)).to(torch.int32)),
        ("{ .reg .pred q; setp.lt.s32 q, $1, $2; selp.b32 $0, 1, 0, q; }", (x < y).int()),
        (
            "{ .reg .pred q; setp.lo.u32 q, $1, $2; selp.b32 $0, 1, 0, q; }",
            (bits < (y.long() & 0xFFFFFFFF)).int(),
        ),
        (
            "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $1; mov.b32 $0, {hi, lo}; }",
            ((x << 16) | (bits >> 16).int()),
        ),
    ):
        same(apply(name, torch.empty(1024, dtype=torch.int32), *((x, y) if "$2" in name else (x,))), want)
    same(apply("mul.wide.s32 $0, $1, $2;", torch.empty(1024, dtype=torch.int64), x, y), wide)
    many, others = integers(torch.int64), integers(torch.int64).roll(1)
    same(apply("mad.lo.s64 $0, $1, $2, $1;", torch.empty_like(many), many, others), many * others + many)
    same(apply("cvt.s64.s32 $0, $1;", torch.empty(1024, dtype=torch.int64), x), x.long())


@pytest.mark.parametrize(
    "instruction",
    [
        "add.rz.sat.f32 $0, $1, $1;",
        "mul.rn.sat.f32 $0, $1, $1;",
        "fma.rm.sat.f32 $0, $1, $1, $1;",
        "cvt.rp.f32.f64 $0, $1;",
        "add.rn.sat.f32.f16 $0, $1, $1;",
        "mul.rn.f32.f16 $0, $1, $1;",
        "fma.rn.f32.f16x2 $0, $1, $1, $1;",
        "ld.global.unknown.f32 $0, [%a1];",
        "atom.global.inc.u32 $0, [%a1], 4;",
        "barrier.cluster.arrive.aligned;",
        "mma.sp.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0,$0}, {$1,$1}, {$1,$1}, {$0,$0}, $1, 0x0;",
        "shfl.sync.spin.b32 $0, $1, 1, 31, -1;",
        "lop3.and.b32 $0, $1, $1, $1, 0x80;",
    ],
)
def test_what_would_change_a_result_is_not_passed_over(instruction):
    name = instruction.split()[0].rstrip(";")
    with pytest.raises(ptx.Fault, match=f"unknown_instruction: {name}") as caught:
        apply(instruction, torch.empty(32), torch.ones(32))
    assert caught.value.kind == "unknown_instruction"


@pytest.mark.parametrize("name, dtype", [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_sums_of_two_types(name, dtype):
    torch.manual_seed(0)
    x, y, z = *torch.randn(2, 1024).to(dtype), torch.randn(1024)
    a, b = x.float(), y.float()
    same(apply(f"add.rn.f32.{name} $0, $1, $2;", torch.empty(1024), x, z), a + z)
    same(apply(f"sub.f32.{name} $0, $1, $2;", torch.empty(1024), x, z), a - z)
    exact = a.double() * b.double() + z.double()  # of at most 53 bits but in rare cases
    same(apply(f"fma.rn.f32.{name} $0, $1, $2, $3;", torch.empty(1024), x, y, z), exact.float())
    found = apply(f"add.rm.f32.{name} $0, $1, $2;", torch.empty(1024), x, z)
    exact = a.double() + z.double()
    assert (found.double() <= exact).all() and (found < a + z).any()


def test_rounding_towards_zero():
    x = floats().clamp(-60000, 60000)
    for name, dtype in (("f16", torch.float16), ("bf16", torch.bfloat16)):
        found = apply(f"cvt.rz.{name}.f32 $0, $1;", torch.empty(1024, dtype=dtype), x)
        nearest = x.to(dtype)
        inwards = nearest.double().abs() <= x.double().abs()
        same(found[inwards], nearest[inwards])
        assert (found.double().abs() <= x.double().abs()).all() and (found != nearest)[~inwards].all()


def test_conversions_to_integers():
    x = floats().clamp(-3e9, 3e9)
    want = x.double().trunc().clamp(-(2**31), 2**31 - 1).to(torch.int32)
    same(apply("cvt.rzi.s32.f32 $0, $1;", torch.empty(1024, dtype=torch.int32), x), want)
    same(apply("cvt.rn.f32.s32 $0, $1;", torch.empty(1024), integers()), integers().float())


@pytest.mark.parametrize(
    "kind, by, source", [("bfly", 5, lambda i: i ^ 5), ("idx", 3, lambda i: i * 0 + 3), ("up", 4, None)]
)
def test_shuffles(kind, by, source):
    x, lanes = integers(), torch.arange(1024) % 32
    clamp = 0 if kind == "up" else 31
    found = apply(f"shfl.sync.{kind}.b32 $0, $1, {by}, {clamp}, -1;", torch.empty(1024, dtype=torch.int32), x)
    from_lane = torch.where(lanes >= by, lanes - by, lanes) if source is None else source(lanes)
    same(found, x[torch.arange(1024) // 32 * 32 + from_lane])


def test_lanes_that_come_later_are_waited_for():
    """Half of the lanes take a way that lies behind the shuffle in the text."""
    x = integers()
    words = """{ .reg .pred q; setp.lt.u32 q, %t, 16; @!q bra LATER;
        BACK: shfl.sync.idx.b32 $0, $1, 20, 31, -1; bra DONE;
        LATER: add.s32 $1, $1, 1; bra BACK;
        DONE: }"""
    found = apply(words, torch.empty(1024, dtype=torch.int32), x)
    same(found, x[torch.arange(1024) // 32 * 32 + 20] + 1)
