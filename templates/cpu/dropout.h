// Which weights dropout keeps: flex_inductor/softmax/dropout.py has the rule. A row's bits are those of its columns, from the last
// multiple of 32 on that is not beyond the first.
using Words = uint64_t __attribute__((vector_size(W * sizeof(float))));  // a word of Philox in each, with anything above it
constexpr int64_t WORDS = W / 2;

inline __attribute__((always_inline)) Words product(Words words, uint32_t factor) {
#if defined(CPU_CAPABILITY_AVX512)
  return (Words)_mm512_mul_epu32((__m512i)words, _mm512_set1_epi64(factor));
#elif defined(CPU_CAPABILITY_AVX2)
  return (Words)_mm256_mul_epu32((__m256i)words, _mm256_set1_epi64x(factor));
#else
  return (words & 0xFFFFFFFF) * factor;
#endif
}

// For each of W words, those of `first` and then those of `second`: whether it is at least `least`.
inline __attribute__((always_inline)) uint32_t at_least(Words first, Words second, uint32_t least) {
#if defined(CPU_CAPABILITY_AVX512)
  const __m512i order = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i words = _mm512_permutex2var_epi32((__m512i)first, order, (__m512i)second);
  return _mm512_cmpge_epu32_mask(words, _mm512_set1_epi32(least));
#elif defined(CPU_CAPABILITY_AVX2)
  const __m256i mixed = (__m256i)_mm256_shuffle_ps((__m256)first, (__m256)second, 0x88), words = _mm256_permute4x64_epi64(mixed, 0xD8);
  return _mm256_movemask_ps((__m256)_mm256_cmpeq_epi32(_mm256_max_epu32(words, _mm256_set1_epi32(least)), words));
#else
  uint32_t bits = 0;
  for (int64_t i = 0; i < WORDS; ++i) bits |= (uint32_t(first[i]) >= least) << i | (uint32_t(second[i]) >= least) << (WORDS + i);
  return bits;
#endif
}

// `x` where bit `at` and those after it are set, else 0.
inline __attribute__((always_inline)) Vec where_kept(Vec x, const uint32_t* bits, int64_t at) {
  uint64_t next;
  std::memcpy(&next, bits + at / 32, sizeof(next));
  next >>= at % 32;
#if defined(CPU_CAPABILITY_AVX512)
  return Vec(_mm512_maskz_mov_ps(next, x));
#elif defined(CPU_CAPABILITY_AVX2)
  const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return Vec(_mm256_and_ps(x, (__m256)_mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(next), each), each)));
#else
  float lanes[W];
  x.store(lanes);
  for (int64_t i = 0; i < W; ++i) lanes[i] = next >> i & 1 ? lanes[i] : 0.f;
  return Vec::loadu(lanes);
#endif
}

struct Dropout {
  uint32_t seed[2], offset, least;
  int64_t head_offset;
  float scale;  // of weights that are kept

  explicit Dropout(const int64_t* of_call)
      : seed{uint32_t(of_call[0]), uint32_t(uint64_t(of_call[0]) >> 32)}, offset(of_call[1]), least(of_call[3] << 16),
        head_offset(of_call[2]), scale(65536.f / float(65536 - of_call[3])) {}

  // The bits of rows from q on and columns from kv on. Rows of bits are `ld` apart.
  void draw(int64_t b, int64_t h, int64_t q, int64_t rows, int64_t kv, int64_t columns, uint32_t* bits, int64_t ld) const {
    const Words head = Words{} + uint32_t(((h + head_offset) << 21) + b), last = Words{} + offset;
    Words lane{};
    for (int64_t i = 0; i < WORDS; ++i) lane[i] = i;
    for (int64_t start = kv & ~int64_t(31); start < kv + columns; start += 32, ++bits)
      for (int64_t part = 0; part < 8; part += WORDS) {
        const Words column = (lane + start + part) & 0xFFFFFFFF;
        const auto put = [&](int64_t row, Words first, Words second) {
          uint32_t kept = part ? bits[row * ld] : 0;
          for (int half = 0; half < 2; ++half) {
            const uint32_t found = half ? at_least(first, second, least) : at_least(first << 16, second << 16, least);
            kept |= ((found & ((1 << WORDS) - 1)) | found >> WORDS << 8) << (16 * half + part);
          }
          bits[row * ld] = kept;
        };
        for (int64_t r = 0; r < rows; ++r) {
          const bool upper = (q + r) & 8;
          if (upper && r >= 8) continue;  // drawn with the row 8 before
          Words c[4] = {column, Words{} + uint32_t((q + r) & ~int64_t(8)), head, last};
          uint32_t key[2] = {seed[0], seed[1]};
          for (int round = 0; round < 7; ++round, key[0] += 0x9E3779B9, key[1] += 0xBB67AE85) {
            const Words p0 = product(c[0], 0xD2511F53), p1 = product(c[2], 0xCD9E8D57);
            c[0] = (p1 >> 32) ^ c[1] ^ key[0];
            c[2] = (p0 >> 32) ^ c[3] ^ key[1];
            c[1] = p1;
            c[3] = p0;
          }
          if (!upper) put(r, c[0], c[1]);
          if (upper || r + 8 < rows) put(upper ? r : r + 8, c[2], c[3]);
        }
      }
  }
};
