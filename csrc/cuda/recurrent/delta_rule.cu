// The gated delta rule over a chunk of tokens, of which each follows its parent; the algebra is in
// docs/notes/recurrent.md. One CTA for each sequence, value head and 32 columns of the state, which it keeps in shared
// memory.
#include "cuda/backend.h"
#include "cuda/recurrent/chunk.cuh"
#include "cuda/recurrent/products.cuh"
#include "cuda/recurrent/solve.cuh"
#include "cuda/recurrent/walks.cuh"

namespace pagedtree::cuda {
namespace {

// The tokens in shared.rows and shared.parents; `carried`: they are a chain, and others follow.
__device__ __forceinline__ void run_chunk(const Chunk& t, int32_t count, bool carried) {
  __syncthreads();
  link(t, count);
  if (t.p.channel_decay) find_norms(t, count);
  for (int32_t begin = 0; begin < count; begin += t.group) {
    if (t.p.channel_decay) {
      weigh_by_walks(t, begin, count);
    } else {
      weigh_by_products(t, begin, count);
    }
    solve(t, begin, count);
  }
  if (carried && t.p.channel_decay) carry_by_walks(t, count);
  if (carried && !t.p.channel_decay) carry_by_products(t, count);
  __syncthreads();
}

// visit(state in shared memory, state in memory) for each element of the CTA's columns, neighbours in memory by
// neighbouring threads.
template <typename Visit>
__device__ __forceinline__ void for_each_element(const Chunk& t, int32_t first_column, int64_t slot,
                                                 const Visit& visit) {
  const int64_t* const strides = t.p.state_strides;
  const bool by_channel = strides[2] < strides[3];
  const int32_t columns = min_of(kColumns, t.p.value_dim - first_column);
  const int32_t outer = by_channel ? columns : t.p.key_dim, inner = by_channel ? t.p.key_dim : columns;
  float* const state = t.p.state + slot * strides[0] + t.head * strides[1] + first_column * strides[3];
  for (int32_t o = threadIdx.x / 32; o < outer; o += kWarps) {
    for (int32_t n = threadIdx.x % 32; n < inner; n += 32) {
      const int32_t channel = by_channel ? n : o, column = by_channel ? o : n;
      visit(t.state[channel * kStateStride + column], state[channel * strides[2] + column * strides[3]]);
    }
  }
}

__global__ void __launch_bounds__(kWarps * 32, 2)
    delta_rule_kernel(const __grid_constant__ DeltaRuleParams p, int32_t capacity, int32_t group, int32_t tiles) {
  const RecurrentBatch& tokens = p.tokens;
  const int32_t item = static_cast<int32_t>(blockIdx.x) / tiles, b = item / p.num_heads;
  const int32_t first_column = static_cast<int32_t>(blockIdx.x) % tiles * kColumns;
  const int32_t i = threadIdx.x;
  const Chunk t(p, capacity, group, item % p.num_heads, first_column + i % 32);
  const bool writes = p.out == nullptr, is_tree = !writes && tokens.parents != nullptr;
  const NodeRange rows = node_range(tokens.cu_nodes, b, tokens.num_rows);
  const int64_t slot = state_slot(tokens, b);
  int64_t total = writes ? tokens_to_replay(tokens, b) : rows.size();
  if (is_tree) total = min_of<int64_t>(total, tokens.max_nodes);
  if (total == 0) return;
  for (int32_t e = i; e < p.key_dim * kStateStride; e += kWarps * 32) t.state[e] = 0.0f;
  __syncthreads();
  if (slot >= 0) for_each_element(t, first_column, slot, [](float& here, float& there) { here = there; });
  for (int64_t begin = 0; begin < total; begin += capacity) {  // one turn for a tree
    const int32_t count = static_cast<int32_t>(min_of<int64_t>(capacity, total - begin));
    if (i < count) {
      const int64_t row = is_tree ? rows.begin + i : replayed_row(tokens, b, begin + i);
      t.shared.rows[i] = static_cast<int32_t>(row);
      t.shared.parents[i] = static_cast<int16_t>(is_tree ? linked_parent(tokens, rows.begin, i) : i - 1);
    }
    run_chunk(t, count, writes || begin + count < total);
  }
  if (writes) for_each_element(t, first_column, slot, [](float& here, float& there) { there = here; });
}

// What no node writes.
__global__ void __launch_bounds__(256) clear_kernel(uint16_t* out, int64_t count) {
  const int64_t at = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (at < count) out[at] = 0;
}

// Tokens that are weighed together: as many as leave room for two CTAs on an SM of Ampere or Hopper. Each has the same
// result in a group of any size.
int32_t group_size(const DeltaRuleParams& p, int32_t capacity) {
  int32_t group = kWarps * kBlock;
  while (group > kBlock && group / 2 >= capacity) group /= 2;
  while (group > kBlock && ChunkSizes(p.key_dim, capacity, group).bytes > (80 << 10)) group /= 2;
  return group;
}

void run(const DeltaRuleParams& p, const ExecContext& ctx) {
  const RecurrentBatch& tokens = p.tokens;
  const bool whole_tree = tokens.parents != nullptr && p.out != nullptr;
  const int32_t capacity = whole_tree ? tokens.max_nodes : kCausalChunk, group = group_size(p, capacity);
  const int32_t tiles = ceil_div(p.value_dim, kColumns);
  const dim3 grid(static_cast<unsigned>(tokens.batch * p.num_heads * tiles));
  const size_t bytes = static_cast<size_t>(ChunkSizes(p.key_dim, capacity, group).bytes);
  launch(delta_rule_kernel, grid, dim3(kWarps * 32), bytes, ctx.stream, p, capacity, group, tiles);
}

}  // namespace

void CudaBackend::tree_delta_rule(const DeltaRuleParams& p, const ExecContext& ctx) const {
  const int64_t count = p.tokens.num_rows * p.num_heads * p.value_dim;
  launch(clear_kernel, grid_of(count, 256), dim3(256), 0, ctx.stream, static_cast<uint16_t*>(p.out), count);
  run(p, ctx);
}

void CudaBackend::advance_state(const DeltaRuleParams& p, const ExecContext& ctx) const { run(p, ctx); }

}  // namespace pagedtree::cuda
