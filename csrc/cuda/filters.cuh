// The peak of a row of logits, and the threshold of the filters.
#pragma once

#include "cuda/logits.cuh"
#include "cuda/tile/radix.cuh"

namespace pagedtree::cuda {

// An integer that is larger for larger values, and among equal values for lower ids.
__device__ __forceinline__ uint64_t ranked(float value, int64_t id) {
  const uint64_t key = order_key<ScalarMath>(value + 0.0f);  // -0 ties with +0
  return key << 32 | static_cast<uint32_t>(~static_cast<uint32_t>(id));
}
__device__ __forceinline__ int64_t ranked_id(uint64_t rank) { return ~static_cast<uint32_t>(rank); }
__device__ __forceinline__ float ranked_value(uint64_t rank) {
  return logit_of_key<ScalarMath>(static_cast<uint32_t>(rank >> 32));
}

// Each thread looks for its largest logit; only the best of each warp look for the token that has it.
template <typename Reader>
__device__ __forceinline__ Peak find_peak(const Reader& row, BlockShared& shared) {
  const int threads = static_cast<int>(ptx::cluster_size() * blockDim.x);
  const auto best = row.best_of_words(static_cast<int>(ptx::cluster_rank() * blockDim.x + threadIdx.x), threads);
  const uint32_t key = order_key<ScalarMath>(best.logit + 0.0f);
  uint64_t rank = 0;
  if (key == __reduce_max_sync(~0u, key)) rank = ranked(best.logit, best.word < 0 ? 0 : row.token_of(best, threads));
  // A bit that tokens do not need says whether there is a NaN.
  constexpr uint64_t kNan = 0x80000000u;
  static_assert(kMaxVocab <= kNan);
  const auto fold = [](uint64_t a, uint64_t b) { return max_of(a & ~kNan, b & ~kNan) | ((a | b) & kNan); };
  rank = best.nan ? rank | kNan : rank & ~kNan;
  rank = fold_ctas(shared, block_fold(shared, rank, fold), fold);
  return {.logit = ranked_value(rank), .token = ranked_id(rank | kNan), .has_nan = (rank & kNan) != 0};
}

// One past the token of the `count`-th of the logits that are equal to `logit`, in the order of tokens.
template <typename Reader>
__device__ __forceinline__ int64_t end_of_ties(const Reader& row, float logit, uint64_t count, BlockShared& shared) {
  const WarpRun run = run_of_warp(row.num_words());
  const int lane = static_cast<int>(threadIdx.x % 32), begin = static_cast<int>(run.begin);
  const auto each = [&](auto f) {
    const auto has_any = [&](float largest) { return __any_sync(~0u, largest >= logit) != 0; };
    row.each_word(begin, 32, static_cast<int>(run.end), has_any, f);
  };
  uint32_t found = 0;  // by this thread
  each([&](int, const uint4& word) {
    if (row.largest_of_word(word) >= logit) found += static_cast<uint32_t>(popcount32(row.equal_to(word, logit)));
  });
  const uint32_t of_warp = __reduce_add_sync(~0u, found);
  uint64_t total;
  const uint64_t before = sum_before_warp_of_cluster(shared, of_warp, total);
  if (total < count) return row.vocab();
  __syncthreads();
  if (before < count && count <= before + of_warp) {
    uint32_t left = static_cast<uint32_t>(count - before);
    each([&](int word_index, const uint4& word) {
      const uint32_t equal = row.equal_to(word, logit), own = static_cast<uint32_t>(popcount32(equal));
      const uint32_t of_words = __reduce_add_sync(~0u, own);
      if (left > of_words) {
        left -= of_words;
        return;
      }
      uint32_t reached = own;  // up to this lane
      for (int delta = 1; delta < 32; delta *= 2) {
        const uint32_t lower = __shfl_up_sync(~0u, reached, delta);
        if (lane >= delta) reached += lower;
      }
      if (reached - own < left && left <= reached) {
        uint32_t from = equal;
        for (uint32_t skipped = reached - own + 1; skipped < left; ++skipped) from &= from - 1;
        const int64_t end_of_token = int64_t{word_index} * row.of_word() + __ffs(static_cast<int>(from));
        for (uint32_t rank = 0; rank < ptx::cluster_size(); ++rank) {
          *ptx::of_cta(&shared.warps[0], rank) = static_cast<uint64_t>(end_of_token);
        }
      }
      left = ~0u;  // later words do not count
    });
  }
  ptx::cluster_sync();
  return static_cast<int64_t>(shared.warps[0]);
}

// The logits above -inf whose x is at least min_x, as the keys of a radix search.
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
                         [&](int64_t token, const Four& group) {
                           if (!has_any(row.largest_of(group))) return;
                           float four[4];
                           row.convert(group, four);
#pragma unroll
                           for (int i = 0; i < 4; ++i) {
                             const uint32_t key = key_of(four[i]);
                             if (key != 0) f(key, token + i);
                           }
                         });
  }
  __device__ __forceinline__ int64_t end_of_ties(BlockShared& shared, uint32_t key, uint64_t count) const {
    return cuda::end_of_ties(row, logit_of_key<ScalarMath>(key), count, shared);
  }
};

// The scores of an array, also as keys of a radix search.
struct ScoreItems {
  static constexpr int kDigits = kKeyDigits;
  const float* scores;
  int64_t count;
  bool with_absent;  // include scores of -inf, after all others

  __device__ int64_t size() const { return count; }
  __device__ uint32_t key(int64_t i) const {
    const float score = scores[i];
    if (!(score > -kInfinity) && !(with_absent && score == -kInfinity)) return 0;
    return order_key<ScalarMath>(score + 0.0f);  // -0 ties with +0
  }
  template <typename F>
  __device__ __forceinline__ void each(uint32_t /*least*/, F f) const {
    for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
      const uint32_t of_item = key(i);
      if (of_item != 0) f(of_item, i);
    }
  }
  __device__ __forceinline__ int64_t end_of_ties(BlockShared& shared, uint32_t key_of_ties, uint64_t ties) const {
    return end_of_first(shared, count, ties, [&](int64_t i) { return key(i) == key_of_ties; });
  }
};

// Whether a token's rank or its share of the mass may keep it from being drawn.
__device__ __forceinline__ bool has_filter(const Sampling& sampling, int64_t vocab) {
  return sampling.top_p < 1.0f || sampling.min_p >= kMinNormal || (sampling.top_k > 0 && sampling.top_k < vocab);
}

// Finds the filter of a row, except that all ties at the threshold are kept. Returns how many of them are to be kept, 0
// for all.
template <typename Reader>
__device__ __forceinline__ uint64_t find_threshold(const Reader& row, const Sampling& sampling, const Scale& scale,
                                                   RadixShared& shared, MassColumns& columns, Filter& filter) {
  filter.min_x = min_p_bound(sampling.min_p);
  const bool by_mass = sampling.top_p < 1.0f;
  const bool by_count = sampling.top_k > 0 && sampling.top_k < row.vocab();
  if (!by_mass && !by_count) return 0;

  // Tokens without mass matter only for counts.
  const float view_min_x = sampling.joint ? -kInfinity : filter.min_x;
  const LogitItems<Reader> items{row, scale, by_count ? view_min_x : max_of(view_min_x, kWeightless)};
  const auto weight = [&](uint32_t key) { return weight_of<ScalarMath>(scale(logit_of_key<ScalarMath>(key))); };
  uint32_t* const masses = by_mass ? columns : nullptr;
  Totals left{};
  Cut cut{};
  uint64_t needed = 0;
  bool counts = by_count, has_first = false;  // first by count, then by mass
  // One loop over the digits of both, as nvcc takes long for loops that contain others.
#pragma unroll 1
  for (int digit = 0;;) {
    Totals* const totals = digit == 0 ? shared.first : shared.next;
    if (digit > 0 || !has_first) tabulate(shared, masses, totals, items, weight, digit, cut.key);
    if (digit == 0) {
      if (!has_first) left = sum_of_bins(shared, totals);
      has_first = true;
      if (counts && static_cast<uint64_t>(sampling.top_k) >= left.count) {
        if (!by_mass) return 0;
        counts = false;
      }
      needed = counts ? static_cast<uint64_t>(sampling.top_k) : top_p_mass(sampling.top_p, left.mass);
      cut = {};
    }
    cut.key = cut.key << kDigitBits | find_bin(shared, totals, !counts, needed, cut);
    if (++digit < row.digits()) continue;
    digit = 0;
    const float logit = logit_of_key<ScalarMath>(whole_key(cut.key, row.digits()));
    if (!counts) {
      if (logit < filter.min_logit) return 0;
      filter.min_logit = logit;
      const uint64_t ties = ceil_div(needed - cut.above.mass, cut.at.mass / cut.at.count);
      return ties == cut.at.count ? 0 : ties;
    }
    filter.min_logit = logit;
    if (!by_mass) return 0;
    if (!sampling.joint) left = {cut.above.count + cut.at.count, cut.above.mass + cut.at.mass};
    counts = false;
  }
}

template <typename Reader>
__device__ __forceinline__ Filter find_filter(const Reader& row, const Sampling& sampling, const Scale& scale,
                                              RadixShared& shared, MassColumns& columns) {
  Filter filter;
  const uint64_t ties = find_threshold(row, sampling, scale, shared, columns, filter);
  if (ties > 0) filter.tie_end = end_of_ties(row, filter.min_logit, ties, shared.block);
  return filter;
}

}  // namespace pagedtree::cuda
