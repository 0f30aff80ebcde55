// What loops over lanes use where ATen's own goes through memory or through vectors of masks.
using Ints = at::vec::Vectorized<int32_t>;

// Which lanes of a vector a condition holds in. With AVX-512 it has a bit for each, where ATen makes vectors of them.
#if defined(CPU_CAPABILITY_AVX512)
struct LaneBits {
  __mmask16 bits;
};
template <typename T, int N>
struct LaneMask : LaneBits {
  using Numbers = at::vec::VectorizedN<T, N>;
  using OfNumbers = at::vec::VecMask<T, N>;
  static constexpr bool WIDE = std::is_same_v<T, int64_t> && N == 2;
  LaneMask(LaneBits from) : LaneBits(from) {}
  LaneMask(const Numbers& from) : LaneBits(bits_of(from)) {}
  LaneMask(const OfNumbers& from) : LaneMask(Numbers(from)) {}
  template <int L = N, std::enable_if_t<L == 1, int> = 0>
  LaneMask(const at::vec::Vectorized<T>& from) : LaneMask(Numbers(from)) {}
  static LaneBits bits_of(const Numbers& from) {
    if constexpr (WIDE) return {_mm512_kunpackb(_mm512_movepi64_mask(from[1]), _mm512_movepi64_mask(from[0]))};
    else return {_mm512_movepi32_mask(Ints(OfNumbers(from).template cast<int32_t, 1>()))};
  }
  template <typename U>
  static LaneMask from(U in_all) { return LaneBits{__mmask16(-int(bool(in_all)))}; }
  template <typename U>
  static LaneMask from(U* each, int64_t count = W) {
    static_assert(sizeof(U) == 1);
    const __m128i there = _mm_maskz_loadu_epi8(__mmask16((1 << count) - 1), each);
    return LaneBits{_mm_test_epi8_mask(there, there)};
  }
  template <typename U, int L>
  static LaneMask from(const at::vec::VectorizedN<U, L>& numbers) { return OfNumbers::from(numbers); }
  static LaneMask set(LaneMask rest, LaneMask first, int64_t count = W) {
    const __mmask16 taken = (1 << count) - 1;
    return LaneBits{__mmask16((first.bits & taken) | (rest.bits & ~taken))};
  }
  operator OfNumbers() const {
    using Half = at::vec::Vectorized<T>;
    if constexpr (WIDE) return Numbers(Half(_mm512_movm_epi64(bits)), Half(_mm512_movm_epi64(bits >> 8)));
    else return at::vec::VecMask<int32_t, 1>(Ints(_mm512_movm_epi32(bits))).template cast<T, N>();
  }
  operator Numbers() const { return OfNumbers(*this); }
  template <int L = N, std::enable_if_t<L == 1, int> = 0>
  operator at::vec::Vectorized<T>() const { return OfNumbers(*this); }
  template <typename U, int L>
  LaneMask<U, L> cast() const { return LaneBits{bits}; }
  template <typename U, int L>
  auto to() const { return OfNumbers(*this).template to<U, L>(); }
  template <typename U, int L>
  auto loadu(const U* from) const { return OfNumbers(*this).template loadu<U, L>(from); }
  bool all_zero() const { return bits == 0; }
  bool all_masked() const { return bits == 0xffff; }
  bool is_masked(int lane) const { return bits >> lane & 1; }
  LaneMask operator~() const { return LaneBits{__mmask16(~bits)}; }
};
#define FLEX_OF_MASKS(OP, BITS)                                           \
  template <typename T, int N, typename U, int M>                         \
  inline LaneMask<T, N> operator OP(LaneMask<T, N> x, LaneMask<U, M> y) { \
    return LaneBits{__mmask16(BITS)};                                     \
  }
FLEX_OF_MASKS(&, x.bits & y.bits)
FLEX_OF_MASKS(|, x.bits | y.bits)
FLEX_OF_MASKS(^, x.bits ^ y.bits)
FLEX_OF_MASKS(*, x.bits & y.bits)
FLEX_OF_MASKS(!=, x.bits ^ y.bits)
FLEX_OF_MASKS(==, ~(x.bits ^ y.bits))
FLEX_OF_MASKS(>, x.bits & ~y.bits)
FLEX_OF_MASKS(<, y.bits & ~x.bits)
FLEX_OF_MASKS(>=, x.bits | ~y.bits)
FLEX_OF_MASKS(<=, y.bits | ~x.bits)
#undef FLEX_OF_MASKS

// lanes(x) < y gives the bits of x < y.
template <typename Numbers>
struct Lanes {
  const Numbers& x;
};
template <typename Numbers>
inline Lanes<Numbers> lanes(const Numbers& x) { return {x}; }
#define FLEX_OF_LANES(OP, INTEGERS, FLOATS)                                                               \
  template <typename Numbers>                                                                             \
  inline auto operator OP(Lanes<Numbers> lanes, const Numbers& y) {                                       \
    const Numbers& x = lanes.x;                                                                           \
    if constexpr (std::is_same_v<Numbers, Vec>) {                                                         \
      return LaneBits{_mm512_cmp_ps_mask(x, y, FLOATS)};                                                  \
    } else if constexpr (std::is_same_v<Numbers, Ints>) {                                                 \
      return LaneBits{_mm512_cmp_epi32_mask(x, y, INTEGERS)};                                             \
    } else if constexpr (std::is_same_v<Numbers, at::vec::VectorizedN<int64_t, 2>>) {                     \
      return LaneBits{_mm512_kunpackb(_mm512_cmp_epi64_mask(x[1], y[1], INTEGERS),                        \
                                      _mm512_cmp_epi64_mask(x[0], y[0], INTEGERS))};                      \
    } else {                                                                                              \
      return x OP y;                                                                                      \
    }                                                                                                     \
  }
FLEX_OF_LANES(==, _MM_CMPINT_EQ, _CMP_EQ_OQ)
FLEX_OF_LANES(!=, _MM_CMPINT_NE, _CMP_NEQ_UQ)
FLEX_OF_LANES(<, _MM_CMPINT_LT, _CMP_LT_OQ)
FLEX_OF_LANES(<=, _MM_CMPINT_LE, _CMP_LE_OQ)
FLEX_OF_LANES(>, _MM_CMPINT_NLE, _CMP_GT_OQ)
FLEX_OF_LANES(>=, _MM_CMPINT_NLT, _CMP_GE_OQ)
#undef FLEX_OF_LANES

// `numbers` in lanes where the mask holds, else `rest`.
template <typename T, int N>
inline Vec blended(Vec rest, Vec numbers, LaneMask<T, N> where) { return _mm512_mask_blend_ps(where.bits, rest, numbers); }
template <typename T, int N>
inline Ints blended(Ints rest, Ints numbers, LaneMask<T, N> where) { return _mm512_mask_blend_epi32(where.bits, rest, numbers); }
template <typename T, int N, typename U, int M>
inline LaneMask<T, N> blended(LaneMask<T, N> rest, LaneMask<T, N> numbers, LaneMask<U, M> where) {
  return (numbers & where) | (rest & ~where);
}
#else
template <typename T, int N>
struct LaneMask : at::vec::VecMask<T, N> {
  using Base = at::vec::VecMask<T, N>;
  using Base::Base, Base::from;
  LaneMask(const Base& from) : Base(from) {}
  template <typename U>
  static LaneMask from(U* each, int64_t count) {
#if defined(CPU_CAPABILITY_AVX2)
    if (std::is_same_v<std::remove_const_t<U>, bool> && count == W) {
      const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)each));
      return at::vec::VecMask<int32_t, 1>(Ints(_mm256_cmpgt_epi32(bytes, _mm256_setzero_si256()))).template cast<T, N>();
    }
#endif
    return Base::from(each, count);
  }
};
template <typename Numbers>
inline const Numbers& lanes(const Numbers& x) { return x; }
#endif
template <typename Numbers, typename Mask>
inline Numbers blended(const Numbers& rest, const Numbers& numbers, const Mask& where) { return Numbers::blendv(rest, numbers, where); }
template <typename T, int N, typename Mask>
inline LaneMask<T, N> mask_cast(const Mask& mask) { return mask.template cast<T, N>(); }

// W integers of 8 bits, in the lowest lanes.
template <typename T>
inline at::vec::Vectorized<T> load_lanes(const T* from) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_castsi128_si512(_mm_loadu_si128((const __m128i*)from));
#elif defined(CPU_CAPABILITY_AVX2)
  return _mm256_castsi128_si256(_mm_loadl_epi64((const __m128i*)from));
#else
  return at::vec::Vectorized<T>::loadu(from, W);
#endif
}

// Numbers of another type. ATen has no instructions for those of 64 bits.
template <typename To, int N, typename From, int M>
inline auto converted(const at::vec::VectorizedN<From, M>& x) {
#if defined(CPU_CAPABILITY_AVX512)
  using at::vec::Vectorized;
  if constexpr (std::is_same_v<From, float> && std::is_same_v<To, double> && M == 1)
    return at::vec::VectorizedN<double, 2>(Vectorized<double>(_mm512_cvtps_pd(_mm512_castps512_ps256(x[0]))),
                                           Vectorized<double>(_mm512_cvtps_pd(_mm512_extractf32x8_ps(x[0], 1))));
  else if constexpr (std::is_same_v<From, double> && std::is_same_v<To, float> && M == 2)
    return Vec(_mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(x[0])), _mm512_cvtpd_ps(x[1]), 1));
  else
#endif
    return at::vec::convert<To, N, From, M>(x);
}
