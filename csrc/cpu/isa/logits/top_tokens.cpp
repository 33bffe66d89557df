// The k best tokens of a row, and the normaliser of its softmax.
#include "core/drafting.h"
#include "cpu/isa.h"
#include "cpu/isa/logits/adjusted_row.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

// Chunks with a maximum below the k-th best are skipped.
constexpr int kChunk = 64;

template <typename T>
static inline void find_top(const LogitRow& row, int32_t k, int64_t* tokens, float* logits) {
  int32_t size = 0;
  for (int64_t begin = 0; begin < row.vocab; begin += kChunk) {
    float chunk[kChunk];
    vfloat most = splat(-kInfinity);
    for (int i = 0; i < kChunk; i += kLanes) {
      const int64_t t = begin + i;
      const vfloat logit = t < row.vocab ? load_logits<T>(row, t) : splat(-kInfinity);
      store(chunk + i, logit);
      most = max(most, logit);
    }
    if (!(reduce_max(most) > (size == k ? logits[k - 1] : -kInfinity))) continue;
    for (int i = 0; i < kChunk; ++i) {
      if (is_present(chunk[i])) size = insert_ranked(logits, tokens, size, k, chunk[i], begin + i);
    }
  }
  for (; size < k; ++size) {
    tokens[size] = -1;
    logits[size] = -kInfinity;
  }
}

// Returns equal bits for all vector lengths and backends: sixteen partial sums per block, added in order, then blocks.
template <typename T>
static inline double sum_exp(const LogitRow& row, float peak) {
  constexpr int kPartials = 16;
  constexpr int64_t kBlock = 1024;
  double sum = 0.0;
  for (int64_t block = 0; block < row.vocab; block += kBlock) {
    const int64_t end = min_of<int64_t>(block + kBlock, row.vocab);
    vfloat partials[kPartials / kLanes] = {};
    for (int64_t begin = block; begin < end; begin += kPartials) {
      for (int i = 0; i < kPartials / kLanes; ++i) {
        const int64_t t = begin + i * kLanes;
        if (t < end) partials[i] += exp_exact<VectorMath>(load_logits<T>(row, t) - peak);
      }
    }
    double of_block = 0.0;
    for (const vfloat& partial : partials) {
      for (int i = 0; i < kLanes; ++i) of_block += partial[i];
    }
    sum += of_block;
  }
  return sum;
}

template <typename T>
static inline double top_tokens_of(const LogitRow& row, int32_t k, bool with_sum, int64_t* tokens, float* logits) {
  find_top<T>(row, k, tokens, logits);
  return with_sum && k > 0 && is_present(logits[0]) ? sum_exp<T>(row, logits[0]) : 0.0;
}

double top_tokens(const LogitRow& row, int32_t k, bool with_sum, int64_t* tokens, float* logits) {
  return with_logits(row.dtype, [&]<typename T>() { return top_tokens_of<T>(row, k, with_sum, tokens, logits); });
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
