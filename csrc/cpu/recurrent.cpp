#include "core/recurrent.h"

#include <cstring>
#include <memory>

#include "cpu/backend.h"
#include "cpu/isa.h"
#include "cpu/parallel.h"
#include "cpu/recurrent_work.h"

namespace pagedtree::cpu {
namespace {

void run_delta_rule(const DeltaRuleParams& p, const ExecContext& ctx) {
  const IsaKernels& isa = isa_kernels();
  parallel_for(ctx, p.tokens.batch * p.num_heads, 1, [&](int64_t begin, int64_t end) {
    DeltaScratch scratch;
    const auto size = static_cast<size_t>(scratch.assign(p, nullptr)) * sizeof(float);
    const auto memory = std::make_unique_for_overwrite<std::byte[]>(size);
    scratch.assign(p, reinterpret_cast<float*>(memory.get()));
    for (int64_t item = begin; item < end; ++item) isa.delta_rule(p, item, scratch);
  });
}

// Shifts the path's inputs into the last W - 1 inputs. Targets precede sources.
template <typename T>
void shift_channel(const ConvParams& p, int64_t b, int64_t state_index, int64_t channel, int64_t replayed) {
  T* state = static_cast<T*>(p.conv_state) + state_index * p.state_strides[0] + channel * p.state_strides[1];
  const int64_t kept = p.width - 1, step = p.state_strides[2];
  for (int64_t i = 0; i < kept; ++i) {
    const int64_t from = i + replayed - kept;  // path token, or previous state
    state[i * step] = from < 0 ? state[(i + replayed) * step]
                               : static_cast<const T*>(p.x)[replayed_row(p.tokens, b, from) * p.x_stride + channel];
  }
}

}  // namespace

void CpuBackend::tree_delta_rule(const DeltaRuleParams& p, const ExecContext& ctx) const {
  // Zeros for padding rows and unreachable nodes.
  const int64_t bytes = p.tokens.num_rows * p.num_heads * p.value_dim * element_size(p.dtype);
  if (bytes == 0) return;
  std::memset(p.out, 0, static_cast<size_t>(bytes));
  run_delta_rule(p, ctx);
}

void CpuBackend::advance_state(const DeltaRuleParams& p, const ExecContext& ctx) const { run_delta_rule(p, ctx); }

void CpuBackend::tree_conv1d(const ConvParams& p, const ExecContext& ctx) const {
  const int64_t bytes = p.tokens.num_rows * p.channels * element_size(p.dtype);
  if (bytes == 0) return;
  std::memset(p.out, 0, static_cast<size_t>(bytes));
  const IsaKernels& isa = isa_kernels();
  const int64_t tiles = ceil_div(p.channels, kConvChannels);
  parallel_for(ctx, p.tokens.batch * tiles, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) isa.conv1d(p, item / tiles, item % tiles * kConvChannels);
  });
}

void CpuBackend::advance_conv(const ConvParams& p, const ExecContext& ctx) const {
  parallel_for(ctx, p.tokens.batch, 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t state_index = state_index_of(p.tokens, b), replayed = tokens_to_replay(p.tokens, b);
      for (int64_t channel = 0; replayed > 0 && channel < p.channels; ++channel) {
        if (element_size(p.dtype) == 4) {
          shift_channel<uint32_t>(p, b, state_index, channel, replayed);
        } else {
          shift_channel<uint16_t>(p, b, state_index, channel, replayed);
        }
      }
    }
  });
}

}  // namespace pagedtree::cpu
