// Instructions of sm_100's tensor memory: to allocate it, to move it, and products that add to it behind the warps' backs.

#pragma once

#include "copies.h"
#include "tensors.h"

namespace ptx {

inline Action bind_allocation(const Instruction& in) {
  if (in.with.has("relinquish_alloc_permit"))
    return [](Warp& warp, uint32_t) {
      warp.block->tensor->open = false;
      return true;
    };
  if (in.with.has("dealloc"))
    return [&in](Warp& warp, uint32_t) {
      if (!warp.block->products.empty()) throw Fault{"race", "tensor memory is given back while products are under way"};
      warp.block->tensor->give_back(warp.agent, int(warp.at(in.operands[0].slots[0])[0]), int(warp.at(in.operands[1].slots[0])[0]));
      return true;
    };
  if (!in.with.has("alloc")) return {};
  return [&in](Warp& warp, uint32_t) {
    Block& block = *warp.block;
    const int count = int(warp.at(in.operands[1].slots[0])[0]);
    if (count < 32 || count > TensorMemory::columns || count & (count - 1))
      throw Fault{"out_of_bounds", text_of(count, " columns of tensor memory are asked for: expected a power of two from 32 to 512")};
    if (!block.tensor->open) throw Fault{"deadlock", "tensor memory is asked for after its permit was given up"};
    const int first = block.tensor->room(count);
    if (first < 0) {
      warp.ready = [&block, count] { return block.tensor->room(count) >= 0; };
      return false;
    }
    block.tensor->take(first, count);
    block.shared->write(warp.agent, shared_address(warp, in.operands[0], 0), 4, &first);
    return true;
  };
}

// Between registers and the 32 lanes that a warp has. Until its wait nobody may touch the memory that it writes, nor write what
// it reads. The registers that it loads may be read before: that alone the ISA orders by itself.
inline Action bind_tensor_copy(const Instruction& in) {
  const bool load = in.with.has("ld"), halves = in.with.has("16x32bx2");
  const int count = in.with.number("x");
  if ((!load && !in.with.has("st")) || (!halves && !in.with.has("32x32b")) || !count) return {};
  const Operand &place = in.operands[load ? 1 : 0], &values = load ? in.operands.front() : in.operands.back();
  if (int(values.slots.size()) != count || in.operands.size() != (halves ? 3 : 2)) return {};
  return [=, &in, &place, &values](Warp& warp, uint32_t lanes) {
    TensorMemory& tensor = *warp.block->tensor;
    const Bits start = shared_address(warp, place, 0);
    const int first = int(start >> 16), column = int(start & 0xffff), split = halves ? int(warp.at(in.operands[load ? 2 : 1].slots[0])[0]) : 0;
    if (first / 32 != warp.index % 4 || (first % 32 && !(halves && first % 32 == 16)))
      throw Fault{"out_of_bounds", text_of("tensor memory from lane ", first, " on is not the warp's: it has 32 lanes from ", warp.index % 4 * 32, " on"), -1, start};
    Pending work;
    work.instruction = &in;
    std::array<Bits, LANES> places;
    each_checked(lanes, [&](int lane) {
      if (shared_address(warp, place, lane) != start) throw Fault{"misaligned", "the lanes of the warp name different addresses"};
      const Bits at = places[lane] = tensor.at(first + (halves ? lane % 16 : lane), column + (halves ? lane / 16 * split : 0), count);
      std::vector<uint32_t> words(count);
      if (load) {
        tensor.memory.read(warp.agent, at, 4 * count, words.data());
        tensor.memory.begin_read(at, 4 * count);
        for (int i = 0; i < count; ++i) warp.of(values.slots[i], lane) = words[i];
      } else {
        for (int i = 0; i < count; ++i) words[i] = uint32_t(warp.at(values.slots[i])[lane]);
        tensor.memory.write(warp.agent, at, 4 * count, words.data());
        tensor.memory.begin_write(at, 4 * count);
      }
    });
    work.finish = [=, &tensor] {
      for (Bits at : places) load ? tensor.memory.end_read(at, 4 * count) : tensor.memory.end_write(at, 4 * count);
    };
    (load ? warp.tensor_loads : warp.tensor_stores).open.push_back(std::move(work));
    return true;
  };
}

// What the instruction descriptor of a product says.
struct Shape {
  int m, n, k;
  Format left, right;
  bool left_transposed, right_transposed;
  double sign;

  static Shape of(const Instruction& in, Bits bits, bool tf32) {
    const char* types[] = {"f16", "bf16", "tf32"};
    const Bits left = bits >> 7 & 7, right = bits >> 10 & 7, sum = bits >> 4 & 3, others = bits & 0xe080004f;
    const int n = int(bits >> 17 & 63) * 8, m = int(bits >> 24 & 31) * 16;
    const bool transposed[] = {(bits >> 15 & 1) != 0, (bits >> 16 & 1) != 0};
    if (others || sum != 1 || (tf32 ? left != 2 || right != 2 || transposed[0] || transposed[1] : left > 1 || right > 1) ||
        (m != 64 && m != 128) || !n || n > 256 || n % (m / 8))
      throw Fault{"unknown_instruction", text_of(in.full(), " with the instruction descriptor ", std::hex, bits)};
    return {m, n, tf32 ? 8 : 16, format_of(types[left]), format_of(types[right]), transposed[0], transposed[1], (bits >> 13 ^ bits >> 14) & 1 ? -1.0 : 1.0};
  }

  // The places of a matrix with a row for each of m. 64 rows lie in 16 lanes of each 32.
  std::vector<Bits> rows(const TensorMemory& tensor, Bits start, int columns) const {
    const int first = int(start >> 16);
    if (first % 32 != (m == 64 ? first & 16 : 0)) throw Fault{"misaligned", text_of("a matrix of ", m, " rows in tensor memory from lane ", first, " on"), -1, start};
    std::vector<Bits> found(m);
    for (int row = 0; row < m; ++row) found[row] = tensor.at(first + (m == 64 ? row / 16 * 32 + row % 16 : row), int(start & 0xffff), columns);
    return found;
  }
};

// They end in the order in which they began, when a warp that waits for their commit could not go on otherwise.
inline Action bind_tensor_product(const Instruction& in, Launch& launch) {
  const bool tf32 = in.with.has("kind::tf32");
  if (!in.with.has("mma") || tf32 == in.with.has("kind::f16") || in.operands.size() != 5) return {};
  return [&in, &launch, tf32](Warp& warp, uint32_t lanes) {
    each_checked(lanes, [&](int lane) {
      auto value = [&](size_t i) { return warp.at(in.operands[i].slots[0])[lane] + in.operands[i].offset; };
      const Shape shape = Shape::of(in, value(3) & mask_of(4), tf32);
      const bool adds = value(4), from_tensor = in.operands[1].is_address;
      Block& block = *warp.block;
      BlockMemory &shared = *block.shared, &memory = block.tensor->memory;
      const auto to = shape.rows(*block.tensor, value(0) & mask_of(4), shape.n);
      const auto from = from_tensor ? shape.rows(*block.tensor, value(1) & mask_of(4), shape.k * shape.left.bytes / 4) : std::vector<Bits>{};
      const Matrix a = from_tensor ? Matrix{} : Matrix::of_tcgen05(value(1), shape.left_transposed), b = Matrix::of_tcgen05(value(2), shape.right_transposed);
      auto held = b.pieces(0, shape.n, shape.k, shape.right.bytes);
      if (!from_tensor) held.merge(a.pieces(0, shape.m, shape.k, shape.left.bytes));

      // Checked now; what comes in between without a wait is a race with it.
      Agent engine = warp.agent;
      engine.index = block.agents() - 1;
      engine.seen[engine.index] = warp.last_product = ++block.issued;
      warp.agent.tick();
      std::array<uint8_t, 4 * TensorMemory::columns> ignored;
      for (Bits piece : held) {
        shared.read(engine, piece, 16, ignored.data(), true);
        shared.begin_read(piece, 16);
      }
      for (Bits row : from) memory.read(engine, row, shape.k * shape.left.bytes, ignored.data());
      for (Bits row : to) {
        if (adds) memory.read(engine, row, 4 * shape.n, ignored.data());
        memory.claim(engine, row, 4 * shape.n);
      }
      launch.counts[in.index].products += int64_t(shape.m) * shape.n * shape.k;

      auto finish = [=, &shared, &memory] {
        const auto [m, n, k] = std::array{shape.m, shape.n, shape.k};
        auto fetch = [&shared](Bits piece, uint8_t* bytes) { shared.peek(piece, 16, bytes); };
        std::vector<double> sum(m * n), x(m * k);
        const auto y = b.read(fetch, 0, n, k, shape.right, true);
        if (!from_tensor) x = a.read(fetch, 0, m, k, shape.left);
        std::vector<float> row(n);
        for (int i = 0; i < m; ++i) {
          for (int l = 0; from_tensor && l < k; ++l) {
            Bits bits = 0;
            memory.peek(from[i] + l * shape.left.bytes, shape.left.bytes, &bits);
            x[i * k + l] = shape.left.read(bits);
          }
          if (adds) memory.peek(to[i], 4 * n, row.data());
          std::copy(row.begin(), row.end(), &sum[i * n]);
        }
        for (double& each : x) each *= shape.sign;
        multiply(sum, x, y, m, n, k);
        for (int i = 0; i < m; ++i) {
          std::copy_n(&sum[i * n], n, row.begin());
          memory.poke(to[i], 4 * n, row.data());
        }
        for (Bits piece : held) shared.end_read(piece, 16);
      };
      block.products.push_back({&in, finish});
      if (launch.early()) block.end_products(block.issued);
    });
    return true;
  };
}

inline Action bind_tensor_memory(const Instruction& in, Launch& launch) {
  if (in.name != "tcgen05" || !in.with.only({"alloc", "dealloc", "relinquish_alloc_permit", "ld", "st", "mma", "commit", "wait::*", "fence::*", "cta_group::1",
                                            "sync", "aligned", "shared::*", "32x32b", "16x32bx2", "x*", "kind::*", "mbarrier::arrive::one"}))
    return {};
  if (in.with.has("fence::before_thread_sync") || in.with.has("fence::after_thread_sync")) return [](Warp&, uint32_t) { return true; };
  if (in.with.has("wait::ld") || in.with.has("wait::st")) {
    const auto groups = in.with.has("wait::ld") ? &Warp::tensor_loads : &Warp::tensor_stores;
    return [groups](Warp& warp, uint32_t) {
      (warp.*groups).commit();
      (warp.*groups).wait(0);
      return true;
    };
  }
  if (in.with.has("commit"))
    return [&in, &launch](Warp& warp, uint32_t lanes) {
      each_checked(lanes, [&](int lane) {
        Block& block = *warp.block;
        const Bits address = shared_address(warp, in.operands[0], lane);
        Clocks seen = warp.agent.seen;
        seen.back() = std::max(seen.back(), warp.last_product);
        Pending work{&in, [&block, address, seen, fenced = warp.agent.fenced, last = warp.last_product] {
          block.end_products(last);
          arrive(block.transactions.at(address), seen, fenced, 1, 0);
        }};
        auto& waiting = barrier_at(warp, address).copies;
        launch.early() ? work.finish() : waiting.push_back(std::move(work));
      });
      warp.agent.tick();
      return true;
    };
  if (Action found = bind_allocation(in)) return found;
  if (Action found = bind_tensor_copy(in)) return found;
  return bind_tensor_product(in, launch);
}

}  // namespace ptx
