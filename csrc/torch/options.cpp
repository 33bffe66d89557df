#include "torch/options.h"

#include "torch/values.h"

namespace pagedtree::ops {
namespace {

const float* penalty(const Check& check, const OptionalTensor& given, const char* name, int64_t batch,
                     int32_t& stride) {
  if (!given.has_value()) return nullptr;
  const float* values = check.read<float>(given, name, {"B"});
  check.one_or(batch, *given, name);
  stride = given->size(0) == 1 ? 0 : 1;
  return values;
}

template <typename T>
const T* rows_of(const Check& check, const OptionalTensor& given, const char* name, int64_t batch, Axis width,
                 int64_t& stride) {
  const T* rows = check.read<T>(given, name, {{"B", batch}, width}, Strides::kLastContiguous);
  if (given.has_value()) stride = given->stride(0);
  return rows;
}

// Requires both arguments or neither.
void check_together(const Check& check, const char* name, const OptionalTensor& given, const char* other,
                    const OptionalTensor& with) {
  if (given.has_value() == with.has_value()) return;
  check.fail(name, std::string("a Tensor if, and only if, ") + other + " is one",
             given.has_value() ? "a tensor without it" : "None");
}

void check_values(const Check& check, const OptionTensors& t, const OptionsParams& o) {
  const auto offsets = [&](const OptionalTensor& given, const char* name, int64_t limit) {
    if (given.has_value()) check_offsets(check, host_values<int32_t>(*given), name, limit);
  };
  offsets(t.cu_bias, "cu_bias", o.num_bias);
  offsets(t.cu_bad_words, "cu_bad_words", o.num_bad_tokens);
  offsets(t.cu_bad_seqs, "cu_bad_seqs", o.num_bad_words);
  if (t.history_lens.has_value()) check_range<int32_t>(check, *t.history_lens, "history_lens", 0, o.history_width);
}

}  // namespace

OptionsParams options_params(const Check& check, const OptionTensors& t, int64_t batch, int64_t vocab) {
  OptionsParams o{};
  o.batch = batch;
  const Axis words("ceil(V / 32)", ceil_div<int64_t>(vocab, 32)), of_batch("B", batch), offsets("B + 1", batch + 1);
  o.vocab = vocab;
  o.repetition = penalty(check, t.repetition_penalty, "repetition_penalty", batch, o.repetition_stride);
  o.presence = penalty(check, t.presence_penalty, "presence_penalty", batch, o.presence_stride);
  o.frequency = penalty(check, t.frequency_penalty, "frequency_penalty", batch, o.frequency_stride);
  o.prompt_mask = rows_of<int32_t>(check, t.prompt_mask, "prompt_mask", batch, words, o.prompt_stride);
  o.output_counts = rows_of<int32_t>(check, t.output_counts, "output_counts", batch, {"V", vocab}, o.counts_stride);
  o.allowed_mask = rows_of<int32_t>(check, t.allowed_mask, "allowed_mask", batch, words, o.allowed_stride);

  check_together(check, "bias_values", t.bias_values, "bias_tokens", t.bias_tokens);
  check_together(check, "cu_bias", t.cu_bias, "bias_tokens", t.bias_tokens);
  o.bias_tokens = check.read<int32_t>(t.bias_tokens, "bias_tokens", {"M"});
  o.num_bias = t.bias_tokens.has_value() ? t.bias_tokens->size(0) : 0;
  o.bias_values = check.read<float>(t.bias_values, "bias_values", {{"M", o.num_bias}});
  o.cu_bias = check.read<int32_t>(t.cu_bias, "cu_bias", {offsets});

  check_together(check, "cu_bad_words", t.cu_bad_words, "bad_tokens", t.bad_tokens);
  check_together(check, "cu_bad_seqs", t.cu_bad_seqs, "bad_tokens", t.bad_tokens);
  o.bad_tokens = check.read<int32_t>(t.bad_tokens, "bad_tokens", {"M"});
  o.num_bad_tokens = t.bad_tokens.has_value() ? t.bad_tokens->size(0) : 0;
  if (t.cu_bad_words.has_value()) o.num_bad_words = check.offsets(*t.cu_bad_words, "cu_bad_words", o.cu_bad_words);
  o.cu_bad_seqs = check.read<int32_t>(t.cu_bad_seqs, "cu_bad_seqs", {offsets});

  check_together(check, "history_lens", t.history_lens, "history", t.history);
  if (t.history_start.has_value() && !t.history.has_value()) {
    check.fail("history_start", "None without history", "a Tensor");
  }
  o.history = rows_of<int64_t>(check, t.history, "history", batch, "L", o.history_stride);
  o.history_width = t.history.has_value() ? t.history->size(1) : 0;
  o.history_lens = check.read<int32_t>(t.history_lens, "history_lens", {of_batch});
  o.history_start = check.read<int32_t>(t.history_start, "history_start", {of_batch});

  check_together(check, "min_position", t.min_position, "stop_ids", t.stop_ids);
  o.stop_ids = rows_of<int32_t>(check, t.stop_ids, "stop_ids", batch, "S", o.stops_stride);
  o.num_stops = t.stop_ids.has_value() ? t.stop_ids->size(1) : 0;
  o.min_position = check.read<int64_t>(t.min_position, "min_position", {of_batch});

  o.used = o.repetition != nullptr || o.presence != nullptr || o.frequency != nullptr || o.allowed_mask != nullptr ||
           o.bias_tokens != nullptr || o.bad_tokens != nullptr || o.stop_ids != nullptr;
  if (value_checks_enabled()) check_values(check, t, o);
  return o;
}

void add_paths(const Check& check, const VerifyParams& verify, const OptionalTensor& parents, OptionsParams& options) {
  const int32_t* nodes = check.read<int32_t>(parents, "parents", {{"N", verify.logits.num_rows}});
  if (!options.used) return;
  check.that(parents.has_value(), "parents", "a Tensor with request options", "None");
  options.parents = nodes;
  options.cu_nodes = verify.cu_nodes;
  options.depths = verify.depths;
  options.draft_tokens = verify.draft_tokens;
  options.draft_to_target = verify.draft_to_target;
  options.draft_vocab = verify.draft_vocab;
  options.num_rows = verify.logits.num_rows;
}

Tensor add_option_rows(const Tensor& anchor, const Backend& backend, int64_t items, int64_t columns,
                       OptionsParams& options) {
  constexpr int64_t kOfWord = 4;  // aligns rows to 16 bytes
  options.scratch_rows = options.used ? min_of(items, backend.max_option_rows) : 0;
  options.scratch_stride = ceil_div(columns, kOfWord) * kOfWord;
  return made(anchor, {options.scratch_rows, options.scratch_stride}, options.scratch);
}

}  // namespace pagedtree::ops
