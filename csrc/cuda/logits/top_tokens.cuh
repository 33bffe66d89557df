// The best tokens of a row of logits, and its log-sum-exp. One CTA or cluster per row; the first CTA has the result.
// One pass finds each thread's largest logit. The `count`-th largest maximum of groups of threads is a threshold that
// at least `count` tokens reach, and few others; only threads with such a token read their words again.
#pragma once

#include "cuda/logits/filters.cuh"

namespace pagedtree::cuda {

constexpr int kTopThreads = 256, kTopCtas = 3;  // CTAs per SM
constexpr int kMostGroups = 1024, kMostCandidates = 512;

struct TopShared {
  BlockShared block;
  uint64_t best[kMaxTreeNodes];          // first CTA: the result
  uint64_t groups[kMostGroups];          // ranked_key() of the groups' maxima, all CTAs
  uint64_t candidates[kMostCandidates];  // first CTA
  int32_t num_candidates;
  uint32_t has_nan, too_many;  // flags
  uint32_t threshold;
};

// Launches one cluster per row. With many rows, larger clusters leave fewer SMs idle and find more of a row in L2.
template <typename Params>
void launch_top(void (*kernel)(Params), int64_t num_rows, int64_t vocab, size_t shared_bytes, void* stream,
                const Params& params) {
  const unsigned ctas = ctas_of_row(kernel, ceil_div<int64_t>(num_rows, 8), vocab);
  launch_clusters(kernel, dim3(static_cast<unsigned>(num_rows) * ctas),
                  dim3(threads_of_row(ceil_div<int64_t>(vocab, ctas), kTopThreads)), ctas, shared_bytes, stream,
                  params);
}

// Writes the `count` largest of a few distinct values, descending; callers synchronize. Not inlined: two calls.
inline __device__ __attribute__((noinline)) void sort_few(const uint64_t* values, int32_t size, int32_t count,
                                                          uint64_t* best) {
  for (int32_t i = threadIdx.x; i < size; i += blockDim.x) {
    const uint64_t own = values[i];
    int32_t rank = 0;
#pragma unroll 4
    for (int32_t j = 0; j < size; ++j) rank += values[j] > own;
    if (rank < count) best[rank] = own;
  }
}

// ---- the best items of a cluster

__device__ __forceinline__ void begin_candidates(TopShared& shared) {
  if (threadIdx.x == 0) {
    shared.num_candidates = 0;
    shared.has_nan = shared.too_many = 0;
    shared.threshold = order_key<ScalarMath>(-kInfinity) + 1;
  }
  ptx::meet_cluster();
}

__device__ __forceinline__ void raise_flag(uint32_t& flag) {  // in all CTAs
#pragma unroll 1
  for (uint32_t rank = 0; rank < ptx::cluster_size(); ++rank) atomicExch(ptx::of_cta(&flag, rank), 1u);
}

// Finds from each thread's largest key the maximum, as shared.best[0], and shared.threshold: the `count`-th largest
// maximum of groups, above -inf, which `count` items reach if there are so many. 2 * count groups where possible.
__device__ __forceinline__ void find_candidate_threshold(uint32_t key, int32_t count, TopShared& shared) {
  const int32_t ctas = static_cast<int32_t>(ptx::cluster_size()), threads = static_cast<int32_t>(blockDim.x);
  const int32_t rank = static_cast<int32_t>(ptx::cluster_rank()), thread = static_cast<int32_t>(threadIdx.x);
  count = max_of(count, 1);
  int32_t bits = 5;  // 2^bits threads per group
  while (bits > 0 && (ctas * threads >> bits) < min_of(2 * count, kMostGroups / 2)) --bits;
#pragma unroll 1
  for (int apart = 1 << bits >> 1; apart > 0; apart /= 2) key = max_of(key, __shfl_xor_sync(~0u, key, apart));
  const int32_t group = (rank * threads + thread) >> bits, groups = ctas * threads >> bits;
#pragma unroll 1
  for (int32_t cta = thread & ((1 << bits) - 1); cta < ctas; cta += 1 << bits) {
    *ptx::of_cta(&shared.groups[group], static_cast<uint32_t>(cta)) = ranked_key(key, group);
  }
  ptx::meet_cluster();
  sort_few(shared.groups, groups, count, shared.best);
  __syncthreads();
  if (thread == 0 && count <= groups) {
    shared.threshold = max_of(static_cast<uint32_t>(shared.best[count - 1] >> 32), shared.threshold);
  }
  __syncthreads();
}

// Returns max(best, rank), and appends the item to the candidates, if given.
__device__ __forceinline__ uint64_t collect_item(uint64_t rank, uint64_t best, TopShared* candidates) {
  if (candidates != nullptr) {
    TopShared* const first = ptx::of_cta(candidates, 0);
    const int32_t place = atomicAdd(&first->num_candidates, 1);
    if (place < kMostCandidates) {
      first->candidates[place] = rank;
    } else {
      raise_flag(candidates->too_many);
    }
  }
  return max_of(best, rank);
}

// Writes the `count` best items, one per round; returns their number. best_of(end, 0) is a thread's best below `end`.
template <typename BestOf>
__device__ __attribute__((noinline)) int32_t list_by_rounds(int32_t count, BlockShared& shared, uint64_t* best,
                                                            const BestOf& best_of) {
  uint64_t last = ~uint64_t{0};
  int32_t size = 0;
#pragma unroll 1
  for (; size < count && (last = cluster_max(shared, best_of(last, uint64_t{0}))) != 0; ++size) {
    if (threadIdx.x == 0) best[size] = last;
  }
  __syncthreads();
  return size;
}

// Returns the number of the `count` best items above -inf, in shared.best of the first CTA, after
// find_candidate_threshold(). The key `bound` bounds this thread's items: the words of items.row. items.best_of(word,
// least, end, candidates) returns the best in [least, end) by ranked(), or 0, and appends each.
template <typename Items>
__device__ __forceinline__ int32_t list_best(const Items& items, uint32_t bound, int32_t count, TopShared& shared) {
  const uint32_t threshold = shared.threshold;
  const int lane = static_cast<int>(threadIdx.x % 32), stride = items.row.own_stride();
  for (uint32_t hits = __ballot_sync(~0u, bound >= threshold); hits != 0; hits &= hits - 1) {
    int word = items.row.own_begin() + __ffs(static_cast<int>(hits)) - 1 + lane * stride;
#pragma unroll 1
    for (; word < items.row.num_words(); word += 32 * stride) {  // words of the thread with the hit
      items.best_of(word, uint64_t{threshold} << 32, ~uint64_t{0}, &shared);
    }
  }
  ptx::meet_cluster();
  if (shared.too_many) {
    return list_by_rounds(count, shared.block, shared.best, [&](uint64_t end, uint64_t best) {
      const uint64_t least = uint64_t{order_key<ScalarMath>(-kInfinity) + 1} << 32;
#pragma unroll 1
      for (int word = items.row.own_begin() + lane; word < items.row.num_words(); word += stride) {
        best = max_of(best, items.best_of(word, max_of(best, least), end, nullptr));
      }
      return best;
    });
  }
  if (ptx::cluster_rank() == 0) sort_few(shared.candidates, shared.num_candidates, count, shared.best);
  __syncthreads();
  return min_of(count, shared.num_candidates);
}

// ---- the best tokens of a row

template <typename Row>
struct RowItems {
  const Row& row;

  __device__ __forceinline__ uint64_t best_of(int index, uint64_t least, uint64_t end, TopShared* candidates) const {
    uint64_t best = 0;
    const uint4 word = row.clean_word_at(index);
    if (ranked(row.largest_of_word(word), 0) < least) return 0;
#pragma unroll 1
    for (int i = 0; i < row.of_word(); ++i) {
      const uint64_t rank = ranked(row.number(word, i), row.token_of(index) + i);
      if (rank >= least && rank < end) best = collect_item(rank, best, candidates);
    }
    return best;
  }
};

// Finds the maximum, as shared.best[0] of every CTA, and prepares list_best(). Returns this thread's largest key.
template <typename Row>
__device__ __forceinline__ uint32_t find_peak(Row& row, int32_t count, TopShared& shared) {
  begin_candidates(shared);
  const auto best = row.best_of_words();
  const uint32_t key = order_key<ScalarMath>(best.logit + 0.0f);  // -0 ties with +0
  if (best.nan) raise_flag(shared.has_nan);
  find_candidate_threshold(key, count, shared);
  row.apply({.logit = ranked_value(shared.best[0]), .token = 0, .has_nan = shared.has_nan != 0});
  return key;
}

// ---- the normalizer

constexpr int kSumBlock = 1024, kSumPartials = 16;
constexpr int kSumBlocks = 128;  // partial sums kept at a time

struct SumShared {
  float partials[kSumBlocks][kSumPartials + 1];  // padded against bank conflicts
  double of_block[kMaxVocab / kSumBlock];        // of the first CTA
  double log_sum;
};

// Returns a block's partial sum of exp(logit - peak), one of sixteen lanes'. Loads are prefetched.
template <typename Row>
__device__ __forceinline__ float partial_sum(const Row& row, float peak, int begin, int end) {
  constexpr int kAhead = 16, kStep = 8;
  int token = begin + static_cast<int>(threadIdx.x % kSumPartials);
  float partial = 0.0f;
  if (!row.stands()) {
#pragma unroll 1
    for (; token < end; token += kSumPartials) partial += exp_exact<ScalarMath>(row.logit(token) - peak);
    return partial;
  }
  float ahead[kAhead];
  const auto load = [&](int first) {
    const bool whole = first + (kAhead - 1) * kSumPartials < end;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (whole || first + i * kSumPartials < end) ahead[i] = row.raw(first + i * kSumPartials);
    }
  };
  load(token);
#pragma unroll 1
  while (token < end) {
    float logits[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) logits[i] = ahead[i];
    load(token + kAhead * kSumPartials);
#pragma unroll 1
    for (int step = 0; step < kAhead; step += kStep, token += kStep * kSumPartials) {
#pragma unroll
      for (int i = 0; i < kStep; ++i) {
        const float mass = exp_exact<ScalarMath>(logits[i] - peak);
        if (token + i * kSumPartials < end) partial += mass;
        logits[i] = logits[i + kStep];
      }
    }
  }
  return partial;
}

// Computes sums of exp(logit - peak) per block, in the CPU's order for equal bits.
template <typename Row>
__device__ __forceinline__ void sum_exp_of_blocks(const Row& row, float peak, int vocab, SumShared& shared) {
  const Blocks blocks = row.own_blocks(kSumBlock);
  double* const of_block = ptx::of_cta(&shared, 0)->of_block;
  for (int first = blocks.first; first < blocks.end; first += kSumBlocks * blocks.step) {
    for (int i = static_cast<int>(threadIdx.x) / kSumPartials; i < kSumBlocks; i += blockDim.x / kSumPartials) {
      const int block = first + i * blocks.step;
      if (block >= blocks.end) break;
      shared.partials[i][threadIdx.x % kSumPartials] =
          partial_sum(row, peak, block * kSumBlock, min_of((block + 1) * kSumBlock, vocab));
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kSumBlocks && first + i * blocks.step < blocks.end; i += blockDim.x) {
      double sum = 0.0;
#pragma unroll
      for (int j = 0; j < kSumPartials; ++j) sum += static_cast<double>(shared.partials[i][j]);
      of_block[first + i * blocks.step] = sum;
    }
    __syncthreads();
  }
}

__device__ __forceinline__ double sum_of_blocks(const SumShared& shared, int64_t vocab) {
  const int num_blocks = static_cast<int>(ceil_div<int64_t>(vocab, kSumBlock));
  double total = 0.0;
#pragma unroll 8
  for (int block = 0; block < num_blocks; ++block) total += shared.of_block[block];
  return total;
}

}  // namespace pagedtree::cuda
