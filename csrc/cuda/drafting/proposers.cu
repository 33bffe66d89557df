#include "core/drafting.h"
#include "core/ngram.h"
#include "cuda/backend.h"
#include "cuda/drafting/packing.cuh"
#include "cuda/drafting/top_tokens.cuh"
#include "cuda/tile/launch.cuh"

namespace pagedtree::cuda {
namespace {

constexpr int kTreeThreads = 256;

// ---- ngram_propose

// Behind it in shared memory: int32_t [max_ngram - min_ngram + 1, kTreeThreads], each thread's lists of places.
struct NgramShared {
  BlockShared block;
  NgramPattern pattern;
  TrieSize size;
  int64_t tokens[kMaxTreeNodes];
  int32_t links[4][kMaxTreeNodes];
};

size_t ngram_shared_bytes(const NgramProposeParams& p) {
  return sizeof(NgramShared) + static_cast<size_t>(p.max_ngram - p.min_ngram + 1) * kTreeThreads * sizeof(int32_t);
}

// Inserts what follows the places of one length of n-gram, each thread's after those of the threads before it. All
// threads look for places that would add a node, the first one that has one inserts it. There are at most max_nodes
// such steps, because a place that would add nothing never will.
__device__ __forceinline__ void insert_places(NgramShared& shared, DraftTrie& trie, RepeatCheck& check,
                                              const NgramTexts& texts, const PlaceLists& lists, int32_t list) {
  int32_t place = lists.first(list);
  bool is_new = true;
  while (trie.can_grow()) {
    for (; place >= 0; place = lists.after(list, place), is_new = true) {
      const TextPlace at = texts.at(place);
      if (!(is_new && check.repeats(at)) && trie.would_add(at)) break;
    }
    is_new = false;
    int32_t count;
    const int32_t rank = rank_in_block(shared.block, place >= 0, count);
    if (count == 0) return;
    if (place >= 0 && rank == 0) {
      trie.insert(texts.at(place));
      shared.size = trie.size;
    }
    __syncthreads();
    trie.size = shared.size;
  }
}

// One CTA per sequence builds its trie in scratch: its place in the result depends on the sizes of the others.
__global__ void __launch_bounds__(kTreeThreads, 1) ngram_kernel(const __grid_constant__ NgramProposeParams p) {
  auto& shared = ptx::shared<NgramShared>();
  const int64_t b = blockIdx.x;
  const NgramTexts texts = ngram_texts(p, b);
  if (texts.history_len == 0 || (p.active != nullptr && !p.active[b])) {
    if (threadIdx.x == 0) p.cu_nodes[b + 1] = 0;
    return;
  }
  DraftTrie trie = draft_trie(p, shared.tokens, shared.links[0], kMaxTreeNodes);
  const int32_t count = texts.most_tokens(p.max_ngram), thread = static_cast<int32_t>(threadIdx.x);
  if (thread < count) shared.pattern.copy_token(texts, thread);
  __syncthreads();
  if (thread == 0) {
    shared.pattern.complete(count);
    trie.plant(shared.pattern.from_end(0));
    shared.size = trie.size;
  }
  __syncthreads();
  trie.size = shared.size;
  if (trie.can_grow()) {
    // Each thread looks at its part of the texts, and as far before it as the pattern is long.
    const int32_t num_lists = p.max_ngram - p.min_ngram + 1;
    PlaceLists lists = {reinterpret_cast<int32_t*>(&shared + 1) + thread, next_places(p, b), kTreeThreads};
    lists.clear(num_lists);
    const int64_t num_places = texts.num_places(), part = ceil_div<int64_t>(num_places, kTreeThreads);
    const int64_t begin = min_of(thread * part, num_places), end = min_of(begin + part, num_places);
    match_places(texts, shared.pattern, p.min_ngram, begin, end, [&](int64_t place, int32_t n) {
      lists.append(n - p.min_ngram, static_cast<int32_t>(place));
      return true;
    });
    RepeatCheck check{.max_depth = p.max_depth};
    for (int32_t list = num_lists - 1; list >= 0; --list) insert_places(shared, trie, check, texts, lists, list);
  }
  for (int32_t node = thread; node < trie.size.num_nodes; node += kTreeThreads) {
    p.trie_tokens[b * p.max_nodes + node] = shared.tokens[node];
    p.trie_links[b * 4 * p.max_nodes + node] = shared.links[0][node];
  }
  if (thread == 0) p.cu_nodes[b + 1] = trie.size.num_nodes;
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
  launch(ngram_kernel, sequences, threads, ngram_shared_bytes(p), ctx.stream, p);
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
