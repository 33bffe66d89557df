#include "core/select_nodes.h"
#include "cuda/append_children.cuh"
#include "cuda/backend.h"
#include "cuda/tile/launch.cuh"
#include "cuda/tile/radix.cuh"

namespace pagedtree::cuda {
namespace {

constexpr int kWarps = 16;
constexpr int kThreads = kWarps * 32;
// Without clusters: warps of a CTA that treats trees, and threads of the one that chooses, so many for each tree.
constexpr int kTreeWarps = 4, kChoosingThreads = 1024, kThreadsOfTree = 4;

// The kept nodes of a warp's tree, by their new indices.
struct KeptTree {
  int16_t parents[kMaxTreeNodes];
  int16_t last_child[kMaxTreeNodes];
};

struct SelectShared {
  RadixShared radix;
  KeptTree trees[kWarps];
};
static_assert(sizeof(SelectShared) <= 99 << 10);  // what every GPU from sm_80 on gives

// The rows of all trees, as items of a radix search that all CTAs of the cluster share.
struct NodeItems {
  const uint32_t* keys;
  int64_t begin, end;

  __device__ int64_t size() const { return end; }
  template <typename F>
  __device__ __forceinline__ void each(uint32_t /*least*/, F f) const {
    constexpr int kLoads = 4;  // on their way together
    const int64_t threads = int64_t{ptx::cluster_size()} * blockDim.x;
    for (int64_t row = begin + ptx::cluster_rank() * blockDim.x + threadIdx.x; row < end; row += kLoads * threads) {
      uint32_t batch[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) batch[i] = row + i * threads < end ? keys[row + i * threads] : 0;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (batch[i] != 0) f(batch[i], row + i * threads);
      }
    }
  }
};

// The best of at most kThreads rows, by one CTA: to sort them takes fewer steps than the digits of their keys.
__device__ __forceinline__ Selection select_few(RadixShared& shared, const NodeItems& items, uint64_t count) {
  auto* const ranked = reinterpret_cast<uint64_t*>(shared.counts);
  const int32_t size = static_cast<int32_t>(items.end - items.begin), i = static_cast<int32_t>(threadIdx.x);
  if (i < size) {
    const uint32_t key = items.keys[items.begin + i];
    ranked[i] = key != 0 ? ranked_key(key, items.begin + i) : 0;
  }
  int32_t capacity = 1;
  while (capacity < size) capacity *= 2;
  block_sort(ranked, size, capacity);
  if (count == 0) return {~0u, 0};
  const uint64_t last = count <= static_cast<uint64_t>(size) ? ranked[count - 1] : 0;
  return {static_cast<uint32_t>(last >> 32), last == 0 ? 0 : int64_t{~static_cast<uint32_t>(last)} + 1};
}

// Writes the keys of tree b's rows, by one warp: 32 nodes at a time, so that a path's part among them needs five steps
// at most, however long it is. Earlier nodes are done.
__device__ __forceinline__ void write_keys(const SelectNodesParams& p, int64_t b) {
  const NodeRange all = node_range(p.cu_nodes, p.batch, b, p.num_rows), rows = selectable_rows(p, b);
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32), size = static_cast<int32_t>(rows.size());
  const float of_root = size > 0 ? own_survival(p.survival[rows.begin]) : 0.0f;
  for (int32_t first = 0; first < size; first += 32) {
    const int32_t node = first + lane;
    const int64_t row = rows.begin + node;
    float survival = of_root;
    int32_t above = -1;  // the lane of an ancestor whose survival is still to be counted
    if (node > 0 && node < size) {
      const float own = p.survival[row];
      const int32_t parent = linked_parent(p, rows.begin, node);
      survival = parent < 0 ? kUnreachable : own_survival(own);
      above = parent - first;
      if (parent >= 0 && above < 0) {
        survival = min_of(survival, parent > 0 ? survival_of_key(p.keys[rows.begin + parent]) : of_root);
      }
    }
    while (__any_sync(~0u, above >= 0)) {
      const int source = above >= 0 ? above : lane;
      const float of_ancestors = __shfl_sync(~0u, survival, source);
      const int32_t further = __shfl_sync(~0u, above, source);
      if (above < 0) continue;
      survival = min_of(survival, of_ancestors);
      above = further;
    }
    if (node < size) p.keys[row] = node == 0 ? kRootKey : survival_key(survival);
    __syncwarp();
  }
  for (int64_t row = rows.end + lane; row < all.end; row += 32) p.keys[row] = 0;
}

__device__ __forceinline__ bool is_kept(const SelectNodesParams& p, const Selection& chosen, const NodeRange& rows,
                                        int64_t row) {
  return row < rows.end && (row == rows.begin || (p.keys[row] != 0 && chosen.has(p.keys[row], row)));
}

// How many nodes of tree b are kept, for each lane of the warp.
__device__ __forceinline__ int32_t count_kept(const SelectNodesParams& p, const Selection& chosen, int64_t b) {
  const NodeRange rows = selectable_rows(p, b);
  int32_t count = 0;
  for (int64_t row = rows.begin + threadIdx.x % 32; row - threadIdx.x % 32 < rows.end; row += 32) {
    count += popcount32(__ballot_sync(~0u, is_kept(p, chosen, rows, row)));
  }
  return count;
}

// Writes the kept nodes of tree b to the rows from `begin` on, by one warp, 32 nodes at a time; returns where they end.
__device__ __forceinline__ int64_t write_kept_tree(const SelectNodesParams& p, const Selection& chosen, int64_t b,
                                                   int64_t begin, KeptTree& tree) {
  const NodeRange rows = selectable_rows(p, b);
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32), size = static_cast<int32_t>(rows.size());
  const uint32_t lanes_before = (1u << lane) - 1;
  uint32_t word = 0;  // lane i: which of the nodes 32 * i + 0..31 are kept, and how many nodes before them are
  int32_t before_word = 0, before = 0;
  for (int32_t first = 0; first < size; first += 32) {
    const int32_t node = first + lane;
    const int64_t row = rows.begin + node;
    bool kept = is_kept(p, chosen, rows, row);
    uint32_t lanes = __ballot_sync(~0u, kept);
    if (lane == first / 32) {
      word = lanes;
      before_word = before;
    }
    const int32_t place = before + popcount32(lanes & lanes_before);
    const int32_t old_parent = kept && node > 0 ? p.parents[row] : 0;  // kept like each node on the way to a kept one
    const uint32_t word_of_parent = __shfl_sync(~0u, word, old_parent / 32);
    const int32_t before_parent =
        __shfl_sync(~0u, before_word, old_parent / 32) + popcount32(word_of_parent & ((1u << (old_parent % 32)) - 1));
    const int32_t parent = node > 0 ? before_parent : -1;
    kept = kept && begin + place < p.capacity;
    if (kept) tree.parents[place] = static_cast<int16_t>(parent);
    __syncwarp();
    if (kept) write_kept(p, begin, place, tree.parents, row);
    append_children(p.trees, begin, kept, place, parent, tree.last_child);
    before += popcount32(lanes);
  }
  return begin + before;
}

// Writes where tree b's rows end, and whether it is valid, by one thread.
__device__ __forceinline__ void write_tree(const SelectNodesParams& p, int64_t b, int64_t end) {
  p.trees.cu_nodes[b + 1] = static_cast<int32_t>(min_of(end, p.capacity));
  p.trees.valid[b] = p.valid[b] != 0;
}

// One cluster for the batch: its warps share the trees, and its threads the rows. The CTAs meet between the steps, so
// that one launch suffices.
__global__ void __launch_bounds__(kThreads, 1) select_nodes_kernel(const __grid_constant__ SelectNodesParams p) {
  auto& shared = ptx::shared<SelectShared>();
  BlockShared& block = shared.radix.block;
  ptx::cluster_sync();
  // Each warp takes trees that are neighbours, so that the nodes that other warps keep before them are one sum.
  const int64_t warps = int64_t{ptx::cluster_size()} * kWarps, warp = ptx::cluster_rank() * kWarps + threadIdx.x / 32;
  const int64_t first = p.batch * warp / warps, last = p.batch * (warp + 1) / warps;
  uint64_t num_roots = 0, num_kept = 0, total;
  for (int64_t b = first; b < last; ++b) {
    write_keys(p, b);
    num_roots += selectable_rows(p, b).size() > 0;
  }
  sum_before_warp_of_cluster(block, num_roots, total);
  ptx::cluster_sync();  // the keys are written

  const NodeRange used = used_rows(p.cu_nodes, p.batch, p.num_rows);
  const NodeItems items{p.keys, used.begin, used.end};
  const uint64_t count = static_cast<uint64_t>(kept_nodes(p, static_cast<int64_t>(total)));
  const bool are_few = ptx::cluster_size() == 1 && used.size() <= kThreads;
  const Selection chosen =
      are_few ? select_few(shared.radix, items, count) : select_best(shared.radix, items, kKeyDigits, count);

  for (int64_t b = first; b < last; ++b) num_kept += static_cast<uint64_t>(count_kept(p, chosen, b));
  int64_t row = static_cast<int64_t>(sum_before_warp_of_cluster(block, num_kept, total));
  for (int64_t b = first; b < last; ++b) {
    row = write_kept_tree(p, chosen, b, row, shared.trees[threadIdx.x / 32]);
    if (threadIdx.x % 32 == 0) write_tree(p, b, row);
  }
  if (leads_cluster()) p.trees.cu_nodes[0] = 0;
  const int64_t threads = int64_t{ptx::cluster_size()} * kThreads;
  for (int64_t padding = static_cast<int64_t>(total) + ptx::cluster_rank() * kThreads + threadIdx.x;
       padding < p.capacity; padding += threads) {
    clear_kept(p, padding);
  }
}

// ---- without clusters: three launches

__device__ __forceinline__ int64_t tree_of_warp() { return int64_t{blockIdx.x} * kTreeWarps + threadIdx.x / 32; }

__global__ void __launch_bounds__(kTreeWarps * 32, 1)
    survival_keys_kernel(const __grid_constant__ SelectNodesParams p) {
  if (tree_of_warp() < p.batch) write_keys(p, tree_of_warp());
}

// Sets the keys of tree b's rows that are not kept to 0 (a root is: its key is the largest), every `step`th by this
// thread; returns how many are kept.
__device__ __forceinline__ uint64_t drop_rows(const SelectNodesParams& p, const Selection& chosen, int64_t b,
                                              int64_t from, int64_t step) {
  constexpr int kLoads = 8;  // on their way together
  const NodeRange rows = selectable_rows(p, b);
  uint64_t count = 0;
  for (int64_t row = rows.begin + from; row < rows.end; row += kLoads * step) {
    uint32_t keys[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) keys[i] = row + i * step < rows.end ? p.keys[row + i * step] : 0;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const bool is_kept = keys[i] != 0 && chosen.has(keys[i], row + i * step);
      if (keys[i] != 0 && !is_kept) p.keys[row + i * step] = 0;
      count += is_kept;
    }
  }
  return count;
}

// Chooses, by one CTA: the keys of rows that are not kept become 0, and cu_nodes tells where each tree ends.
__global__ void __launch_bounds__(kChoosingThreads, 1)
    choose_nodes_kernel(const __grid_constant__ SelectNodesParams p) {
  auto& shared = ptx::shared<RadixShared>();
  uint64_t num_roots = 0;
  for (int64_t b = threadIdx.x; b < p.batch; b += kChoosingThreads) num_roots += selectable_rows(p, b).size() > 0;
  num_roots = block_sum(shared.block, num_roots);
  const NodeRange used = used_rows(p.cu_nodes, p.batch, p.num_rows);
  const NodeItems items{p.keys, used.begin, used.end};
  const Selection chosen =
      select_best(shared, items, kKeyDigits, static_cast<uint64_t>(kept_nodes(p, static_cast<int64_t>(num_roots))));
  const int64_t thread_of_tree = threadIdx.x % kThreadsOfTree;
  uint64_t before = 0, total;
  for (int64_t first = 0; first < p.batch; first += kChoosingThreads / kThreadsOfTree) {
    const int64_t b = first + threadIdx.x / kThreadsOfTree;
    const uint64_t count = b < p.batch ? drop_rows(p, chosen, b, thread_of_tree, kThreadsOfTree) : 0;
    const uint64_t end = before + block_scan(shared.block, count, total);
    if (b < p.batch && thread_of_tree == kThreadsOfTree - 1) write_tree(p, b, static_cast<int64_t>(end));
    before += total;
  }
  if (threadIdx.x == 0) p.trees.cu_nodes[0] = 0;
}

__global__ void __launch_bounds__(kTreeWarps * 32, 1) write_kept_kernel(const __grid_constant__ SelectNodesParams p) {
  auto& trees = ptx::shared<KeptTree[kTreeWarps]>();
  const int64_t b = tree_of_warp();
  if (b < p.batch) write_kept_tree(p, {0, 0}, b, p.trees.cu_nodes[b], trees[threadIdx.x / 32]);
  const int64_t threads = int64_t{gridDim.x} * kTreeWarps * 32;
  for (int64_t row = p.trees.cu_nodes[p.batch] + int64_t{blockIdx.x} * blockDim.x + threadIdx.x; row < p.capacity;
       row += threads) {
    clear_kept(p, row);
  }
}

void select_without_clusters(const SelectNodesParams& p, void* stream) {
  const dim3 trees(static_cast<unsigned>(ceil_div<int64_t>(p.batch, kTreeWarps))), threads(kTreeWarps * 32);
  launch(survival_keys_kernel, trees, threads, 0, stream, p);
  launch(choose_nodes_kernel, dim3(1), dim3(kChoosingThreads), sizeof(RadixShared), stream, p);
  launch(write_kept_kernel, trees, threads, sizeof(KeptTree) * kTreeWarps, stream, p);
}

// So many CTAs that each warp has two trees, if the GPU has such clusters: to meet costs a cluster as much as a tree. A
// power of two fits into any GPU's clusters.
unsigned ctas_for(int64_t batch, unsigned most) {
  unsigned ctas = 1;
  while (2 * ctas * kWarps < batch && 2 * ctas <= most) ctas *= 2;
  return ctas;
}

}  // namespace

void CudaBackend::select_nodes(const SelectNodesParams& p, const ExecContext& ctx) const {
  const unsigned most = static_cast<unsigned>(max_cluster(select_nodes_kernel));
  if (most == 1 && p.batch > kWarps) return select_without_clusters(p, ctx.stream);
  const unsigned ctas = ctas_for(p.batch, most);
  launch_clusters(select_nodes_kernel, dim3(ctas), dim3(kThreads), ctas, sizeof(SelectShared), ctx.stream, p);
}

}  // namespace pagedtree::cuda
