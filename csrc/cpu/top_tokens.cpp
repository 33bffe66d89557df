#include "cpu/top_tokens.h"

#include <cfloat>
#include <cmath>
#include <cstring>

#include "core/drafting.h"

namespace pagedtree::cpu {
namespace {

constexpr int kLanes = 16;    // partial results, so that loops vectorise without reordering a sum
constexpr int kChunk = 64;    // skipped as a whole where its maximum is not among the best
constexpr int kBlock = 1024;  // partial sums are added up in this fixed order

float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

float to_float(float x) { return x; }

struct BFloat16 {
  uint16_t bits;
};
float to_float(BFloat16 x) { return from_bits(static_cast<uint32_t>(x.bits) << 16); }

struct Float16 {
  uint16_t bits;
};
float to_float(Float16 x) {
  const uint32_t magnitude = (x.bits & 0x7fffu) << 13, sign = (x.bits & 0x8000u) << 16;
  const uint32_t special = from_bits(magnitude) >= from_bits(0x7c00u << 13) ? 0x7f800000u : 0u;  // inf and NaN
  const float value = from_bits(magnitude) * from_bits(0x77800000u);                             // * 2^112
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return from_bits(bits | special | sign);
}

// exp(x) for x <= 0 to about 1e-7; never below 1e-38, which no sum over a vocabulary notices.
float exp_of_nonpositive(float x) {
  constexpr float kLog2E = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f, kRound = 12582912.0f;
  x = x > -87.0f ? x : -87.0f;
  const float n = (x * kLog2E + kRound) - kRound;
  const float r = (x - n * kLn2High) - n * kLn2Low;
  float p = 1.3888889e-3f;
  p = p * r + 8.3333333e-3f;
  p = p * r + 4.1666667e-2f;
  p = p * r + 1.6666667e-1f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return p * from_bits(static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23);
}

float max_of_lanes(const float* x, int count) {
  float lanes[kLanes];
  for (float& lane : lanes) lane = -INFINITY;
  for (int i = 0; i < count; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) lanes[j] = x[i + j] > lanes[j] ? x[i + j] : lanes[j];
  }
  float best = lanes[0];
  for (float lane : lanes) best = lane > best ? lane : best;
  return best;
}

double sum_exp(const float* x, float max) {
  float lanes[kLanes] = {};
  for (int i = 0; i < kBlock; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) lanes[j] += exp_of_nonpositive(x[i + j] - max);
  }
  double sum = 0.0;
  for (float lane : lanes) sum += lane;
  return sum;
}

// One block as clean floats, filled up with -inf.
template <typename T>
void load_block(const T* row, int64_t count, float* block) {
  for (int64_t i = 0; i < count; ++i) {
    const float x = to_float(row[i]);
    block[i] = x >= -FLT_MAX ? (x < FLT_MAX ? x : FLT_MAX) : -INFINITY;
  }
  for (int64_t i = count; i < kBlock; ++i) block[i] = -INFINITY;
}

template <typename T>
void top_tokens_of(const T* row, int64_t vocab, int32_t k, int64_t* tokens, float* logits, double* log_sum) {
  float max = -INFINITY;
  double sum = 0.0;
  int32_t size = 0;
  alignas(64) float block[kBlock];
  for (int64_t begin = 0; begin < vocab; begin += kBlock) {
    load_block(row + begin, min_of<int64_t>(kBlock, vocab - begin), block);
    float block_max = -INFINITY;
    for (int c = 0; c < kBlock; c += kChunk) {
      const float chunk_max = max_of_lanes(block + c, kChunk);
      block_max = max_of(block_max, chunk_max);
      const float least = size == k ? logits[k - 1] : -INFINITY;
      if (!(chunk_max > least)) continue;
      for (int i = c; i < c + kChunk; ++i) {
        if (is_present(block[i])) size = insert_ranked(logits, tokens, size, k, block[i], begin + i);
      }
    }
    if (log_sum == nullptr || !is_present(block_max)) continue;
    if (block_max > max) {
      sum *= std::exp(static_cast<double>(max) - block_max);
      max = block_max;
    }
    sum += sum_exp(block, max);
  }
  for (int32_t i = size; i < k; ++i) {
    tokens[i] = -1;
    logits[i] = -INFINITY;
  }
  if (log_sum != nullptr) *log_sum = std::log(sum);
}

}  // namespace

void top_tokens(const void* row, DType dtype, int64_t vocab, int32_t k, int64_t* tokens, float* logits,
                double* log_sum) {
  if (dtype == DType::kFloat32) {
    top_tokens_of(static_cast<const float*>(row), vocab, k, tokens, logits, log_sum);
  } else if (dtype == DType::kFloat16) {
    top_tokens_of(static_cast<const Float16*>(row), vocab, k, tokens, logits, log_sum);
  } else {
    top_tokens_of(static_cast<const BFloat16*>(row), vocab, k, tokens, logits, log_sum);
  }
}

}  // namespace pagedtree::cpu
