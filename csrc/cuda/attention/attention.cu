// tree_attention on CUDA: one launch per list of sequences, or one of the plain kernel.
#include <stdexcept>
#include <string>

#include "cuda/attention/instances.h"
#include "cuda/attention/join_segments.cuh"
#include "cuda/attention/plain.h"
#include "cuda/attention/schedule.cuh"
#include "cuda/backend.h"
#include "cuda/engine.h"
#include "cuda/tile/launch.cuh"

namespace pagedtree::cuda {
namespace {

constexpr int64_t kAlignment = 16;  // of partial results

int64_t aligned(int64_t bytes) { return ceil_div(bytes, kAlignment) * kAlignment; }

Pieces pieces_of(const WorkShape& work, const TileShape& tile, const DeviceLimits& limits) {
  return {nullptr, nullptr, range_bound(work, range_limits(tile, limits.num_sms, limits.max_shared_bytes)), tile.m_tile,
          tile.head_dim_v};
}

bool is_aligned(const void* rows, int64_t token_stride, int64_t head_stride) {
  return reinterpret_cast<uintptr_t>(rows) % 16 == 0 && token_stride % 8 == 0 && head_stride % 8 == 0;
}

AttentionLauncher launcher_of(const TreeAttentionParams& p, const TileShape& tile) {
  const auto of_cache = [&]<typename T>() {
    const bool converts = p.kv_dtype == DType::kFloat8E4M3;
#if defined(PAGEDTREE_HAS_SM90A)
    if (tile.is_wgmma()) return converts ? wgmma_launcher<T, Float8E4M3>(tile) : wgmma_launcher<T, T>(tile);
#endif
    return converts ? mma_sync_launcher<T, Float8E4M3>(tile) : mma_sync_launcher<T, T>(tile);
  };
  return p.q_dtype == DType::kFloat16 ? of_cache.operator()<__half>() : of_cache.operator()<__nv_bfloat16>();
}

template <typename Params>
Params with_engine(Params p, const DeviceLimits& limits) {
  p.engine = resolved_engine(p.engine, limits);
  return p;
}

// An explicit engine never falls back.
void check_engine(MatrixEngine engine, const DeviceLimits& limits) {
  if (engine != MatrixEngine::kWgmma) return;
  const std::string needs = wgmma_needs(limits);
  if (!needs.empty()) throw std::runtime_error("PAGEDTREE_ENGINE=wgmma needs " + needs);
}

// Returns whole warps for `count` items, at most kScheduleThreads.
unsigned schedule_threads(int64_t count) {
  return static_cast<unsigned>(clamp_to<int64_t>(ceil_div<int64_t>(count, 32) * 32, 32, kScheduleThreads));
}

}  // namespace

void CudaBackend::attention_plan(const AttentionPlanParams& params, const ExecContext& ctx) const {
  const DeviceLimits limits = device_limits();
  const AttentionPlanParams p = with_engine(params, limits);
  PlanLists lists(p.batch, plan_size(p.segment));
  int64_t most = p.batch;
  for (const WorkList list : kWorkLists) {
    const ListTile item = list_tile(p, list, limits.max_shared_bytes);
    const auto i = static_cast<size_t>(list);
    lists.lists[i].work = work_shape(p, item.tile.m_tile, list);
    lists.lists[i].limits = range_limits(item.tile, limits.num_sms, limits.max_shared_bytes);
    most = max_of<int64_t>(most, lists.lists[i].limits.most);
  }
  launch(plan_kernel, dim3(std::size(kWorkLists)), dim3(schedule_threads(most)), sizeof(PlanShared), ctx.stream, lists,
         p.plan);
}

int64_t CudaBackend::tree_attention_scratch(const TreeAttentionParams& params, const ExecContext&) const {
  if (is_plain(params)) return 0;
  const DeviceLimits limits = device_limits();
  const TreeAttentionParams p = with_engine(params, limits);
  if (p.segment > 0) return kAlignment + segments_bytes(p);
  int64_t bytes = kAlignment;
  for (const auto& [list, tile] : lists_of(p, limits.max_shared_bytes)) {
    bytes += aligned(pieces_of(work_shape(p, tile.m_tile, list), tile, limits).bytes());
  }
  return bytes;
}

void CudaBackend::tree_attention(const TreeAttentionParams& params, const ExecContext& ctx) const {
  if (params.num_tokens == 0) return;
  const DeviceLimits limits = device_limits();
  const AttentionParams p(with_engine(params, limits));
  check_engine(p.engine, limits);
  if (is_plain(p)) return plain_attention(p, ctx.stream);
  const ListTiles lists = lists_of(p, limits.max_shared_bytes);
  int64_t scratch = aligned(reinterpret_cast<intptr_t>(p.scratch));
  CallShape call{};
  for (const auto& [list, tile] : lists) {
    const Residency resident = residency(tile, static_cast<int>(element_size(p.kv_dtype)), limits.max_shared_bytes);
    call.work = work_shape(p, tile.m_tile, list);
    call.pieces = pieces_of(call.work, tile, limits);
    call.pieces.memory = reinterpret_cast<float*>(scratch);
    call.pieces.plan = ranges_of_list(p.plan, list);
    if (p.segment > 0) {
      call.pieces.segment_rows = segments_of(p) * rows_of_heads(p);
    } else {
      scratch += aligned(call.pieces.bytes());
    }
    call.stages = resident.stages;
    call.q_aligned = is_aligned(p.q, p.q_token_stride, p.q_head_stride);
    if (call.q_aligned && p.scale >= 0.0f && p.k_scale == nullptr) call.q_factor = score_factor(p, p.scale);
    call.out_aligned = is_aligned(p.out, p.out_token_stride, p.out_head_stride);
    const int shared_bytes = max_of(resident.shared_bytes, tile.join_bytes(call.pieces.capacity));
    launcher_of(p, tile)(p, call, static_cast<unsigned>(call.pieces.capacity), shared_bytes, ctx.stream);
  }
  if (segments_of(p) == 1) return;
  const auto join = p.q_dtype == DType::kFloat16 ? join_segments_kernel<__half> : join_segments_kernel<__nv_bfloat16>;
  launch_behind(join, dim3(static_cast<unsigned>(ceil_div<int64_t>(rows_of_heads(p), kSegmentRows))),
                dim3(kSegmentRows * 32), 0, ctx.stream, p, call);
}

}  // namespace pagedtree::cuda
