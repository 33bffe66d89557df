#include "core/kv_cache.h"
#include "core/numeric.h"
#include "cuda/backend.h"
#include "cuda/tile/launch.cuh"
#include "cuda/tile/ptx.cuh"

namespace pagedtree::cuda {
namespace {

constexpr int kMaxThreads = 256;
constexpr int64_t kVectorBytes = 16;

// ---- append_kv: what happens to the elements of one piece of a row

template <typename Element, typename Unit>
struct Copy {
  using Source = Element;
  using Target = Element;
  static constexpr int kElements = sizeof(Unit) / sizeof(Element);
  static __device__ void move(const Source* from, Target* to, float /*scale*/) {
    *reinterpret_cast<Unit*>(to) = *reinterpret_cast<const Unit*>(from);
  }
};

template <DType kDType>
struct Stored {  // as raw bits
  uint16_t bits;
  __device__ float value() const {
    return kDType == DType::kFloat16 ? float_from_half(bits) : float_from_bfloat16(bits);
  }
};
template <>
struct Stored<DType::kFloat32> {
  float bits;
  __device__ float value() const { return bits; }
};

template <DType kDType, int kCount>
struct Quantize {
  using Source = Stored<kDType>;
  using Target = uint8_t;
  static constexpr int kElements = kCount;
  struct alignas(kCount == 1 ? sizeof(Source) : kVectorBytes) Sources {
    Source values[kCount];
  };
  struct alignas(kCount) Targets {
    uint8_t codes[kCount];
  };
  static __device__ void move(const Source* from, Target* to, float scale) {
    const Sources sources = *reinterpret_cast<const Sources*>(from);
    Targets targets;
#pragma unroll
    for (int i = 0; i < kCount; ++i) targets.codes[i] = e4m3_from_float(sources.values[i].value() / scale);
    *reinterpret_cast<Targets*>(to) = targets;
  }
};

// One CTA per token and side (K or V).
template <typename Piece>
__global__ void __launch_bounds__(kMaxThreads, 1) append_kernel(const __grid_constant__ AppendKvParams p) {
  const AppendSide& side = p.sides[blockIdx.y];
  const int64_t token = blockIdx.x, slot = p.slots[token];
  if (slot < 0 || slot >= p.num_pages * p.page_size) return;
  const auto* from = static_cast<const typename Piece::Source*>(side.rows) + token * side.token_stride;
  auto* to = static_cast<typename Piece::Target*>(side.cache) + slot / p.page_size * side.cache_page_stride +
             slot % p.page_size * side.cache_slot_stride;
  const int64_t pieces = side.head_dim / Piece::kElements;
  for (int64_t i = threadIdx.x; i < p.num_kv_heads * pieces; i += blockDim.x) {
    const int64_t head = i / pieces, at = i % pieces * Piece::kElements;
    const float scale = side.scale == nullptr ? 1.0f : side.scale[head * side.scale_stride];
    Piece::move(from + head * side.head_stride + at, to + head * side.cache_head_stride + at, scale);
  }
}

// Whether the rows of all sides can be read and written 16 bytes at a time, `elements` of them in each piece.
bool is_aligned(const AppendKvParams& p, int64_t elements) {
  const int64_t size = element_size(p.dtype), cache_size = element_size(p.cache_dtype);
  bool aligned = true;
  for (int32_t i = 0; i < p.num_sides; ++i) {
    const AppendSide& side = p.sides[i];
    aligned = aligned && side.head_dim % elements == 0;
    for (const int64_t bytes : {static_cast<int64_t>(reinterpret_cast<uintptr_t>(side.rows)), side.token_stride * size,
                                side.head_stride * size, static_cast<int64_t>(reinterpret_cast<uintptr_t>(side.cache)),
                                side.cache_page_stride * cache_size, side.cache_slot_stride * cache_size,
                                side.cache_head_stride * cache_size}) {
      aligned = aligned && bytes % kVectorBytes == 0;
    }
  }
  return aligned;
}

template <typename Piece>
void launch_append(const AppendKvParams& p, const ExecContext& ctx) {
  int64_t head_dim = 0;  // of the widest side
  for (int32_t i = 0; i < p.num_sides; ++i) head_dim = max_of(head_dim, p.sides[i].head_dim);
  const int64_t pieces = p.num_kv_heads * (head_dim / Piece::kElements);
  if (pieces == 0) return;
  const auto threads = static_cast<unsigned>(min_of<int64_t>(ceil_div<int64_t>(pieces, 32) * 32, kMaxThreads));
  const dim3 grid(static_cast<unsigned>(p.num_tokens), static_cast<unsigned>(p.num_sides));
  launch(append_kernel<Piece>, grid, dim3(threads), 0, ctx.stream, p);
}

template <typename Element>
void launch_copy(const AppendKvParams& p, const ExecContext& ctx) {
  const bool vector = is_aligned(p, kVectorBytes / sizeof(Element));
  vector ? launch_append<Copy<Element, uint4>>(p, ctx) : launch_append<Copy<Element, Element>>(p, ctx);
}

template <DType kDType>
void launch_quantize(const AppendKvParams& p, const ExecContext& ctx) {
  is_aligned(p, kVectorBytes) ? launch_append<Quantize<kDType, 16>>(p, ctx)
                              : launch_append<Quantize<kDType, 1>>(p, ctx);
}

// ---- compact_kv

constexpr int kStagingBytes = 32 << 10;

struct CompactShared {
  alignas(kVectorBytes) uint8_t staging[kStagingBytes];
  Move moves[kMaxTreeNodes];  // of path node j + 1; from.page -1: the row stays
};

// The offset of unit `unit` from the first byte of its row.
__device__ __forceinline__ int64_t unit_offset(const CacheView& cache, int64_t unit, int64_t unit_bytes) {
  const int64_t units_a_run = cache.run_bytes / unit_bytes;
  const int64_t run = unit / units_a_run;
  const int64_t i0 = run / (cache.sizes[1] * cache.sizes[2]), i1 = run / cache.sizes[2] % cache.sizes[1];
  return i0 * cache.strides[0] + i1 * cache.strides[1] + run % cache.sizes[2] * cache.strides[2] +
         unit % units_a_run * unit_bytes;
}

// All rows of a window of units are loaded before any is stored, so moves may overlap whatever their order. Each CTA of
// a row takes its own windows.
template <typename Unit>
__device__ __forceinline__ void move_rows(const CacheView& cache, CompactShared& shared, int32_t num_moves) {
  auto* const data = static_cast<uint8_t*>(cache.data);
  auto* const staging = reinterpret_cast<Unit*>(shared.staging);
  const int64_t units = cache.sizes[0] * cache.sizes[1] * cache.sizes[2] * (cache.run_bytes / int64_t{sizeof(Unit)});
  const int32_t window = kStagingBytes / int32_t{sizeof(Unit)} / num_moves;
  for (int64_t at = int64_t{blockIdx.y} * window; at < units; at += int64_t{gridDim.y} * window) {
    const int32_t width = static_cast<int32_t>(min_of<int64_t>(window, units - at));
    for (int32_t i = threadIdx.x; i < num_moves * width; i += blockDim.x) {
      const Move& move = shared.moves[i / width];
      if (move.from.page < 0) continue;
      const int64_t offset = unit_offset(cache, at + i % width, sizeof(Unit));
      staging[i] = *reinterpret_cast<const Unit*>(data + row_offset(cache, move.from) + offset);
    }
    __syncthreads();
    for (int32_t i = threadIdx.x; i < num_moves * width; i += blockDim.x) {
      const Move& move = shared.moves[i / width];
      if (move.from.page < 0) continue;
      const int64_t offset = unit_offset(cache, at + i % width, sizeof(Unit));
      *reinterpret_cast<Unit*>(data + row_offset(cache, move.to) + offset) = staging[i];
    }
    __syncthreads();
  }
}

// One CTA per (sequence * caches + cache, piece of the row).
__global__ void __launch_bounds__(kMaxThreads, 1) compact_kernel(const __grid_constant__ CompactKvParams p) {
  auto& shared = ptx::shared<CompactShared>();
  const int64_t num_caches = max_of(p.num_caches, 1);
  const int64_t b = blockIdx.x / num_caches, index = blockIdx.x % num_caches;
  if (index == 0 && blockIdx.y == 0 && threadIdx.x == 0) p.seq_lens[b] = compacted_length(p, b);
  if (p.num_caches == 0) return;
  const int32_t length = path_length(p, b);
  bool moves = false;
  for (int32_t j = 1 + static_cast<int32_t>(threadIdx.x); j <= length; j += blockDim.x) {
    Move& move = shared.moves[j - 1];
    const bool needed = path_move(p, b, j, move);
    if (!needed) move.from.page = -1;
    moves = moves || needed;
  }
  if (!__syncthreads_or(moves)) return;
  const CacheView& cache = p.caches[index];
  const auto bits = static_cast<uint64_t>(reinterpret_cast<uintptr_t>(cache.data)) |
                    static_cast<uint64_t>(cache.page_stride | cache.slot_stride | cache.run_bytes | cache.strides[0] |
                                          cache.strides[1] | cache.strides[2]);
  if (bits % 16 == 0) {
    move_rows<uint4>(cache, shared, length);
  } else if (bits % 4 == 0) {
    move_rows<uint32_t>(cache, shared, length);
  } else if (bits % 2 == 0) {
    move_rows<uint16_t>(cache, shared, length);
  } else {
    move_rows<uint8_t>(cache, shared, length);
  }
}

}  // namespace

void CudaBackend::append_kv(const AppendKvParams& p, const ExecContext& ctx) const {
  if (p.dtype == p.cache_dtype) {
    const int64_t size = element_size(p.dtype);
    return size == 4   ? launch_copy<uint32_t>(p, ctx)
           : size == 2 ? launch_copy<uint16_t>(p, ctx)
                       : launch_copy<uint8_t>(p, ctx);
  }
  switch (p.dtype) {
    case DType::kFloat32:
      return launch_quantize<DType::kFloat32>(p, ctx);
    case DType::kFloat16:
      return launch_quantize<DType::kFloat16>(p, ctx);
    case DType::kBFloat16:
      return launch_quantize<DType::kBFloat16>(p, ctx);
    case DType::kFloat8E4M3:
      return;  // copied, never converted
  }
}

void CudaBackend::compact_kv(const CompactKvParams& p, const ExecContext& ctx) const {
  constexpr int64_t kBytesPerCta = 16 << 10;
  int64_t most = 0;
  for (int32_t i = 0; i < p.num_caches; ++i) {
    const CacheView& cache = p.caches[i];
    most = max_of(most, cache.sizes[0] * cache.sizes[1] * cache.sizes[2] * cache.run_bytes);
  }
  const auto pieces = static_cast<unsigned>(clamp_to<int64_t>(ceil_div(most, kBytesPerCta), 1, 16));
  const auto rows = static_cast<unsigned>(p.batch * max_of(p.num_caches, 1));
  launch(compact_kernel, dim3(rows, pieces), dim3(kMaxThreads), sizeof(CompactShared), ctx.stream, p);
}

}  // namespace pagedtree::cuda
