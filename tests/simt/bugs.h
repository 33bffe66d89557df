// Faults planted by the self-test at run time.
#pragma once

#include <cstdint>

// Faults of scores.cuh, sums.cuh, and hopper.cuh, fed by TMA and by cp.async.
#define PROBE_EACH_BUG(X)                                                                                           \
  X(None), X(NoWait), X(ShortWait), X(NoCommit), X(NoBarrierBeforeRead), X(NoBarrierBeforeRefill), X(TableOverrun), \
      X(NoSwizzle), X(DivergentBarrier), X(ShuffleLacksLanes), X(EarlyExit), X(MisalignedCopy), X(SharedTooSmall),  \
      X(MergeByFirst), X(MergeRace), X(NoClusterStart), X(NoClusterBarrier), X(NoClusterEnd), X(NoEmptyWait),       \
      X(ShortExpect), X(NoWgmmaWait), X(BufferBackEarly), X(UnawaitedLoad), X(NoPhaseFlip), X(StageBackEarly),      \
      X(NoProxyFence)

namespace probe {

#define PROBE_BUG(name) k##name
enum class Bug { PROBE_EACH_BUG(PROBE_BUG) };
#undef PROBE_BUG

}  // namespace probe
