// A row's peak and filter threshold.
#pragma once

#include "cuda/logits/reader.cuh"
#include "cuda/tile/radix.cuh"

namespace pagedtree::cuda {

// Orders by value, descending, then by id, ascending.
__device__ __forceinline__ uint64_t ranked(float value, int32_t id) {
  const uint64_t key = order_key<ScalarMath>(value + 0.0f);  // -0 ties with +0
  return key << 32 | static_cast<uint32_t>(~id);
}
__device__ __forceinline__ int32_t ranked_id(uint64_t rank) {
  return static_cast<int32_t>(~static_cast<uint32_t>(rank));
}
__device__ __forceinline__ float ranked_value(uint64_t rank) {
  return logit_of_key<ScalarMath>(static_cast<uint32_t>(rank >> 32));
}

// Returns log2(e) / T; finite, so that 0 stays 0.
__device__ __forceinline__ float log2_scale(const Scale& scale) { return scale.inverse_temperature * kLog2E; }

// Bounds the error of a row's mass by ex2: 2^-18 of it for arguments and word sums, 1 per token for rounding.
__device__ __forceinline__ uint64_t error_of(uint64_t mass, int32_t vocab) {
  return (mass >> 18) + static_cast<uint64_t>(vocab);
}

// Finds the peak. Only a warp's best threads search its token. Afterwards the reader knows if the row is clean.
template <typename Reader>
__device__ __forceinline__ Peak find_peak(Reader& row, BlockShared& shared) {
  const auto best = row.best_of_words();
  const uint32_t key = order_key<ScalarMath>(best.logit + 0.0f);
  uint64_t rank = 0;
  if (key == __reduce_max_sync(~0u, key)) rank = ranked(best.logit, row.token_of(best));
  // A bit that token ids do not use flags NaN.
  constexpr uint32_t kNan = 0x80000000u;
  static_assert(kMaxVocab <= kNan);
  rank = cluster_max(shared, best.nan ? rank | kNan : rank & ~uint64_t{kNan});
  const Peak peak{.logit = ranked_value(rank), .token = ranked_id(rank | kNan), .has_nan = (rank & kNan) != 0};
  row.apply(peak);
  return peak;
}

// Logits above -inf with x >= min_x, as keys of a radix search.
template <typename Reader>
struct LogitItems {
  const Reader& row;
  Scale scale;
  float min_x;

  __device__ int64_t size() const { return row.vocab(); }
  __device__ int digits() const { return row.digits(); }
  __device__ uint32_t key_of(float logit) const {
    return logit > -kInfinity && scale(logit) >= min_x ? order_key<ScalarMath>(logit + 0.0f) : 0;  // -0 is +0
  }
  template <typename F>
  __device__ __forceinline__ void each(uint32_t least, F f) const {
    const auto has_any = [&](float largest) {
      const uint32_t most = key_of(largest);
      return most != 0 && most >= least;
    };
    row.each_group_where([&](float largest) { return __any_sync(~0u, has_any(largest)) != 0; },
                         [&](int token, const Four& group) {
                           if (!has_any(row.largest_of(group))) return;
                           float four[4];
                           row.convert(group, four);
#pragma unroll 1
                           for (int i = 0; i < 4; ++i) {
                             const uint32_t key = key_of(four[0]);
                             if (key != 0) f(key, token + i);
                             four[0] = four[1];
                             four[1] = four[2];
                             four[2] = four[3];
                           }
                         });
  }
};

// True if a filter may drop a token.
__device__ __forceinline__ bool has_filter(const Sampling& sampling, int32_t vocab) {
  return sampling.top_p < 1.0f || sampling.min_p >= kMinNormal || sampling.cuts_by_count(vocab);
}

// Finds a row's filter: by count, by mass, then the number of ties kept at the threshold.
template <typename Reader>
__device__ __forceinline__ Filter find_filter(const Reader& row, const Sampling& sampling, const Scale& scale,
                                              RadixShared& shared, MassColumns& columns) {
  Filter filter{.min_x = min_p_bound(sampling.min_p)};
  const bool by_mass = sampling.top_p < 1.0f;
  const bool by_count = sampling.cuts_by_count(row.vocab());
  if (!by_mass && !by_count) return filter;

  // Tokens without mass matter only for counts.
  const float view_min_x = sampling.joint ? -kInfinity : filter.min_x;
  const LogitItems<Reader> items{row, scale, by_count ? view_min_x : max_of(view_min_x, kWeightless)};
  const auto weight = [&](uint32_t key) { return weight_of<ScalarMath>(scale(logit_of_key<ScalarMath>(key))); };
  enum { kCount, kMass, kTies } goal = by_count ? kCount : kMass;
  uint64_t left = 0;  // mass after top-k
  uint64_t ties = 0;
  uint32_t among = 0;
#pragma unroll 1
  while (true) {
    uint32_t* const masses = by_mass && goal != kTies ? columns : nullptr;
    const Cut cut = find_cut(shared, masses, items, weight, row.digits(), among, goal == kMass, [&](const Totals& all) {
      const uint64_t wanted = static_cast<uint64_t>(sampling.top_k);
      if (goal == kCount) return wanted < all.count ? wanted : 0;
      return goal == kTies ? ties : top_p_mass(sampling.top_p, left > 0 ? left : all.mass);
    });
    const float logit = logit_of_key<ScalarMath>(cut.key);
    if (goal == kCount) {
      if (cut.target > 0) filter.min_logit = logit;
      if (cut.target > 0 && !sampling.joint) left = cut.above.mass + cut.at.mass;
      if (!by_mass) return filter;
      goal = kMass;
    } else if (goal == kMass) {
      if (logit < filter.min_logit) return filter;
      filter.min_logit = logit;
      ties = ceil_div(cut.target - cut.above.mass, cut.at.mass / cut.at.count);
      if (ties == cut.at.count) return filter;
      goal = kTies;
      among = cut.key;
    } else {
      filter.tie_end = static_cast<int32_t>(~cut.key) + 1;
      return filter;
    }
  }
}

// Finds the distribution of `in.row`. Not inlined: most code of kernels that usually need only the peak.
template <DType kDType>
__device__ __attribute__((noinline)) void find_distribution(RadixShared& radix, MassColumns& masses, Sampling sampling,
                                                            RowDistribution& in) {
  LogitReader<kDType> row(in.row);
  const Peak peak = find_peak(row, radix.block);
  const RowDistribution found = row_distribution(
      in.row, sampling, peak, [&](const Scale& scale) { return find_filter(row, sampling, scale, radix, masses); });
  __syncthreads();
  if (threadIdx.x == 0) in = found;
  __syncthreads();
}

}  // namespace pagedtree::cuda
