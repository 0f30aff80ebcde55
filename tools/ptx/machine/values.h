// Types of PTX, and what its scalar instructions compute. A register holds its bits in the low end of 64.

#pragma once

#include <algorithm>
#include <cfenv>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstdint>
#include <cstring>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

namespace ptx {

using Bits = uint64_t;

template <class To, class From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// A double rounded to a float with fewer bits, to nearest even or towards zero.
inline Bits rounded(double x, int exponent_bits, int mantissa_bits, bool to_zero = false) {
  const Bits sign = std::signbit(x) ? 1 : 0;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const Bits infinity = ((Bits{1} << exponent_bits) - 1) << mantissa_bits;
  const Bits head = sign << (exponent_bits + mantissa_bits);
  if (std::isnan(x)) return infinity | ((Bits{1} << mantissa_bits) - 1);
  if (std::isinf(x)) return head | infinity;
  if (x == 0) return head;
  x = std::fabs(x);
  int exponent = 0;
  std::frexp(x, &exponent);
  exponent = std::max(exponent - 1, 1 - bias);  // below, numbers are subnormal
  const double steps = std::ldexp(x, mantissa_bits - exponent);
  const Bits whole = static_cast<Bits>(to_zero ? std::floor(steps) : std::nearbyint(steps));
  const Bits biased = whole + (static_cast<Bits>(exponent + bias - 1) << mantissa_bits);
  const Bits found = whole >> mantissa_bits || exponent > 1 - bias ? biased : whole;
  return head | std::min(found, to_zero ? infinity - 1 : infinity);
}

inline double unrounded(Bits bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const Bits mantissa = bits & ((Bits{1} << mantissa_bits) - 1);
  const int exponent = static_cast<int>(bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const double sign = bits >> (exponent_bits + mantissa_bits) & 1 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1) return mantissa ? std::nan("") : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(static_cast<double>(mantissa), 1 - bias - mantissa_bits);
  return sign * std::ldexp(static_cast<double>(mantissa | (Bits{1} << mantissa_bits)), exponent - bias - mantissa_bits);
}

struct Half {
  uint16_t bits;
  static constexpr double least_normal = 6.103515625e-05;
  Half() = default;
  explicit Half(double x) : bits(static_cast<uint16_t>(rounded(x, 5, 10))) {}
  explicit operator double() const { return unrounded(bits, 5, 10); }
};

struct Brain {
  uint16_t bits;
  Brain() = default;
  explicit Brain(double x) : bits(static_cast<uint16_t>(rounded(x, 8, 7))) {}
  explicit operator double() const { return bits_as<float>(static_cast<uint32_t>(bits) << 16); }
};

template <class T>
constexpr bool is_small_float = std::is_same_v<T, Half> || std::is_same_v<T, Brain>;
template <class T>
constexpr bool is_float = std::is_floating_point_v<T> || is_small_float<T>;

template <class T>
T get(Bits bits) {
  if constexpr (std::is_same_v<T, float>) return bits_as<float>(static_cast<uint32_t>(bits));
  else if constexpr (std::is_same_v<T, double>) return bits_as<double>(bits);
  else if constexpr (is_small_float<T>) { T x; x.bits = static_cast<uint16_t>(bits); return x; }
  else return static_cast<T>(bits);
}

template <class T>
Bits put(T x) {
  if constexpr (std::is_same_v<T, float>) return bits_as<uint32_t>(x);
  else if constexpr (std::is_same_v<T, double>) return bits_as<uint64_t>(x);
  else if constexpr (is_small_float<T>) return x.bits;
  else return static_cast<std::make_unsigned_t<T>>(x);
}

// `function` of the C++ type that a PTX type has; false where there is none.
template <class Function>
bool with_type(const std::string& type, Function&& function) {
  if (type == "u8" || type == "b8") return function(uint8_t{});
  if (type == "u16" || type == "b16") return function(uint16_t{});
  if (type == "u32" || type == "b32") return function(uint32_t{});
  if (type == "u64" || type == "b64") return function(uint64_t{});
  if (type == "s8") return function(int8_t{});
  if (type == "s16") return function(int16_t{});
  if (type == "s32") return function(int32_t{});
  if (type == "s64") return function(int64_t{});
  if (type == "f16") return function(Half{});
  if (type == "bf16") return function(Brain{});
  if (type == "f32" || type == "tf32") return function(float{});
  if (type == "f64") return function(double{});
  return false;
}

inline int bytes_of(const std::string& type) {
  int found = type == "pred" ? 1 : type == "e4m3x2" || type == "e5m2x2" ? 2 : type == "f32x2" ? 8 : type.size() > 4 && type.compare(type.size() - 4, 4, "16x2") == 0 ? 4 : 0;
  with_type(type, [&](auto x) { return found = sizeof x; });
  return found;
}

// What follows an instruction's name.
struct Modifiers {
  std::vector<std::string> all;
  bool has(const std::string& name) const { return std::find(all.begin(), all.end(), name) != all.end(); }
  // Whether all are types, or known. A name that ends in * stands for all that begin with it.
  bool only(std::initializer_list<const char*> known) const {
    return std::all_of(all.begin(), all.end(), [&](const std::string& name) {
      return bytes_of(name) || std::any_of(known.begin(), known.end(), [&](const std::string& k) {
        return k.back() == '*' ? name.compare(0, k.size() - 1, k, 0, k.size() - 1) == 0 : name == k;
      });
    });
  }
  Modifiers without(const std::string& name) const {
    Modifiers found;
    std::copy_if(all.begin(), all.end(), std::back_inserter(found.all), [&](const std::string& each) { return each != name; });
    return found;
  }
  // The types among them, in order: of the result, of operands.
  std::vector<std::string> types() const {
    std::vector<std::string> found;
    for (const auto& name : all)
      if (bytes_of(name)) found.push_back(name);
    return found;
  }
  int number(const std::string& before) const {  // 4 of "x4" for "x"; 0 where there is none
    for (const auto& name : all)
      if (name.size() > before.size() && name.rfind(before, 0) == 0 && name.find_first_not_of("0123456789", before.size()) == name.npos)
        return std::stoi(name.substr(before.size()));
    return 0;
  }
};

// A result of up to three operands.
using Scalar = std::function<Bits(Bits, Bits, Bits)>;

// What is added to results of approximate instructions, in parts of the result; 0 for exact ones.
struct Approximations {
  bool worst = false;
  uint64_t state = 1;
  double operator()(double x, double error) {
    if (!worst || !std::isfinite(x)) return x;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return x * (1 + (state >> 63 ? error : -error));
  }
};

namespace scalars {

inline float flushed(float x) { return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x; }

template <class T>
T least(T a, T b, bool nan) {
  if constexpr (is_float<T>) {
    const double x(a), y(b);
    if (std::isnan(x) || std::isnan(y)) return nan ? T(NAN) : std::isnan(x) ? b : a;
    return x < y || (x == y && std::signbit(x)) ? a : b;
  } else {
    return std::min(a, b);
  }
}

template <class T>
T most(T a, T b, bool nan) {
  if constexpr (is_float<T>) {
    const double x(a), y(b);
    if (std::isnan(x) || std::isnan(y)) return nan ? T(NAN) : std::isnan(x) ? b : a;
    return x > y || (x == y && std::signbit(y)) ? a : b;
  } else {
    return std::max(a, b);
  }
}

template <class T>
using Wider = std::conditional_t<std::is_signed_v<T>, std::conditional_t<sizeof(T) == 8, __int128, int64_t>,
                                 std::conditional_t<sizeof(T) == 8, unsigned __int128, uint64_t>>;

template <class Result, class T, class Function>
Scalar of_values(Function function) {
  return [function](Bits a, Bits b, Bits c) { return put(Result(function(get<T>(a), get<T>(b), get<T>(c)))); };
}

template <class T>
Scalar arithmetic(const std::string& name, const Modifiers& with, Approximations& approximately) {
  const bool nan = with.has("NaN"), relu = with.has("relu");
  auto same = [](auto function) { return of_values<T, T>(function); };
  if (name == "min") return same([=](T a, T b, T) { T x = least(a, b, nan); return relu ? most(x, T(0), nan) : x; });
  if (name == "max") return same([=](T a, T b, T) { T x = most(a, b, nan); return relu ? most(x, T(0), nan) : x; });
  if constexpr (is_float<T>) {
    using Exact = std::conditional_t<std::is_same_v<T, float>, float, double>;  // of small floats, then rounded once
    auto exact = [&](auto function) {
      return same([=](T a, T b, T c) { return T(function(Exact(double(a)), Exact(double(b)), Exact(double(c)))); });
    };
    if (name == "add") return exact([](Exact a, Exact b, Exact) { return a + b; });
    if (name == "sub") return exact([](Exact a, Exact b, Exact) { return a - b; });
    if (name == "mul") return exact([](Exact a, Exact b, Exact) { return a * b; });
    if (name == "fma" || name == "mad")
      return exact([=](Exact a, Exact b, Exact c) { Exact x = std::fma(a, b, c); return relu ? std::max<Exact>(x, 0) : x; });
    if (name == "div") {
      const double error = with.has("full") || with.has("approx") ? 0x1p-22 : 0;
      return exact([=, &approximately](Exact a, Exact b, Exact) { return Exact(approximately(a / b, error)); });
    }
    if (name == "abs") return exact([](Exact a, Exact, Exact) { return std::fabs(a); });
    if (name == "neg") return exact([](Exact a, Exact, Exact) { return -a; });
    const std::map<std::string, std::pair<double (*)(double), double>> functions = {
        {"ex2", {[](double x) { return std::exp2(x); }, 0x1p-22}},
        {"lg2", {[](double x) { return std::log2(x); }, 0x1p-22}},
        {"rcp", {[](double x) { return 1 / x; }, 0x1p-23}},
        {"sqrt", {[](double x) { return std::sqrt(x); }, 0x1p-23}},
        {"rsqrt", {[](double x) { return 1 / std::sqrt(x); }, 0x1.6p-23}},
        {"sin", {[](double x) { return std::sin(x); }, 0x1p-20}},
        {"cos", {[](double x) { return std::cos(x); }, 0x1p-20}},
        {"tanh", {[](double x) { return std::tanh(x); }, 0x1p-11}},
    };
    if (auto found = functions.find(name); found != functions.end()) {
      auto [function, bound] = found->second;
      const double error = with.has("approx") ? bound : 0;
      auto* compute = function;
      return same([=, &approximately](T a, T, T) { return T(approximately(compute(double(a)), error)); });
    }
  } else {
    using Wide = Wider<T>;
    using Unsigned = std::make_unsigned_t<T>;
    if (name == "add") return same([](T a, T b, T) { return T(Unsigned(a) + Unsigned(b)); });
    if (name == "sub") return same([](T a, T b, T) { return T(Unsigned(a) - Unsigned(b)); });
    if (name == "mul" || name == "mad") {
      const bool adds = name == "mad";
      if (with.has("wide"))
        return [adds](Bits a, Bits b, Bits c) { return Bits(Wide(get<T>(a)) * Wide(get<T>(b)) + (adds ? Wide(c) : 0)); };
      if (with.has("hi"))
        return same([adds](T a, T b, T c) { return T((Wide(a) * Wide(b) >> 8 * sizeof(T)) + (adds ? c : 0)); });
      return same([adds](T a, T b, T c) { return T(Wide(a) * Wide(b) + (adds ? Wide(c) : 0)); });
    }
    const T no_quotient = T(-1);  // of a division by zero
    if (name == "div") return same([=](T a, T b, T) { return b == 0 ? no_quotient : T(Wide(a) / Wide(b)); });
    if (name == "rem") return same([=](T a, T b, T) { return b == 0 ? no_quotient : T(Wide(a) % Wide(b)); });
    if (name == "abs") return same([](T a, T, T) { return a < 0 ? T(0 - Unsigned(a)) : a; });
    if (name == "neg") return same([](T a, T, T) { return T(0 - Unsigned(a)); });
    if (name == "and") return same([](T a, T b, T) { return T(a & b); });
    if (name == "or") return same([](T a, T b, T) { return T(a | b); });
    if (name == "xor") return same([](T a, T b, T) { return T(a ^ b); });
    if (name == "not") return same([](T a, T, T) { return T(~a); });
    if (name == "cnot") return same([](T a, T, T) { return T(a == 0); });
    constexpr unsigned width = 8 * sizeof(T);
    auto shift = [](auto function) {
      return [function](Bits a, Bits b, Bits) { return put(T(function(get<T>(a), uint32_t(b)))); };
    };
    if (name == "shl") return shift([](T a, uint32_t by) { return by >= width ? T(0) : T(Unsigned(a) << by); });
    if (name == "shr") return shift([](T a, uint32_t by) { return T(a >> std::min(by, width - 1) >> (by >= width ? 1 : 0)); });
    if (name == "popc") return same([](T a, T, T) { return T(__builtin_popcountll(Unsigned(a))); });
    if (name == "clz") return same([](T a, T, T) { return T(a ? __builtin_clzll(Unsigned(a)) - (64 - int(width)) : int(width)); });
    if (name == "brev")
      return same([](T a, T, T) { Unsigned x = 0; for (unsigned i = 0; i < width; ++i) x |= Unsigned(Unsigned(a) >> i & 1) << (width - 1 - i); return T(x); });
    if (name == "bfe")
      return [](Bits a, Bits b, Bits c) {
        const unsigned first = b & 255, count = c & 255;
        Unsigned x = first < width ? Unsigned(Unsigned(a) >> first) : Unsigned(0);
        const bool sign = std::is_signed_v<T> && count && (get<T>(a) >> std::min(first + count - 1, width - 1) & 1);
        if (count < width) {
          const Unsigned mask = Unsigned((Unsigned(1) << count) - 1);
          x = Unsigned(sign ? x | ~mask : x & mask);
        }
        return put(T(count ? x : 0));
      };
  }
  return {};
}

template <class To, class From>
Scalar conversion(const Modifiers& with) {
  const bool saturated = with.has("sat"), relu = with.has("relu");
  if constexpr (is_float<To>) {
    const bool to_zero = with.has("rz");
    const int integer = with.has("rni") ? 1 : with.has("rzi") ? 2 : with.has("rmi") ? 3 : with.has("rpi") ? 4 : 0;
    return of_values<To, From>([=](From a, From, From) {
      if constexpr (std::is_integral_v<From>) {
        if constexpr (std::is_floating_point_v<To>) return To(a);
        else return To(double(a));
      } else {
        double x(a);
        if (integer) x = integer == 1 ? std::nearbyint(x) : integer == 2 ? std::trunc(x) : integer == 3 ? std::floor(x) : std::ceil(x);
        if (saturated) x = std::isnan(x) ? 0 : std::min(std::max(x, 0.0), 1.0);
        if (relu && x < 0) x = 0;
        if (!to_zero || sizeof(To) == 8) return To(x);
        const int mantissa = std::is_same_v<To, float> ? 23 : std::is_same_v<To, Half> ? 10 : 7;
        return get<To>(rounded(x, 8 * int(sizeof(To)) - 1 - mantissa, mantissa, true));
      }
    });
  } else if constexpr (is_float<From>) {
    return of_values<To, From>([=](From a, From, From) {
      double x(a);
      x = with.has("rni") ? std::nearbyint(x) : with.has("rmi") ? std::floor(x) : with.has("rpi") ? std::ceil(x) : std::trunc(x);
      if (std::isnan(x)) return To(0);
      const double low(std::numeric_limits<To>::min()), high(std::numeric_limits<To>::max());
      return x <= low ? std::numeric_limits<To>::min() : x >= high ? std::numeric_limits<To>::max() : To(x);
    });
  } else {
    return of_values<To, From>([=](From a, From, From) {
      if (!saturated) return To(a);
      const __int128 low(std::numeric_limits<To>::min()), high(std::numeric_limits<To>::max());
      return To(std::min(std::max(__int128(a), low), high));
    });
  }
}

template <class T>
std::function<bool(Bits, Bits)> comparison(const std::string& name) {
  auto of = [](auto function) { return [function](Bits a, Bits b) { return function(get<T>(a), get<T>(b)); }; };
  if constexpr (is_float<T>) {
    auto ordered = [&](bool unordered, auto function) {
      return of([=](T a, T b) {
        const double x(a), y(b);
        return std::isnan(x) || std::isnan(y) ? unordered : function(x, y);
      });
    };
    if (name == "num") return ordered(false, [](double, double) { return true; });
    if (name == "nan") return ordered(true, [](double, double) { return false; });
    const bool unordered = name.size() == 3 && name[2] == 'u';
    const std::string kind = name.substr(0, 2);
    if (kind == "eq") return ordered(unordered, [](double a, double b) { return a == b; });
    if (kind == "ne") return ordered(unordered, [](double a, double b) { return a != b; });
    if (kind == "lt") return ordered(unordered, [](double a, double b) { return a < b; });
    if (kind == "le") return ordered(unordered, [](double a, double b) { return a <= b; });
    if (kind == "gt") return ordered(unordered, [](double a, double b) { return a > b; });
    if (kind == "ge") return ordered(unordered, [](double a, double b) { return a >= b; });
  } else {
    using Unsigned = std::make_unsigned_t<T>;
    if (name == "eq") return of([](T a, T b) { return a == b; });
    if (name == "ne") return of([](T a, T b) { return a != b; });
    if (name == "lt") return of([](T a, T b) { return a < b; });
    if (name == "le") return of([](T a, T b) { return a <= b; });
    if (name == "gt") return of([](T a, T b) { return a > b; });
    if (name == "ge") return of([](T a, T b) { return a >= b; });
    if (name == "lo") return of([](T a, T b) { return Unsigned(a) < Unsigned(b); });
    if (name == "ls") return of([](T a, T b) { return Unsigned(a) <= Unsigned(b); });
    if (name == "hi") return of([](T a, T b) { return Unsigned(a) > Unsigned(b); });
    if (name == "hs") return of([](T a, T b) { return Unsigned(a) >= Unsigned(b); });
  }
  return {};
}

// Two numbers of 8 bits as two halves. e4m3 has no infinity, and one NaN.
inline Bits of_narrow_pair(Bits both, bool e4m3) {
  auto one = [e4m3](Bits x) {
    if (!e4m3) return x << 8;
    return put(Half((x & 127) == 127 ? NAN : 256 * unrounded((x & 128) << 1 | (x & 127), 5, 3)));
  };
  return one(both & 255) | one(both >> 8 & 255) << 16;
}

// The same in each half of a register.
inline Scalar in_halves(Scalar one, int bits) {
  if (!one) return {};
  const Bits mask = (Bits{1} << bits) - 1;
  return [=](Bits a, Bits b, Bits c) {
    return (one(a & mask, b & mask, c & mask) & mask) | (one(a >> bits, b >> bits, c >> bits) & mask) << bits;
  };
}

inline Scalar with_flushes(Scalar one) {
  auto flush = [](Bits x) { return put(flushed(get<float>(x))); };
  return [=](Bits a, Bits b, Bits c) { return flush(one(flush(a), flush(b), flush(c))); };
}

inline Scalar with_rounding(Scalar one, int mode) {
  return [=](Bits a, Bits b, Bits c) {
    const int before = std::fegetround();
    std::fesetround(mode);
    const Bits found = one(a, b, c);
    std::fesetround(before);
    return found;
  };
}

inline Scalar of_bits(const std::string& name, const Modifiers& with) {
  if (name == "mov" || name == "cvta" || name == "copysign") {
    if (name != "copysign") return [](Bits a, Bits, Bits) { return a; };
    return [](Bits a, Bits b, Bits) { return (a & 0x80000000u) | (b & 0x7fffffffu); };
  }
  if (name == "selp") return [](Bits a, Bits b, Bits c) { return c ? a : b; };
  if (name == "shf") {
    const bool left = with.has("l"), clamp = with.has("clamp");
    return [=](Bits low, Bits high, Bits by) {
      const unsigned n = clamp ? std::min<unsigned>(by, 32) : by & 31;
      const Bits both = (high & 0xffffffffu) << 32 | (low & 0xffffffffu);
      return (left ? both << n >> 32 : both >> n) & 0xffffffffu;
    };
  }
  if (name == "prmt" && with.all.size() == 1)
    return [](Bits a, Bits b, Bits selector) {
      const Bits both = (b & 0xffffffffu) << 32 | (a & 0xffffffffu);
      Bits found = 0;
      for (int i = 0; i < 4; ++i) {
        const unsigned which = selector >> 4 * i & 15;
        Bits byte = both >> 8 * (which & 7) & 255;
        if (which & 8) byte = byte >> 7 ? 255 : 0;
        found |= byte << 8 * i;
      }
      return found;
    };
  return {};
}

}  // namespace scalars

// What an instruction without memory computes; empty where it is none.
inline Scalar scalar(const std::string& name, const Modifiers& with, Approximations& approximately) {
  using namespace scalars;
  if (Scalar found = of_bits(name, with)) return found;
  const auto types = with.types();
  if (types.empty()) return {};
  const std::string& type = types.back();
  if (types.size() > 1 && name != "cvt") {  // sums in fp32 of smaller floats
    const bool half = type == "f16", multiplies = name == "fma";
    if ((name != "add" && name != "sub" && !multiplies) || types.size() != 2 || types[0] != "f32" || (!half && type != "bf16")) return {};
    Scalar one = scalar(name, with.without(type), approximately);
    auto widened = [half](Bits x) { return put(float(half ? double(get<Half>(x)) : double(get<Brain>(x)))); };
    return one ? [=](Bits a, Bits b, Bits c) { return one(widened(a), multiplies ? widened(b) : b, c); } : one;
  }
  // What would change the result, such as another rounding, is not passed over.
  const bool converts = name == "cvt";
  const std::map<std::string, int> roundings = {{"rm", FE_DOWNWARD}, {"rp", FE_UPWARD}, {"rz", FE_TOWARDZERO}};
  for (const auto& [word, mode] : roundings)
    if (with.has(word) && (type == "f32" || type == "f64") && (name == "add" || name == "sub" || name == "mul" || name == "fma")) {
      Scalar found = scalar(name, with.without(word), approximately);
      return found ? with_rounding(found, mode) : found;
    }
  if (!(converts ? with.only({"rn", "rz", "rna", "rni", "rzi", "rmi", "rpi", "sat", "relu", "ftz"})
                 : with.only({"rn", "ftz", "approx", "full", "lo", "hi", "wide", "relu", "NaN"})))
    return {};
  if (type == "pred") {
    if (name == "and") return [](Bits a, Bits b, Bits) { return a & b; };
    if (name == "or") return [](Bits a, Bits b, Bits) { return a | b; };
    if (name == "xor") return [](Bits a, Bits b, Bits) { return a ^ b; };
    if (name == "not") return [](Bits a, Bits, Bits) { return a ^ 1; };
    return {};
  }
  if (converts) {
    if (types.size() != 2 || (with.has("rz") && types[1][0] != 'f')) return {};
    if (const bool e4m3 = type == "e4m3x2"; e4m3 || type == "e5m2x2")
      return types[0] == "f16x2" ? Scalar([e4m3](Bits a, Bits, Bits) { return of_narrow_pair(a, e4m3); }) : Scalar();
    const bool pair = types[0] == "bf16x2" || types[0] == "f16x2";
    const std::string to = pair ? types[0].substr(0, types[0].size() - 2) : types[0];
    Scalar found;
    with_type(types[1], [&](auto from) {
      return with_type(to, [&](auto result) {
        found = conversion<decltype(result), decltype(from)>(with);
        return true;
      });
    });
    if (found && to == "tf32") found = [](Bits a, Bits, Bits) { return (a + 0x1000u) & 0xffffe000u; };
    if (found && pair) {
      Scalar one = found;
      found = [one](Bits high, Bits low, Bits) { return one(low, 0, 0) | one(high, 0, 0) << 16; };
    }
    return found && with.has("ftz") && types[1] == "f32" ? Scalar([found](Bits a, Bits b, Bits c) {
      return found(put(flushed(get<float>(a))), put(flushed(get<float>(b))), c);
    }) : found;
  }
  const bool pair = type.size() > 2 && type.compare(type.size() - 2, 2, "x2") == 0;
  Scalar found;
  with_type(pair ? type.substr(0, type.size() - 2) : type, [&](auto x) {
    found = arithmetic<decltype(x)>(name, with, approximately);
    return true;
  });
  if (found && with.has("ftz") && (type == "f32" || type == "f32x2")) found = with_flushes(found);
  return pair ? in_halves(found, type == "f32x2" ? 32 : 16) : found;
}

inline std::function<bool(Bits, Bits)> comparison(const Modifiers& with) {
  const auto types = with.types();
  std::function<bool(Bits, Bits)> found;
  if (!with.all.empty() && !types.empty())
    with_type(types.back(), [&](auto x) {
      found = scalars::comparison<decltype(x)>(with.all.front());
      return true;
    });
  if (found && with.has("ftz"))
    return [found](Bits a, Bits b) { return found(put(scalars::flushed(get<float>(a))), put(scalars::flushed(get<float>(b)))); };
  return found;
}

}  // namespace ptx
