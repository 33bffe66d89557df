// Proposes continuations of earlier n-grams. A cluster per sequence finds places, and its first CTA grows the trie: in
// scratch, as its place depends on the other sequences' sizes, except for a batch of one.
#include "core/ngram.h"
#include "cuda/backend.h"
#include "cuda/tile/block.cuh"
#include "cuda/tile/launch.cuh"

namespace pagedtree::cuda {
namespace {

constexpr int kWarps = 16, kThreads = 32 * kWarps;
constexpr int kPlaceThreads = 128;
// A single CTA reads this many tokens in less time than a cluster barrier takes.
constexpr int64_t kTokensOfCta = 4096;

struct NgramShared {
  BlockShared block;
  int64_t pattern[kMaxNgram];  // newest first
  int32_t pattern_size;        // newer than the last negative token
  // Places found per warp of the cluster; then their exclusive prefix sums and the total.
  int32_t found[kMaxCluster * kWarps + 1];
  uint32_t wanted[2][kWarps];  // lanes per warp with a path to add
  TrieSize size;
  int64_t tokens[kMaxTreeNodes];
  int32_t links[4][kMaxTreeNodes];
};

// Two tokens in one load.
struct alignas(16) TokenPair {
  int64_t older, newer;
};

__device__ __forceinline__ void load_pattern(NgramShared& shared, const NgramTexts& texts, int32_t max_ngram) {
  if (threadIdx.x >= 32) return;
  const int32_t count = texts.most_tokens(max_ngram), lane = static_cast<int32_t>(threadIdx.x);
  int32_t size = 0;
#pragma unroll 1
  for (int32_t first = 0; first < kMaxNgram; first += 32) {
    const int32_t i = first + lane;
    const int64_t token = i < count ? texts.history[texts.history_len - 1 - i] : -1;
    shared.pattern[i] = token;
    const uint32_t ends = __ballot_sync(~0u, token < 0);
    if (size == first) size += ends != 0 ? __ffs(static_cast<int>(ends)) - 1 : 32;
  }
  if (lane == 0) shared.pattern_size = size;
}

// A text and the index of its newest place.
struct NumberedText {
  const int64_t* tokens;
  int64_t size;
  int64_t first_place;
};

// Appends the places in [begin, end) directly after `token` to `count` listed ones, by one warp. Returns the new count.
__device__ __forceinline__ int32_t list_places(const NumberedText& text, int64_t begin, int64_t end, int64_t token,
                                               int32_t* places, int32_t count) {
  constexpr int kLoads = 8;                                     // in flight
  const int64_t last_place = text.first_place + text.size - 2;  // after the first token
  begin = max_of(begin, text.first_place);
  end = min_of(end, last_place + 1);
  if (begin >= end) return count;
  // Tokens before these places, newest first. Aligned pairs may cross an end.
  const int64_t newest = last_place - begin, oldest = last_place - (end - 1);
  const int64_t shift = static_cast<int64_t>(reinterpret_cast<uintptr_t>(text.tokens) / sizeof(int64_t) % 2);
  const int64_t lowest = (oldest + shift) / 2;
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  const uint32_t lanes_before = (1u << lane) - 1;
  for (int64_t top = (newest + shift) / 2; top >= lowest; top -= kLoads * 32) {
    const int64_t first = 2 * (top - lane) + 1 - shift;  // the lane's first newer token
    TokenPair pairs[kLoads];
    if (2 * top + 1 - shift <= newest && 2 * (top + 1 - kLoads * 32) - shift >= oldest) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) pairs[i] = *reinterpret_cast<const TokenPair*>(text.tokens + first - 1 - 64 * i);
    } else {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int64_t newer = first - 64 * i;
        pairs[i] = {-1, -1};
        if (newer <= newest && newer > oldest) {
          pairs[i] = *reinterpret_cast<const TokenPair*>(text.tokens + newer - 1);
        } else {
          if (newer - 1 == newest) pairs[i].older = text.tokens[newest];
          if (newer == oldest) pairs[i].newer = text.tokens[oldest];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const bool is_newer = pairs[i].newer == token, is_older = pairs[i].older == token;
      const uint32_t newer = __ballot_sync(~0u, is_newer), older = __ballot_sync(~0u, is_older);
      if ((newer | older) == 0) continue;
      const int32_t place = static_cast<int32_t>(last_place - (first - 64 * i));
      int32_t at = count + popcount32(newer & lanes_before) + popcount32(older & lanes_before);
      if (is_newer) places[at++] = place;
      if (is_older) places[at] = place + 1;
      count += popcount32(newer) + popcount32(older);
    }
  }
  return count;
}

// Returns the number of tokens before the place that equal the pattern, at least 1.
__device__ __forceinline__ int32_t match_length(const NgramShared& shared, const TextPlace& place) {
  constexpr int kLoads = 4;
  const int32_t most = static_cast<int32_t>(min_of<int64_t>(shared.pattern_size, place.end));
  for (int32_t n = 1; n < most; n += kLoads) {
    int64_t tokens[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) tokens[i] = n + i < most ? place.text[place.end - 1 - n - i] : -1;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (tokens[i] < 0 || tokens[i] != shared.pattern[n + i]) return n + i;
    }
  }
  return most;
}

// Finds the places after the last token and match lengths, each warp in its share. Publishes counts to the first CTA.
__device__ __forceinline__ void find_places(const NgramProposeParams& p, int64_t b, NgramShared& shared,
                                            const NgramTexts& texts) {
  const WarpRun run = run_of_warp(static_cast<int32_t>(texts.num_places()));
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  int32_t* const places = p.places + first_place(p, b) + run.begin;
  uint8_t* const lengths = p.match_lengths + first_place(p, b) + run.begin;
  const int64_t token = shared.pattern[0], border = texts.num_history_places();
  int32_t count = 0;
  if (shared.pattern_size > 0) {
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      const NumberedText text = i == 0 ? NumberedText{texts.history, texts.history_len, 0}
                                       : NumberedText{texts.extra, texts.extra_len, border};
      count = list_places(text, run.begin, run.end, token, places, count);
    }
  }
  __syncwarp();
#pragma unroll 1
  for (int32_t i = lane; i < count; i += 32) {
    lengths[i] = static_cast<uint8_t>(match_length(shared, texts.at(places[i])));
  }
  if (lane == 0) *ptx::of_cta(&shared.found[ptx::cluster_rank() * kWarps + threadIdx.x / 32], 0) = count;
}

// A thread's share of the places, in order.
struct FoundPlaces {
  const int32_t* places;
  const uint8_t* lengths;
  const int32_t* before_warp;  // [warps + 1]: places of preceding warps
  int64_t run_length;          // places searched per warp
  int32_t begin, end;
  int32_t first_warp;  // with place `begin`

  // Calls visit(place, n) from `at` until it returns true; returns that index, or `end`.
  template <typename Visit>
  __device__ __forceinline__ int32_t find(int32_t at, int32_t& warp, Visit visit) const {
    for (; at < end; ++at) {
      while (before_warp[warp + 1] <= at) ++warp;
      const int64_t index = warp * run_length + at - before_warp[warp];
      if (visit(places[index], int32_t{lengths[index]})) break;
    }
    return at;
  }
};

__device__ __forceinline__ FoundPlaces part_of_thread(const NgramProposeParams& p, int64_t b, NgramShared& shared,
                                                      const NgramTexts& texts) {
  const int32_t warps = static_cast<int32_t>(ptx::cluster_size()) * kWarps, thread = static_cast<int32_t>(threadIdx.x);
  const uint64_t of_warp = thread < warps ? static_cast<uint64_t>(shared.found[thread]) : 0;
  uint64_t total;
  const uint64_t up_to_warp = block_scan(shared.block, of_warp, total);
  if (thread <= warps) shared.found[thread] = static_cast<int32_t>(up_to_warp - of_warp);
  __syncthreads();
  const int32_t count = static_cast<int32_t>(total), part = ceil_div(count, kThreads);
  FoundPlaces found{.places = p.places + first_place(p, b),
                    .lengths = p.match_lengths + first_place(p, b),
                    .before_warp = shared.found,
                    .run_length = run_of_warp(static_cast<int32_t>(texts.num_places())).length,
                    .begin = static_cast<int32_t>(min_of<int64_t>(int64_t{thread} * part, count)),
                    .end = static_cast<int32_t>(min_of<int64_t>((thread + int64_t{1}) * part, count)),
                    .first_warp = 0};
#pragma unroll 1
  for (int32_t half = kMaxCluster * kWarps / 2; half > 0; half /= 2) {
    const int32_t warp = found.first_warp + half;
    if (warp < warps && shared.found[warp] <= found.begin) found.first_warp = warp;
  }
  return found;
}

// Returns the number of zeros below the lowest set bit.
__device__ __forceinline__ int32_t zeros_below(uint32_t bits) { return popcount32(~bits & (bits - 1)); }

// A thread's iterator over places of one match length, and the trie's depth along their continuation.
struct PlaceIterator {
  int32_t at, warp;    // of FoundPlaces
  bool wants = false;  // `rest` begins with a token that the trie lacks
  TextPlace place = {};
  TriePath path = {};
  const int64_t* rest = nullptr;  // after the path, with its first token and length
  int64_t token = -1;
  int32_t left = 0;

  __device__ __forceinline__ void walk(const DraftTrie& trie) {
    trie.walk(place, path);
    rest = place.text + place.end + path.depth;
    left = trie.path_length(place) - path.depth;
    token = left > 0 ? *rest : -1;
    wants = token >= 0 && trie.can_add(path.node);
  }

  // Advances to the next place that would add a node.
  __device__ __forceinline__ void find_next(const DraftTrie& trie, const NgramTexts& texts, const FoundPlaces& found,
                                            int32_t n, RepeatCheck& check) {
    at = found.find(at, warp, [&](int32_t number, int32_t length) {
      if (length != n) return false;
      place = texts.at(number);
      if (check.repeats(place)) return false;
      path = {};
      walk(trie);
      return wants;
    });
  }
};

// Adds the rest of lane `source`'s path, by one warp. Returns the first new node.
__device__ __forceinline__ int32_t add_path(DraftTrie& trie, const PlaceIterator& mine, int source) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32), first = trie.size.num_nodes;
  const TriePath path{__shfl_sync(~0u, mine.path.node, source), __shfl_sync(~0u, mine.path.depth, source)};
  const int32_t most = min_of(__shfl_sync(~0u, mine.left, source), trie.max_nodes - first);
  const auto* const rest =
      reinterpret_cast<const int64_t*>(__shfl_sync(~0u, reinterpret_cast<uintptr_t>(mine.rest), source));
  int32_t count = 0, added = 32;
  for (int32_t begin = 0; begin < most && added == 32; begin += 32) {
    const int32_t i = begin + lane, node = first + i;
    const int64_t token = i < most ? __ldg(rest + i) : -1;
    added = zeros_below(__ballot_sync(~0u, token < 0));
    if (lane < added) {
      trie.tokens[node] = token;
      trie.parents[node] = i > 0 ? node - 1 : path.node;
      trie.first_child[node] = trie.last_child[node] = lane + 1 < added ? node + 1 : -1;
      trie.next_sibling[node] = -1;
    }
    if (lane == 0 && begin > 0 && added > 0) trie.first_child[node - 1] = trie.last_child[node - 1] = node;
    count += added;
    __syncwarp();
  }
  trie.size = trie.size_with_path(path.node, count, path.depth + count);
  __syncwarp();
  if (lane == 0) trie.link(path.node, first);
  __syncwarp();
  return first;
}

// Inserts the continuations of places with this match length, in order. All threads search for places that add a node.
// The first warp with one adds the places of its lanes and skips places that add nothing: the trie only grows.
__device__ __forceinline__ void insert_places(NgramShared& shared, DraftTrie& trie, RepeatCheck& check,
                                              const NgramTexts& texts, const FoundPlaces& found, int32_t n,
                                              uint32_t& step) {
  const int32_t warp = static_cast<int32_t>(threadIdx.x / 32), lane = static_cast<int32_t>(threadIdx.x % 32);
  PlaceIterator mine{.at = found.begin, .warp = found.first_warp};
  while (trie.can_grow()) {
    if (mine.wants) {
      mine.walk(trie);
      mine.at += !mine.wants;
    }
    if (!mine.wants) mine.find_next(trie, texts, found, n, check);
    uint32_t (&wanted)[kWarps] = shared.wanted[step++ % 2];
    uint32_t lanes = __ballot_sync(~0u, mine.wants);
    if (lane == 0) wanted[warp] = lanes;
    __syncthreads();
    const uint32_t warps = __ballot_sync(~0u, lane < kWarps && wanted[lane % kWarps] != 0);
    if (warps == 0) return;
    if (warp == zeros_below(warps)) {
      while (lanes != 0 && trie.can_grow()) {
        const int source = zeros_below(lanes);
        const int32_t node = add_path(trie, mine, source);
        const int32_t parent = trie.parents[node];
        const int64_t token = trie.tokens[node];
        if (mine.wants) {
          if (mine.path.node == parent && mine.token == token) {
            mine.path = {node, mine.path.depth + 1};
            mine.walk(trie);
          } else {
            mine.wants = trie.can_add(mine.path.node);
          }
          mine.at += !mine.wants;
          if (!mine.wants) mine.find_next(trie, texts, found, n, check);
        }
        lanes = __ballot_sync(~0u, mine.wants);
      }
      if (lane == 0) shared.size = trie.size;
    }
    __syncthreads();
    trie.size = shared.size;
  }
}

// Grows the trie in the first CTA, longest n-grams first.
__device__ __forceinline__ void grow_trie(const NgramProposeParams& p, int64_t b, NgramShared& shared,
                                          const NgramTexts& texts, DraftTrie& trie) {
  const FoundPlaces found = part_of_thread(p, b, shared, texts);
  uint64_t lengths = 0;  // bit n - 1: length n occurs
  int32_t warp = found.first_warp;
  found.find(found.begin, warp, [&](int32_t, int32_t length) {
    if (length >= p.min_ngram) lengths |= uint64_t{1} << (length - 1);
    return false;
  });
  const auto or_half = [&](uint64_t half) { return block_max<~0u>(shared.block, static_cast<uint32_t>(half)); };
  lengths = or_half(lengths) | or_half(lengths >> 32) << 32;
  RepeatCheck check{.max_depth = p.max_depth};
  uint32_t step = 0;
  for (int32_t n = p.max_ngram; n >= p.min_ngram; --n) {
    if ((lengths >> (n - 1) & 1) != 0) insert_places(shared, trie, check, texts, found, n, step);
  }
}

__device__ __forceinline__ void write_padding(const NgramProposeParams& p, int64_t begin, int64_t step) {
#pragma unroll 1
  for (int64_t row = begin; row < p.batch * p.max_nodes; row += step) {
    p.draft_tokens[row] = -1;
    p.parents[row] = -1;
  }
}

__global__ void __launch_bounds__(kThreads, 1) ngram_kernel(const __grid_constant__ NgramProposeParams p) {
  auto& shared = ptx::shared<NgramShared>();
  ptx::let_next_kernel_start();
  const int64_t b = ptx::cluster_index();
  const NgramTexts texts = ngram_texts(p, b);
  DraftTrie trie = draft_trie(p, shared.tokens, shared.links[0], kMaxTreeNodes);
  if (texts.history_len > 0 && (p.active == nullptr || p.active[b])) {
    if (threadIdx.x == 0) trie.plant(texts.history[texts.history_len - 1]);
    trie.size = {.num_nodes = 1};
    load_pattern(shared, texts, p.max_ngram);
    ptx::meet_cluster();
    if (trie.can_grow()) {
      find_places(p, b, shared, texts);
      ptx::meet_cluster();
      if (ptx::cluster_rank() == 0) grow_trie(p, b, shared, texts, trie);
    }
  }
  if (ptx::cluster_rank() > 0) return;
  const bool alone = p.batch == 1;
  int64_t* const tokens = alone ? p.draft_tokens : p.trie_tokens + b * p.max_nodes;
  int32_t* const parents = alone ? p.parents : p.trie_links + b * 4 * p.max_nodes;
  const int32_t size = trie.size.num_nodes, thread = static_cast<int32_t>(threadIdx.x);
#pragma unroll 1
  for (int32_t node = thread; node < size; node += kThreads) {
    tokens[node] = trie.tokens[node];
    parents[node] = trie.parents[node];
  }
  if (alone) write_padding(p, size + thread, kThreads);
  if (thread == 0) p.trie_sizes[b] = size;
  if (alone && thread < 2) p.cu_nodes[thread] = thread * size;
}

// Moves each trie to its place, one CTA each, and writes the padding.
__global__ void __launch_bounds__(kPlaceThreads, 1) place_tries_kernel(const __grid_constant__ NgramProposeParams p) {
  auto& shared = ptx::shared<BlockShared>();
  ptx::wait_for_kernels_before();
  const int64_t b = blockIdx.x;
  uint64_t sums = 0;  // nodes before this sequence; upper half: nodes of all
  for (int64_t other = threadIdx.x; other < p.batch; other += kPlaceThreads) {
    const uint64_t size = static_cast<uint64_t>(p.trie_sizes[other]);
    sums += size << 32 | (other < b ? size : 0);
  }
  sums = block_sum(shared, sums);
  const int64_t begin = static_cast<int64_t>(sums & 0xffffffff), end = static_cast<int64_t>(sums >> 32);
  if (b == 0 && threadIdx.x == 0) p.cu_nodes[0] = 0;
  if (b < p.batch) {
    const int32_t size = p.trie_sizes[b];
#pragma unroll 1
    for (int32_t node = static_cast<int32_t>(threadIdx.x); node < size; node += kPlaceThreads) {
      p.draft_tokens[begin + node] = p.trie_tokens[b * p.max_nodes + node];
      p.parents[begin + node] = p.trie_links[b * 4 * p.max_nodes + node];
    }
    if (threadIdx.x == 0) p.cu_nodes[b + 1] = static_cast<int32_t>(begin + size);
  }
  write_padding(p, end + b * kPlaceThreads + threadIdx.x, int64_t{gridDim.x} * kPlaceThreads);
}

// Returns the CTAs per sequence, limited by the text's length and by SMs: all CTAs run at once.
unsigned ctas_for(const NgramProposeParams& p) {
  const int64_t width = p.history_width + p.extra_width;
  const unsigned most = static_cast<unsigned>(max_cluster(ngram_kernel));
  unsigned ctas = 1;
  while (2 * ctas <= most && ctas * kTokensOfCta < width && 2 * ctas * p.batch <= device_limits().num_sms) ctas *= 2;
  return ctas;
}

}  // namespace

void CudaBackend::ngram_propose(const NgramProposeParams& p, const ExecContext& ctx) const {
  const unsigned ctas = ctas_for(p);
  launch_clusters(ngram_kernel, dim3(static_cast<unsigned>(p.batch * ctas)), dim3(kThreads), ctas, sizeof(NgramShared),
                  ctx.stream, p);
  if (p.batch == 1) return;
  launch_behind(place_tries_kernel, dim3(static_cast<unsigned>(max_of<int64_t>(p.batch, 1))), dim3(kPlaceThreads),
                sizeof(BlockShared), ctx.stream, p);
}

}  // namespace pagedtree::cuda
