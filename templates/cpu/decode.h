// What decoding adds to kernel.h: products of a few queries with keys and values that are read where they lie. ROWS, CHUNK,
// TILE_LD and COLUMNS are the kernel's; decode.jinja says what they mean.
// Narrow keys and values are copied into floats first.
using Stored = std::conditional_t<FLEX_NARROW != 0, float, Element>;
constexpr int64_t E = at::vec::Vectorized<Stored>::size();
constexpr int64_t LINE = 64 / sizeof(Stored);  // numbers that come from memory together

// E numbers as E / W vectors of float; zeros after the first `count`.
inline void widen(const Stored* from, int64_t count, Vec* to) {
#if FLEX_IS_FLOAT || FLEX_NARROW
  to[0] = count >= E ? Vec::loadu(from) : Vec::loadu(from, count);
#else
  std::tie(to[0], to[1]) = at::vec::convert_to_float<Element>(
      count >= E ? at::vec::Vectorized<Element>::loadu(from) : at::vec::Vectorized<Element>::loadu(from, count));
#endif
}

// scores[r * TILE_LD] = queries[r] . key for `count` rows, at most ROWS of them.
template <int64_t count>
inline void dot_key(const float* queries, int64_t ld, const Stored* key, int64_t D, float scale, float* scores) {
  Vec sum[count];
#pragma GCC unroll 8
  for (int64_t r = 0; r < count; ++r) sum[r] = Vec(0.f);
  for (int64_t d = 0; d < D; d += E) {
    Vec part[E / W];
    widen(key + d, D - d, part);
#pragma GCC unroll 8
    for (int64_t i = 0; i < E / W; ++i)
#pragma GCC unroll 8
      for (int64_t r = 0; r < count; ++r) sum[r] = at::vec::fmadd(part[i], Vec::loadu(queries + r * ld + d + i * W), sum[r]);
  }
#pragma GCC unroll 8
  for (int64_t r = 0; r < count; ++r) scores[r * TILE_LD] = sum_lanes(sum[r]) * scale;
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
    std::fill(key_rows + keys, key_rows + CHUNK, key_rows[keys - 1]);
    std::fill(value_rows + keys, value_rows + CHUNK, value_rows[keys - 1]);
  }
};

// The sums of W vectors' lanes, one after the other.
inline Vec sum_each(Vec* vectors) {
#ifdef CPU_CAPABILITY_AVX2
  // interleave2 takes four shuffles, these one each.
  const auto of_two = [](__m256 x, __m256 y) { return _mm256_add_ps(_mm256_unpacklo_ps(x, y), _mm256_unpackhi_ps(x, y)); };
  const auto of_four = [&](const Vec* from) {
    const __m256d x = _mm256_castps_pd(of_two(from[0], from[1])), y = _mm256_castps_pd(of_two(from[2], from[3]));
    return _mm256_castpd_ps(_mm256_unpacklo_pd(x, y)) + _mm256_castpd_ps(_mm256_unpackhi_pd(x, y));
  };
  const __m256 first = of_four(vectors), second = of_four(vectors + 4);
  return _mm256_permute2f128_ps(first, second, 0x20) + _mm256_permute2f128_ps(first, second, 0x31);
#else
#pragma GCC unroll 8
  for (int64_t half = W / 2; half; half /= 2)
#pragma GCC unroll 8
    for (int64_t i = 0; i < half; ++i) {
      const auto woven = at::vec::interleave2(vectors[i], vectors[i + half]);
      vectors[i] = woven.first + woven.second;
    }
  return vectors[0];
#endif
}

// Keys whose scores for `count` rows fill a vector.
template <int64_t count>
constexpr int64_t KEYS = W / (count == 3 ? 4 : count);

// What dot_key does, for these keys of a chunk, from key n on. `ask` is for the lines of their values, which are read soon: one
// by one between the products, as asking for many at once takes longer.
template <int64_t count, bool ask>
inline void dot_keys(const float* queries, int64_t ld, const Chunk& now, int64_t n, int64_t head, int64_t D, int64_t V,
                     float scale, float* scores) {
  const Stored* const *keys = now.key_rows + n, *const *values = now.value_rows + n;
  Vec sum[W];
#pragma GCC unroll 16
  for (int64_t i = 0; i < W; ++i) sum[i] = Vec(0.f);
  for (int64_t d = 0; d < D; d += E) {
#pragma GCC unroll 16
    for (int64_t i = 0; i < KEYS<count>; ++i) {
      if (ask && d % LINE == 0) fetch_row(values[i] + head * V + d, 1);
      Vec part[E / W];
      widen(keys[i] + head * D + d, D - d, part);
#pragma GCC unroll 8
      for (int64_t j = 0; j < E / W; ++j)
#pragma GCC unroll 8
        for (int64_t r = 0; r < count; ++r) {
          Vec& to = sum[r * KEYS<count> + i];
          to = at::vec::fmadd(part[j], Vec::loadu(queries + r * ld + d + j * W), to);
        }
    }
  }
  if (ask && V > D)
    for (int64_t i = 0; i < KEYS<count>; ++i) fetch_row(values[i] + head * V + D, V - D);
  float lanes[W];
  (sum_each(sum) * Vec(scale)).store(lanes);
#pragma GCC unroll 8
  for (int64_t r = 0; r < count; ++r) std::memcpy(scores + r * TILE_LD + n, lanes + r * KEYS<count>, KEYS<count> * sizeof(float));
}

// Rows that are read soon. They are asked for little by little between products: many at once take longer.
struct Ahead {
  const Stored *const *row, *const *end;
  int64_t at, width;
  void fetch() {
    if (row == end) return;
    fetch_row(*row + at, COLUMNS * W);
    at += COLUMNS * W;
    if (at >= width) ++row, at = 0;
  }
};

// acc[r][v...] = acc * shrink + weights[r] @ values for `count` rows and COLUMNS vectors of values from `column` on. Where
// that is checked and gives what is not finite, nothing is stored.
template <int64_t count>
inline bool add_values(const float* weights, const float* shrink, const Stored* const* values, int64_t keys, int64_t column,
                       int64_t columns, float* acc, int64_t ld, bool checked, Ahead& ahead) {
  Vec sum[count][COLUMNS];
#pragma GCC unroll 8
  for (int64_t r = 0; r < count; ++r)
#pragma GCC unroll 8
    for (int64_t i = 0; i < COLUMNS; ++i) sum[r][i] = Vec::loadu(acc + r * ld + i * W) * Vec(shrink[r]);
  for (int64_t n = 0; n < keys; ++n) {
    const Stored* from = values[n] + column;
    ahead.fetch();
    Vec row[COLUMNS];
#pragma GCC unroll 8
    for (int64_t i = 0; i < COLUMNS; i += E / W) {
      if (columns > i * W) widen(from + i * W, columns - i * W, row + i);
      else row[i] = row[i + E / W - 1] = Vec(0.f);
    }
#pragma GCC unroll 8
    for (int64_t r = 0; r < count; ++r) {
      const Vec weight(weights[r * TILE_LD + n]);
#pragma GCC unroll 8
      for (int64_t i = 0; i < COLUMNS; ++i) sum[r][i] = at::vec::fmadd(weight, row[i], sum[r][i]);
    }
  }
  if (checked) {
    Vec zero(0.f);
#pragma GCC unroll 8
    for (int64_t r = 0; r < count; ++r)
#pragma GCC unroll 8
      for (int64_t i = 0; i < COLUMNS; ++i) zero = at::vec::fmadd(sum[r][i], Vec(0.f), zero);
    if (!is_finite(sum_lanes(zero))) return false;
  }
#pragma GCC unroll 8
  for (int64_t r = 0; r < count; ++r)
#pragma GCC unroll 8
    for (int64_t i = 0; i < COLUMNS; ++i) sum[r][i].store(acc + r * ld + i * W);
  return true;
}

// The same for one row, without the masked keys whose score is -inf: what these hold may be NaN, and so is 0 times that.
inline __attribute__((noinline, cold)) void add_live_values(
    const float* weights, float shrink, const float* scores, const std::vector<Piece>& pieces, const Stored* const* values,
    int64_t column, int64_t columns, float* acc) {
  for (int64_t v = 0; v < columns; ++v) acc[v] *= shrink;
  for (const Piece& piece : pieces)
    for (int64_t n = piece.at; n < piece.at + piece.count; ++n)
      for (int64_t v = 0; !(piece.masked && scores[n] == -INF) && v < columns; ++v)
        acc[v] = std::fma(weights[n], float(values[n][column + v]), acc[v]);
}

// `work` with the number of rows from `first` on as a constant, at most ROWS.
template <typename Work>
inline void with_rows(int64_t rows, Work work) {
  for (int64_t r = 0; r < rows;) switch (std::min(ROWS, rows - r)) {
    case 1: work(r, std::integral_constant<int64_t, 1>()); r += 1; break;
    case 2: work(r, std::integral_constant<int64_t, 2>()); r += 2; break;
    case 3: work(r, std::integral_constant<int64_t, 3>()); r += 3; break;
    default: work(r, std::integral_constant<int64_t, ROWS>()); r += ROWS;
  }
}
