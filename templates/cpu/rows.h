// Rows of tensors: read, converted, turned into panels, and written.

// Asks for a row that is read or written soon, in the second cache: the first one waits for few lines at a time. gcc drops
// calls of a function that does nothing else, so it is inlined always.
template <bool written = false, typename T>
inline __attribute__((always_inline)) void fetch_row(const T* row, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / sizeof(T)) __builtin_prefetch(row + i, written, 2);
}
constexpr int64_t AHEAD = 16;  // rows; the processor does not foresee them where other heads lie between them

// The compiler is told not to vectorise loops by itself, so these say how.
inline void copy_elements(const Element* from, int64_t stride, int64_t count, Element* to) {
  constexpr int64_t E = at::vec::Vectorized<Element>::size();
  int64_t i = 0;
  for (; stride == 1 && i + E <= count; i += E) at::vec::Vectorized<Element>::loadu(from + i).store(to + i);
  for (; i < count; ++i) to[i] = from[i * stride];
}
#if !FLEX_IS_FLOAT
inline void copy_elements(const Element* from, int64_t stride, int64_t count, float* to) {
  constexpr int64_t E = at::vec::Vectorized<Element>::size();
  int64_t i = 0;
  for (; stride == 1 && i + E <= count; i += E) {
    const auto [left, right] = at::vec::convert_to_float<Element>(at::vec::Vectorized<Element>::loadu(from + i));
    left.store(to + i), right.store(to + i + W);
  }
  for (; i < count; ++i) to[i] = float(from[i * stride]);
}
#endif
#if FLEX_NARROW
using Narrow = std::conditional_t<FLEX_NARROW == 4, at::Float8_e4m3fn, at::Float8_e5m2>;
// W of them. In half precision e5m2 has a byte more. e4m3 has a lower exponent there: as if divided by 256.
inline Vec widened(const Narrow* from) {
#if defined(CPU_CAPABILITY_AVX512)
  const __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)from));
  if (FLEX_NARROW == 5) return Vec(_mm512_cvtph_ps(_mm256_slli_epi16(x, 8)));
  const __m256i size = _mm256_and_si256(x, _mm256_set1_epi16(0x7F)), sign = _mm256_slli_epi16(_mm256_xor_si256(x, size), 8);
  const __m256i no_number = _mm256_and_si256(_mm256_cmpeq_epi16(size, _mm256_set1_epi16(0x7F)), _mm256_set1_epi16(0x7E00));
  const __m256i half = _mm256_or_si256(_mm256_or_si256(_mm256_slli_epi16(size, 7), sign), no_number);
  return Vec(_mm512_cvtph_ps(half)) * Vec(256.f);
#elif defined(CPU_CAPABILITY_AVX2)
  const __m128i x = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)from));
  if (FLEX_NARROW == 5) return Vec(_mm256_cvtph_ps(_mm_slli_epi16(x, 8)));
  const __m128i size = _mm_and_si128(x, _mm_set1_epi16(0x7F)), sign = _mm_slli_epi16(_mm_xor_si128(x, size), 8);
  const __m128i no_number = _mm_and_si128(_mm_cmpeq_epi16(size, _mm_set1_epi16(0x7F)), _mm_set1_epi16(0x7E00));
  const __m128i half = _mm_or_si128(_mm_or_si128(_mm_slli_epi16(size, 7), sign), no_number);
  return Vec(_mm256_cvtph_ps(half)) * Vec(256.f);
#else
  float lanes[W];
  for (int64_t i = 0; i < W; ++i) lanes[i] = float(from[i]);
  return Vec::loadu(lanes);
#endif
}
template <typename To>
inline void copy_elements(const Narrow* from, int64_t stride, int64_t count, To* to) {
  int64_t i = 0;
  for (; stride == 1 && i + W <= count; i += W) store_packed(widened(from + i), to + i);
  for (; i < count; ++i) to[i] = To(float(from[i * stride]));
}
#if !FLEX_IS_FLOAT
inline void copy_elements(const float* from, int64_t stride, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[i * stride];
}
#endif
// Rows of whole vectors, `ld` apart, times a number each.
template <typename T>
inline void scale_rows(T* rows, int64_t ld, int64_t count, int64_t width, const float* scales, int64_t stride) {
  for (int64_t r = 0; r < count; ++r)
    for (int64_t i = 0; i < width; i += W) {
      T* at = rows + r * ld + i;
      store_packed(load_packed(at) * Vec(scales[r * stride]), at);
    }
}
#endif

// Results of LAST_CACHE bytes or more are gone from the caches before anyone reads them. They are written past these, which
// would read each line before it is written.
constexpr int64_t LAST_CACHE = 32 << 20;  // of some cores together, about
#if defined(CPU_CAPABILITY_AVX512)
template <typename Numbers>
inline void stream(const Numbers& numbers, void* to) { _mm512_stream_si512((__m512i*)to, (const __m512i&)numbers); }
inline void end_streams() { _mm_sfence(); }  // other threads may read what was written
#elif defined(CPU_CAPABILITY_AVX2)
template <typename Numbers>
inline void stream(const Numbers& numbers, void* to) { _mm256_stream_si256((__m256i*)to, (const __m256i&)numbers); }
inline void end_streams() { _mm_sfence(); }
#else
template <typename Numbers>
inline void stream(const Numbers& numbers, void* to) { numbers.store(to); }
inline void end_streams() {}
#endif

inline __attribute__((noinline)) void write_scaled(const float* from, float scale, int64_t count, Element* to, int64_t stride,
                        bool streamed = false) {
  constexpr int64_t E = at::vec::Vectorized<Element>::size();
  const bool past = streamed && reinterpret_cast<uintptr_t>(to) % sizeof(Vec) == 0;
  int64_t i = 0;
  for (; stride == 1 && i + E <= count; i += E) {
#if FLEX_IS_FLOAT
    const auto numbers = Vec::loadu(from + i) * Vec(scale);
#else
    const auto numbers = at::vec::convert_from_float<Element>(Vec::loadu(from + i) * Vec(scale), Vec::loadu(from + i + W) * Vec(scale));
#endif
    past ? stream(numbers, to + i) : numbers.store(to + i);
  }
  for (; i < count; ++i) to[i * stride] = Element(from[i] * scale);
}
#if !FLEX_IS_FLOAT
inline void write_scaled(const float* from, float scale, int64_t count, float* to, int64_t stride, bool = false) {
  for (int64_t i = 0; i < count; ++i) to[i * stride] = from[i] * scale;
}
#endif
// A row among others `row_stride` apart.
template <typename T>
inline void write_row(const float* from, float scale, int64_t count, T* to, int64_t stride, int64_t row_stride, bool streamed) {
  if (!streamed) fetch_row<true>(to + AHEAD * row_stride, count);
  write_scaled(from, scale, count, to, stride, streamed);
}

// Rows of a matrix, zeros after the last one and after their last column. Not inlined: compiled once for many places.
template <typename From, typename To>
inline __attribute__((noinline)) void gather_rows(const From* from, int64_t row_stride, int64_t column_stride, int64_t rows,
                        int64_t columns, int64_t row_count, To* to, int64_t width) {
  for (int64_t r = 0; r < rows; ++r) {
    if (column_stride == 1) fetch_row(from + (r + AHEAD) * row_stride, columns);
    copy_elements(from + r * row_stride, column_stride, columns, to + r * width);
    std::fill(to + r * width + columns, to + (r + 1) * width, To(0));
  }
  std::fill(to + rows * width, to + row_count * width, To(0));
}

// A square of W words in each row(i). A round weaves the lower half of its rows into the upper; log2(W) rounds turn it around.
// Rows after the first `count` are not written.
template <typename Row>
inline void transpose_words(Row row, float* to, int64_t to_ld, int64_t count) {
  Vec rows[W], woven[W];
#pragma GCC unroll 16
  for (int64_t i = 0; i < W; ++i) rows[i] = row(i);
#pragma GCC unroll 4
  for (int64_t round = 1; round < W; round *= 2) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < W / 2; ++i) std::tie(woven[i * 2], woven[i * 2 + 1]) = at::vec::interleave2(rows[i], rows[i + W / 2]);
#pragma GCC unroll 16
    for (int64_t i = 0; i < W; ++i) rows[i] = woven[i];
  }
#pragma GCC unroll 16
  for (int64_t i = 0; i < W; ++i)
    if (i < count) rows[i].store(to + i * to_ld);
}

// PANEL rows of `steps` steps each, `ld` apart, as one panel. Whole vectors of a row are read.
inline __attribute__((noinline)) void transpose_panel(const Packed* rows, int64_t ld, int64_t steps, Packed* to) {
  // STEP elements move as one 32-bit word.
  const auto* words = reinterpret_cast<const float*>(rows);
  auto* transposed = reinterpret_cast<float*>(to);
  for (int64_t r = 0; r < PANEL; r += W)
    for (int64_t s = 0; s < steps; s += W)
      transpose_words([&](int64_t i) { return Vec::loadu(words + (r + i) * (ld / STEP) + s); }, transposed + s * PANEL + r, PANEL, steps - s);
}

// Pairs of rows, element by element, each pair `to_ld` after the last; `rows` is even, `width` a multiple of PANEL.
inline void weave_rows(const Packed* from, int64_t ld, int64_t rows, int64_t width, Packed* to, int64_t to_ld) {
  for (int64_t r = 0; r < rows; r += 2)
    for (int64_t i = 0; i < width; i += W) {
#if FLEX_BF16_PAIRS
      const auto half = [&](int64_t row) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(from + row * ld + i))); };
      _mm512_storeu_si512(to + r / 2 * to_ld + i * 2, _mm512_or_si512(half(r), _mm512_slli_epi32(half(r + 1), 16)));
#endif
    }
}
