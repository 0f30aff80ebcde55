// What all CPU kernels share: memory, vectors, register blocks, packing. It is put into each kernel's own namespace, after
//
//   FLEX_ELEMENT   the type of query, key and value    FLEX_IS_FLOAT, FLEX_IS_BF16   which that is
//   FLEX_HAS_AMX   whether products may use tiles of AMX
//   FLEX_NARROW    4 or 5 where keys and values are of 8 bits: those for the exponent
//
// common.jinja says what its names mean.
using Element = FLEX_ELEMENT;
using Vec = at::vec::Vectorized<float>;
constexpr int64_t W = Vec::size();
constexpr int64_t PANEL = 2 * W;
constexpr float INF = std::numeric_limits<float>::infinity();

#undef FLEX_BF16_PAIRS
#undef FLEX_AMX
#if FLEX_IS_BF16 && defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)
#define FLEX_BF16_PAIRS 1
using Packed = Element;
constexpr int64_t STEP = 2;
#else
#define FLEX_BF16_PAIRS 0
using Packed = float;
constexpr int64_t STEP = 1;
#endif
#if FLEX_HAS_AMX && FLEX_BF16_PAIRS && defined(__AMX_BF16__)
#define FLEX_AMX 1
constexpr int64_t BLOCK = 32, DEPTH = 32;
#else
#define FLEX_AMX 0
constexpr int64_t BLOCK = W == 8 ? 6 : 8, DEPTH = STEP;
#endif

constexpr int64_t round_up(int64_t size, int64_t to) { return (size + to - 1) / to * to; }

// Uninitialised and aligned memory. Its functions are not inlined: a thread of a backward kernel calls them for 20 pieces,
// and a fifth of the kernel's compile time went there.
struct Memory {
  explicit __attribute__((noinline)) Memory(size_t size)
      : bytes(round_up(std::max<size_t>(size, 1), 64)), start(flex_inductor::kept_memory().take(bytes)) {
    if (!start) throw std::bad_alloc();
  }
  __attribute__((noinline)) ~Memory() { flex_inductor::kept_memory().give(start, bytes); }
  Memory(const Memory&) = delete;
  size_t bytes;
  void* const start;
};
template <typename T>
struct Scratch : Memory {
  explicit Scratch(int64_t size) : Memory(size * sizeof(T)), data(static_cast<T*>(start)) {}
  T& operator[](int64_t i) const { return data[i]; }
  T* const data;
};

// Work handed to whichever thread is free; what it throws is kept for after the parallel region.
struct Queue {
  std::atomic<int64_t> next{0};
};
struct Failure {
  std::exception_ptr first;
  std::mutex lock;
  template <typename Work>
  void guard(Work work) {
    try {
      work();
    } catch (...) {
      std::lock_guard<std::mutex> locked(lock);
      if (!first) first = std::current_exception();
    }
  }
};

// What a row's weighted values are scaled with, and its logsumexp. A sink is one more score, without a value.
struct Finished {
  float scale, lse;
};
inline Finished finished(float peak, float total) {
  return total == 0.f ? Finished{0.f, -INF} : Finished{1.f / total, peak + std::log(total)};
}
inline Finished finished(float peak, float total, float sink) {
  const float top = std::max(peak, sink);  // NaN if the peak is
  if (top == -INF) return {0.f, -INF};
  const float share = std::exp(peak - top), all = total * share + std::exp(sink - top);
  return {share / all, top + std::log(all)};
}

// A score whose product with a weight of 0 is 0.
inline Vec finite(Vec score) { return at::vec::maximum(score, Vec(std::numeric_limits<float>::lowest())); }

// The kv_idx of a row's largest score, the first of several, once further keys have `count` scores. `top` is the largest
// of these or more; `index` is of the largest so far, `peak`, or -1.
inline void later_largest(const float* scores, int64_t count, float top, int64_t first_index, float peak, int64_t& index) {
  if (top == -INF || top < peak || (top == peak && index >= 0 && index < first_index)) return;
  const int64_t at = std::find(scores, scores + count, top) - scores;
  if (at < count && (top > peak || index < 0 || first_index + at < index)) index = first_index + at;
}

// An item and how much work it is. Not sorted by std::sort, which takes 0.1 s to compile.
struct Weighed {
  int64_t weight, item;
};
inline void heaviest_first(Weighed* items, int64_t count) {
  std::qsort(items, count, sizeof(Weighed), [](const void* left, const void* right) {
    const Weighed &x = *static_cast<const Weighed*>(left), &y = *static_cast<const Weighed*>(right);
    const bool before = x.weight != y.weight ? x.weight > y.weight : x.item < y.item;
    return before ? -1 : 1;
  });
}

// Keys that belong together.
struct Group {
  int64_t start, stop, parts;  // from the start of a panel on
  std::vector<int64_t> tiles;  // the tiles of queries that visit them, with a map
  int64_t padded() const { return round_up(stop - start, PANEL); }
};

inline void store_packed(Vec numbers, float* to) { numbers.store(to); }
#if FLEX_BF16_PAIRS
inline void store_packed(Vec numbers, Packed* to) {
  _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(numbers));
}
#endif

inline Vec load_packed(const float* from) { return Vec::loadu(from); }
#if FLEX_BF16_PAIRS
inline Vec load_packed(const Packed* from) {
  return Vec((__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16));
}
#endif

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

// 2^f for |f| <= 0.5. Weights that are rounded to bf16 need one term less: 2.8e-6 relative, else 9.1e-8.
inline Vec exp2_of_part(Vec f) {
#if FLEX_BF16_PAIRS
  Vec p = at::vec::fmadd(Vec(0.00958285306f), f, Vec(0.0559064247f));
  p = at::vec::fmadd(p, f, Vec(0.240240986f));
  p = at::vec::fmadd(p, f, Vec(0.693124193f));
#else
  Vec p = at::vec::fmadd(Vec(0.00132647273f), f, Vec(0.00967151299f));
  p = at::vec::fmadd(p, f, Vec(0.0555073358f));
  p = at::vec::fmadd(p, f, Vec(0.240222424f));
  p = at::vec::fmadd(p, f, Vec(0.693147004f));
#endif
  return at::vec::fmadd(p, f, Vec(1.f));
}

constexpr float LOG2_E = 1.44269504f;

// 2^t for t <= 0 (rounding may put it a little above), 0 where that is no normal number. Of NaN it is NaN with AVX, else
// anything.
inline Vec exp2_nonpositive(Vec t) {
  // The whole part of t as an exponent, and a polynomial for what rounding leaves. Lanes that underflow, as those of masked
  // scores do, are left out: Intel's processors take over a hundred cycles for one.
#if defined(CPU_CAPABILITY_AVX512)
  const __m512 whole = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 p = exp2_of_part(_mm512_sub_ps(t, whole));
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(t, _mm512_set1_ps(-125.5f), _CMP_NLT_UQ), p, whole);
#elif defined(CPU_CAPABILITY_AVX2)
  const __m256 whole = _mm256_round_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m256 p = exp2_of_part(_mm256_sub_ps(t, whole));
  // NaN as an integer has no bits left once it is shifted.
  const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(whole), 23);
  const __m256 power = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), exponent));
  return _mm256_and_ps(power, _mm256_cmp_ps(t, _mm256_set1_ps(-125.5f), _CMP_NLT_UQ));
#else
  return (t * Vec(1.f / LOG2_E)).exp_u20();
#endif
}

// exp(x), as exp2_nonpositive.
inline Vec exp_nonpositive(Vec x) { return exp2_nonpositive(x * Vec(LOG2_E)); }

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
  const Vec decay = exp_nonpositive(size * Vec(-2.f));
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

// 1 or -1 if each lane's place is one more or less than that of the lane before, else 0.
using Places = at::vec::Vectorized<int32_t>;
inline int64_t direction(Places places) {
#if defined(CPU_CAPABILITY_AVX512)
  const __m512i after = _mm512_sub_epi32(places, _mm512_broadcastd_epi32(_mm512_castsi512_si128(places)));
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  if (_mm512_cmpneq_epi32_mask(after, _mm512_sub_epi32(_mm512_setzero_si512(), lanes)) == 0) return -1;
  return _mm512_cmpneq_epi32_mask(after, lanes) == 0 ? 1 : 0;
#elif defined(CPU_CAPABILITY_AVX2)
  const __m256i after = _mm256_sub_epi32(places, _mm256_broadcastd_epi32(_mm256_castsi256_si128(places)));
  const __m256i lanes = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
  const auto all = [](__m256i x, __m256i y) { return _mm256_movemask_epi8(_mm256_cmpeq_epi32(x, y)) == -1; };
  if (all(after, _mm256_sub_epi32(_mm256_setzero_si256(), lanes))) return -1;
  return all(after, lanes) ? 1 : 0;
#else
  return 0;
#endif
}
struct EachPlace {
  int32_t lanes[W];
  explicit EachPlace(Places places) { places.store(lanes); }
};
// The least place of lanes in this direction.
inline int64_t least(Places places, int64_t direction) {
#if defined(CPU_CAPABILITY_AVX512)
  const int64_t first = _mm_cvtsi128_si32(_mm512_castsi512_si128(places));
#elif defined(CPU_CAPABILITY_AVX2)
  const int64_t first = _mm_cvtsi128_si32(_mm256_castsi256_si128(places));
#else
  const int64_t first = EachPlace(places).lanes[0];
#endif
  return direction > 0 ? first : first - (W - 1);
}

// from[places], and to[places] += numbers.
inline Vec look_up(const float* from, Places places) {
  if (const int64_t by = direction(places)) {
    const Vec found = Vec::loadu(from + least(places, by));
    return by > 0 ? found : at::vec::flip(found);
  }
  const EachPlace each(places);
  float found[W];
#pragma GCC unroll 16
  for (int64_t i = 0; i < W; ++i) found[i] = from[each.lanes[i]];
  return Vec::loadu(found);
}
inline void add_each(Vec numbers, float* to, Places places) {
  if (const int64_t by = direction(places)) {
    float* const first = to + least(places, by);
    (Vec::loadu(first) + (by > 0 ? numbers : at::vec::flip(numbers))).store(first);
    return;
  }
  const EachPlace each(places);
  float added[W];
  numbers.store(added);
#pragma GCC unroll 16
  for (int64_t i = 0; i < W; ++i) to[each.lanes[i]] += added[i];
}

// Loaded once: the compiler would rather read a panel's vectors from memory again for every row, as operands.
template <typename V>
inline __attribute__((always_inline)) V in_register(V x) {
#if defined(CPU_CAPABILITY_AVX512)
  asm("" : "+v"(x));
#elif defined(CPU_CAPABILITY_AVX2)
  asm("" : "+x"(x));
#endif
  return x;
}
#if defined(CPU_CAPABILITY_AVX512)
inline Vec in_register(Vec x) { return Vec(in_register<__m512>(x)); }
#elif defined(CPU_CAPABILITY_AVX2)
inline Vec in_register(Vec x) { return Vec(in_register<__m256>(x)); }
#endif

// STEP elements of W columns, the same STEP elements in all lanes, and their products.
#if FLEX_BF16_PAIRS
using Step = __m512i;
inline Step load_step(const Packed* from) { return _mm512_loadu_si512(from); }
inline Step all_lanes(const Packed* from) {
  int32_t pair;
  std::memcpy(&pair, from, sizeof(pair));
  return _mm512_set1_epi32(pair);
}
inline Vec add_products(Step x, Step y, Vec sum) { return Vec(_mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)y)); }
#else
using Step = Vec;
inline Step load_step(const Packed* from) { return Vec::loadu(from); }
inline Step all_lanes(const Packed* from) { return Vec(*from); }
inline Vec add_products(Step x, Step y, Vec sum) { return at::vec::fmadd(x, y, sum); }
#endif

// The thread that has this may use tiles: eight of 16 rows and 64 bytes.
#if FLEX_AMX
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
constexpr TileShapes TILE_SHAPES;
struct Tiles {
  Tiles() { _tile_loadconfig(&TILE_SHAPES); }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
};
#else
struct Tiles {};
#endif

// Calls body(first, whole) for all columns, in panels of which the last may be the left half.
template <typename Body>
inline __attribute__((always_inline)) void each_panel(int64_t columns, Body body) {
  int64_t first = 0;
  for (; first + W < columns; first += PANEL) body(first, std::true_type());
  if (first < columns) body(first, std::false_type());
}

// One register block: target[r][0:PANEL] = sum over s of rows[r * row_stride + s * row_step] * panel[s * panel_step],
// as `finish` combines it with the target. If it is not WHOLE, the left half of that, with two steps in place of two halves.
template <bool WHOLE = true, typename Finish>
inline __attribute__((always_inline)) void dot_block(
    const Packed* rows, int64_t row_stride, int64_t row_step, const Packed* panel, int64_t panel_step, int64_t steps,
    float* target, int64_t target_ld, Finish finish) {
#if FLEX_AMX
  constexpr int64_t ROWS = 16, STEPS = DEPTH / STEP;  // of a tile
  __m512 sum[BLOCK][2];
  asm volatile("" ::: "memory");  // what tiles load is in memory: compilers do not know that they load
  _tile_zero(0);
  _tile_zero(2);
  if (WHOLE) _tile_zero(1);
  if (WHOLE) _tile_zero(3);
  for (int64_t s = 0; s < steps; s += STEPS) {
    const Packed *upper = rows + s * row_step, *left = panel + s * panel_step;
    _tile_loadd(4, upper, row_stride * sizeof(Packed));
    _tile_loadd(6, left, panel_step * sizeof(Packed));
    _tile_dpbf16ps(0, 4, 6);
    if (WHOLE) _tile_loadd(7, left + PANEL, panel_step * sizeof(Packed));
    if (WHOLE) _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, upper + ROWS * row_stride, row_stride * sizeof(Packed));
    _tile_dpbf16ps(2, 5, 6);
    if (WHOLE) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, &sum[0][0], sizeof(sum[0]));
  _tile_stored(2, &sum[ROWS][0], sizeof(sum[0]));
  if (WHOLE) _tile_stored(1, &sum[0][1], sizeof(sum[0]));
  if (WHOLE) _tile_stored(3, &sum[ROWS][1], sizeof(sum[0]));
#else
  Vec sum[BLOCK][2];
#pragma GCC unroll 16
  for (int r = 0; r < BLOCK; ++r) sum[r][0] = sum[r][1] = Vec(0.f);
  constexpr int64_t AT_ONCE = WHOLE ? 1 : 2;
  const int64_t next_row = WHOLE ? 0 : row_step, next_panel = WHOLE ? W * STEP : panel_step;
  int64_t s = 0;
  for (; s + AT_ONCE <= steps; s += AT_ONCE) {
    const Step left = in_register(load_step(panel + s * panel_step));
    const Step right = in_register(load_step(panel + s * panel_step + next_panel));
#pragma GCC unroll 16
    for (int r = 0; r < BLOCK; ++r) {
      const Packed* row = rows + r * row_stride + s * row_step;
      const Step first = all_lanes(row);
      sum[r][0] = add_products(first, left, sum[r][0]);
      sum[r][1] = add_products(WHOLE ? first : all_lanes(row + next_row), right, sum[r][1]);
    }
  }
  if (s < steps) {
    const Step left = in_register(load_step(panel + s * panel_step));
#pragma GCC unroll 16
    for (int r = 0; r < BLOCK; ++r)
      sum[r][0] = add_products(all_lanes(rows + r * row_stride + s * row_step), left, sum[r][0]);
  }
#endif
#pragma GCC unroll 16
  for (int r = 0; r < BLOCK; ++r) {
    if (!WHOLE) {
      finish(r, FLEX_AMX ? Vec(sum[r][0]) : Vec(sum[r][0]) + Vec(sum[r][1]), target + r * target_ld);
      continue;
    }
    finish(r, Vec(sum[r][0]), target + r * target_ld);
    finish(r, Vec(sum[r][1]), target + r * target_ld + W);
  }
}

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

// A square of W x W words. A round weaves the lower half of its rows into the upper; log2(W) rounds turn it around.
// Rows after the first `count` are not written.
inline void transpose_words(const float* from, int64_t from_ld, float* to, int64_t to_ld, int64_t count) {
  Vec rows[W], woven[W];
#pragma GCC unroll 16
  for (int64_t i = 0; i < W; ++i) rows[i] = Vec::loadu(from + i * from_ld);
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
      transpose_words(words + r * (ld / STEP) + s, ld / STEP, transposed + s * PANEL + r, PANEL, steps - s);
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
