"""What the generated forward does, in the lines that a reader looks for."""

import re

import expecttest
import pytest
import torch
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

from flex_inductor import create_block_mask, flex_attention
from flex_inductor.backend import flex_inductor as backend
from tests.support import causal


def outline(source: str) -> str:
    """The inlined body of a partial tile, and the loops and products of a visit to a tile."""
    body = source[
        source.index("const auto partial_tile") : source.index("C10_UNLIKELY", source.index("partial_tile"))
    ]
    visit = source[source.index("const auto visit =") : source.index("const auto visit_range =")]
    kept = [line for line in body.splitlines() if re.search(r"for\(|auto tmp|\.store", line)]
    kept += [
        line
        for line in visit.splitlines()
        if re.search(r"for \(|each_panel\(|dot_block[(<]|_tile\(|softmax_rows\(", line)
    ]
    text = "\n".join(line.strip() for line in kept)
    text = re.sub(r"static_cast<int64_t>\(([^()]*)\)", r"\1", text)
    return text.replace("at::vec::Vectorized<float>", "Vec").replace("at::vec::Vectorized<int32_t>", "Ints")


@pytest.mark.usefixtures("unbuilt")
@pytest.mark.skipif(not torch.cpu._is_avx2_supported(), reason="written for 8 floats a vector")
class Outline(expecttest.TestCase):
    maxDiff = None

    def test_alibi_over_a_causal_mask(self):
        slopes = torch.rand(4)
        mask = create_block_mask(causal, None, None, 64, 64, device="cpu")

        def attend(q, k, v):
            return flex_attention(
                q, k, v, lambda s, b, h, q_idx, kv_idx: s + slopes[h] * (kv_idx - q_idx), mask
            )

        with torch.no_grad(), config.patch({"cpp.simdlen": 256}):
            compiled = torch.compile(attend, backend=backend, fullgraph=True, dynamic=False)
            _, (source,) = run_and_get_code(compiled, *(torch.randn(1, 4, 64, 16) for _ in range(3)))
        self.assertExpectedInline(
            outline(source),
            """\
for(int64_t x0=0L; x0<TILE_ROWS; x0+=1L)
for(int64_t x1=0L; x1<TILE_COLUMNS; x1+=8L)
auto tmp7 = Vec::loadu(raw + x1 + x0*TILE_LD, 8);
auto tmp11 = Vec::loadu(in_8 + static_cast<int64_t>(63L + TILE_KV + x1 + ((-1L)*TILE_Q) + ((-1L)*x0) + 127L*TILE_H), 8);
auto tmp0 = TILE_Q + x0;
auto tmp1 = c10::convert<int32_t>(tmp0);
auto tmp2 = TILE_KV + x1;
auto tmp3 = c10::convert<int32_t>(tmp2);
auto tmp4 = progression<Ints>(tmp3, 1);
auto tmp5 = Ints(tmp1);
auto tmp6 = LaneMask<int32_t,1>(lanes(tmp5) >= tmp4);
auto tmp8 = static_cast<float>(0.25);
auto tmp9 = Vec(tmp8);
auto tmp10 = tmp7 * tmp9;
auto tmp12 = tmp10 + tmp11;
auto tmp13 = -std::numeric_limits<float>::infinity();
auto tmp14 = Vec(tmp13);
auto tmp15 = blended(tmp14, tmp12, mask_cast<float,1>(tmp6));
tmp15.store(scores + x1 + x0*TILE_LD);
for (int64_t r0 = 0; r0 < rows; r0 += SUB_M) {
for (int64_t n = aligned; GUARDED && n < n0 + columns; n += PANEL) all_there &= !*packed.at(n - first_packed, key_width).dropped;
for (int64_t r = 0; ahead + behind > 0 && r < count; ++r) {
for (int64_t r = 0; r < count; r += BLOCK) {
each_panel(V, [&](int64_t v, auto whole) {
dot_block<whole>(weights - before + r * WEIGHTS_LD + first, WEIGHTS_LD, STEP,
for (int64_t c = 0; c < offset + columns; c += TILE_LD) {
each_panel(stop, [&](int64_t n, auto whole) {
for (int64_t r = 0; r < count; r += BLOCK)
dot_block<whole>(own.query.data + (r0 + r) * key_width, key_width, STEP,
if (masked) partial_tile(scores, here.sequence, h + here.head, here.index + q0 + r0 - here.row, kv_index(n0 + at), count, part); else full_tile(scores, here.sequence, h + here.head, here.index + q0 + r0 - here.row, kv_index(n0 + at), count, part);
for (int64_t r = 0; r < count && !all_there; ++r) std::copy_n(scores + r * TILE_LD, part, own.kept.data() + r * WIDE_LD + at);
softmax_rows(own, r0, count, scores, weights + at, part, first_column, [&] { if (APART) settle(at); });
for (int64_t i = 0; !all_there && i < columns; ++i)""",
        )
