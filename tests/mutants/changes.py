"""The changes: one place of one file each, and the tests of `make test` that are meant to find it.

A change stands for a kind of fault that kernels, schedules and their callers have had.
"""

from __future__ import annotations

from typing import NamedTuple


class Change(NamedTuple):
    name: str
    file: str
    old: str  # is there once
    new: str
    tests: str
    harmless: str = ""  # why no test can find it, if none can


CPU, TRITON = "templates/cpu/", "templates/triton/"
OP, MASKS, SEQUENCES, DISTRIBUTED = (
    f"flex_inductor/{room}/" for room in ("op", "masks", "sequences", "distributed")
)
INTERPRETED = "tests/lowerings/triton/interpreted_"
OF_CPU = "tests/lowerings/cpu/test_"
MATRIX = OF_CPU + "matrix.py::test_matrix[plain-causal-dtype0-contiguous]"
RISING = OF_CPU + "forward.py::test_scores_that_rise[torch.float32-plain-none]"
FEW_QUERIES = OF_CPU + "tile_map.py::test_decode_of_several_queries"
EAGER = "tests/accuracy/test_matrix.py tests/accuracy/test_edges.py"

KERNELS_FOR_CPUS = [
    Change(
        "forward: the sum is not rescaled",
        CPU + "forward.jinja",
        "rescale(total, by, W);",
        "",
        RISING,
    ),
    Change(
        "forward: the output is not rescaled",
        CPU + "forward.jinja",
        "rescale(own.acc.data + (first + r) * value_width, by, value_width);",
        "",
        RISING,
    ),
    Change(
        "forward: a row never subtracts anything",
        CPU + "forward.jinja",
        "const Vec subtracted(peak[r]);",
        "const Vec subtracted(0.f);",
        RISING,
    ),
    Change(
        "forward: what a row subtracts stays as it was first",
        CPU + "forward.jinja",
        "{{ 0 if exact else 8 }}",
        "1e30f",
        RISING,
    ),
    Change(
        "forward: the sums of the entropy are not rescaled",
        CPU + "forward.jinja",
        "moved(Vec::loadu(weighted), Vec::loadu(total), own.change[r], by)",
        "Vec::loadu(weighted)",
        "tests/accuracy/test_entropy.py::test_compiled[cpu-bias]",
    ),
    Change(
        "finish: a sink takes weight twice",
        CPU + "kernel.h",
        "all = total * share + std::exp(sink - top);",
        "all = total * share + 2.f * std::exp(sink - top);",
        "tests/accuracy/test_sinks.py::test_compiled[cpu-plain]",
    ),
    Change(
        "finish: the logsumexp without the largest score",
        CPU + "kernel.h",
        "peak + std::log(total)}",
        "std::log(total)}",
        MATRIX,
    ),
    Change(
        "finish: the last of equal scores",
        CPU + "kernel.h",
        "first_index + at < index)) index",
        "first_index + at > index)) index",
        "tests/accuracy/test_entropy.py::test_the_first_of_the_largest[many]",
    ),
    Change(
        "decode: parts' sums are added as they are",
        CPU + "decode.jinja",
        "total += at(s)[V_PAD + 1] * share;",
        "total += at(s)[V_PAD + 1];",
        FEW_QUERIES,
    ),
    Change(
        "decode: the first keys of a part are left out",
        CPU + "decode.jinja",
        "std::max(from - passed, int64_t(0))",
        "std::max(from - passed, int64_t(1))",
        FEW_QUERIES,
    ),
    Change(
        "decode: a chunk's sum is not rescaled",
        CPU + "decode.jinja",
        "total = total * shrink + sum_lanes(sum);",
        "total = total + sum_lanes(sum);",
        FEW_QUERIES,
    ),
    Change(
        "decode: what chunks before have added is not rescaled",
        CPU + "decode.jinja",
        "shrink, V_PAD);",
        "1.f, V_PAD);",
        FEW_QUERIES,
    ),
    Change(
        "decode: values that are not finite are added twice",
        CPU + "decode.jinja",
        "std::copy_n(own.before.data() + r * part_size, V_PAD, acc);",
        "",
        OF_CPU + "not_finite.py::test_decode[dtype0-biased-contiguous-None]",
    ),
    Change(
        "mods: what is not NaN is NaN",
        "lowerings/cpu/lanes.py",
        "lowerings[aten.ne.Tensor](value, value)",
        "lowerings[aten.eq.Tensor](value, value)",
        OF_CPU + "lanes.py::test_no_lane_is_computed_by_itself[dtype0]",
    ),
    Change(
        "mods: a copy of values that lie apart has its dimensions as before",
        "lowerings/cpu/tables.py",
        "require_contiguous(lowerings[aten.permute](tensor, order))",
        "require_contiguous(lowerings[aten.permute](tensor, sorted(order)))",
        OF_CPU + "lanes.py::test_scattered_lanes_are_gathered[dtype0]",
    ),
    Change(
        "backward: the logsumexp's gradient with the other sign",
        CPU + "backward.jinja",
        "} - grad_lse[",
        "} + grad_lse[",
        MATRIX,
    ),
    Change(
        "backward: keys' gradients without the scale",
        CPU + "backward.jinja",
        '"scale" if name == "d_key" else "1.f"',
        '"1.f"',
        MATRIX,
    ),
    Change(
        "backward: rows that see nothing have weights",
        CPU + "backward.jinja",
        "own.lse[r] = (of_row == -INF ? INF : of_row) + own.poison[r];",
        "own.lse[r] = of_row + own.poison[r];",
        OF_CPU + "forward.py::test_rows_that_a_score_mod_hides_with_avx2",
    ),
    Change(
        "backward: delta is not subtracted",
        CPU + "backward.jinja",
        "- delta){{ of_entropy }}",
        "){{ of_entropy }}",
        MATRIX,
    ),
    Change(
        "backward: dropout is of another column",
        CPU + "backward.jinja",
        "(kv_first & 31) + c0 + i);",
        "(kv_first & 15) + c0 + i);",
        "tests/accuracy/test_dropout.py::test_a_tile_may_begin_between_two_groups_of_bits",
    ),
    Change(
        "windows: one key too few",
        CPU + "common.jinja",
        "std::clamp<int64_t>(place + size + %s - other, 0, count)",
        "std::clamp<int64_t>(place + size - 1 + %s - other, 0, count)",
        OF_CPU + "gradients.py " + OF_CPU + "forward.py " + MATRIX,
    ),
    Change(
        "mapped: the position of a key without its place in the tile",
        CPU + "mapped_places.jinja",
        "kv_line(n / kv_block).index + n % kv_block",
        "kv_line(n / kv_block).index",
        OF_CPU + "tile_map.py::test_block_sizes[large]",
    ),
]

KERNELS_FOR_CARDS = [
    Change(
        "softmax: the sum is not rescaled",
        TRITON + "softmax.jinja",
        "total = total * shrink + tl.sum(weight, 1)",
        "total = total + tl.sum(weight, 1)",
        INTERPRETED + "shapes.py",
    ),
    Change(
        "softmax: the output is not rescaled",
        TRITON + "softmax.jinja",
        "v, acc * shrink[:, None],",
        "v, acc,",
        INTERPRETED + "shapes.py",
    ),
    Change(
        "softmax: the logsumexp forgets the sink",
        TRITON + "softmax.jinja",
        '{{ "top" if sinks else "peak * %s" % to_natural }} + tl.log(total)',
        '{{ "peak * %s" % to_natural }} + tl.log(total)',
        INTERPRETED + "softmax.py::test_as_right_as_dense_attention[sinks-plain-kernels0]",
    ),
    Change(
        "softmax: narrow keys without their scale",
        TRITON + "softmax.jinja",
        'score *= {{ "key_scale" if',
        'score *= 1.0  # {{ "key_scale" if',
        INTERPRETED + "narrow.py",
    ),
    Change(
        "softmax: the last of equal scores",
        TRITON + "softmax.jinja",
        "({{ index }} < largest)",
        "({{ index }} > largest)",
        INTERPRETED + "softmax.py",
    ),
    Change(
        "combine: parts' sums are added as they are",
        TRITON + "combine.jinja",
        "total = total * shrink + of_part * grow",
        "total = total * shrink + of_part",
        INTERPRETED + "shapes.py " + INTERPRETED + "softmax.py",
    ),
    Change(
        "decode: each part ends a step early",
        TRITON + "decode.jinja",
        '"steps * (part + 1) // %s" % splits',
        '"steps * (part + 1) // %s - 1" % splits',
        INTERPRETED + "shapes.py " + INTERPRETED + "softmax.py",
    ),
    Change(
        "forward: heads read another head's keys",
        TRITON + "forward.jinja",
        "kv_h = h // {{ group }}",
        "kv_h = h % {{ group }}",
        INTERPRETED + "shapes.py",
    ),
    Change(
        "backward_dq: delta is not subtracted",
        TRITON + "backward_dq.jinja",
        "d_score = weight * (d_weight - row_delta[:, None])",
        "d_score = weight * d_weight",
        INTERPRETED + "shapes.py",
    ),
    Change(
        "backward_dq: no scale",
        TRITON + "backward_dq.jinja",
        '"dq * " ~ scale',
        '"dq"',
        INTERPRETED + "shapes.py",
    ),
    Change(
        "backward_dq: what is dropped has a gradient",
        TRITON + "backward_dq.jinja",
        "d_weight = tl.where(keep, d_weight, 0.0) * drop_scale",
        "d_weight = d_weight * drop_scale",
        INTERPRETED + "softmax.py::test_as_right_as_dense_attention[dropout-plain-kernels0]",
    ),
    Change(
        "backward_dkdv: delta is not subtracted",
        TRITON + "backward_dkdv.jinja",
        "d_score = weight * (d_weight - row_delta[None, :])",
        "d_score = weight * d_weight",
        INTERPRETED + "shapes.py",
    ),
    Change(
        "backward_dkdv: the first head of a group for all",
        TRITON + "backward_dkdv.jinja",
        "h = first_h + head\n",
        "h = first_h\n",
        INTERPRETED + "shapes.py",
    ),
    Change(
        "backward_dkdv: values' gradients are not scaled for dropout",
        TRITON + "backward_dkdv.jinja",
        '"dv_acc * drop_scale" if dropout else "dv_acc"',
        '"dv_acc"',
        INTERPRETED + "softmax.py::test_as_right_as_dense_attention[dropout-plain-kernels0]",
    ),
    Change(
        "mapped: scattered keys from the first of their tile",
        TRITON + "mapped_places.jinja",
        '"next_lines", there) }} + next_within',
        '"next_lines", there) }} + next_within * 0',
        INTERPRETED + "tile_map.py",
    ),
    Change(
        "mapped: queries' positions are not moved",
        TRITON + "mapped_places.jinja",
        "{{ it.lanes }}_idx = ({{ it.lanes }}_rows + shift_{{ side }}){{ shape }}",
        "{{ it.lanes }}_idx = ({{ it.lanes }}_rows + shift_{{ side }} * 0){{ shape }}",
        INTERPRETED + "tile_map.py",
    ),
]

OPERATIONS = [
    Change(
        "chunks: the sum is not rescaled",
        OP + "eager/chunked.py",
        "total = total.mul_(shrink).add_(weight.sum(-1, keepdim=True))",
        "total = total.add_(weight.sum(-1, keepdim=True))",
        EAGER,
    ),
    Change(
        "chunks: the logsumexp's gradient with the other sign",
        OP + "eager/chunked.py",
        "delta = delta - grad_lse[",
        "delta = delta + grad_lse[",
        EAGER,
    ),
    Change(
        "chunks: one batch's gradient for keys of all",
        OP + "eager/tiles.py",
        "product = product.sum(0, keepdim=True)",
        "product = product[:1]",
        "tests/accuracy/test_gradients.py",
    ),
    Change(
        "chunks: negative indices end at the first",
        OP + "eager/lanes.py",
        "torch.where(index < 0, index + size, index)",
        "index.clamp(min=0)",
        EAGER,
    ),
    Change(
        "chunks: captured gradients of lanes that nobody sees",
        OP + "eager/lanes.py",
        "contribution = torch.where(mask, contribution, 0.0)",
        "contribution = contribution + 0.0",
        "tests/accuracy/test_gradients.py",
    ),
    Change(
        "chunks: keys of a tile count from the first",
        "flex_inductor/visits/band.py",
        "n.start % self.kv_block\n",
        "0\n",
        EAGER + " tests/op/test_schedule.py",
    ),
    Change(
        "entropy: the gradient with the other sign",
        OP + "autograd.py",
        "-entropy * grad_entropy",
        "entropy * grad_entropy",
        "tests/accuracy/test_entropy.py",
    ),
    Change(
        "sinks: the gradient with the other sign",
        "flex_inductor/softmax/arguments.py",
        "through = through - (out",
        "through = through + (out",
        "tests/accuracy/test_sinks.py",
    ),
    Change(
        "dropout: a counter's words in another order",
        "flex_inductor/softmax/dropout.py",
        "torch.where((kv_idx & 8) > 0, words[i + 1], words[i])",
        "torch.where((kv_idx & 8) > 0, words[i], words[i + 1])",
        "tests/accuracy/test_dropout.py::test_the_mask_that_aux_gives",
    ),
    Change(
        "dropout: weights are not made larger",
        "flex_inductor/softmax/dropout.py",
        "return LEVELS / (LEVELS - dropout[3].double())",
        "return LEVELS / (LEVELS - 0 * dropout[3].double())",
        "tests/accuracy/test_dropout.py",
    ),
    Change(
        "narrow: queries without their scale",
        "flex_inductor/softmax/narrow.py",
        "if self.q_scale is not None:\n",
        "if self.q_scale is None:\n",
        "tests/accuracy/test_narrow.py",
    ),
    Change(
        "vmap: mods see the whole batch's rows",
        OP + "vmap.py",
        "lanes[b] = (lanes[b] % batch).to(INDEX_DTYPE)",
        "lanes[b] = lanes[b].to(INDEX_DTYPE)",
        "tests/op/test_vmap.py",
    ),
    Change(
        "classes: calls of one batch and of many are one",
        OP + "call.py",
        "shape[1], min(shape[0], 2), min(shape[2], 2))",
        "shape[1], 2, min(shape[2], 2))",
        "tests/op/test_eager_kernels.py tests/op/test_known.py",
        "CPU kernels read how many batches queries and keys have when they run",
    ),
    Change(
        "kept: the one used last goes first",
        "flex_inductor/kept.py",
        "self._values.popitem(last=False)",
        "self._values.popitem(last=True)",
        "tests/test_kept.py",
    ),
]

SCHEDULES = [
    Change(
        "window: one key too many on the right",
        "flex_inductor/visits/window.py",
        "position + self.right + 1",
        "position + self.right + 2",
        "tests/masks/test_window.py tests/op/test_bounds.py",
    ),
    Change(
        "window: a chunk ends one key late",
        "flex_inductor/visits/window.py",
        "own = _chunk(position, self.chunk, origin) + self.chunk\n",
        "own = _chunk(position, self.chunk, origin) + self.chunk + 1\n",
        "tests/masks/test_window.py tests/op/test_bounds.py",
    ),
    Change(
        "window: turned ends are not exchanged",
        "flex_inductor/visits/window.py",
        "return Window(self.right, self.left,",
        "return Window(self.left, self.right,",
        "tests/masks/test_window.py tests/op/test_bounds.py",
    ),
    Change(
        "window: the mask of its left end",
        "flex_inductor/visits/window.py",
        "seen = kv_idx >= q_idx + (shift - int(self.left))",
        "seen = kv_idx > q_idx + (shift - int(self.left))",
        "tests/masks/test_window.py tests/sequences/test_flash.py",
    ),
    Change(
        "bounds: queries begin at the first key",
        "flex_inductor/visits/bounds.py",
        "return sequence.keys - sequence.queries if self.shift is None else self.shift",
        "return 0 if self.shift is None else self.shift",
        "tests/masks/test_window.py tests/op/test_bounds.py tests/sequences/test_varlen.py",
    ),
    Change(
        "runs: neighbours of other kinds are one",
        MASKS + "runs.py",
        " | (kind != preceding(kind, -1))",
        "",
        "tests/masks/test_mask_schedule.py",
    ),
    Change(
        "runs: neighbours of other lines are one",
        MASKS + "runs.py",
        " | (line != preceding(line, -1))",
        "",
        "tests/masks/test_mask_schedule.py",
    ),
]

CALLERS = [
    Change(
        "sequences: packed tiles begin at the first token",
        SEQUENCES + "places.py",
        "tiles.of(self.starts)[0] + tiles.start\n",
        "tiles.of(self.starts)[0]\n",
        "tests/sequences/test_varlen.py tests/sequences/test_flash.py",
    ),
    Change(
        "sequences: padding on the left is read",
        SEQUENCES + "places.py",
        "return Cached(rows, pad, used - pad, longest)",
        "return Cached(rows, pad * 0, used - pad, longest)",
        "tests/sequences/test_caches.py",
    ),
    Change(
        "sequences: masks see queries from the first",
        SEQUENCES + "mask.py",
        "mask_mod(b, h, last_q + shift[b], last_kv)",
        "mask_mod(b, h, last_q, last_kv)",
        "tests/sequences/test_varlen.py",
    ),
    Change(
        "flash: aligned at the first token",
        "flex_inductor/flash/functions.py",
        "shift = k.size(1) - q.size(1)",
        "shift = 0 * (k.size(1) - q.size(1))",
        "tests/sequences/test_flash.py",
    ),
    Change(
        "flash: the descales of the sequence before",
        "flex_inductor/flash/descales.py",
        "starts[1:], right=True)",
        "starts[1:], right=False)",
        "tests/sequences/test_descales.py",
    ),
    Change(
        "ring: the largest score is the first part's",
        DISTRIBUTED + "ring.py",
        "torch.maximum(peak, part_peak),",
        "peak,",
        "tests/distributed/test_methods.py -k ring",
    ),
    Change(
        "ring: each step counts the sinks",
        DISTRIBUTED + "ring.py",
        "ring=None, partial=partial, sinks=None",
        "ring=None, partial=partial",
        "tests/distributed/test_methods.py -k ring",
    ),
    Change(
        "ring: the gradients of another rank's keys are lost",
        DISTRIBUTED + "ring.py",
        "            at += grad\n",
        "            at += 0 * grad\n",
        "tests/distributed/test_methods.py -k ring",
    ),
    Change(
        "heads: mods see the first rank's",
        DISTRIBUTED + "methods.py",
        "first = self.heads_group.rank * query.size(1)",
        "first = 0 * self.heads_group.rank * query.size(1)",
        "tests/distributed/test_methods.py -k ulysses",
    ),
    Change(
        "decode over ranks: parts are added as they are",
        DISTRIBUTED + "decode.py",
        "(parts * weights.unsqueeze(-1)).sum(0)",
        "parts.mean(0)",
        "tests/distributed/test_decode.py",
    ),
    Change(
        "transformers: softcap with the wrong slope",
        "flex_inductor/integrations/transformers.py",
        "scores = softcap * torch.tanh(scores / softcap)",
        "scores = torch.tanh(scores / softcap)",
        "tests/integrations/test_transformers.py",
    ),
    Change(
        "transformers: a bias is lost",
        "flex_inductor/integrations/transformers.py",
        "scores = scores + bias",
        "scores = scores + 0 * bias",
        "tests/integrations/test_transformers.py",
    ),
]

CHANGES = [*KERNELS_FOR_CPUS, *KERNELS_FOR_CARDS, *OPERATIONS, *SCHEDULES, *CALLERS]
