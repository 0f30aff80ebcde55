// Instructions of tensor cores: tiles to and from shared memory, products of a warp, products that go on behind it.

#pragma once

#include <array>
#include <utility>

#include "threads.h"

namespace ptx {

// A warp's 8 x 8 matrices of 16 bits: lane l has columns 2 (l % 4) and the next of row l / 4.
inline Action bind_matrix(const Instruction& in, Launch& launch) {
  const bool load = in.name == "ldmatrix", store = in.name == "stmatrix";
  const int count = in.with.number("x");
  if ((!load && !store) || !in.with.only({"sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared*"}) || !in.with.has("m8n8") ||
      !in.with.has("b16") || !count)
    return {};
  const bool transposed = in.with.has("trans");
  return [&in, &launch, load, count, transposed](Warp& warp, uint32_t) {
    const Operand &place = in.operands[load ? 1 : 0], &values = in.operands[load ? 0 : 1];
    for (int m = 0; m < count; ++m) {
      uint16_t matrix[8][8];
      Bits addresses[LANES] = {};
      if (!load)
        for (int lane = 0; lane < LANES; ++lane)
          for (int i = 0; i < 2; ++i) {
            const int row = lane / 4, column = lane % 4 * 2 + i;
            matrix[transposed ? column : row][transposed ? row : column] = uint16_t(warp.at(values.slots[m])[lane] >> 16 * i);
          }
      each_checked(0xffu << 8 * m, [&](int lane) {
        addresses[lane] = shared_address(warp, place, lane);
        check_aligned(addresses[lane], 16);
        uint16_t* row = matrix[lane % 8];
        load ? warp.block->shared->read(warp.agent, addresses[lane], 16, row) : warp.block->shared->write(warp.agent, addresses[lane], 16, row);
      });
      count_request(launch.counts[in.index], Space::shared, addresses, 0xffu << 8 * m, 16);
      if (load)
        for (int lane = 0; lane < LANES; ++lane) {
          Bits pair = 0;
          for (int i = 0; i < 2; ++i) {
            const int row = lane / 4, column = lane % 4 * 2 + i;
            pair |= Bits(matrix[transposed ? column : row][transposed ? row : column]) << 16 * i;
          }
          warp.of(values.slots[m], lane) = pair;
        }
    }
    return true;
  };
}

// How numbers lie in registers and memory.
struct Format {
  int bytes = 0;
  double (*read)(Bits) = nullptr;
  Bits (*write)(double) = nullptr;
};

inline Format format_of(const std::string& type) {
  if (type == "f16") return {2, [](Bits x) { return double(get<Half>(x)); }, [](double x) { return put(Half(x)); }};
  if (type == "bf16") return {2, [](Bits x) { return double(get<Brain>(x)); }, [](double x) { return put(Brain(x)); }};
  if (type == "tf32") return {4, [](Bits x) { return double(get<float>(x & 0xffffe000u)); }, nullptr};
  if (type == "f32") return {4, [](Bits x) { return double(get<float>(x)); }, [](double x) { return put(float(x)); }};
  if (type == "f64") return {8, [](Bits x) { return get<double>(x); }, [](double x) { return put(x); }};
  return {};
}

// m, n and k of "m16n8k16".
inline bool shape_of(const Modifiers& with, int& m, int& n, int& k) {
  for (const auto& name : with.all)
    if (std::sscanf(name.c_str(), "m%dn%dk%d", &m, &n, &k) == 3) return true;
  return false;
}

// The number of one lane in a fragment, the `which`th of its own: its row and column. A tile of 16 rows (8 for fp64).
struct Place { int row, column; };

inline Place of_left(int lane, int which, int per_register, int rows) {
  const int quad = lane / 4, in_quad = lane % 4, reg = which / per_register, part = which % per_register;
  if (rows == 8) return {quad, in_quad + 4 * reg};
  return {quad + 8 * (reg % 2), in_quad * per_register + part + 4 * per_register * (reg / 2)};
}
inline Place of_right(int lane, int which, int per_register) {  // row is k
  const int quad = lane / 4, in_quad = lane % 4, reg = which / per_register, part = which % per_register;
  return {in_quad * per_register + part + 4 * per_register * reg, quad};
}
inline Place of_sum(int lane, int which) {  // of 8 columns; further tiles of 8 columns follow
  return {lane / 4 + 8 * (which % 4 / 2), lane % 4 * 2 + which % 2 + 8 * (which / 4)};
}

inline double element(Warp& warp, const Operand& operand, int lane, int which, const Format& format) {
  const int per_register = format.bytes == 2 ? 2 : 1;
  const Bits bits = warp.at(operand.slots[which / per_register])[lane];
  return format.read(bits >> 16 * (which % per_register) & mask_of(format.bytes));
}

inline void set_element(Warp& warp, const Operand& operand, int lane, int which, const Format& format, double x) {
  if (format.bytes != 2) {
    warp.of(operand.slots[which], lane) = format.write(x);
    return;
  }
  Bits& bits = warp.of(operand.slots[which / 2], lane);
  const int shift = 16 * (which % 2);
  bits = (bits & ~(Bits{0xffff} << shift)) | format.write(x) << shift;
}

// sum[m][n] += left[m][k] * right[k][n], as exact as doubles are.
inline void multiply(std::vector<double>& sum, const std::vector<double>& left, const std::vector<double>& right, int m, int n, int k) {
  for (int i = 0; i < m; ++i)
    for (int l = 0; l < k; ++l) {
      const double x = left[i * k + l];
      for (int j = 0; j < n; ++j) sum[i * n + j] += x * right[l * n + j];
    }
}

inline Action bind_product(const Instruction& in, Launch& launch) {
  int m = 0, n = 0, k = 0;
  if (in.name != "mma" || !in.with.only({"sync", "aligned", "m16*", "m8*", "row", "col"}) || !shape_of(in.with, m, n, k) || !in.with.has("row") || !in.with.has("col") || n != 8) return {};
  const auto types = in.with.types();
  if (types.size() != 4) return {};
  const Format result = format_of(types[0]), left = format_of(types[1]), right = format_of(types[2]), sum = format_of(types[3]);
  if (!result.bytes || !left.bytes || !right.bytes || !sum.write || left.bytes != right.bytes) return {};
  const size_t left_registers = m * k / LANES * left.bytes / std::max(4, left.bytes), right_registers = n * k / LANES * right.bytes / std::max(4, right.bytes);
  if (in.operands.size() != 4 || in.operands[1].slots.size() != left_registers || in.operands[2].slots.size() != right_registers) return {};
  return [&in, &launch, m, n, k, result, left, right, sum](Warp& warp, uint32_t) {
    std::vector<double> a(m * k), b(k * n), c(m * n);
    const int per_register = left.bytes == 2 ? 2 : 1;
    for (int lane = 0; lane < LANES; ++lane) {
      for (int i = 0; i < m * k / LANES; ++i) {
        const Place at = of_left(lane, i, per_register, m);
        a[at.row * k + at.column] = element(warp, in.operands[1], lane, i, left);
      }
      for (int i = 0; i < n * k / LANES; ++i) {
        const Place at = of_right(lane, i, per_register);
        b[at.row * n + at.column] = element(warp, in.operands[2], lane, i, right);
      }
      for (int i = 0; i < m * n / LANES; ++i) {
        const Place at = of_sum(lane, i);
        c[at.row * n + at.column] = element(warp, in.operands[3], lane, i, sum);
      }
    }
    multiply(c, a, b, m, n, k);
    for (int lane = 0; lane < LANES; ++lane)
      for (int i = 0; i < m * n / LANES; ++i) {
        const Place at = of_sum(lane, i);
        set_element(warp, in.operands[0], lane, i, result, c[at.row * n + at.column]);
      }
    launch.counts[in.index].products += int64_t(m) * n * k;
    return true;
  };
}

// A matrix in shared memory, as a descriptor of wgmma or tcgen05 tells.
struct Matrix {
  Bits start = 0;
  int64_t leading = 0, stride = 0;
  int swizzle = 0;        // bytes of the swizzled row; 16 for none
  bool rows_first = true;  // whether a row (of the dimension that is summed over) is contiguous

  static Matrix of_wgmma(Bits bits, bool transposed) {
    const int swizzles[] = {16, 128, 64, 32};
    return {(bits & 0x3fff) << 4, int64_t(bits >> 16 & 0x3fff) << 4, int64_t(bits >> 32 & 0x3fff) << 4, swizzles[bits >> 62], !transposed};
  }

  static Matrix of_tcgen05(Bits bits, bool transposed) {
    const int swizzles[] = {16, 0, 128, 0, 64, 0, 32, 0}, swizzle = swizzles[bits >> 61];
    if (!swizzle || (bits >> 46 & 0x7fff) != 1)  // version 1, no base offset, relative strides
      throw Fault{"unknown_instruction", text_of("a descriptor of shared memory of this kind: ", std::hex, bits)};
    return {(bits & 0x3fff) << 4, int64_t(bits >> 16 & 0x3fff) << 4, int64_t(bits >> 32 & 0x3fff) << 4, swizzle, !transposed};
  }

  // Of the element at `line` of m or n and `k`.
  Bits address(int line, int k, int bytes) const {
    const int in_row = swizzle / bytes, chunk = 16 / bytes;
    Bits found = start;
    if (rows_first && swizzle == 16) found += line / 8 * stride + line % 8 * 16 + k / chunk * leading + k % chunk * bytes;
    else if (rows_first) found += line / 8 * stride + line % 8 * swizzle + k * bytes;
    else if (swizzle == 16) found += line / chunk * stride + k / 8 * leading + k % 8 * 16 + line % chunk * bytes;
    else found += line / in_row * leading + k / 8 * stride + k % 8 * swizzle + line % in_row * bytes;
    const Bits phases = swizzle / 16 - 1;  // which of the bits from 7 on are mixed into those from 4 on
    return found ^ (found >> 7 & phases) << 4;
  }

  // 16-byte pieces that hold lines first..first + lines and `ks` of k.
  std::set<Bits> pieces(int first, int lines, int ks, int bytes) const {
    std::set<Bits> found;
    for (int line = first; line < first + lines; ++line)
      for (int k = 0; k < ks; ++k) found.insert(address(line, k, bytes) & ~Bits{15});
    return found;
  }

  // [lines][ks], or [ks][lines], by `fetch(address, 16 bytes)`.
  template <class Fetch>
  std::vector<double> read(Fetch&& fetch, int first, int lines, int ks, const Format& format, bool by_k = false) const {
    std::map<Bits, std::array<uint8_t, 16>> known;
    for (Bits piece : pieces(first, lines, ks, format.bytes)) fetch(piece, known[piece].data());
    std::vector<double> found(lines * ks);
    for (int line = 0; line < lines; ++line)
      for (int k = 0; k < ks; ++k) {
        const Bits at = address(first + line, k, format.bytes);
        Bits bits = 0;
        std::memcpy(&bits, &known[at & ~Bits{15}][at & 15], format.bytes);
        found[by_k ? k * lines + line : line * ks + k] = format.read(bits);
      }
    return found;
  }
};

// A warp's share of a product of four warps: 16 of 64 rows. It ends when the warp waits for it.
inline Action bind_warp_group(const Instruction& in, Launch& launch) {
  if (in.name != "wgmma") return {};
  if (in.with.has("fence"))
    return [](Warp& warp, uint32_t) {
      warp.fenced = ++warp.phase;
      return true;
    };
  if (Action found = bind_groups(in, &Warp::products)) return found;
  int m = 0, n = 0, k = 0;
  const auto types = in.with.types();
  if (!in.with.has("mma_async") || !in.with.only({"mma_async", "sync", "aligned", "m64*"}) || !shape_of(in.with, m, n, k) || types.size() != 3) return {};
  const Format sum = format_of(types[0]), left = format_of(types[1]), right = format_of(types[2]);
  const bool from_registers = in.operands[1].slots.size() > 1;
  const size_t flags = 4;  // scale-d, and the signs of both; then which are transposed
  if (!sum.write || !left.bytes || left.bytes != right.bytes || in.operands.size() < flags + 2) return {};
  return [=, &in, &launch](Warp& warp, uint32_t) {
    auto flag = [&warp, &in](size_t i) { return i < in.operands.size() ? int(warp.at(in.operands[i].slots[0])[0]) : 0; };
    const bool adds = flag(3) != 0, left_transposed = !from_registers && flag(6), right_transposed = flag(from_registers ? 6 : 7);
    const double sign = int32_t(flag(4)) * int32_t(flag(5));
    if (warp.fenced == 1) throw Fault{"race", "there is no wgmma.fence before the first product"};
    if (warp.fenced > warp.started) warp.started = ++warp.phase;
    const auto& fragments = in.operands[1].slots;
    for (int slot : in.touched) {
      // Fragments may be computed up to a group's first product: ptxas puts what the fence becomes right before it.
      const bool is_fragment = from_registers && std::count(fragments.begin(), fragments.end(), slot);
      if (warp.stamps[slot] >= (is_fragment ? warp.started : warp.fenced))
        throw Fault{"race", "a register of a product was computed after the last wgmma.fence"};
    }
    const Matrix b = Matrix::of_wgmma(warp.at(in.operands[2].slots[0])[0], right_transposed);
    const Matrix a = from_registers ? Matrix{} : Matrix::of_wgmma(warp.at(in.operands[1].slots[0])[0], left_transposed);
    const int row = warp.index % 4 * 16;
    auto held = b.pieces(0, n, k, right.bytes);
    if (!from_registers) held.merge(a.pieces(row, 16, k, left.bytes));
    BlockMemory& shared = *warp.block->shared;
    for (Bits piece : held) shared.begin_read(piece, 16);
    Pending work;
    work.instruction = &in;
    for (int slot : in.operands[0].slots) ++warp.in_flight[slot];
    const auto fragment = [=, &in, &warp] {
      std::vector<Bits> found;
      for (int slot : in.operands[1].slots)
        for (int lane = 0; from_registers && lane < LANES; ++lane) found.push_back(warp.of(slot, lane));
      return found;
    };
    const auto given = fragment();
    auto compute = [=, &in, &warp] {
      std::vector<double> c(16 * n), x(16 * k);
      auto fetch = [&warp](Bits piece, uint8_t* to) { warp.block->shared->read(warp.agent, piece, 16, to, true); };
      const auto y = b.read(fetch, 0, n, k, right, true);
      if (!from_registers) x = a.read(fetch, row, 16, k, left);
      for (int lane = 0; lane < LANES; ++lane) {
        for (int i = 0; from_registers && i < 16 * k / LANES; ++i) {
          const Place at = of_left(lane, i, left.bytes == 2 ? 2 : 1, 16);
          x[at.row * k + at.column] = element(warp, in.operands[1], lane, i, left);
        }
        for (int i = 0; adds && i < 16 * n / LANES; ++i) {
          const Place at = of_sum(lane, i);
          c[at.row * n + at.column] = element(warp, in.operands[0], lane, i, sum);
        }
      }
      for (double& value : x) value *= sign;
      multiply(c, x, y, 16, n, k);
      for (int lane = 0; lane < LANES; ++lane)
        for (int i = 0; i < 16 * n / LANES; ++i) {
          const Place at = of_sum(lane, i);
          set_element(warp, in.operands[0], lane, i, sum, c[at.row * n + at.column]);
        }
    };
    const bool early = !warp.delayed && launch.early();  // they follow each other in order
    early ? compute() : void(++warp.delayed);
    work.finish = [=, &in, &warp] {
      const int line = std::exchange(warp.agent.line, in.line);
      for (Bits piece : held) warp.block->shared->end_read(piece, 16);
      // LLVM copies a fragment before the wait, or puts the same constant there once more.
      if (fragment() != given) throw Fault{"race", "a register that a product reads has changed while it was under way"};
      for (int slot : in.operands[0].slots)
        if (!--warp.in_flight[slot]) warp.in_flight.erase(slot);
      if (!early) {
        --warp.delayed;
        compute();
      }
      warp.agent.line = line;
    };
    launch.counts[in.index].products += int64_t(16) * n * k;
    warp.products.open.push_back(std::move(work));
    return true;
  };
}

}  // namespace ptx
