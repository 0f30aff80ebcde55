// Checks of the headers of templates/cpu by themselves; test_headers.py compiles and calls them.
#include <torch/csrc/inductor/cpp_prefix.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <tuple>
#include <type_traits>
#include <vector>

#include "memory.h"
namespace {
#include "kernel.h"
#include "vectors.h"
#include "lanes.h"
#include "lookups.h"
#include "products.h"
#include "rows.h"

constexpr int64_t ROWS = W == 8 ? 2 : 4, TOGETHER = 1, KEYS = 4, CHUNK = 64, TILE_LD = CHUNK + W, WEIGHTS_LD = TILE_LD * STEP, COLUMNS = 4;
#if DECODES
#include "decode.h"
#endif
#include "sums.h"

constexpr float HOLE = 12345.f;  // in memory that must not be written

#define EXPECT(condition) \
  if (!(condition)) return std::fprintf(stderr, "%s:%d: %s\n", __func__, __LINE__, #condition), false

// Small whole numbers: sums of their products are exact in every type.
float number(int64_t i) { return float((i * 37 + 11) % 17 - 8); }

template <typename T>
std::vector<T> numbers(int64_t count) {
  std::vector<T> found(count);
  for (int64_t i = 0; i < count; ++i) found[i] = T(number(i));
  return found;
}

bool rows_are_gathered_with_zeros_behind() {
  const auto from = numbers<Element>(7 * 40);
  for (const int64_t stride : {1, 2}) {
    std::vector<Packed> to(10 * 24, Packed(HOLE));
    gather_rows(from.data(), 40, stride, 7, 19, 9, to.data(), 24);
    for (int64_t r = 0; r < 10; ++r)
      for (int64_t c = 0; c < 24; ++c) {
        const float wanted = r == 9 ? float(Packed(HOLE)) : r < 7 && c < 19 ? float(from[r * 40 + c * stride]) : 0.f;
        EXPECT(float(to[r * 24 + c]) == wanted);
      }
  }
  return true;
}

bool lanes_are_summed_in_three_directions() {
  const int64_t ld = 64 + 2 * W;
  for (const int64_t rows : {1, 3, 4, 37})
    for (const int64_t columns : {1, 5, 33, 64}) {
      std::vector<float> lanes(W + rows * ld, HOLE), wanted[3];
      for (auto& sums : wanted) sums.assign(rows + columns, 0.f);
      float* const first = lanes.data() + W;
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t n = 0; n < columns; ++n) {
          const float lane = first[r * ld + n] = number(r * columns + n);
          wanted[0][r] += lane, wanted[1][n] += lane, wanted[2][rows - 1 - r + n] += lane;
        }
      // A strip of rows after the other.
      std::vector<float> sums[3];
      for (auto& s : sums) s.assign(rows + columns + 64, 0.f);
      for (int64_t r0 = 0; r0 < rows; r0 += 16) {
        const int64_t count = std::min<int64_t>(16, rows - r0);
        float* const strip = first + r0 * ld;
        sum_rows(strip, ld, count, columns, sums[0].data() + r0);
        add_columns(strip, ld, count, columns, sums[1].data());
        add_diagonals(strip, ld, count, columns, sums[2].data() + rows - r0 - count);
      }
      EXPECT(std::equal(sums[0].begin(), sums[0].begin() + rows, wanted[0].begin()));
      EXPECT(std::equal(sums[1].begin(), sums[1].begin() + columns, wanted[1].begin()));
      EXPECT(std::equal(sums[2].begin(), sums[2].begin() + rows + columns - 1, wanted[2].begin()));
    }
  return true;
}

bool register_blocks_are_products() {
  const int64_t steps = 5 * DEPTH / STEP, depth = steps * STEP;
  auto rows = numbers<Packed>((BLOCK + 1) * depth), columns = numbers<Packed>(PANEL * depth);
  std::vector<Packed> panel(PANEL * depth);
  // Whole vectors of a row are read.
  std::vector<Packed> lines((PANEL + 1) * (depth + W * STEP));
  const int64_t line = depth + W * STEP;
  for (int64_t n = 0; n < PANEL; ++n) std::copy_n(columns.data() + n * depth, depth, lines.data() + n * line);
  std::vector<Packed> wide(PANEL * line);
  transpose_panel(lines.data(), line, steps, wide.data());
  std::copy_n(wide.data(), PANEL * depth, panel.data());
  Tiles tiles;
  for (const int64_t width : {PANEL, W, W - 3}) {
    std::vector<float> target(BLOCK * (PANEL + W), HOLE);
    int64_t written = 0;
    each_panel(width, [&](int64_t first, auto whole) {
      dot_block<whole>(rows.data(), depth, STEP, panel.data(), PANEL * STEP, steps, target.data() + first, PANEL + W,
          Put());
      written = first + (whole ? PANEL : W);
    });
    EXPECT(written == round_up(width, W));
    for (int64_t r = 0; r < BLOCK; ++r)
      for (int64_t n = 0; n < PANEL + W; ++n) {
        float wanted = 0.f;
        for (int64_t d = 0; n < written && d < depth; ++d) wanted += float(rows[r * depth + d]) * float(columns[n * depth + d]);
        EXPECT(target[r * (PANEL + W) + n] == (n < written ? wanted : HOLE));
      }
  }
  return true;
}

bool results_are_scaled_and_rounded() {
  auto from = numbers<float>(300);
  for (const int64_t stride : {1, 3})
    for (const int64_t count : {37, 256})
      for (const int64_t start : {0, 1, 32})
        for (const bool streamed : {false, true}) {
          const Scratch<Element> to(300 * 3);
          std::fill_n(to.data, 300 * 3, Element(HOLE));
          write_row(from.data(), 0.5f, count, to.data + start, stride, 0, streamed);
          end_streams();
          for (int64_t i = 0; i < 300 * 3 - start; ++i) {
            const bool written = i % stride == 0 && i / stride < count;
            EXPECT(float(to[start + i]) == float(Element(written ? from[i / stride] * 0.5f : HOLE)));
          }
        }
  return true;
}

// Not known while compiling.
float product(float x, float y) {
  const volatile float left = x, right = y;
  return left * right;
}

bool results_that_are_no_normal_numbers_are_0_for_a_while() {
  EXPECT(product(1e-30f, 1e-10f) > 0.f);
#if defined(__x86_64__)
  {
    const NormalNumbers normal;
    EXPECT(product(1e-30f, 1e-10f) == 0.f && product(1e-40f, 1e10f) > 0.f);
  }
  EXPECT(product(1e-30f, 1e-10f) > 0.f);
#endif
  return true;
}

bool exponentials_are_good_to_a_few_units() {
  const NormalNumbers normal;
  float lanes[W];
  const double of_polynomial = FLEX_BF16_PAIRS ? 2.9e-6 : 1e-7;
  for (float x = 12.f; x > -100.f; x -= 0.037f) {
    exp_of(Vec(x)).store(lanes);
    const double wanted = std::exp(double(x));
    // log2(e) and its product with x are rounded: a relative error that grows with x.
    const double off = of_polynomial + 3e-7 + 7.5e-8 * std::abs(x);
    for (const float found : lanes) EXPECT(std::abs(found - wanted) <= off * wanted + 1e-37);
  }
  exp_of(Vec(-INF)).store(lanes);
  EXPECT(lanes[0] == 0.f && lanes[W - 1] == 0.f);
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  exp_of(Vec(std::numeric_limits<float>::quiet_NaN())).store(lanes);
  EXPECT(std::isnan(lanes[0]) && std::isnan(lanes[W - 1]));  // forward's maxima lose it, backward's rows count on it
  EXPECT(EXP_KEEPS_NAN);
#endif
  for (float x = -12.f; x < 12.f; x += 0.013f) {
    hyperbolic_tangent(Vec(x)).store(lanes);
    const double wanted = std::tanh(double(x));
    for (const float found : lanes) EXPECT(std::abs(found - wanted) <= 8e-7 * std::abs(wanted) + 1e-30);
  }
  return true;
}

bool what_is_not_finite_is_found_and_left_out() {
  auto row = numbers<Packed>(4 * PANEL);
  EXPECT(all_finite(row.data(), 4 * PANEL));
  for (const float x : {INF, -INF, std::numeric_limits<float>::quiet_NaN()}) {
    auto spoiled = row;
    spoiled[3 * PANEL + 1] = Packed(x);
    EXPECT(!all_finite(spoiled.data(), 4 * PANEL));
    drop_not_finite(spoiled.data(), 4 * PANEL);
    EXPECT(float(spoiled[3 * PANEL + 1]) == 0.f && float(spoiled[0]) == float(row[0]) && all_finite(spoiled.data(), 4 * PANEL));
  }
  const Element value[] = {Element(1.f), Element(INF)};
  const float scores[] = {0.f, -INF}, weights[] = {0.5f, 0.f};
  float sums[] = {1.f, 2.f, 3.f, 4.f};
  add_not_finite(value, 1, 2, scores, 1, weights, 1, 2, sums, 2);
  EXPECT(sums[0] == 1.f && sums[1] == INF && sums[2] == 3.f && sums[3] == 4.f);  // a lane that is not live stays
  return true;
}

bool memory_is_kept_for_the_next_that_fits() {
  using flex_inductor::KeptMemory;
  KeptMemory kept;
  const auto taken = [&](size_t size) {
    size_t found = size;
    void* const data = kept.take(found);
    return std::make_pair(data, found);
  };
  const auto [first, size] = taken(3 << 20);
  EXPECT(size == 3 << 20);
  kept.give(first, size);
  const auto [smaller, at_least] = taken(1 << 20);  // not a third of a block
  EXPECT(smaller != first && at_least == 1 << 20);
  const auto [again, whole] = taken(2 << 20);
  EXPECT(again == first && whole == size);
  const auto [other, fresh] = taken(2 << 20);  // the block is in use
  EXPECT(other != first && fresh == 2 << 20);
  kept.give(smaller, at_least), kept.give(again, whole), kept.give(other, fresh);
  const auto [large, most] = taken(KeptMemory::MOST);
  kept.give(large, most);  // all others go
  const auto [last, unkept] = taken(3 << 20);
  EXPECT(last != large && unkept == 3 << 20);
  std::free(last);
  const auto [same, its] = taken(KeptMemory::MOST);
  EXPECT(same == large && its == KeptMemory::MOST);
  std::free(same);
  return true;
}

bool lanes_above_a_limit_are_found() {
  float lanes[W] = {};
  EXPECT(!any_above(Vec::loadu(lanes), 0.f));
  for (int64_t i = 0; i < W; ++i) {
    for (const float large : {1e-30f, INF, std::numeric_limits<float>::quiet_NaN()}) {
      lanes[i] = large;
      EXPECT(any_above(Vec::loadu(lanes), 0.f));
    }
    lanes[i] = -INF;
    EXPECT(!any_above(Vec::loadu(lanes), 0.f));
  }
  return true;
}

bool heavy_items_come_first_and_equal_ones_in_order() {
  std::vector<Weighed> items{{1, 0}, {5, 1}, {1, 2}, {7, 3}, {9, 4}};
  heaviest_first(items.data(), 4);
  const int64_t wanted[] = {3, 1, 0, 2, 4};
  for (int64_t i = 0; i < 5; ++i) EXPECT(items[i].item == wanted[i]);
  return true;
}

bool the_first_failure_is_kept() {
  Failure failure;
  failure.guard([] {});
  EXPECT(!failure.first);
  failure.guard([] { throw std::runtime_error("first"); });
  failure.guard([] { throw std::runtime_error("second"); });
  try {
    std::rethrow_exception(failure.first);
  } catch (const std::exception& error) {
    return std::strcmp(error.what(), "first") == 0;
  }
  return false;
}

#if DECODES
bool keys_are_multiplied_where_they_lie() {
  const int64_t D = 21, D_PAD = round_up(D, E);
  auto keys = numbers<Stored>(16 * D + E);
  std::vector<Packed> queries(ROWS * D_PAD);
  std::vector<float> scores(ROWS * TILE_LD, HOLE);
  for (int64_t r = 0; r < ROWS; ++r)
    for (int64_t d = 0; d < D; ++d) queries[r * D_PAD + d] = number(r * 5 + d);
  const auto dot = [&](int64_t r, int64_t n) {
    float sum = 0.f;
    for (int64_t d = 0; d < D; ++d) sum += float(queries[r * D_PAD + d]) * float(keys[n * D + d]);
    return sum * 0.5f;
  };
  Chunk now(0, 0);
  for (; now.keys < 5; ++now.keys) now.key_rows[now.keys] = now.value_rows[now.keys] = keys.data() + now.keys * D;
  now.repeat_last();
  const Part rows{now.key_rows, D}, none = rows;
  dot_keys(std::integral_constant<int64_t, 1>(), queries.data(), D_PAD, rows, none, D, 0.5f, scores.data());
  for (int64_t r = 0; r < ROWS; ++r)
    for (int64_t n = 0; n < KEYS; ++n) EXPECT(scores[r * TILE_LD + n] == (r < 1 ? dot(r, n + 1) : HOLE));
  dot_keys(std::integral_constant<int64_t, ROWS>(), queries.data(), D_PAD, {now.key_rows + KEYS, 0}, none, D, 0.5f, scores.data() + KEYS);
  for (int64_t r = 0; r < ROWS; ++r)
    for (int64_t n = 0; n < KEYS; ++n) EXPECT(scores[r * TILE_LD + KEYS + n] == dot(r, 4));
  return true;
}

bool rows_are_asked_for_in_the_order_in_which_they_are_read() {
  const auto memory = numbers<Stored>(4 * KEYS);
  std::vector<const Stored*> rows(2 * KEYS);
  for (int64_t n = 0; n < 2 * KEYS; ++n) rows[n] = memory.data() + n;
  const Ahead::Rows soon[] = {{rows.data(), 3}, {rows.data() + KEYS, 5}};
  Ahead ahead{soon, soon + 2, 1, 2};
  const Part otherwise{rows.data() + 1, 0};
  for (const Stored* first : {rows[0] + 3, rows[KEYS], rows[KEYS] + 5, rows[1], rows[1]})
    EXPECT(ahead.next(otherwise)[0] == first);
  return true;
}

bool values_are_added_up() {
  const int64_t V = 19, V_PAD = round_up(V, COLUMNS * W), keys = 7;
  auto values = numbers<Stored>(keys * V + COLUMNS * W);
  std::vector<const Stored*> rows(round_up(keys, KEYS), values.data() + (keys - 1) * V);  // the last one repeated
  for (int64_t n = 0; n < keys; ++n) rows[n] = values.data() + n * V;
  const auto weights = numbers<Packed>(2 * WEIGHTS_LD);
  auto sums = numbers<float>(2 * V_PAD), before = sums;
  const Part all{rows.data(), 0};
  add_values(std::integral_constant<int64_t, 2>(), weights.data(), all, all, keys, 0, std::min(V, COLUMNS * W), sums.data(), V_PAD);
  for (int64_t r = 0; r < 2; ++r)
    for (int64_t v = 0; v < std::min(V, COLUMNS * W); ++v) {
      float wanted = before[r * V_PAD + v];
      for (int64_t n = 0; n < keys; ++n) wanted += float(weights[r * WEIGHTS_LD + n]) * float(rows[n][v]);
      EXPECT(sums[r * V_PAD + v] == wanted);
    }
  // Without the masked key whose value is not finite.
  values[V] = Stored(INF);
  std::vector<float> scores(keys, 0.f), live = before, wanted = before;
  scores[1] = -INF;
  add_live_values(weights.data(), scores.data(), {{0, keys, 0, 0, true}}, rows.data(), 0, V, live.data());
  for (int64_t n = 0; n < keys; ++n)
    for (int64_t v = 0; n != 1 && v < V; ++v) wanted[v] = std::fma(float(weights[n]), float(rows[n][v]), wanted[v]);
  EXPECT(live == wanted);
  return true;
}
#endif

bool lanes_are_looked_up_and_added_to_wherever_they_lie() {
  const auto table = numbers<float>(4 * W), added = numbers<float>(W);
  for (int64_t kind = 0; kind < 9; ++kind) {
    int32_t places[W];
    for (int64_t i = 0; i < W; ++i)
      // Upwards, downwards, all the same, by two, upwards in pieces of 7, downwards in pieces of 5 and 3, and upwards and downwards
      // but for the last.
      places[i] = kind == 0 ? 3 + i : kind == 1 ? 2 * W - i : kind == 2 ? 5 : kind == 3 ? 2 * i
                : kind == 4 ? i + i / 7 * 20 : kind == 5 ? 4 * W - 4 - i - i / 5 * 7 : kind == 6 ? 4 * W - 4 - i - i / 3 * 2
                : i == W - 1 ? 3 * W : kind == 7 ? 3 + i : 2 * W - i;
    const auto lanes = Places::loadu(places);
    EXPECT(W == 4 || Pieces(lanes).direction == (kind == 0 ? 1 : kind == 1 ? -1 : 0));
    float found[W];
    look_up(table.data(), lanes).store(found);
    auto sums = table, wanted = table;
    add_each(Vec::loadu(added.data()), sums.data(), lanes);
    for (int64_t i = 0; i < W; ++i) {
      EXPECT(found[i] == table[places[i]]);
      wanted[places[i]] += added[i];
    }
    EXPECT(sums == wanted);
    // As sums of a row's number and a key's, of which one is out of range.
    constexpr int32_t OF_ROW = std::numeric_limits<int32_t>::max() - 3;
    int32_t of_keys[2 * W];
    for (int64_t i = 0; i < 2 * W; ++i) of_keys[i] = int32_t(uint32_t(places[i % W]) - uint32_t(OF_ROW));
    const KeyPlaces<2> of_tile(of_keys, 2 * W - 1);
    EXPECT(W != 16 || of_tile.pieces[0].direction == (kind == 0 || kind == 4 || kind == 7 ? 1 : kind == 2 || kind == 3 || kind == 6 ? 0 : -1));
    look_up(table.data(), of_tile, 0, OF_ROW).store(found);
    sums = table;
    add_each(Vec::loadu(added.data()), sums.data(), of_tile, 0, OF_ROW);
    for (int64_t i = 0; i < W; ++i) EXPECT(found[i] == table[places[i]]);
    EXPECT(sums == wanted);
  }
  return true;
}

// Of lanes where a mask holds: those that a blend takes.
template <typename Mask>
std::vector<bool> held(const Mask& mask) {
  float each[W];
  blended(Vec(0.f), Vec(1.f), mask_cast<float, 1>(mask)).store(each);
  std::vector<bool> found(W);
  for (int64_t i = 0; i < W; ++i) found[i] = each[i] == 1.f && mask.is_masked(i);
  return found;
}

template <typename T, int N>
bool compared_lane_by_lane() {
  T left[W], right[W];
  for (int64_t i = 0; i < W; ++i) {
    left[i] = T(number(i)), right[i] = i % 4 == 3 ? left[i] : T(number(i + 5));
    if (std::is_floating_point_v<T> && i == 5) right[i] = std::numeric_limits<T>::quiet_NaN();
    if (i == 1) left[i] = std::numeric_limits<T>::max(), right[i] = std::numeric_limits<T>::lowest();
  }
  using Numbers = std::conditional_t<N == 1, at::vec::Vectorized<T>, at::vec::VectorizedN<T, N>>;
  const Numbers x = Numbers::loadu(left), y = Numbers::loadu(right);
  const LaneMask<T, N> found[] = {lanes(x) == y, lanes(x) != y, lanes(x) < y, lanes(x) <= y, lanes(x) > y, lanes(x) >= y};
  for (int64_t i = 0; i < W; ++i) {
    const bool wanted[] = {left[i] == right[i], left[i] != right[i], left[i] < right[i], left[i] <= right[i], left[i] > right[i], left[i] >= right[i]};
    for (int sign = 0; sign < 6; ++sign) EXPECT(held(found[sign])[i] == wanted[sign]);
  }
  return true;
}

bool conditions_hold_lane_by_lane() {
  EXPECT((compared_lane_by_lane<float, 1>() && compared_lane_by_lane<int32_t, 1>()));
  EXPECT((compared_lane_by_lane<int64_t, 2>() && compared_lane_by_lane<double, 2>()));
  bool first[W], second[W];
  for (int64_t i = 0; i < W; ++i) first[i] = number(i) > 0, second[i] = number(i + 3) > 0;
  using OfFloats = LaneMask<float, 1>;
  const auto x = OfFloats::from(first, W);
  const auto y = LaneMask<int64_t, 2>::from(second, W);
  const auto part = LaneMask<int32_t, 1>::from(first, W - 3);
  const auto two_more = OfFloats::set(x, OfFloats::from(true), 2);
  for (int64_t i = 0; i < W; ++i) {
    const bool a = first[i], b = second[i];
    EXPECT(held(x & y)[i] == (a && b) && held(x | y)[i] == (a || b) && held(x ^ y)[i] == (a != b) && held(~x)[i] == !a);
    EXPECT(held(x == y)[i] == (a == b) && held(x != y)[i] == (a != b) && held(x < y)[i] == (a < b) && held(x >= y)[i] == (a >= b));
    EXPECT(held(part)[i] == (a && i < W - 3));
    EXPECT(held(two_more)[i] == (a || i < 2));
  }
  EXPECT(OfFloats::from(true).all_masked() && OfFloats::from(false).all_zero() && !x.all_masked() && !x.all_zero());
  return true;
}

bool bools_and_integers_are_looked_up() {
  std::vector<int32_t> ints(100);
  std::vector<int64_t> longs(100);
  const auto bools = std::make_unique<bool[]>(100);
  for (int64_t i = 0; i < 100; ++i) ints[i] = int32_t(number(i)), longs[i] = (int64_t(1) << 40) + i, bools[i] = number(i) > 0;
  int32_t places[W], found[W];
  int64_t found_longs[W];
  for (const int64_t start : {3, 4, 5, 6}) {  // bools begin anywhere in a word
    for (int64_t i = 0; i < W; ++i) places[i] = int32_t(i * 31 % 90) - (i % 3);
    look_up(ints.data() + start, Places::loadu(places)).store(found);
    look_up(longs.data() + start, Places::loadu(places)).store(found_longs);
    const auto held_there = held(look_up(bools.get() + start, Places::loadu(places)));
    for (int64_t i = 0; i < W; ++i) {
      const int64_t at = start + places[i];
      EXPECT(found[i] == ints[at] && found_longs[i] == longs[at] && held_there[i] == bools[at]);
    }
  }
  return true;
}

#if FLEX_NARROW
bool every_narrow_number_is_widened_and_scaled() {
  std::vector<Narrow> all;
  for (int i = 0; i < 256; ++i) all.emplace_back(uint8_t(i), Narrow::from_bits());
  std::vector<Packed> found(256);
  copy_elements(all.data(), 1, 256, found.data());
  const float scale = 0.5f;
  scale_rows(found.data(), 256, 1, 256, &scale, 0);
  for (int i = 0; i < 256; ++i) {
    const float wanted = float(all[i]) * scale, got = float(found[i]);
    EXPECT(got == wanted || (std::isnan(got) && std::isnan(wanted)));
  }
  return true;
}
#endif
}  // namespace

#define CHECK(name) {#name, name}
struct Check {
  const char* name;
  bool (*holds)();
};
static const Check CHECKS[] = {
    CHECK(rows_are_gathered_with_zeros_behind), CHECK(register_blocks_are_products), CHECK(results_are_scaled_and_rounded),
    CHECK(results_that_are_no_normal_numbers_are_0_for_a_while), CHECK(exponentials_are_good_to_a_few_units), CHECK(what_is_not_finite_is_found_and_left_out),
    CHECK(memory_is_kept_for_the_next_that_fits), CHECK(lanes_above_a_limit_are_found), CHECK(heavy_items_come_first_and_equal_ones_in_order),
    CHECK(the_first_failure_is_kept),
#if DECODES
    CHECK(keys_are_multiplied_where_they_lie), CHECK(rows_are_asked_for_in_the_order_in_which_they_are_read),
    CHECK(values_are_added_up),
#endif
    CHECK(conditions_hold_lane_by_lane), CHECK(bools_and_integers_are_looked_up), CHECK(lanes_are_looked_up_and_added_to_wherever_they_lie), CHECK(lanes_are_summed_in_three_directions),
#if FLEX_NARROW
    CHECK(every_narrow_number_is_widened_and_scaled),
#endif
};

extern "C" const char* name_of(int i) { return i < int(std::size(CHECKS)) ? CHECKS[i].name : nullptr; }
extern "C" bool holds(int i) { return CHECKS[i].holds(); }
