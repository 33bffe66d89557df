// The tokens that filters keep of a row, in a list in shared memory. Of most rows they are few: after two looks at the
// row, whatever a rule does with the distribution is work on the list. A cluster reads the row, and each CTA has the
// list. Rows that do not allow it are left to other kernels: those with NaN, +inf or no finite logit, or with more
// tokens than fit that are kept or may be.
#pragma once

#include "core/verify/rules.h"
#include "cuda/filters.cuh"

namespace pagedtree::cuda {

constexpr uint32_t kMostNotes = 4096;
// Parts of a row of which each has a token among the notes. Of n parts these are n log n or so in all, 600 and 2500.
constexpr uint32_t kFewParts = 128, kManyParts = 384;

// The end of a search among the notes. Sums are of notes: their mass times 2^13, and how many they are.
struct NotesCut {
  uint32_t least;        // the least key that is kept
  uint64_t kept, above;  // sums from there on, and of the greater keys

  static __device__ uint64_t count(uint64_t sum) { return sum & 0x1fff; }
  static __device__ uint64_t mass(uint64_t sum) { return sum >> 13; }
  __device__ uint64_t ties() const { return count(kept) - count(above); }
};
static_assert(kMostNotes <= 0x1fff && kRowThreads <= 32 * kMaxWarps / 2);

struct KeptList {
  BlockShared block;
  NodeDistributions distributions;  // at a node; its target's filter lets no token pass that is not in the list
  uint64_t mass_of_cta[kMaxCluster];
  uint32_t notes_of_cta[kMaxCluster];
  uint32_t num_own, size;
  NotesCut cut;
  union {
    uint64_t own[kMostNotes];  // notes of this CTA's part of the row: the likeliest tokens, ranked()
    // The kept tokens: a token's complement and the key of its logit; by ascending token once they are sorted.
    uint64_t kept[kMostNotes];
  };
  union {
    uint64_t notes[kMostNotes];  // of all CTAs
    float masses[kMostNotes];    // of the kept tokens
  };
  union {
    uint32_t weights[kMostNotes];  // of the notes
    float drafts[kMostNotes];      // of the kept tokens: probabilities under the draft's distribution
  };

  __device__ int32_t token(uint32_t i) const { return static_cast<int32_t>(~static_cast<uint32_t>(kept[i] >> 32)); }
  __device__ float logit(uint32_t i) const { return logit_of_key<ScalarMath>(static_cast<uint32_t>(kept[i])); }
  // The first entry whose token is not below `least`.
  __device__ uint32_t place_of(int32_t least) const {
    uint32_t low = 0, high = size;
#pragma unroll 1
    while (low < high) {
      const uint32_t middle = (low + high) / 2;
      if (token(middle) < least) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

// The largest logit, all ones if there is a NaN, and a bound that some tokens reach, but seldom more than fit: the
// least of the largest logits of so many parts of the row. Both as keys.
template <typename Reader>
__device__ __forceinline__ void find_range(Reader& row, BlockShared& shared, uint32_t parts, uint32_t& peak,
                                           uint32_t& bound) {
  const auto best = row.best_of_words();
  uint32_t of_part = best.nan ? ~0u : order_key<ScalarMath>(best.logit + 0.0f);
  const uint32_t threads = ptx::cluster_size() * blockDim.x;
  for (uint32_t lanes = 1; lanes < 32 && lanes * parts < threads; lanes *= 2) {
    of_part = max_of(of_part, __shfl_xor_sync(~0u, of_part, static_cast<int>(lanes)));
  }
  // The largest and the complement of the least, of warps, then of the CTA, then of the cluster.
  const uint32_t lane = threadIdx.x % 32;
  const auto fold = [](uint64_t range) {
    return uint64_t{__reduce_max_sync(~0u, static_cast<uint32_t>(range >> 32))} << 32 |
           __reduce_max_sync(~0u, static_cast<uint32_t>(range));
  };
  const uint64_t of_warp = fold(uint64_t{of_part} << 32 | static_cast<uint32_t>(~of_part));
  if (lane == 0) shared.warps[threadIdx.x / 32] = of_warp;
  __syncthreads();
  if (threadIdx.x < 32) {
    const uint64_t of_cta = fold(lane < blockDim.x / 32 ? shared.warps[lane] : 0);
    if (lane < ptx::cluster_size()) *ptx::of_cta(&shared.ctas[ptx::cluster_rank()], lane) = of_cta;
  }
  ptx::meet_cluster();
  const uint64_t all = fold(lane < ptx::cluster_size() ? shared.ctas[lane] : 0);
  peak = static_cast<uint32_t>(all >> 32);
  bound = ~static_cast<uint32_t>(all);
}

// Notes the tokens from `bound` on whose x is at least min_x. Returns this thread's part of the mass from there on;
// unless it is exact, the sum over a row errs by less than error_of().
enum class Weighs { kNothing, kRoughly, kExactly };
template <typename Reader>
__device__ __forceinline__ uint64_t note_tokens(const Reader& row, KeptList& list, const Scale& scale, float bound,
                                                float min_x, Weighs weighs) {
  uint64_t exact = 0;
  double rough = 0.0;
  const float least_x = max_of(min_x, kWeightless), factor = log2_scale(scale);
  const auto counts = [&](float most) { return weighs != Weighs::kNothing && scale(most) >= least_x; };
  const auto has_any = [&](float most) { return __any_sync(~0u, most >= bound || counts(most)) != 0; };
  row.each_own_word(has_any, [&](int index, const uint4& word) {
    const float most = row.largest_of_word(word);
    if (weighs == Weighs::kRoughly && counts(most)) {
      rough += static_cast<double>(
          row.sum_of_word(word, [&](float logit) { return ptx::ex2((logit - scale.peak) * factor); }));
    } else if (counts(most)) {
      uint4 left = word;
#pragma unroll 1
      for (int i = 0; i < row.of_word(); ++i, left = row.without_first(left)) {
        const float x = scale(row.first_of(left));
        exact += weight_of<ScalarMath>(x >= least_x ? x : 2 * kWeightless);
      }
    }
    if (most < bound) return;
    for (uint32_t near = row.reaching(word, bound); near != 0; near &= near - 1) {
      const int i = __ffs(static_cast<int>(near)) - 1;
      const float logit = row.number(word, i);
      if (scale(logit) < min_x) continue;
      const uint32_t place = atomicAdd(&list.num_own, 1u);
      if (place < kMostNotes) list.own[place] = ranked(logit, index * row.of_word() + i);
    }
  });
  return exact + static_cast<uint64_t>(rough * 2147483648.0);
}
// Searches the largest key from `low` to `high` at which the notes reach a count or a mass, or one that keeps the same
// notes; `low` if none does. Keys are those of logits without their last bits; among the logits of one key, complements
// of tokens. The result is in list.cut.
inline __device__ __attribute__((noinline)) void cut_notes(uint32_t low, uint32_t high, int shift, uint32_t among,
                                                           bool by_mass, uint64_t target) {
  KeptList& list = ptx::shared<KeptList>();
  NotesCut cut{low, 0, 0};
  uint32_t from = low;
  uint64_t* of_warps = list.block.warps;
  __syncthreads();
#pragma unroll 1
  do {
    uint32_t lower = 0, upper = 0, count = 0;  // halves of the masses
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < list.size; i += blockDim.x) {
      const uint64_t note = list.notes[i];
      const uint32_t key = static_cast<uint32_t>(note >> 32) >> shift;
      if ((among == 0 ? key : key == among ? static_cast<uint32_t>(note) : 0) < from) continue;
      lower += list.weights[i] & 0xffffu;
      upper += list.weights[i] >> 16;
      ++count;
    }
    lower = __reduce_add_sync(~0u, lower);
    upper = __reduce_add_sync(~0u, upper);
    count = __reduce_add_sync(~0u, count);
    // The next sums go elsewhere, so that one barrier suffices.
    of_warps = list.block.warps + (of_warps == list.block.warps ? kMaxWarps / 2 : 0);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = ((uint64_t{upper} << 16) + lower) << 13 | count;
    __syncthreads();
    uint64_t sum = 0;
    for (unsigned w = 0; w < blockDim.x / 32; ++w) sum += of_warps[w];
    if (from == low || (by_mass ? NotesCut::mass(sum) : NotesCut::count(sum)) >= target) {
      cut.least = from;
      cut.kept = sum;
    } else {
      high = from - 1;
      cut.above = sum;
    }
    from = cut.least + (high - cut.least + 1) / 2;
  } while (cut.least < high && cut.ties() > 1 && (by_mass ? NotesCut::mass(cut.kept) : ~uint64_t{0}) >= target);
  if (threadIdx.x == 0) list.cut = cut;
  __syncthreads();
}

// Gives all CTAs the notes of each of them, and their weights. Returns the mass of the row; ~0: there are too many.
__device__ __forceinline__ uint64_t merge_notes(KeptList& list, const Scale& scale, uint64_t mass) {
  mass = block_sum(list.block, mass);
  __syncthreads();
  if (threadIdx.x < ptx::cluster_size()) {
    *ptx::of_cta(&list.mass_of_cta[ptx::cluster_rank()], threadIdx.x) = mass;
    *ptx::of_cta(&list.notes_of_cta[ptx::cluster_rank()], threadIdx.x) = list.num_own;
  }
  ptx::meet_cluster();
  mass = 0;
  uint32_t size = 0;
#pragma unroll 1
  for (uint32_t rank = 0; rank < ptx::cluster_size(); ++rank) {
    mass += list.mass_of_cta[rank];
    size += list.notes_of_cta[rank];
  }
  const bool fits = size <= kMostNotes;
  uint32_t rank = 0, begin = 0;  // of the CTA that has note i
#pragma unroll 1
  for (uint32_t i = threadIdx.x; fits && i < size; i += blockDim.x) {
#pragma unroll 1
    for (; i - begin >= list.notes_of_cta[rank]; ++rank) begin += list.notes_of_cta[rank];
    const uint64_t note = *ptx::of_cta(&list.own[i - begin], rank);
    list.notes[i] = note;
    list.weights[i] = weight_of<ScalarMath>(max_of(scale(ranked_value(note)), 2 * kWeightless));
  }
  if (threadIdx.x == 0) {
    list.size = min_of(size, kMostNotes);
    list.num_own = 0;
  }
  ptx::meet_cluster();  // all have read
  return fits ? mass : ~uint64_t{0};
}

// Finds what the filters keep among the notes, as find_filter() does in the row, given the mass of the row, which may
// err, and the logit from which on tokens are noted.
enum class Found { kNo, kYes, kTooRough };
__device__ __forceinline__ Found cut_by_filters(KeptList& list, const Sampling& sampling, const Scale& scale,
                                                uint64_t mass, uint64_t error, float bound, int digits, int32_t vocab,
                                                Filter& filter) {
  const float view_min_x = sampling.joint ? -kInfinity : filter.min_x;
  const bool has_all = bound <= -kMaxFloat, by_count = sampling.top_k > 0 && sampling.top_k < vocab;
  const int shift = 32 - kDigitBits * digits;
  const uint32_t low = order_key<ScalarMath>(bound) >> shift, high = order_key<ScalarMath>(scale.peak) >> shift;
  const NotesCut& cut = list.cut;
  if (by_count) {
    const uint64_t count = min_of<uint64_t>(static_cast<uint64_t>(sampling.top_k), list.size);
    if (count < static_cast<uint64_t>(sampling.top_k) && !has_all && !(scale(bound) < view_min_x)) return Found::kNo;
    cut_notes(low, high, shift, 0, false, count);
    filter.min_logit = logit_of_key<ScalarMath>(whole_key(cut.least, digits));
    if (!sampling.joint) {
      mass = NotesCut::mass(cut.kept);
      error = 0;
    }
  }
  if (sampling.top_p >= 1.0f) return by_count || has_all || scale(bound) < filter.min_x ? Found::kYes : Found::kNo;
  const uint64_t needed = top_p_mass(sampling.top_p, mass + error);
  const uint64_t needed_at_least = top_p_mass(sampling.top_p, mass - error);
  cut_notes(low, high, shift, 0, true, needed);
  const uint64_t kept = NotesCut::mass(cut.kept), above = NotesCut::mass(cut.above), equal = cut.ties();
  if (kept < needed) {  // then a count is the stricter filter
    if (kept >= needed_at_least) return Found::kTooRough;
    return by_count ? Found::kYes : Found::kNo;
  }
  if (above >= needed_at_least) return Found::kTooRough;
  const float logit = logit_of_key<ScalarMath>(whole_key(cut.least, digits));
  if (logit < filter.min_logit) return Found::kYes;
  filter.min_logit = logit;
  const uint64_t ties = ceil_div((needed - above) * equal, kept - above);
  if ((ties - 1) * (kept - above) >= (needed_at_least - above) * equal) return Found::kTooRough;
  if (ties < equal) {
    cut_notes(~static_cast<uint32_t>(vocab - 1), ~0u, shift, cut.least, false, ties);
    filter.tie_end = static_cast<int32_t>(~cut.least) + 1;
  }
  return Found::kYes;
}

// Lists what the filter keeps of the notes.
__device__ __forceinline__ void list_kept(KeptList& list, const Scale& scale, const Filter& filter) {
  const uint32_t notes = list.size;
  __syncthreads();
  if (threadIdx.x == 0) list.size = 0;
  __syncthreads();
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < notes; i += blockDim.x) {
    const uint64_t note = list.notes[i];
    const float logit = ranked_value(note);
    if (filter.keeps(ranked_id(note), logit, scale(logit)))
      list.kept[atomicAdd(&list.size, 1u)] = note << 32 | note >> 32;
  }
  __syncthreads();
}

// Sorts the list; writes the first of its likeliest tokens.
__device__ __forceinline__ void sort_kept(KeptList& list) {
  int32_t capacity = 1;
  while (capacity < static_cast<int32_t>(list.size)) capacity *= 2;
  block_sort(list.kept, static_cast<int32_t>(list.size), capacity);
  if (threadIdx.x >= 32) return;
  RowDistribution& target = list.distributions.target;
  const float peak = target.scale.peak;
  uint32_t lanes = 0, begin = 0;
#pragma unroll 1
  for (; begin < list.size; begin += 32) {
    const uint32_t i = begin + threadIdx.x;
    lanes = __ballot_sync(~0u, i < list.size && list.logit(i) == peak);
    if (lanes != 0) break;
  }
  if (threadIdx.x == 0) target.best = list.token(begin + static_cast<uint32_t>(__ffs(static_cast<int>(lanes))) - 1);
}

// Lists the tokens that sequence b keeps of the row that the target's distribution has, and writes the distribution;
// `again`: it is known. Returns whether it could.
template <DType kDType>
__device__ __attribute__((noinline)) bool find_kept(const SamplingParams& p, int64_t b, bool again) {
  KeptList& list = ptx::shared<KeptList>();
  if (threadIdx.x == 0) list.num_own = 0;
  __syncthreads();
  LogitReader<kDType> row(list.distributions.target.row);
  const int32_t vocab = row.vocab();
  const Sampling sampling = sampling_of(p, b);
  const bool greedy = sampling.temperature == 0.0f, by_count = sampling.top_k > 0 && sampling.top_k < vocab;
  Scale scale = list.distributions.target.scale;
  Filter filter = list.distributions.target.filter;
  float bound = filter.min_logit, min_x = filter.min_x;
  const bool by_mass = !greedy && sampling.top_p < 1.0f && (sampling.joint || !by_count);
  if (!again) min_x = greedy ? -kInfinity : min_p_bound(sampling.min_p);
  Weighs weighs = Weighs::kNothing;
  if (!again) {
    if (by_mass) weighs = sampling.joint || min_x <= kWeightless ? Weighs::kRoughly : Weighs::kExactly;
    if (!greedy && sampling.top_p >= 1.0f && !by_count && min_x == -kInfinity) return false;
  }
#pragma unroll 1
  for (uint32_t parts = kFewParts;;) {
    if (!again) {
      uint32_t peak, least;
      find_range(row, list.block, parts, peak, least);
      if (peak >= order_key<ScalarMath>(kInfinity) || peak <= order_key<ScalarMath>(-kInfinity)) {
        ptx::meet_cluster();  // all have read the range
        return false;
      }
      scale = {logit_of_key<ScalarMath>(peak), greedy ? 1.0f : inverse_temperature(sampling.temperature)};
      bound = greedy ? scale.peak : max_of(logit_of_key<ScalarMath>(least), -kMaxFloat);
    }
    row.learn({.logit = scale.peak});
    const float least_x = !again && sampling.joint ? -kInfinity : min_x;
    const uint64_t mass = merge_notes(list, scale, note_tokens(row, list, scale, bound, least_x, weighs));
    if (mass == ~uint64_t{0}) return false;
    if (again) break;
    Found found = Found::kYes;
    filter = {.min_x = min_x};
    if (greedy) {
      const uint32_t last = ~static_cast<uint32_t>(vocab - 1);
      cut_notes(last, ~0u, 0, order_key<ScalarMath>(scale.peak), false, 1);
      filter = {.min_logit = scale.peak, .tie_end = static_cast<int32_t>(~list.cut.least) + 1};
    } else {
      const uint64_t error = weighs == Weighs::kRoughly ? error_of(mass, vocab) : 0;
      found = cut_by_filters(list, sampling, scale, mass, error, bound, row.digits(), vocab, filter);
    }
    if (found == Found::kYes) {
      filter.min_logit = max_of(filter.min_logit, bound);
      if (threadIdx.x == 0)
        list.distributions.target = {list.distributions.target.row, scale, filter, -1, false, false};
      break;
    }
    if (found == Found::kTooRough) {
      weighs = Weighs::kExactly;
    } else if (parts == kFewParts) {
      parts = kManyParts;
    } else {
      return false;
    }
  }
  list_kept(list, scale, filter);
  return true;
}

}  // namespace pagedtree::cuda
