// What all CPU kernels share: types, memory, work for threads, what ends a row. It is put into each kernel's own namespace,
// and vectors.h, products.h and rows.h behind it, after
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

// The logarithm of a weight whose product with a weight of 0 is 0.
inline Vec finite(Vec log) { return at::vec::maximum(log, Vec(std::numeric_limits<float>::lowest())); }

// What is subtracted from scores changes: `change` goes to the logarithms of the weights, whose exponential is `shrink`.
// `weighted` is the sum of the weights times their logarithms, `total` that of the weights before they shrink.
// The bound keeps 0 times it 0.
inline Vec moved(Vec weighted, Vec total, float change, float shrink) {
  return at::vec::fmadd(total, Vec(std::max(change, -1e30f)), weighted) * Vec(shrink);
}
inline float moved(float weighted, float total, float change, float shrink) {
  return (weighted + total * std::max(change, -1e30f)) * shrink;
}

// The entropy of a row, by such sums.
inline float entropy_of(float peak, float total, float weighted) {
  return total == 0.f ? 0.f : std::log(total) - weighted / total;
}
inline float entropy_of(float peak, float total, float weighted, float sink) {
  const float top = std::max(peak, sink);
  if (top == -INF) return 0.f;
  const float share = std::exp(peak - top), of_sink = std::exp(sink - top);
  const float all = total * share + of_sink;
  return std::log(all) - (moved(weighted, total, peak - top, share) + moved(0.f, 1.f, sink - top, of_sink)) / all;
}

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
