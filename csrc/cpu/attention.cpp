// tree_attention on the CPU: threads claim the plan's ranges one by one, then cut row tiles are merged. The ranges, and
// so the results, do not depend on the number of threads.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>

#include "cpu/backend.h"
#include "cpu/isa.h"
#include "cpu/parallel.h"

namespace pagedtree::cpu {
namespace {

constexpr int64_t kMergedFloats = 32768;  // partial results that one thread merges alone

constexpr int64_t align_up(int64_t bytes) { return ceil_div(bytes, kScratchAlignment) * kScratchAlignment; }

int64_t workspace_bytes(const TreeAttentionParams& p) {
  return align_up(workspace_floats(p.head_dim, p.head_dim_v) * static_cast<int64_t>(sizeof(float)));
}

template <typename Params>
WorkShape work_of(const Params& p) {
  WorkShape shape = work_shape(p, kMTile);
  shape.few_rows = kFewRows;
  shape.few_rows_heads = few_rows_heads(p.head_dim);
  return shape;
}

int32_t num_ranges_bound(const TreeAttentionParams& p) { return range_bound(work_of(p), kRangeLimits); }

int64_t piece_rows(const TreeAttentionParams& p) {
  return min_of<int64_t>(kMTile, p.num_tokens * p.group_size * few_rows_heads(p.head_dim));
}

void cut_ranges(const TreeAttentionParams& p, AttentionRanges& ranges) {
  ranges.shape = work_of(p);
  const int32_t* planned = ranges_of_list(p.plan, ranges.shape.list);
  ranges.count = planned_ranges(planned, num_ranges_bound(p));
  for (int32_t i = 0; i <= ranges.count; ++i) {
    ranges.starts[i] = range_start(ranges.shape, planned, ranges.count, i);
    if (i > 0 && ranges.starts[i].before(ranges.starts[i - 1])) ranges.starts[i] = ranges.starts[i - 1];
  }
  ranges.piece_rows = p.segment > 0 ? segments_of(p) * rows_of_heads(p) : piece_rows(p);
  ranges.head_dim_v = p.head_dim_v;
}

// Clears padding rows, as in captured graphs.
void clear_padding(const TreeAttentionParams& p, int64_t begin, int64_t end) {
  const int64_t size = element_size(p.q_dtype), heads = int64_t{p.num_kv_heads} * p.group_size;
  for (int64_t token = begin; token < end; ++token) {
    for (int64_t head = 0; head < heads; ++head) {
      const int64_t offset = token * p.out_token_stride + head * p.out_head_stride;
      std::memset(static_cast<char*>(p.out) + offset * size, 0, static_cast<size_t>(p.head_dim_v * size));
      if (p.lse != nullptr) {
        p.lse[token * p.lse_token_stride + head * p.lse_head_stride] = -std::numeric_limits<float>::infinity();
      }
    }
  }
}

}  // namespace

// Plans one list for all sequences: a tile's empty rows cost nothing on the CPU.
void CpuBackend::attention_plan(const AttentionPlanParams& p, const ExecContext&) const {
  const WorkShape shape = work_of(p);
  std::fill_n(p.plan, plan_size(p.segment), 0);
  make_ranges(shape, kRangeLimits, ranges_of_list(p.plan, shape.list));
}

int64_t CpuBackend::tree_attention_scratch(const TreeAttentionParams& p, const ExecContext& ctx) const {
  const int64_t pieces = 2 * num_ranges_bound(p) * AttentionRanges::piece_floats(piece_rows(p), p.head_dim_v);
  return kScratchAlignment + max_of(ctx.num_threads, 1) * workspace_bytes(p) +
         (p.segment > 0 ? segments_bytes(p) : pieces * static_cast<int64_t>(sizeof(float)));
}

void CpuBackend::tree_attention(const TreeAttentionParams& p, const ExecContext& ctx) const {
  // 16 columns are half a block of the widest vectors.
  const IsaKernels& isa = p.head_dim >= 32 ? isa_kernels() : portable::kernels();
  const NodeRange used = used_rows(p.cu_seqlens_q, p.batch, p.num_tokens);
  clear_padding(p, 0, used.begin);
  clear_padding(p, used.end, p.num_tokens);
  if (p.batch == 0 || p.num_tokens == 0) return;

  const int64_t workers = max_of(ctx.num_threads, 1);
  char* scratch = static_cast<char*>(p.scratch);
  scratch += align_up(reinterpret_cast<intptr_t>(scratch)) - reinterpret_cast<intptr_t>(scratch);
  AttentionRanges ranges;
  cut_ranges(p, ranges);
  ranges.pieces = reinterpret_cast<float*>(scratch + workers * workspace_bytes(p));

  // A worker claims the ranges of its share in order, then unclaimed ranges of others.
  const int64_t shares = min_of<int64_t>(workers, ranges.count);
  const auto share_begin = [&](int64_t share) { return static_cast<int32_t>(share * ranges.count / shares); };
  std::atomic<int32_t> next[kMaxRanges];
  for (int64_t share = 0; share < shares; ++share) next[share].store(share_begin(share), std::memory_order_relaxed);
  parallel_for(ctx, shares, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) {
      AttentionRange range{&ranges, 0, scratch + worker * workspace_bytes(p)};
      for (int64_t i = 0; i < shares; ++i) {
        const int64_t share = (worker + i) % shares;
        const int32_t share_end = share_begin(share + 1);
        while ((range.index = next[share].fetch_add(1, std::memory_order_relaxed)) < share_end) isa.attend(p, range);
      }
    }
  });
  // Waking threads takes longer than merging a few small pieces.
  const int64_t grain = max_of<int64_t>(kMergedFloats / max_of<int64_t>(ranges.piece_rows * p.head_dim_v, 1), 1);
  const int64_t count = p.segment > 0 ? p.batch * p.num_kv_heads : ranges.count;
  parallel_for(ctx, count, p.segment > 0 ? 1 : grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) isa.merge_pieces(p, ranges, i);
  });
}

void CpuBackend::merge_states(const MergeStatesParams& p, const ExecContext& ctx) const {
  const IsaKernels& isa = isa_kernels();
  parallel_for(ctx, p.num_tokens * p.num_heads, 64,
               [&](int64_t begin, int64_t end) { isa.merge_states(p, begin, end); });
}

}  // namespace pagedtree::cpu
