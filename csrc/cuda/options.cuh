// Request options (core/options.h): a CTA or a cluster writes a row anew in fp32, and reads that row from then on. It
// lies in the call's scratch, one row for each cluster of the grid.
#pragma once

#include "core/options.h"
#include "cuda/logits.cuh"

namespace pagedtree::cuda {

// Calls launch(first, count) for the rows or trees that are worked on at a time: all of them, under options as many as
// there are rows of scratch. These are launches of their own, as nvcc takes ten times as long for a loop in the kernel.
// `sample` has the loop: without it rows of fp32 spill registers.
template <typename Launch>
void in_turns(const OptionsParams& o, int64_t count, Launch launch) {
  const int64_t most = o.used ? o.scratch_rows : count;
  for (int64_t first = 0; first < count; first += most) launch(first, min_of(count - first, most));
}

inline int64_t clusters_for(const OptionsParams& o, int64_t count) {
  return o.used ? min_of(count, o.scratch_rows) : count;
}

__device__ __forceinline__ int64_t num_clusters() { return gridDim.x / ptx::cluster_size(); }

namespace options {

using Reader = LogitReader<kAnyDType>;

struct Writer {
  const RowOptions& r;
  const LogitRow& row;
  float* out;
  BlockShared& shared;

  static __device__ int64_t first() { return int64_t{ptx::cluster_rank()} * blockDim.x + threadIdx.x; }
  static __device__ int64_t step() { return int64_t{ptx::cluster_size()} * blockDim.x; }
  static __device__ void sync() { ptx::cluster_sync(); }
  __device__ float raw(int64_t column) const {
    const StoredLogits<kAnyDType> stored(row.dtype);
    return stored.value(stored.bits(row.logits, column));
  }
  // Atomic, because an id may be listed several times.
  __device__ void store(int64_t column, float value) const { atomicExch(out + column, value); }
  __device__ void forbid(int64_t column) const {
    const float logit = raw(column);
    if (logit == logit) store(column, -kInfinity);
  }
  static __device__ void begin_bias(const NodeRange&) {}
  static __device__ void end_bias(const NodeRange&) {}
  // The first of the entries of a token writes the sum of all. Lists are short, and read from L1.
  __device__ bool bias_of(const NodeRange& entries, int64_t i, float& bias) const {
    const int32_t token = r.o.bias_tokens[i];
    for (int64_t j = entries.begin; j < i; ++j) {
      if (r.o.bias_tokens[j] == token) return false;
    }
    bias = bias_from(r.o, i, entries.end, token);
    return true;
  }
  template <typename LeavesOut>
  __device__ bool any_finite(LeavesOut leaves_out) const {
    bool any = false;
#pragma unroll 1
    for (int64_t t = first(); t < row.vocab && !any; t += step()) any = out[t] > -kInfinity && !leaves_out(t);
    return cluster_any(shared, any);
  }
};

// All columns as if there were neither biases nor a path.
__device__ __forceinline__ void adjust_columns(const RowOptions& r, const LogitRow& row, float* out) {
  const Reader reader(row);
  for (int64_t t = 4 * Writer::first(); t < row.vocab; t += 4 * Writer::step()) {
    float four[4];
    reader.convert(reader.load_four(t), four);
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
      const float adjusted = t + i < row.vocab ? r.adjusted(row, t + i, four[0], 0.0f, false) : -kInfinity;
      four[0] = four[1];
      four[1] = four[2];
      four[2] = four[3];
      four[3] = adjusted;
    }
    *reinterpret_cast<float4*>(out + t) = {four[0], four[1], four[2], four[3]};
  }
}

__device__ __forceinline__ float* scratch_of(const OptionsParams& o) {
  return o.scratch + ptx::cluster_index() * o.scratch_stride;
}

// Not inlined: kernels read rows in several places, and this is rarely called. Few arguments cost few registers there.
inline __device__ __attribute__((noinline)) void write_row(const OptionsParams& o, const LogitsParams& logits,
                                                           int64_t b, int64_t n, Stops stops, BlockShared& shared) {
  const RowOptions r(o, b, n, stops);
  const LogitRow row = logit_row(logits, n);
  float* out = scratch_of(o);
  ptx::cluster_sync();  // all have read the row before
  adjust_columns(r, row, out);
  ptx::cluster_sync();
  Writer writer{r, row, out, shared};
  RowPatch<Writer>(r, row, writer).run();
}

}  // namespace options

// Whether a kernel for rows of this dtype may be called with options, see dtype_under().
template <DType kDType>
constexpr bool kReadsOptions = kDType == DType::kFloat32 || kDType == kAnyDType;

// Makes row n of the logits readable as the options of sequence b leave it, by row_of(). All threads of a cluster call
// this.
template <DType kDType = kAnyDType>
__device__ __forceinline__ void prepare_row(const OptionsParams& o, const LogitsParams& logits, int64_t b, int64_t n,
                                            BlockShared& shared, Stops stops = Stops::kDecide) {
  if constexpr (kReadsOptions<kDType>) {
    if (o.used) options::write_row(o, logits, b, n, stops, shared);
  }
}

// The row that was prepared; row n as it is in memory where there are no options.
template <DType kDType = kAnyDType>
__device__ __forceinline__ LogitRow row_of(const OptionsParams& o, const LogitsParams& logits, int64_t n) {
  if (!kReadsOptions<kDType> || !o.used) return logit_row(logits, n);
  return {options::scratch_of(o), nullptr, nullptr, logits.vocab, DType::kFloat32};
}

template <DType kDType = kAnyDType>
__device__ __forceinline__ LogitRow row_under(const OptionsParams& o, const LogitsParams& logits, int64_t b, int64_t n,
                                              BlockShared& shared, Stops stops = Stops::kDecide) {
  prepare_row<kDType>(o, logits, b, n, shared, stops);
  return row_of<kDType>(o, logits, n);
}

// The dtype that a kernel reads rows in.
inline DType dtype_under(const OptionsParams& o, DType dtype) { return o.used ? DType::kFloat32 : dtype; }

}  // namespace pagedtree::cuda
