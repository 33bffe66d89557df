// Attention that is exact rather than fast: engines' tests compare text in fp32. One CTA per row (query and head);
// masked keys are not read. Warps alternate over blocks of 32 keys, each with a softmax state, merged at the end.
#include "cuda/attention/plain.h"
#include "cuda/tile/element.cuh"
#include "cuda/tile/launch.cuh"

namespace pagedtree::cuda {
namespace {

constexpr int kWarps = 4, kThreads = kWarps * 32;
constexpr int kColumnsK = 576, kColumnsV = 512;  // maximum
constexpr int kMaxGrid = 1 << 20;

struct PlainShared {
  float2 states[kWarps];  // maximum, sum
  float out[kWarps][kColumnsV];
};

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(kWholeWarp, x, lanes));
  return x;
}

// Returns exp(own - maximum), and 0 for -inf.
__device__ __forceinline__ float rescaled(float own, float maximum) {
  return own == -kInfinity ? 0.0f : expf(own - maximum);
}

__device__ __forceinline__ Visibility plain_visibility(const AttentionParams& p, int64_t b, int64_t token) {
  const NodeRange queries = node_range(p.cu_seqlens_q, p.batch, b, p.num_tokens);
  const auto count = static_cast<int32_t>(queries.size());
  const int32_t seq_len = clamp_to(
      p.seq_lens[b], 0, static_cast<int32_t>(min_of<int64_t>(p.table.max_pages * p.table.page_size, INT32_MAX)));
  const int32_t tree_len = tree_length(p, b, count, seq_len);
  if (tree_len < 0) return causal_visibility(seq_len, count, token - queries.begin, p.window);
  return tree_visibility(seq_len, tree_len, p.tree_mask + token * p.mask_stride, p.mask_words, p.window);
}

// Calls body(k, row) for visible keys first_key + k; `row` is null (zeros) for an invalid page, `page` is the lane's.
template <typename Kv, typename Body>
__device__ __forceinline__ void for_each_key(const AttentionParams& p, const PagedCache& cache, int64_t kv_head,
                                             uint32_t visible, uint32_t first_key, int32_t page, const Body& body) {
#pragma unroll 1
  for (uint32_t left = visible; left != 0; left &= left - 1) {
    const int k = __ffs(left) - 1;
    const auto number = static_cast<uint32_t>(__shfl_sync(kWholeWarp, page, k));
    const uint32_t slot = p.by_page_size.remainder(first_key + static_cast<uint32_t>(k));
    const int64_t offset = number * cache.page_stride + slot * cache.slot_stride + kv_head * cache.head_stride;
    body(k, number < p.pages_end ? static_cast<const Kv*>(cache.data) + offset : nullptr);
  }
}

template <int kColumns, typename Body>
__device__ __forceinline__ void for_each_column(int32_t columns, const Body& body) {
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int i = 0; i < kColumns / 32; ++i) {
    if (i * 32 + lane < columns) body(i, i * 32 + lane);
  }
}

template <typename T, typename Kv>
__device__ __forceinline__ void attend_row(const AttentionParams& p, const Visibility& seen, int64_t b, int64_t head,
                                           const T* query, PlainShared& shared) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int64_t kv_head = head / p.group_size;
  const float scale = p.k_scale != nullptr ? p.scale * p.k_scale[kv_head * p.k_scale_stride] : p.scale;
  float q[kColumnsK / 32] = {}, out[kColumnsV / 32] = {}, maximum = -kInfinity, sum = 0.0f;
  for_each_column<kColumnsK>(p.head_dim, [&](int i, int column) { q[i] = to_float(query[column]); });
  const int32_t* pages = p.table.pages + b * p.table.row_stride;
#pragma unroll 1
  for (int64_t first = seen.lowest() / 32 * 32 + warp * 32; first < seen.highest(); first += kThreads) {
    const auto first_key = static_cast<uint32_t>(first);
    const uint32_t visible = seen.visible32(static_cast<int32_t>(first));
    if (visible == 0) continue;
    const bool is_visible = (visible >> lane & 1) != 0;
    const int32_t page = is_visible ? pages[p.by_page_size.quotient(first_key + static_cast<uint32_t>(lane))] : -1;
    float score = -kInfinity;  // of the lane's key
    for_each_key<Kv>(p, p.k_cache, kv_head, visible, first_key, page, [&](int k, const Kv* row) {
      float dot = 0.0f;
      if (row != nullptr) {
        for_each_column<kColumnsK>(p.head_dim,
                                   [&](int i, int column) { dot = __fmaf_rn(q[i], to_float(row[column]), dot); });
      }
      dot = warp_sum(dot) * scale;
      if (p.softcap > 0.0f) dot = p.softcap * tanhf(dot / p.softcap);
      if (lane == k) score = dot;
    });
    const float top = fmaxf(maximum, warp_max(score)), factor = rescaled(maximum, top);
    const float weight = is_visible ? expf(score - (top == -kInfinity ? 0.0f : top)) : 0.0f;
    maximum = top;
    sum = __fmaf_rn(sum, factor, warp_sum(weight));
    for_each_column<kColumnsV>(p.head_dim_v, [&](int i, int) { out[i] *= factor; });
    for_each_key<Kv>(p, p.v_cache, kv_head, visible, first_key, page, [&](int k, const Kv* row) {
      const float of_key = __shfl_sync(kWholeWarp, weight, k);
      if (row == nullptr) return;
      for_each_column<kColumnsV>(p.head_dim_v,
                                 [&](int i, int column) { out[i] = __fmaf_rn(of_key, to_float(row[column]), out[i]); });
    });
  }
  if (lane == 0) shared.states[warp] = make_float2(maximum, sum);
  for_each_column<kColumnsV>(p.head_dim_v, [&](int i, int column) { shared.out[warp][column] = out[i]; });
}

// Merges the warps and stores the row. `is_used`: no padding, which has no sink.
template <typename T>
__device__ __forceinline__ void join_row(const AttentionParams& p, int64_t token, int64_t head, bool is_used,
                                         const PlainShared& shared) {
  const float sink = p.sinks != nullptr && is_used ? p.sinks[head] : -kInfinity;
  float top = sink, weights[kWarps];
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) top = fmaxf(top, shared.states[warp].x);
  float sum = rescaled(sink, top);
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    weights[warp] = rescaled(shared.states[warp].x, top);
    sum = __fmaf_rn(shared.states[warp].y, weights[warp], sum);
  }
  const float scale = p.v_scale != nullptr ? p.v_scale[head / p.group_size * p.v_scale_stride] : 1.0f;
  T* to = static_cast<T*>(p.out) + token * p.out_token_stride + head * p.out_head_stride;
#pragma unroll 1
  for (int column = static_cast<int>(threadIdx.x); column < p.head_dim_v; column += kThreads) {
    float value = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) value = __fmaf_rn(shared.out[warp][column], weights[warp], value);
    to[column] = from_float<T>(sum == 0.0f ? 0.0f : value / sum * scale);
  }
  if (threadIdx.x == 0 && p.lse != nullptr) {
    p.lse[token * p.lse_token_stride + head * p.lse_head_stride] = sum == 0.0f ? -kInfinity : top + logf(sum);
  }
}

template <typename T, typename Kv>
__global__ void __launch_bounds__(kThreads) plain_attention_kernel(const __grid_constant__ AttentionParams p) {
  PlainShared& shared = ptx::shared<PlainShared>();
  const int64_t heads = int64_t{p.num_kv_heads} * p.group_size;
#pragma unroll 1
  for (int64_t row = blockIdx.x; row < p.num_tokens * heads; row += gridDim.x) {
    const int64_t token = row / heads, head = row % heads;
    const int64_t b = sequence_of_row(p.cu_seqlens_q, p.batch, token);
    const Visibility seen = b >= 0 ? plain_visibility(p, b, token) : Visibility{};  // padding: none
    const T* query = static_cast<const T*>(p.q) + token * p.q_token_stride + head * p.q_head_stride;
    attend_row<T, Kv>(p, seen, b, head, query, shared);
    __syncthreads();
    join_row<T>(p, token, head, b >= 0, shared);
    __syncthreads();
  }
}

template <typename T>
void launch_plain(const AttentionParams& p, void* stream) {
  const int64_t rows = p.num_tokens * p.num_kv_heads * p.group_size;
  const dim3 grid(static_cast<unsigned>(min_of<int64_t>(rows, kMaxGrid)));
  const bool is_float8 = p.kv_dtype == DType::kFloat8E4M3;
  launch(is_float8 ? plain_attention_kernel<T, Float8E4M3> : plain_attention_kernel<T, T>, grid, dim3(kThreads),
         sizeof(PlainShared), stream, p);
}

}  // namespace

void plain_attention(const AttentionParams& p, void* stream) {
  if (p.q_dtype == DType::kFloat32) {
    launch_plain<float>(p, stream);
  } else if (p.q_dtype == DType::kFloat16) {
    launch_plain<__half>(p, stream);
  } else {
    launch_plain<__nv_bfloat16>(p, stream);
  }
}

}  // namespace pagedtree::cuda
