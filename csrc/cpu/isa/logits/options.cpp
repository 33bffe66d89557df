#include "cpu/isa/logits/options.h"

#include "cpu/isa.h"
#include "cpu/isa/logits/masses.h"
#include "cpu/isa/tile/math.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {
namespace {

// Lane i = bit `token` + i of a packed mask of `size` bits is set.
inline vint load_bits(const int32_t* words, int64_t token, int64_t size) {
  uint64_t window = static_cast<uint32_t>(words[token / 32]);
  if (token / 32 + 1 < ceil_div<int64_t>(size, 32)) {
    window |= uint64_t{static_cast<uint32_t>(words[token / 32 + 1])} << 32;
  }
  return ((splat(static_cast<uint32_t>(window >> token % 32)) >> bits<vuint>(lane_index())) & 1u) != 0u;
}

// Adjusts all columns as if there were neither biases nor a path.
template <typename T>
inline void adjust_columns(const RowOptions& r, const LogitRow& row, float* out) {
  const OptionsParams& o = r.o;
  const bool has_grammar = row.allowed != nullptr || row.allowed_words != nullptr, pays = r.penalties.any();
  const int32_t* allowed = o.allowed_mask == nullptr ? nullptr : r.words(o.allowed_mask, o.allowed_stride);
  const int32_t* prompt =
      o.prompt_mask == nullptr || r.penalties.repetition == 1.0f ? nullptr : r.words(o.prompt_mask, o.prompt_stride);
  const int32_t* counts =
      !pays || o.output_counts == nullptr ? nullptr : o.output_counts + r.sequence * o.counts_stride + r.first_token;
  for (int64_t t = 0; t < row.vocab; t += kLanes) {
    const vfloat raw = load_raw<T>(row, t);
    vfloat logit = min(raw, splat(kLargest<T>)) + 0.0f;
    if (has_grammar) logit = select(load_allowed(row, t), logit, splat(-kInfinity));
    if (allowed != nullptr) logit = select(load_bits(allowed, r.first_token + t, o.vocab), logit, splat(-kInfinity));
    if (counts != nullptr || prompt != nullptr) {
      vint count{};
      if (counts != nullptr && t + kLanes <= row.vocab) {
        count = load_as<vint>(counts + t);
      } else if (counts != nullptr) {
        std::memcpy(&count, counts + t, static_cast<size_t>(row.vocab - t) * sizeof(int32_t));
      }
      const vint in_prompt = prompt == nullptr ? vint{} : load_bits(prompt, r.first_token + t, o.vocab);
      const vint said = count > 0;
      if (lane_bits(said | in_prompt) != 0) {
        const vfloat times = __builtin_convertvector(said ? count : vint{}, vfloat);
        logit = penalised<VectorMath>(r.penalties, logit, times, in_prompt);
      }
    }
    store(out + t, select(raw != raw, raw, logit));
  }
}

struct Writer {
  const RowOptions& r;
  const LogitRow& row;
  OptionsScratch& scratch;

  static int64_t first() { return 0; }
  static int64_t step() { return 1; }
  static void sync() {}
  float raw(int64_t column) const {
    const int64_t t = column - column % kLanes;
    return with_logits(row.dtype, [&]<typename T>() { return load_raw<T>(row, t)[static_cast<int>(column - t)]; });
  }
  void store(int64_t column, float value) { scratch.row[column] = value; }
  void forbid(int64_t column) {
    if (scratch.row[column] == scratch.row[column]) scratch.row[column] = -kInfinity;
  }
  template <typename F>
  void each_bias(const NodeRange& entries, F f) const {
    for (int64_t i = entries.begin; i < entries.end; ++i) {
      const int64_t token = r.o.bias_tokens[i], column = token - r.first_token;
      if (token >= 0 && column >= 0 && column < row.vocab) f(column, r.o.bias_values[i]);
    }
  }
  void begin_bias(const NodeRange& entries) {
    each_bias(entries, [&](int64_t column, float value) { scratch.bias[column] += value == value ? value : 0.0f; });
  }
  bool bias_of(const NodeRange&, int64_t i, float& bias) const {
    const float sum = scratch.bias[r.o.bias_tokens[i] - r.first_token];
    bias = sum == sum ? sum : -kInfinity;
    return true;
  }
  void end_bias(const NodeRange& entries) {
    each_bias(entries, [&](int64_t column, float) { scratch.bias[column] = 0.0f; });
  }
  bool any_finite() const {
    for (int64_t t = 0; t < row.vocab; t += kLanes) {
      const vint inside = lane_index() < static_cast<int32_t>(min_of<int64_t>(kLanes, row.vocab - t));
      if (lane_bits((load(scratch.row + t) > splat(-kInfinity)) & inside) != 0) return true;
    }
    return false;
  }
};

}  // namespace

LogitRow adjust_row(const RowOptions& options, const LogitRow& row, OptionsScratch& scratch) {
  with_logits(row.dtype, [&]<typename T>() { adjust_columns<T>(options, row, scratch.row); });
  Writer writer{options, row, scratch};
  RowPatch<Writer>(options, row, writer).run();
  LogitRow adjusted{};
  adjusted.logits = scratch.row;
  adjusted.vocab = row.vocab;
  adjusted.dtype = DType::kFloat32;
  return adjusted;
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
