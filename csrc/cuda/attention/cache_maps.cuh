// Hopper: TMA tensor maps of the caches.
#pragma once

#include "cuda/attention/row_tile.cuh"
#include "cuda/tile/tensor_map.cuh"
#include "cuda/tile/variants.h"

namespace pagedtree::cuda {

// Dimensions: 64 columns, 8 slots, panels of 64 columns, groups of 8 slots, pages. Heads are panels if a slot's heads
// are neighbours, else pages. A box has all panels of a stage's group and `box` slots of a page.
struct CacheMaps {
  ptx::TensorMap k, v;
  int box;                                      // slots; 0: TMA cannot read the caches
  int32_t head_panels, page_heads, head_pages;  // steps between heads or pages, in panels and pages of the map

  template <typename I>
  static CacheMaps of(const AttentionParams& p) {
    CacheMaps maps{};
    const bool by_panels = has_neighbours(p, p.k_cache) && has_neighbours(p, p.v_cache);
    const int64_t page_heads = by_panels ? 1 : heads_of_page(p, p.k_cache);
    if (I::kDecodes || !fits(p, p.k_cache, page_heads) || !fits(p, p.v_cache, page_heads)) return maps;
    if (!by_panels && heads_of_page(p, p.v_cache) != page_heads) return maps;
    int box = kKvTile;  // a stage may begin at any KV tile
    while (box >= kEightSlots && p.table.page_size % box != 0) box /= 2;
    if (box < PAGEDTREE_LEAST_BOX) return maps;
    const std::optional<ptx::TensorMap> k = map_of<I>(p, p.k_cache, box, by_panels, page_heads);
    const std::optional<ptx::TensorMap> v = I::kLatent ? k : map_of<I>(p, p.v_cache, box, by_panels, page_heads);
    if (!k || !v) return maps;
    return {*k, *v, box, by_panels ? p.head_dim / 64 : 0, static_cast<int32_t>(page_heads), by_panels ? 0 : 1};
  }

 private:
  static constexpr int kEightSlots = 8;  // period of the 128-byte swizzle

  static bool has_neighbours(const AttentionParams& p, const PagedCache& cache) {
    return p.num_kv_heads == 1 || cache.head_stride == p.head_dim;
  }
  // Returns the page stride in heads, or 0 if it is no such multiple.
  static int64_t heads_of_page(const AttentionParams& p, const PagedCache& cache) {
    if (p.num_pages == 1) return p.num_kv_heads;
    const bool divides = cache.head_stride > 0 && cache.page_stride % cache.head_stride == 0;
    const int64_t heads = divides ? cache.page_stride / cache.head_stride : 0;
    return heads >= p.num_kv_heads ? heads : 0;
  }
  // TMA's limits: strides are multiples of 16 bytes below 2^40, sizes 32 bits. A size of 1 needs no stride.
  static int64_t stride_bytes(int64_t size, int64_t stride) { return size == 1 ? 16 : stride * 2; }
  static bool fits(const AttentionParams& p, const PagedCache& cache, int64_t page_heads) {
    const auto is_stride = [](int64_t bytes) { return bytes > 0 && bytes % 16 == 0 && bytes < int64_t{1} << 36; };
    return p.num_pages > 0 && page_heads > 0 && page_heads <= INT32_MAX &&
           p.num_pages * page_heads + p.num_kv_heads < int64_t{1} << 31 && p.table.page_size < int64_t{1} << 31 &&
           reinterpret_cast<uintptr_t>(cache.data) % 16 == 0 &&
           is_stride(stride_bytes(p.table.page_size, cache.slot_stride)) &&
           is_stride(stride_bytes(p.num_kv_heads, cache.head_stride)) &&
           is_stride(stride_bytes(p.num_pages, cache.page_stride));
  }
  template <typename I>
  static std::optional<ptx::TensorMap> map_of(const AttentionParams& p, const PagedCache& cache, int box,
                                              bool by_panels, int64_t page_heads) {
    const auto size = [](int64_t value) { return static_cast<uint64_t>(value); };
    const int64_t pages = by_panels ? p.num_pages : (p.num_pages - 1) * page_heads + p.num_kv_heads;
    const int64_t panels = p.head_dim / 64 * (by_panels ? p.num_kv_heads : 1);
    const uint64_t slot_bytes = size(cache.slot_stride * 2);
    return tensor_map({cache.data,
                       {64, kEightSlots, size(panels), size(p.table.page_size / kEightSlots), size(pages)},
                       {slot_bytes, 128, kEightSlots * slot_bytes,
                        size(stride_bytes(pages, by_panels ? cache.page_stride : cache.head_stride))},
                       {64, kEightSlots, I::kTogether, static_cast<uint32_t>(box / kEightSlots), 1}});
  }
};

}  // namespace pagedtree::cuda
