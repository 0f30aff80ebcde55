// Vectors of numbers: in memory as kernels pack them, what is not finite, exp and tanh, tables.

inline void store_packed(Vec numbers, float* to) { numbers.store(to); }
inline void store_packed(Vec left, Vec right, float* to) { left.store(to), right.store(to + W); }
#if FLEX_BF16_PAIRS
inline void store_packed(Vec numbers, Packed* to) {
  _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(numbers));
}
inline void store_packed(Vec left, Vec right, Packed* to) {
  _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(right, left));
}
#endif

inline Vec load_packed(const float* from) { return Vec::loadu(from); }
#if FLEX_BF16_PAIRS
inline Vec load_packed(const Packed* from) {
  return Vec((__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16));
}
#endif

// A row of whole vectors times a number.
inline void rescale(float* row, float by, int64_t width) {
  for (int64_t i = 0; by != 1.f && i < width; i += W) (Vec::loadu(row + i) * Vec(by)).store(row + i);
}

inline float largest_lane(Vec numbers) {
  return at::vec::vec_reduce_all<float>([](Vec& x, Vec& y) { return at::vec::maximum(x, y); }, numbers);
}

// Whether any lane is larger than `limit`, or NaN.
inline bool any_above(Vec numbers, float limit) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_cmp_ps_mask(numbers, _mm512_set1_ps(limit), _CMP_NLE_UQ);
#else
  return !(largest_lane(numbers) <= limit);
#endif
}

inline float sum_lanes(Vec numbers) {
  return at::vec::vec_reduce_all<float>([](Vec& x, Vec& y) { return x + y; }, numbers);
}

inline bool is_finite(float x) { return x - x == 0.f; }

// Whether `count` numbers, whole vectors of them, are all finite: 0 times another is NaN.
inline bool all_finite(const float* numbers, int64_t count) {
  Vec sum(0.f);
  for (int64_t i = 0; i < count; i += W) sum = at::vec::fmadd(Vec::loadu(numbers + i), Vec(0.f), sum);
  return is_finite(sum_lanes(sum));
}
#if FLEX_BF16_PAIRS
inline bool all_finite(const Packed* numbers, int64_t count) {
  __m512 sum = _mm512_setzero_ps();
  for (int64_t i = 0; i < count; i += PANEL)
    sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(numbers + i), (__m512bh)_mm512_setzero_si512());
  return is_finite(sum_lanes(Vec(sum)));
}
#endif

// What follows is rarely called, and kept out of the way of the rest. This puts zeros for what is not finite.
inline __attribute__((noinline, cold)) void drop_not_finite(Packed* numbers, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    if (!is_finite(float(numbers[i]))) numbers[i] = Packed(0);
}

template <typename T>
inline __attribute__((noinline, cold)) void copy_to(std::vector<T>& copy, const T* from, int64_t count) {
  copy.assign(from, from + count);
}

// targets[i] += weights[i] * x for every x in the row that is not finite, in lanes whose score is not -inf: a lane that
// is not attended to has no part in it, though its weight, 0, times x is NaN.
template <typename T, typename Weight>
inline __attribute__((noinline, cold)) void add_not_finite(
    const T* row, int64_t stride, int64_t columns, const float* scores, int64_t scores_step, const Weight* weights,
    int64_t weights_step, int64_t lanes, float* targets, int64_t targets_ld) {
  bool finite = true;
  for (int64_t c = 0; c < columns; ++c) finite &= is_finite(float(row[c * stride]));
  for (int64_t i = 0; !finite && i < lanes; ++i)
    for (int64_t c = 0; scores[i * scores_step] != -INF && c < columns; ++c)
      if (const float x = float(row[c * stride]); !is_finite(x)) targets[i * targets_ld + c] += float(weights[i * weights_step]) * x;
}

// x, or 0 in lanes whose score is -inf.
inline Vec where_live(Vec scores, Vec x) {
#ifdef CPU_CAPABILITY_AVX512
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(scores, _mm512_set1_ps(-INF), _CMP_NEQ_UQ), x);
#else
  return x & (scores != Vec(-INF));
#endif
}

// The larger of two scores. One that is NaN may be lost with AVX, where at::vec::maximum takes three or four
// instructions: exponentials keep it.
inline Vec larger(Vec x, Vec y) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_max_ps(x, y);
#elif defined(CPU_CAPABILITY_AVX2)
  return _mm256_max_ps(x, y);
#else
  return at::vec::maximum(x, y);
#endif
}

// While a thread has this, results are 0 that are too small for a normal number. Intel's processors take over a hundred cycles for
// each, and outputs of a row's first keys become so small where its scores rise, as with ALiBi.
struct NormalNumbers {
#if defined(__x86_64__)
  const unsigned before = _mm_getcsr();
  NormalNumbers() { _mm_setcsr(before | _MM_FLUSH_ZERO_ON); }
  ~NormalNumbers() { _mm_setcsr(before); }
  NormalNumbers(const NormalNumbers&) = delete;
#endif
};

// 2^f for |f| <= 0.5, to 9.1e-8 relative. Weights that are rounded to bf16 are SHORT of a term: 2.8e-6.
template <bool SHORT>
inline Vec exp2_of_part(Vec f) {
  Vec p;
  if (SHORT) {
    p = at::vec::fmadd(Vec(0.00958285306f), f, Vec(0.0559064247f));
    p = at::vec::fmadd(p, f, Vec(0.240240986f));
    p = at::vec::fmadd(p, f, Vec(0.693124193f));
  } else {
    p = at::vec::fmadd(Vec(0.00132647273f), f, Vec(0.00967151299f));
    p = at::vec::fmadd(p, f, Vec(0.0555073358f));
    p = at::vec::fmadd(p, f, Vec(0.240222424f));
    p = at::vec::fmadd(p, f, Vec(0.693147004f));
  }
  return at::vec::fmadd(p, f, Vec(1.f));
}

constexpr float LOG2_E = 1.44269504f;

// 2^(x * slope) where that is 2^100 at most, 0 where it is no normal number, for a thread with NormalNumbers. Of NaN it is NaN
// with AVX, else anything.
template <bool SHORT = FLEX_BF16_PAIRS>
inline Vec exp2_of(Vec x, Vec slope) {
  // The whole part of the exponent, and a polynomial for what rounding leaves.
#if FLEX_AMX
  if (SHORT) {
    // Rounding down is as quick as a product on processors with AMX. For 0 <= f < 1 the polynomial is good to 2.9e-6. Of
    // an infinite exponent f is 0.
    const Vec exponent = x * slope, f = _mm512_reduce_ps(exponent, _MM_FROUND_TO_NEG_INF);
    Vec p = at::vec::fmadd(Vec(0.01342669f), f, Vec(0.05224247f));
    p = at::vec::fmadd(p, f, Vec(0.24128021f));
    p = at::vec::fmadd(p, f, Vec(0.69304484f));
    p = at::vec::fmadd(p, f, Vec(1.f));
    return _mm512_scalef_ps(p, exponent);
  }
#endif
#if defined(CPU_CAPABILITY_AVX512)
  // The sum with a large number rounds, in one instruction for Intel's two.
  const __m512 large = _mm512_set1_ps(0x1.8p23f), whole = _mm512_sub_ps(_mm512_fmadd_ps(x, slope, large), large);
  const __m512 p = exp2_of_part<SHORT>(_mm512_fmsub_ps(x, slope, whole));
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(whole, _mm512_set1_ps(-125.5f), _CMP_NLT_UQ), p, whole);
#elif defined(CPU_CAPABILITY_AVX2)
  const __m256 whole = _mm256_round_ps(_mm256_mul_ps(x, slope), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m256 p = exp2_of_part<SHORT>(_mm256_fmsub_ps(x, slope, whole));
  // NaN as an integer has no bits left once it is shifted.
  const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(whole), 23);
  const __m256 power = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), exponent));
  return _mm256_and_ps(power, _mm256_cmp_ps(whole, _mm256_set1_ps(-125.5f), _CMP_NLT_UQ));
#else
  return (x * slope * Vec(1.f / LOG2_E)).exp_u20();
#endif
}

// exp(x), as exp2_of.
inline Vec exp_of(Vec x) { return exp2_of(x, Vec(LOG2_E)); }
#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
constexpr bool EXP_KEEPS_NAN = true;
#else
constexpr bool EXP_KEEPS_NAN = false;
#endif

// tanh as score_mods use it: three times as fast as the vector library's, good to a few units in the last place.
template <typename T>
inline T hyperbolic_tangent(T x) { return x.tanh(); }
inline Vec hyperbolic_tangent(Vec x) {
#ifdef CPU_CAPABILITY_AVX512
  // -m / (m + 2) for m = exp(-2|x|) - 1 = 2^whole * (2^part - 1) + 2^whole - 1, which keeps its digits near 0.
  const __m512 sign = _mm512_and_ps(x, _mm512_set1_ps(-0.f)), one = _mm512_set1_ps(1.f);
  const __m512 t = _mm512_max_ps(_mm512_set1_ps(-126.f), _mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(-2.88539008f)));
  const __m512 whole = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 part = _mm512_sub_ps(t, whole), power = _mm512_scalef_ps(one, whole);
  __m512 p = _mm512_set1_ps(0.000154035151f);
  p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(0.00133907353f));
  p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(0.00961823761f));
  p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(0.0555035733f));
  p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(0.240226492f));
  p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(0.693147182f));
  const __m512 m = _mm512_fmadd_ps(_mm512_mul_ps(p, part), power, _mm512_sub_ps(power, one));
  const __m512 below = _mm512_add_ps(m, _mm512_set1_ps(2.f)), guess = _mm512_rcp14_ps(below);
  const __m512 inverse = _mm512_mul_ps(guess, _mm512_fnmadd_ps(below, guess, _mm512_set1_ps(2.f)));
  return _mm512_or_ps(_mm512_mul_ps(_mm512_sub_ps(_mm512_setzero_ps(), m), inverse), sign);
#else
  const Vec size = x.abs(), square = x * x;
  Vec series = at::vec::fmadd(square, Vec(62.f / 2835), Vec(-17.f / 315));
  series = at::vec::fmadd(square, series, Vec(2.f / 15));
  series = at::vec::fmadd(square, series, Vec(-1.f / 3));
  const Vec small = at::vec::fmadd(x * square, series, x);
  const Vec decay = exp_of(size * Vec(-2.f));
  const Vec large = (Vec(1.f) - decay) / (Vec(1.f) + decay);
  const Vec result = Vec::blendv(Vec::blendv(large, large.neg(), x < Vec(0.f)), small, size < Vec(0.3f));
  return Vec::blendv(result, x, x != x);
#endif
}

// The numbers base, base + step, ... of a vector. Inductor's own spelling inserts them one by one.
template <typename V, typename T, typename S>
inline V progression(T base, S step) {
  return V(base) + V::arange(T(0), step);
}
