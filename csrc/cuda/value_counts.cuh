// How often each value occurs in a row of 16-bit logits. A vocabulary has more tokens than values, so each value is
// weighed once for all of its tokens. The row is counted while its peak is looked for: it is not read again for the
// masses of its tokens, neither for the first digit of a threshold nor for the second one. A float32 row is counted by
// the upper halves of its logits: models that compute in bfloat16 hand over rows of which these are the values.
#pragma once

#include "cuda/logits.cuh"
#include "cuda/tile/radix.cuh"

namespace pagedtree::cuda {

// Counters of eight bits, four in a word of shared memory.
// - float16: one counter for each pattern of bits.
// - bfloat16 and float32: sixteen copies, for lane % 16, of the counters of the values from 2^-8 up to 2^7 and of their
//   negatives, which are nearly all logits. Two lanes at most wait for each other then; with one copy it would be three
//   or four. The 15.5 octaves below 2^-8 have one counter for each value.
// A counter that overflows carries into its neighbour or out of the word, after which the counters no longer add up to
// the number of logits. Then, or if there are other values, the counts are of no use.
class ValueCounts {
 public:
  static constexpr uint32_t kCopies = 16;
  static constexpr uint32_t kFirst = (127 - 8) << 7, kMagnitudes = 15 << 7;  // bits of a bfloat16 without the sign
  // Of positive numbers; those of negative ones follow, so that the sign is a bit of the address. Behind the counters
  // of kMagnitudes is one for all others of a lane, then come those of the smaller values.
  static constexpr uint32_t kWordsOfSign = 1 << 13, kOthers = kMagnitudes / 4 * kCopies, kSmall = kOthers + kCopies;
  static constexpr uint32_t kSmallMagnitudes = (kWordsOfSign - kSmall) * 4, kSmallest = kFirst - kSmallMagnitudes;
  static constexpr uint32_t kZeros = 2 * kWordsOfSign, kNoted = kZeros + 1, kWords = kNoted + 1;
  static_assert(kZeros == 1 << 14);  // float16: a word has four patterns

  // What a thread has seen.
  struct Seen {
    uint32_t small = 0, zeros = 0;
    bool others = false;
    uint32_t lower = 0;  // the lower halves of float32 logits, all bits together
  };

  // Words of shared memory: at least kWords for counters, and `capacity` of 16 bytes to note words of logits in.
  template <typename Reader>
  __device__ ValueCounts(uint32_t* words, uint4* notes, uint32_t capacity, const Reader& row)
      : words_(words),
        notes_(notes),
        capacity_(capacity),
        is_bfloat16_(row.is_bfloat16() || row.is_wide()),
        is_wide_(row.is_wide()) {}

  // A CTA that reads few tokens weighs less if it weighs tokens.
  template <typename Reader>
  static __device__ bool pays(const Reader& row) {
    const uint32_t least = row.is_bfloat16() || row.is_wide() ? 4096 : 32768;
    return row.vocab() >= least * ptx::cluster_size();
  }

  __device__ __forceinline__ void clear() const {
    for (unsigned i = threadIdx.x; i < kWords; i += blockDim.x) words_[i] = 0;
  }

  // Counts the clean logits of a word.
  __device__ __forceinline__ void add(uint4 word, Seen& seen) const {
    if (is_wide_) {
      constexpr uint32_t kNothing = 0xff80ff80u;  // -inf
      seen.lower |= word.x | word.y | word.z | word.w;
      word = {__byte_perm(word.x, word.y, 0x7632), __byte_perm(word.z, word.w, 0x7632), kNothing, kNothing};
    }
    const uint32_t pairs[4] = {word.x, word.y, word.z, word.w};
    if (!is_bfloat16_) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t bits = pairs[i / 2] >> i % 2 * 16 & 0xffffu;
        add_to(words_, bits & ~3u, bits);
      }
      return;
    }
    uint32_t* const copy = words_ + threadIdx.x % kCopies;
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i >= 4 && is_wide_) break;
      // Others are counted too, which saves a branch.
      const uint32_t bits = pairs[i / 2] >> i % 2 * 16, place = min_of((bits & 0x7fffu) - kFirst, kMagnitudes);
      add_to(copy, (place * kCopies & ~(4 * kCopies - 1)) | (bits & 0x8000u), place);
      most = max_of(most, place);
    }
    // A lane seldom has others, and all of its warp wait meanwhile.
    if (most < kMagnitudes) return;
    const uint32_t place = atomicAdd(&words_[kNoted], 1u);
    if (place < capacity_) {
      notes_[place] = word;
    } else {
      add_others(word, seen);
    }
  }

  // What count() knows of what this CTA has read: nothing, how many logits begin with the bits of a value, or how many
  // are equal to it. The same for all CTAs.
  enum class Known { kNothing, kUpperHalves, kValues };

  // To be called by all threads of the cluster once the whole row, `total` logits with those past its end, was added.
  __device__ __forceinline__ Known settle(BlockShared& shared, Seen seen, uint64_t total) {
    __syncthreads();
    const uint32_t notes = min_of(words_[kNoted], capacity_);
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < notes; i += blockDim.x) add_others(notes_[i], seen);
    if (seen.zeros > 0) atomicAdd(&words_[kZeros], seen.zeros);
    __syncthreads();
    constexpr uint64_t kOthersSeen = uint64_t{1} << 33, kLowerSeen = uint64_t{1} << 50;  // by one thread
    uint64_t missing = seen.small + (leads_cluster() ? total : 0);
    if (seen.others) missing += kOthersSeen;
    if ((seen.lower & 0xffffu) != 0) missing += kLowerSeen;
    if (is_bfloat16_) {
#pragma unroll 1
      for (uint32_t i = threadIdx.x; i < 2 * kWordsOfSign / kCopies; i += blockDim.x) {
        missing -= settle_copies(i * kCopies % kWordsOfSign, words_ + i * kCopies);
      }
    } else {
      for (uint32_t i = threadIdx.x; i < kZeros; i += blockDim.x) {
        const uint32_t word = words_[i];
        missing -= i == kForbiddenHalf / 4 ? word : sum_of_bytes(word);
      }
    }
    missing = block_sum(shared, missing);
    missing = fold_ctas(shared, missing, [](uint64_t a, uint64_t b) { return a + b; });
    if (missing == 0) return Known::kValues;
    if (!is_wide_ || missing % kLowerSeen != 0) return Known::kNothing;
    middle_ = 0x8000u;
    return Known::kUpperHalves;
  }

  // Values by keys of 16 bits, which are in the order of the values.
  static __device__ uint32_t bits_of_key(uint32_t key) { return (key < 0x8000u ? ~key : key ^ 0x8000u) & 0xffffu; }
  // A value in the middle of those that begin with its bits.
  template <typename Reader>
  __device__ float value(const Reader& row, uint32_t key) const {
    return row.value(is_wide_ ? bits_of_key(key) << 16 | middle_ : bits_of_key(key));
  }
  __device__ __forceinline__ uint32_t count(uint32_t key) const {
    const uint32_t bits = bits_of_key(key), magnitude = bits & 0x7fffu;
    if (magnitude == 0) {  // -0 is +0
      if (bits != 0) return 0;
      return is_bfloat16_ ? words_[kZeros] : byte_of(words_[0], 0) + byte_of(words_[0x8000 / 4], 0);
    }
    if (!is_bfloat16_) return magnitude < kForbiddenHalf % 0x8000 ? byte_of(words_[bits / 4], bits % 4) : 0;
    const uint32_t place = magnitude - kFirst, small = magnitude - kSmallest;
    const uint32_t* const of_sign = words_ + (bits >> 15) * kWordsOfSign;
    if (place < kMagnitudes) return of_sign[place / 4 * kCopies + place % 2] >> place % 4 / 2 * 16 & 0xffffu;
    return small < kSmallMagnitudes ? byte_of(of_sign[kSmall + small / 4], small % 4) : 0;
  }

  // The first digits of keys of which logits were counted, i < num_digits().
  __device__ uint32_t num_digits() const {
    return is_bfloat16_ ? 2 * kDigitsOfSign + 1 : 2 * (kForbiddenHalf % 0x8000 / kBins);
  }
  __device__ uint32_t digit(uint32_t i) const {
    const uint32_t of_sign = num_digits() / 2, high = i % of_sign + (is_bfloat16_ ? kSmallest / kBins : 0);
    if (i == 2 * of_sign) return kBins / 2;  // zero
    return i < of_sign ? kBins / 2 + high : kBins / 2 - 1 - high;
  }

 private:
  static constexpr uint32_t kForbiddenHalf = 0xfc00;  // -inf, the only one of its four values that clean logits have
  static constexpr uint32_t kDigitsOfSign = ceil_div<uint32_t>(kFirst + kMagnitudes, kBins) - kSmallest / kBins;

  static __device__ uint32_t byte_of(uint32_t word, uint32_t i) { return word >> i * 8 & 0xffu; }
  static __device__ uint32_t sum_of_bytes(uint32_t word) {
    const uint32_t pairs = (word & 0xff00ffu) + (word >> 8 & 0xff00ffu);
    return (pairs & 0xffffu) + (pairs >> 16);
  }

  // Adds 1 to counter `i` % 4 of the word at this byte.
  static __device__ __forceinline__ void add_to(uint32_t* words, uint32_t byte, uint32_t i) {
    uint32_t* const word = reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(words) + byte);
    atomicAdd(word, __funnelshift_r(1, 1, 0u - i * 8));  // 1 rotated: shifts are modulo 32
  }

  // Counts what add() has not of a word of bfloat16.
  __device__ __forceinline__ void add_others(uint4 word, Seen& seen) const {
#pragma unroll 1
    for (int i = 0; i < 8; ++i) {
      add_other(word.x & 0xffffu, seen);
      word = {__funnelshift_r(word.x, word.y, 16), __funnelshift_r(word.y, word.z, 16),
              __funnelshift_r(word.z, word.w, 16), word.w >> 16};
    }
  }
  __device__ __forceinline__ void add_other(uint32_t bits, Seen& seen) const {
    const uint32_t magnitude = bits & 0x7fffu, small = magnitude - kSmallest;
    if (magnitude - kFirst < kMagnitudes) return;
    if (small < kSmallMagnitudes) {
      add_to(words_, (bits & 0x8000u) + kSmall * 4 + (small & ~3u), small);
      ++seen.small;
    } else if (magnitude == 0) {
      ++seen.zeros;
    } else if (bits != 0xff80u) {  // -inf
      seen.others = true;
    }
  }

  // Adds up the copies of four counters, and leaves the sums of bytes 0 and 2, and of bytes 1 and 3, in the first two
  // words. The words for others are counters of 32 bits, behind them is one copy each. Returns the sum of all.
  __device__ __forceinline__ uint32_t settle_copies(uint32_t first_of_sign, uint32_t* copies) const {
    uint32_t even = 0, odd = 0, words = 0;
#pragma unroll 1
    for (uint32_t i = 0; i < kCopies; i += 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(copies + i);
      const uint32_t of_four[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (const uint32_t word : of_four) {
        even += word & 0xff00ffu;
        odd += word >> 8 & 0xff00ffu;
        words += word;
      }
    }
    if (first_of_sign == kOthers) return words;
    if (first_of_sign < kOthers) {
      copies[0] = even;
      copies[1] = odd;
    }
    return (even & 0xffffu) + (even >> 16) + (odd & 0xffffu) + (odd >> 16);
  }

  uint32_t* words_;
  uint4* notes_;
  uint32_t capacity_;
  bool is_bfloat16_, is_wide_;
  uint32_t middle_ = 0;
};

// The tokens of the value with a key of 16 bits, and their weight, if they are among the items.
template <typename Items, typename Weight>
__device__ __forceinline__ Totals totals_of_value(const ValueCounts& values, const Items& items, Weight weight,
                                                  uint32_t key) {
  const uint32_t count = values.count(key);
  if (count == 0) return {0, 0};
  const uint32_t key_of_item = items.key_of(min_of(values.value(items.row, key), items.scale.peak));
  if (key_of_item == 0) return {0, 0};
  return {count, uint64_t{count} * weight(key_of_item)};
}

// tabulate() by the first of the two digits of such keys.
template <typename Items, typename Weight>
__device__ __forceinline__ void tabulate_values(RadixShared& shared, const ValueCounts& values, const Items& items,
                                                Weight weight) {
  Totals* const of_this_cta = totals_of_cta(shared, shared.first);
  for (unsigned bin = threadIdx.x; bin < kBins; bin += blockDim.x) of_this_cta[bin] = {0, 0};
  __syncthreads();
#pragma unroll 1
  for (uint32_t i = threadIdx.x / 32; i < values.num_digits(); i += blockDim.x / 32) {
    const uint32_t digit = values.digit(i), lane = threadIdx.x % 32;
    Totals sum{0, 0};
#pragma unroll 1
    for (uint32_t next = lane; next < kBins; next += 32) {
      const Totals of_value = totals_of_value(values, items, weight, digit * kBins + next);
      sum = {sum.count + of_value.count, sum.mass + of_value.mass};
    }
    sum = {warp_sum(sum.count), warp_sum(sum.mass)};
    if (lane == 0) of_this_cta[digit] = sum;
  }
  sum_ctas(shared, shared.first);
}

// The same by the second digit.
template <typename Items, typename Weight>
__device__ __forceinline__ void tabulate_next_of_values(RadixShared& shared, const ValueCounts& values,
                                                        const Items& items, Weight weight, uint32_t first) {
  Totals* const of_this_cta = totals_of_cta(shared, shared.next);
  for (unsigned bin = threadIdx.x; bin < kBins; bin += blockDim.x) {
    of_this_cta[bin] = totals_of_value(values, items, weight, first * kBins + bin);
  }
  sum_ctas(shared, shared.next);
}

}  // namespace pagedtree::cuda
