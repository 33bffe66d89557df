#include "core/drafting.h"

#include <cmath>
#include <memory>

#include "cpu/backend.h"
#include "cpu/isa.h"
#include "cpu/parallel.h"

namespace pagedtree::cpu {
namespace {

// The children of frontier node f, scored with the log-probability of the path.
void expand_node(const ExpandTreeParams& p, const IsaKernels& isa, int64_t b, int64_t f, FilterScratch& scratch) {
  const int64_t row = b * p.num_expanded + f, children = first_child_of(p, b, f);
  int64_t* tokens = p.out_tokens + children;
  float* scores = p.out_scores + children;
  float* probs = p.law == GrowthLaw::kTopK ? nullptr : p.draft_probs + row * p.logits.vocab;
  const float parent = frontier_score(p, b, f);
  if (!is_present(parent)) {
    for (int32_t k = 0; k < p.num_children; ++k) {
      tokens[k] = -1;
      scores[k] = -kInfinity;
    }
    for (int64_t x = 0; probs != nullptr && x < p.logits.vocab; ++x) probs[x] = 0.0f;
    return;
  }
  const LogitRow logits = logit_row(p.logits, row);
  double best = 0.0, log_sum = 0.0;
  if (p.law == GrowthLaw::kTopK) {
    log_sum = std::log(isa.top_tokens(logits, p.num_children, true, tokens, scores));
    best = scores[0];
  } else {
    const int64_t position = static_cast<int64_t>(static_cast<uint64_t>(p.positions[b]) + p.level);
    isa.draw_children(logits, sampling_of(p.sampling, b),
                      {p.law, p.num_children, static_cast<uint64_t>(p.seeds[b]), position, use_of_children(p.law, f),
                       tokens, scores, probs},
                      scratch);
  }
  for (int32_t k = 0; k < p.num_children && is_present(scores[k]); ++k) {
    scores[k] = child_score(parent, scores[k], best, log_sum);
    if (!is_present(scores[k])) tokens[k] = -1;
  }
}

// Writes the offsets of ragged trees from their sizes, and padding into the rows that no tree takes.
template <typename CountOf>
void pack_offsets(int64_t batch, int64_t num_rows, int32_t* cu_nodes, int64_t* draft_tokens, int32_t* parents,
                  const CountOf& count_of) {
  cu_nodes[0] = 0;
  for (int64_t b = 0; b < batch; ++b) cu_nodes[b + 1] = cu_nodes[b] + count_of(b);
  for (int64_t row = cu_nodes[batch]; row < num_rows; ++row) {
    draft_tokens[row] = -1;
    parents[row] = -1;
  }
}

}  // namespace

void CpuBackend::expand_tree(const ExpandTreeParams& p, const ExecContext& ctx) const {
  const IsaKernels& isa = isa_kernels();
  parallel_for(ctx, p.batch * p.num_expanded, 1, [&](int64_t begin, int64_t end) {
    const auto scratch = std::make_unique_for_overwrite<FilterScratch>();
    for (int64_t row = begin; row < end; ++row) {
      expand_node(p, isa, row / p.num_expanded, row % p.num_expanded, *scratch);
    }
  });
  parallel_for(ctx, p.batch, 8, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) grow_tree(p, b);
  });
}

void CpuBackend::rerank_tree(const RerankTreeParams& p, const ExecContext& ctx) const {
  const int64_t num_rows = p.batch * p.num_nodes;
  pack_offsets(p.batch, num_rows, p.cu_nodes, p.draft_tokens, p.out_parents,
               [&](int64_t b) { return count_reranked(p, b); });
  for (int64_t row = p.cu_nodes[p.batch]; row < num_rows; ++row) p.node_map[row] = -1;
  parallel_for(ctx, p.batch, 4, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) rerank_sequence(p, b);
  });
}

void CpuBackend::ngram_propose(const NgramProposeParams& p, const ExecContext& ctx) const {
  // The size of a trie is known only when it is built: each is built in scratch and then moved to its place.
  parallel_for(ctx, p.batch, 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) p.trie_sizes[b] = propose_ngrams(p, b);
  });
  pack_offsets(p.batch, p.batch * p.max_nodes, p.cu_nodes, p.draft_tokens, p.parents,
               [&](int64_t b) { return p.trie_sizes[b]; });
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t begin = p.cu_nodes[b];
    for (int32_t node = 0; node < p.trie_sizes[b]; ++node) {
      p.draft_tokens[begin + node] = p.trie_tokens[b * p.max_nodes + node];
      p.parents[begin + node] = p.trie_links[b * 4 * p.max_nodes + node];
    }
  }
}

void CpuBackend::medusa_propose(const MedusaProposeParams& p, const ExecContext& ctx) const {
  const IsaKernels& isa = isa_kernels();
  parallel_for(ctx, p.batch * p.num_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t b = row / p.num_heads, head = row % p.num_heads;
      if (p.active != nullptr && !p.active[b]) continue;
      isa.top_tokens(head_row(p, b, head), p.num_top, false, p.top_tokens + row * p.num_top,
                     p.top_scores + row * p.num_top);
    }
  });
  pack_offsets(p.batch, p.batch * p.num_nodes, p.cu_nodes, p.draft_tokens, p.out_parents,
               [&](int64_t b) { return p.active == nullptr || p.active[b] ? p.num_nodes : 0; });
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t row = p.cu_nodes[b]; row < p.cu_nodes[b + 1]; ++row) {
      const int32_t node = static_cast<int32_t>(row - p.cu_nodes[b]);
      p.draft_tokens[row] = medusa_token(p, b, node);
      p.out_parents[row] = p.parents[node];
    }
  }
}

}  // namespace pagedtree::cpu
