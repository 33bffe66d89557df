// The peak of a row of logits, and the threshold of the filters.
#pragma once

#include "cuda/logits.cuh"
#include "cuda/tile/radix.cuh"
#include "cuda/value_counts.cuh"

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

// Each thread looks for its largest logit; only the best of each warp look for the token that has it. Calls
// each_word(word) with each clean word.
template <typename Reader, typename EachWord = NoVisit>
__device__ __forceinline__ Peak find_peak(const Reader& row, BlockShared& shared, EachWord each_word = {}) {
  const int threads = static_cast<int>(ptx::cluster_size() * blockDim.x);
  const auto best =
      row.best_of_words(static_cast<int>(ptx::cluster_rank() * blockDim.x + threadIdx.x), threads, each_word);
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

// Additional scratch of the search for a threshold. Counters of values take the columns of a RadixShared and all memory
// from there to the end of this struct: what a kernel has in between is not in use while a filter is looked for.
struct FilterScratch {
  uint32_t masses[words_of_masses(kMaxColumns)];
  uint32_t more[ValueCounts::kWords - words_of_masses(kMaxColumns) - kBins * kMaxColumns];
  Totals above;  // of the items above those whose keys are noted

  template <typename Reader>
  __device__ ValueCounts values(RadixShared& shared, const Reader& row) {
    // The sums by digit are not in use before the values are counted.
    constexpr uint32_t kNotes = (offsetof(RadixShared, of_cta) - offsetof(RadixShared, first)) / sizeof(uint4);
    return ValueCounts(shared.counts, reinterpret_cast<uint4*>(shared.first), kNotes, row);
  }

  // Keys of the items near a threshold lie behind the masses of few items: how many there are, then the keys.
  static constexpr uint32_t kNotedBegin = words_of_masses(kFewColumns);
  static constexpr uint32_t kMostNoted = sizeof(masses) / 4 + sizeof(more) / 4 - kNotedBegin - 1;
  __device__ uint32_t* noted() { return masses + kNotedBegin; }
};
// Given the offsets of both in a kernel's shared memory.
constexpr bool has_room_for_values(size_t radix, size_t scratch) {
  return scratch + sizeof(FilterScratch) >= radix + offsetof(RadixShared, counts) + ValueCounts::kWords * 4;
}

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

// Whether a row's values are counted while its peak is looked for.
template <typename Reader>
__device__ __forceinline__ bool counts_values(const Reader& row, const Sampling& sampling) {
  const bool by_count = sampling.top_k > 0 && sampling.top_k < row.vocab();
  return sampling.temperature != 0.0f && (sampling.top_p < 1.0f || by_count) && ValueCounts::pays(row);
}

// The peak; where it pays also the counts of the row's values, for find_threshold().
template <typename Reader>
__device__ __forceinline__ Peak find_peak(const Reader& row, const Sampling& sampling, RadixShared& shared,
                                          FilterScratch& scratch, ValueCounts::Seen& seen) {
  if (!counts_values(row, sampling)) return find_peak(row, shared.block);
  const ValueCounts values = scratch.values(shared, row);
  values.clear();
  __syncthreads();
  return find_peak(row, shared.block, [&](const uint4& word) { values.add(word, seen); });
}

// The items of a row, or those near a threshold whose keys this CTA has noted.
template <typename Reader>
struct SearchedItems {
  const LogitItems<Reader>& of_row;
  const uint32_t* noted;  // how many, then their keys; null: all of the row

  template <typename F>
  __device__ __forceinline__ void each(uint32_t least, F f) const {
    if (noted == nullptr) return of_row.each(least, f);
    for (uint32_t i = threadIdx.x; i < noted[0]; i += blockDim.x) f(noted[1 + i], 0);
  }
};

// Notes the keys of the logits from `least` to `most`. Returns whether there was room for them; shared.next[0] has the
// sums of all items then, and scratch.above of those above the noted ones.
template <typename Reader>
__device__ __forceinline__ bool note_keys(const LogitItems<Reader>& items, float least, float most, RadixShared& shared,
                                          FilterScratch& scratch) {
  uint32_t* const noted = scratch.noted();
  __syncthreads();
  if (threadIdx.x == 0) noted[0] = 0;
  __syncthreads();
  uint32_t num_items = 0, num_above = 0;
  uint64_t all = 0, above = 0;  // masses
  const auto has_any = [&](float largest) { return __any_sync(~0u, items.key_of(largest) != 0) != 0; };
  items.row.each_group_where(has_any, [&](int64_t, const Four& group) {
    float four[4];
    items.row.convert(group, four);
    uint32_t near = 0;  // bit i is for logit i
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // without branches, so that four exponentials are under way at once
      const float x = items.scale(four[i]);
      const bool counts = four[i] > -kInfinity && x >= items.min_x, is_above = counts && four[i] > most;
      const uint32_t mass = weight_of<ScalarMath>(counts ? x : 2 * kWeightless);
      num_items += counts;
      num_above += is_above;
      all += mass;
      above += is_above ? mass : 0;
      near |= uint32_t{counts && !is_above && four[i] >= least} << i;
    }
    if (near == 0) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!(near >> i & 1u)) continue;
      const uint32_t place = atomicAdd(noted, 1u);
      if (place < FilterScratch::kMostNoted) noted[1 + place] = order_key<ScalarMath>(four[i] + 0.0f);
    }
  });
  const Totals sum{block_sum(shared.block, num_items), block_sum(shared.block, all)};
  const Totals sum_above{block_sum(shared.block, num_above), block_sum(shared.block, above)};
  __syncthreads();
  Totals* const of_this_cta = totals_of_cta(shared, shared.next);
  if (threadIdx.x == 0) {
    of_this_cta[0] = sum;
    of_this_cta[1] = sum_above;
    of_this_cta[2] = {noted[0] > FilterScratch::kMostNoted, 0};
  }
  sum_ctas(shared, shared.next);
  if (threadIdx.x == 0) scratch.above = shared.next[1];
  __syncthreads();
  return shared.next[2].count == 0;
}

// Finds the filter of a row, except that all ties at the threshold are kept. Returns how many of them are to be kept, 0
// for all. `seen` comes from find_peak().
//
// Where values are counted, a threshold is one of them. Where only the upper halves of logits are counted, as in most
// float32 rows, they give a guess: the items near it are noted, and the threshold is looked for among these. If it is
// not there, as if nothing is counted, the whole row is searched.
template <typename Reader>
__device__ __forceinline__ uint64_t find_threshold(const Reader& row, const Sampling& sampling, const Scale& scale,
                                                   RadixShared& shared, FilterScratch& scratch,
                                                   const ValueCounts::Seen& seen, Filter& filter) {
  filter.min_x = min_p_bound(sampling.min_p);
  const bool by_mass = sampling.top_p < 1.0f;
  const bool by_count = sampling.top_k > 0 && sampling.top_k < row.vocab();
  if (!by_mass && !by_count) return 0;

  // Tokens without mass matter only for counts.
  const float view_min_x = sampling.joint ? -kInfinity : filter.min_x;
  const LogitItems<Reader> items{row, scale, by_count ? view_min_x : max_of(view_min_x, kWeightless)};
  const auto weight = [&](uint32_t key) { return weight_of<ScalarMath>(scale(logit_of_key<ScalarMath>(key))); };
  uint32_t* const masses = by_mass ? scratch.masses : nullptr;
  ValueCounts values = scratch.values(shared, row);
  enum { kRow, kNoted, kValues, kUpperHalves } among = kRow;
  if (counts_values(row, sampling)) {
    using Known = ValueCounts::Known;
    const Known known = values.settle(shared.block, seen, static_cast<uint64_t>(row.of_word()) * row.num_words());
    among = known == Known::kNothing ? kRow : known == Known::kValues ? kValues : kUpperHalves;
  }
  const auto guesses = [&] { return row.is_wide() && among == kUpperHalves; };
  const auto has_notes = [&] { return row.is_wide() && among == kNoted; };
  // First by count, then by mass; for a guess then the least and the largest of the upper halves that are noted. One
  // loop over the digits of all, as nvcc takes long for loops that contain others.
  enum Goal { kCount, kMass, kLeast, kLargest } const first_goal = by_count ? kCount : kMass;
  Goal goal = first_goal;
  Totals left{};
  Cut cut{};
  uint64_t needed = 0, ties = 0;
  uint32_t lowest = 0, highest = ~0u;  // items above the ends of what is noted
  float least = 0.0f;
  bool has_first = false;
  const auto search_again = [&](bool among_noted) {
    among = among_noted ? kNoted : kRow;
    goal = first_goal;
    has_first = false;
    cut = {};
  };
#pragma unroll 1
  for (int digit = 0;;) {
    Totals* const totals = digit == 0 ? shared.first : shared.next;
    if (digit > 0 || !has_first) {
      if (among <= kNoted) {
        const SearchedItems<Reader> searched{items, has_notes() ? scratch.noted() : nullptr};
        tabulate(shared, masses, totals, searched, weight, digit, cut.key, has_notes());
      } else if (digit == 0) {
        tabulate_values(shared, values, items, weight);
      } else {
        tabulate_next_of_values(shared, values, items, weight, cut.key);
      }
    }
    if (digit == 0) {
      if (!has_notes() && !has_first) left = sum_of_bins(shared, shared.first);
      has_first = true;
      if (goal == kCount && static_cast<uint64_t>(sampling.top_k) >= left.count && (by_mass || !guesses())) {
        if (!by_mass) return 0;
        goal = kMass;
      }
      if (goal <= kMass) {
        needed = goal == kMass ? top_p_mass(sampling.top_p, left.mass) : static_cast<uint64_t>(sampling.top_k);
      } else {
        const uint32_t margin = FilterScratch::kMostNoted / 16 * ptx::cluster_size();
        needed = goal == kLeast ? lowest + margin : highest > margin ? highest - margin : 1;
      }
      cut = {0, has_notes() ? scratch.above : Totals{}, {}};
    }
    cut.key = cut.key << kDigitBits | find_bin(shared, totals, goal == kMass, needed, cut);
    if (++digit < (among <= kNoted ? items.digits() : 2)) continue;
    digit = 0;
    const uint64_t count = cut.above.count + cut.at.count;
    if (guesses()) {
      if (goal <= kMass) {
        lowest = max_of(lowest, static_cast<uint32_t>(count));
        highest = min_of(highest, static_cast<uint32_t>(cut.above.count));
        if (!sampling.joint) left = {count, cut.above.mass + cut.at.mass};
        goal = goal == kCount && by_mass ? kMass : kLeast;
      } else if (goal == kLeast) {
        least = cut.key == 0 ? -kMaxFloat : logit_of_key<ScalarMath>(cut.key << 16);
        lowest = static_cast<uint32_t>(count);
        goal = kLargest;
      } else {
        const bool have_room =
            lowest - cut.above.count <= uint64_t{FilterScratch::kMostNoted} * ptx::cluster_size() &&
            note_keys(items, least, logit_of_key<ScalarMath>(cut.key << 16 | 0xffffu), shared, scratch);
        if (have_room) left = shared.next[0];
        search_again(have_room);
      }
      continue;
    }
    const uint64_t mass = cut.above.mass + cut.at.mass;
    if (has_notes()) {
      const Totals& above = scratch.above;
      const bool found =
          goal == kMass ? above.mass < needed && needed <= mass : above.count < needed && needed <= count;
      if (!found) {
        search_again(false);
        filter.min_logit = -kInfinity;
        continue;
      }
    }
    const float logit =
        among == kValues ? values.value(row, cut.key) : logit_of_key<ScalarMath>(whole_key(cut.key, items.digits()));
    if (goal == kCount) {
      filter.min_logit = logit;
      if (!sampling.joint) left = {count, mass};
    } else if (logit >= filter.min_logit) {
      filter.min_logit = logit;
      ties = ceil_div(needed - cut.above.mass, cut.at.mass / cut.at.count);
      if (ties == cut.at.count) ties = 0;
    }
    if (goal == kMass || !by_mass) return ties;
    goal = kMass;
  }
}

template <typename Reader>
__device__ __forceinline__ Filter find_filter(const Reader& row, const Sampling& sampling, const Scale& scale,
                                              RadixShared& shared, FilterScratch& scratch,
                                              const ValueCounts::Seen& seen) {
  Filter filter;
  const uint64_t ties = find_threshold(row, sampling, scale, shared, scratch, seen, filter);
  if (ties > 0) filter.tie_end = end_of_ties(row, filter.min_logit, ties, shared.block);
  return filter;
}

}  // namespace pagedtree::cuda
