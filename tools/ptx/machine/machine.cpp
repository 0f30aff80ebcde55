// Executes a launch of a PTX kernel. The program comes as numbers from program.py, and counts and a fault go back.

#include "tensor_memory.h"

namespace ptx {
namespace {

// Reads numbers one after the other.
struct Reader {
  const int64_t* next;
  int64_t operator()() { return *next++; }
};

void bind(Instruction& in, Launch& launch) {
  for (auto* family : {bind_scalar, bind_branch, bind_memory, bind_atomic, bind_exchange, bind_barrier, bind_matrix, bind_product,
                       bind_warp_group, bind_tensor_memory, bind_copy, bind_transaction, bind_tensor_map, bind_bulk})
    if (Action found = family(in, launch)) {
      in.execute = found;
      in.computes = family == bind_scalar || family == bind_exchange;
      return;
    }
  in.execute = [&in](Warp&, uint32_t) -> bool { throw Fault{"unknown_instruction", in.full()}; };
}

bool has_result(const Instruction& in) {
  for (const char* start : {"st.", "red.", "bar", "bra", "ret", "exit", "cp.", "fence", "membar", "mbarrier.init", "mbarrier.inval", "mbarrier.arrive",
                            "stmatrix", "wgmma", "tcgen05", "tensormap", "prefetch", "trap"})
    if (in.is(start)) return false;
  return !in.operands.empty();
}

void read_program(Launch& launch, Reader read, int64_t count, const char* const* names) {
  launch.program.resize(count);
  launch.counts.resize(count);
  for (int i = 0; i < count; ++i) {
    Instruction& in = launch.program[i];
    in.index = i;
    std::istringstream name(names[read()]);
    std::getline(name, in.name, '.');
    for (std::string part; std::getline(name, part, '.');) in.with.all.push_back(part);
    in.aligned = in.with.has("aligned");
    launch.has_tensor_memory |= in.name == "tcgen05";
    in.line = int(read());
    in.guarded = read();
    in.negated = read();
    in.guard = int(read());
    in.target = int(read());
    in.operands.resize(read());
    for (auto& operand : in.operands) {
      operand.offset = read();
      operand.is_address = read();
      operand.slots.resize(read());
      for (int& slot : operand.slots) slot = int(read());
    }
    const bool product = in.is("wgmma.mma_async");
    for (size_t o = 0; o < in.operands.size(); ++o)
      if (!product || in.operands[o].slots.size() > 1)
        for (int slot : in.operands[o].slots)
          if (slot >= 0) in.touched.push_back(slot);
    in.copies = in.name == "mov";
    if (has_result(in))
      for (int slot : in.operands[0].slots)
        if (slot >= 0) in.results.push_back(slot);
  }
  for (auto& in : launch.program) bind(in, launch);
}

Bits special(const Warp& warp, int lane, const std::string& name, int axis) {
  const Launch& launch = *warp.launch;
  const int thread = warp.index * LANES + lane;
  if (name == "tid") return axis == 0 ? thread : 0;
  if (name == "ntid") return axis == 0 ? launch.threads : 1;
  if (name == "ctaid") return warp.block->place[axis];
  if (name == "nctaid") return launch.grid[axis];
  if (name == "laneid") return lane;
  if (name == "warpid") return warp.index;
  if (name == "lanemask_lt") return (Bits{1} << lane) - 1;
  if (name == "dynamic_smem_size" || name == "total_smem_size") return launch.shared_bytes;
  if (name == "cluster_nctaid" || name == "cluster_nctarank" || name == "nclusterid") return 1;
  return 0;  // clocks, and places in a cluster of one
}

std::unique_ptr<Block> new_block(Launch& launch, int number) {
  auto block = std::make_unique<Block>();
  block->launch = &launch;
  block->number = number;
  for (int axis = 0, rest = number; axis < 3; rest /= launch.grid[axis++]) block->place[axis] = rest % launch.grid[axis];
  const int warps = launch.threads / LANES;
  block->warps.resize(warps);
  block->shared = std::make_unique<BlockMemory>("shared memory", launch.shared_bytes, block->agents());
  if (launch.has_tensor_memory) block->tensor = std::make_unique<TensorMemory>(block->agents());
  if (block->tensor) block->tensor->memory.poison = launch.poison;
  for (int i = 0; i < warps; ++i) {
    Warp& warp = block->warps[i];
    warp.block = block.get();
    warp.launch = &launch;
    warp.index = i;
    warp.agent.block = number;
    warp.agent.index = i;
    warp.agent.seen.assign(block->agents(), 0);
    warp.agent.fenced.assign(block->agents(), 0);
    warp.agent.tick();
    warp.registers.assign(launch.slots * LANES, 0);
    warp.stamps.assign(launch.slots, 0);
    for (const auto& [slot, what] : launch.specials)
      for (int lane = 0; lane < LANES; ++lane) warp.of(slot, lane) = special(warp, lane, what.first, what.second);
  }
  return block;
}

struct Stop {
  Fault fault;
  int line, block, warp;
};

void check_in_flight(Warp& warp, const Instruction& in) {
  if (warp.in_flight.empty() || in.name == "wgmma") return;
  for (int slot : in.touched)
    if (warp.in_flight.count(slot)) throw Fault{"race", "a register is used while a product of wgmma that has it is under way"};
}

// Triton has several warps load and compute what one of them stores: what the others read too late is not used.
void carry_doubts(Warp& warp, const Instruction& in, uint32_t active) {
  if (warp.doubts.empty()) return;
  std::vector<int> reads = {in.guarded ? in.guard : -1};
  for (size_t o = in.results.empty() ? 0 : 1; active && o < in.operands.size(); ++o)
    reads.insert(reads.end(), in.operands[o].slots.begin(), in.operands[o].slots.end());
  for (int slot : reads) {
    const auto doubt = warp.doubts.find(slot);
    if (doubt == warp.doubts.end()) continue;
    if (!in.computes || slot == reads[0]) throw doubt->second;
    for (int result : in.results) warp.doubts[result] = doubt->second;
    return;
  }
  if (active == warp.live)
    for (int result : in.results) warp.doubts.erase(result);
}

// The stamp of a copy: compilers move values between registers behind a fence, and the assembler undoes it.
uint32_t newest(const Warp& warp, const Operand& from) {
  uint32_t found = 0;
  for (int slot : from.slots)
    if (slot >= 0) found = std::max(found, warp.stamps[slot]);
  return found;
}

void step(Warp& warp) {
  Launch& launch = *warp.launch;
  // Lanes that are furthest behind go first, but at an instruction for all of them they wait for the others.
  int counter = 0;
  uint32_t lanes = 0;
  for (uint32_t left = warp.live; left; left &= ~lanes) {
    counter = INT_MAX;
    each(left, [&](int lane) { counter = std::min(counter, warp.counters[lane]); });
    lanes = 0;
    each(left, [&](int lane) { lanes |= uint32_t(warp.counters[lane] == counter) << lane; });
    if (lanes == warp.live || counter >= int(launch.program.size()) || !launch.program[counter].with.has("sync")) break;
  }
  if (counter >= int(launch.program.size())) {
    warp.live &= ~lanes;
    return;
  }
  const Instruction& in = launch.program[counter];
  each(lanes, [&](int lane) { ++warp.counters[lane]; });
  uint32_t active = lanes;
  if (in.guarded) {
    const Bits* guard = warp.at(in.guard);
    each(lanes, [&](int lane) { if ((guard[lane] != 0) == in.negated) active &= ~(1u << lane); });
  }
  warp.agent.line = in.line;
  check_in_flight(warp, in);
  carry_doubts(warp, in, active);
  if (in.aligned && active) require_all(warp, active, in);
  Counts& counts = launch.counts[counter];
  ++counts.warps;
  counts.lanes += __builtin_popcount(active);
  if (active && !in.execute(warp, active)) each(lanes, [&](int lane) { --warp.counters[lane]; });
  const uint32_t stamp = in.copies ? newest(warp, in.operands[1]) : warp.phase;
  for (int slot : in.results) warp.stamps[slot] = stamp;
}

bool runnable(Warp& warp) {
  if (!warp.live) return false;
  if (warp.ready && !warp.ready()) return false;
  warp.ready = nullptr;
  return true;
}

// Ends one copy that somebody waits for; false if there is none.
bool deliver(Block& block) {
  for (auto& [address, barrier] : block.transactions) {
    if (barrier.copies.empty()) continue;
    const size_t which = block.launch->random() % barrier.copies.size();
    Pending work = std::move(barrier.copies[which]);
    barrier.copies.erase(barrier.copies.begin() + which);
    try {
      work.finish();
    } catch (Fault& fault) {
      throw Stop{fault, work.instruction->line, block.number, -1};
    }
    return true;
  }
  return false;
}

// What a block leaves behind.
void check_end(const Block& block) {
  auto stop = [&](const char* kind, const char* text, int line) { throw Stop{{kind, text}, line, block.number, -1}; };
  if (!block.products.empty()) stop("race", "the kernel ends while products are under way", block.products.front().instruction->line);
  if (block.tensor && !block.tensor->is_empty())
    stop("deadlock", "the block keeps tensor memory: the next one waits for it", block.warps[0].agent.line);
}

void run_some(Launch& launch, Warp& warp) {
  try {
    for (int64_t left = 1 + launch.random() % 256; left && warp.live && !warp.ready; --left) {
      step(warp);
      if (++launch.steps > launch.most_steps) throw Fault{"deadlock", text_of("no end after ", launch.most_steps, " instructions")};
    }
  } catch (Fault& fault) {
    throw Stop{fault, fault.line ? fault.line : warp.agent.line, warp.block->number, warp.index};
  }
}

void run(Launch& launch) {
  constexpr size_t together = 4;  // blocks that take turns
  std::vector<int> numbers(int64_t(launch.grid[0]) * launch.grid[1] * launch.grid[2]);
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = int(i);
  std::shuffle(numbers.begin(), numbers.end(), launch.random);
  std::vector<std::unique_ptr<Block>> blocks;
  while (!numbers.empty() || !blocks.empty()) {
    while (blocks.size() < together && !numbers.empty()) {
      blocks.push_back(new_block(launch, numbers.back()));
      numbers.pop_back();
    }
    std::vector<Warp*> able;
    for (auto& block : blocks)
      for (Warp& warp : block->warps)
        if (runnable(warp)) able.push_back(&warp);
    if (!able.empty()) {
      run_some(launch, *able[launch.random() % able.size()]);
    } else {
      bool moved = false;
      for (auto& block : blocks) moved = moved || deliver(*block);
      for (auto& block : blocks)
        for (Warp& warp : block->warps)
          if (!moved && warp.live) throw Stop{{"deadlock", "every warp of the block waits, and nothing is under way"}, warp.agent.line, block->number, warp.index};
    }
    blocks.erase(std::remove_if(blocks.begin(), blocks.end(), [](auto& block) {
      const bool ends = std::none_of(block->warps.begin(), block->warps.end(), [](const Warp& warp) { return warp.live != 0; });
      if (ends) check_end(*block);
      return ends;
    }), blocks.end());
  }
}

}  // namespace
}  // namespace ptx

extern "C" {

struct Found {
  char kind[32], text[480];
  int64_t line, block, warp, lane, address;
};

// `sizes`: grid x, y, z, threads, shared bytes, slots, seed, when, worst approximations, most steps, whether copies
// need fences, whether tensor memory may be read unwritten, then how many instructions, constants, parameter bytes, specials and
// allocations. Returns whether a fault was found.
int run_launch(const int64_t* sizes, const int64_t* code, const char* const* names, const uint64_t* constants,
               const uint8_t* parameters, const int64_t* specials, const int64_t* allocations, int64_t* counts, Found* found) {
  using namespace ptx;
  Launch launch;
  Reader next{sizes};
  for (int& size : launch.grid) size = int(next());
  launch.threads = int(next());
  launch.shared_bytes = next();
  launch.slots = int(next());
  launch.random.seed(next());
  launch.when = static_cast<When>(next());
  launch.approximately.worst = next();
  launch.most_steps = next();
  launch.fences_copies = next();
  launch.poison = next();
  const int64_t instructions = next(), constant_count = next(), parameter_bytes = next(), special_count = next(), allocation_count = next();
  for (int64_t i = 0; i < constant_count; ++i) launch.constants.insert(launch.constants.end(), LANES, constants[i]);
  launch.parameters.assign(parameters, parameters + parameter_bytes);
  for (Reader read{specials}; read.next < specials + 3 * special_count;) {
    const int slot = int(read());
    const char* name = names[read()];
    launch.specials[slot] = {name, int(read())};
  }
  for (Reader read{allocations}; read.next < allocations + 3 * allocation_count;) {
    Allocation given;
    given.first = read();
    given.size = read();
    given.written = read();
    given.writes.resize(given.size);
    launch.global.allocations.push_back(std::move(given));
  }
  read_program(launch, Reader{code}, instructions, names);
  int stopped = 0;
  try {
    run(launch);
  } catch (Stop& stop) {
    stopped = 1;
    std::snprintf(found->kind, sizeof found->kind, "%s", stop.fault.kind.c_str());
    std::snprintf(found->text, sizeof found->text, "%s", stop.fault.text.c_str());
    found->line = stop.line;
    found->block = stop.block;
    found->warp = stop.warp;
    found->lane = stop.fault.lane;
    found->address = int64_t(stop.fault.address);
  }
  for (const Counts& c : launch.counts)
    for (int64_t value : {c.warps, c.lanes, c.requests, c.sectors, c.fewest_sectors, c.wavefronts, c.fewest_wavefronts, c.global_bytes, c.shared_bytes, c.products})
      *counts++ = value;
  return stopped;
}

}  // extern "C"
