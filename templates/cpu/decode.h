// What decoding adds to kernel.h: products of a few queries with keys and values that are read where they lie. ROWS, CHUNK,
// TILE_LD, WEIGHTS_LD, KEYS and COLUMNS are the kernel's; decode.jinja says what they mean.
// Narrow keys and values are copied into floats first.
using Stored = std::conditional_t<FLEX_NARROW != 0, float, Element>;
constexpr int64_t E = at::vec::Vectorized<Stored>::size();
constexpr int64_t LINE = 64 / sizeof(Stored);  // numbers that come from memory together

// E numbers as products take them; zeros after the first `count`.
inline std::array<Step, E / W / STEP> operands(const Stored* from, int64_t count) {
#if FLEX_BF16_PAIRS
  return {count >= E ? load_step(from) : Step(at::vec::Vectorized<Element>::loadu(from, count))};
#elif FLEX_IS_FLOAT || FLEX_NARROW
  return {count >= E ? Vec::loadu(from) : Vec::loadu(from, count)};
#else
  const auto [first, second] = at::vec::convert_to_float<Element>(
      count >= E ? at::vec::Vectorized<Element>::loadu(from) : at::vec::Vectorized<Element>::loadu(from, count));
  return {first, second};
#endif
}

// Keys whose indices follow, from key `first` on; their scores begin at `at`. `listed` is the first one's place in the list
// of the group's keys.
struct Piece {
  int64_t first, count, at, listed;
  bool masked;
};

struct Chunk {
  Scratch<Stored> key_copies, value_copies;
  std::vector<Piece> pieces;
  int64_t keys = 0;
  bool checked = false;  // whether any piece is masked
  const Stored *key_rows[CHUNK], *value_rows[CHUNK];
  Chunk(int64_t keys, int64_t values) : key_copies(keys), value_copies(values) {}
  // Lets code that takes several keys at once find the last one again behind it.
  void repeat_last() {
    std::fill(key_rows + keys, key_rows + round_up(keys, KEYS), key_rows[keys - 1]);
    std::fill(value_rows + keys, value_rows + round_up(keys, KEYS), value_rows[keys - 1]);
  }
};

// Has the system's pages of `count` rows looked up, long before the rows are asked for: a page that is looked up late holds up
// all that is asked for after it. Rows far apart take too little of each page for that to pay.
inline __attribute__((always_inline)) void look_up(const Stored* rows, int64_t width, int64_t stride, int64_t count) {
  if (width * 2 < stride) return;
  constexpr int64_t PAGE = 4096 / sizeof(Stored);
  const int64_t rows_of_page = std::max<int64_t>(PAGE / std::max<int64_t>(stride, 1), 1);
  for (int64_t n = 0; n < count; n += rows_of_page) fetch_row(rows + n * stride, 1);
}

// A head's part of KEYS keys or values.
struct Part {
  const Stored* const* rows;
  int64_t column;
  const Stored* operator[](int64_t n) const { return rows[n] + column; }
};

// What is read soon, in the order in which it is read. It is asked for beside products, as much as these read: many lines at
// once take longer, and rows a multiple of 4 KiB apart share a few places in the first cache.
struct Ahead {
  struct Rows {
    const Stored* const* first;  // of KEYS
    int64_t width;  // of a head
  };
  const Rows *at, *end;
  int64_t head, heads;
  // The next part; `otherwise` after the last.
  Part next(Part otherwise) {
    if (at >= end) return otherwise;
    const Part found{at->first, head * at->width};
    if (++head == heads) head = 0, ++at;
    return found;
  }
};

// The sums of four vectors' lanes times `scale`, one after the other.
inline void sum_four(Vec a, Vec b, Vec c, Vec d, float scale, float* sums) {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
#ifdef CPU_CAPABILITY_AVX512
  const auto half = [](Vec x) { return _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)); };
#else
  const auto half = [](Vec x) { return __m256(x); };
#endif
  const auto of_two = [](__m256 x, __m256 y) {
    return _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(x, y), _mm256_unpackhi_ps(x, y)));
  };
  const __m256d x = of_two(half(a), half(b)), y = of_two(half(c), half(d));
  const __m256 four = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)), _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
  _mm_storeu_ps(sums, _mm_mul_ps(_mm_add_ps(_mm256_castps256_ps128(four), _mm256_extractf128_ps(four, 1)), _mm_set1_ps(scale)));
#else
  sums[0] = sum_lanes(a) * scale, sums[1] = sum_lanes(b) * scale;
  sums[2] = sum_lanes(c) * scale, sums[3] = sum_lanes(d) * scale;
#endif
}

// Tiles for `rows` rows of a KV head: 0 for scores of keys by rows, 4 for keys and 5 for the query; 1 for rows of the output, 6
// for weights and 7 for values.
#if FLEX_AMX
struct RowTiles : Tiles {
  explicit RowTiles(int64_t rows) : Tiles(shapes(std::clamp<int64_t>(rows, 1, ROWS))) {}  // a line may have none
  static TileShapes shapes(int64_t rows) {
    TileShapes found;
    found.rows[1] = found.rows[6] = rows;
    found.row_bytes[6] = KEYS * sizeof(Packed);
    found.rows[7] = KEYS / STEP;
    return found;
  }
};
#else
struct RowTiles {
  explicit RowTiles(int64_t) {}
};
#endif

// Puts a row of the query where dot_keys finds it.
inline void put_query(const Packed* line, int64_t D_PAD, int64_t row, Packed* queries) {
  Packed* const to = queries + row / TOGETHER * TOGETHER * D_PAD + row % TOGETHER * STEP;
  for (int64_t d = 0; d < D_PAD; d += STEP) std::copy_n(line + d, STEP, to + d * TOGETHER);
}

// scores[r * TILE_LD + n] = queries[r] . keys[n] for `count` rows, at most ROWS of them.
#if FLEX_AMX
inline void dot_keys(int64_t count, const Packed* queries, int64_t, Part keys, Part soon, int64_t D, float scale, float* scores) {
  // Copied, since rows may lie anywhere. Tiles are loaded from one place while the next is written.
  alignas(64) Packed lines[4][KEYS][E];
  alignas(64) float sums[KEYS][ROWS];
  _tile_zero(0);
  for (int64_t d = 0; d < D; d += E) {
    auto& part = lines[d / E % 4];
    for (int64_t n = 0; n < KEYS; ++n) {
      fetch_row(soon[n] + d, 1);
      _mm512_store_si512(part[n], operands(keys[n] + d, D - d)[0]);
    }
    settle_memory();
    _tile_loadd(4, part, sizeof(part[0]));
    _tile_loadd(5, queries + d * ROWS, ROWS * STEP * sizeof(Packed));
    _tile_dpbf16ps(0, 4, 5);
  }
  _tile_stored(0, sums, sizeof(sums[0]));
  settle_memory();
  transpose_words([&](int64_t n) { return Vec::loadu(sums[n]) * Vec(scale); }, scores, TILE_LD, count);
}
#else
template <int64_t count>
inline void dot_keys(std::integral_constant<int64_t, count>, const Packed* queries, int64_t ld, Part keys, Part soon, int64_t D,
                     float scale, float* scores) {
  const Stored *const from[] = {keys[0], keys[1], keys[2], keys[3]}, *const later[] = {soon[0], soon[1], soon[2], soon[3]};
  Vec sum[count][KEYS];
#pragma GCC unroll 8
  for (int64_t r = 0; r < count; ++r)
#pragma GCC unroll 8
    for (int64_t n = 0; n < KEYS; ++n) sum[r][n] = Vec(0.f);
  for (int64_t d = 0; d < D; d += E) {
    if (d % LINE == 0)
      for (int64_t n = 0; n < KEYS; ++n) fetch_row(later[n] + d, 1);
    const std::array<Step, E / W / STEP> part[KEYS] = {operands(from[0] + d, D - d), operands(from[1] + d, D - d),
                                                       operands(from[2] + d, D - d), operands(from[3] + d, D - d)};
    // The innermost loop runs along a row of `sum`: only then does gcc keep it in registers.
#pragma GCC unroll 8
    for (int64_t i = 0; i < E / W / STEP; ++i)
#pragma GCC unroll 8
      for (int64_t r = 0; r < count; ++r) {
        const Step row = load_step(queries + r * ld + d + i * W);
#pragma GCC unroll 8
        for (int64_t n = 0; n < KEYS; ++n) sum[r][n] = add_products(part[n][i], row, sum[r][n]);
      }
  }
#pragma GCC unroll 8
  for (int64_t r = 0; r < count; ++r) sum_four(sum[r][0], sum[r][1], sum[r][2], sum[r][3], scale, scores + r * TILE_LD);
}
#endif

// COLUMNS vectors of `columns` numbers of STEP values, as products take them. Of two values some may not be `there`.
inline void load_values(Part values, int64_t n, int64_t there, int64_t column, int64_t columns, Step (&row)[COLUMNS]) {
  const Stored* from = values[n] + column;
#if FLEX_BF16_PAIRS
  const Stored* second = values[n + 1] + column;
  // Which words make pairs; those of the second value are counted from 32.
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i left = _mm512_or_si512(lanes, _mm512_slli_epi32(_mm512_add_epi32(lanes, _mm512_set1_epi32(32)), 16));
  const __m512i right = _mm512_add_epi32(left, _mm512_set1_epi32(0x00100010));
#pragma GCC unroll 8
  for (int64_t i = 0; i < COLUMNS; i += 2) {
    Step x = _mm512_setzero_si512(), y = x;
    if (columns > i * W && there > 0) x = operands(from + i * W, columns - i * W)[0];
    if (columns > i * W && there > 1) y = operands(second + i * W, columns - i * W)[0];
    row[i] = _mm512_permutex2var_epi16(x, left, y);
    row[i + 1] = _mm512_permutex2var_epi16(x, right, y);
  }
#else
#pragma GCC unroll 8
  for (int64_t i = 0; i < COLUMNS; i += E / W) {
    const auto part = columns > i * W ? operands(from + i * W, columns - i * W) : std::array<Step, E / W>();
#pragma GCC unroll 8
    for (int64_t j = 0; j < E / W; ++j) row[i + j] = part[j];
  }
#endif
}

// acc[r][v...] += weights[r] @ values for `count` rows, the first `keys` values and COLUMNS vectors of `columns` numbers from
// `column` on.
#if FLEX_AMX
inline void add_values(int64_t count, const Packed* weights, Part values, Part soon, int64_t keys, int64_t column, int64_t columns,
                       float* acc, int64_t ld) {
  Step pairs[KEYS / STEP][COLUMNS];
  alignas(64) float sums[COLUMNS][ROWS][W];
  for (int64_t n = 0; n < KEYS; n += STEP) {
    for (int64_t i = n; i < n + STEP; ++i) fetch_row(soon[i] + column, COLUMNS * W);
    load_values(values, n, keys - n, column, columns, pairs[n / STEP]);
  }
  settle_memory();
  _tile_loadd(6, weights, WEIGHTS_LD * sizeof(Packed));
#pragma GCC unroll 4
  for (int64_t i = 0; i < COLUMNS; ++i) {
    _tile_zero(1);
    _tile_loadd(7, &pairs[0][i], sizeof(pairs[0]));
    _tile_dpbf16ps(1, 6, 7);
    _tile_stored(1, sums[i], sizeof(sums[i][0]));
  }
  settle_memory();
  for (int64_t r = 0; r < count; ++r)
#pragma GCC unroll 4
    for (int64_t i = 0; i < COLUMNS; ++i)
      (Vec::loadu(acc + r * ld + i * W) + Vec::loadu(sums[i][r])).store(acc + r * ld + i * W);
}
#else
template <int64_t count>
inline void add_values(std::integral_constant<int64_t, count>, const Packed* weights, Part values, Part soon, int64_t keys,
                       int64_t column, int64_t columns, float* acc, int64_t ld) {
  Vec sum[count][COLUMNS];
#pragma GCC unroll 8
  for (int64_t r = 0; r < count; ++r)
#pragma GCC unroll 8
    for (int64_t i = 0; i < COLUMNS; ++i) sum[r][i] = Vec::loadu(acc + r * ld + i * W);
  for (int64_t n = 0; n < keys; n += STEP) {
    for (int64_t i = n; i < n + STEP; ++i) fetch_row(soon[i] + column, COLUMNS * W);
    Step row[COLUMNS];
    load_values(values, n, keys - n, column, columns, row);
#pragma GCC unroll 8
    for (int64_t r = 0; r < count; ++r) {
      const Step weight = all_lanes(weights + r * WEIGHTS_LD + n);
#pragma GCC unroll 8
      for (int64_t i = 0; i < COLUMNS; ++i) sum[r][i] = add_products(weight, row[i], sum[r][i]);
    }
  }
#pragma GCC unroll 8
  for (int64_t r = 0; r < count; ++r)
#pragma GCC unroll 8
    for (int64_t i = 0; i < COLUMNS; ++i) sum[r][i].store(acc + r * ld + i * W);
}
#endif

// The same for one row and `columns` from `column` on, without the masked keys whose score is -inf: what these hold may be NaN,
// and so is 0 times that.
inline __attribute__((noinline, cold)) void add_live_values(
    const Packed* weights, const float* scores, const std::vector<Piece>& pieces, const Stored* const* values, int64_t column,
    int64_t columns, float* acc) {
  for (const Piece& piece : pieces)
    for (int64_t n = piece.at; n < piece.at + piece.count; ++n)
      for (int64_t v = 0; !(piece.masked && scores[n] == -INF) && v < columns; ++v)
        acc[v] = std::fma(float(weights[n]), float(values[n][column + v]), acc[v]);
}

// Calls work(first, count) for all rows, ROWS at most at a time. Without AMX the count is a constant.
template <typename Work>
inline void with_rows(int64_t rows, Work work) {
#if FLEX_AMX
  for (int64_t r = 0; r < rows; r += ROWS) work(r, std::min(ROWS, rows - r));
#else
  for (int64_t r = 0; r < rows;) switch (std::min(ROWS, rows - r)) {
    case 1: work(r, std::integral_constant<int64_t, 1>()); r += 1; break;
    case 2: work(r, std::integral_constant<int64_t, 2>()); r += 2; break;
    case 3: work(r, std::integral_constant<int64_t, 3>()); r += 3; break;
    default: work(r, std::integral_constant<int64_t, ROWS>()); r += ROWS;
  }
#endif
}
