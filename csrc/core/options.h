// Request options on a row of logits, in fp32, as plain decoding applies them after the tokens of the row's path.
// allowed ? penalised(min(logit, largest) + bias, count in output and path) : -inf;  NaN stays NaN
// The dense part, vectorised per backend, adjusts all columns without biases and path; RowPatch corrects the rest.
#pragma once

#include "core/sampling.h"
#include "core/tree.h"
#include "core/tree_walk.h"

namespace pagedtree {

// Clamped to their ranges.
struct Penalties {
  float repetition = 1.0f, presence = 0.0f, frequency = 0.0f;
  PT_HOST_DEVICE bool any() const { return repetition != 1.0f || presence != 0.0f || frequency != 0.0f; }
};

PT_HOST_DEVICE float subtracted_penalty(const float* values, int64_t at) {
  const float given = values == nullptr ? 0.0f : values[at];
  return given != given ? 0.0f : clamp_to(given, -2.0f, 2.0f);
}
PT_HOST_DEVICE Penalties penalties_of(const OptionsParams& o, int64_t b) {
  Penalties penalties;
  if (o.repetition != nullptr) {
    const float given = o.repetition[b * o.repetition_stride];
    penalties.repetition = given > 0.0f ? clamp_to(given, kMinNormal, kMaxFloat) : 1.0f;  // NaN is off
  }
  penalties.presence = subtracted_penalty(o.presence, b * o.presence_stride);
  penalties.frequency = subtracted_penalty(o.frequency, b * o.frequency_stride);
  return penalties;
}

// Applies the penalties after `count` occurrences. `in_prompt` is a mask of M.
template <typename M, typename Mask>
PT_HOST_DEVICE typename M::Float penalised(const Penalties& penalties, typename M::Float logit, typename M::Float count,
                                           Mask in_prompt) {
  const auto said = count > 0.0f;
  const auto scaled = M::select(logit > 0.0f, logit / penalties.repetition, logit * penalties.repetition);
  logit = M::select(said | in_prompt, scaled, logit);
  // Two roundings, as in Torch: fma() prevents contraction.
  logit = logit - M::fma(M::splat(penalties.frequency), count, M::splat(0.0f));
  return M::select(said, logit - penalties.presence, logit);
}

PT_HOST_DEVICE float largest_logit(DType dtype) {
  return dtype == DType::kFloat32 ? kMaxFloat : dtype == DType::kFloat16 ? kMaxFloat16 : kMaxBFloat16;
}

// Returns none if the offsets are out of order or range.
PT_HOST_DEVICE NodeRange entries_of(const int32_t* offsets, int64_t b, int64_t size) {
  if (offsets == nullptr) return {0, 0};
  const int64_t begin = offsets[b], end = offsets[b + 1];
  return begin >= 0 && begin <= end && end <= size ? NodeRange{begin, end} : NodeRange{0, 0};
}

// A path ends at the root, node 0, for any parents.
struct PathPlace {
  const OptionsParams& o;
  int64_t root;  // row
  int32_t node;

  PT_HOST_DEVICE bool at_root() const { return node == 0; }
  PT_HOST_DEVICE int64_t token() const {
    return draft_token_at(o.draft_tokens, o.draft_to_target, o.draft_vocab, o.vocab, root + node);
  }
  PT_HOST_DEVICE void go_up() {
    const int32_t parent = o.parents[root + node];
    node = parent > 0 && parent < node ? parent : 0;
  }
};

// Stop ids before the minimum position: kDecide forbids them only if another token remains.
enum class Stops : int32_t { kDecide, kForbid, kAllow };

// Tokens are ids of the whole vocabulary; the row's first column is o.first_token.
struct RowOptions {
  const OptionsParams& o;
  int64_t sequence;
  int64_t root;  // row
  int32_t node;
  Stops stops;
  Penalties penalties;

  PT_HOST_DEVICE RowOptions(const OptionsParams& options, int64_t b, int64_t row, Stops of_row = Stops::kDecide)
      : o(options), sequence(b), root(row), node(0), stops(of_row), penalties(penalties_of(options, b)) {
    if (o.cu_nodes == nullptr) return;
    root = node_range(o.cu_nodes, o.batch, b, o.num_rows).begin;
    node = static_cast<int32_t>(clamp_to<int64_t>(row - root, 0, kMaxTreeNodes - 1));
  }

  PT_HOST_DEVICE PathPlace path() const { return {o, root, node}; }

  PT_HOST_DEVICE const int32_t* words(const int32_t* mask, int64_t stride) const { return mask + sequence * stride; }
  PT_HOST_DEVICE static bool bit(const int32_t* words, int64_t token) {
    const uint32_t at = static_cast<uint32_t>(token);
    return static_cast<uint32_t>(words[at / 32]) >> at % 32 & 1u;
  }
  PT_HOST_DEVICE bool in_prompt(int64_t token) const {
    return o.prompt_mask != nullptr && bit(words(o.prompt_mask, o.prompt_stride), token);
  }
  PT_HOST_DEVICE bool is_allowed(const LogitRow& row, int64_t column) const {
    if (row.allowed != nullptr && !row.allowed[column]) return false;
    if (row.allowed_words != nullptr && !bit(row.allowed_words, column)) return false;
    return o.allowed_mask == nullptr || bit(words(o.allowed_mask, o.allowed_stride), o.first_token + column);
  }

  PT_HOST_DEVICE float count_of(int64_t token, bool may_be_on_path) const {
    int64_t count = o.output_counts == nullptr ? 0 : max_of(o.output_counts[sequence * o.counts_stride + token], 0);
    PT_NO_UNROLL
    for (PathPlace at = path(); may_be_on_path && !at.at_root(); at.go_up()) count += at.token() == token;
    return static_cast<float>(count);
  }

  // Returns the adjusted logit before path-dependent bans.
  PT_HOST_DEVICE float adjusted(const LogitRow& row, int64_t column, float raw, float bias,
                                bool may_be_on_path = true) const {
    if (raw != raw) return raw;
    if (!is_allowed(row, column) || raw == -kInfinity) return -kInfinity;
    const float biased = min_of(min_of(raw, largest_logit(row.dtype)) + bias, kMaxFloat) + 0.0f;
    if (!penalties.any()) return biased;
    const int64_t token = o.first_token + column;
    return penalised<ScalarMath>(penalties, biased, count_of(token, may_be_on_path), in_prompt(token));
  }

  PT_HOST_DEVICE bool stops_too_early() const {
    if (o.stop_ids == nullptr || o.positions.data == nullptr) return false;
    const int32_t depth = o.cu_nodes == nullptr || node == 0 ? 0 : o.depths[root + node];
    const uint64_t position = static_cast<uint64_t>(integer_at(o.positions, sequence));
    return static_cast<int64_t>(position + static_cast<uint64_t>(int64_t{depth}) + 1) < o.min_position[sequence];
  }

  // Returns true if output and path end in these tokens.
  PT_HOST_DEVICE bool text_ends_in(const int32_t* tokens, int64_t count) const {
    int64_t left = 0, start = 0;
    if (o.history != nullptr) {
      left = clamp_to<int64_t>(o.history_lens[sequence], 0, o.history_width);
      start = o.history_start == nullptr ? 0 : max_of(o.history_start[sequence], 0);
    }
    PathPlace at = path();
    PT_NO_UNROLL
    for (int64_t i = count - 1; i >= 0; --i) {
      int64_t token;
      if (!at.at_root()) {
        token = at.token();
        at.go_up();
      } else if (left > start) {
        token = o.history[sequence * o.history_stride + --left];
      } else {
        return false;
      }
      if (tokens[i] < 0 || token != tokens[i]) return false;
    }
    return true;
  }
};

// Sums the biases. NaN entries are ignored; opposite infinities forbid.
PT_HOST_DEVICE float bias_of_token(const OptionsParams& o, const NodeRange& entries, int64_t token) {
  float sum = 0.0f;
  PT_NO_UNROLL
  for (int64_t i = entries.begin; i < entries.end; ++i) {
    if (o.bias_tokens[i] == token && o.bias_values[i] == o.bias_values[i]) sum += o.bias_values[i];
  }
  return sum == sum ? sum : -kInfinity;
}

enum class RowStep : int32_t { kColumns, kPath, kBias, kBadWords, kStops };

// Writes a row, or corrects one from the dense part. All threads of a `Writer` call this together:
// - kFirst: the first step
// - first(), step(): this thread's first entry of a list, and its stride
// - sync(): waits until all threads have written
// - write(column, count, bias, may_be_on_path): writes adjusted logits; threads may write equal values concurrently
// - begin_bias(entries), end_bias(entries): surround calls of bias_of
// - bias_of(entries, column): total bias
// - any_finite(leaves_out): true if a logit above -inf is not left out
template <typename Writer>
class RowPatch {
 public:
  PT_HOST_DEVICE RowPatch(const RowOptions& options, const LogitRow& row, Writer& writer)
      : r_(options), o_(options.o), row_(row), writer_(writer) {}

  // Loops over the steps, which keeps one copy of the code.
  PT_HOST_DEVICE void run() {
    constexpr int32_t kFirst = static_cast<int32_t>(Writer::kFirst), kLast = static_cast<int32_t>(RowStep::kStops);
    PT_NO_UNROLL
    for (int32_t step = kFirst; step <= kLast; ++step) take(RowStep{step});
  }

 private:
  PT_HOST_DEVICE void take(RowStep step) {
    const NodeRange entries = entries_at(step);
    if (entries.size() == 0) return;
    const bool is_bias = step == RowStep::kBias, is_dense = step == RowStep::kColumns;
    const uint32_t count = is_dense ? 4 : 1, stride = count * writer_.step(), end = static_cast<uint32_t>(entries.end);
    if (is_bias) writer_.begin_bias(entries);
    PT_NO_UNROLL
    for (uint32_t i = static_cast<uint32_t>(entries.begin) + count * writer_.first(); i < end; i += stride) {
      const uint32_t column = column_of(token_at(step, i));
      if (column >= static_cast<uint32_t>(row_.vocab)) continue;
      const float bias = is_bias ? writer_.bias_of(entries, column) : step < RowStep::kBias ? 0.0f : -kInfinity;
      writer_.write(column, count, bias, !is_dense);
    }
    if (is_bias) writer_.end_bias(entries);
    writer_.sync();
  }

  PT_HOST_DEVICE NodeRange entries_at(RowStep step) {
    switch (step) {
      case RowStep::kColumns:
        return {0, row_.vocab};
      case RowStep::kPath: {  // generated once more
        NodeRange nodes{0, 0};
        PT_NO_UNROLL
        for (PathPlace at = r_.path(); r_.penalties.any() && !at.at_root(); at.go_up()) ++nodes.end;
        return nodes;
      }
      case RowStep::kStops:
        return {0, forbids_stops() ? o_.num_stops : 0};
      default:
        const bool is_bias = step == RowStep::kBias;
        return entries_of(is_bias ? o_.cu_bias : o_.cu_bad_seqs, r_.sequence, is_bias ? o_.num_bias : o_.num_bad_words);
    }
  }

  // Returns -1 if the entry has no token.
  PT_HOST_DEVICE int64_t token_at(RowStep step, int64_t i) const {
    switch (step) {
      case RowStep::kColumns:
        return o_.first_token + i;
      case RowStep::kPath: {
        PathPlace at = r_.path();
        PT_NO_UNROLL
        for (; i > 0; --i) at.go_up();
        return at.token();
      }
      case RowStep::kBias:
        return o_.bias_tokens[i];
      case RowStep::kBadWords: {
        const NodeRange tokens = entries_of(o_.cu_bad_words, i, o_.num_bad_tokens);
        const int32_t* const word = o_.bad_tokens + tokens.begin;
        const int64_t before = tokens.size() - 1;
        return before >= 0 && r_.text_ends_in(word, before) ? word[before] : -1;
      }
      default:
        return stop_ids()[i];
    }
  }

  // Returns a column out of range if the row lacks the token.
  PT_HOST_DEVICE uint32_t column_of(int64_t token) const {
    return static_cast<uint32_t>(token) - static_cast<uint32_t>(o_.first_token);
  }
  PT_HOST_DEVICE const int32_t* stop_ids() const { return o_.stop_ids + r_.sequence * o_.stops_stride; }
  PT_HOST_DEVICE bool forbids_stops() {
    if (r_.stops == Stops::kAllow || !r_.stops_too_early()) return false;
    const auto is_stop = [&](uint32_t column) {
      uint32_t i = 0, end = static_cast<uint32_t>(o_.num_stops);
      PT_NO_UNROLL
      while (i < end && column_of(stop_ids()[i]) != column) ++i;
      return i < end;
    };
    return r_.stops == Stops::kForbid || writer_.any_finite(is_stop);
  }

  const RowOptions& r_;
  const OptionsParams& o_;
  const LogitRow& row_;
  Writer& writer_;
};

}  // namespace pagedtree
