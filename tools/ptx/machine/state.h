// A launch and what runs in it: blocks of warps with their registers, barriers, and copies under way.

#pragma once

#include <deque>
#include <memory>
#include <random>

#include "memory.h"

namespace ptx {

constexpr int LANES = 32;
constexpr uint32_t ALL = 0xffffffffu;

struct Operand {
  std::vector<int> slots;  // of registers; of constants below 0
  int64_t offset = 0;      // of an address
  bool is_address = false;
};

struct Warp;
struct Block;
struct Launch;

struct Instruction {
  int index = 0, line = 0;
  std::string name;
  Modifiers with;
  int guard = 0;  // the slot of its predicate
  bool guarded = false, negated = false;
  bool aligned = false;  // all lanes execute it together
  std::vector<Operand> operands;
  int target = -1;  // of a branch

  // Executes it for the lanes; false if the warp has to wait and come back.
  std::function<bool(Warp&, uint32_t)> execute;
  std::vector<int> touched, results;  // registers
  bool copies = false;                // of registers to others
  bool computes = false;              // registers from others, and nothing else

  bool is(const std::string& start) const { return full().rfind(start, 0) == 0; }
  std::string full() const {
    std::string found = name;
    for (const auto& part : with.all) found += "." + part;
    return found;
  }
};

// What an instruction did in all.
struct Counts {
  int64_t warps = 0, lanes = 0;
  int64_t requests = 0;            // of global memory
  int64_t sectors = 0;             // of 32 bytes of it
  int64_t fewest_sectors = 0;      // if the bytes lay side by side
  int64_t wavefronts = 0;          // shared memory's
  int64_t fewest_wavefronts = 0;   // without bank conflicts
  int64_t global_bytes = 0, shared_bytes = 0;
  int64_t products = 0;            // of tensor cores: multiplications
};

// Work that goes on behind a warp's back until it waits.
struct Pending {
  const Instruction* instruction = nullptr;
  std::function<void()> finish;
};

// Groups of such work: those committed, oldest first, and what is to be committed next.
struct Groups {
  std::deque<std::vector<Pending>> committed;
  std::vector<Pending> open;

  void commit() {
    committed.push_back(std::move(open));
    open.clear();
  }
  void wait(size_t left) {
    while (committed.size() > left) {
      for (auto& work : committed.front()) work.finish();
      committed.pop_front();
    }
  }
};

struct Warp {
  Block* block = nullptr;
  Launch* launch = nullptr;
  int index = 0;
  Agent agent;
  std::vector<Bits> registers;  // by slot and lane
  int counters[LANES] = {};     // the next instruction of each lane
  uint32_t live = ALL;
  std::function<bool()> ready;  // set while it waits

  Groups copies, bulk, products, tensor_loads, tensor_stores;
  int delayed = 0;               // products that are not computed
  uint32_t last_product = 0;     // of tensor memory: its number in the block
  std::map<int, int> in_flight;  // sums of products under way, and how many
  std::map<int, Fault> doubts;   // of registers whose values were read while another warp wrote them
  // Fences and the first products behind them, counted; the number after the last fence and after the last such product.
  uint32_t phase = 1, fenced = 1, started = 1;
  std::vector<uint32_t> stamps;  // of each register: the phase when its value was computed

  Bits* at(int slot);
  Bits& of(int slot, int lane) { return registers[slot * LANES + lane]; }
};

struct Barrier {
  std::set<int> arrived, waiting;  // some arrive and go on
  int generation = 0;
};

struct TransactionBarrier {  // mbarrier
  int64_t expected = 0, pending = 0, bytes = 0;
  int phase = 0;
  Clocks seen, fenced;  // of those who arrived in this phase
  std::vector<Clocks> completed;  // what a waiter of the last phase may know: seen, fenced
  std::deque<Pending> copies;     // that will complete its bytes
};

struct Block {
  Launch* launch = nullptr;
  int number = 0, place[3] = {};
  std::vector<Warp> warps;
  std::unique_ptr<BlockMemory> shared;
  std::unique_ptr<TensorMemory> tensor;  // where a program uses it
  std::map<int, Barrier> barriers;
  std::map<Bits, TransactionBarrier> transactions;
  uint32_t copies = 0;  // in bulk, so far
  uint32_t issued = 0;  // products of tensor memory, so far
  std::deque<Pending> products;  // those of them that have not ended, oldest first

  int agents() const { return int(warps.size()) + 2; }
  void end_products(uint32_t number) {  // up to that one
    for (; issued - uint32_t(products.size()) < number; products.pop_front()) products.front().finish();
  }
};

enum class When { late, early, random };

struct Launch {
  std::vector<Instruction> program;
  std::vector<Counts> counts;
  std::vector<Bits> constants;  // by constant and lane
  std::vector<uint8_t> parameters;
  int slots = 0;
  bool has_tensor_memory = false;
  std::map<int, std::pair<std::string, int>> specials;  // slot: name and axis
  int grid[3] = {1, 1, 1}, threads = 32;
  int64_t shared_bytes = 0;
  Global global;
  When when = When::late;
  bool fences_copies = true;  // whether what cp.async wrote needs a fence of the async proxy
  bool poison = false;  // whether tensor memory that nobody wrote may be read
  std::mt19937_64 random;
  Approximations approximately;
  std::map<Bits, std::set<int>> released;  // by allocation's address: the blocks that released there
  int64_t steps = 0, most_steps = 0;

  bool early() { return when == When::early || (when == When::random && random() & 1); }
};

inline Bits* Warp::at(int slot) {
  return slot >= 0 ? &registers[slot * LANES] : &launch->constants[(-1 - slot) * LANES];
}

inline void require_all(const Warp& warp, uint32_t lanes, const Instruction& in) {
  if (lanes != warp.live) throw Fault{"deadlock", text_of(in.full(), " needs all lanes of the warp, but only some came: mask ", std::hex, lanes)};
}

}  // namespace ptx
