// Short convolution along paths of a tree or a sequence.
// out[n] = silu(bias + sum over w of weight[W - 1 - w] * x[ancestor w of n]); the state has inputs before the root
#include "core/numeric.h"
#include "cpu/isa/tile/math.h"
#include "cpu/isa/tile/rows.h"
#include "cpu/recurrent_work.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {
namespace {

float scalar_at(const void* data, DType dtype, int64_t offset) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[offset];
  const uint16_t bits = static_cast<const uint16_t*>(data)[offset];
  return dtype == DType::kFloat16 ? pagedtree::float_from_half(bits) : float_from_bfloat16(bits);
}

struct Taps {
  float bias[kConvChannels];
  float weights[kMaxConvWidth][kConvChannels];  // [w]: of ancestor w
  float past[kMaxConvWidth][kConvChannels];     // [i]: input i + 1 tokens before the first
};

void load_taps(const ConvParams& p, int64_t state_index, int64_t first, int64_t count, Taps& taps) {
  std::memset(&taps, 0, sizeof(taps));
  for (int64_t c = 0; c < count; ++c) {
    const int64_t channel = first + c;
    if (p.bias != nullptr) taps.bias[c] = scalar_at(p.bias, p.weight_dtype, channel * p.bias_stride);
    for (int32_t w = 0; w < p.width; ++w) {
      const int64_t offset = channel * p.weight_strides[0] + (p.width - 1 - w) * p.weight_strides[1];
      taps.weights[w][c] = scalar_at(p.weight, p.weight_dtype, offset);
    }
    if (state_index < 0) continue;
    for (int32_t i = 0; i < p.width - 1; ++i) {
      taps.past[i][c] = scalar_at(
          p.conv_state, p.dtype,
          state_index * p.state_strides[0] + channel * p.state_strides[1] + (p.width - 2 - i) * p.state_strides[2]);
    }
  }
}

vfloat silu(vfloat x) { return x / (exp_exact<VectorMath>(min(-x, splat(88.0f))) + 1.0f); }

// Reads `inputs`, the `known` rows of the token's path, from the token up.
template <DType kType>
void convolve(const ConvParams& p, const Taps& taps, const int64_t* inputs, int32_t known, int64_t first,
              int64_t count) {
  constexpr int64_t kSize = element_size(kType);
  for (int64_t c = 0; c < count; c += kLanes) {
    const int64_t lanes = count - c;
    vfloat sum = load(taps.bias + c);
    for (int32_t w = 0; w < p.width; ++w) {
      const vfloat value =
          w < known
              ? load_lanes<kType>(static_cast<const char*>(p.x) + (inputs[w] * p.x_stride + first + c) * kSize, lanes)
              : load(taps.past[w - known] + c);
      sum = muladd(load(taps.weights[w] + c), value, sum);
    }
    if (p.silu) sum = silu(sum);
    if constexpr (kType != DType::kFloat8E4M3) {
      store_lanes<kType>(static_cast<char*>(p.out) + (inputs[0] * p.channels + first + c) * kSize, lanes, sum);
    }
  }
}

}  // namespace

void conv1d(const ConvParams& p, int64_t b, int64_t first) {
  const RecurrentBatch& tokens = p.tokens;
  const NodeRange rows = node_range(tokens.cu_nodes, tokens.batch, b, tokens.num_rows);
  if (rows.size() == 0) return;
  const int64_t count = min_of<int64_t>(kConvChannels, p.channels - first);
  Taps taps;
  load_taps(p, state_index_of(tokens, b), first, count, taps);
  int32_t nodes[kMaxRecurrentNodes], parents[kMaxRecurrentNodes], place[kMaxRecurrentNodes];
  const bool causal = tokens.parents == nullptr;
  const int64_t total = causal ? rows.size() : reachable_nodes(tokens, b, nodes, parents, place);
  with_dtype(p.dtype, [&]<DType kType>() {
    for (int64_t i = 0; i < total; ++i) {
      int64_t inputs[kMaxConvWidth];
      int32_t known = 0;
      for (int64_t at = i; at >= 0 && known < p.width; at = causal ? at - 1 : parents[at]) {
        inputs[known++] = rows.begin + (causal ? at : nodes[at]);
      }
      convolve<kType>(p, taps, inputs, known, first, count);
    }
  });
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
