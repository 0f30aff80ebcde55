// Loops that do one thing as fast as a core can: what kernels are compared with. Each runs on the calling thread.
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#define WITH(features) __attribute__((target(features)))

namespace {

// Sums that no compiler may leave out.
template <typename T>
void keep(T& value) { asm volatile("" : "+x"(value)); }
WITH("avx512f") void keep_wide(__m512& value) { asm volatile("" : "+v"(value)); }

}  // namespace

// A product takes up to 5 cycles and two begin in each: a dozen sums are under way at once. Every loop over them is unrolled, so
// that they stay in registers.
extern "C" WITH("avx2,fma") void fma_256(int64_t rounds) {
  __m256 sums[12], a = _mm256_set1_ps(0.5f), b = _mm256_set1_ps(0.25f);
#pragma GCC unroll 12
  for (auto& sum : sums) sum = _mm256_setzero_ps();
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < 12; ++j) { sums[j] = _mm256_fmadd_ps(a, b, sums[j]); keep(sums[j]); }
  }
}

extern "C" WITH("avx512f") void fma_512(int64_t rounds) {
  __m512 sums[12], a = _mm512_set1_ps(0.5f), b = _mm512_set1_ps(0.25f);
#pragma GCC unroll 12
  for (auto& sum : sums) sum = _mm512_setzero_ps();
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < 12; ++j) { sums[j] = _mm512_fmadd_ps(a, b, sums[j]); keep_wide(sums[j]); }
  }
}

extern "C" WITH("avx512f,avx512bf16") void bf16_512(int64_t rounds) {
  __m512 sums[12];
  __m512bh a = (__m512bh)_mm512_set1_epi16(0x3f00), b = (__m512bh)_mm512_set1_epi16(0x3e80);
#pragma GCC unroll 12
  for (auto& sum : sums) sum = _mm512_setzero_ps();
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < 12; ++j) { sums[j] = _mm512_dpbf16_ps(sums[j], a, b); keep_wide(sums[j]); }
  }
}

extern "C" WITH("amx-tile,amx-bf16") void amx_bf16(int64_t rounds) {
  struct { uint8_t palette, start; uint8_t unused[14]; uint16_t row_bytes[16]; uint8_t rows[16]; } shapes = {};
  shapes.palette = 1;
  for (int i = 0; i < 8; ++i) { shapes.row_bytes[i] = 64; shapes.rows[i] = 16; }
  syscall(SYS_arch_prctl, 0x1023, 18);  // asks the system for tiles
  _tile_loadconfig(&shapes);
  _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
  _tile_zero(4); _tile_zero(5); _tile_zero(6); _tile_zero(7);
  for (int64_t i = 0; i < rounds; ++i) {
    _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
}

namespace {

// Adds two floats of four to every sum: what a loop does with a line once it is there.
WITH("avx2") inline void take(const char* at, __m256* sums, int line) {
  sums[line % 4] = _mm256_add_ps(sums[line % 4], _mm256_loadu_ps((const float*)at));
  sums[line % 4] = _mm256_add_ps(sums[line % 4], _mm256_loadu_ps((const float*)at + 8));
}

WITH("avx2") inline float total(const __m256* sums) {
  const __m256 sum = _mm256_add_ps(_mm256_add_ps(sums[0], sums[1]), _mm256_add_ps(sums[2], sums[3]));
  return sum[0] + sum[1] + sum[2] + sum[3] + sum[4] + sum[5] + sum[6] + sum[7];
}

}  // namespace

// Sums 16 floats of every line, with lines far ahead on their way. `size` is a multiple of 512 bytes.
extern "C" WITH("avx2") float stream(const char* from, int64_t size, int64_t ahead) {
  __m256 sums[4];
  for (auto& sum : sums) sum = _mm256_setzero_ps();
  for (int64_t i = 0; i < size; i += 512) {
#pragma GCC unroll 8
    for (int line = 0; line < 512; line += 64) {
      const char* at = from + i + line;
      if (ahead) _mm_prefetch(at + ahead, _MM_HINT_T1);
      take(at, sums, line / 64);
    }
  }
  return total(sums);
}

// The same for pages: a few of keys, as many of values, the next few, as decoding reads them. The page at `pages[i]` has `size`
// bytes, a multiple of 512; lines are asked for `ahead` bytes before they are read, in the page that comes then. One line of
// each 4 KiB, so that the system's page is looked up, is asked for `early` pages before.
extern "C" WITH("avx2") float read_pages(const char* keys, const char* values, const int32_t* pages, int64_t count, int64_t size,
                                         int64_t few, int64_t ahead, int64_t early) {
  const auto page = [&](int64_t i) {
    const int64_t first = i / (2 * few) * few, within = i % (2 * few);
    const int64_t here = count - first < few ? count - first : few;  // the last ones
    return within < here ? keys + pages[first + within] * size : values + pages[first + within - here] * size;
  };
  __m256 sums[4];
  for (auto& sum : sums) sum = _mm256_setzero_ps();
  const int64_t all = 2 * count;
  for (int64_t i = 0; i < all; ++i) {
    const char *from = page(i), *soon = page(i + ahead / size < all ? i + ahead / size : i) + ahead % size;
    const char* then = page(i + ahead / size + 1 < all ? i + ahead / size + 1 : i);
    for (int64_t at = 0; early && i + early < all && at < size; at += 4096) _mm_prefetch(page(i + early) + at, _MM_HINT_T1);
    for (int64_t at = 0; at < size; at += 512) {
      const char* ask = at + ahead % size < size ? soon + at : then + at + ahead % size - size;
#pragma GCC unroll 8
      for (int line = 0; line < 512; line += 64) {
        if (ahead) _mm_prefetch(ask + line, _MM_HINT_T1);
        take(from + at + line, sums, line / 64);
      }
    }
  }
  return total(sums);
}
#endif
