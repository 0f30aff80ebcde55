// Memory that a call leaves for the next one of its thread, of whichever kernel. Memory that went back to the system costs
// a page fault for every 4 KiB when it is taken again, 1 ms for 5 MiB; whether malloc gives it back depends on where it
// lies. All libraries of a process may share it, packaged ones of an older version too: another layout needs another name.
#ifndef FLEX_INDUCTOR_MEMORY
#define FLEX_INDUCTOR_MEMORY
namespace flex_inductor {
inline namespace memory_1 {
class KeptMemory {
 public:
  static constexpr size_t LEAST = 128 << 10, MOST = 16 << 20;  // bytes of a block, and of all

  KeptMemory() { blocks.reserve(MOST / LEAST + 1); }
  ~KeptMemory() {
    for (const Block& block : blocks) std::free(block.data);
  }

  // Aligned memory of at least `size` bytes, which become as many as there are.
  void* take(size_t& size) {
    const auto fits = [&](const Block& block) { return block.size >= size && block.size / 2 <= size; };
    const auto found = size < LEAST ? blocks.end() : std::find_if(blocks.begin(), blocks.end(), fits);
    if (found == blocks.end()) return std::aligned_alloc(64, size);
    void* const data = found->data;
    total -= size = found->size;
    blocks.erase(found);
    return data;
  }

  void give(void* data, size_t size) {
    if (size < LEAST || size > MOST) return std::free(data);
    blocks.push_back({data, size});
    for (total += size; total > MOST; blocks.erase(blocks.begin())) {  // the oldest
      total -= blocks.front().size;
      std::free(blocks.front().data);
    }
  }

 private:
  struct Block {
    void* data;
    size_t size;
  };
  std::vector<Block> blocks;
  size_t total = 0;
};

inline KeptMemory& kept_memory() {
  static thread_local KeptMemory kept;
  return kept;
}
}  // namespace memory_1
}  // namespace flex_inductor
#endif
