#include "core/drafting.h"
#include "cuda/backend.h"
#include "cuda/drafting/packing.cuh"
#include "cuda/drafting/top_tokens.cuh"
#include "cuda/tile/launch.cuh"

namespace pagedtree::cuda {
namespace {

constexpr int kTreeThreads = 256;

// ---- ngram_propose

struct TrieShared {
  BlockShared block;
  int64_t tokens[kMaxTreeNodes];
  int32_t links[4][kMaxTreeNodes];
  int32_t num_nodes;
  int64_t ends[kTreeThreads];  // the ends of matches, most recent first
};

// insert_matches() by a CTA: all threads look for matches, the first one inserts.
__device__ __forceinline__ void insert_tile_matches(const NgramProposeParams& p, TrieShared& shared, DraftTrie& trie,
                                                    const int64_t* stream, int64_t size, const int64_t* history,
                                                    int64_t history_len, int32_t n) {
  const int64_t last = history[history_len - 1];
  for (int64_t first = size - 1; first > 0 && shared.num_nodes < p.max_nodes; first -= kTreeThreads) {
    const int64_t end = first - threadIdx.x;
    const bool matches =
        end > 0 && stream[end - 1] == last && match_length(stream, end, history, history_len, p.max_ngram) == n;
    int32_t count;
    const int32_t at = rank_in_block(shared.block, matches, count);
    if (count == 0) continue;
    if (matches) shared.ends[at] = end;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int32_t i = 0; i < count && trie.num_nodes < trie.max_nodes; ++i) {
        trie.insert(stream, shared.ends[i], min_of(shared.ends[i] + p.max_depth, size));
      }
      shared.num_nodes = trie.num_nodes;
    }
    __syncthreads();
  }
}

// One CTA per sequence builds its trie in scratch: its place in the result depends on the sizes of the others.
__global__ void __launch_bounds__(kTreeThreads, 1) ngram_kernel(const __grid_constant__ NgramProposeParams p) {
  auto& shared = ptx::shared<TrieShared>();
  const int64_t b = blockIdx.x;
  const int64_t history_len = clamp_to<int64_t>(p.history_lens[b], 0, p.history_width);
  if (history_len == 0 || (p.active != nullptr && !p.active[b])) {
    if (threadIdx.x == 0) p.cu_nodes[b + 1] = 0;
    return;
  }
  const int64_t* history = p.history + b * p.history_stride;
  DraftTrie trie = {.tokens = shared.tokens,
                    .parents = shared.links[0],
                    .first_child = shared.links[1],
                    .last_child = shared.links[2],
                    .next_sibling = shared.links[3],
                    .max_nodes = p.max_nodes,
                    .max_branches = p.max_branches};
  if (threadIdx.x == 0) {
    trie.plant(history[history_len - 1]);
    shared.num_nodes = 1;
  }
  __syncthreads();
  const bool looks = history[history_len - 1] >= 0 && p.max_depth > 0;
  for (int32_t n = p.max_ngram; n >= p.min_ngram && looks; --n) {
    insert_tile_matches(p, shared, trie, history, history_len, history, history_len, n);
    if (p.extra == nullptr) continue;
    insert_tile_matches(p, shared, trie, p.extra + b * p.extra_stride, p.extra_width, history, history_len, n);
  }
  for (int32_t node = threadIdx.x; node < shared.num_nodes; node += kTreeThreads) {
    p.trie_tokens[b * p.max_nodes + node] = shared.tokens[node];
    p.trie_links[b * 4 * p.max_nodes + node] = shared.links[0][node];
  }
  if (threadIdx.x == 0) p.cu_nodes[b + 1] = shared.num_nodes;
}

__global__ void __launch_bounds__(kTreeThreads, 1) place_tries_kernel(const __grid_constant__ NgramProposeParams p) {
  const int64_t b = blockIdx.x, begin = p.cu_nodes[b];
  for (int64_t row = begin + threadIdx.x; row < p.cu_nodes[b + 1]; row += kTreeThreads) {
    p.draft_tokens[row] = p.trie_tokens[b * p.max_nodes + row - begin];
    p.parents[row] = p.trie_links[b * 4 * p.max_nodes + row - begin];
  }
}

// ---- medusa_propose

// One CTA per (sequence, head).
template <DType kDType>
__global__ void __launch_bounds__(kRowThreads, 1) medusa_top_kernel(const __grid_constant__ MedusaProposeParams p) {
  auto& shared = ptx::shared<BestShared>();
  const int64_t heads = max_of(p.num_heads, 1), b = blockIdx.x / heads, head = blockIdx.x % heads;
  const bool active = p.active == nullptr || p.active[b];
  if (head == 0 && threadIdx.x == 0) p.cu_nodes[b + 1] = active ? p.num_nodes : 0;
  if (!active || p.num_heads == 0) return;
  const int32_t size = top_tokens(LogitReader<kDType>(head_row(p, b, head)), p.num_top, shared);
  for (int32_t k = threadIdx.x; k < p.num_top; k += blockDim.x) {
    p.top_tokens[(b * p.num_heads + head) * p.num_top + k] = k < size ? ranked_id(shared.best[k]) : -1;
  }
}

__global__ void __launch_bounds__(kTreeThreads, 1) fill_tree_kernel(const __grid_constant__ MedusaProposeParams p) {
  const int64_t b = blockIdx.x, begin = p.cu_nodes[b];
  for (int64_t row = begin + threadIdx.x; row < p.cu_nodes[b + 1]; row += kTreeThreads) {
    const int32_t node = static_cast<int32_t>(row - begin);
    p.draft_tokens[row] = medusa_token(p, b, node);
    p.out_parents[row] = p.parents[node];
  }
}

}  // namespace

void CudaBackend::ngram_propose(const NgramProposeParams& p, const ExecContext& ctx) const {
  const dim3 sequences(static_cast<unsigned>(p.batch)), threads(kTreeThreads);
  launch(ngram_kernel, sequences, threads, sizeof(TrieShared), ctx.stream, p);
  pack_trees({p.cu_nodes, p.draft_tokens, p.parents, nullptr, p.batch, p.batch * p.max_nodes}, ctx);
  launch(place_tries_kernel, sequences, threads, 0, ctx.stream, p);
}

void CudaBackend::medusa_propose(const MedusaProposeParams& p, const ExecContext& ctx) const {
  const dim3 rows(static_cast<unsigned>(p.batch * max_of(p.num_heads, 1))), sequences(static_cast<unsigned>(p.batch));
  with_logit_dtype(p.head_logits.dtype, [&](auto dtype) {
    launch(medusa_top_kernel<dtype>, rows, dim3(threads_of_row(p.head_logits.vocab)), sizeof(BestShared), ctx.stream,
           p);
  });
  pack_trees({p.cu_nodes, p.draft_tokens, p.out_parents, nullptr, p.batch, p.batch * p.num_nodes}, ctx);
  launch(fill_tree_kernel, sequences, dim3(kTreeThreads), 0, ctx.stream, p);
}

}  // namespace pagedtree::cuda
