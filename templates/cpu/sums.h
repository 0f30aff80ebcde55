// Sums of lanes along rows, columns or diagonals. Rows lie `ld` apart, and there is room for W numbers before and after each.
inline void clear_beside(float* lanes, int64_t ld, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; ++r) {
    Vec(0.f).store(lanes + r * ld - W);
    Vec(0.f).store(lanes + r * ld + columns);
  }
}

// sums[r]: all of row r.
inline void sum_rows(float* lanes, int64_t ld, int64_t rows, int64_t columns, float* sums) {
  clear_beside(lanes, ld, rows, columns);
  for (int64_t r = 0; r < rows; ++r) {
    Vec sum(0.f);
    for (int64_t i = 0; i < columns; i += W) sum = sum + Vec::loadu(lanes + r * ld + i);
    sums[r] = sum_lanes(sum);
  }
}

// Adds all of column n to sums[n]. A few more are written.
inline void add_columns(const float* lanes, int64_t ld, int64_t rows, int64_t columns, float* sums) {
  constexpr int64_t FEW = 32 / W;
  for (int64_t n = 0; n < columns; n += FEW * W) {
    Vec sum[FEW];
#pragma GCC unroll 4
    for (int64_t i = 0; i < FEW; ++i) sum[i] = Vec::loadu(sums + n + i * W);
    for (int64_t r = 0; r < rows; ++r)
#pragma GCC unroll 4
      for (int64_t i = 0; i < FEW; ++i) sum[i] = sum[i] + Vec::loadu(lanes + r * ld + n + i * W);
#pragma GCC unroll 4
    for (int64_t i = 0; i < FEW; ++i) sum[i].store(sums + n + i * W);
  }
}

// Adds to sums[d] the lanes of row r and column n with rows - 1 - r + n = d.
inline void add_diagonals(float* lanes, int64_t ld, int64_t rows, int64_t columns, float* sums) {
  clear_beside(lanes, ld, rows, columns);
  constexpr int64_t FEW = 4;  // sums under way at once: one would wait for its last addition
  for (int64_t d = 0; d < rows + columns - 1; d += W) {
    const float* from = lanes + d - (rows - 1);
    int64_t r = std::max(rows - d - W, int64_t(0));
    const int64_t stop = std::min(rows, rows + columns - 1 - d);
    Vec sum[FEW];
#pragma GCC unroll 4
    for (int64_t i = 0; i < FEW; ++i) sum[i] = Vec(0.f);
    for (; r + FEW <= stop; r += FEW)
#pragma GCC unroll 4
      for (int64_t i = 0; i < FEW; ++i) sum[i] = sum[i] + Vec::loadu(from + (r + i) * (ld + 1));
    for (; r < stop; ++r) sum[0] = sum[0] + Vec::loadu(from + r * (ld + 1));
    (Vec::loadu(sums + d) + (sum[0] + sum[1] + (sum[2] + sum[3]))).store(sums + d);
  }
}
