// Instructions of threads and between threads: scalars, branches, loads and stores, atomics, shuffles, barriers.

#pragma once

#include "state.h"

namespace ptx {

using Action = std::function<bool(Warp&, uint32_t)>;

template <class Function>
void each(uint32_t lanes, Function&& function) {
  for (; lanes; lanes &= lanes - 1) function(__builtin_ctz(lanes));
}

// `function` of each lane; a fault in it gets the lane.
template <class Function>
void each_checked(uint32_t lanes, Function&& function) {
  each(lanes, [&](int lane) {
    try {
      function(lane);
    } catch (Fault& fault) {
      if (fault.lane < 0) fault.lane = lane;
      throw;
    }
  });
}

inline Bits mask_of(int bytes) { return bytes >= 8 ? ~Bits{0} : (Bits{1} << 8 * bytes) - 1; }

inline Bits address_of(Warp& warp, const Operand& operand, int lane) {
  const Bits start = operand.slots.empty() ? 0 : warp.at(operand.slots[0])[lane];
  return start + operand.offset;
}

// Shared addresses have 32 bits.
inline Bits shared_address(Warp& warp, const Operand& operand, int lane) { return address_of(warp, operand, lane) & mask_of(4); }

enum class Space { parameter, shared, global };

inline Space space_of(const Modifiers& with) {
  if (with.has("param")) return Space::parameter;
  if (with.has("shared") || with.has("shared::cta") || with.has("shared::cluster")) return Space::shared;
  return Space::global;
}

// The counts of one request: sectors of global memory, wavefronts of shared memory.
inline void count_request(Counts& counts, Space space, const Bits* addresses, uint32_t lanes, int bytes) {
  const int lanes_at_once = std::max(1, std::min(LANES, 128 / bytes));
  if (space == Space::global) {
    std::set<Bits> sectors, distinct;
    each(lanes, [&](int lane) {
      distinct.insert(addresses[lane]);
      for (Bits a = addresses[lane] / 32; a <= (addresses[lane] + bytes - 1) / 32; ++a) sectors.insert(a);
    });
    counts.requests += lanes != 0;
    counts.sectors += sectors.size();
    counts.fewest_sectors += (distinct.size() * bytes + 31) / 32;
    counts.global_bytes += int64_t(__builtin_popcount(lanes)) * bytes;
  } else if (space == Space::shared) {
    for (int first = 0; first < LANES; first += lanes_at_once) {
      std::set<Bits> words;
      for (int lane = first; lane < first + lanes_at_once; ++lane)
        if (lanes >> lane & 1)
          for (Bits word = addresses[lane] / 4; word <= (addresses[lane] + bytes - 1) / 4; ++word) words.insert(word);
      int in_bank[32] = {}, most = 0;
      for (Bits word : words) most = std::max(most, ++in_bank[word % 32]);
      counts.wavefronts += most;
      counts.fewest_wavefronts += words.empty() ? 0 : (words.size() + 31) / 32;
    }
    counts.shared_bytes += int64_t(__builtin_popcount(lanes)) * bytes;
  }
}

// Instructions that end a group of work, or wait until only so many groups are left.
inline Action bind_groups(const Instruction& in, Groups Warp::*groups) {
  if (in.with.has("commit_group"))
    return [groups](Warp& warp, uint32_t) {
      (warp.*groups).commit();
      return true;
    };
  if (in.with.has("wait_group"))
    return [&in, groups](Warp& warp, uint32_t) {
      (warp.*groups).wait(warp.at(in.operands[0].slots[0])[0]);
      return true;
    };
  return {};
}

inline Action bind_scalar(const Instruction& in, Launch& launch) {
  const auto& operands = in.operands;
  if (in.name == "setp" || in.name == "set") {
    auto compare = comparison(in.with);
    if (!compare || in.name == "set" || operands.size() < 3) return {};
    const int join = in.with.has("and") ? 1 : in.with.has("or") ? 2 : in.with.has("xor") ? 3 : 0;
    return [&in, compare, join](Warp& warp, uint32_t lanes) {
      Bits *p = warp.at(in.operands[0].slots[0]), *a = warp.at(in.operands[1].slots[0]), *b = warp.at(in.operands[2].slots[0]);
      Bits* other = in.operands.size() > 3 ? warp.at(in.operands[3].slots[0]) : nullptr;
      Bits* q = in.operands[0].slots.size() > 1 ? warp.at(in.operands[0].slots[1]) : nullptr;
      each(lanes, [&](int lane) {
        const bool found = compare(a[lane], b[lane]), with = other && other[lane];
        auto joined = [&](bool x) { return join == 1 ? x && with : join == 2 ? x || with : join == 3 ? x != with : x; };
        p[lane] = joined(found);
        if (q) q[lane] = joined(!found);
      });
      return true;
    };
  }
  if (in.name == "mov" && operands.size() == 2 && (operands[0].slots.size() > 1 || operands[1].slots.size() > 1)) {
    const int bytes = bytes_of(in.with.all.back());
    return [&in, bytes](Warp& warp, uint32_t lanes) {  // packs or unpacks
      const auto &to = in.operands[0].slots, &from = in.operands[1].slots;
      const int part = 8 * bytes / int(std::max(to.size(), from.size()));
      each(lanes, [&](int lane) {
        Bits whole = 0;
        for (size_t i = 0; i < from.size(); ++i) whole |= (warp.at(from[i])[lane] & mask_of(from.size() == 1 ? bytes : part / 8)) << part * i;
        for (size_t i = 0; i < to.size(); ++i)
          warp.of(to[i], lane) = to.size() == 1 ? whole : whole >> part * i & mask_of(part / 8);
      });
      return true;
    };
  }
  if (in.name == "lop3" && in.with.all.size() == 1 && operands.size() == 5) {  // by a table of what three bits give
    return [&in](Warp& warp, uint32_t lanes) {
      auto of = [&](int i) { return warp.at(in.operands[i].slots[0]); };
      each(lanes, [&](int lane) {
        Bits found = 0;
        for (int i = 0; i < 8; ++i)
          if (of(4)[lane] >> i & 1) found |= (i & 4 ? of(1)[lane] : ~of(1)[lane]) & (i & 2 ? of(2)[lane] : ~of(2)[lane]) & (i & 1 ? of(3)[lane] : ~of(3)[lane]);
        of(0)[lane] = found & 0xffffffffu;
      });
      return true;
    };
  }
  if (in.name == "bfi" && operands.size() == 5) {  // bits of the first value into the second one
    return [&in, width = bytes_of(in.with.all.back())](Warp& warp, uint32_t lanes) {
      auto of = [&](int i) { return warp.at(in.operands[i].slots[0]); };
      each(lanes, [&](int lane) {
        const unsigned first = of(3)[lane] & 255, count = of(4)[lane] & 255;
        const Bits field = first > 63 ? 0 : (count > 63 ? ~Bits(0) : (Bits(1) << count) - 1) << first & mask_of(width);
        of(0)[lane] = (of(2)[lane] & ~field) | (first > 63 ? 0 : of(1)[lane] << first & field);
      });
      return true;
    };
  }
  Scalar compute = scalar(in.name, in.with, launch.approximately);
  if (!compute || operands.empty() || operands[0].slots.empty()) return {};
  if ((in.name == "max" || in.name == "min") && operands.size() == 4)  // of three
    compute = [compute](Bits a, Bits b, Bits c) { return compute(compute(a, b, 0), c, 0); };
  return [&in, compute](Warp& warp, uint32_t lanes) {
    static Bits nothing[LANES];
    Bits* to = warp.at(in.operands[0].slots[0]);
    Bits* from[3];
    for (size_t i = 0; i < 3; ++i) from[i] = i + 1 < in.operands.size() ? warp.at(in.operands[i + 1].slots[0]) : nothing;
    each(lanes, [&](int lane) { to[lane] = compute(from[0][lane], from[1][lane], from[2][lane]); });
    return true;
  };
}

inline Action bind_branch(const Instruction& in, Launch&) {
  if (in.name == "bra") {
    return [&in](Warp& warp, uint32_t lanes) {
      each(lanes, [&](int lane) { warp.counters[lane] = in.target; });
      return true;
    };
  }
  if (in.name == "ret" || in.name == "exit") {
    return [](Warp& warp, uint32_t lanes) {
      warp.live &= ~lanes;
      if (!warp.live) {
        warp.copies.wait(0);
        warp.bulk.commit();
        warp.bulk.wait(0);
        if (!warp.products.committed.empty() || !warp.products.open.empty())
          throw Fault{"race", "the kernel ends while products are under way"};
      }
      return true;
    };
  }
  // No effect on what is computed.
  for (const char* start : {"setmaxnreg", "griddepcontrol", "prefetch", "nanosleep", "membar", "fence.acq_rel", "fence.sc", "fence.mbarrier_init", "pragma", "applypriority", "createpolicy"})
    if (in.is(start)) return [](Warp&, uint32_t) { return true; };
  if (in.name == "trap") return [](Warp&, uint32_t) -> bool { throw Fault{"out_of_bounds", "the kernel trapped: an assertion of its own failed"}; };
  return {};
}

inline Action bind_memory(const Instruction& in, Launch& launch) {
  const bool load = in.name == "ld", store = in.name == "st";
  if ((!load && !store) || !in.with.only({"param", "shared*", "global", "v2", "v4", "v8", "nc", "volatile", "relaxed", "acquire", "release", "weak",
                                          "cta", "gpu", "sys", "ca", "cg", "cs", "cv", "lu", "wb", "wt", "L1::*", "L2::*"}))
    return {};
  const auto types = in.with.types();
  if (types.empty()) return {};
  const int width = bytes_of(types.back()), count = std::max(1, in.with.number("v"));
  const bool is_signed = types.back()[0] == 's';
  const Space space = space_of(in.with);
  if (space == Space::parameter) {
    if (!load) return {};
    return [&in, &launch, width, count](Warp& warp, uint32_t lanes) {
      for (int i = 0; i < count; ++i) {
        Bits value = 0;
        std::memcpy(&value, &launch.parameters.at(in.operands[1].offset + i * width), width);
        each(lanes, [&](int lane) { warp.of(in.operands[0].slots[i], lane) = value; });
      }
      return true;
    };
  }
  return [&in, &launch, width, count, load, is_signed, space](Warp& warp, uint32_t lanes) {
    Bits addresses[LANES];
    const Operand &place = in.operands[load ? 1 : 0], &values = in.operands[load ? 0 : 1];
    std::optional<Fault> doubt;
    each_checked(lanes, [&](int lane) {
      const Bits address = addresses[lane] = space == Space::shared ? shared_address(warp, place, lane) : address_of(warp, place, lane);
      uint8_t bytes[64];
      check_aligned(address, width * count);
      if (!load)
        for (int i = 0; i < count; ++i) std::memcpy(bytes + i * width, &warp.at(values.slots[i])[lane], width);
      if (space == Space::shared)
        load ? warp.block->shared->read(warp.agent, address, width * count, bytes)
             : warp.block->shared->write(warp.agent, address, width * count, bytes);
      else
        load ? launch.global.read(warp.agent, address, width * count, bytes, &doubt)
             : launch.global.write(warp.agent, address, width * count, bytes);
      if (doubt && !doubt->line) doubt->lane = lane, doubt->line = in.line;
      if (!load) return;
      for (int i = 0; i < count; ++i) {
        Bits value = 0;
        std::memcpy(&value, bytes + i * width, width);
        if (is_signed && width < 8 && value >> (8 * width - 1)) value |= ~mask_of(width) & mask_of(width < 4 ? 4 : 8);
        warp.of(values.slots[i], lane) = value;
      }
    });
    if (doubt)
      for (int slot : in.results) warp.doubts[slot] = *doubt;
    count_request(launch.counts[in.index], space, addresses, lanes, width * count);
    return true;
  };
}

inline Action bind_atomic(const Instruction& in, Launch& launch) {
  if ((in.name != "atom" && in.name != "red") ||
      !in.with.only({"add", "min", "max", "and", "or", "xor", "exch", "cas", "global", "shared*", "relaxed", "acquire", "release", "acq_rel", "cta",
                     "gpu", "sys", "v2", "v4", "noftz", "L2::*"}))
    return {};
  const bool result = in.name == "atom";
  const auto types = in.with.types();
  std::string operation;
  for (const char* name : {"add", "min", "max", "and", "or", "xor", "exch", "cas"})
    if (in.with.has(name)) operation = name;
  if (types.empty() || operation.empty()) return {};
  const std::string& type = types.back();
  const int width = bytes_of(type), count = std::max(1, in.with.number("v"));
  Scalar combine;
  if (operation == "exch") combine = [](Bits, Bits value, Bits) { return value; };
  else if (operation == "cas") combine = [](Bits old, Bits expected, Bits value) { return old == expected ? value : old; };
  else combine = scalar(operation, Modifiers{{type}}, launch.approximately);
  if (!combine) return {};
  const bool acquires = in.with.has("acquire") || in.with.has("acq_rel"), releases = in.with.has("release") || in.with.has("acq_rel");
  const Space space = space_of(in.with);
  return [&in, &launch, result, width, count, combine, acquires, releases, space](Warp& warp, uint32_t lanes) {
    Bits addresses[LANES];
    const Operand &place = in.operands[result ? 1 : 0], &values = in.operands[result ? 2 : 1];
    const Operand* third = in.operands.size() > (result ? 3u : 2u) ? &in.operands[result ? 3 : 2] : nullptr;
    each_checked(lanes, [&](int lane) {
      addresses[lane] = space == Space::shared ? shared_address(warp, place, lane) : address_of(warp, place, lane);
      check_aligned(addresses[lane], width * count);
      for (int i = 0; i < count; ++i) {
        const Bits address = addresses[lane] + i * width, value = warp.at(values.slots[i])[lane];
        const Bits other = third ? warp.at(third->slots[0])[lane] : 0;
        auto change = [&](Bits old) { return combine(old, value, other); };
        if (space == Space::global && (acquires || releases)) {
          auto& released = launch.released[address];
          if (releases) {
            released.insert(warp.block->number);
            released.insert(warp.agent.blocks.begin(), warp.agent.blocks.end());
          }
          if (acquires)
            for (Warp& each : warp.block->warps) each.agent.blocks.insert(released.begin(), released.end());
        }
        const Bits old = space == Space::shared ? warp.block->shared->exchange(warp.agent, address, width, change)
                                                : launch.global.exchange(warp.agent, address, width, change);
        if (result && in.operands[0].slots.size() > size_t(i)) warp.of(in.operands[0].slots[i], lane) = old;
      }
    });
    count_request(launch.counts[in.index], space, addresses, lanes, width * count);
    return true;
  };
}

inline Action bind_exchange(const Instruction& in, Launch&) {
  if (in.name == "shfl") {
    const int mode = in.with.has("bfly") ? 0 : in.with.has("idx") ? 1 : in.with.has("up") ? 2 : in.with.has("down") ? 3 : -1;
    if (mode < 0 || !in.with.has("sync")) return {};
    return [&in, mode](Warp& warp, uint32_t lanes) {
      require_all(warp, lanes, in);
      Bits before[LANES];
      std::copy_n(warp.at(in.operands[1].slots[0]), LANES, before);
      Bits* by = warp.at(in.operands[2].slots[0]);
      Bits* control = warp.at(in.operands[3].slots[0]);
      each(lanes, [&](int lane) {
        const int clamp = control[lane] & 31, segments = control[lane] >> 8 & 31, b = by[lane] & 31;
        const int low = lane & segments, high = low | (clamp & ~segments);
        const int from = mode == 0 ? lane ^ b : mode == 1 ? low | (b & ~segments) : mode == 2 ? lane - b : lane + b;
        const bool inside = mode == 2 ? from >= high : from <= high;
        warp.of(in.operands[0].slots[0], lane) = before[inside ? from : lane];
        if (in.operands[0].slots.size() > 1) warp.of(in.operands[0].slots[1], lane) = inside;
      });
      return true;
    };
  }
  if (in.name == "vote" || in.name == "elect" || in.name == "activemask") {
    const bool ballot = in.with.has("ballot"), any = in.with.has("any"), every = in.with.has("all"), uni = in.with.has("uni");
    if (in.name == "elect")
      return [&in](Warp& warp, uint32_t lanes) {
        const int chosen = __builtin_ctz(lanes);
        each(lanes, [&](int lane) {
          const auto& to = in.operands[0].slots;
          if (to.size() > 1) warp.of(to[0], lane) = chosen;
          warp.of(to.back(), lane) = lane == chosen;
        });
        return true;
      };
    if (in.name == "activemask")
      return [&in](Warp& warp, uint32_t lanes) {
        each(lanes, [&](int lane) { warp.of(in.operands[0].slots[0], lane) = lanes; });
        return true;
      };
    if (in.name == "vote" && (ballot || any || every || uni))
      return [=, &in](Warp& warp, uint32_t lanes) {
        require_all(warp, lanes, in);
        Bits* p = warp.at(in.operands[1].slots[0]);
        uint32_t set = 0;
        each(lanes, [&](int lane) { set |= uint32_t(p[lane] != 0) << lane; });
        const Bits found = ballot ? set : any ? set != 0 : every ? set == lanes : set == 0 || set == lanes;
        each(lanes, [&](int lane) { warp.of(in.operands[0].slots[0], lane) = found; });
        return true;
      };
  }
  if (in.name == "redux") {
    std::string operation;
    for (const char* name : {"add", "min", "max", "and", "or", "xor"})
      if (in.with.has(name)) operation = name;
    Approximations exact;
    Scalar combine = operation.empty() ? Scalar{} : scalar(operation, Modifiers{{in.with.all.back()}}, exact);
    if (!combine) return {};
    return [&in, combine](Warp& warp, uint32_t lanes) {
      require_all(warp, lanes, in);
      Bits* from = warp.at(in.operands[1].slots[0]);
      Bits found = from[__builtin_ctz(lanes)];
      each(lanes & (lanes - 1), [&](int lane) { found = combine(found, from[lane], 0); });
      each(lanes, [&](int lane) { warp.of(in.operands[0].slots[0], lane) = found; });
      return true;
    };
  }
  return {};
}

// Those who wait see what all who arrived have seen.
inline void meet(Block& block, const Barrier& barrier) {
  Clocks seen(block.warps[0].agent.seen.size()), fenced(seen.size());
  for (int i : barrier.arrived) {
    join(seen, block.warps[i].agent.seen);
    join(fenced, block.warps[i].agent.fenced);
  }
  for (int i : barrier.arrived) {
    Agent& agent = block.warps[i].agent;
    if (barrier.waiting.count(i)) {
      join(agent.seen, seen);
      join(agent.fenced, fenced);
    }
    agent.tick();
  }
}

inline Action bind_barrier(const Instruction& in, Launch& launch) {
  if (in.is("bar.warp.sync")) return [](Warp&, uint32_t) { return true; };
  if (in.is("fence.proxy.async"))
    return [](Warp& warp, uint32_t) {
      warp.agent.fenced = warp.agent.seen;
      return true;
    };
  if ((in.name != "bar" && in.name != "barrier") || !in.with.only({"cta", "sync", "arrive", "aligned"})) return {};
  const bool arrives = in.with.has("arrive");
  if (!arrives && !in.with.has("sync")) return {};
  return [&in, &launch, arrives](Warp& warp, uint32_t lanes) {
    require_all(warp, lanes, in);
    const int lane = __builtin_ctz(lanes);
    const int id = int(warp.at(in.operands[0].slots[0])[lane]);
    const int threads = in.operands.size() > 1 ? int(warp.at(in.operands[1].slots[0])[lane]) : launch.threads;
    Barrier& barrier = warp.block->barriers[id];
    barrier.arrived.insert(warp.index);
    if (!arrives) barrier.waiting.insert(warp.index);
    const int generation = barrier.generation;
    if (int(barrier.arrived.size()) * LANES >= threads) {
      meet(*warp.block, barrier);
      barrier.arrived.clear();
      barrier.waiting.clear();
      ++barrier.generation;
    } else if (!arrives) {
      Block* block = warp.block;
      warp.ready = [block, id, generation] { return block->barriers[id].generation != generation; };
    }
    return true;
  };
}

}  // namespace ptx
