// Request options at a row of logits, written once for every backend: which tokens are forbidden, what is added to the
// others, which penalties they pay. A backend then reads the row in fp32, as plain decoding would have it after the
// tokens of the row's path. Whether the row in memory has a NaN is still known.
//
// Tokens are adjusted as if nothing were biased and no draft had been accepted (the dense part, which each backend
// vectorises in its own way, at once or where it reads); RowPatch corrects the few others.
#pragma once

#include "core/sampling.h"
#include "core/tree.h"
#include "core/verify/tree_walk.h"

namespace pagedtree {

// The penalties of one sequence, in range.
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
    penalties.repetition = given > 0.0f ? clamp_to(given, kMinNormal, kMaxFloat) : 1.0f;  // NaN is off, too
  }
  penalties.presence = subtracted_penalty(o.presence, b * o.presence_stride);
  penalties.frequency = subtracted_penalty(o.frequency, b * o.frequency_stride);
  return penalties;
}

// The logit of a token that was generated `count` times; `in_prompt` and the result of a comparison are masks of M.
template <typename M, typename Mask>
PT_HOST_DEVICE typename M::Float penalised(const Penalties& penalties, typename M::Float logit, typename M::Float count,
                                           Mask in_prompt) {
  const auto said = count > 0.0f;
  const auto scaled = M::select(logit > 0.0f, logit / penalties.repetition, logit * penalties.repetition);
  logit = M::select(said | in_prompt, scaled, logit);
  // Two roundings, as in Torch: fma() keeps compilers from making it one.
  logit = logit - M::fma(M::splat(penalties.frequency), count, M::splat(0.0f));
  return M::select(said, logit - penalties.presence, logit);
}

PT_HOST_DEVICE float largest_logit(DType dtype) {
  return dtype == DType::kFloat32 ? kMaxFloat : dtype == DType::kFloat16 ? kMaxFloat16 : kMaxBFloat16;
}

// The entries [begin, end) of one sequence in a list of `size`; none if the offsets do not ascend inside it.
PT_HOST_DEVICE NodeRange entries_of(const int32_t* offsets, int64_t b, int64_t size) {
  const int64_t begin = offsets[b], end = offsets[b + 1];
  return begin >= 0 && begin <= end && end <= size ? NodeRange{begin, end} : NodeRange{0, 0};
}

// A place on a path of drafts; it ends at the root, which is node 0, whatever the parents say.
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

// Whether the stop ids are forbidden before the least position: kDecide forbids them if that leaves a token.
enum class Stops : int32_t { kDecide, kForbid, kAllow };

// The options at one row. Tokens are numbered in the whole vocabulary; the row's first column is o.first_token.
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

  // The row's part of a packed mask.
  PT_HOST_DEVICE const int32_t* words(const int32_t* mask, int64_t stride) const { return mask + sequence * stride; }
  PT_HOST_DEVICE static bool bit(const int32_t* words, int64_t token) {
    return static_cast<uint32_t>(words[token / 32]) >> token % 32 & 1u;
  }
  PT_HOST_DEVICE bool in_prompt(int64_t token) const {
    return o.prompt_mask != nullptr && bit(words(o.prompt_mask, o.prompt_stride), token);
  }
  PT_HOST_DEVICE bool is_allowed(const LogitRow& row, int64_t column) const {
    if (row.allowed != nullptr && !row.allowed[column]) return false;
    if (row.allowed_words != nullptr && !bit(row.allowed_words, column)) return false;
    return o.allowed_mask == nullptr || bit(words(o.allowed_mask, o.allowed_stride), o.first_token + column);
  }

  // How often the token was generated, on the path, too, unless it is known not to be there.
  PT_HOST_DEVICE float count_of(int64_t token, bool may_be_on_path) const {
    int64_t count = o.output_counts == nullptr ? 0 : max_of(o.output_counts[sequence * o.counts_stride + token], 0);
    for (PathPlace at = path(); may_be_on_path && !at.at_root(); at.go_up()) count += at.token() == token;
    return static_cast<float>(count);
  }

  // A column's logit, given the one in memory and the sum of what is added to it, before anything forbids it for the
  // path's sake.
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

  // Whether the text, that of the path included, ends in these tokens.
  PT_HOST_DEVICE bool text_ends_in(const int32_t* tokens, int64_t count) const {
    int64_t left = 0, start = 0;
    if (o.history != nullptr) {
      left = clamp_to<int64_t>(o.history_lens[sequence], 0, o.history_width);
      start = o.history_start == nullptr ? 0 : max_of(o.history_start[sequence], 0);
    }
    PathPlace at = path();
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

// The sum of what is listed for a token from the `first` entry on. NaN is no entry; opposite infinities forbid.
PT_HOST_DEVICE float bias_from(const OptionsParams& o, int64_t first, int64_t end, int64_t token) {
  float sum = 0.0f;
  for (int64_t i = first; i < end; ++i) {
    if (o.bias_tokens[i] == token && o.bias_values[i] == o.bias_values[i]) sum += o.bias_values[i];
  }
  return sum == sum ? sum : -kInfinity;
}

// The corrections of a row that the dense part has written. All threads of a `Writer` call this together:
// - first(), step(): the entries of a list that this thread takes
// - sync(): waits until all threads have written
// - raw(column): the logit in memory
// - store(column, value), forbid(column): writes the value, or -inf unless the logit in memory is NaN; several threads
//   may write the same at once
// - begin_bias(entries), end_bias(entries): around calls of bias_of
// - bias_of(entries, i, bias): what is added to the token of entry i; false if another entry's thread writes it
// - any_finite(leaves_out): whether a logit of the row is above -inf, but for columns that are left out
template <typename Writer>
class RowPatch {
 public:
  PT_HOST_DEVICE RowPatch(const RowOptions& options, const LogitRow& row, Writer& writer)
      : r_(options), o_(options.o), row_(row), writer_(writer) {}

  PT_HOST_DEVICE void run() {
    if (r_.penalties.any() && r_.node != 0) {
      count_path();
      writer_.sync();
    }
    if (o_.cu_bias != nullptr) {
      add_bias();
      writer_.sync();
    }
    forbid_bad_words();
    writer_.sync();
    if (r_.stops == Stops::kAllow || !r_.stops_too_early()) return;
    const int32_t* stops = o_.stop_ids + r_.sequence * o_.stops_stride;
    const auto is_stop = [&](int64_t column) {
      int64_t i = 0;
      while (i < o_.num_stops && stops[i] - o_.first_token != column) ++i;
      return i < o_.num_stops;
    };
    if (r_.stops == Stops::kDecide && !writer_.any_finite(is_stop)) return;
    for (int64_t i = writer_.first(); i < o_.num_stops; i += writer_.step()) {
      at_token(stops[i], [&](int64_t column) { writer_.forbid(column); });
    }
    writer_.sync();
  }

 private:
  // Calls f(column) if the row has the token.
  template <typename F>
  PT_HOST_DEVICE void at_token(int64_t token, F f) const {
    const int64_t column = token - o_.first_token;
    if (token >= 0 && column >= 0 && column < row_.vocab) f(column);
  }
  PT_HOST_DEVICE void write(int64_t column, float bias) {
    writer_.store(column, r_.adjusted(row_, column, writer_.raw(column), bias));
  }

  // Tokens of the path were generated once more.
  PT_HOST_DEVICE void count_path() {
    int64_t i = 0;
    for (PathPlace at = r_.path(); !at.at_root(); at.go_up(), ++i) {
      if (i % writer_.step() != writer_.first()) continue;
      const int64_t token = at.token();
      bool repeats = false;  // of several threads one writes
      for (PathPlace below = r_.path(); below.node != at.node && !repeats; below.go_up()) {
        repeats = below.token() == token;
      }
      if (!repeats) at_token(token, [&](int64_t column) { write(column, 0.0f); });
    }
  }

  PT_HOST_DEVICE void add_bias() {
    const NodeRange entries = entries_of(o_.cu_bias, r_.sequence, o_.num_bias);
    writer_.begin_bias(entries);
    for (int64_t i = entries.begin + writer_.first(); i < entries.end; i += writer_.step()) {
      at_token(o_.bias_tokens[i], [&](int64_t column) {
        float bias;
        if (writer_.bias_of(entries, i, bias)) write(column, bias);
      });
    }
    writer_.end_bias(entries);
  }

  PT_HOST_DEVICE void forbid_bad_words() {
    if (o_.cu_bad_seqs == nullptr) return;
    const NodeRange words = entries_of(o_.cu_bad_seqs, r_.sequence, o_.num_bad_words);
    for (int64_t word = words.begin + writer_.first(); word < words.end; word += writer_.step()) {
      const NodeRange tokens = entries_of(o_.cu_bad_words, word, o_.num_bad_tokens);
      if (tokens.size() == 0) continue;
      at_token(o_.bad_tokens[tokens.end - 1], [&](int64_t column) {
        if (r_.text_ends_in(o_.bad_tokens + tokens.begin, tokens.size() - 1)) writer_.forbid(column);
      });
    }
  }

  const RowOptions& r_;
  const OptionsParams& o_;
  const LogitRow& row_;
  Writer& writer_;
};

}  // namespace pagedtree
