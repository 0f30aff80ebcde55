// Memory that knows who wrote each byte, and when.
//
// Time is counted by agents: the warps of a block, and behind them two that work on their own: one copies, one
// multiplies. What an agent has seen of another is a clock; a barrier makes those who meet there see what the others did. A byte that another agent
// wrote after the clock that the reader has seen of it is a race, in whatever order the two came to run.

#pragma once

#include "values.h"

namespace ptx {

struct Fault {
  std::string kind, text;
  int lane = -1;
  Bits address = 0;
  int line = 0;  // if not the one that is executed
};

template <class... Parts>
std::string text_of(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

using Clocks = std::vector<uint32_t>;

inline void join(Clocks& into, const Clocks& other) {
  for (size_t i = 0; i < into.size(); ++i) into[i] = std::max(into[i], other[i]);
}

struct Agent {
  int block = 0, index = 0, line = 0;  // the line that it executes
  Clocks seen;                         // of every agent of the block
  Clocks fenced;                       // the part of it that the async proxy sees too
  std::set<int> blocks;                // that it has acquired from
  uint32_t now() const { return seen[index]; }
  void tick() { ++seen[index]; }
};

inline void check_aligned(Bits address, int bytes) {
  if (address % bytes) throw Fault{"misaligned", text_of("an access of ", bytes, " bytes must be at a multiple of it"), -1, address};
}

// A block's own: shared memory, and tensor memory where there is one.
class BlockMemory {
 public:
  static constexpr Bits base = 1024;  // so that 0 is nobody's, and swizzles keep their phase
  bool poison = false;  // whether what nobody wrote may be read: it is NaN

  BlockMemory(std::string kind, int64_t size, int agents, int64_t row = 0)
      : kind_(std::move(kind)), row_(row), size_(size), agents_(agents), bytes_(size, 0xff), writes_(size), reads_(size * agents), incoming_(size), outgoing_(size) {}

  void check(Bits address, int64_t count) const {
    if (address < base || address + count > base + size_)
      throw Fault{"out_of_bounds", text_of(count, " bytes of ", kind_, ", which has ", size_, " from ", base, " on"), -1, address};
  }

  void read(const Agent& agent, Bits address, int count, void* to, bool async_proxy = false) {
    check(address, count);
    const int64_t first = address - base;
    for (int64_t i = first; i < first + count; ++i) {
      const Write& last = writes_[i];
      if (incoming_[i]) throw race(i, "is read while a copy to it is under way");
      if (!last.clock && !poison) throw Fault{"unwritten", kind_ + " is read that nobody wrote", -1, shown(i)};
      if (last.clock > agent.seen[last.agent])
        throw race(i, text_of("is read without a barrier after ", written(last)));
      if (async_proxy && !last.excused && last.agent < warps() && last.clock > agent.fenced[last.agent])
        throw race(i, text_of("is read by the async proxy without its fence after ", written(last)));
      reads_[i * agents_ + agent.index] = agent.now();
    }
    std::memcpy(to, &bytes_[first], count);
  }

  void write(const Agent& agent, Bits address, int count, const void* from) {
    claim(agent, address, count, static_cast<const uint8_t*>(from));
    poke(address, count, from);
  }

  // The checks of a write, now or later. Without `from` it may change every byte.
  void claim(const Agent& agent, Bits address, int64_t count, const uint8_t* from = nullptr) {
    check(address, count);
    const int64_t first = address - base;
    for (int64_t i = first; i < first + count; ++i) {
      const Write& last = writes_[i];
      // Warps that hold the same numbers also write them twice, into tensor memory (which has rows) at the same time.
      const bool same = from && bytes_[i] == from[i - first];
      if (incoming_[i] && !(row_ && same)) throw race(i, "is written while a copy to it is under way");
      if (outgoing_[i]) throw race(i, "is written while a read of it is under way");
      if (!same && last.clock > agent.seen[last.agent])
        throw race(i, text_of("is written without a barrier after ", written(last)));
      for (int other = 0; other < agents_; ++other)
        if (reads_[i * agents_ + other] > agent.seen[other])
          throw race(i, text_of("is written without a barrier after ", name(other), " read it"));
      writes_[i] = {agent.now(), agent.line, agent.index};
    }
  }

  // Of what was checked before.
  void peek(Bits address, int count, void* to) const { std::memcpy(to, &bytes_[address - base], count); }
  void poke(Bits address, int count, const void* from) { std::memcpy(&bytes_[address - base], from, count); }

  // As if it were new.
  void forget(Bits address, int64_t count) {
    const int64_t first = address - base;
    std::fill_n(&bytes_[first], count, 0xff);
    std::fill_n(&writes_[first], count, Write{});
  }

  // Atomic instructions: they may meet.
  Bits exchange(const Agent& agent, Bits address, int count, const std::function<Bits(Bits)>& change) {
    check(address, count);
    Bits old = 0;
    std::memcpy(&old, &bytes_[address - base], count);
    const Bits changed = change(old);
    std::memcpy(&bytes_[address - base], &changed, count);
    for (int64_t i = address - base; i < int64_t(address - base) + count; ++i) writes_[i] = {agent.now(), agent.line, agent.index};
    return old;
  }

  // What was written needs no fence of the async proxy.
  void excuse(Bits address, int64_t count) {
    for (int64_t i = address - base; i < int64_t(address - base) + count; ++i) writes_[i].excused = true;
  }

  // Between a copy's start and its end nobody may touch what it writes, nor write what it reads.
  void begin_write(Bits address, int64_t count) {
    check(address, count);
    for (int64_t i = address - base; i < int64_t(address - base) + count; ++i)
      if (outgoing_[i]) throw race(i, "is to be written while a read of it is under way");
    mark(incoming_, address, count, 1);
  }
  void end_write(Bits address, int64_t count) { mark(incoming_, address, count, -1); }
  void begin_read(Bits address, int64_t count) { check(address, count); mark(outgoing_, address, count, 1); }
  void end_read(Bits address, int64_t count) { mark(outgoing_, address, count, -1); }

 private:
  struct Write { uint32_t clock = 0; int line = 0, agent = 0; bool excused = false; };

  int warps() const { return agents_ - 2; }
  std::string name(int agent) const {
    return agent < warps() ? text_of("warp ", agent) : agent == warps() ? "an asynchronous copy" : "a product";
  }
  Bits shown(int64_t at) const { return row_ ? Bits(at / row_) << 16 | at % row_ / 4 : base + at; }
  std::string written(const Write& last) const { return text_of(name(last.agent), " wrote it in line ", last.line); }
  Fault race(int64_t at, const std::string& what) const { return {"race", kind_ + " " + what, -1, shown(at)}; }
  void mark(std::vector<uint16_t>& counts, Bits address, int64_t count, int by) {
    for (int64_t i = address - base; i < int64_t(address - base) + count; ++i) counts[i] += by;
  }

  std::string kind_;
  int64_t row_;  // bytes of a row, where addresses name rows and columns
  int64_t size_;
  int agents_;
  std::vector<uint8_t> bytes_;
  std::vector<Write> writes_;
  std::vector<uint32_t> reads_;  // by byte and agent: its clock when it last read
  std::vector<uint16_t> incoming_, outgoing_;
};

// Tensor memory: lanes of columns of 32 bits. A block allocates columns.
class TensorMemory {
 public:
  static constexpr int lanes = 128, columns = 512;
  BlockMemory memory;
  bool open = true;  // to further allocations

  explicit TensorMemory(int agents) : memory("tensor memory", lanes * columns * 4, agents, columns * 4) {}

  // Where so many columns are free; negative if they are nowhere.
  int room(int count) const {
    for (int first = 0; first + count <= columns; first += count)
      if (std::none_of(taken_ + first, taken_ + first + count, [](bool taken) { return taken; })) return first;
    return -1;
  }
  void take(int first, int count) { std::fill_n(taken_ + first, count, true); }
  void give_back(const Agent& agent, int first, int count) {
    for (int lane = 0; lane < lanes; ++lane) {
      const Bits place = at(lane, first, count);
      memory.claim(agent, place, 4 * count);
      memory.forget(place, 4 * count);
    }
    std::fill_n(taken_ + first, count, false);
  }
  bool is_empty() const { return room(columns) == 0; }

  // The place in `memory` of so many columns of a lane.
  Bits at(int lane, int column, int count) const {
    if (lane >= lanes || column + count > columns || !std::all_of(taken_ + column, taken_ + column + count, [](bool taken) { return taken; }))
      throw Fault{"out_of_bounds", text_of(count, " columns of tensor memory from ", column, " on that the block did not allocate"), -1, Bits(lane) << 16 | column};
    return BlockMemory::base + (int64_t(lane) * columns + column) * 4;
  }

 private:
  bool taken_[columns] = {};
};

// A tensor that the kernel was given.
struct Allocation {
  struct Write { uint32_t clock = 0; int line = 0, block = -1; int16_t warp = 0; bool atomic = false; };

  Bits first = 0;
  int64_t size = 0;
  bool written = true;  // before the launch
  std::vector<Write> writes;
};

class Global {
 public:
  std::vector<Allocation> allocations;  // in the order of their addresses

  // With `doubt` a read that the block's own writes race with is noted there.
  void read(const Agent& agent, Bits address, int count, void* to, std::optional<Fault>* doubt = nullptr) {
    Allocation& found = holding(address, count);
    for (int64_t i = address - found.first, end = i + count; i < end; ++i) {
      const auto& last = found.writes[i];
      if (last.block < 0) {
        if (!found.written) throw Fault{"unwritten", "global memory is read that nobody wrote", -1, found.first + i};
      } else {
        try {
          check_order(agent, last, found.first + i, "read");
        } catch (Fault& fault) {
          if (!doubt || last.block != agent.block) throw;
          if (!*doubt) *doubt = fault;
        }
      }
    }
    std::memcpy(to, reinterpret_cast<void*>(address), count);
  }

  void write(const Agent& agent, Bits address, int count, const void* from) {
    record(agent, address, count, false, static_cast<const uint8_t*>(from));
    std::memcpy(reinterpret_cast<void*>(address), from, count);
  }

  Bits exchange(const Agent& agent, Bits address, int count, const std::function<Bits(Bits)>& change) {
    const Allocation& found = holding(address, count);
    if (!found.written && found.writes[address - found.first].block < 0)
      throw Fault{"unwritten", "an atomic instruction changes global memory that nobody wrote", -1, address};
    record(agent, address, count, true);
    Bits old = 0;
    std::memcpy(&old, reinterpret_cast<void*>(address), count);
    const Bits changed = change(old);
    std::memcpy(reinterpret_cast<void*>(address), &changed, count);
    return old;
  }

  Allocation& holding(Bits address, int64_t count) {
    auto after = std::upper_bound(allocations.begin(), allocations.end(), address,
                                  [](Bits x, const Allocation& a) { return x < a.first; });
    if (after != allocations.begin()) {
      Allocation& found = *std::prev(after);
      if (address + count <= found.first + found.size) return found;
    }
    throw Fault{"out_of_bounds", text_of(count, " bytes of global memory, of no tensor that was given", nearest(address)), -1, address};
  }

 private:
  std::string nearest(Bits address) const {
    int64_t best = INT64_MAX;
    std::string found;
    for (const auto& a : allocations) {
      const int64_t before = a.first - address, behind = address - (a.first + a.size);
      const int64_t distance = before > 0 ? before : behind;
      if (distance >= best) continue;
      best = distance;
      found = text_of("; ", distance, before > 0 ? " bytes before" : " bytes behind", " one of ", a.size);
    }
    return found;
  }

  static void check_order(const Agent& agent, const Allocation::Write& last, Bits address, const char* how) {
    const bool other_block = last.block != agent.block;
    if (other_block ? last.atomic || agent.blocks.count(last.block) : last.clock <= agent.seen[last.warp]) return;
    throw Fault{"race", text_of("global memory is ", how, other_block ? " by two blocks" : " without a barrier", ": warp ", last.warp,
                                " of block ", last.block, " wrote it in line ", last.line), -1, address};
  }

  void record(const Agent& agent, Bits address, int count, bool atomic, const uint8_t* values = nullptr) {
    Allocation& found = holding(address, count);
    for (int64_t i = address - found.first, end = i + count; i < end; ++i) {
      auto& last = found.writes[i];
      const bool same = values && last.block == agent.block && *reinterpret_cast<uint8_t*>(found.first + i) == values[count - (end - i)];
      if (last.block >= 0 && !(atomic && last.atomic) && !same) {
        auto strict = last;
        if (!atomic) strict.atomic = false;
        check_order(agent, strict, found.first + i, "written");
      }
      last = {agent.now(), agent.line, agent.block, int16_t(agent.index), atomic};
    }
  }
};

}  // namespace ptx
