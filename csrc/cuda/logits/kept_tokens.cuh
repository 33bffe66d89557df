// The tokens that pass top-k, top-p, and min-p, usually few. One pass over the row finds a bound that some hundred
// tokens reach, a second lists them in every CTA; a token's rank is its number of predecessors. Rows with too many are
// left to the caller.
#pragma once

#include "cuda/logits/race.cuh"

namespace pagedtree::cuda {

// Reductions: cluster_max() with its flag, maxima of both halves, sum.
enum class Fold { kLargest, kHalves, kSum };
__device__ __forceinline__ uint64_t fold(uint64_t value, Fold how) {
  if (how == Fold::kSum) return warp_sum(value);
  if (how == Fold::kLargest) return warp_max<1u << 31>(value);
  return uint64_t{__reduce_max_sync(~0u, static_cast<uint32_t>(value >> 32))} << 32 |
         __reduce_max_sync(~0u, static_cast<uint32_t>(value));
}

// Largest logit and a bound that some tokens reach, as keys: the smallest maximum of a CTA's parts, the largest of
// CTAs.
struct Range {
  uint32_t peak, bound;

  // Returns the value to exchange by halves, from a thread's largest key.
  static __device__ __forceinline__ uint64_t of_thread(uint32_t key, uint32_t parts) {
#pragma unroll 1
    for (uint32_t lanes = 1; lanes < 32 && 2 * lanes * parts <= blockDim.x; lanes *= 2)
      key = max_of(key, __shfl_xor_sync(~0u, key, static_cast<int>(lanes)));
    return uint64_t{key} << 32 | ~key;
  }
  __device__ explicit Range(uint64_t of_cta)
      : peak(__reduce_max_sync(~0u, static_cast<uint32_t>(of_cta >> 32))),
        bound(__reduce_max_sync(~0u, of_cta == 0 ? 0 : ~static_cast<uint32_t>(of_cta))) {}
};

struct Sums {
  uint32_t count;
  uint64_t mass;
};

// The likeliest tokens of a row, ranked().
struct KeptCandidates {
  static constexpr uint32_t kMost = 512;
  uint64_t own[kMost], all[kMost];  // of the CTA, of the cluster
  uint32_t weights[kMost];          // of `all`
  uint32_t num_own;

  // Sums the tokens before this rank in filter order, by a warp.
  static __device__ __attribute__((noinline)) Sums before(const KeptCandidates& notes, uint32_t size, uint64_t rank) {
    uint32_t count = 0, lower = 0, upper = 0;  // halves of the masses
#pragma unroll 1
    for (uint32_t i = threadIdx.x % 32; i < size; i += 32) {
      if (notes.all[i] <= rank) continue;
      lower += notes.weights[i] & 0xffffu;
      upper += notes.weights[i] >> 16;
      ++count;
    }
    const uint32_t low = __reduce_add_sync(~0u, lower);
    return {__reduce_add_sync(~0u, count), (uint64_t{__reduce_add_sync(~0u, upper)} << 16) + low};
  }
};

// Lists the tokens that pass top-k, top-p, and min-p, and draws from them.
template <typename Slice>
struct KeptTokens {
  Slice& slice;
  KeptCandidates& notes;
  const Sampling sampling;
  const int32_t vocab;
  const float min_x;
  Scale scale;
  // Size of the list, smallest rank that the count keeps, and the preceding mass that drops a token, or may if inexact.
  uint32_t size = 0;
  uint64_t least = 0, needed = 0, needed_at_least = 0;

  // Warps divide the list.
  const uint32_t first = ptx::cluster_rank() * (blockDim.x / 32) + threadIdx.x / 32;
  const uint32_t step = ptx::cluster_size() * (blockDim.x / 32);
  uint32_t parts = 0;    // of the row, each with a token in the list
  bool exactly = false;  // true if the row's mass is exact

  static constexpr uint64_t kTooMany = 0, kNoneFinite = ~uint64_t{0}, kListed = 1, kTooFew = 2;
  static constexpr uint64_t kFlag = 1u << 31, kIds = 0xffffffffu;  // set in the ranks of tokens

  // Collects tokens >= `bound`. Returns their count and, if `weighs`, the mass of all (within error_of() if inexact).
  __device__ __forceinline__ Sums note(int buffer, float bound, bool weighs) const {
    const float least_x = max_of(sampling.joint ? -kInfinity : min_x, kWeightless), factor = log2_scale(scale);
    uint32_t count = 0;
    uint64_t exact = 0;
    double rough = 0.0;
    const auto counts = [&](float most) { return weighs & (scale(most) >= least_x); };
    const auto has_any = [&](float most) { return counts(most) | (most >= bound); };
    slice.each_word(buffer, has_any, [&](int first, float most, const uint4& word) {
      if (counts(most) & !exactly) {
        rough += static_cast<double>(
            slice.sum_of_word(word, [&](float logit) { return ptx::ex2((logit - scale.peak) * factor); }));
      }
      if (!(most >= bound || (exactly && counts(most)))) return;
#pragma unroll 1
      for (int i = 0; i < slice.of_word(); ++i) {
        const float logit = slice.number(word, i), x = scale(logit);
        if (counts(most) && exactly) exact += weight_of<ScalarMath>(x >= least_x ? x : 2 * kWeightless);
        if (!(logit >= bound && x >= min_x)) continue;
        if (const uint32_t place = atomicAdd(&notes.num_own, 1u); place < KeptCandidates::kMost)
          notes.own[place] = ranked(logit, first + i);
        ++count;
      }
    });
    return {count, exact + static_cast<uint64_t>(rough * 2147483648.0)};
  }

  // Lists the row's tokens >= `bound` in every CTA. Returns the mass per CTA.
  __device__ __forceinline__ uint64_t gather(int buffer, float bound, bool weighs) {
    const uint32_t lane = threadIdx.x % 32;
    const auto [count, mass_of_cta] = slice.exchange(note(buffer, bound, weighs));
    size = __reduce_add_sync(~0u, min_of(count, KeptCandidates::kMost + 1));
    if (size > KeptCandidates::kMost) return 0;
    slice.gather(notes.own, __shfl_sync(~0u, count, static_cast<int>(ptx::cluster_rank())),
                 __reduce_add_sync(~0u, lane < ptx::cluster_rank() ? count : 0), size, notes.all);
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < size; i += blockDim.x)
      notes.weights[i] = weight_of<ScalarMath>(max_of(scale(ranked_value(notes.all[i])), 2 * kWeightless));
    __syncthreads();
    return mass_of_cta;
  }

  // Lists the tokens that may be kept. Returns kListed, kTooFew to be called again, or the reason of failure.
  __device__ __forceinline__ uint64_t list(int buffer, bool& bad) {
    const bool by_count = sampling.cuts_by_count(vocab), by_mass = sampling.top_p < 1.0f;
    // Each part has a token in the list; n parts have about n log n.
    const uint32_t few = clamp_to<uint32_t>(64u >> (__ffs(static_cast<int>(ptx::cluster_size())) - 1), 8, 32);
    if (parts == 0) parts = by_count && sampling.top_k > 64 ? 2 * few : few;
    if (threadIdx.x == 0) notes.num_own = 0;
    const auto range = slice.range_of_row(buffer, parts, bad);
    if (range.peak <= order_key<ScalarMath>(-kInfinity)) return kNoneFinite;
    scale.peak = logit_of_key<ScalarMath>(range.peak);
    const bool by_rank = by_count || by_mass;
    const float bound = by_rank ? max_of(logit_of_key<ScalarMath>(range.bound), -kMaxFloat) : -kMaxFloat;
    const bool has_all = bound <= -kMaxFloat || scale(bound) < min_x;
    const bool weighs = by_mass && (sampling.joint || !(by_count || has_all));
    const uint64_t mass_of_cta = gather(buffer, bound, weighs);
    if (size > KeptCandidates::kMost) return kTooMany;
    const auto all = notes.before(notes, size, 0);
    const auto top_k = static_cast<uint32_t>(sampling.top_k);
    bool suffices = has_all || (by_count && all.count >= top_k);
    uint64_t mass = all.mass;
    least = 0;
    if (by_count && all.count > top_k) {
      uint64_t of_warp = 0;  // complement of the smallest kept
#pragma unroll 1
      for (uint32_t i = first; i < size; i += step) {
        const uint64_t rank = notes.all[i] | kIds;
        if (notes.before(notes, size, rank).count < top_k) of_warp = max_of(of_warp, ~rank);
      }
      least = ~slice.largest(of_warp) & ~kIds;
      if (!sampling.joint) mass = notes.before(notes, size, least).mass;
    }
    if (by_mass) {
      const uint64_t of_row = weighs ? warp_sum(mass_of_cta) : mass;
      const uint64_t error = weighs && !exactly ? error_of(of_row, vocab) : 0;
      needed = top_p_mass(sampling.top_p, of_row + error);
      needed_at_least = top_p_mass(sampling.top_p, of_row - error);
      suffices |= weighs && all.mass >= needed;
    }
    if (suffices) return kListed;
    if (parts > few) return kTooMany;
    parts = 2 * few;
    return kTooFew;
  }

  // True if a token is kept; sets the flag if the mass's error may decide.
  __device__ __forceinline__ bool keeps(uint64_t rank, uint64_t& flag) const {
    if (rank < least) return false;
    if (!(sampling.top_p < 1.0f)) return true;
    const uint64_t before = notes.before(notes, size, rank).mass;
    if (before >= needed) return false;
    if (before >= needed_at_least) flag = kFlag;
    return true;
  }

  // Returns the rank of the last kept token, once all are listed.
  __device__ __forceinline__ uint64_t last_of_row(int buffer, bool& bad) {
    exactly = !sampling.joint && min_x > kWeightless;
#pragma unroll 1
    while (true) {
      const uint64_t listed = list(buffer, bad);
      if (listed == kTooFew) continue;
      if (listed != kListed) return listed;
      uint64_t complement = 0, flag = 0;
#pragma unroll 1
      for (uint32_t i = first; i < size; i += step) {
        if (const uint64_t rank = notes.all[i]; keeps(rank, flag)) complement = max_of(complement, ~rank);
      }
      const uint64_t last = ~slice.largest(complement | flag);
      if ((last & kFlag) != 0) return last;
      exactly = true;
    }
  }

  // Returns a race's best score, ranked().
  __device__ __forceinline__ uint64_t best_of_row(int buffer, uint64_t seed, int64_t position, bool& bad) {
    const uint32_t lane = threadIdx.x % 32;
    exactly = !sampling.joint && min_x > kWeightless;
#pragma unroll 1
    while (true) {
      const uint64_t listed = list(buffer, bad);
      if (listed == kTooFew) continue;
      if (listed != kListed) return listed;
      uint64_t best = 0, own = 0, flag = 0;
      uint32_t kept = 0;
#pragma unroll 1
      for (uint32_t i = first;; i += step) {
        if (i < size) {
          const uint64_t rank = notes.all[i];
          if (!keeps(rank, flag)) continue;
          if (lane == kept) own = rank;
          ++kept;
        }
        if (kept < 32 && i < size) continue;
        if (lane < kept) {
          const auto token = static_cast<uint32_t>(ranked_id(own));
          const NoiseGroup group(seed, position, RandomUse::kGumbel, token / kNoiseGroup);
          best = max_of(best, ranked(scale(ranked_value(own)) + group.noise(token % kNoiseGroup), token));
        }
        kept = 0;
        if (i >= size) break;
      }
      best = slice.largest((best & ~kFlag) | flag);
      if ((best & kFlag) == 0) return best | kFlag;
      exactly = true;
    }
  }
};

// A row in memory with the interface of KeptTokens' slice.
template <DType kDType>
struct RowSlice {
  LogitReader<kDType> row;
  BlockShared& shared;

  __device__ Range range_of_row(int /*buffer*/, uint32_t parts, bool& bad) {
    const auto best = row.best_of_words();
    const uint32_t key = best.nan ? ~0u : order_key<ScalarMath>(best.logit + 0.0f);
    Range range(exchange(Range::of_thread(key, parts), Fold::kHalves));
    bad = range.peak == ~0u;
    if (bad) range.peak = 0;
    row.apply(Peak{.logit = logit_of_key<ScalarMath>(range.peak)});
    return range;
  }
  template <typename HasAny, typename F>
  __device__ __forceinline__ void each_word(int /*buffer*/, HasAny has_any, F f) const {
    row.each_own_word(
        [&](float most) { return __any_sync(~0u, has_any(most)) != 0; },
        [&](int word, const uint4& numbers) { f(word * row.of_word(), row.largest_of_word(numbers), numbers); });
  }
  __device__ int of_word() const { return row.of_word(); }
  __device__ float number(const uint4& word, int i) const { return row.number(word, i); }
  template <typename F>
  __device__ __forceinline__ float sum_of_word(const uint4& word, F f) const {
    return row.sum_of_word(word, f);
  }

  __device__ uint64_t exchange(uint64_t value, Fold how) const { return exchange_by_call(shared, value, how); }
  __device__ Sums exchange(const Sums& own) const {
    return {static_cast<uint32_t>(min_of<uint64_t>(exchange(own.count, Fold::kSum), UINT32_MAX)),
            exchange(own.mass, Fold::kSum)};
  }
  __device__ uint64_t largest(uint64_t value) const { return fold(exchange(value, Fold::kLargest), Fold::kLargest); }
  __device__ void gather(const uint64_t* own, uint32_t count, uint32_t before, uint32_t /*total*/,
                         uint64_t* all) const {
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) {
#pragma unroll 1
      for (uint32_t rank = 0; rank < ptx::cluster_size(); ++rank) *ptx::of_cta(&all[before + i], rank) = own[i];
    }
    ptx::meet_cluster();
  }

 private:
  static __device__ __attribute__((noinline)) uint64_t exchange_by_call(BlockShared& shared, uint64_t value, Fold how) {
    const uint32_t lane = threadIdx.x % 32, ctas = ptx::cluster_size();
    value = fold(value, how);
    __syncthreads();
    if (lane == 0) shared.warps[threadIdx.x / 32] = value;
    __syncthreads();
    if (threadIdx.x < 32) {
      value = fold(lane < blockDim.x / 32 ? shared.warps[lane] : 0, how);
      if (lane < ctas) *ptx::of_cta(&shared.ctas[ptx::cluster_rank()], lane) = value;
    }
    ptx::meet_cluster();
    value = lane < ctas ? shared.ctas[lane] : 0;
    ptx::meet_cluster();  // after all reads
    return value;
  }
};

}  // namespace pagedtree::cuda
