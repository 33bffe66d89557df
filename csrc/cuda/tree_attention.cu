// tree_attention on CUDA: two launches, the ranges of the plan and the attention itself.
#include <limits>

#include "cuda/kernels.h"
#include "cuda/tile/launch.cuh"
#include "cuda/tree_attention/instances.h"
#include "cuda/tree_attention/schedule.cuh"

namespace pagedtree::cuda {
namespace {

TileShape tile_of(const TreeAttentionParams& p) { return choose_tile(p.head_dim, p.max_seqlen_q * p.group_size); }

WorkShape work_shape(const TreeAttentionParams& p) {
  WorkShape shape{};
  shape.seq_lens = p.seq_lens;
  shape.cu_seqlens_q = p.cu_seqlens_q;
  shape.batch = p.batch;
  shape.num_tokens = p.num_tokens;
  shape.max_seq_len = min_of<int64_t>(p.max_pages * p.page_size, std::numeric_limits<int32_t>::max());
  shape.num_kv_heads = p.num_kv_heads;
  shape.group_size = p.group_size;
  shape.m_tile = tile_of(p).m_tile;
  return shape;
}

Ranges ranges_of(const TreeAttentionParams& p, const DeviceLimits& limits) {
  const TileShape tile = tile_of(p);
  Ranges ranges{};
  ranges.capacity = range_bound(work_shape(p), max_ranges(tile, limits.num_sms), kMinRangeCost);
  ranges.piece_rows = tile.m_tile;
  ranges.head_dim = p.head_dim;
  return ranges;
}

bool is_aligned(const void* rows, int64_t token_stride, int64_t head_stride) {
  return reinterpret_cast<uintptr_t>(rows) % 16 == 0 && token_stride % 8 == 0 && head_stride % 8 == 0;
}

AttentionLauncher launcher_of(const TreeAttentionParams& p) {
  const bool float8 = p.kv_dtype == DType::kFloat8E4M3;
  const auto find = p.q_dtype == DType::kFloat16 ? (float8 ? half_float8_attention : half_attention)
                                                 : (float8 ? bfloat16_float8_attention : bfloat16_attention);
  return find(tile_of(p));
}

// Whole warps for `count` threads' work, at most kScheduleThreads.
unsigned schedule_threads(int64_t count) {
  return static_cast<unsigned>(clamp_to<int64_t>(ceil_div<int64_t>(count, 32) * 32, 32, kScheduleThreads));
}

}  // namespace

void attention_plan(const AttentionPlanParams& p, const ExecContext& ctx) {
  const TileShape tile = choose_tile(p.head_dim, p.max_seqlen_q * p.group_size);
  WorkShape shape{};
  shape.seq_lens = p.seq_lens;
  shape.cu_seqlens_q = p.cu_seqlens_q;
  shape.batch = p.batch;
  shape.num_tokens = p.num_tokens;
  shape.max_seq_len = p.max_seq_len;
  shape.num_kv_heads = p.num_kv_heads;
  shape.group_size = p.group_size;
  shape.m_tile = tile.m_tile;
  const int32_t ranges = max_ranges(tile, device_limits().num_sms);
  launch(plan_kernel, dim3(1), dim3(schedule_threads(max_of<int64_t>(p.batch, ranges))), sizeof(PlanShared), ctx.stream,
         shape, ranges, kMinRangeCost, p.plan);
}

int64_t tree_attention_scratch(const TreeAttentionParams& p, const ExecContext&) {
  return Ranges::kAlignment + ranges_of(p, device_limits()).place(nullptr);
}

void tree_attention(const TreeAttentionParams& p, const ExecContext& ctx) {
  if (p.num_tokens == 0) return;
  const TileShape tile = tile_of(p);
  const DeviceLimits limits = device_limits();
  const Residency resident = residency(tile, static_cast<int>(element_size(p.kv_dtype)), limits.max_shared_bytes);
  CallShape call{};
  call.work = work_shape(p);
  call.ranges = ranges_of(p, limits);
  const auto scratch = reinterpret_cast<intptr_t>(p.scratch);
  call.ranges.place(reinterpret_cast<void*>(ceil_div<intptr_t>(scratch, Ranges::kAlignment) * Ranges::kAlignment));
  call.stages = resident.stages;
  call.q_aligned = is_aligned(p.q, p.q_token_stride, p.q_head_stride);
  call.out_aligned = is_aligned(p.out, p.out_token_stride, p.out_head_stride);

  launch(find_ranges_kernel, dim3(1), dim3(schedule_threads(call.ranges.capacity)), sizeof(RangesShared), ctx.stream,
         call.work, p.plan, call.ranges);
  const int grid = min_of<int>(call.ranges.capacity, limits.num_sms * resident.ctas);
  launcher_of(p)(p, call, static_cast<unsigned>(grid), resident.shared_bytes, ctx.stream);
}

}  // namespace pagedtree::cuda
