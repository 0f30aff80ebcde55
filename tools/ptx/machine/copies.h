// Copies that go on behind a warp's back: cp.async of a thread, bulk copies of tensors, and the barriers that count them.

#pragma once

#include <utility>

#include "threads.h"

namespace ptx {

inline Action bind_copy(const Instruction& in, Launch& launch) {
  if (in.name != "cp" || !in.with.has("async") || in.with.has("bulk")) return {};
  if (Action found = bind_groups(in, &Warp::copies)) return found;
  if (in.with.has("wait_all"))
    return [](Warp& warp, uint32_t) {
      warp.copies.commit();
      warp.copies.wait(0);
      return true;
    };
  if (!in.with.only({"async", "ca", "cg", "shared*", "global", "L2::*"}) || !in.with.has("global") || in.operands.size() < 3) return {};
  return [&in, &launch](Warp& warp, uint32_t lanes) {
    const int bytes = int(warp.at(in.operands[2].slots[0])[0]);
    Bits from[LANES], to[LANES];
    uint32_t reading = 0;
    each_checked(lanes, [&](int lane) {
      to[lane] = shared_address(warp, in.operands[0], lane);
      from[lane] = address_of(warp, in.operands[1], lane);
      const int read = in.operands.size() > 3 ? std::min(bytes, int(warp.at(in.operands[3].slots[0])[lane])) : bytes;
      check_aligned(to[lane], bytes);
      if (read) {
        check_aligned(from[lane], bytes);
        launch.global.holding(from[lane], read);
        reading |= 1u << lane;
      }
      BlockMemory& shared = *warp.block->shared;
      Pending work;
      work.instruction = &in;
      const Bits target = to[lane], source = from[lane];
      // The copy may write from now on: what others still have to read there, or wrote without a barrier, is lost.
      const auto poison = ~static_cast<unsigned __int128>(0);
      shared.write(warp.agent, target, bytes, &poison);
      auto copy = [&warp, &launch, target, source, bytes, read] {
        uint8_t values[16] = {};
        if (read) launch.global.read(warp.agent, source, read, values);
        warp.block->shared->write(warp.agent, target, bytes, values);
        if (!launch.fences_copies) warp.block->shared->excuse(target, bytes);
      };
      const bool early = launch.early();
      if (early) copy();
      shared.begin_write(target, bytes);  // early or late, it may be read only after the wait
      work.finish = [=, &warp, &in] {
        const int line = std::exchange(warp.agent.line, in.line);
        warp.block->shared->end_write(target, bytes);
        if (!early) copy();
        warp.agent.line = line;
      };
      warp.copies.open.push_back(std::move(work));
    });
    count_request(launch.counts[in.index], Space::global, from, reading, bytes);
    count_request(launch.counts[in.index], Space::shared, to, lanes, bytes);
    return true;
  };
}

inline void complete_phase(TransactionBarrier& barrier) {
  if (barrier.pending > 0 || barrier.bytes != 0) return;
  barrier.completed = {barrier.seen, barrier.fenced};
  barrier.pending = barrier.expected;
  ++barrier.phase;
}

inline TransactionBarrier& barrier_at(Warp& warp, Bits address) {
  auto found = warp.block->transactions.find(address);
  if (found == warp.block->transactions.end()) throw Fault{"unwritten", "an mbarrier is used that nobody initialised", -1, address};
  return found->second;
}

inline void arrive(TransactionBarrier& barrier, const Clocks& seen, const Clocks& fenced, int64_t arrivals, int64_t bytes) {
  join(barrier.seen, seen);
  join(barrier.fenced, fenced);
  barrier.pending -= arrivals;
  barrier.bytes += bytes;
  complete_phase(barrier);
}

inline Action bind_transaction(const Instruction& in, Launch&) {
  if (in.name != "mbarrier") return {};
  if (in.with.has("init"))
    return [&in](Warp& warp, uint32_t lanes) {
      const int lane = __builtin_ctz(lanes);
      const Bits address = shared_address(warp, in.operands[0], lane);
      check_aligned(address, 8);
      warp.block->shared->check(address, 8);
      TransactionBarrier barrier;
      barrier.expected = barrier.pending = int64_t(warp.at(in.operands[1].slots[0])[lane]);
      barrier.seen = warp.agent.seen;
      barrier.fenced = warp.agent.fenced;
      warp.block->transactions[address] = barrier;
      return true;
    };
  if (in.with.has("inval"))
    return [&in](Warp& warp, uint32_t lanes) {
      const Bits address = shared_address(warp, in.operands[0], __builtin_ctz(lanes));
      if (!barrier_at(warp, address).copies.empty()) throw Fault{"race", "an mbarrier ends while copies to it are under way", -1, address};
      warp.block->transactions.erase(address);
      return true;
    };
  if (in.with.has("arrive") && !in.with.has("noComplete"))
    return [&in](Warp& warp, uint32_t lanes) {
      each_checked(lanes, [&](int lane) {
        TransactionBarrier& barrier = barrier_at(warp, shared_address(warp, in.operands[1], lane));
        const int64_t number = in.operands.size() > 2 ? int64_t(warp.at(in.operands[2].slots[0])[lane] & mask_of(4)) : 1;
        const bool expects = in.with.has("expect_tx");
        arrive(barrier, warp.agent.seen, warp.agent.fenced, expects ? 1 : number, expects ? number : 0);
      });
      warp.agent.tick();
      return true;
    };
  if (in.with.has("try_wait") && in.with.has("parity"))
    return [&in](Warp& warp, uint32_t lanes) {
      const int lane = __builtin_ctz(lanes);
      const Bits address = shared_address(warp, in.operands[1], lane);
      const int parity = int(warp.at(in.operands[2].slots[0])[lane] & 1);
      TransactionBarrier& barrier = barrier_at(warp, address);
      const bool complete = (barrier.phase & 1) != parity;
      each(lanes, [&](int each) { warp.of(in.operands[0].slots[0], each) = complete; });
      if (complete) {
        if (!barrier.completed.empty()) {
          join(warp.agent.seen, barrier.completed[0]);
          join(warp.agent.fenced, barrier.completed[1]);
        }
      } else {
        Block* block = warp.block;
        const int phase = barrier.phase;
        warp.ready = [block, address, phase] {
          auto found = block->transactions.find(address);
          return found == block->transactions.end() || found->second.phase != phase;
        };
      }
      return true;
    };
  return {};
}

// What a bulk copy needs to know of a tensor. The machine keeps it in the 128 bytes of a tensor map, in its own order.
struct TensorMap {
  Bits address = 0;
  uint64_t stride[4] = {};  // bytes, from the second dimension on
  uint32_t size[5] = {}, box[5] = {}, step[5] = {};
  uint8_t last = 0, kind = 0, swizzle = 0, fill = 0;  // `last`: the number of dimensions less one

  int bytes() const {
    static const int sizes[] = {1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2, 4, 4};  // as PTX numbers types: bf16 is 10
    return kind < 13 ? sizes[kind] : 0;
  }
};
static_assert(sizeof(TensorMap) <= 128);

inline Action bind_tensor_map(const Instruction& in, Launch& launch) {
  if (in.name == "fence" && in.with.has("proxy") && !in.with.has("async")) return [](Warp&, uint32_t) { return true; };
  if (in.name != "tensormap") return {};
  if (in.with.has("cp_fenceproxy"))
    return [&in, &launch](Warp& warp, uint32_t lanes) {
      const int lane = __builtin_ctz(lanes);
      uint8_t map[128];
      warp.block->shared->read(warp.agent, shared_address(warp, in.operands[1], lane), 128, map);
      launch.global.write(warp.agent, address_of(warp, in.operands[0], lane), 128, map);
      return true;
    };
  if (!in.with.has("replace")) return {};
  return [&in](Warp& warp, uint32_t lanes) {
    each_checked(lanes, [&](int lane) {
      const Bits address = shared_address(warp, in.operands[0], lane);
      BlockMemory& shared = *warp.block->shared;
      uint8_t bytes[128];
      shared.read(warp.agent, address, 128, bytes);
      TensorMap map;
      std::memcpy(&map, bytes, sizeof map);
      const bool many = in.operands.size() > 2;
      const size_t which = many ? warp.at(in.operands[1].slots[0])[lane] : 0;
      const Bits value = warp.at(in.operands[many ? 2 : 1].slots[0])[lane];
      if (which > 4) throw Fault{"out_of_bounds", text_of("dimension ", which, " of a tensor map, which has 5"), lane, address};
      if (in.with.has("global_address")) map.address = value;
      else if (in.with.has("rank")) map.last = uint8_t(value);
      else if (in.with.has("box_dim")) map.box[which] = uint32_t(value);
      else if (in.with.has("global_dim")) map.size[which] = uint32_t(value);
      else if (in.with.has("global_stride")) map.stride[std::min<size_t>(which, 3)] = value;
      else if (in.with.has("element_stride")) map.step[which] = uint32_t(value);
      else if (in.with.has("elemtype")) map.kind = uint8_t(value);
      else if (in.with.has("swizzle_mode")) map.swizzle = uint8_t(value);
      else if (in.with.has("fill_mode")) map.fill = uint8_t(value);
      else if (!in.with.has("interleave_layout")) throw Fault{"unknown_instruction", in.full()};
      std::memcpy(bytes, &map, sizeof map);
      shared.write(warp.agent, address, 128, bytes);
    });
    return true;
  };
}

// Calls `row(shared address, global address, bytes that lie inside of the tensor)` for each row of 16 bytes of a box.
template <class Row>
void each_row(const TensorMap& map, Bits start, const std::vector<int64_t>& corner, Row&& row) {
  const int width = map.bytes(), dims = map.last + 1;
  const int64_t phases = map.swizzle ? (1 << map.swizzle) - 1 : 0;
  int64_t rows = 1;
  for (int d = 1; d < dims; ++d) rows *= map.box[d];
  const int64_t row_bytes = int64_t(map.box[0]) * width;
  for (int64_t r = 0; r < rows; ++r) {
    Bits address = map.address;
    bool inside = true;
    for (int64_t d = 1, rest = r; d < dims; rest /= map.box[d++]) {
      const int64_t at = corner[d] + rest % map.box[d];
      inside = inside && at >= 0 && at < map.size[d];
      address += at * map.stride[d - 1];
    }
    for (int64_t b = 0; b < row_bytes; b += 16) {
      const int64_t first = corner[0] + b / width, left = (int64_t(map.size[0]) - first) * width;
      const Bits linear = start + r * row_bytes + b;
      const int count = int(inside && first >= 0 ? std::clamp<int64_t>(left, 0, std::min<int64_t>(16, row_bytes - b)) : 0);
      row(linear ^ (linear >> 7 & phases) << 4, address + first * width, count);
    }
  }
}

// Bulk copies of tensors. They end when a warp that waits could not go on otherwise.
inline Action bind_bulk(const Instruction& in, Launch& launch) {
  if (in.name != "cp" || !in.with.has("bulk")) return {};
  if (Action found = bind_groups(in, &Warp::bulk)) return found;
  if (!in.with.has("tensor") || !in.with.only({"async", "bulk", "tensor", "1d", "2d", "3d", "4d", "5d", "tile", "shared*", "global", "bulk_group",
                                               "mbarrier::complete_tx::bytes", "L2::*"}))
    return {};
  const bool load = in.with.has("mbarrier::complete_tx::bytes");
  if (!load && !in.with.has("bulk_group")) return {};
  return [&in, &launch, load](Warp& warp, uint32_t lanes) {
    each_checked(lanes, [&](int lane) {
      const Operand &there = in.operands[load ? 1 : 0], &here = in.operands[load ? 0 : 1];
      const Bits start = shared_address(warp, here, lane);
      check_aligned(start, 128);
      uint8_t bytes[128];
      launch.global.read(warp.agent, warp.at(there.slots[0])[lane] + there.offset, 128, bytes);
      TensorMap map;
      std::memcpy(&map, bytes, sizeof map);
      std::vector<int64_t> corner;
      for (size_t i = 1; i < there.slots.size(); ++i) corner.push_back(int32_t(warp.at(there.slots[i])[lane]));
      if (int(corner.size()) != map.last + 1 || !map.bytes())
        throw Fault{"out_of_bounds", text_of("a copy of ", corner.size(), " dimensions of a tensor map that has ", map.last + 1), lane, start};
      BlockMemory& shared = *warp.block->shared;
      Block& block = *warp.block;
      Agent engine = warp.agent;  // it sees what the warp has seen, and the copy comes after that
      engine.index = int(block.warps.size());
      engine.seen[engine.index] = ++block.copies;
      Pending work;
      work.instruction = &in;
      int64_t total = 0;
      each_row(map, start, corner, [&](Bits address, Bits, int) {
        total += 16;
        load ? shared.begin_write(address, 16) : shared.begin_read(address, 16);
      });
      Counts& counts = launch.counts[in.index];
      counts.requests += 1;
      counts.sectors += total / 32;
      counts.fewest_sectors += total / 32;
      counts.shared_bytes += total;
      counts.global_bytes += total;
      if (!load) {
        work.finish = [=, &launch, &shared] {
          each_row(map, start, corner, [&](Bits address, Bits global, int count) {
            uint8_t values[16];
            shared.read(engine, address, 16, values, true);
            shared.end_read(address, 16);
            if (count) launch.global.write(engine, global, count, values);
          });
        };
        warp.bulk.open.push_back(std::move(work));
        return;
      }
      const Bits barrier = shared_address(warp, in.operands[2], lane);
      barrier_at(warp, barrier);
      work.finish = [=, &launch, &shared, &block] {
        each_row(map, start, corner, [&](Bits address, Bits global, int count) {
          uint8_t values[16] = {};
          if (count) launch.global.read(engine, global, count, values);
          shared.end_write(address, 16);
          shared.write(engine, address, 16, values);
        });
        arrive(block.transactions.at(barrier), engine.seen, engine.fenced, 0, -total);
      };
      if (launch.early()) work.finish();
      else barrier_at(warp, barrier).copies.push_back(std::move(work));
    });
    warp.agent.tick();
    return true;
  };
}

}  // namespace ptx
