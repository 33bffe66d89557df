// How often each value occurs in a row of bfloat16 logits. A vocabulary has many more tokens than values, so each value
// is weighed once for all of its tokens, and the row is read once for both digits of a logit.
#pragma once

#include "cuda/logits.cuh"
#include "cuda/tile/radix.cuh"

namespace pagedtree::cuda {

// Counts the values from 2^-9 up to 2^7 and their negatives, which are nearly all logits. Other logits are items of a
// radix search, like the logits of other dtypes.
struct ValueCounts {
  static constexpr uint32_t kFirst = (127 - 9) << 7, kMagnitudes = 16 << 7;  // bits of a bfloat16 without the sign
  static constexpr uint32_t kDigitsOfSign = kMagnitudes / kBins;             // first digits of a key
  static_assert(kFirst % kBins == 0 && kMagnitudes % kBins == 0 && (kMagnitudes & (kMagnitudes - 1)) == 0);

  // A CTA that reads fewer tokens than there are values weighs less if it weighs tokens.
  template <typename Reader>
  static __device__ bool pays(const Reader& row) {
    return row.is_bfloat16() && row.vocab() >= 2 * kMagnitudes * ptx::cluster_size();
  }

  uint32_t counts[2][kMagnitudes + 1];  // of positive and of negative values; the last entry is for all others

  __device__ __forceinline__ void clear() {
    for (unsigned i = threadIdx.x; i <= kMagnitudes; i += blockDim.x) counts[0][i] = counts[1][i] = 0;
  }

  // Counts the logits of a word. Returns whether some are not among the values: is_other() tells which.
  __device__ __forceinline__ bool add(const uint4& word) {
    const uint32_t pairs[4] = {word.x, word.y, word.z, word.w};
    uint32_t seen = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      // Other logits are counted too, which saves a branch.
      const uint32_t bits = pairs[i / 2] >> i % 2 * 16, place = min_of((bits & 0x7fffu) - kFirst, kMagnitudes);
      atomicAdd(&counts[bits >> 15 & 1u][place], 1u);
      seen |= place;
    }
    return (seen & kMagnitudes) != 0;
  }
  static __device__ bool is_other(float logit) {
    return (ScalarMath::bits<uint32_t>(logit) >> 16 & 0x7fffu) - kFirst >= kMagnitudes;
  }

  // The first digits of the values' keys, i < 2 * kDigitsOfSign.
  static __device__ uint32_t digit(uint32_t i) {
    const uint32_t high = kFirst / kBins + i % kDigitsOfSign;
    return i < kDigitsOfSign ? kBins / 2 + high : kBins / 2 - 1 - high;
  }
  static __device__ bool has(uint32_t digit) { return magnitude(digit, 0) / kBins - kFirst / kBins < kDigitsOfSign; }

  // The tokens of the value whose key begins with these two digits, and their weight, if they are among the items. The
  // first digit must be one of the values'.
  template <typename Items, typename Weight>
  __device__ __forceinline__ Totals totals(const Items& items, Weight weight, uint32_t digit, uint32_t next) const {
    const bool negative = digit < kBins / 2;
    const uint32_t count = counts[negative][magnitude(digit, next) - kFirst];
    const uint32_t key = digit << 24 | next << 16 | (negative ? 0xffffu : 0u);
    if (count == 0 || items.key_of(logit_of_key<ScalarMath>(key)) == 0) return {0, 0};
    return {count, uint64_t{count} * weight(key)};
  }

 private:
  static __device__ uint32_t magnitude(uint32_t digit, uint32_t next) {
    const uint32_t bits = digit << kDigitBits | next;
    return (digit < kBins / 2 ? ~bits : bits) & 0x7fffu;
  }
};

// tabulate() by the first digit, for bfloat16 logits; items.each_word(f) calls f for each word of this thread.
template <typename Items, typename Weight>
__device__ __forceinline__ void tabulate_values(RadixShared& shared, RadixMasses* masses, ValueCounts& values,
                                                const Items& items, Weight weight) {
  clear_columns(shared, masses);
  values.clear();
  __syncthreads();
  items.each_word([&](uint4 word) {
    if (!values.add(word)) return;
#pragma unroll 1
    for (int i = 0; i < items.row.of_word(); ++i) {
      const float logit = items.row.first_of(word);
      const uint32_t key = ValueCounts::is_other(logit) ? items.key_of(logit) : 0;
      if (key != 0) add_to_column(shared, masses, key >> 24, key, weight);
      word = items.row.without_first(word);
    }
  });
  __syncthreads();
  Totals* const of_this_cta = totals_of_cta(shared, shared.first);
  for (unsigned bin = threadIdx.x; bin < kBins; bin += blockDim.x) {
    if (!ValueCounts::has(bin)) of_this_cta[bin] = sum_of_columns(shared, masses, bin);
  }
#pragma unroll 1
  for (uint32_t i = threadIdx.x / 32; i < 2 * ValueCounts::kDigitsOfSign; i += blockDim.x / 32) {
    const uint32_t digit = ValueCounts::digit(i), lane = threadIdx.x % 32;
    Totals sum{0, 0};
#pragma unroll 1
    for (uint32_t next = lane; next < kBins; next += 32) {
      const Totals of_value = values.totals(items, weight, digit, next);
      sum = {sum.count + of_value.count, sum.mass + of_value.mass};
    }
    sum = {warp_sum(sum.count), warp_sum(sum.mass)};
    if (lane == 0) of_this_cta[digit] = sum;
  }
  sum_ctas(shared, shared.first);
}

// The same by the second digit, after a first digit that is one of the values'. The counts in `values` do not change.
template <typename Items, typename Weight>
__device__ __forceinline__ void tabulate_next_of_values(RadixShared& shared, const ValueCounts& values,
                                                        const Items& items, Weight weight, uint32_t first) {
  Totals* const of_this_cta = totals_of_cta(shared, shared.next);
  for (unsigned bin = threadIdx.x; bin < kBins; bin += blockDim.x) {
    of_this_cta[bin] = values.totals(items, weight, first, bin);
  }
  sum_ctas(shared, shared.next);
}

}  // namespace pagedtree::cuda
