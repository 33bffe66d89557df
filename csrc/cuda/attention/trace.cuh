// Event trace of the wgmma kernel's roles in three CTAs, with -DPAGEDTREE_TRACE, for benchmarks/read_trace.py.
#pragma once

#include "cuda/tile/ptx.cuh"

namespace pagedtree::cuda {

enum TraceEvent : uint32_t {
  kNextTileBegins,
  kNextTileEnds,
  kSlotWaits,
  kSlotEmpty,
  kSlotStarted,
  kReleaseWaits,
  kUsed,
  kQueriesStarted,
  kTileWaits,
  kTileAcquired,
  kKeysThere,
  kTurnGot,
  kScoresThere,
  kSoftmaxDone,
  kValuesDone,
  kOutputBegins,
  kOutputEnds,
  kJoined,
};

#if defined(PAGEDTREE_TRACE)
constexpr uint32_t kTraced = 6000;  // events per role
struct Trace {
  uint64_t events[3][3][kTraced];  // [first, middle, last CTA][role]; event in the upper 8 bits
  uint32_t counts[3][3];
};
static __device__ Trace trace_log;

// One thread per consumer group and one producer write.
template <typename I, typename Shared>
__device__ __forceinline__ void trace(Shared& shared, TraceEvent event) {
  const uint32_t thread = threadIdx.x, cta = blockIdx.x, last = gridDim.x - 1;
  const uint32_t role = thread == I::kConsumers ? 2 : thread / 128;
  if (thread % 128 != 0 || role > 2 || (thread > I::kConsumers) || (cta != 0 && cta != last / 2 && cta != last)) return;
  const uint32_t slot = cta == 0 ? 0 : cta == last ? 2 : 1, i = shared.traced[role]++;
  if (i >= kTraced) return;
  trace_log.events[slot][role][i] = uint64_t{event} << 56 | (clock64() & 0xffffffffffffff);
  trace_log.counts[slot][role] = i + 1;
}

// Copies the log to the host and clears it. Returns a cudaError_t.
inline int copy_trace(Trace* to) {
  static Trace empty{};
  const cudaError_t status = cudaMemcpyFromSymbol(to, trace_log, sizeof(Trace));
  return status != cudaSuccess ? status : cudaMemcpyToSymbol(trace_log, &empty, sizeof(Trace));
}
#else
template <typename I, typename Shared>
__device__ __forceinline__ void trace(Shared&, TraceEvent) {}
#endif

}  // namespace pagedtree::cuda
