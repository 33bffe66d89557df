// The gated delta rule over tokens of which each follows its parent; the algebra is in docs/notes/recurrent.md. Few
// tokens have a kernel of their own, few_tokens.cuh. Else, chunk.cuh, there is one CTA for each sequence, value head
// and 32 columns of the state, which it keeps in shared memory.
#include "cuda/backend.h"
#include "cuda/recurrent/few_tokens.cuh"
#include "cuda/recurrent/products.cuh"
#include "cuda/recurrent/solve.cuh"

namespace pagedtree::cuda {
namespace {

// The tokens in shared.rows; `carried`: they are a chain, and others follow.
template <bool kChannelDecay>
__device__ __forceinline__ void run_chunk(const Chunk& t, const Sequence& sequence, int32_t count, bool carried) {
  __syncthreads();
  link(t.p, sequence, t.shared, t.masks, t.words, t.head, count);
  for (int32_t begin = 0; begin < count; begin += t.group) {
    weigh_by_products<kChannelDecay>(t, begin, count);
    if constexpr (kChannelDecay) weigh_by_walks(t, begin, count);
    solve(t, begin, count);
  }
  if (carried) kChannelDecay ? carry_by_walks(t, count) : carry_by_products(t, count);
  __syncthreads();
}

// The CTA's columns of a state in memory, whose neighbours go to neighbouring threads. A thread has 4 elements of each
// 32 channels; some may lie outside.
struct StateTile {
  static constexpr int kOfThread = kColumns / kWarps;
  float* at;                  // the thread's next element
  int64_t stride, turn;       // to the one behind it, there from the last one of 32 channels
  int32_t channels, columns;  // from the thread's first element on
  int32_t in_shared;          // where that one is
  bool by_channel;

  __device__ StateTile(const Chunk& t, int64_t state_index) {
    const int64_t* const strides = t.p.state_strides;
    by_channel = strides[2] < strides[3];
    const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, first_column = t.column - lane;
    const int32_t channel = by_channel ? lane : warp, column = by_channel ? warp : lane;
    at = t.p.state + state_index * strides[0] + t.head * strides[1] + channel * strides[2] +
         (first_column + column) * strides[3];
    stride = kWarps * strides[by_channel ? 3 : 2];
    turn = 32 * strides[2] - (kOfThread - 1) * stride;
    channels = t.p.key_dim - channel;
    columns = state_index < 0 ? 0 : min_of(kColumns, t.p.value_dim - first_column) - column;
    in_shared = channel * kStateStride + column;
  }
  // Element j of the channels `first` .. first + 31.
  __device__ int32_t channel(int32_t first, int j) const { return first + (by_channel ? 0 : j * kWarps); }
  __device__ bool contains(int32_t first, int j) const {
    return channel(first, j) < channels && (by_channel ? j * kWarps : 0) < columns;
  }
  __device__ float& of_shared(const Chunk& t, int32_t first, int j) const {
    return t.state[in_shared + first * kStateStride + j * kWarps * (by_channel ? 1 : kStateStride)];
  }
  __device__ void go_on(int j) { at += j == kOfThread - 1 ? turn : stride; }
};

// Zeros where there is none.
__device__ __forceinline__ void load_state(const Chunk& t, StateTile state) {
  constexpr int kUnderWay = 8, kOfThread = StateTile::kOfThread;
  const int32_t padded = state.channels + padded_channels(t.p.key_dim) - t.p.key_dim;
#pragma unroll 1
  for (int32_t first = 0; first < t.p.key_dim; first += kUnderWay * kWarps) {
    float values[kUnderWay];
#pragma unroll
    for (int e = 0; e < kUnderWay; ++e) {
      values[e] = state.contains(first + e / kOfThread * 32, e % kOfThread) ? *state.at : 0.0f;
      state.go_on(e % kOfThread);
    }
#pragma unroll
    for (int e = 0; e < kUnderWay; ++e) {
      const int32_t of = first + e / kOfThread * 32;
      if (state.channel(of, e % kOfThread) < padded) state.of_shared(t, of, e % kOfThread) = values[e];
    }
  }
}

__device__ __forceinline__ void store_state(const Chunk& t, StateTile state) {
#pragma unroll 1
  for (int32_t first = 0; first < t.p.key_dim; first += 32) {
#pragma unroll
    for (int j = 0; j < StateTile::kOfThread; ++j) {
      if (state.contains(first, j)) *state.at = state.of_shared(t, first, j);
      state.go_on(j);
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
  load_state(t, StateTile(t, state_index_of(p.tokens, b)));
  for (int32_t begin = 0; begin < sequence.total; begin += capacity) {  // one turn for a tree
    const int32_t i = threadIdx.x, count = min_of(capacity, sequence.total - begin);
    if (i < count) t.shared.rows[i] = sequence.row(begin + i);
    run_chunk<kChannelDecay>(t, sequence, count, p.out == nullptr || begin + count < sequence.total);
  }
  if (p.out == nullptr) store_state(t, StateTile(t, state_index_of(p.tokens, b)));
}

// What no node writes.
__global__ void __launch_bounds__(256) clear_kernel(uint16_t* out, int64_t count) {
  const int64_t at = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (at < count) out[at] = 0;
}

// Tokens that are weighed together: as many as every GPU has shared memory for, and Hopper for two CTAs. Each has the
// same result in a group of any size.
int32_t group_size(const DeltaRuleParams& p, int32_t capacity) {
  int32_t group = kWarps * kBlock;
  while (group > kBlock && group / 2 >= capacity) group /= 2;
  while (group > kBlock && ChunkSizes(p.key_dim, capacity, group).bytes > (96 << 10)) group /= 2;
  return group;
}

template <int kOfLane>
void find_path_decays(const DeltaRuleParams& p, int32_t capacity, const ExecContext& ctx) {
  const int32_t blocks = ceil_div(p.key_dim, kOfLane * kSignChannels), warps = decay_warps(capacity);
  const int64_t jobs = p.tokens.batch * p.num_heads * blocks;
  launch(path_decays_kernel<kOfLane>, grid_of(jobs, warps), dim3(static_cast<unsigned>(warps * 32)),
         static_cast<size_t>(warps * decay_bytes(capacity, kOfLane)), ctx.stream, p, capacity, blocks,
         static_cast<int32_t>(jobs));
}

// Products of decays for the kernels that follow; two channels for each thread save instructions where SMs are full.
void find_path_decays(const DeltaRuleParams& p, int32_t capacity, const ExecContext& ctx) {
  const bool is_large = p.tokens.batch * p.num_heads > 2 * device_limits().num_sms;
  is_large ? find_path_decays<2>(p, capacity, ctx) : find_path_decays<1>(p, capacity, ctx);
}

// Whether four neighbours along one dimension of all states lie at multiples of 16 bytes.
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

// False where the call is not one for the kernel of few tokens.
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
