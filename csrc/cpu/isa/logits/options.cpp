#include "cpu/isa/logits/options.h"

#include <algorithm>

#include "cpu/isa.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {
namespace {

struct Writer {
  const RowOptions& r;
  const LogitRow& row;
  AdjustedRow& scratch;

  static constexpr RowStep kFirst = RowStep::kPath;
  static uint32_t first() { return 0; }
  static uint32_t step() { return 1; }
  static void sync() {}
  void write(uint32_t column, uint32_t, float bias, bool) {
    const float raw = load_memory(scratch.memory, column - column % kLanes)[static_cast<int>(column % kLanes)];
    const float value = r.adjusted(row, column, raw, bias);
    uint32_t& word = scratch.patched[column / 32];
    const uint32_t bit = 1u << column % 32;
    if (!(word & bit)) scratch.columns[scratch.num_patched++] = static_cast<int32_t>(column);
    word |= bit;
    scratch.values[column] = value == value ? min_of(value, kMaxFloat) : -kInfinity;
  }
  void fetch(int64_t column) const {
    const LogitRow& memory = scratch.memory;
    const int64_t size = memory.dtype == DType::kFloat32 ? 4 : 2;
    __builtin_prefetch(static_cast<const char*>(memory.logits) + column * size);
    if (scratch.counts != nullptr) __builtin_prefetch(scratch.counts + column);
    __builtin_prefetch(scratch.values + column, 1);
    __builtin_prefetch(scratch.bias + column, 1);
  }
  template <typename F>
  void each_bias(const NodeRange& entries, F f) const {
    for (int64_t i = entries.begin; i < entries.end; ++i) {
      const int64_t token = r.o.bias_tokens[i], column = token - r.o.first_token;
      if (token >= 0 && column >= 0 && column < row.vocab) f(column, r.o.bias_values[i]);
    }
  }
  // Prefetches all entries first: they are scattered over long rows.
  void begin_bias(const NodeRange& entries) {
    each_bias(entries, [&](int64_t column, float) { fetch(column); });
    each_bias(entries, [&](int64_t column, float value) { scratch.bias[column] += value == value ? value : 0.0f; });
  }
  float bias_of(const NodeRange&, uint32_t column) const {
    const float sum = scratch.bias[column];
    return sum == sum ? sum : -kInfinity;
  }
  void end_bias(const NodeRange& entries) {
    each_bias(entries, [&](int64_t column, float) { scratch.bias[column] = 0.0f; });
  }
  template <typename LeavesOut>
  bool any_finite(LeavesOut leaves_out) const {
    const LogitRow adjusted{&scratch, nullptr, nullptr, row.vocab, kAdjusted};
    for (int64_t t = 0; t < row.vocab; t += kLanes) {
      const vint finite = load_logits<AdjustedLogit>(adjusted, t) > splat(-kInfinity);
      uint32_t lanes = lane_bits(finite & lanes_before(row.vocab, t));
      for (; lanes != 0; lanes &= lanes - 1) {
        if (!leaves_out(static_cast<uint32_t>(t + __builtin_ctz(lanes)))) return true;
      }
    }
    return false;
  }
};

}  // namespace

LogitRow adjust_row(const RowOptions& r, const LogitRow& row, AdjustedRow& scratch) {
  const OptionsParams& o = r.o;
  for (int64_t i = 0; i < scratch.num_patched; ++i) scratch.patched[scratch.columns[i] / 32] = 0;
  scratch.num_patched = 0;
  scratch.memory = row;
  scratch.largest = largest_logit(row.dtype);
  const Penalties& penalties = scratch.penalties = r.penalties;
  const auto of_sequence = [&](const int32_t* mask, int64_t stride) {
    return mask == nullptr ? nullptr : mask + r.sequence * stride;
  };
  scratch.pays = penalties.any();
  scratch.lowers = penalties.repetition >= 1.0f && penalties.presence >= 0.0f && penalties.frequency >= 0.0f;
  scratch.allowed_mask = of_sequence(o.allowed_mask, o.allowed_stride);
  scratch.prompt_mask = penalties.repetition == 1.0f ? nullptr : of_sequence(o.prompt_mask, o.prompt_stride);
  scratch.counts = scratch.pays && o.output_counts != nullptr
                       ? o.output_counts + r.sequence * o.counts_stride + r.o.first_token
                       : nullptr;
  if (scratch.allowed_mask != nullptr && row.allowed == nullptr && row.allowed_words == nullptr &&
      o.first_token % 32 == 0) {
    // Without a grammar the sequence's mask replaces it and needs no adjustment.
    scratch.memory.allowed_words = scratch.allowed_mask + o.first_token / 32;
    scratch.allowed_mask = nullptr;
  }
  scratch.first_token = r.o.first_token;
  scratch.vocab = o.vocab;
  const int64_t num_blocks = ceil_div<int64_t>(row.vocab, kPeakBlock);
  std::fill_n(scratch.exactness, num_blocks, Exactness::kBounds);
  std::fill_n(scratch.is_kept, num_blocks, false);
  std::fill_n(scratch.masks, num_blocks, BlockMasks::kUnknown);
  std::fill_n(scratch.found_least, num_blocks, kInfinity);
  Writer writer{r, row, scratch};
  RowPatch<Writer>(r, row, writer).run();
  if (!scratch.pays && scratch.allowed_mask == nullptr && scratch.num_patched == 0) return scratch.memory;
  return {&scratch, nullptr, nullptr, row.vocab, kAdjusted};
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
