// Numbers that mods look up or add to, at places that they compute. Lanes whose places follow one another take one load or one
// addition.
using Places = Ints;

// 1 or -1 if each lane's place is one more or less than that of the lane before, else 0.
inline int32_t direction_of(Places places) {
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

// W places in pieces. In each they follow one another, in all upwards or in all downwards. Only AVX-512 has more than one. Without
// a direction they lie anywhere.
struct Pieces {
  static constexpr int32_t MOST = 4;
  int32_t direction, count;
  int32_t starts[MOST];  // where the first lane would lie, which is the last one of those that go downwards
  uint16_t lanes[MOST];  // a bit for each, where there are several pieces

  explicit Pieces(Places places) : direction(direction_of(places)), count(direction != 0) {
#if defined(CPU_CAPABILITY_AVX512)
    starts[0] = _mm_cvtsi128_si32(_mm512_castsi512_si128(places));
#elif defined(CPU_CAPABILITY_AVX2)
    starts[0] = _mm_cvtsi128_si32(_mm256_castsi256_si128(places));
#endif
    if (direction < 0) starts[0] -= W - 1;
  }
  Pieces() = default;

  // Looks for several pieces, where places have no direction.
  __attribute__((noinline)) void split(Places places) {
#if defined(CPU_CAPABILITY_AVX512)
    int32_t each[W];
    places.store(each);
    const int32_t ahead = each[1] - each[0], step = ahead * ahead == 1 ? ahead : each[2] - each[1];
    if (step * step != 1) return;
    const Places upwards = (step > 0 ? places : at::vec::flip(places)) - Places::arange(0, 1);
    upwards.store(each);
    uint32_t rest = (1 << W) - 1;
    for (count = 0; rest && count < MOST; ++count) {
      starts[count] = each[__builtin_ctz(rest)];
      lanes[count] = _mm512_mask_cmpeq_epi32_mask(rest, upwards, _mm512_set1_epi32(starts[count]));
      rest &= ~lanes[count];
    }
    if (!rest) direction = step;
#endif
  }
  // Where a piece of places that are all larger by a number starts. Integers of 32 bits wrap around as they do in a vector.
  int64_t start(int32_t piece, int32_t by) const { return int32_t(uint32_t(starts[piece]) + uint32_t(by)); }
};

// The places of a tile's keys. Those of a row are larger by a number, so one look at these serves all rows.
template <int64_t MOST>
struct KeyPlaces {
  const int32_t* const places;
  Pieces pieces[MOST];
  KeyPlaces(const int32_t* places, int64_t columns) : places(places) {
    for (int64_t i = 0; i + W <= columns; i += W) {
      Pieces& found = pieces[i / W] = Pieces(Places::loadu(places + i));
      if (!found.direction) found.split(Places::loadu(places + i));
    }
  }
};

template <typename T>
inline void each_of(const T* from, Places places, T* found) {
  int32_t each[W];
  places.store(each);
#pragma GCC unroll 16
  for (int64_t i = 0; i < W; ++i) found[i] = from[each[i]];
}

// from[places + by], and to[places + by] += numbers, where places lie in several pieces or anywhere.
inline __attribute__((noinline)) Vec look_up_apart(const float* from, const Pieces& pieces, int32_t by, Places places) {
#if defined(CPU_CAPABILITY_AVX512)
  if (pieces.direction) {
    __m512 found = _mm512_setzero_ps();
    for (int32_t i = 0; i < pieces.count; ++i) found = _mm512_mask_loadu_ps(found, pieces.lanes[i], from + pieces.start(i, by));
    return pieces.direction > 0 ? Vec(found) : at::vec::flip(Vec(found));
  }
  return _mm512_i32gather_ps(places + Places(by), from, sizeof(float));
#endif
  float found[W];
  each_of(from, places + Places(by), found);
  return Vec::loadu(found);
}
inline __attribute__((noinline)) void add_apart(Vec numbers, float* to, const Pieces& pieces, int32_t by, Places places) {
#if defined(CPU_CAPABILITY_AVX512)
  if (pieces.direction) {
    const __m512 added = pieces.direction > 0 ? numbers : at::vec::flip(numbers);
    for (int32_t i = 0; i < pieces.count; ++i) {
      float* const at = to + pieces.start(i, by);
      _mm512_mask_storeu_ps(at, pieces.lanes[i], _mm512_add_ps(_mm512_maskz_loadu_ps(pieces.lanes[i], at), added));
    }
    return;
  }
#endif
  int32_t each[W];
  float added[W];
  (places + Places(by)).store(each);
  numbers.store(added);
#pragma GCC unroll 16
  for (int64_t i = 0; i < W; ++i) to[each[i]] += added[i];
}

// The same wherever they lie. all() gives the places.
template <typename All>
inline __attribute__((always_inline)) Vec look_up(const float* from, const Pieces& pieces, int32_t by, All all) {
  if (pieces.count != 1) return look_up_apart(from, pieces, by, all());
  const Vec found = Vec::loadu(from + pieces.start(0, by));
  return pieces.direction > 0 ? found : at::vec::flip(found);
}
template <typename All>
inline __attribute__((always_inline)) void add_each(Vec numbers, float* to, const Pieces& pieces, int32_t by, All all) {
  if (pieces.count != 1) return add_apart(numbers, to, pieces, by, all());
  float* const first = to + pieces.start(0, by);
  (Vec::loadu(first) + (pieces.direction > 0 ? numbers : at::vec::flip(numbers))).store(first);
}
inline Vec look_up(const float* from, Places places) { return look_up(from, Pieces(places), 0, [&] { return places; }); }
inline void add_each(Vec numbers, float* to, Places places) { add_each(numbers, to, Pieces(places), 0, [&] { return places; }); }
// The same for a vector of keys from `column` on.
template <int64_t MOST>
inline Vec look_up(const float* from, const KeyPlaces<MOST>& keys, int64_t column, int32_t by) {
  return look_up(from, keys.pieces[column / W], by, [&] { return Places::loadu(keys.places + column); });
}
template <int64_t MOST>
inline void add_each(Vec numbers, float* to, const KeyPlaces<MOST>& keys, int64_t column, int32_t by) {
  add_each(numbers, to, keys.pieces[column / W], by, [&] { return Places::loadu(keys.places + column); });
}

// from[places] of other types.
inline Places look_up(const int32_t* from, Places places) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_i32gather_epi32(places, from, sizeof(int32_t));
#endif
  int32_t found[W];
  each_of(from, places, found);
  return Places::loadu(found);
}
inline LaneMask<float, 1> look_up(const bool* from, Places places) {
#if defined(CPU_CAPABILITY_AVX512)
  // By words at multiples of 4, none of which ends on another page.
  const int64_t ahead = reinterpret_cast<uintptr_t>(from) % 4;
  const __m512i bytes = _mm512_add_epi32(places, _mm512_set1_epi32(ahead));
  const __m512i words = _mm512_i32gather_epi32(_mm512_srai_epi32(bytes, 2), from - ahead, 4);
  const __m512i shifts = _mm512_slli_epi32(_mm512_and_si512(bytes, _mm512_set1_epi32(3)), 3);
  return LaneBits{_mm512_test_epi32_mask(_mm512_srlv_epi32(words, shifts), _mm512_set1_epi32(0xff))};
#else
  bool found[W];
  each_of(from, places, found);
  return LaneMask<float, 1>::from(found, W);
#endif
}
inline at::vec::VectorizedN<int64_t, 2> look_up(const int64_t* from, Places places) {
#if defined(CPU_CAPABILITY_AVX512)
  using Half = at::vec::Vectorized<int64_t>;
  return {Half(_mm512_i32gather_epi64(_mm512_castsi512_si256(places), from, 8)),
          Half(_mm512_i32gather_epi64(_mm512_extracti32x8_epi32(places, 1), from, 8))};
#else
  int64_t found[W];
  each_of(from, places, found);
  return at::vec::VectorizedN<int64_t, 2>::loadu(found);
#endif
}
template <typename T, int64_t MOST>
inline auto look_up(const T* from, const KeyPlaces<MOST>& keys, int64_t column, int32_t by) {
  return look_up(from, Places::loadu(keys.places + column) + Places(by));
}
