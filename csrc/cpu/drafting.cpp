// Hosts of the drafting ops (core/drafting.h, best_first.h, ngram.h, select_nodes.h).
#include "core/drafting.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <vector>

#include "core/best_first.h"
#include "core/ngram.h"
#include "core/select_nodes.h"
#include "cpu/backend.h"
#include "cpu/isa.h"
#include "cpu/parallel.h"

namespace pagedtree::cpu {
namespace {

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
    const int64_t position = static_cast<int64_t>(static_cast<uint64_t>(integer_at(p.positions, b)) + p.level);
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

// Writes prefix sums of tree sizes, and padding into unused rows.
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

// Grows sequence b's tree and returns its size. A heap orders nodes by their next child.
int32_t grow_best_first(const BestFirstTreeParams& p, int64_t b, BestFirstTree& tree) {
  struct Entry {
    float joint;  // of the next child
    int32_t node;
  } heap[kMaxTreeNodes];
  int32_t heap_size = 0, size = 0;
  const auto is_later = [&](const Entry& a, const Entry& b) {
    return a.joint != b.joint ? a.joint < b.joint : tree.comes_before(b.node, a.node);
  };
  for (int32_t level = 0; level < reachable_levels(p); ++level) {
    const float* log_probs = level_after(p, b, level);
    int32_t rank = 1;
    while (rank < p.num_candidates && in_order(log_probs[rank - 1], log_probs[rank])) ++rank;
    tree.out_of_order[level] = rank < p.num_candidates;
  }
  const auto enter = [&](int32_t node, RankedChild last) {
    const int32_t depth = tree.depths[node];
    if (depth >= reachable_levels(p)) return;
    const float* log_probs = level_after(p, b, depth);
    const float joint = tree.joints[node];
    tree.next[node] = tree.out_of_order[depth] != 0 ? child_after(log_probs, p.num_candidates, joint, last, 0, 1)
                                                    : child_in_order(log_probs, p.num_candidates, joint, last);
    if (!is_present(tree.next[node].joint)) return;
    heap[heap_size++] = {tree.next[node].joint, node};
    std::push_heap(heap, heap + heap_size, is_later);
  };
  tree.append(size++, -1, 0, {0.0f, -1});
  if (size < p.num_nodes) enter(0, kBeforeAll);
  while (size < p.num_nodes && heap_size > 0) {
    std::pop_heap(heap, heap + heap_size--, is_later);
    const int32_t parent = heap[heap_size].node, node = size++;
    tree.append(node, parent, tree.depths[parent] + 1, tree.next[parent]);
    if (size == p.num_nodes) break;
    enter(parent, tree.next[parent]);
    enter(node, kBeforeAll);
  }
  return size;
}

void write_keys(const SelectNodesParams& p, int64_t b) {
  const NodeRange rows = selectable_rows(p, b);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const int32_t node = static_cast<int32_t>(row - rows.begin), parent = linked_parent(p, rows.begin, node);
    const float of_parent = parent < 0    ? kUnreachable
                            : parent == 0 ? own_survival(p.survival[rows.begin])
                                          : survival_of_key(p.keys[rows.begin + parent]);
    p.keys[row] = node == 0 ? kRootKey : survival_key(min_of(own_survival(p.survival[row]), of_parent));
  }
}

// Orders by key, ties by lower row. Rows are below 2^31.
uint64_t rank_of_node(const SelectNodesParams& p, int64_t row) {
  return uint64_t{p.keys[row]} << 32 | static_cast<uint32_t>(~static_cast<uint32_t>(row));
}

// Skips nodes with key 0.
uint64_t last_kept_rank(const SelectNodesParams& p) {
  std::vector<uint64_t> ranks;
  ranks.reserve(static_cast<size_t>(p.num_rows));
  int64_t num_roots = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    const NodeRange rows = selectable_rows(p, b);
    num_roots += rows.size() > 0;
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      if (p.keys[row] != 0) ranks.push_back(rank_of_node(p, row));
    }
  }
  const int64_t kept = kept_nodes(p, num_roots);
  if (kept == 0) return ~uint64_t{0};
  if (kept >= static_cast<int64_t>(ranks.size())) return uint64_t{1} << 32;
  std::nth_element(ranks.begin(), ranks.begin() + (kept - 1), ranks.end(), std::greater<>());
  return ranks[static_cast<size_t>(kept - 1)];
}

bool is_kept(const SelectNodesParams& p, int64_t begin, int64_t row, uint64_t last) {
  return row == begin || rank_of_node(p, row) >= last;
}

void write_kept_tree(const SelectNodesParams& p, int64_t b, uint64_t last) {
  int16_t places[kMaxTreeNodes];  // kept nodes before this one
  int16_t parents[kMaxTreeNodes], last_child[kMaxTreeNodes];
  const NodeRange rows = selectable_rows(p, b);
  const int64_t begin = p.trees.cu_nodes[b];
  const int32_t size = static_cast<int32_t>(p.trees.cu_nodes[b + 1] - begin);
  p.trees.valid[b] = p.valid[b] != 0;
  int32_t place = 0;
  for (int64_t row = rows.begin; row < rows.end && place < size; ++row) {
    const int32_t node = static_cast<int32_t>(row - rows.begin);
    places[node] = static_cast<int16_t>(place);
    if (!is_kept(p, rows.begin, row, last)) continue;
    const int32_t new_parent = node > 0 ? places[p.parents[row]] : -1;  // all ancestors of a kept node are kept
    parents[place] = static_cast<int16_t>(new_parent);
    write_kept(p, begin, place, parents, row);
    append_child(p.trees, begin, place, new_parent, last_child);
    ++place;
  }
}

}  // namespace

void CpuBackend::best_first_tree(const BestFirstTreeParams& p, const ExecContext& ctx) const {
  p.trees.cu_nodes[0] = 0;
  parallel_for(ctx, p.batch, 1, [&](int64_t begin, int64_t end) {
    const auto tree = std::make_unique_for_overwrite<BestFirstTree>();
    for (int64_t b = begin; b < end; ++b) {
      const int32_t size = grow_best_first(p, b, *tree);
      for (int32_t node = 0; node < p.num_nodes; ++node) write_best_first(p, b, *tree, size, node);
      for (int32_t node = 0; node < size; ++node) {
        append_child(p.trees, b * p.num_nodes, node, tree->parents[node], tree->last_child);
      }
      p.trees.cu_nodes[b + 1] = static_cast<int32_t>((b + 1) * p.num_nodes);
      p.trees.valid[b] = true;
    }
  });
}

void CpuBackend::select_nodes(const SelectNodesParams& p, const ExecContext& ctx) const {
  constexpr int64_t kTreesPerPiece = 16;
  parallel_for(ctx, p.batch, kTreesPerPiece, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) write_keys(p, b);
  });
  const uint64_t last = last_kept_rank(p);
  p.trees.cu_nodes[0] = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    const NodeRange rows = selectable_rows(p, b);
    int64_t end = p.trees.cu_nodes[b];
    for (int64_t row = rows.begin; row < rows.end; ++row) end += is_kept(p, rows.begin, row, last);
    p.trees.cu_nodes[b + 1] = static_cast<int32_t>(min_of(end, p.capacity));
  }
  for (int64_t row = p.trees.cu_nodes[p.batch]; row < p.capacity; ++row) clear_kept(p, row);
  parallel_for(ctx, p.batch, kTreesPerPiece, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) write_kept_tree(p, b, last);
  });
}

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
  // A trie's size is known only once it is built, so tries are built in scratch and then moved.
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
