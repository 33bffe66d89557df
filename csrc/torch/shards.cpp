// Verification with a vocabulary split among ranks: one round per call; Python exchanges the words between calls.
#include "core/verify/shard_distributions.h"
#include "torch/options.h"
#include "torch/sampling.h"
#include "torch/values.h"
#include "torch/verify.h"

namespace pagedtree::ops {
namespace {

template <typename T>
T* words_as(const Check& check, const Tensor& words, const std::string& name, int64_t count) {
  check.read<T>(words, name, {{"N", count}, {"words", kWordsOf<T>}});
  return mutable_pointer<T>(words);
}

// Words per item as exchanged.
int64_t* words_of_items(const Check& check, const Tensor& words, const std::string& name, int64_t items, int64_t each) {
  check.tensor(words, name, {ScalarType::Long}, {{"N", items}, {"words", each}});
  return mutable_pointer<int64_t>(words);
}

// Checks the vocabulary of all ranks against this rank's columns.
void check_vocab(const Check& check, int64_t vocab, int64_t columns) {
  check.that(vocab >= 1 && vocab <= kMaxVocab, "vocab", "1..2^20", vocab);
  check.that(vocab >= columns, "vocab", "at least this rank's " + std::to_string(columns) + " columns", vocab);
}

void check_ranks(const Check& check, int64_t rank, int64_t num_ranks) {
  check.in(num_ranks, "num_ranks", 1, INT32_MAX);
  check.that(rank >= 0 && rank < num_ranks, "rank", "0..num_ranks - 1", rank);
}

ShardRows shard_rows(const Check& check, const Tensor& logits, const Tensor& rows, int64_t first_token, int64_t vocab,
                     const OptionalTensor& grammar_mask) {
  ShardRows shard{};
  shard.logits = rows_params(check, logits, "logits", 0);
  add_grammar_mask(check, grammar_mask, shard.logits);
  shard.rows = words_as<ShardRow>(check, rows, "rows", shard.logits.num_rows);
  check_vocab(check, vocab, shard.logits.vocab);
  check.in(first_token, "first_token", 0, vocab - shard.logits.vocab);
  shard.first_token = first_token;
  shard.vocab = vocab;
  return shard;
}

LogitsParams whole_vocabulary(int64_t rows, int64_t vocab) {
  LogitsParams logits{};
  logits.num_rows = rows;
  logits.vocab = vocab;
  return logits;
}

void add_options(const Check& check, const OptionTensors& tensors, const OptionalTensor& positions, ShardRows& shard) {
  shard.options = options_params(check, tensors, shard.batch, shard.vocab);
  shard.options.first_token = shard.first_token;
  shard.key_dtype = shard.options.used ? DType::kFloat32 : shard.logits.dtype;
  if (positions.has_value()) shard.options.positions = integers(check, *positions, "positions", {"B", shard.batch});
  check.that(positions.has_value() || shard.options.stop_ids == nullptr, "positions", "a Tensor with stop_ids", "None");
}

// Returns the sizes of ShardRow, Residual and ShardEnd in words.
std::string shard_words() {
  const auto words = [](int64_t number) { return std::to_string(number); };
  return words(kWordsOf<ShardRow>) + "," + words(kWordsOf<Residual>) + "," + words(kWordsOf<ShardEnd>);
}

void step_shards(const Tensor& logits, Tensor rows, const OptionalTensor& received, Tensor words,
                 PT_SAMPLING_PARAMETERS, int64_t round, int64_t digit, int64_t last, int64_t rank, int64_t num_ranks,
                 int64_t first_token, int64_t vocab, const OptionalTensor& cu_nodes, const OptionalTensor& depths,
                 const OptionalTensor& seeds, const OptionalTensor& positions, const OptionalTensor& grammar_mask,
                 const OptionalTensor& draft_tokens, const OptionalTensor& draft_to_target,
                 const OptionalTensor& parents PT_OPTION_PARAMETERS) {
  const Check check("step_shards", logits);
  ShardStepParams params{};
  ShardRows& shard = params.shard;
  shard = shard_rows(check, logits, rows, first_token, vocab, grammar_mask);
  const int64_t num_rows = shard.logits.num_rows;
  shard.batch = num_rows;
  const bool trees = cu_nodes.has_value();
  for (const auto& [name, given] : {std::pair{"depths", &depths},
                                    {"draft_tokens", &draft_tokens},
                                    {"draft_to_target", &draft_to_target},
                                    {"parents", &parents}}) {
    check.that(trees || !given->has_value(), name, "None without cu_nodes", "a Tensor");
  }
  if (trees) {
    shard.batch = check.offsets(*cu_nodes, "cu_nodes", shard.cu_nodes);
    check.that(depths.has_value(), "depths", "a Tensor with cu_nodes", "None");
    params.depths = check.read<int32_t>(*depths, "depths", {{"N", num_rows}});
  }
  shard.sampling = sampling_params(check, PT_SAMPLING_ARGUMENTS, shard.batch);
  constexpr int64_t kLast = static_cast<int64_t>(ShardRound::kLeft);
  params.round = static_cast<ShardRound>(check.in(round, "round", 0, kLast));
  params.last = static_cast<ShardRound>(check.in(last, "last", 0, kLast));
  add_options(check, PT_OPTION_TENSORS, positions, shard);
  if (trees) {
    VerifyParams verify{};
    verify.logits = whole_vocabulary(num_rows, vocab);
    verify.cu_nodes = shard.cu_nodes;
    verify.depths = params.depths;
    add_map(check, draft_to_target, verify);
    if (draft_tokens.has_value()) verify.draft_tokens = integers(check, *draft_tokens, "draft_tokens", {"N", num_rows});
    check.that(draft_tokens.has_value() || !shard.options.used, "draft_tokens",
               "a Tensor with request options and trees", "None");
    add_paths(check, verify, parents, shard.options);
  }
  if (seeds.has_value()) check.tensor(*seeds, "seeds", {ScalarType::Long}, {{"B", shard.batch}});
  check.that(digit >= 0 && digit < digits_of(shard.key_dtype), "digit", "a digit of the logits' keys", digit);
  check_ranks(check, rank, num_ranks);
  params.digit = static_cast<int32_t>(digit);
  params.rank = static_cast<int32_t>(rank);
  params.words = words_of_items(check, words, "words", num_rows, words_of(params.round));
  check.that(received.has_value() == (last > 0), "received", "the words of the last round", received.has_value());
  if (received.has_value()) {
    const int64_t parts = params.last == ShardRound::kTies ? num_ranks : 1;
    params.received = words_of_items(check, *received, "received", parts * num_rows, words_of(params.last));
  }
  if (params.round == ShardRound::kRace) {
    check.that(seeds.has_value(), "seeds", "a Tensor to draw tokens", "None");
    check.that(positions.has_value(), "positions", "a Tensor to draw tokens", "None");
    params.seeds = const_pointer<int64_t>(*seeds);
    params.positions = shard.options.positions;
  }
  const Backend& backend = backend_for(logits);
  const Tensor option_rows = add_option_rows(logits, backend, num_rows, shard.logits.vocab, shard.options);
  backend.step_shards(params, context_for(logits));
}

VerdictTensors follow_shards(const Tensor& rows, const Tensor& received, PT_TREE_PARAMETERS, int64_t last,
                             int64_t vocab, const OptionalTensor& draft_to_target, const OptionalTensor& tokens_left) {
  const Check check("follow_shards", rows);
  ShardFollowParams params{};
  params.rows = check.read<ShardRow>(rows, "rows", {"N", {"words", kWordsOf<ShardRow>}});
  check_vocab(check, vocab, 0);
  params.verify = tree_params(check, whole_vocabulary(rows.size(0), vocab), PT_TREE_ARGUMENTS, draft_to_target, "rows");
  check.that(last == static_cast<int64_t>(ShardRound::kPeak) || last == static_cast<int64_t>(ShardRound::kRace), "last",
             "1 or 5", last);
  params.last = static_cast<ShardRound>(last);
  params.received = words_of_items(check, received, "received", rows.size(0), words_of(params.last));
  VerdictTensors verdict = make_verdict(check, rows, tokens_left, params.verify);
  backend_for(rows).follow_shards(params, context_for(rows));
  return verdict;
}

void weigh_shards(const Tensor& logits, Tensor rows, Tensor left, const OptionalTensor& ends,
                  const OptionalTensor& received, Tensor words, PT_TREE_PARAMETERS, PT_SAMPLING_PARAMETERS,
                  int64_t round, int64_t index, int64_t rank, int64_t num_ranks, int64_t first_token, int64_t vocab,
                  const std::string& draft_law, const OptionalTensor& draft_probs, const OptionalTensor& draft_rows,
                  const OptionalTensor& grammar_mask, const OptionalTensor& draft_to_target,
                  const OptionalTensor& positions, const OptionalTensor& parents PT_OPTION_PARAMETERS) {
  const Check check("weigh_shards", logits);
  ShardResidualParams params{};
  ShardRows& shard = params.shard;
  shard = shard_rows(check, logits, rows, first_token, vocab, grammar_mask);
  const int64_t num_rows = shard.logits.num_rows;
  RatioParams& ratio = params.ratio;
  ratio.verify = tree_params(check, whole_vocabulary(num_rows, vocab), PT_TREE_ARGUMENTS, draft_to_target);
  ratio.law = draft_law_of(check, draft_law);
  add_draft_distributions(check, draft_probs, draft_rows, shard.logits.vocab, ratio);
  shard.batch = ratio.verify.batch;
  shard.cu_nodes = ratio.verify.cu_nodes;
  shard.sampling = sampling_params(check, PT_SAMPLING_ARGUMENTS, shard.batch);
  add_options(check, PT_OPTION_TENSORS, positions, shard);
  add_paths(check, ratio.verify, parents, shard.options);
  params.left = words_as<Residual>(check, left, "left", num_rows);
  params.round = static_cast<ResidualRound>(check.in(round, "round", 0, static_cast<int64_t>(ResidualRound::kDraw)));
  params.index = check.in(index, "index", 0, kMaxTreeNodes - 1);
  check_ranks(check, rank, num_ranks);
  params.rank = static_cast<int32_t>(rank);
  params.num_ranks = static_cast<int32_t>(num_ranks);
  params.words = words_of_items(check, words, "words", num_items(params),
                                params.round == ResidualRound::kDraw ? 1 : kResidualWords);
  const bool learns = params.round == ResidualRound::kResidual || params.round == ResidualRound::kDraw;
  check.that(received.has_value() == learns, "received", "the words of the last round", received.has_value());
  if (learns) {
    const int64_t items = params.round == ResidualRound::kDraw ? num_ranks * shard.batch : num_rows;
    params.received = words_of_items(check, *received, "received", items, kResidualWords);
  }
  check.that(ends.has_value() == is_of_trees(params.round), "ends", "a Tensor in rounds of trees", ends.has_value());
  if (ends.has_value()) params.ends = words_as<ShardEnd>(check, *ends, "ends", shard.batch);
  const Backend& backend = backend_for(logits);
  const Tensor option_rows = add_option_rows(logits, backend, num_items(params), shard.logits.vocab, shard.options);
  backend.weigh_shards(params, context_for(logits));
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> walk_shards(
    Tensor rows, Tensor left, const Tensor& masses, const Tensor& received, PT_TREE_PARAMETERS, int64_t index,
    int64_t vocab, const std::string& draft_law, const Tensor& seeds, const Tensor& positions,
    const OptionalTensor& coins, const OptionalTensor& final_coins, const OptionalTensor& draft_to_target,
    const OptionalTensor& tokens_left) {
  const Check check("walk_shards", rows);
  check.tensor(rows, "rows", {ScalarType::Long}, {"N", {"words", kWordsOf<ShardRow>}});
  const int64_t num_rows = rows.size(0);
  check_vocab(check, vocab, 0);
  ShardWalkParams params{};
  RatioParams& ratio = params.ratio;
  ratio.verify = tree_params(check, whole_vocabulary(num_rows, vocab), PT_TREE_ARGUMENTS, draft_to_target, "rows");
  ratio.law = draft_law_of(check, draft_law);
  add_streams(check, seeds, positions, ratio.verify);
  add_coins(check, coins, final_coins, ratio);
  params.rows = words_as<ShardRow>(check, rows, "rows", num_rows);
  params.left = words_as<Residual>(check, left, "left", num_rows);
  params.masses = words_of_items(check, masses, "masses", num_rows, kResidualWords);
  params.received = words_of_items(check, received, "received", num_rows, kResidualWords);
  params.index = check.in(index, "index", 0, kMaxTreeNodes - 1);
  Tensor tried = made(rows, {num_rows}, params.tried);
  Tensor ends = made(rows, {ratio.verify.batch, kWordsOf<ShardEnd>}, params.ends);
  auto [accept_index, num_accepted, tokens, status] = make_verdict(check, rows, tokens_left, ratio.verify);
  backend_for(rows).walk_shards(params, context_for(rows));
  return {accept_index, num_accepted, tokens, status, ends};
}

constexpr Op kWordOps[] = {{"_shard_words", "() -> str", PT_BOX(&shard_words)}};

constexpr Op kOps[] = {
    {"step_shards",
     "(Tensor logits, Tensor(a!) rows, Tensor? received, Tensor(b!) words, " PT_SAMPLING
     ", *, SymInt round, SymInt digit, SymInt last, SymInt rank, SymInt num_ranks, SymInt first_token, SymInt vocab,"
     " Tensor? cu_nodes=None, Tensor? depths=None, Tensor? seeds=None, Tensor? positions=None,"
     " Tensor? grammar_mask=None, Tensor? draft_tokens=None, Tensor? draft_to_target=None, Tensor? "
     "parents=None" PT_OPTIONS ") -> ()",
     PT_BOX(&step_shards)},
    {"follow_shards",
     "(Tensor rows, Tensor received, " PT_TREES ", *, SymInt last, SymInt vocab, Tensor? draft_to_target=None,"
     " Tensor? tokens_left=None) -> (" PT_VERDICT ")",
     PT_BOX(&follow_shards)},
    {"weigh_shards",
     "(Tensor logits, Tensor(a!) rows, Tensor(b!) left, Tensor? ends, Tensor? received,"
     " Tensor(c!) words, " PT_TREES ", " PT_SAMPLING
     ", *, SymInt round, SymInt index, SymInt rank, SymInt num_ranks, SymInt first_token, SymInt vocab, str draft_law,"
     " Tensor? draft_probs=None, Tensor? draft_rows=None, Tensor? grammar_mask=None, Tensor? draft_to_target=None,"
     " Tensor? positions=None, Tensor? parents=None" PT_OPTIONS ") -> ()",
     PT_BOX(&weigh_shards)},
    {"walk_shards",
     "(Tensor(a!) rows, Tensor(b!) left, Tensor masses, Tensor received, " PT_TREES
     ", *, SymInt index, SymInt vocab, str draft_law, Tensor seeds, Tensor positions, Tensor? coins=None,"
     " Tensor? final_coins=None, Tensor? draft_to_target=None, Tensor? tokens_left=None)"
     " -> (" PT_VERDICT ", Tensor ends)",
     PT_BOX(&walk_shards)},
};

}  // namespace

PT_OPS_WITHOUT_TENSORS(kWordOps)
PT_OPS(kOps)

}  // namespace pagedtree::ops
