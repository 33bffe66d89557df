// Finds the best items of a large set by a 32-bit key, without sorting it: the threshold is found digit by digit, from
// the counts and masses of items by digit. These are sums of integers, the same for any number of threads.
#pragma once

#include "cuda/tile/block.cuh"

namespace pagedtree::cuda {

constexpr int kDigitBits = 8;
constexpr int kBins = 1 << kDigitBits;
constexpr int kKeyDigits = 32 / kDigitBits;

struct Totals {
  uint64_t count, mass;
};

// Lanes add in separate columns, so that two of them seldom use one bin at a time. Where items are few, so are columns.
constexpr unsigned kMaxColumns = 16, kFewColumns = 4;
using Columns = uint32_t[kBins * kMaxColumns];
// Masses are added in two halves, so that no column overflows for the largest vocabulary. The columns of the upper
// halves follow those of the lower ones.
using MassColumns = uint32_t[2 * kBins * kMaxColumns];
static_assert(kMaxVocab / kMaxColumns * 0xffff <= 0xffffffff);

struct RadixShared {
  BlockShared block;
  Totals first[kBins];   // sums by the first digit
  Totals next[kBins];    // sums by the current digit
  Totals of_cta[kBins];  // sums of one CTA of a cluster
  Totals above, at;      // the result of a search
  uint32_t bin;
  alignas(16) Columns counts;
};

// The largest key such that the items at or above it reach some target.
struct Cut {
  uint32_t key;
  Totals above, at;
};

__device__ __forceinline__ void clear_columns(RadixShared& shared, uint32_t* masses, unsigned columns) {
  for (unsigned i = threadIdx.x; i < kBins * columns; i += blockDim.x) {
    shared.counts[i] = 0;
    if (masses != nullptr) masses[i] = masses[i + kBins * columns] = 0;
  }
}

__device__ __forceinline__ void add_to_column(RadixShared& shared, uint32_t* masses, unsigned columns, uint32_t bin,
                                              uint32_t key, const auto& weight) {
  const uint32_t cell = bin * columns + (threadIdx.x & (columns - 1));
  atomicAdd(&shared.counts[cell], 1u);
  if (masses == nullptr) return;
  const uint32_t mass = weight(key);
  if ((mass & 0xffffu) != 0) atomicAdd(&masses[cell], mass & 0xffffu);
  if (mass >> 16 != 0) atomicAdd(&masses[cell + kBins * columns], mass >> 16);
}

__device__ __forceinline__ Totals sum_of_columns(const RadixShared& shared, const uint32_t* masses, unsigned columns,
                                                 unsigned bin) {
  Totals sum{0, 0};
  for (unsigned i = 0; i < columns; ++i) {
    const unsigned cell = bin * columns + ((bin + i) & (columns - 1));  // neighbouring threads use different banks
    sum.count += shared.counts[cell];
    if (masses != nullptr) sum.mass += masses[cell] + (uint64_t{masses[cell + kBins * columns]} << 16);
  }
  return sum;
}

// Where a CTA writes its own sums; sum_ctas() adds those of the cluster.
__device__ __forceinline__ Totals* totals_of_cta(RadixShared& shared, Totals* totals) {
  return ptx::cluster_size() == 1 ? totals : shared.of_cta;
}

__device__ __forceinline__ void sum_ctas(RadixShared& shared, Totals* totals) {
  if (ptx::cluster_size() > 1) {
    ptx::cluster_sync();
    for (unsigned bin = threadIdx.x; bin < kBins; bin += blockDim.x) {
      Totals sum{0, 0};
      for (uint32_t rank = 0; rank < ptx::cluster_size(); ++rank) {
        const Totals of_cta = *ptx::of_cta(&shared.of_cta[bin], rank);
        sum = {sum.count + of_cta.count, sum.mass + of_cta.mass};
      }
      totals[bin] = sum;
    }
  }
  ptx::cluster_sync();
}

// Sums by `digit`, over all CTAs of the cluster, the items whose keys begin with the digits of `prefix`.
// items.each(least, f) calls f(key, index) for each of this thread's items; items with keys below `least` may be left
// out. `masses`, MassColumns, may be null.
template <typename Items, typename Weight>
__device__ __forceinline__ void tabulate(RadixShared& shared, uint32_t* masses, Totals* totals, const Items& items,
                                         Weight weight, int digit, uint32_t prefix) {
  const unsigned columns = blockDim.x == 32 ? kFewColumns : kMaxColumns;
  const int shift = 32 - kDigitBits * (digit + 1);
  clear_columns(shared, masses, columns);
  __syncthreads();
  items.each(static_cast<uint32_t>(uint64_t{prefix} << (shift + kDigitBits)), [&](uint32_t key, int64_t) {
    if (static_cast<uint32_t>(uint64_t{key} >> (shift + kDigitBits)) != prefix) return;
    add_to_column(shared, masses, columns, key >> shift & (kBins - 1), key, weight);
  });
  __syncthreads();
  Totals* const of_this_cta = totals_of_cta(shared, totals);
  for (unsigned bin = threadIdx.x; bin < kBins; bin += blockDim.x) {
    of_this_cta[bin] = sum_of_columns(shared, masses, columns, bin);
  }
  sum_ctas(shared, totals);
}

__device__ __forceinline__ Totals sum_of_bins(RadixShared& shared, const Totals* totals) {
  Totals mine{0, 0};
  for (unsigned bin = threadIdx.x; bin < kBins; bin += blockDim.x) {
    mine.count += totals[bin].count;
    mine.mass += totals[bin].mass;
  }
  return {block_sum(shared.block, mine.count), block_sum(shared.block, mine.mass)};
}

// The highest bin at which the count or mass from the top, cut.above included, reaches `target`; the lowest bin if none
// does.
__device__ __forceinline__ uint32_t find_bin(RadixShared& shared, const Totals* totals, bool by_mass, uint64_t target,
                                             Cut& cut) {
  constexpr int kBinsPerLane = kBins / 32;
  __syncthreads();
  if (threadIdx.x < 32) {
    const int lane = static_cast<int>(threadIdx.x), top = kBins - 1 - kBinsPerLane * lane;
    Totals mine{0, 0};
    // Fully unrolled, these loops would need more registers than any pass over a row.
#pragma unroll 2
    for (int i = 0; i < kBinsPerLane; ++i) {
      mine.count += totals[top - i].count;
      mine.mass += totals[top - i].mass;
    }
    Totals reached = mine;
#pragma unroll 1
    for (int delta = 1; delta < 32; delta *= 2) {
      const uint64_t count = __shfl_up_sync(~0u, reached.count, delta), mass = __shfl_up_sync(~0u, reached.mass, delta);
      if (lane >= delta) reached = {reached.count + count, reached.mass + mass};
    }
    reached = {cut.above.count + reached.count, cut.above.mass + reached.mass};
    const uint32_t lanes = __ballot_sync(~0u, (by_mass ? reached.mass : reached.count) >= target);
    if (lane == (lanes == 0 ? 31 : __ffs(static_cast<int>(lanes)) - 1)) {
      Totals above{reached.count - mine.count, reached.mass - mine.mass};
      int bin = top;
      while (true) {
        const Totals at = totals[bin];
        if (bin == top - kBinsPerLane + 1 || (by_mass ? above.mass + at.mass : above.count + at.count) >= target) break;
        above = {above.count + at.count, above.mass + at.mass};
        --bin;
      }
      shared.above = above;
      shared.at = totals[bin];
      shared.bin = static_cast<uint32_t>(bin);
    }
  }
  __syncthreads();
  cut.above = shared.above;
  cut.at = shared.at;
  return shared.bin;
}

// The key that begins with these digits. Keys differ only in them: the other bits follow from the sign of the float
// that the key stands for.
__device__ __forceinline__ uint32_t whole_key(uint32_t key, int digits) {
  const int rest = 32 - kDigitBits * digits;
  if (rest == 0) return key;
  const bool negative = key >> (kDigitBits * digits - 1) == 0;
  return key << rest | (negative ? (1u << rest) - 1 : 0u);
}

// The cut at which the count reaches `target`. shared.first holds the sums by the first digit; tabulate_next(digit,
// prefix) writes those by a later digit to shared.next.
template <typename TabulateNext>
__device__ __forceinline__ Cut find_cut(RadixShared& shared, int digits, uint64_t target, TabulateNext tabulate_next) {
  Cut cut{};
  cut.key = find_bin(shared, shared.first, false, target, cut);
#pragma unroll 1
  for (int digit = 1; digit < digits; ++digit) {
    tabulate_next(digit, cut.key);
    cut.key = cut.key << kDigitBits | find_bin(shared, shared.next, false, target, cut);
  }
  cut.key = whole_key(cut.key, digits);
  return cut;
}

// The `count` best of a set, by key, then by index.
struct Selection {
  uint32_t least;   // key
  int64_t tie_end;  // items with this key belong to the best if their index is below it
  __device__ bool has(uint32_t key, int64_t index) const { return key > least || (key == least && index < tie_end); }
};

// Selects the `count` best of items.size() items. items.each() leaves out items that do not take part; all others have
// keys above 0. items.end_of_ties(shared, key, n) is one past the index of the n-th item with that key.
template <typename Items>
__device__ __forceinline__ Selection select_best(RadixShared& shared, const Items& items, int digits, uint64_t count) {
  const auto no_weight = [](uint32_t) { return 0u; };
  tabulate(shared, nullptr, shared.first, items, no_weight, 0, 0);
  if (sum_of_bins(shared, shared.first).count <= count) return {0, 0};
  if (count == 0) return {~0u, 0};
  const Cut cut = find_cut(shared, digits, count, [&](int digit, uint32_t prefix) {
    tabulate(shared, nullptr, shared.next, items, no_weight, digit, prefix);
  });
  const uint64_t ties = count - cut.above.count;
  if (ties == cut.at.count) return {cut.key, items.size()};
  return {cut.key, items.end_of_ties(shared.block, cut.key, ties)};
}

struct BestShared {
  RadixShared radix;
  uint64_t best[kMaxTreeNodes];
  int32_t size;
};

// A key and the complement of its index: the larger one is the better.
__device__ __forceinline__ uint64_t ranked_key(uint32_t key, int64_t index) {
  return uint64_t{key} << 32 | static_cast<uint32_t>(~static_cast<uint32_t>(index));
}

// Writes the `count` best items to shared.best of the cluster's first CTA, best first, by their ranked keys. Returns
// how many; 0 in other CTAs.
template <typename Items>
__device__ __forceinline__ int32_t list_best(BestShared& shared, const Items& items, int digits, int32_t count) {
  const Selection selection = select_best(shared.radix, items, digits, static_cast<uint64_t>(count));
  if (threadIdx.x == 0) shared.size = 0;
  ptx::cluster_sync();
  BestShared* const first = ptx::of_cta(&shared, 0);
  items.each(selection.least, [&](uint32_t key, int64_t index) {
    if (selection.has(key, index)) first->best[atomicAdd(&first->size, 1)] = ranked_key(key, index);
  });
  ptx::cluster_sync();
  if (ptx::cluster_rank() != 0) return 0;
  const int32_t size = shared.size;
  int32_t capacity = 1;
  while (capacity < size) capacity *= 2;
  block_sort(shared.best, size, capacity);
  return size;
}

}  // namespace pagedtree::cuda
