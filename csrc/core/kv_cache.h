// Where positions of a sequence lie in a paged cache, and which rows move: written once for every backend.
#pragma once

#include "core/tree.h"

namespace pagedtree {

struct SlotMappingParams {
  PageTable table;
  const int32_t* seq_lens;      // [B]
  const int32_t* cu_seqlens_q;  // [B + 1]
  int64_t* slots;               // [T] out
  int64_t batch;
  int64_t total_q;  // T
};

// K or V: where the new rows are and where they go. Strides count elements.
struct AppendSide {
  const void* rows;    // [T, num_kv_heads, head_dim], last dimension contiguous
  void* cache;         // [num_pages, page_size, num_kv_heads, head_dim], last dimension contiguous, written
  const float* scale;  // [1], or [num_kv_heads] with scale_stride 1; null = 1
  int64_t token_stride, head_stride;
  int64_t cache_page_stride, cache_slot_stride, cache_head_stride;
  int64_t scale_stride;
  int64_t head_dim;  // V's may be another one than K's
};

struct AppendKvParams {
  AppendSide sides[2];   // K, V
  int32_t num_sides;     // 1: K alone, as in the latent cache of MLA
  const int64_t* slots;  // [T]
  int64_t num_tokens;    // T
  int64_t num_kv_heads;
  int64_t num_pages, page_size;
  DType dtype;
  DType cache_dtype;  // dtype: rows are copied; else kFloat8E4M3
};

// Queries and keys are rotated by the angles of their positions; keys and values are appended. Strides count elements.
struct RopeAppendParams {
  AppendKvParams append;     // the first side is K; what is stored of it is rotated
  const void* q;             // [T, num_q_heads, head_dim], last dimension contiguous
  void* q_out;               // of the same shape, last dimension contiguous, written; may be q
  const int64_t* positions;  // [T]
  const void* cos_sin;       // [num_angle_rows, rotary_dim], last dimension contiguous: cosines, then sines
  int64_t q_token_stride, q_head_stride;
  int64_t out_token_stride, out_head_stride;
  int64_t cos_sin_stride;
  int64_t num_angle_rows;  // at least 1, if there is a token
  int64_t num_q_heads;
  int64_t head_dim;                  // of queries and keys
  int64_t rotary_start, rotary_dim;  // the columns that are rotated; rotary_dim is even
  DType cos_sin_dtype;               // that of the rows, or fp32
  bool interleaved;                  // pairs are neighbours; else the two halves of the columns
};

// One tensor of [num_pages, page_size, ...] as bytes: a row is sizes[0] * sizes[1] * sizes[2] runs of run_bytes.
struct CacheView {
  void* data;
  int64_t page_stride, slot_stride;  // bytes
  int64_t run_bytes;
  int64_t sizes[3];
  int64_t strides[3];  // bytes
};

constexpr int kMaxCompactTensors = 128;

// Small enough to travel as the argument of one launch.
struct CompactKvParams {
  CacheView caches[kMaxCompactTensors];
  PageTable table;
  const int32_t* start;         // [B]
  const int32_t* accept_index;  // [B, path_width], row stride accept_stride
  const int32_t* num_accepted;  // [B]
  int32_t* seq_lens;            // [B] out
  int64_t batch;
  int64_t accept_stride;
  int64_t num_pages;
  int32_t num_caches;
  int32_t path_width;  // S, at most kMaxTreeNodes
};

// A place in a cache; a negative page means that there is none.
struct Slot {
  int32_t page;
  int32_t offset;
};

// The place of a position; none if it is outside the table or the table names no page. Whether the page is in the pool
// is checked by the caller, who knows the pool.
// `page_of` divides by the table's page size.
template <typename PageOf>
PT_HOST_DEVICE Slot locate(const PageTable& table, int64_t b, int64_t position, const PageOf& page_of) {
  const int64_t index = position < 0 ? table.max_pages : page_of(position);
  if (index >= table.max_pages) return {-1, 0};
  const int32_t page = table.pages[b * table.row_stride + index];
  return {page, static_cast<int32_t>(position - index * table.page_size)};
}

PT_HOST_DEVICE Slot locate(const PageTable& table, int64_t b, int64_t position) {
  return locate(table, b, position, [&](int64_t at) { return at / table.page_size; });
}

PT_HOST_DEVICE int64_t slot_id(Slot slot, int64_t page_size) {
  return slot.page < 0 ? -1 : slot.page * page_size + slot.offset;
}

PT_HOST_DEVICE int64_t num_items(const SlotMappingParams& p) { return p.total_q; }

// The slot of one query row.
PT_HOST_DEVICE void map_query(const SlotMappingParams& p, int64_t row) {
  p.slots[row] = -1;
  const int64_t b = sequence_of_row(p.cu_seqlens_q, p.batch, row);
  if (b < 0) return;
  const int64_t position = p.seq_lens[b] - node_range(p.cu_seqlens_q, p.batch, b, INT32_MAX).end + row;
  p.slots[row] = slot_id(locate(p.table, b, position), p.table.page_size);
}

// The row of angles of a token: that of its position, or the nearest one.
PT_HOST_DEVICE int64_t angle_row(const RopeAppendParams& p, int64_t token) {
  return clamp_to<int64_t>(p.positions[token], 0, p.num_angle_rows - 1);
}

// The number of accepted drafts of sequence b, bounded by the path's length; -1 if the sequence has no tree.
PT_HOST_DEVICE int32_t path_length(const CompactKvParams& p, int64_t b) {
  if (p.path_width < 1) return -1;
  const int32_t start = p.start[b], root = p.accept_index[b * p.accept_stride], accepted = p.num_accepted[b];
  // Bits, so that no load waits for another one.
  return min_of(clamp_to(accepted, 0, p.path_width - 1), (start | root) < 0 ? -1 : INT32_MAX);
}

PT_HOST_DEVICE int32_t compacted_length(const CompactKvParams& p, int64_t b) {
  const int64_t length = int64_t{p.start[b]} + path_length(p, b) + 1;
  return static_cast<int32_t>(min_of<int64_t>(length, INT32_MAX));
}

struct Move {
  Slot from, to;
};

// The j-th move of sequence b, of the path's node `node`; false if the row is in place already or one of the two places
// is outside the cache.
template <typename PageOf>
PT_HOST_DEVICE bool path_move(const CompactKvParams& p, int64_t b, int32_t j, int32_t node, Move& move,
                              const PageOf& page_of) {
  if (node < 0 || node == j) return false;
  move.from = locate(p.table, b, int64_t{p.start[b]} + node, page_of);
  move.to = locate(p.table, b, int64_t{p.start[b]} + j, page_of);
  const auto inside = [&](Slot slot) { return slot.page >= 0 && slot.page < p.num_pages; };
  return inside(move.from) && inside(move.to);
}

// Byte offset of a row in a cache.
PT_HOST_DEVICE int64_t row_offset(const CacheView& cache, Slot slot) {
  return slot.page * cache.page_stride + slot.offset * cache.slot_stride;
}

}  // namespace pagedtree
