// When the roles of three CTAs of the kernel for wgmma came to what: with -DPAGEDTREE_TRACE, for
// benchmarks/read_trace.py; without, nothing.
#pragma once

#include "cuda/tile/ptx.cuh"

namespace pagedtree::cuda {

enum TraceEvent : uint32_t {
  kWalkBegins,
  kWalkEnds,
  kSlotWanted,
  kSlotEmpty,
  kSlotStarted,
  kUsedWanted,
  kUsed,
  kQueriesStarted,
  kTileWanted,
  kTileGiven,
  kKeysThere,
  kTurnGot,
  kScoresThere,
  kWeighed,
  kValuesDone,
  kOutputBegins,
  kOutputEnds,
  kJoined,
};

#if defined(PAGEDTREE_TRACE)
constexpr uint32_t kTraced = 6000;  // events of a role
struct Trace {
  uint64_t events[3][3][kTraced];  // of the first, middle and last CTA, by role; the event in the upper 8 bits
  uint32_t counts[3][3];
};
static __device__ Trace trace_log;

// A thread of each group and of the producers writes.
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

// The host's copy, after which the log is empty. Returns a cudaError_t.
inline int take_trace(Trace* to) {
  static Trace empty{};
  const cudaError_t status = cudaMemcpyFromSymbol(to, trace_log, sizeof(Trace));
  return status != cudaSuccess ? status : cudaMemcpyToSymbol(trace_log, &empty, sizeof(Trace));
}
#else
template <typename I, typename Shared>
__device__ __forceinline__ void trace(Shared&, TraceEvent) {}
#endif

}  // namespace pagedtree::cuda
