// Request options (core/options.h): a CTA or cluster writes an adjusted fp32 row to scratch and reads it from then on.
#pragma once

#include "core/options.h"
#include "cuda/logits/reader.cuh"

namespace pagedtree::cuda {

// Calls launch(first, count) for batches of rows or trees: with options, as many as scratch has rows. Separate
// launches: a loop in the kernel takes nvcc ten times as long.
template <typename Launch>
void in_turns(const OptionsParams& o, int64_t count, Launch launch) {
  const int64_t most = o.used ? o.scratch_rows : count;
  for (int64_t first = 0; first < count; first += most) launch(first, min_of(count - first, most));
}

namespace options {

struct Writer {
  static constexpr RowStep kFirst = RowStep::kColumns;
  const RowOptions& r;
  const LogitRow& row;
  float* out;
  BlockShared& shared;

  static __device__ uint32_t first() { return ptx::cluster_rank() * blockDim.x + threadIdx.x; }
  static __device__ uint32_t step() { return ptx::cluster_size() * blockDim.x; }
  static __device__ void sync() { ptx::meet_cluster(); }
  // Writes one column, or four from a multiple of four. One is atomic: ids may repeat.
  __device__ void write(uint32_t column, uint32_t count, float bias, bool may_be_on_path) const {
    const LogitReader<kAnyDType> reader(row);
    const StoredLogits<kAnyDType> stored(row.dtype);
    Four word{};
    const bool whole = count == 4 && reader.load_whole_fours<1>(static_cast<int>(column), 0, &word);
    float four[4]{};
#pragma unroll 1
    for (uint32_t at = column; at < column + count; ++at) {
      float value = -kInfinity;
      if (static_cast<int32_t>(at) < row.vocab) {
        const float raw = whole ? reader.first_of(word) : stored.value(stored.bits(row.logits, at));
        value = r.adjusted(row, at, raw, bias, may_be_on_path);
      }
      word = reader.without_first(word);
      four[0] = four[1];
      four[1] = four[2];
      four[2] = four[3];
      four[3] = value;
    }
    if (count == 4) {
      *reinterpret_cast<float4*>(out + column) = {four[0], four[1], four[2], four[3]};
    } else {
      atomicExch(out + column, four[3]);
    }
  }
  static __device__ void begin_bias(const NodeRange&) {}
  static __device__ void end_bias(const NodeRange&) {}
  // Lists are short, and read from L1.
  __device__ float bias_of(const NodeRange& entries, uint32_t column) const {
    return bias_of_token(r.o, entries, r.o.first_token + column);
  }
  template <typename LeavesOut>
  __device__ bool any_finite(LeavesOut leaves_out) const {
    bool any = false;
#pragma unroll 1
    for (uint32_t t = first(); static_cast<int32_t>(t) < row.vocab && !any; t += step())
      any = out[t] > -kInfinity && !leaves_out(t);
    __syncwarp();  // in a CTA of one warp the maximum orders no reads before the writes of others
    return cluster_max(shared, any) != 0;
  }
};

__device__ __forceinline__ float* scratch_of(const OptionsParams& o) {
  return o.scratch + ptx::cluster_index() * o.scratch_stride;
}

// Not inlined: few arguments cost few registers.
inline __device__ __attribute__((noinline)) void write_row(const OptionsParams& o, const LogitsParams& logits,
                                                           int64_t b, int64_t n, Stops stops, BlockShared& shared) {
  const RowOptions r(o, b, n, stops);
  const LogitRow row = logit_row(logits, n);
  ptx::meet_cluster();  // after all reads of the row before
  Writer writer{r, row, scratch_of(o), shared};
  RowPatch<Writer>(r, row, writer).run();
}

}  // namespace options

// True if a kernel for this dtype may get options, see dtype_under().
template <DType kDType>
constexpr bool kReadsOptions = kDType == DType::kFloat32 || kDType == kAnyDType;

// Applies sequence b's options to row n, for row_of(). All threads of a cluster call it.
template <DType kDType = kAnyDType>
__device__ __forceinline__ void prepare_row(const OptionsParams& o, const LogitsParams& logits, int64_t b, int64_t n,
                                            BlockShared& shared, Stops stops = Stops::kDecide) {
  if constexpr (kReadsOptions<kDType>) {
    if (o.used) options::write_row(o, logits, b, n, stops, shared);
  }
}

__device__ __forceinline__ LogitRow prepared_row(const OptionsParams& o, const LogitsParams& logits) {
  return {options::scratch_of(o), nullptr, nullptr, static_cast<int32_t>(logits.vocab), DType::kFloat32};
}
// Returns the prepared row, or row n in memory without options.
template <DType kDType = kAnyDType>
__device__ __forceinline__ LogitRow row_of(const OptionsParams& o, const LogitsParams& logits, int64_t n) {
  return kReadsOptions<kDType> && o.used ? prepared_row(o, logits) : logit_row(logits, n);
}

template <DType kDType = kAnyDType>
__device__ __forceinline__ LogitRow row_under(const OptionsParams& o, const LogitsParams& logits, int64_t b, int64_t n,
                                              BlockShared& shared, Stops stops = Stops::kDecide) {
  prepare_row<kDType>(o, logits, b, n, shared, stops);
  return row_of<kDType>(o, logits, n);
}

inline DType dtype_under(const OptionsParams& o, DType dtype) { return o.used ? DType::kFloat32 : dtype; }

}  // namespace pagedtree::cuda
