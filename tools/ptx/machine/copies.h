// Copies that go on behind a warp's back: cp.async, and transaction barriers (mbarrier).

#pragma once

#include <utility>

#include "threads.h"

namespace ptx {

inline Action bind_copy(const Instruction& in, Launch& launch) {
  if (in.name != "cp" || !in.with.has("async") || in.with.has("bulk")) return {};
  if (in.with.has("commit_group"))
    return [](Warp& warp, uint32_t) {
      warp.copies.commit();
      return true;
    };
  if (in.with.has("wait_all"))
    return [](Warp& warp, uint32_t) {
      warp.copies.commit();
      warp.copies.wait(0);
      return true;
    };
  if (in.with.has("wait_group"))
    return [&in](Warp& warp, uint32_t) {
      warp.copies.wait(warp.at(in.operands[0].slots[0])[0]);
      return true;
    };
  if (!in.with.has("global") || in.operands.size() < 3) return {};
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
      Shared& shared = *warp.block->shared;
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

}  // namespace ptx
