// Radix selection: finds the threshold of the best items by a 32-bit key, digit by digit, from counts and masses per
// digit. Integer sums are independent of the number of threads.
#pragma once

#include "cuda/tile/block.cuh"

namespace pagedtree::cuda {

constexpr int kDigitBits = 8;
constexpr int kBins = 1 << kDigitBits;
constexpr int kKeyDigits = 32 / kDigitBits;

struct Totals {
  uint64_t count, mass;
};

// Each lane adds to one of several columns, which avoids most conflicts of atomics. Few items need few columns.
constexpr unsigned kMaxColumns = 16, kFewColumns = 4;
using Columns = uint32_t[kBins * kMaxColumns];
// Masses are added as 16-bit halves, upper columns after lower ones, so that 32 bits do not overflow at kMaxVocab.
using MassColumns = uint32_t[2 * kBins * kMaxColumns];
static_assert(kMaxVocab / kMaxColumns * 0xffff <= 0xffffffff);

// The largest key for which the items at or above it reach the target.
struct Cut {
  uint32_t key;
  uint64_t target;
  Totals above, at;
};

struct RadixShared {
  BlockShared block;
  Totals totals[kBins];  // per digit, cluster
  Totals of_cta[kBins];  // per digit, this CTA
  Cut cut;
  alignas(16) Columns counts;
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
#pragma unroll 1
  for (unsigned i = 0; i < columns; ++i) {
    const unsigned cell = bin * columns + ((bin + i) & (columns - 1));  // rotated against bank conflicts
    sum.count += shared.counts[cell];
    if (masses != nullptr) sum.mass += masses[cell] + (uint64_t{masses[cell + kBins * columns]} << 16);
  }
  return sum;
}

// Sums counts and masses per `digit`, over the cluster, of items whose keys begin with `prefix`. items.each(least, f)
// calls f(key, index) for this thread's items, maybe not for keys below `least`. Keys are > 0. `among` > 0: only items
// with that key, by the complement of their index. `masses` (MassColumns) may be null.
template <typename Items, typename Weight>
__device__ __forceinline__ void tabulate(RadixShared& shared, uint32_t* masses, const Items& items, Weight weight,
                                         int digit, uint32_t prefix, uint32_t among = 0) {
  const unsigned columns = blockDim.x == 32 ? kFewColumns : kMaxColumns;
  const int shift = 32 - kDigitBits * (digit + 1);
  clear_columns(shared, masses, columns);
  __syncthreads();
  const uint32_t least = static_cast<uint32_t>(uint64_t{prefix} << (shift + kDigitBits));
  items.each(among == 0 ? least : among, [&](uint32_t key, int64_t index) {
    const uint32_t sought = among == 0 ? key : ~static_cast<uint32_t>(index);
    if ((among != 0 && key != among) || static_cast<uint32_t>(uint64_t{sought} >> (shift + kDigitBits)) != prefix)
      return;
    add_to_column(shared, masses, columns, sought >> shift & (kBins - 1), key, weight);
  });
  __syncthreads();
  Totals* const of_this_cta = ptx::cluster_size() == 1 ? shared.totals : shared.of_cta;
  for (unsigned bin = threadIdx.x; bin < kBins; bin += blockDim.x) {
    of_this_cta[bin] = sum_of_columns(shared, masses, columns, bin);
  }
  if (ptx::cluster_size() > 1) {
    ptx::meet_cluster();
    for (unsigned bin = threadIdx.x; bin < kBins; bin += blockDim.x) {
      Totals sum{0, 0};
#pragma unroll 2
      for (uint32_t rank = 0; rank < ptx::cluster_size(); ++rank) {
        const Totals of_cta = *ptx::of_cta(&shared.of_cta[bin], rank);
        sum = {sum.count + of_cta.count, sum.mass + of_cta.mass};
      }
      shared.totals[bin] = sum;
    }
  }
  ptx::meet_cluster();
}

// Appends to shared.cut the highest bin at which the count or mass from the top reaches the target, or the lowest bin
// if none does. The first digit calls target(sums of all bins).
template <typename Target>
__device__ __forceinline__ void find_bin(RadixShared& shared, bool by_mass, bool is_first, Target target) {
  constexpr int kBinsPerLane = kBins / 32;
  const Totals* const totals = shared.totals;
  if (threadIdx.x < 32) {
    Cut cut = shared.cut;
    const int lane = static_cast<int>(threadIdx.x), top = kBins - 1 - kBinsPerLane * lane;
    Totals mine{0, 0};
    // Unrolled, these loops would set the kernel's register count.
#pragma unroll 1
    for (int i = 0; i < kBinsPerLane; ++i) {
      mine.count += totals[top - i].count;
      mine.mass += totals[top - i].mass;
    }
    Totals reached{warp_scan(mine.count), warp_scan(mine.mass)};
    if (is_first) cut.target = target(Totals{__shfl_sync(~0u, reached.count, 31), __shfl_sync(~0u, reached.mass, 31)});
    reached = {cut.above.count + reached.count, cut.above.mass + reached.mass};
    const uint32_t lanes = __ballot_sync(~0u, (by_mass ? reached.mass : reached.count) >= cut.target);
    __syncwarp();  // after all reads of the cut
    if (lane == (lanes == 0 ? 31 : __ffs(static_cast<int>(lanes)) - 1)) {
      Totals above{reached.count - mine.count, reached.mass - mine.mass};
      int bin = top;
      while (true) {
        const Totals at = totals[bin];
        const uint64_t with_it = by_mass ? above.mass + at.mass : above.count + at.count;
        if (bin == top - kBinsPerLane + 1 || with_it >= cut.target) break;
        above = {above.count + at.count, above.mass + at.mass};
        --bin;
      }
      shared.cut = {cut.key << kDigitBits | static_cast<uint32_t>(bin), cut.target, above, totals[bin]};
    }
  }
  __syncthreads();
}

// Extends digits to a key. Keys differ only in these digits; the float's sign decides the remaining bits.
__device__ __forceinline__ uint32_t whole_key(uint32_t key, int digits) {
  const int rest = 32 - kDigitBits * digits;
  if (rest == 0) return key;
  const bool negative = key >> (kDigitBits * digits - 1) == 0;
  return key << rest | (negative ? (1u << rest) - 1 : 0u);
}

// Returns the cut at which count or mass reach target(sums of all items). Target 0 stops after the first digit, with
// its sums in shared.totals. Without `among`, items may be limited to keys that begin with `first` digits of `prefix`.
template <typename Items, typename Weight, typename Target>
__device__ __forceinline__ Cut find_cut(RadixShared& shared, uint32_t* masses, const Items& items, Weight weight,
                                        int digits, uint32_t among, bool by_mass, Target target, int first = 0,
                                        uint32_t prefix = 0) {
  if (among != 0) {
    digits = kKeyDigits;
    while (first < digits - 1 && items.size() <= int64_t{1} << (32 - kDigitBits * (first + 1))) ++first;
    prefix = (1u << kDigitBits * first) - 1;
  }
  if (threadIdx.x == 0) shared.cut = {prefix, 1, {}, {}};
  __syncthreads();
#pragma unroll 1
  for (int digit = first; digit < digits && shared.cut.target > 0; ++digit) {
    tabulate(shared, masses, items, weight, digit, shared.cut.key, among);
    find_bin(shared, by_mass, digit == first, target);
  }
  Cut cut = shared.cut;
  cut.key = whole_key(cut.key, digits);
  __syncthreads();  // after all reads of the cut
  return cut;
}

// The `count` best items, by key, then by index.
struct Selection {
  uint32_t least;   // key
  int64_t tie_end;  // items with this key are selected below this index
  __device__ bool has(uint32_t key, int64_t index) const { return key > least || (key == least && index < tie_end); }
};

// Selects the `count` best items. items.each() may leave items out.
template <typename Items>
__device__ __forceinline__ Selection select_best(RadixShared& shared, const Items& items, int digits, uint64_t count) {
  if (count == 0) return {~0u, 0};
  uint64_t left = count;
#pragma unroll 1
  for (uint32_t among = 0;;) {
    const Cut cut = find_cut(
        shared, nullptr, items, [](uint32_t) { return 0u; }, digits, among, false,
        [&](const Totals& all) { return among == 0 && all.count <= count ? 0 : left; });
    if (cut.target == 0) return {0, 0};
    if (among != 0) return {among, int64_t{~cut.key} + 1};
    left = count - cut.above.count;
    if (left == cut.at.count) return {cut.key, items.size()};
    among = cut.key;
  }
}

// Orders by key, descending, then by index, ascending.
__device__ __forceinline__ uint64_t ranked_key(uint32_t key, int64_t index) {
  return uint64_t{key} << 32 | static_cast<uint32_t>(~static_cast<uint32_t>(index));
}

}  // namespace pagedtree::cuda
