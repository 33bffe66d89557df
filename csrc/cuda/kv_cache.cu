#include "core/kv_cache.h"
#include "core/numeric.h"
#include "cuda/kernels.h"
#include "cuda/tile/launch.cuh"

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

// One CTA for K or V of one token.
template <typename Piece>
__global__ void __launch_bounds__(kMaxThreads) append_kernel(const __grid_constant__ AppendKvParams p) {
  const AppendSide& side = p.sides[blockIdx.y];
  const int64_t token = blockIdx.x, slot = p.slots[token];
  if (slot < 0 || slot >= p.num_pages * p.page_size) return;
  const auto* from = static_cast<const typename Piece::Source*>(side.rows) + token * side.token_stride;
  auto* to = static_cast<typename Piece::Target*>(side.cache) + slot / p.page_size * side.cache_page_stride +
             slot % p.page_size * side.cache_slot_stride;
  const int64_t pieces = p.head_dim / Piece::kElements;
  for (int64_t i = threadIdx.x; i < p.num_kv_heads * pieces; i += blockDim.x) {
    const int64_t head = i / pieces, at = i % pieces * Piece::kElements;
    const float scale = side.scale == nullptr ? 1.0f : side.scale[head * side.scale_stride];
    Piece::move(from + head * side.head_stride + at, to + head * side.cache_head_stride + at, scale);
  }
}

// Whether the rows of both sides can be read and written 16 bytes at a time, `elements` of them in each piece.
bool is_aligned(const AppendKvParams& p, int64_t elements) {
  const int64_t size = element_size(p.dtype), cache_size = element_size(p.cache_dtype);
  bool aligned = p.head_dim % elements == 0;
  for (const AppendSide& side : p.sides) {
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
  const int64_t pieces = p.num_kv_heads * (p.head_dim / Piece::kElements);
  if (pieces == 0) return;
  const auto threads = static_cast<unsigned>(min_of<int64_t>(ceil_div<int64_t>(pieces, 32) * 32, kMaxThreads));
  launch(append_kernel<Piece>, dim3(static_cast<unsigned>(p.num_tokens), 2), dim3(threads), 0, ctx.stream, p);
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

}  // namespace

void append_kv(const AppendKvParams& p, const ExecContext& ctx) {
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

}  // namespace pagedtree::cuda
