// Products: blocks of rows and columns that stay in registers.

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
// Compilers do not know that tiles load and store: what is written before is in memory after this, and the other way round.
inline __attribute__((always_inline)) void settle_memory() { asm volatile("" ::: "memory"); }
struct Tiles {
  explicit Tiles(const TileShapes& shapes = TILE_SHAPES) { _tile_loadconfig(&shapes); }
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

// Calls body(row, column, whole) for all blocks of a product. What AMX adds to lies far apart: a row is done before the next.
template <typename Body>
inline __attribute__((always_inline)) void each_block(int64_t rows, int64_t columns, Body body) {
#if FLEX_AMX
  for (int64_t r = 0; r < rows; r += BLOCK) each_panel(columns, [&](int64_t c, auto whole) { body(r, c, whole); });
#else
  each_panel(columns, [&](int64_t c, auto whole) {
    for (int64_t r = 0; r < rows; r += BLOCK) body(r, c, whole);
  });
#endif
}

// What becomes of a register block's sums.
struct Put {
  Vec operator()(Vec sum, const float*) const { return sum; }
};
struct PutScaled {
  float scale;
  Vec operator()(Vec sum, const float*) const { return sum * Vec(scale); }
};
struct Add {
  Vec operator()(Vec sum, const float* target) const { return Vec::loadu(target) + sum; }
};

// One register block: target[r][0:PANEL] = sum over s of rows[r * row_stride + s * row_step] * panel[s * panel_step],
// as `finish` says. If it is not WHOLE, the left half of that, with two steps in place of two halves.
template <bool WHOLE = true, typename Finish>
inline __attribute__((always_inline)) void dot_block(
    const Packed* rows, int64_t row_stride, int64_t row_step, const Packed* panel, int64_t panel_step, int64_t steps,
    float* target, int64_t target_ld, Finish finish) {
#if FLEX_AMX
  constexpr int64_t ROWS = 16, STEPS = DEPTH / STEP;  // of a tile
  const int64_t target_bytes = target_ld * sizeof(float);
  float* const lower = target + ROWS * target_ld;
  settle_memory();
  if (std::is_same_v<Finish, Add>) {
    _tile_loadd(0, target, target_bytes);
    _tile_loadd(2, lower, target_bytes);
    if (WHOLE) _tile_loadd(1, target + W, target_bytes);
    if (WHOLE) _tile_loadd(3, lower + W, target_bytes);
  } else {
    _tile_zero(0);
    _tile_zero(2);
    if (WHOLE) _tile_zero(1);
    if (WHOLE) _tile_zero(3);
  }
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
  _tile_stored(0, target, target_bytes);
  _tile_stored(2, lower, target_bytes);
  if (WHOLE) _tile_stored(1, target + W, target_bytes);
  if (WHOLE) _tile_stored(3, lower + W, target_bytes);
  settle_memory();
  if constexpr (std::is_same_v<Finish, PutScaled>)
    for (float* row = target; row < target + BLOCK * target_ld; row += target_ld) {
      finish(Vec::loadu(row), row).store(row);
      if (WHOLE) finish(Vec::loadu(row + W), row + W).store(row + W);
    }
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
#pragma GCC unroll 16
  for (int r = 0; r < BLOCK; ++r) {
    float* const row = target + r * target_ld;
    finish(WHOLE ? sum[r][0] : sum[r][0] + sum[r][1], row).store(row);
    if (WHOLE) finish(sum[r][1], row + W).store(row + W);
  }
#endif
}
