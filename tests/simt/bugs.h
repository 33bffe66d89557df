// Faults planted by the self-test at run time.
#pragma once

#include <cstdint>

namespace probe {

enum class Bug {
  kNone,
  // attention.cuh
  kNoWait,
  kShortWait,
  kNoCommit,
  kNoBarrierBeforeRead,
  kNoBarrierBeforeRefill,
  kTableOverrun,
  kForeignPage,
  kOtherSwizzle,
  kNoSwizzle,
  kTailNotZeroed,
  kDivergentBarrier,
  kShuffleLacksLanes,
  kEarlyExit,
  kMisalignedCopy,
  kSharedTooSmall,
  // reduce.cuh
  kNoReductionBarrier,
  kMergeByFirst,
  kMergeRace,
  // cluster.cuh
  kNoClusterStart,
  kNoClusterBarrier,
  kNoClusterEnd,
  // hopper.cuh
  kNoEmptyWait,
  kNoFullWait,
  kShortExpect,
  kNoWgmmaWait,
  kBufferBackEarly,
  kUnawaitedLoad,
  // hopper.cuh, fed by cp.async
  kNoPhaseFlip,
  kStageBackEarly,
  kOtherStride,
  kNoProxyFence,
  kSwappedRows,
};

}  // namespace probe
