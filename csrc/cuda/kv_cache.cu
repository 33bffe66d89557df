// Writes rows into the paged cache (append_kv, rope_append) and moves accepted rows (compact_kv).
#include <algorithm>
#include <initializer_list>
#include <type_traits>

#include "core/kv_cache.h"
#include "cuda/backend.h"
#include "cuda/tile/divisor.cuh"
#include "cuda/tile/element.cuh"
#include "cuda/tile/launch.cuh"
#include "cuda/tile/quantize.cuh"

namespace pagedtree::cuda {
namespace {

constexpr int kMaxThreads = 256;
constexpr int kRopeThreads = 128, kRopeCtasPerSm = 16;
constexpr int64_t kVectorBytes = 16;

// ---- elements: neighbours in one access

template <DType kDType>
using Stored =
    std::conditional_t<kDType == DType::kFloat32, float,
                       std::conditional_t<kDType == DType::kFloat16, __half,
                                          std::conditional_t<kDType == DType::kBFloat16, __nv_bfloat16, Float8E4M3>>>;

template <typename T, int kCount>
struct Neighbours {
  T at[kCount];
};

template <int kBytes>
using Unit = std::conditional_t<
    kBytes % 16 == 0, uint4,
    std::conditional_t<kBytes == 8, uint2,
                       std::conditional_t<kBytes == 4, uint32_t, std::conditional_t<kBytes == 2, uint16_t, uint8_t>>>>;

template <typename T, int kCount>
__device__ __forceinline__ Neighbours<T, kCount> load_neighbours(const T* from) {
  Neighbours<T, kCount> numbers;
  using Word = Unit<sizeof(numbers)>;
#pragma unroll
  for (size_t at = 0; at < sizeof(numbers); at += sizeof(Word)) {
    const Word word = reinterpret_cast<const Word*>(from)[at / sizeof(Word)];
    memcpy(reinterpret_cast<unsigned char*>(&numbers) + at, &word, sizeof(Word));
  }
  return numbers;
}

template <typename T, int kCount>
__device__ __forceinline__ void store_neighbours(T* to, const Neighbours<T, kCount>& numbers) {
  using Word = Unit<sizeof(numbers)>;
#pragma unroll
  for (size_t at = 0; at < sizeof(numbers); at += sizeof(Word)) {
    Word word;
    memcpy(&word, reinterpret_cast<const unsigned char*>(&numbers) + at, sizeof(Word));
    Word* target = reinterpret_cast<Word*>(to) + at / sizeof(Word);
    if constexpr (sizeof(Word) < 8) {
      *target = word;
    } else {
      __stwb(target, word);  // the compiler may split a plain store of such a word
    }
  }
}

template <typename T, int kCount>
__device__ __forceinline__ void store_codes(uint8_t* to, const Neighbours<T, kCount>& numbers,
                                            const Quantizer& quantizer) {
  float values[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = to_float(numbers.at[i]);
  Neighbours<uint8_t, kCount> codes;
  quantizer.encode(values, codes.at);
  store_neighbours(to, codes);
}

__device__ __forceinline__ Quantizer quantizer_of(const AppendSide& side, int64_t head) {
  return Quantizer(side.scale == nullptr ? 1.0f : side.scale[head * side.scale_stride]);
}

__device__ __forceinline__ int64_t cache_offset(const AppendSide& side, const Divisor& page_size, int64_t slot) {
  const int64_t page = page_size.quotient(slot);
  return page * side.cache_page_stride + page_size.remainder(slot, page) * side.cache_slot_stride;
}

bool are_aligned(std::initializer_list<int64_t> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](int64_t value) { return value % kVectorBytes == 0; });
}

int64_t address(const void* p) { return static_cast<int64_t>(reinterpret_cast<uintptr_t>(p)); }

// True if rows allow accesses of 16 bytes, `elements` each.
bool is_aligned(const AppendKvParams& p, const AppendSide& side, int64_t elements) {
  const int64_t size = element_size(p.dtype), cache_size = element_size(p.cache_dtype);
  return side.head_dim % elements == 0 &&
         are_aligned({address(side.rows), side.token_stride * size, side.head_stride * size, address(side.cache),
                      side.cache_page_stride * cache_size, side.cache_slot_stride * cache_size,
                      side.cache_head_stride * cache_size});
}

// Returns a block with a head's pieces along x and heads along y: threads need not divide.
dim3 block_of(int64_t pieces, int64_t heads, int64_t threads) {
  const int64_t x = clamp_to<int64_t>(pieces, 1, threads);
  return dim3(static_cast<unsigned>(x),
              static_cast<unsigned>(clamp_to<int64_t>(threads / x, 1, max_of<int64_t>(heads, 1))));
}

// ---- append_kv, rope_append

// Loads cosines or sines of neighbouring pairs, fp32 or the rows' type.
template <DType kDType, int kCount>
__device__ __forceinline__ void load_angles(float (&angles)[kCount], const RopeAppendParams& p, int64_t offset) {
  if (p.cos_sin_dtype == DType::kFloat32) {
    const auto numbers = load_neighbours<float, kCount>(static_cast<const float*>(p.cos_sin) + offset);
#pragma unroll
    for (int i = 0; i < kCount; ++i) angles[i] = numbers.at[i];
  } else {
    using Number = Stored<kDType>;
    const auto numbers = load_neighbours<Number, kCount>(static_cast<const Number*>(p.cos_sin) + offset);
#pragma unroll
    for (int i = 0; i < kCount; ++i) angles[i] = to_float(numbers.at[i]);
  }
}

// Destination of a head: the rows' type, or e4m3.
template <DType kDType>
struct HeadTarget {
  void* row;
  bool is_float8;
  Quantizer quantizer;

  template <int kCount>
  __device__ __forceinline__ void store(int64_t column, const Neighbours<Stored<kDType>, kCount>& numbers) const {
    if (is_float8) {
      store_codes(static_cast<uint8_t*>(row) + column, numbers, quantizer);
    } else {
      store_neighbours(static_cast<Stored<kDType>*>(row) + column, numbers);
    }
  }
};

// Rotates one head by the angles at offset `angles`, kCount pairs per thread along x, and copies its other columns.
template <DType kDType, int kCount>
__device__ __forceinline__ void rotate_head(const RopeAppendParams& p, int64_t angles, const Stored<kDType>* from,
                                            const HeadTarget<kDType>& to) {
  const int64_t half = p.rotary_dim / 2, step = int64_t{blockDim.x} * kCount, first = int64_t{threadIdx.x} * kCount;
#pragma unroll 1  // usually one iteration
  for (int64_t pair = first; pair < half; pair += step) {
    // Interleaved: the first half of the pairs is in x, the second in y.
    const int64_t a = p.rotary_start + (p.interleaved ? 2 * pair : pair), b = a + (p.interleaved ? kCount : half);
    auto x = load_neighbours<Stored<kDType>, kCount>(from + a), y = load_neighbours<Stored<kDType>, kCount>(from + b);
    float cos[kCount], sin[kCount];
    load_angles<kDType>(cos, p, angles + pair);
    load_angles<kDType>(sin, p, angles + half + pair);
    const auto turn = [&](Stored<kDType>& one, Stored<kDType>& other, int i) {
      const float x1 = to_float(one), x2 = to_float(other);
      one = from_float<Stored<kDType>>(x1 * cos[i] - x2 * sin[i]);
      other = from_float<Stored<kDType>>(x2 * cos[i] + x1 * sin[i]);
    };
    if (kCount > 1 && p.interleaved) {
#pragma unroll
      for (int i = 0; i + 1 < kCount; i += 2) {
        turn(x.at[i], x.at[i + 1], i / 2);
        turn(y.at[i], y.at[i + 1], (kCount + i) / 2);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) turn(x.at[i], y.at[i], i);
    }
    to.store(a, x);
    to.store(b, y);
  }
  if (to.row == from) return;
#pragma unroll 1
  for (int64_t at = first; at < p.head_dim - p.rotary_dim; at += step) {
    const int64_t column = at < p.rotary_start ? at : at + p.rotary_dim;
    to.store(column, load_neighbours<Stored<kDType>, kCount>(from + column));
  }
}

// CTA (token, part). x: one head; y and parts: the token's heads of Q, K, and V. append_kv has no Q and no rotation.
template <DType kDType, int kCount>
__global__ void __launch_bounds__(kRopeThreads)
    rope_append_kernel(const __grid_constant__ RopeAppendParams p, const __grid_constant__ Divisor page_size) {
  ptx::let_next_kernel_start();  // attention
  using Number = Stored<kDType>;
  const AppendKvParams& append = p.append;
  const int64_t token = blockIdx.x, slot = append.slots[token];
  const int64_t angles = p.rotary_dim == 0 ? 0 : angle_row(p, token) * p.cos_sin_stride;
  const bool is_stored = slot >= 0 && slot < append.num_pages * append.page_size;
  const bool is_float8 = append.cache_dtype == DType::kFloat8E4M3 && kDType != DType::kFloat8E4M3;
  const int64_t num_heads = p.num_q_heads + (is_stored ? append.num_sides * append.num_kv_heads : 0);
  for (int64_t i = int64_t{blockIdx.y} * blockDim.y + threadIdx.y; i < num_heads; i += gridDim.y * blockDim.y) {
    constexpr bool kRotates = kDType != DType::kFloat8E4M3;  // such rows are copied
    if constexpr (kRotates) {
      if (i < p.num_q_heads) {
        const auto* from = static_cast<const Number*>(p.q) + token * p.q_token_stride + i * p.q_head_stride;
        auto* to = static_cast<Number*>(p.q_out) + token * p.out_token_stride + i * p.out_head_stride;
        rotate_head<kDType, kCount>(p, angles, from, {to, false, Quantizer(1.0f)});
        continue;
      }
    }
    const bool is_v = i >= p.num_q_heads + append.num_kv_heads;
    const AppendSide& side = append.sides[is_v];
    const int64_t head = i - p.num_q_heads - (is_v ? append.num_kv_heads : 0);
    const auto* from = static_cast<const Number*>(side.rows) + token * side.token_stride + head * side.head_stride;
    const int64_t at = cache_offset(side, page_size, slot) + head * side.cache_head_stride;
    void* row = is_float8 ? static_cast<void*>(static_cast<uint8_t*>(side.cache) + at)
                          : static_cast<void*>(static_cast<Number*>(side.cache) + at);
    const HeadTarget<kDType> to{row, is_float8, quantizer_of(side, head)};
    if constexpr (kRotates) {
      if (!is_v && p.rotary_dim > 0) {
        rotate_head<kDType, kCount>(p, angles, from, to);
        continue;
      }
    }
#pragma unroll 1
    for (int64_t column = int64_t{threadIdx.x} * kCount; column < side.head_dim; column += blockDim.x * kCount) {
      to.store(column, load_neighbours<Number, kCount>(from + column));
    }
  }
}

bool is_aligned(const RopeAppendParams& p, int64_t elements) {
  const int64_t size = element_size(p.append.dtype), angle_size = element_size(p.cos_sin_dtype);
  bool aligned = p.rotary_start % elements == 0 && p.rotary_dim / 2 % elements == 0 && p.head_dim % elements == 0 &&
                 are_aligned({address(p.q), p.q_token_stride * size, p.q_head_stride * size, address(p.q_out),
                              p.out_token_stride * size, p.out_head_stride * size, address(p.cos_sin),
                              p.cos_sin_stride * angle_size});
  for (int32_t i = 0; i < p.append.num_sides; ++i) {
    aligned = aligned && is_aligned(p.append, p.append.sides[i], elements);
  }
  return aligned;
}

template <DType kDType, int kCount>
void launch_rope(const RopeAppendParams& p, const ExecContext& ctx) {
  const int64_t heads = p.num_q_heads + p.append.num_sides * p.append.num_kv_heads;
  const int64_t pieces = max_of(p.rotary_dim / 2, p.head_dim - p.rotary_dim) / kCount;
  const dim3 block = block_of(pieces, heads, kRopeThreads);
  // Few tokens get a CTA per group of heads. Many tokens fill the GPU anyway.
  const int64_t enough =
      ceil_div<int64_t>(int64_t{kRopeCtasPerSm} * device_limits().num_sms, max_of<int64_t>(p.append.num_tokens, 1));
  const int64_t parts = clamp_to<int64_t>(ceil_div<int64_t>(heads, block.y), 1, min_of<int64_t>(enough, 65535));
  const dim3 grid(static_cast<unsigned>(p.append.num_tokens), static_cast<unsigned>(parts));
  launch(rope_append_kernel<kDType, kCount>, grid, block, 0, ctx.stream, p, Divisor(p.append.page_size));
}

template <DType kDType>
void launch_rope(const RopeAppendParams& p, const ExecContext& ctx) {
  constexpr int kElements = kVectorBytes / element_size(kDType);
  is_aligned(p, kElements) ? launch_rope<kDType, kElements>(p, ctx) : launch_rope<kDType, 1>(p, ctx);
}

// ---- compact_kv

constexpr int kStagedUnits = 1024;
constexpr int64_t kBytesPerCta = 16 << 10;
constexpr int kCompactCtasPerSm = 4;

// A row as units of the largest size to which everything is aligned.
struct RowLayout {
  Divisor units_a_run, sizes_1, sizes_2;
  int64_t units;
  int32_t unit_bytes;
};

struct RowLayouts {
  RowLayout of[kMaxCompactTensors];
};

struct CompactShared {
  uint4 staging[kStagedUnits];
  // Then Move moves[path_width - 1], for path nodes j + 1; from.page is -1 if a row stays.
};

__device__ __forceinline__ int64_t unit_offset(const CacheView& cache, const RowLayout& layout, int64_t unit) {
  const int64_t run = layout.units_a_run.quotient(unit), rest = layout.sizes_2.quotient(run);
  const int64_t i0 = layout.sizes_1.quotient(rest), i1 = layout.sizes_1.remainder(rest, i0);
  return i0 * cache.strides[0] + i1 * cache.strides[1] + layout.sizes_2.remainder(run, rest) * cache.strides[2] +
         layout.units_a_run.remainder(unit, run) * layout.unit_bytes;
}

__device__ __forceinline__ uint4 load_unit(const uint8_t* from, int32_t bytes) {
  if (bytes == 16) return *reinterpret_cast<const uint4*>(from);
  return make_uint4(bytes == 4 ? *reinterpret_cast<const uint32_t*>(from) : *from, 0, 0, 0);
}

__device__ __forceinline__ void store_unit(uint8_t* to, const uint4& unit, int32_t bytes) {
  if (bytes == 16) {
    *reinterpret_cast<uint4*>(to) = unit;
  } else if (bytes == 4) {
    *reinterpret_cast<uint32_t*>(to) = unit.x;
  } else {
    *to = static_cast<uint8_t>(unit.x);
  }
}

// Moves rows window by window. A barrier separates a window's loads from its stores: moves may overlap in any order.
// Threads with the same unit share its moves. The CTAs of a row have separate windows.
__device__ __forceinline__ void move_rows(const CacheView& cache, const RowLayout& layout, CompactShared& shared,
                                          int32_t num_moves) {
  constexpr int kUnderWay = 4;
  const auto* const moves = reinterpret_cast<const Move*>(&shared + 1);
  const int64_t units = layout.units;
  int32_t window = highest_bit(min_of(kMaxThreads, kStagedUnits / num_moves));
  while (window / 2 >= units && window > 1) window /= 2;
  const int32_t thread = static_cast<int32_t>(threadIdx.x), column = thread & (window - 1);
  const int32_t first = thread >> (__ffs(window) - 1), step = kMaxThreads >> (__ffs(window) - 1);
  uint4* const staging = shared.staging + column;
  for (int64_t at = int64_t{blockIdx.y} * window; at < units; at += int64_t{gridDim.y} * window) {
    const bool is_inside = at + column < units;
    auto* const data = static_cast<uint8_t*>(cache.data) + (is_inside ? unit_offset(cache, layout, at + column) : 0);
    const auto is_moved = [&](int32_t i) { return is_inside && i < num_moves && moves[i].from.page >= 0; };
#pragma unroll 1
    for (int32_t begin = first; begin < num_moves; begin += kUnderWay * step) {
      uint4 under_way[kUnderWay];
#pragma unroll
      for (int j = 0; j < kUnderWay; ++j) {
        const int32_t i = begin + j * step;
        if (is_moved(i)) under_way[j] = load_unit(data + row_offset(cache, moves[i].from), layout.unit_bytes);
      }
#pragma unroll
      for (int j = 0; j < kUnderWay; ++j) {
        const int32_t i = begin + j * step;
        if (is_moved(i)) staging[i * window] = under_way[j];
      }
    }
    __syncthreads();
#pragma unroll 1
    for (int32_t i = first; i < num_moves; i += step) {
      if (is_moved(i)) store_unit(data + row_offset(cache, moves[i].to), staging[i * window], layout.unit_bytes);
    }
  }
}

// CTA (sequence, piece of the row, first cache); z iterates over caches.
__global__ void __launch_bounds__(kMaxThreads, kCompactCtasPerSm)
    compact_kernel(const __grid_constant__ CompactKvParams p, const __grid_constant__ RowLayouts layouts,
                   const __grid_constant__ Divisor page_size) {
  auto& shared = ptx::shared<CompactShared>();
  auto* const path_moves = reinterpret_cast<Move*>(&shared + 1);
  const int64_t b = blockIdx.x;
  const int32_t* const path = p.accept_index + b * p.accept_stride;
  int32_t j = 1 + static_cast<int32_t>(threadIdx.x);
  int32_t node = j < p.path_width ? path[j] : -1;  // loaded before the path's length is known
  const int32_t length = path_length(p, b);
  if (blockIdx.y == 0 && blockIdx.z == 0 && threadIdx.x == 0) p.seq_lens[b] = compacted_length(p, b);
  if (p.num_caches == 0) return;
  bool moves = false;
  while (j <= length) {
    Move& move = path_moves[j - 1];
    const bool needed = path_move(p, b, j, node, move, [&](int64_t at) { return page_size.quotient(at); });
    if (!needed) move.from.page = -1;
    moves = moves || needed;
    j += static_cast<int32_t>(blockDim.x);
    node = j < p.path_width ? path[j] : -1;
  }
  if (!__syncthreads_or(moves)) return;
#pragma unroll 1
  for (int32_t i = static_cast<int32_t>(blockIdx.z); i < p.num_caches; i += static_cast<int32_t>(gridDim.z)) {
    move_rows(p.caches[i], layouts.of[i], shared, length);
    __syncthreads();  // the next cache's windows may differ
  }
}

RowLayout layout_of(const CacheView& cache) {
  const int64_t bits = address(cache.data) | cache.page_stride | cache.slot_stride | cache.run_bytes |
                       cache.strides[0] | cache.strides[1] | cache.strides[2];
  const int32_t unit_bytes = bits % 16 == 0 ? 16 : bits % 4 == 0 ? 4 : 1;
  const int64_t units = cache.sizes[0] * cache.sizes[1] * cache.sizes[2] * cache.run_bytes / unit_bytes;
  return {Divisor(cache.run_bytes / unit_bytes), Divisor(cache.sizes[1]), Divisor(cache.sizes[2]), units, unit_bytes};
}

}  // namespace

void CudaBackend::append_kv(const AppendKvParams& p, const ExecContext& ctx) const {
  RopeAppendParams rope{};
  rope.append = p;
  for (int32_t i = 0; i < p.num_sides; ++i) rope.head_dim = max_of(rope.head_dim, p.sides[i].head_dim);
  rope_append(rope, ctx);
}

void CudaBackend::rope_append(const RopeAppendParams& p, const ExecContext& ctx) const {
  switch (p.append.dtype) {
    case DType::kFloat32:
      return launch_rope<DType::kFloat32>(p, ctx);
    case DType::kFloat16:
      return launch_rope<DType::kFloat16>(p, ctx);
    case DType::kBFloat16:
      return launch_rope<DType::kBFloat16>(p, ctx);
    case DType::kFloat8E4M3:
      return launch_rope<DType::kFloat8E4M3>(p, ctx);
  }
}

void CudaBackend::compact_kv(const CompactKvParams& p, const ExecContext& ctx) const {
  RowLayouts layouts;
  int64_t most = 0;
  for (int32_t i = 0; i < p.num_caches; ++i) {
    const CacheView& cache = p.caches[i];
    most = max_of(most, cache.sizes[0] * cache.sizes[1] * cache.sizes[2] * cache.run_bytes);
    layouts.of[i] = layout_of(cache);
  }
  const int64_t pieces = clamp_to<int64_t>(ceil_div(most, kBytesPerCta), 1, 16);
  // CTAs that iterate over caches all run at once.
  const int64_t enough = int64_t{kCompactCtasPerSm} * device_limits().num_sms / max_of<int64_t>(p.batch * pieces, 1);
  const dim3 grid(static_cast<unsigned>(p.batch), static_cast<unsigned>(pieces),
                  static_cast<unsigned>(clamp_to<int64_t>(enough, 1, max_of(p.num_caches, 1))));
  const size_t bytes = sizeof(CompactShared) + static_cast<size_t>(max_of(p.path_width - 1, 0)) * sizeof(Move);
  launch(compact_kernel, grid, dim3(kMaxThreads), bytes, ctx.stream, p, layouts, Divisor(p.table.page_size));
}

}  // namespace pagedtree::cuda
