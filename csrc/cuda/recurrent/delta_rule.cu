// The gated delta rule over a chunk of tokens, of which each follows its parent; the algebra is in
// docs/notes/recurrent.md. One CTA for each sequence, value head and 32 columns of the state, which it keeps in shared
// memory. A warp walks the path of one token, 8 tokens at a time; then each lane solves its column.
#include "cuda/backend.h"
#include "cuda/recurrent/elements.cuh"

namespace pagedtree::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kColumns = 32;                   // one for each lane
constexpr int kParts = kMaxRecurrentDim / 32;  // key channels of a lane
static_assert(kWarps * 32 >= kMaxRecurrentNodes);

struct DeltaShared {
  int32_t rows[kMaxRecurrentNodes];
  int16_t parents[kMaxRecurrentNodes];  // -2: cannot be reached
  float norms[kMaxRecurrentNodes];      // of the keys: what they are multiplied by
};

// The rest of shared memory, whose sizes depend on the call.
struct Tile {
  const DeltaRuleParams& p;
  DeltaShared& shared;
  int32_t capacity;  // tokens of a chunk
  int64_t head;
  int64_t column;  // of the lane
  float* state;    // [Dk, 32]
  float* u;        // [capacity, 32]
  float* weights;  // [warps, 2, capacity]: of the tokens above one token, for its key and its query
  float* reads;    // [warps, 2, Dk]: its key and its query with the decays of the whole path

  __device__ Tile(const DeltaRuleParams& params, int32_t most, int64_t of_head, int64_t of_lane)
      : p(params), shared(ptx::shared<DeltaShared>()), capacity(most), head(of_head), column(of_lane) {
    state = reinterpret_cast<float*>(&shared + 1);
    u = state + p.key_dim * kColumns;
    weights = u + capacity * kColumns;
    reads = weights + kWarps * 2 * capacity;
  }
};

size_t shared_bytes(const DeltaRuleParams& p, int32_t capacity) {
  const int64_t floats = p.key_dim * kColumns + capacity * kColumns + kWarps * 2 * (capacity + p.key_dim);
  return sizeof(DeltaShared) + static_cast<size_t>(floats) * sizeof(float);
}

__device__ __forceinline__ float warp_sum(float x) {
  for (int bits = 16; bits > 0; bits /= 2) x += __shfl_xor_sync(~0u, x, bits);
  return x;
}

// Channel c of the key of token i.
__device__ __forceinline__ float key_at(const Tile& t, int32_t i, int32_t c) {
  const DeltaRuleParams& p = t.p;
  const int64_t at = t.shared.rows[i] * p.k_token_stride + t.head / p.group_size * p.k_head_stride + c;
  return load_element(p.k, p.dtype, at) * t.shared.norms[i];
}

__device__ __forceinline__ float decay_at(const Tile& t, int32_t i, int32_t c) {
  const DeltaRuleParams& p = t.p;
  const int64_t at = t.shared.rows[i] * p.g_token_stride + t.head * p.g_head_stride;
  return decay_of<ScalarMath>(p.g[at + (p.channel_decay ? c : 0)]);
}

// By one warp: the weights of token i, and what its key and its query read in the lane's column.
__device__ __forceinline__ void weigh_path(const Tile& t, int32_t i, float& read_key, float& read_query) {
  const DeltaRuleParams& p = t.p;
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float *key_weights = t.weights + warp * 2 * t.capacity, *query_weights = key_weights + t.capacity;
  float *key_reads = t.reads + warp * 2 * p.key_dim, *query_reads = key_reads + p.key_dim;
  float key[kParts], query[kParts], own = 0.0f, squares = 0.0f;
  const int64_t q = t.shared.rows[i] * p.q_token_stride + t.head / p.group_size * p.q_head_stride;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int32_t c = part * 32 + lane;
    key[part] = c < p.key_dim ? key_at(t, i, c) : 0.0f;
    query[part] = p.q != nullptr && c < p.key_dim ? load_element(p.q, p.dtype, q + c) : 0.0f;
    squares = __fmaf_rn(query[part], query[part], squares);
  }
  const float norm = p.l2norm ? 1.0f / sqrtf(warp_sum(squares) + 1e-6f) : 1.0f;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    query[part] *= norm;
    own = __fmaf_rn(key[part], query[part], own);
  }
  own = warp_sum(own);
  if (lane == 0) query_weights[i] = own;
  for (int32_t above = i;;) {
    const int32_t next = t.shared.parents[above];
    float key_sum = 0.0f, query_sum = 0.0f;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int32_t c = part * 32 + lane;
      if (c >= p.key_dim) continue;
      const float decay = decay_at(t, above, c);
      key[part] *= decay;
      query[part] *= decay;
      if (next < 0) continue;
      const float other = key_at(t, next, c);
      key_sum = __fmaf_rn(key[part], other, key_sum);
      query_sum = __fmaf_rn(query[part], other, query_sum);
    }
    if (next < 0) break;
    key_sum = warp_sum(key_sum);
    query_sum = warp_sum(query_sum);
    if (lane == 0) {
      key_weights[next] = key_sum;
      query_weights[next] = query_sum;
    }
    above = next;
  }
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int32_t c = part * 32 + lane;
    if (c >= p.key_dim) continue;
    key_reads[c] = key[part];
    query_reads[c] = query[part];
  }
  __syncwarp();
  read_key = read_query = 0.0f;
  for (int32_t c = 0; c < p.key_dim; ++c) {
    const float value = t.state[c * kColumns + lane];
    read_key = __fmaf_rn(key_reads[c], value, read_key);
    read_query = __fmaf_rn(query_reads[c], value, read_query);
  }
}

// By one warp: u of token i and its output, in the lane's column.
__device__ __forceinline__ void solve_token(const Tile& t, int32_t i, float predicted, float read) {
  const DeltaRuleParams& p = t.p;
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const float *key_weights = t.weights + warp * 2 * t.capacity, *query_weights = key_weights + t.capacity;
  const int64_t row = t.shared.rows[i];
  if (p.beta == nullptr) predicted = 0.0f;
  for (int32_t above = t.shared.parents[i]; above >= 0; above = t.shared.parents[above]) {
    const float before = t.u[above * kColumns + lane];
    predicted = __fmaf_rn(key_weights[above], before, predicted);
    read = __fmaf_rn(query_weights[above], before, read);
  }
  float own = 0.0f;
  if (t.column < p.value_dim) {
    own = load_element(p.v, p.dtype, row * p.v_token_stride + t.head * p.v_head_stride + t.column);
    if (p.beta != nullptr) own = (own - predicted) * p.beta[row * p.beta_token_stride + t.head * p.beta_head_stride];
  }
  t.u[i * kColumns + lane] = own;
  if (p.out == nullptr || t.column >= p.value_dim) return;
  const float out = __fmaf_rn(query_weights[i], own, read) * p.scale;
  store_element(p.out, p.dtype, (row * p.num_heads + t.head) * p.value_dim + t.column, out);
}

// The state behind the last token of a chain; each warp has rows of its own.
__device__ __forceinline__ void carry_state(const Tile& t, int32_t count) {
  const int32_t lane = threadIdx.x % 32;
  for (int32_t c = threadIdx.x / 32; c < t.p.key_dim; c += kWarps) {
    float decay = 1.0f, sum = 0.0f;
    for (int32_t i = count - 1; i >= 0; --i) {
      sum = __fmaf_rn(decay * key_at(t, i, c), t.u[i * kColumns + lane], sum);
      decay *= decay_at(t, i, c);
    }
    float& state = t.state[c * kColumns + lane];
    state = __fmaf_rn(decay, state, sum);
  }
}

// The tokens in shared.rows and shared.parents.
__device__ __forceinline__ void run_chunk(const Tile& t, int32_t count, bool carried) {
  const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int32_t i = warp; i < count; i += kWarps) {
    if (t.shared.parents[i] < -1) continue;
    float squares = 0.0f;
    if (lane == 0) t.shared.norms[i] = 1.0f;
    __syncwarp();
    for (int32_t c = lane; c < t.p.key_dim; c += 32) squares = __fmaf_rn(key_at(t, i, c), key_at(t, i, c), squares);
    squares = warp_sum(squares);
    __syncwarp();
    if (lane == 0 && t.p.l2norm) t.shared.norms[i] = 1.0f / sqrtf(squares + 1e-6f);
  }
  __syncthreads();
  for (int32_t begin = 0; begin < count; begin += kWarps) {
    const int32_t i = begin + warp;
    const bool reachable = i < count && t.shared.parents[i] >= -1;
    float read_key = 0.0f, read_query = 0.0f;
    if (reachable) weigh_path(t, i, read_key, read_query);
    for (int32_t turn = 0; turn < kWarps; ++turn) {  // a token may follow another one of these
      if (turn == warp && reachable) solve_token(t, i, read_key, read_query);
      __syncthreads();
    }
  }
  if (carried) carry_state(t, count);
  __syncthreads();
}

// The links of tree b, a thread for each node.
__device__ __forceinline__ int32_t link_tree(const RecurrentBatch& p, const NodeRange& rows, DeltaShared& shared) {
  const int32_t size = static_cast<int32_t>(min_of<int64_t>(rows.size(), p.max_nodes));
  const int32_t node = threadIdx.x;
  if (node < size) {
    shared.rows[node] = static_cast<int32_t>(rows.begin + node);
    shared.parents[node] = static_cast<int16_t>(linked_parent(p, rows.begin, node));
  }
  __syncthreads();
  int32_t above = node < size ? node : -2;
  while (above >= 0) above = shared.parents[above];
  __syncthreads();
  if (node < size && above == -2) shared.parents[node] = -2;
  __syncthreads();
  return size;
}

__global__ void __launch_bounds__(kWarps * 32, 1)
    delta_rule_kernel(const __grid_constant__ DeltaRuleParams p, int32_t capacity, int32_t tiles) {
  const RecurrentBatch& tokens = p.tokens;
  const int64_t item = blockIdx.x / tiles, b = item / p.num_heads;
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Tile t(p, capacity, item % p.num_heads, int64_t{blockIdx.x % tiles} * kColumns + lane);
  const bool writes = p.out == nullptr;
  const NodeRange rows = node_range(tokens.cu_nodes, b, tokens.num_rows);
  const int64_t total = writes ? tokens_to_replay(tokens, b) : rows.size(), slot = state_slot(tokens, b);
  if (total == 0) return;
  float* const state =
      p.state + slot * p.state_strides[0] + t.head * p.state_strides[1] + t.column * p.state_strides[3];
  const bool has_state = slot >= 0 && t.column < p.value_dim;
  for (int32_t c = warp; c < p.key_dim; c += kWarps) {
    t.state[c * kColumns + lane] = has_state ? state[c * p.state_strides[2]] : 0.0f;
  }
  if (!writes && tokens.parents != nullptr) {
    run_chunk(t, link_tree(tokens, rows, t.shared), false);
    return;
  }
  for (int64_t begin = 0; begin < total; begin += kCausalChunk) {
    const int32_t count = static_cast<int32_t>(min_of<int64_t>(kCausalChunk, total - begin));
    const int32_t i = threadIdx.x;
    if (i < count) {
      t.shared.rows[i] = static_cast<int32_t>(replayed_row(tokens, b, begin + i));
      t.shared.parents[i] = static_cast<int16_t>(i - 1);
    }
    __syncthreads();
    run_chunk(t, count, writes || begin + count < total);
  }
  if (!writes || !has_state) return;
  for (int32_t c = warp; c < p.key_dim; c += kWarps) state[c * p.state_strides[2]] = t.state[c * kColumns + lane];
}

// What no node writes.
__global__ void __launch_bounds__(256) clear_kernel(uint16_t* out, int64_t count) {
  const int64_t at = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (at < count) out[at] = 0;
}

void run(const DeltaRuleParams& p, const ExecContext& ctx) {
  const RecurrentBatch& tokens = p.tokens;
  const bool whole_tree = tokens.parents != nullptr && p.out != nullptr;
  const int32_t capacity = whole_tree ? tokens.max_nodes : kCausalChunk;
  const int32_t tiles = ceil_div(p.value_dim, kColumns);
  const dim3 grid(static_cast<unsigned>(tokens.batch * p.num_heads * tiles));
  launch(delta_rule_kernel, grid, dim3(kWarps * 32), shared_bytes(p, capacity), ctx.stream, p, capacity, tiles);
}

}  // namespace

void CudaBackend::tree_delta_rule(const DeltaRuleParams& p, const ExecContext& ctx) const {
  const int64_t count = p.tokens.num_rows * p.num_heads * p.value_dim;
  launch(clear_kernel, grid_of(count, 256), dim3(256), 0, ctx.stream, static_cast<uint16_t*>(p.out), count);
  run(p, ctx);
}

void CudaBackend::advance_state(const DeltaRuleParams& p, const ExecContext& ctx) const { run(p, ctx); }

}  // namespace pagedtree::cuda
