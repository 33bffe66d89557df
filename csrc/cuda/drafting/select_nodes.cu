// Keeps a batch's best nodes: keys by a warp per tree, one selection over all, then compaction by a warp per tree.
#include "core/select_nodes.h"
#include "cuda/append_children.cuh"
#include "cuda/backend.h"
#include "cuda/tile/launch.cuh"
#include "cuda/tile/radix.cuh"

namespace pagedtree::cuda {
namespace {

constexpr int32_t kFewRows = 4096, kFewTrees = 256;  // limits of the single launch
// Beyond them: warps (trees) per CTA, threads of the selecting CTA, and its threads per tree.
constexpr int kTreeWarps = 4, kChoosingThreads = 1024, kThreadsOfTree = 4;

struct KeptTree {
  int16_t *parents, *last_child;
};

// Writes the keys of a tree, by one warp, 32 nodes at a time; pointer jumping covers them in five steps.
__device__ __forceinline__ void write_keys(const SelectNodesParams& p, uint32_t* keys, const NodeRange& rows) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32), size = static_cast<int32_t>(rows.size());
  const float of_root = size > 0 ? own_survival(p.survival[rows.begin]) : 0.0f;
  for (int32_t first = 0; first < size; first += 32) {
    const int32_t node = first + lane;
    const int64_t row = rows.begin + node;
    float survival = of_root;
    int32_t above = -1;  // lane of an ancestor not yet included
    if (node > 0 && node < size) {
      const float own = p.survival[row];
      const int32_t parent = linked_parent(p, rows.begin, node);
      survival = parent < 0 ? kUnreachable : own_survival(own);
      above = parent - first;
      if (parent >= 0 && above < 0) {
        survival = min_of(survival, parent > 0 ? survival_of_key(keys[rows.begin + parent]) : of_root);
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
    if (node < size) keys[row] = node == 0 ? kRootKey : survival_key(survival);
    __syncwarp();
  }
}

// Writes a tree's kept nodes (key > 0) from row `begin`, by one warp, 32 at a time.
__device__ __forceinline__ void write_kept_tree(const SelectNodesParams& p, const uint32_t* keys, const NodeRange& rows,
                                                int64_t begin, const KeptTree& tree) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32), size = static_cast<int32_t>(rows.size());
  const uint32_t lanes_before = (1u << lane) - 1;
  uint32_t word = 0;  // lane i: kept bits of nodes 32 * i + 0..31, and kept nodes before them
  int32_t before_word = 0, before = 0;
  for (int32_t first = 0; first < size; first += 32) {
    const int32_t node = first + lane;
    const int64_t row = rows.begin + node;
    bool kept = row < rows.end && keys[row] != 0;
    uint32_t lanes = __ballot_sync(~0u, kept);
    if (lane == first / 32) {
      word = lanes;
      before_word = before;
    }
    const int32_t place = before + popcount32(lanes & lanes_before);
    const int32_t old_parent = kept && node > 0 ? p.parents[row] : 0;  // kept: all ancestors of a kept node are
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
}

__device__ __forceinline__ void write_tree(const SelectNodesParams& p, int64_t b, int64_t end) {
  p.trees.cu_nodes[b + 1] = static_cast<int32_t>(min_of(end, p.capacity));
  p.trees.valid[b] = p.valid[b] != 0;
}

// Clears the keys of dropped rows, every `step`th per thread; a root's key is the largest. Returns its kept rows.
__device__ __forceinline__ uint64_t drop_rows(uint32_t* keys, const Selection& chosen, const NodeRange& rows,
                                              int64_t from, int64_t step) {
  constexpr int kLoads = 4;  // in flight
  uint64_t count = 0;
  for (int64_t row = rows.begin + from; row < rows.end; row += kLoads * step) {
    uint32_t of_rows[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) of_rows[i] = row + i * step < rows.end ? keys[row + i * step] : 0;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const bool is_kept = of_rows[i] != 0 && chosen.has(of_rows[i], row + i * step);
      if (of_rows[i] != 0 && !is_kept) keys[row + i * step] = 0;
      count += is_kept;
    }
  }
  return count;
}

// ---- selection

struct ChoiceShared {
  BlockShared block;
  uint32_t bins[kBins];
  uint32_t bin, kept, size;  // bin of the last kept row, its kept rows, its rows
};

// Finds the bin in which the count from the top reaches `target`, by one warp.
__device__ __forceinline__ void find_bin(ChoiceShared& shared, uint32_t target) {
  constexpr uint32_t kOfLane = kBins / 32;
  const uint32_t lane = threadIdx.x, top = kBins - 1 - kOfLane * lane;
  uint32_t own = 0;
#pragma unroll
  for (uint32_t i = 0; i < kOfLane; ++i) own += shared.bins[top - i];
  uint32_t before = static_cast<uint32_t>(warp_scan(own)) - own;
  if (before >= target || before + own < target) return;
  uint32_t bin = top;
#pragma unroll 1
  for (; before + shared.bins[bin] < target; --bin) before += shared.bins[bin];
  shared.bin = bin;
  shared.kept = target - before;
  shared.size = shared.bins[bin];
}

// Selects the `most` best rows, by key, then index: radix select by 8 bits until a whole bin is kept.
__device__ __forceinline__ Selection choose(ChoiceShared& shared, const uint32_t* keys, const NodeRange& used,
                                            int64_t most) {
  constexpr int kLoads = 4;  // in flight
  const int32_t threads = static_cast<int32_t>(blockDim.x);
  uint32_t count = static_cast<uint32_t>(min_of(most, used.size()));
  if (count == 0) return {0, 0};
  uint64_t prefix = 0;
  int shift = 64;
  do {
    shift -= kDigitBits;
#pragma unroll 1
    for (int32_t i = threadIdx.x; i < kBins; i += threads) shared.bins[i] = 0;
    __syncthreads();
#pragma unroll 1
    for (int64_t first = used.begin + threadIdx.x; first < used.end; first += kLoads * threads) {
      uint32_t of_rows[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) of_rows[i] = first + i * threads < used.end ? keys[first + i * threads] : 0;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const uint64_t rank = ranked_key(of_rows[i], first + i * threads);
        if (first + i * threads >= used.end || rank >> shift >> kDigitBits != prefix) continue;
        atomicAdd(&shared.bins[rank >> shift & (kBins - 1)], 1u);
      }
    }
    __syncthreads();
    if (threadIdx.x < 32) find_bin(shared, count);
    __syncthreads();
    prefix = prefix << kDigitBits | shared.bin;
    count = shared.kept;
  } while (shared.size != count && shift > 0);
  const uint64_t least = prefix << shift;
  return {static_cast<uint32_t>(least >> 32), int64_t{~static_cast<uint32_t>(least)} + 1};
}

// ---- few rows: one launch

struct FewShared {
  ChoiceShared choice;
  uint32_t keys[kFewRows];
  int16_t parents[kFewRows], last_child[kFewRows];
  NodeRange rows[kFewTrees];
  int32_t counts[kFewTrees];  // kept nodes per tree
};

__global__ void __launch_bounds__(kMaxWarps * 32, 1) few_nodes_kernel(const __grid_constant__ SelectNodesParams p) {
  auto& shared = ptx::shared<FewShared>();
  const int32_t thread = static_cast<int32_t>(threadIdx.x), lane = thread % 32, batch = static_cast<int32_t>(p.batch);
  const int32_t warp = thread / 32, warps = static_cast<int32_t>(blockDim.x) / 32;
  const int64_t at_least = kept_nodes(p, 0);
  const NodeRange used = used_rows(p.cu_nodes, p.batch, p.num_rows);
  uint32_t* const keys = shared.keys - used.begin;
#pragma unroll 1
  for (int64_t row = used.begin + thread; row < used.end; row += blockDim.x) keys[row] = 0;  // also past max_nodes
  if (thread < batch) shared.rows[thread] = selectable_rows(p, thread);
  const int32_t num_roots = __syncthreads_count(thread < batch && shared.rows[thread].size() > 0);
  for (int32_t b = warp; b < batch; b += warps) write_keys(p, keys, shared.rows[b]);
  __syncthreads();
  const Selection chosen = choose(shared.choice, keys, used, max_of<int64_t>(at_least, num_roots));
  for (int32_t b = warp; b < batch; b += warps) {
    const uint64_t count = warp_sum(drop_rows(keys, chosen, shared.rows[b], lane, 32));
    if (lane == 0) shared.counts[b] = static_cast<int32_t>(count);
  }
  __syncthreads();
  const auto count_before = [&](int32_t end) {
    int32_t count = 0;
#pragma unroll 1
    for (int32_t b = lane; b < end; b += 32) count += shared.counts[b];
    return __reduce_add_sync(~0u, count);
  };
  for (int32_t b = warp; b < batch; b += warps) {
    const int64_t begin = count_before(b), at = shared.rows[b].begin - used.begin;
    if (lane == 0) write_tree(p, b, begin + shared.counts[b]);
    write_kept_tree(p, keys, shared.rows[b], begin, {shared.parents + at, shared.last_child + at});
  }
  if (thread == 0) p.trees.cu_nodes[0] = 0;
#pragma unroll 1
  for (int64_t row = count_before(batch) + thread; row < p.capacity; row += blockDim.x) clear_kept(p, row);
}

// ---- many rows: three launches

struct NodesShared {
  int16_t parents[kMaxTreeNodes], last_child[kMaxTreeNodes];
};

__device__ __forceinline__ int64_t tree_of_warp() { return int64_t{blockIdx.x} * kTreeWarps + threadIdx.x / 32; }

__global__ void __launch_bounds__(kTreeWarps * 32, 1)
    survival_keys_kernel(const __grid_constant__ SelectNodesParams p) {
  const int64_t b = tree_of_warp();
  if (b >= p.batch) return;
  const NodeRange all = node_range(p.cu_nodes, p.batch, b, p.num_rows), rows = selectable_rows(p, b);
  write_keys(p, p.keys, rows);
  for (int64_t row = rows.end + threadIdx.x % 32; row < all.end; row += 32) p.keys[row] = 0;
}

// Selects by one CTA: clears the keys of dropped rows and writes cu_nodes.
__global__ void __launch_bounds__(kChoosingThreads, 1)
    choose_nodes_kernel(const __grid_constant__ SelectNodesParams p) {
  auto& shared = ptx::shared<ChoiceShared>();
  uint64_t num_roots = 0;
  for (int64_t b = threadIdx.x; b < p.batch; b += kChoosingThreads) num_roots += selectable_rows(p, b).size() > 0;
  num_roots = block_sum(shared.block, num_roots);
  const NodeRange used = used_rows(p.cu_nodes, p.batch, p.num_rows);
  const Selection chosen = choose(shared, p.keys, used, kept_nodes(p, static_cast<int64_t>(num_roots)));
  const int64_t thread_of_tree = threadIdx.x % kThreadsOfTree;
  uint64_t before = 0, total;
  for (int64_t first = 0; first < p.batch; first += kChoosingThreads / kThreadsOfTree) {
    const int64_t b = first + threadIdx.x / kThreadsOfTree;
    const uint64_t count =
        b < p.batch ? drop_rows(p.keys, chosen, selectable_rows(p, b), thread_of_tree, kThreadsOfTree) : 0;
    const uint64_t end = before + block_scan(shared.block, count, total);
    if (b < p.batch && thread_of_tree == kThreadsOfTree - 1) write_tree(p, b, static_cast<int64_t>(end));
    before += total;
  }
  if (threadIdx.x == 0) p.trees.cu_nodes[0] = 0;
}

__global__ void __launch_bounds__(kTreeWarps * 32, 1) write_kept_kernel(const __grid_constant__ SelectNodesParams p) {
  auto& shared = ptx::shared<NodesShared[kTreeWarps]>()[threadIdx.x / 32];
  const int64_t b = tree_of_warp();
  if (b < p.batch)
    write_kept_tree(p, p.keys, selectable_rows(p, b), p.trees.cu_nodes[b], {shared.parents, shared.last_child});
  const int64_t threads = int64_t{gridDim.x} * kTreeWarps * 32;
  for (int64_t row = p.trees.cu_nodes[p.batch] + int64_t{blockIdx.x} * blockDim.x + threadIdx.x; row < p.capacity;
       row += threads) {
    clear_kept(p, row);
  }
}

void select_of_many(const SelectNodesParams& p, void* stream) {
  const dim3 trees(static_cast<unsigned>(ceil_div<int64_t>(p.batch, kTreeWarps))), threads(kTreeWarps * 32);
  launch(survival_keys_kernel, trees, threads, 0, stream, p);
  launch(choose_nodes_kernel, dim3(1), dim3(kChoosingThreads), sizeof(ChoiceShared), stream, p);
  launch(write_kept_kernel, trees, threads, sizeof(NodesShared) * kTreeWarps, stream, p);
}

}  // namespace

void CudaBackend::select_nodes(const SelectNodesParams& p, const ExecContext& ctx) const {
  if (p.num_rows > kFewRows || p.batch > kFewTrees) return select_of_many(p, ctx.stream);
  const int64_t warps = clamp_to<int64_t>(max_of(p.batch, ceil_div<int64_t>(p.num_rows, 128)), 1, kMaxWarps);
  launch(few_nodes_kernel, dim3(1), dim3(static_cast<unsigned>(warps * 32)), sizeof(FewShared), ctx.stream, p);
}

}  // namespace pagedtree::cuda
