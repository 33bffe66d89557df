// The ranges of a call.
#pragma once

#include "cuda/attention/call.h"

namespace pagedtree::cuda {

// Where a CTA is in its range.
struct Walk {
  WorkPosition at, stop;
  Share share;
  int32_t kv_end;  // of the row tile that begins at `at`
  RowTile tile;    // the CTA's rows of it; none at the end of the range

  __device__ __forceinline__ bool is_whole() const { return at.kv_tile == 0 && kv_end == tile.kv_tiles(); }

  // Whether the range is empty and begins inside a row tile.
  __device__ __forceinline__ bool is_empty_piece() const { return at.kv_tile > 0 && !at.before(stop); }

  // Goes to the next row tile that has rows for the CTA, from `at` on or behind it.
  __device__ __forceinline__ void advance(const AttentionParams& p, const WorkShape& shape, bool is_behind) {
    tile.rows = 0;
    for (WorkPosition now = at; now.before(stop); is_behind = false) {
      const SequenceWork work = sequence_work(shape, now.sequence, share.sharers);
      if (!is_behind && now.row_tile < work.row_tiles) {
        tile = row_tile(p, work, now.sequence, now.row_tile, shape.m_tile, share.part());
        kv_end = now.same_row(stop) ? stop.kv_tile : work.kv_tiles;
        at = now;
        if (tile.rows > 0) return;
      }
      now = now.next(work.row_tiles);  // a sequence without any may lie between two others
    }
  }
};

// The ranges of a plan; each CTA of a call reads its own.
struct CallRanges {
  const WorkShape& shape;
  const int32_t* planned;
  int32_t sharers;  // CTAs of a range
  int32_t count;
  bool in_order;

  // All threads of a CTA meet here. The entries are loaded without waiting for their number, and so are the lengths of
  // the first sequences, which all of a small batch are.
  __device__ __forceinline__ CallRanges(const WorkShape& of_call, const int32_t* plan, int32_t capacity)
      : shape(of_call),
        planned(ranges_of_list(plan, shape.list)),
        sharers(planned_sharers(planned, capacity)),
        count(planned_ranges(planned, capacity / sharers)) {
    const auto thread = static_cast<int32_t>(threadIdx.x);
    if (thread < shape.batch) {
      ptx::touch(shape.seq_lens + thread);
      ptx::touch(shape.cu_seqlens_q + thread);
      if (shape.tree_lens != nullptr) ptx::touch(shape.tree_lens + thread);
    }
    bool decreases = false;
#pragma unroll 1
    for (int32_t i = 2 + thread; i < capacity; i += static_cast<int32_t>(blockDim.x)) {
      const bool before_last = planned_start(planned, i).before(planned_start(planned, i - 1));
      decreases = decreases || (before_last && i < count);
    }
    in_order = !__syncthreads_or(decreases);
  }

  // The first two threads write down where the CTA's range begins, where it ends, and the CTA's share of it; and the
  // same for the kernel that joins the pieces.
  __device__ __forceinline__ void find(Walk& walk, CtaRecord* records) const {
    const auto thread = static_cast<int32_t>(threadIdx.x), cta = static_cast<int32_t>(blockIdx.x);
    if (thread >= 2) return;
    const WorkPosition found = start(cta / sharers + thread);
    (thread == 0 ? walk.at : walk.stop) = found;
    (thread == 0 ? records[cta].begin : records[cta].end) = found;
    if (thread == 0) {
      walk.share = {sharers, cta};
      records[cta].sharers = sharers;
      records[cta].cut.rows = 0;
    }
  }

  // Only a plan that attention_plan did not write is out of order; for such plans simple code matters more than speed.
  __device__ __forceinline__ WorkPosition start(int32_t range) const {
    WorkPosition latest{};
#pragma unroll 1
    for (int32_t i = in_order || range >= count ? range : 1; i <= range; ++i) {
      const WorkPosition start = range_start(shape, planned, count, i, sharers);
      if (latest.before(start)) latest = start;
    }
    return latest;
  }
};

}  // namespace pagedtree::cuda
