// An engine without Torch, with raw pointers and its own threads. It links draft trees and runs tree attention over a
// paged cache: queries and keys are zero, and the value at position i is the i-th unit vector, so a node's output row
// shows the positions that it sees. Then it runs attention over a latent cache, whose rows are keys and, in their first
// columns, values; verification under a penalty that forbids repeated tokens; a recurrent layer that commits the
// accepted path; and the choice of the batch's best nodes.
#include <pagedtree/core/backend.h>
#include <pagedtree/core/recurrent.h>
#include <pagedtree/core/schedule.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

namespace {

constexpr int kNumThreads = 2, kPageSize = 4, kNumPages = 8, kMaxPages = 4;

// The engine's thread pool: one thread per piece.
void run_in_parallel(int64_t begin, int64_t end, int64_t grain_size, pagedtree::ExecContext::Body body, void* state) {
  const int64_t piece = std::max(grain_size, pagedtree::ceil_div<int64_t>(end - begin, kNumThreads));
  std::vector<std::thread> threads;
  for (int64_t first = begin; first < end; first += piece) {
    threads.emplace_back(body, first, std::min(first + piece, end), state);
  }
  for (std::thread& thread : threads) thread.join();
}

// A ragged batch of trees and the results of build_trees. Trees have at most 32 nodes, so a mask row is one word.
struct Trees {
  std::vector<int32_t> parents, cu_nodes, depths, first_child, next_sibling, mask;
  std::unique_ptr<bool[]> valid;

  Trees(std::vector<int32_t> parents, std::vector<int32_t> cu_nodes)
      : parents(std::move(parents)), cu_nodes(std::move(cu_nodes)) {
    for (auto* links : {&depths, &first_child, &next_sibling, &mask}) links->resize(this->parents.size());
    valid = std::make_unique<bool[]>(batch());
  }
  int64_t batch() const { return static_cast<int64_t>(cu_nodes.size()) - 1; }
  int64_t num_rows() const { return static_cast<int64_t>(parents.size()); }
  int32_t size(int64_t b) const { return cu_nodes[b + 1] - cu_nodes[b]; }
};

void link(const pagedtree::Backend& backend, const pagedtree::ExecContext& ctx, Trees& trees) {
  pagedtree::BuildTreesParams params{};
  params.parents = trees.parents.data();
  params.cu_nodes = trees.cu_nodes.data();
  params.trees.depths = trees.depths.data();
  params.trees.first_child = trees.first_child.data();
  params.trees.next_sibling = trees.next_sibling.data();
  params.trees.mask = trees.mask.data();
  params.trees.valid = trees.valid.get();
  params.batch = trees.batch();
  params.num_rows = trees.num_rows();
  params.max_nodes = pagedtree::kMaskWordBits;
  params.max_depth = pagedtree::kMaskWordBits - 1;
  params.trees.mask_words = 1;
  backend.build_trees(params, ctx);
}

// One head of keys and values in pages of any order; sequence b's position i is in page_table[b][i / page]. A latent
// cache stores no separate values: they are the first columns of the keys.
struct Cache {
  int32_t head_dim, head_dim_v;
  bool latent;
  std::vector<float> keys, own_values;
  std::vector<int32_t> page_table, seq_lens;

  Cache(int32_t head_dim, int32_t head_dim_v, bool latent, std::vector<int32_t> pages, std::vector<int32_t> lengths)
      : head_dim(head_dim),
        head_dim_v(head_dim_v),
        latent(latent),
        keys(kNumPages * kPageSize * head_dim),
        own_values(latent ? 0 : kNumPages * kPageSize * head_dim_v),
        page_table(std::move(pages)),
        seq_lens(std::move(lengths)) {
    for (size_t b = 0; b < seq_lens.size(); ++b) {
      for (int32_t i = 0; i < seq_lens[b]; ++i) {
        const int32_t slot = page_table[b * kMaxPages + i / kPageSize] * kPageSize + i % kPageSize;
        values()[slot * value_stride() + i] = 1.0f;
      }
    }
  }
  float* values() { return latent ? keys.data() : own_values.data(); }
  const float* values() const { return latent ? keys.data() : own_values.data(); }
  int32_t value_stride() const { return latent ? head_dim : head_dim_v; }
};

std::vector<float> attend(const pagedtree::Backend& backend, const pagedtree::ExecContext& ctx, const Trees& trees,
                          const Cache& cache) {
  const std::vector<float> queries(trees.num_rows() * cache.head_dim);
  std::vector<float> out(trees.num_rows() * cache.head_dim_v);

  std::vector<int32_t> plan(pagedtree::kPlanSize);  // written once per step, for all layers
  pagedtree::AttentionPlanParams schedule{};
  schedule.seq_lens = cache.seq_lens.data();
  schedule.cu_seqlens_q = trees.cu_nodes.data();
  schedule.plan = plan.data();
  schedule.batch = trees.batch();
  schedule.num_tokens = trees.num_rows();
  schedule.max_seq_len = kMaxPages * kPageSize;
  schedule.num_kv_heads = 1;
  schedule.group_size = 1;
  schedule.head_dim = cache.head_dim;
  schedule.head_dim_v = cache.head_dim_v;
  schedule.latent = cache.latent;
  backend.attention_plan(schedule, ctx);

  pagedtree::TreeAttentionParams params{};
  static_cast<pagedtree::AttentionBatch&>(params) = schedule;
  params.q = queries.data();
  const int64_t k_stride = cache.head_dim, v_stride = cache.value_stride();
  params.k_cache = {cache.keys.data(), kPageSize * k_stride, k_stride, k_stride};
  params.v_cache = {cache.values(), kPageSize * v_stride, v_stride, v_stride};
  params.table = {cache.page_table.data(), kMaxPages, kMaxPages, kPageSize};
  params.tree_mask = trees.mask.data();
  params.out = out.data();
  params.q_token_stride = params.q_head_stride = cache.head_dim;
  params.out_token_stride = params.out_head_stride = cache.head_dim_v;
  params.mask_stride = 1;
  params.num_pages = kNumPages;
  params.mask_words = 1;
  params.q_dtype = params.kv_dtype = pagedtree::DType::kFloat32;
  params.scale = 0.125f;
  std::vector<char> scratch(backend.tree_attention_scratch(params, ctx));
  params.scratch = scratch.data();
  backend.tree_attention(params, ctx);
  return out;
}

// Returns the rows of the `budget` likeliest nodes, if acceptance falls with the row's number.
std::vector<int32_t> select(const pagedtree::Backend& backend, const pagedtree::ExecContext& ctx, const Trees& trees,
                            int64_t budget) {
  std::vector<float> survival(trees.num_rows());
  for (int64_t row = 0; row < trees.num_rows(); ++row) survival[row] = 1.0f / static_cast<float>(1 + row);
  Trees kept(std::vector<int32_t>(budget), std::vector<int32_t>(trees.cu_nodes.size()));
  std::vector<int32_t> node_map(budget);
  std::vector<uint32_t> keys(trees.num_rows());

  pagedtree::SelectNodesParams params{};
  params.cu_nodes = trees.cu_nodes.data();
  params.parents = trees.parents.data();
  params.depths = trees.depths.data();
  params.valid = reinterpret_cast<const uint8_t*>(trees.valid.get());
  params.survival = survival.data();
  params.trees = {kept.cu_nodes.data(),     kept.parents.data(), kept.depths.data(), kept.first_child.data(),
                  kept.next_sibling.data(), kept.mask.data(),    kept.valid.get(),   1};
  params.node_map = node_map.data();
  params.keys = keys.data();
  params.batch = trees.batch();
  params.num_rows = trees.num_rows();
  params.capacity = params.budget = budget;
  params.max_nodes = pagedtree::kMaskWordBits;
  params.max_depth = pagedtree::kMaskWordBits - 1;
  backend.select_nodes(params, ctx);
  return node_map;
}

struct Verdict {
  std::vector<int32_t> accept_index, num_accepted;
  std::vector<int64_t> tokens;
};

// Returns the accepted and emitted tokens of each sequence. Logits prefer token 0, then 1, and so on, nodes draft their
// depth's token, and a penalty forbids the tokens of the path.
Verdict verify(const pagedtree::Backend& backend, const pagedtree::ExecContext& ctx, const Trees& trees) {
  constexpr int32_t kVocab = 8, kMaxDepth = 2;
  const int64_t width = kMaxDepth + 1;
  std::vector<float> logits(trees.num_rows() * kVocab);
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = -0.1f * static_cast<float>(i % kVocab);
  std::vector<int32_t> drafts(trees.num_rows()), status(trees.batch());
  for (int64_t row = 0; row < trees.num_rows(); ++row) drafts[row] = trees.depths[row] - 1;
  Verdict verdict{std::vector<int32_t>(trees.batch() * width), std::vector<int32_t>(trees.batch()),
                  std::vector<int64_t>(trees.batch() * width)};
  const std::vector<int64_t> zeros(trees.batch());
  const float temperature = 0.0f, top_p = 1.0f, min_p = 0.0f, presence = 2.0f;
  const int32_t top_k = 0;

  pagedtree::VerifyParams params{};
  params.logits.data = logits.data();
  params.logits.num_rows = trees.num_rows();
  params.logits.vocab = params.logits.row_stride = kVocab;
  params.logits.dtype = pagedtree::DType::kFloat32;
  params.sampling = {&temperature, &top_k, &top_p, &min_p, 0, 0, 0, 0, false};
  params.draft_tokens = {drafts.data(), false};
  params.cu_nodes = trees.cu_nodes.data();
  params.depths = trees.depths.data();
  params.first_child = trees.first_child.data();
  params.next_sibling = trees.next_sibling.data();
  params.valid = reinterpret_cast<const uint8_t*>(trees.valid.get());
  params.seeds = zeros.data();
  params.positions = {zeros.data(), true};
  params.accept_index = verdict.accept_index.data();
  params.num_accepted = verdict.num_accepted.data();
  params.tokens = verdict.tokens.data();
  params.status = status.data();
  params.batch = trees.batch();
  params.max_nodes = pagedtree::kMaskWordBits;
  params.max_depth = kMaxDepth;

  pagedtree::OptionsParams& options = params.options;
  options.presence = &presence;
  options.positions = params.positions;
  options.cu_nodes = params.cu_nodes;
  options.parents = trees.parents.data();
  options.depths = params.depths;
  options.draft_tokens = params.draft_tokens;
  options.num_rows = params.logits.num_rows;
  options.vocab = kVocab;
  options.used = true;
  backend.verify_sampled(params, ctx);
  return verdict;
}

// A recurrent layer after a short convolution. Row r is the r-th unit vector, each tap is 1 and nothing decays: the
// convolution returns a node's row plus its parent's, and the layer the sum over its path. The states start at zero and
// end with the path that `verdict` accepts.
struct Recurrence {
  static constexpr int32_t kDim = 8, kTaps = 2;
  std::vector<float> convolved, out, state, conv_state;

  Recurrence(const pagedtree::Backend& backend, const pagedtree::ExecContext& ctx, const Trees& trees,
             const Verdict& verdict)
      : convolved(trees.num_rows() * kDim),
        out(trees.num_rows() * kDim),
        state(trees.batch() * kDim * kDim),
        conv_state(trees.batch() * kDim * (kTaps - 1)) {
    std::vector<float> inputs(trees.num_rows() * kDim), keys(trees.num_rows() * kDim), decays(trees.num_rows());
    for (int64_t row = 0; row < trees.num_rows(); ++row) inputs[row * kDim + row] = keys[row * kDim] = 1.0f;
    const std::vector<float> taps(kDim * kTaps, 1.0f);
    std::vector<int32_t> slots(trees.batch());
    for (int64_t b = 0; b < trees.batch(); ++b) slots[b] = static_cast<int32_t>(b);

    pagedtree::RecurrentBatch tokens{};
    tokens.cu_nodes = trees.cu_nodes.data();
    tokens.parents = trees.parents.data();
    tokens.depths = trees.depths.data();
    tokens.accept_index = verdict.accept_index.data();
    tokens.num_accepted = verdict.num_accepted.data();
    tokens.state_index = slots.data();
    tokens.num_slots = tokens.batch = trees.batch();
    tokens.num_rows = trees.num_rows();
    tokens.path_width = static_cast<int32_t>(verdict.accept_index.size() / verdict.num_accepted.size());
    tokens.accept_stride = tokens.path_width;
    tokens.max_nodes = pagedtree::kMaskWordBits;

    pagedtree::ConvParams conv{};
    conv.tokens = tokens;
    conv.x = inputs.data();
    conv.weight = taps.data();
    conv.conv_state = conv_state.data();
    conv.out = convolved.data();
    conv.x_stride = conv.channels = kDim;
    conv.weight_strides[0] = conv.width = kTaps;
    conv.weight_strides[1] = 1;
    conv.state_strides[0] = kDim * (kTaps - 1);
    conv.state_strides[1] = kTaps - 1;
    conv.state_strides[2] = 1;
    conv.dtype = conv.weight_dtype = pagedtree::DType::kFloat32;
    backend.tree_conv1d(conv, ctx);

    pagedtree::DeltaRuleParams rule{};  // no beta: values are added
    rule.tokens = tokens;
    rule.q = rule.k = keys.data();
    rule.v = convolved.data();
    rule.g = decays.data();
    rule.state = state.data();
    rule.out = out.data();
    rule.q_token_stride = rule.q_head_stride = rule.k_token_stride = rule.k_head_stride = kDim;
    rule.v_token_stride = rule.v_head_stride = kDim;
    rule.g_token_stride = rule.g_head_stride = 1;
    rule.state_strides[0] = rule.state_strides[1] = kDim * kDim;
    rule.state_strides[2] = kDim;
    rule.state_strides[3] = 1;
    rule.num_heads = rule.group_size = 1;
    rule.key_dim = rule.value_dim = kDim;
    rule.scale = 1.0f;
    rule.dtype = pagedtree::DType::kFloat32;
    backend.tree_delta_rule(rule, ctx);

    rule.out = conv.out = nullptr;  // now the accepted paths
    backend.advance_state(rule, ctx);
    backend.advance_conv(conv, ctx);
  }

  void print() const {
    for (size_t row = 0; row < out.size() / kDim; ++row) {
      std::printf("row %d convolved", static_cast<int>(row));
      print_row(convolved, row);
      std::printf(", read");
      print_row(out, row);
      std::printf("\n");
    }
    for (size_t b = 0; b < conv_state.size() / kDim; ++b) {
      std::printf("sequence %d, its state:", static_cast<int>(b));
      print_row(state, b * kDim);
      std::printf(", its last input:");
      print_row(conv_state, b);
      std::printf("\n");
    }
  }

  static void print_row(const std::vector<float>& matrix, size_t row) {
    for (int32_t i = 0; i < kDim; ++i) std::printf(" %d", static_cast<int>(matrix[row * kDim + i]));
  }
};

}  // namespace

int main() {
  const pagedtree::Backend& backend = pagedtree::cpu::backend();
  pagedtree::ExecContext ctx;
  ctx.num_threads = kNumThreads;
  ctx.parallel_for = run_in_parallel;

  // Two sequences: after a prefix of 5 a root with two children, the first of which has one more; a chain after 2.
  Trees trees({-1, 0, 0, 1, -1, 0, 1}, {0, 4, 7});
  link(backend, ctx, trees);
  const std::vector<int32_t> pages{6, 1, 3, -1, 0, 5, -1, -1}, lengths{5 + 4, 2 + 3};
  const Cache cache(64, 64, false, pages, lengths);
  const std::vector<float> out = attend(backend, ctx, trees, cache);

  std::printf("backend %s\n", backend.name);
  for (int64_t b = 0; b < trees.batch(); ++b) {
    std::printf("sequence %d: a prefix of %d, a tree of %d nodes, valid %d\n", static_cast<int>(b),
                cache.seq_lens[b] - trees.size(b), trees.size(b), trees.valid[b]);
    for (int32_t row = trees.cu_nodes[b]; row < trees.cu_nodes[b + 1]; ++row) {
      std::printf("  node %d, parent %2d, depth %d saw ", row - trees.cu_nodes[b], trees.parents[row],
                  trees.depths[row]);
      for (int32_t i = 0; i < cache.seq_lens[b]; ++i) std::printf("%d", out[row * cache.head_dim_v + i] > 0.0f);
      std::printf("\n");
    }
  }

  const Cache rows(192, 128, true, pages, lengths);
  const std::vector<float> latent = attend(backend, ctx, trees, rows);
  bool same = true;
  for (int64_t row = 0; row < trees.num_rows(); ++row) {
    const float *expected = out.data() + row * cache.head_dim_v, *found = latent.data() + row * rows.head_dim_v;
    for (int32_t i = 0; i < cache.head_dim_v; ++i) same &= std::abs(found[i] - expected[i]) < 1e-6f;
  }
  std::printf("a latent cache: %s\n", same ? "the same" : "ANOTHER RESULT");

  const Verdict verdict = verify(backend, ctx, trees);
  for (int64_t b = 0; b < trees.batch(); ++b) {
    std::printf("sequence %d, no token twice:", static_cast<int>(b));
    for (int32_t j = 0; j < 3; ++j) std::printf(" %d", static_cast<int>(verdict.tokens[b * 3 + j]));
    std::printf("\n");
  }

  Recurrence(backend, ctx, trees, verdict).print();

  std::printf("the best 5 rows:");
  for (const int32_t row : select(backend, ctx, trees, 5)) std::printf(" %d", static_cast<int>(row));
  std::printf("\n");
  return same ? 0 : 1;
}
