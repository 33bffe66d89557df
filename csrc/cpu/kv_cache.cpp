#include "core/kv_cache.h"

#include <cstring>
#include <vector>

#include "cpu/backend.h"
#include "cpu/isa.h"
#include "cpu/parallel.h"

namespace pagedtree::cpu {
namespace {

constexpr int64_t kScratchBytes = 32 << 10;
constexpr int64_t kBytesPerTask = 64 << 10;

void append_row(const AppendKvParams& p, const AppendSide& side, const IsaKernels& isa, int64_t token, int64_t page,
                int64_t offset) {
  if (side.head_dim * p.num_kv_heads == 0) return;  // tensors without elements have no address
  const int64_t size = element_size(p.dtype), cache_size = element_size(p.cache_dtype);
  const auto* from = static_cast<const uint8_t*>(side.rows) + token * side.token_stride * size;
  auto* to = static_cast<uint8_t*>(side.cache) +
             (page * side.cache_page_stride + offset * side.cache_slot_stride) * cache_size;
  const bool copied = p.dtype == p.cache_dtype;
  // Adjacent heads with a common scale form one run.
  const int64_t dim = side.head_dim;
  const bool dense = side.head_stride == dim && side.cache_head_stride == dim && side.scale_stride == 0;
  const int64_t runs = dense ? 1 : p.num_kv_heads;
  const int64_t run = dense ? p.num_kv_heads * dim : dim;
  for (int64_t h = 0; h < runs; ++h) {
    const uint8_t* source = from + h * side.head_stride * size;
    uint8_t* target = to + h * side.cache_head_stride * cache_size;
    if (copied) {
      std::memcpy(target, source, run * size);
    } else {
      isa.quantize_e4m3(source, p.dtype, run, side.scale == nullptr ? 1.0f : side.scale[h * side.scale_stride], target);
    }
  }
}

// Loads a window of all rows before storing, so moves may overlap in any order. The window bounds the scratch.
void move_rows(const CacheView& cache, const Move* moves, int64_t count, uint8_t* scratch) {
  auto* const data = static_cast<uint8_t*>(cache.data);
  const int64_t window = kScratchBytes / count;
  const int64_t runs = cache.sizes[0] * cache.sizes[1] * cache.sizes[2];
  for (int64_t run = 0; run < runs; ++run) {
    const int64_t i0 = run / (cache.sizes[1] * cache.sizes[2]);
    const int64_t i1 = run / cache.sizes[2] % cache.sizes[1];
    const int64_t i2 = run % cache.sizes[2];
    uint8_t* const base = data + i0 * cache.strides[0] + i1 * cache.strides[1] + i2 * cache.strides[2];
    for (int64_t at = 0; at < cache.run_bytes; at += window) {
      const int64_t bytes = min_of(window, cache.run_bytes - at);
      for (int64_t m = 0; m < count; ++m) {
        std::memcpy(scratch + m * bytes, base + row_offset(cache, moves[m].from) + at, bytes);
      }
      for (int64_t m = 0; m < count; ++m) {
        std::memcpy(base + row_offset(cache, moves[m].to) + at, scratch + m * bytes, bytes);
      }
    }
  }
}

}  // namespace

void CpuBackend::append_kv(const AppendKvParams& p, const ExecContext& ctx) const {
  int64_t row_bytes = 0;
  for (int32_t i = 0; i < p.num_sides; ++i) row_bytes += p.num_kv_heads * p.sides[i].head_dim * element_size(p.dtype);
  if (row_bytes == 0) return;  // tensors without elements have no address
  const IsaKernels& isa = isa_kernels();
  const int64_t num_slots = p.num_pages * p.page_size;
  parallel_for(ctx, p.num_tokens, ceil_div(kBytesPerTask, row_bytes), [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t slot = p.slots[token];
      if (slot < 0 || slot >= num_slots) continue;
      for (int32_t i = 0; i < p.num_sides; ++i) {
        append_row(p, p.sides[i], isa, token, slot / p.page_size, slot % p.page_size);
      }
    }
  });
}

void CpuBackend::rope_append(const RopeAppendParams& p, const ExecContext& ctx) const {
  const AppendKvParams& a = p.append;
  const AppendSide& k = a.sides[0];
  const int64_t size = element_size(a.dtype);
  const bool has_q = p.num_q_heads * p.head_dim > 0, has_k = a.num_kv_heads * p.head_dim > 0;
  int64_t row_bytes = 2 * p.num_q_heads * p.head_dim * size;
  for (int32_t i = 0; i < a.num_sides; ++i) row_bytes += a.num_kv_heads * a.sides[i].head_dim * size;
  if (row_bytes == 0) return;  // tensors without elements have no address
  const IsaKernels& isa = isa_kernels();
  const int64_t num_slots = a.num_pages * a.page_size;
  const bool is_converted = a.dtype != a.cache_dtype;
  parallel_for(ctx, a.num_tokens, ceil_div(kBytesPerTask, row_bytes), [&](int64_t begin, int64_t end) {
    std::vector<char> rotated(static_cast<size_t>(is_converted ? a.num_kv_heads * p.head_dim * size : 0));
    AppendSide rotated_k = k;  // before conversion
    rotated_k.rows = rotated.data();
    rotated_k.token_stride = 0;
    rotated_k.head_stride = p.head_dim;
    const auto rotate = [&](int64_t token, const void* from, int64_t from_stride, void* to, int64_t to_stride,
                            int64_t num_heads) {
      isa.rotate_heads(
          p, angle_row(p, token),
          {static_cast<const char*>(from), static_cast<char*>(to), from_stride * size, to_stride * size, num_heads});
    };
    for (int64_t token = begin; token < end; ++token) {
      if (has_q) {
        rotate(token, static_cast<const char*>(p.q) + token * p.q_token_stride * size, p.q_head_stride,
               static_cast<char*>(p.q_out) + token * p.out_token_stride * size, p.out_head_stride, p.num_q_heads);
      }
      const int64_t slot = a.slots[token];
      if (slot < 0 || slot >= num_slots) continue;
      const int64_t page = slot / a.page_size, offset = slot % a.page_size;
      if (has_k) {
        const char* from = static_cast<const char*>(k.rows) + token * k.token_stride * size;
        if (is_converted) {
          rotate(token, from, k.head_stride, rotated.data(), p.head_dim, a.num_kv_heads);
          append_row(a, rotated_k, isa, token, page, offset);
        } else {
          char* to = static_cast<char*>(k.cache) + (page * k.cache_page_stride + offset * k.cache_slot_stride) * size;
          rotate(token, from, k.head_stride, to, k.cache_head_stride, a.num_kv_heads);
        }
      }
      for (int32_t i = 1; i < a.num_sides; ++i) append_row(a, a.sides[i], isa, token, page, offset);
    }
  });
}

void CpuBackend::compact_kv(const CompactKvParams& p, const ExecContext& ctx) const {
  for (int64_t b = 0; b < p.batch; ++b) p.seq_lens[b] = compacted_length(p, b);
  const auto page_of = [&](int64_t position) { return position / p.table.page_size; };
  // Sequences outside: their moves are the same for all tensors.
  parallel_for(ctx, p.batch * p.num_caches, 4, [&](int64_t begin, int64_t end) {
    Move moves[kMaxTreeNodes];
    alignas(64) uint8_t scratch[kScratchBytes];
    int64_t planned = -1, count = 0;
    for (int64_t task = begin; task < end; ++task) {
      const int64_t b = task / p.num_caches;
      if (b != planned) {
        planned = b;
        count = 0;
        const int32_t* const path = p.accept_index + b * p.accept_stride;
        for (int32_t j = 1; j <= path_length(p, b); ++j) count += path_move(p, b, j, path[j], moves[count], page_of);
      }
      if (count > 0) move_rows(p.caches[task % p.num_caches], moves, count, scratch);
    }
  });
}

}  // namespace pagedtree::cpu
