// Gated delta rule over tokens with parents (docs/notes/recurrent.md):
//     u[n]   = beta[n] (v[n] - S0.T (D(n, 0) k[n]) - sum over ancestors m of A[n, m] u[m])
//     out[n] = scale (S0.T (D(n, 0) q[n]) + sum over the path of C[n, m] u[m])
// One CTA per sequence, value head, and 32 state columns (chunk.cuh); short inputs: few_tokens.cuh, short_tokens.cuh.
#include "cuda/backend.h"
#include "cuda/recurrent/few_tokens.cuh"
#include "cuda/recurrent/products.cuh"
#include "cuda/recurrent/short_tokens.cuh"
#include "cuda/recurrent/solve.cuh"

namespace pagedtree::cuda {
namespace {

// Processes the tokens of shared.rows. `carried`: a chain whose state is needed afterwards.
template <bool kChannelDecay>
__device__ __forceinline__ void run_chunk(const Chunk& t, const Sequence& sequence, int32_t count, bool carried) {
  __syncthreads();
  link(t.p, sequence, t.shared, t.masks, t.words, t.head, count);
  for (int32_t begin = 0; begin < count; begin += t.group) {
    compute_by_products<kChannelDecay>(t, begin, count);
    if constexpr (kChannelDecay) compute_by_paths(t, begin, count);
    solve(t, begin, count);
  }
  if (carried) kChannelDecay ? carry_by_paths(t, count) : carry_by_products(t, count);
  __syncthreads();
}

// Copies the CTA's columns of a state to or from memory, coalesced. A missing state is 0.
template <bool kStores>
__device__ __forceinline__ void copy_state(const Chunk& t, int64_t state_index) {
  constexpr int kOfThread = kColumns / kWarps, kUnderWay = kStores ? kOfThread : 2 * kOfThread;
  const int64_t* const strides = t.p.state_strides;
  const bool by_channel = strides[2] < strides[3];
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, first_column = t.column - lane;
  const int32_t channel = by_channel ? lane : warp, column = by_channel ? warp : lane;
  const int32_t columns = state_index < 0 ? 0 : min_of(kColumns, t.p.value_dim - first_column);
  float* at = t.p.state + state_index * strides[0] + t.head * strides[1] + channel * strides[2] +
              (first_column + column) * strides[3];
  const int64_t next = kWarps * strides[by_channel ? 3 : 2], turn = 32 * strides[2] - (kOfThread - 1) * next;
#pragma unroll 1
  for (int32_t begin = channel; begin - channel < t.p.key_dim; begin += kUnderWay * kWarps) {
    const auto channel_of = [&](int e) {
      return begin + e / kOfThread * 32 + (by_channel ? 0 : e % kOfThread * kWarps);
    };
    const auto column_of = [&](int e) { return column + (by_channel ? e % kOfThread * kWarps : 0); };
    const auto is_there = [&](int e) { return channel_of(e) < t.p.key_dim && column_of(e) < columns; };
    const auto in_shared = [&](int e) -> float& { return t.state[channel_of(e) * kStateStride + column_of(e)]; };
    float values[kUnderWay], *in_memory[kUnderWay];
#pragma unroll
    for (int e = 0; e < kUnderWay; ++e) {
      in_memory[e] = at;
      values[e] = !is_there(e) ? 0.0f : kStores ? in_shared(e) : *at;
      at += e % kOfThread == kOfThread - 1 ? turn : next;
    }
#pragma unroll
    for (int e = 0; e < kUnderWay; ++e) {
      if (kStores && is_there(e)) *in_memory[e] = values[e];
      if (!kStores && channel_of(e) < padded_channels(t.p.key_dim)) in_shared(e) = values[e];
    }
  }
}

template <bool kChannelDecay>
__global__ void __launch_bounds__(kWarps * 32, 2)
    delta_rule_kernel(const __grid_constant__ DeltaRuleParams p, int32_t capacity, int32_t group, int32_t tiles) {
  if constexpr (kChannelDecay) ptx::wait_for_kernels_before();
  const int32_t item = static_cast<int32_t>(blockIdx.x) / tiles, b = item / p.num_heads;
  const Chunk t(p, capacity, group, item % p.num_heads,
                static_cast<int32_t>(blockIdx.x) % tiles * kColumns + threadIdx.x % 32);
  const Sequence sequence(p, b);
  if (sequence.total == 0) return;
  copy_state<false>(t, state_index_of(p.tokens, b));
  for (int32_t begin = 0; begin < sequence.total; begin += capacity) {  // a tree: one iteration
    const int32_t i = threadIdx.x, count = min_of(capacity, sequence.total - begin);
    if (i < count) t.shared.rows[i] = sequence.row(begin + i);
    run_chunk<kChannelDecay>(t, sequence, count, p.out == nullptr || begin + count < sequence.total);
  }
  if (p.out == nullptr) copy_state<true>(t, state_index_of(p.tokens, b));
}

__global__ void __launch_bounds__(256) clear_kernel(uint16_t* out, int64_t count) {
  const int64_t at = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (at < count) out[at] = 0;
}

// Returns the tokens per group that fit in every GPU's shared memory, twice in Hopper's. Results do not depend on it.
int32_t group_size(const DeltaRuleParams& p, int32_t capacity) {
  int32_t group = kWarps * kBlock;
  while (group > kBlock && group / 2 >= capacity) group /= 2;
  while (group > kBlock && ChunkSizes(p.key_dim, capacity, group).bytes > (96 << 10)) group /= 2;
  return group;
}

void find_path_decays(const DeltaRuleParams& p, int32_t capacity, const ExecContext& ctx) {
  const int32_t blocks = ceil_div(p.key_dim, kSignChannels), warps = decay_warps(capacity);
  const int64_t jobs = p.tokens.batch * p.num_heads * blocks;
  launch(path_decays_kernel, grid_of(jobs, warps), dim3(static_cast<unsigned>(warps * 32)),
         static_cast<size_t>(warps * decay_bytes(capacity)), ctx.stream, p, capacity, blocks,
         static_cast<int32_t>(jobs));
}

// True if four neighbours along a dimension are aligned to 16 bytes in all states.
bool has_words(const DeltaRuleParams& p, int along, int across) {
  const int64_t* const strides = p.state_strides;
  return strides[along] == 1 && strides[across] % 4 == 0 && strides[0] % 4 == 0 && strides[1] % 4 == 0 &&
         reinterpret_cast<uintptr_t>(p.state) % 16 == 0;
}

template <typename T, StateWords kWords, bool kChannelDecay>
void launch_few(const DeltaRuleParams& p, int32_t capacity, const ExecContext& ctx) {
  const auto kernel = p.out == nullptr ? few_tokens_kernel<T, kWords, true, kChannelDecay>
                                       : few_tokens_kernel<T, kWords, false, kChannelDecay>;
  const int32_t column_blocks = ceil_div(p.value_dim, kFewWarps * kFewColumns);
  const dim3 grid(static_cast<unsigned>(p.tokens.batch * p.num_heads * column_blocks)), block(kFewWarps * 32);
  const auto bytes = static_cast<size_t>(FewSizes(capacity, kChannelDecay).bytes);
  if constexpr (kChannelDecay) {
    find_path_decays(p, capacity, ctx);
    launch_behind(kernel, grid, block, bytes, ctx.stream, p, capacity, column_blocks);
  } else if (capacity <= kShortTokens) {
    const auto of_short =
        p.out == nullptr ? short_tokens_kernel<T, kWords, true> : short_tokens_kernel<T, kWords, false>;
    launch(of_short, grid, block, sizeof(ShortShared), ctx.stream, p, column_blocks);
  } else {
    launch(kernel, grid, block, bytes, ctx.stream, p, capacity, column_blocks);
  }
}

template <typename T>
void launch_few(const DeltaRuleParams& p, int32_t capacity, bool by_columns, const ExecContext& ctx) {
  constexpr StateWords kColumns = StateWords::kOfColumns, kChannels = StateWords::kOfChannels;
  const auto launch_kernel = p.channel_decay
                                 ? (by_columns ? launch_few<T, kColumns, true> : launch_few<T, kChannels, true>)
                                 : (by_columns ? launch_few<T, kColumns, false> : launch_few<T, kChannels, false>);
  launch_kernel(p, capacity, ctx);
}

// Launches few_tokens_kernel or short_tokens_kernel if the call fits; otherwise returns false.
bool run_few(const DeltaRuleParams& p, const ExecContext& ctx) {
  const RecurrentBatch& tokens = p.tokens;
  const bool by_columns = has_words(p, 3, 2);
  const int32_t most = p.out == nullptr ? tokens.path_width : tokens.max_nodes;
  if (tokens.parents == nullptr || tokens.batch == 0 || most > kFewTokens) return false;
  if (p.key_dim > kFewChannels || !(by_columns || has_words(p, 2, 3))) return false;
  const auto launch_kernel = p.dtype == DType::kFloat16 ? launch_few<__half> : launch_few<__nv_bfloat16>;
  launch_kernel(p, most, by_columns, ctx);
  return true;
}

void run(const DeltaRuleParams& p, const ExecContext& ctx) {
  const RecurrentBatch& tokens = p.tokens;
  const bool whole_tree = tokens.parents != nullptr && p.out != nullptr;
  const int32_t capacity = whole_tree ? tokens.max_nodes : kCausalChunk, group = group_size(p, capacity);
  const int32_t tiles = ceil_div(p.value_dim, kColumns);
  const dim3 grid(static_cast<unsigned>(tokens.batch * p.num_heads * tiles));
  const dim3 block(kWarps * 32);
  const size_t bytes = static_cast<size_t>(ChunkSizes(p.key_dim, capacity, group).bytes);
  if (p.channel_decay) {
    find_path_decays(p, capacity, ctx);
    launch_behind(delta_rule_kernel<true>, grid, block, bytes, ctx.stream, p, capacity, group, tiles);
  } else {
    launch(delta_rule_kernel<false>, grid, block, bytes, ctx.stream, p, capacity, group, tiles);
  }
}

}  // namespace

void CudaBackend::tree_delta_rule(const DeltaRuleParams& p, const ExecContext& ctx) const {
  if (run_few(p, ctx)) return;
  const int64_t count = p.tokens.num_rows * p.num_heads * p.value_dim;
  launch(clear_kernel, grid_of(count, 256), dim3(256), 0, ctx.stream, static_cast<uint16_t*>(p.out), count);
  run(p, ctx);
}

void CudaBackend::advance_state(const DeltaRuleParams& p, const ExecContext& ctx) const {
  if (!run_few(p, ctx)) run(p, ctx);
}

}  // namespace pagedtree::cuda
