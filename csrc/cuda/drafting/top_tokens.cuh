// The best tokens of a row of logits, and the normaliser of its softmax. A whole CTA or a cluster works on one row; its
// first CTA has the result.
//
// The row is read once for the largest logit of each thread. Threads form groups, and `count` tokens are at least as
// large as the `count`-th largest of the groups' largest: it is a threshold that few tokens reach. Only the words of
// threads that have such a token are read again.
#pragma once

#include "cuda/filters.cuh"

namespace pagedtree::cuda {

constexpr int kTopThreads = kRowThreads / 2;  // two CTAs share an SM
constexpr int kMostGroups = 512, kMostCandidates = 512;

struct TopShared {
  BestShared list;               // of the first CTA: the result in list.best
  uint32_t own[kMostGroups];     // the keys of the largest logits of this CTA's warps, or of parts of them
  uint32_t groups[kMostGroups];  // of the groups of all CTAs
  uint32_t has_nan[kMaxCluster];
  uint64_t candidates[kMostCandidates];  // of the first CTA
  int32_t num_candidates;
  int32_t too_many;
  uint32_t threshold;
  uint32_t peak;
};

// How many of `size` values come before value `i`: larger ones, and equal ones with a lower index.
template <typename T>
__device__ __forceinline__ int32_t rank_among(const T* values, int32_t size, int32_t i) {
  const T own = values[i];
  int32_t rank = 0;
#pragma unroll 4
  for (int32_t j = 0; j < size; ++j) rank += j < i ? values[j] >= own : values[j] > own;
  return rank;
}

// Writes the `count` largest of a few different values to `best`, the largest first. All threads of a CTA call it, and
// meet afterwards.
__device__ __forceinline__ void sort_few(const uint64_t* values, int32_t size, int32_t count, uint64_t* best) {
  for (int32_t i = threadIdx.x; i < size; i += blockDim.x) {
    const int32_t rank = rank_among(values, size, i);
    if (rank < count) best[rank] = values[i];
  }
}

// Writes the largest keys of the cluster's groups to shared.groups of every CTA, each from neighbouring threads;
// returns how many groups there are: twice as many as tokens are wanted, if that is possible. has_nan: of any thread;
// the result is there for all.
__device__ __forceinline__ int32_t tell_groups(uint32_t key, int32_t count, TopShared& shared, bool& has_nan) {
  const int32_t ctas = static_cast<int32_t>(ptx::cluster_size()), threads = static_cast<int32_t>(blockDim.x);
  const int32_t rank = static_cast<int32_t>(ptx::cluster_rank()), thread = static_cast<int32_t>(threadIdx.x);
  const int32_t wanted = min_of(ceil_div(2 * max_of(count, 1), ctas), kMostGroups / ctas);
  int32_t lanes = 32;
  while (lanes > 1 && threads / lanes < wanted) lanes /= 2;
  for (int apart = lanes / 2; apart > 0; apart /= 2) key = max_of(key, __shfl_xor_sync(~0u, key, apart));
  const int32_t parts = min_of(threads / lanes, kMostGroups), groups = min_of(parts, wanted);
  if (thread % lanes == 0 && thread / lanes < parts) shared.own[thread / lanes] = key;
  const uint32_t nan_here = __syncthreads_or(has_nan) != 0;
  for (int32_t i = thread; i < groups * ctas; i += threads) {
    const int32_t group = i / ctas;
    uint32_t most = 0;
    for (int32_t part = group * parts / groups; part < (group + 1) * parts / groups; ++part) {
      most = max_of(most, shared.own[part]);
    }
    *ptx::of_cta(&shared.groups[rank * groups + group], static_cast<uint32_t>(i % ctas)) = most;
  }
  if (thread < ctas) *ptx::of_cta(&shared.has_nan[rank], static_cast<uint32_t>(thread)) = nan_here;
  ptx::cluster_sync();
  has_nan = false;
  for (int32_t cta = 0; cta < ctas; ++cta) has_nan |= shared.has_nan[cta] != 0;
  return groups * ctas;
}

// Finds the peak, shared.peak in every CTA, and what may be among the `count` best tokens. From now on the reader knows
// whether the row is clean. shared.too_many: others may be among them, too; list_top() sees to that.
template <DType kDType>
__device__ __forceinline__ void find_candidates(LogitReader<kDType>& row, int32_t count, TopShared& shared) {
  if (threadIdx.x == 0) {
    shared.num_candidates = 0;
    shared.too_many = 0;
  }
  ptx::cluster_sync();
  const int ctas = static_cast<int>(ptx::cluster_size()), threads = ctas * static_cast<int>(blockDim.x);
  const int thread = static_cast<int>(ptx::cluster_rank() * blockDim.x + threadIdx.x), lane = threadIdx.x % 32;
  const auto best = row.best_of_words();
  const uint32_t key = order_key<ScalarMath>(best.logit + 0.0f);  // -0 ties with +0
  bool has_nan = best.nan;
  const int32_t groups = tell_groups(key, count, shared, has_nan);
  for (int i = threadIdx.x; i < groups; i += blockDim.x) {
    const int32_t rank = rank_among(shared.groups, groups, i);
    if (rank == 0) shared.peak = shared.groups[i];
    if (rank == count - 1) shared.threshold = shared.groups[i];
  }
  __syncthreads();
  row.learn({.logit = logit_of_key<ScalarMath>(shared.peak), .token = 0, .has_nan = has_nan});
  if (count < 1 || count > groups || shared.threshold <= order_key<ScalarMath>(-kInfinity)) {
    if (threadIdx.x == 0) shared.too_many = 1;
    return;
  }
  const uint32_t threshold = shared.threshold;
  TopShared* const first = ptx::of_cta(&shared, 0);
  for (uint32_t hits = __ballot_sync(~0u, key >= threshold); hits != 0; hits &= hits - 1) {
    const int from = thread - lane + __ffs(static_cast<int>(hits)) - 1;
    for (int at = from + lane * threads; at < row.num_words(); at += 32 * threads) {  // the words of that thread
      uint4 word = row.clean_word_at(at);
      if (order_key<ScalarMath>(row.largest_of_word(word) + 0.0f) < threshold) continue;
#pragma unroll 1
      for (int j = 0; j < row.of_word(); ++j, word = row.without_first(word)) {
        const uint32_t of_token = order_key<ScalarMath>(row.first_of(word) + 0.0f);
        if (of_token < threshold) continue;
        const int32_t place = atomicAdd(&first->num_candidates, 1);
        if (place < kMostCandidates) {
          first->candidates[place] = ranked_key(of_token, int64_t{at} * row.of_word() + j);
        } else {
          for (int rank = 0; rank < ctas; ++rank) atomicExch(&ptx::of_cta(&shared, rank)->too_many, 1);
        }
      }
    }
  }
}

// After find_candidates(): the `count` best tokens in shared.list.best of the first CTA, best first. Returns how many
// are above -inf; 0 in other CTAs.
template <DType kDType>
__device__ __forceinline__ int32_t list_top(const LogitReader<kDType>& row, int32_t count, TopShared& shared) {
  ptx::cluster_sync();
  if (shared.too_many) {
    const LogitItems<LogitReader<kDType>> items{row, {0.0f, 1.0f}, -kInfinity};
    return list_best(shared.list, items, items.digits(), count);
  }
  if (ptx::cluster_rank() != 0) return 0;
  sort_few(shared.candidates, shared.num_candidates, count, shared.list.best);
  __syncthreads();
  return count;
}

// ---- the normaliser

constexpr int kSumBlock = 1024, kSumPartials = 16;
constexpr int kSumBlocks = 128;  // whose partial sums are kept at a time
constexpr int kSumRadix = 32;    // sums of blocks are read so many at a time; those past the row are 0

struct SumShared {
  float partials[kSumBlocks][kSumPartials + 1];  // one more per row avoids bank conflicts
  double of_block[kMaxVocab / kSumBlock];        // of the first CTA
  double log_sum;
};

// The partial sums of exp(logit - peak) of one block, one for each of sixteen lanes. Logits are loaded while those
// before them are weighed.
template <DType kDType>
__device__ __forceinline__ float partial_sum(const LogitReader<kDType>& row, float peak, int begin) {
  constexpr int kAhead = 16, kTurn = kAhead * kSumPartials;
  const int end = min_of(begin + kSumBlock, static_cast<int>(row.vocab())), lane = threadIdx.x % kSumPartials;
  float partial = 0.0f;
  if (!row.stands()) {
#pragma unroll 1
    for (int token = begin + lane; token < end; token += kSumPartials) {
      partial += exp_exact<ScalarMath>(row.logit(token) - peak);
    }
    return partial;
  }
  const int whole_end = begin + (end - begin) / kTurn * kTurn;
  float next[kAhead];
  if (begin < whole_end) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) next[i] = row.raw(begin + i * kSumPartials + lane);
  }
#pragma unroll 1
  for (int first = begin; first < whole_end; first += kTurn) {
    const int following = (first + kTurn < whole_end ? first + kTurn : first) + lane;
    float logits[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) logits[i] = next[i];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) next[i] = row.raw(following + i * kSumPartials);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) partial += exp_exact<ScalarMath>(logits[i] - peak);
  }
  if (whole_end < end) {  // a last turn, in which some lanes have fewer logits
    float logits[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) logits[i] = row.raw(min_of(whole_end + i * kSumPartials + lane, end - 1));
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const float mass = exp_exact<ScalarMath>(logits[i] - peak);
      if (whole_end + i * kSumPartials + lane < end) partial += mass;
    }
  }
  return partial;
}

// The sums of exp(logit - peak) of the row's blocks, with the same bits as on the CPU: the partial sums of each are
// added in order. The blocks of a CTA are as far apart as there are CTAs.
template <DType kDType>
__device__ __forceinline__ void sum_exp_of_blocks(const LogitReader<kDType>& row, float peak, SumShared& shared) {
  const int ctas = static_cast<int>(ptx::cluster_size()), rank = static_cast<int>(ptx::cluster_rank());
  const int vocab = static_cast<int>(row.vocab()), groups = static_cast<int>(blockDim.x) / kSumPartials;
  const int padded = ceil_div(ceil_div(vocab, kSumBlock), kSumRadix) * kSumRadix;
  double* const of_block = ptx::of_cta(&shared, 0)->of_block;
  for (int first = 0; first * ctas + rank < padded; first += kSumBlocks) {
    for (int i = static_cast<int>(threadIdx.x) / kSumPartials; i < kSumBlocks; i += groups) {
      const int block = (first + i) * ctas + rank;
      if (block >= padded) break;
      shared.partials[i][threadIdx.x % kSumPartials] = partial_sum(row, peak, min_of(block * kSumBlock, vocab));
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kSumBlocks && (first + i) * ctas + rank < padded; i += blockDim.x) {
      double sum = 0.0;
#pragma unroll
      for (int j = 0; j < kSumPartials; ++j) sum += static_cast<double>(shared.partials[i][j]);
      of_block[(first + i) * ctas + rank] = sum;
    }
    __syncthreads();
  }
}

// By one thread of the first CTA, when all blocks are there.
__device__ __forceinline__ double sum_of_blocks(const SumShared& shared, int64_t vocab) {
  const int num_blocks = static_cast<int>(ceil_div<int64_t>(vocab, kSumBlock));
  double total = 0.0;
#pragma unroll 1
  for (int first = 0; first < num_blocks; first += kSumRadix) {
#pragma unroll
    for (int i = 0; i < kSumRadix; ++i) total += shared.of_block[first + i];
  }
  return total;
}

}  // namespace pagedtree::cuda
