// Reading a row of logits in its own dtype, by a whole CTA or by the CTAs of a cluster, each a part.
#pragma once

#include "core/numeric.h"
#include "core/sampling.h"
#include "cuda/tile/launch.cuh"
#include "cuda/tile/radix.cuh"

namespace pagedtree::cuda {

// As launch bounds with the second number 1: without it nvcc takes 64 registers for sm_80, and spills.
constexpr int kRowThreads = 512;

// Threads that read a row; few where the row is short.
inline unsigned threads_of_row(int64_t vocab, int most = kRowThreads) {
  return static_cast<unsigned>(clamp_to<int64_t>(ceil_div<int64_t>(vocab, 16 * 32) * 32, 32, most));
}

// CTAs that read a row together: those that would idle, as long as each has enough to do.
template <typename... Params>
unsigned ctas_of_row(void (*kernel)(Params...), int64_t num_rows, int64_t vocab) {
  constexpr int64_t kLeastTokens = 4096;  // of a CTA
  const int64_t most = min_of<int64_t>(max_cluster(kernel), vocab / kLeastTokens);
  unsigned ctas = 1;
  while (2 * ctas <= most && 2 * ctas * num_rows <= device_limits().num_sms) ctas *= 2;
  return ctas;
}

// A cluster for each of the `num_rows` rows that are read at the same time: ptx::cluster_index() tells which.
template <typename... Params, typename... Arguments>
void launch_rows(void (*kernel)(Params...), int64_t num_rows, int64_t vocab, int most_threads, size_t shared_bytes,
                 void* stream, Arguments&&... arguments) {
  const unsigned ctas = ctas_of_row(kernel, num_rows, vocab);
  launch_clusters(kernel, dim3(static_cast<unsigned>(num_rows) * ctas),
                  dim3(threads_of_row(ceil_div<int64_t>(vocab, ctas), most_threads)), ctas, shared_bytes, stream,
                  std::forward<Arguments>(arguments)...);
}

// call(integral constant) with the dtype of logits.
template <typename Call>
void with_logit_dtype(DType dtype, Call call) {
  switch (dtype) {
    case DType::kFloat16:
      return call(std::integral_constant<DType, DType::kFloat16>());
    case DType::kBFloat16:
      return call(std::integral_constant<DType, DType::kBFloat16>());
    default:
      return call(std::integral_constant<DType, DType::kFloat32>());
  }
}

__device__ __forceinline__ float half_value(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }

// Logits of one dtype as they lie in memory.
template <DType kDType>
struct StoredLogits {
  static constexpr bool kWide = kDType == DType::kFloat32;
  using One = std::conditional_t<kWide, float, uint16_t>;
  using Four = std::conditional_t<kWide, float4, ushort4>;

  __device__ explicit StoredLogits(DType) {}
  __device__ float largest() const {
    return kWide ? kMaxFloat : kDType == DType::kFloat16 ? kMaxFloat16 : kMaxBFloat16;
  }
  // Of the order key, those that differ.
  __device__ int digits() const { return kWide ? 4 : kDType == DType::kFloat16 ? 3 : 2; }
  __device__ unsigned bytes_of_four() const { return sizeof(Four); }

  static __device__ float value(One stored) {
    if constexpr (kWide) {
      return stored;
    } else {
      return kDType == DType::kFloat16 ? half_value(stored) : float_from_bfloat16(stored);
    }
  }
  __device__ float at(const void* row, int64_t token) const { return value(static_cast<const One*>(row)[token]); }
  __device__ Four four_at(const void* row, int64_t token) const {
    return *reinterpret_cast<const Four*>(static_cast<const One*>(row) + token);
  }
  __device__ Four some_at(const void* row, int64_t token, int64_t count) const {
    const One* from = static_cast<const One*>(row) + token;
    Four four{};
    if (count > 0) four.x = from[0];
    if (count > 1) four.y = from[1];
    if (count > 2) four.z = from[2];
    if (count > 3) four.w = from[3];
    return four;
  }
  __device__ void convert(const Four& stored, float (&four)[4]) const {
    four[0] = value(stored.x);
    four[1] = value(stored.y);
    four[2] = value(stored.z);
    four[3] = value(stored.w);
  }
};

// Logits of a dtype that is known at run time only.
constexpr DType kAnyDType = static_cast<DType>(-1);
template <>
struct StoredLogits<kAnyDType> {
  using Four = uint4;  // of narrow ones, two in a word
  DType dtype;

  __device__ explicit StoredLogits(DType of_row) : dtype(of_row) {}
  __device__ bool wide() const { return dtype == DType::kFloat32; }
  __device__ float largest() const {
    return wide() ? kMaxFloat : dtype == DType::kFloat16 ? kMaxFloat16 : kMaxBFloat16;
  }
  __device__ int digits() const { return wide() ? 4 : dtype == DType::kFloat16 ? 3 : 2; }
  __device__ unsigned bytes_of_four() const { return wide() ? 16 : 8; }

  __device__ uint32_t bits(const void* row, int64_t token) const {
    return wide() ? static_cast<const uint32_t*>(row)[token] : uint32_t{static_cast<const uint16_t*>(row)[token]};
  }
  __device__ float value(uint32_t bits) const {
    if (wide()) return ScalarMath::bits<float>(bits);
    const uint16_t narrow = static_cast<uint16_t>(bits);
    return dtype == DType::kFloat16 ? half_value(narrow) : float_from_bfloat16(narrow);
  }
  __device__ float at(const void* row, int64_t token) const { return value(bits(row, token)); }
  __device__ Four four_at(const void* row, int64_t token) const {
    if (wide()) return *reinterpret_cast<const uint4*>(static_cast<const uint32_t*>(row) + token);
    const uint2 pairs = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(row) + token);
    return {pairs.x, pairs.y, 0, 0};
  }
  __device__ Four some_at(const void* row, int64_t token, int64_t count) const {
    if (wide()) {
      const uint32_t* from = static_cast<const uint32_t*>(row) + token;
      return {count > 0 ? from[0] : 0, count > 1 ? from[1] : 0, count > 2 ? from[2] : 0, count > 3 ? from[3] : 0};
    }
    const uint16_t* from = static_cast<const uint16_t*>(row) + token;
    const uint32_t low = count > 1 ? from[1] : 0, high = count > 3 ? from[3] : 0;
    return {(count > 0 ? from[0] : 0) | low << 16, (count > 2 ? from[2] : 0) | high << 16, 0, 0};
  }
  __device__ void convert(const Four& stored, float (&four)[4]) const {
    if (wide()) {
      four[0] = ScalarMath::bits<float>(stored.x);
      four[1] = ScalarMath::bits<float>(stored.y);
      four[2] = ScalarMath::bits<float>(stored.z);
      four[3] = ScalarMath::bits<float>(stored.w);
      return;
    }
    const bool half = dtype == DType::kFloat16;
    const uint32_t words[2] = {stored.x, stored.y};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint16_t narrow = static_cast<uint16_t>(words[i / 2] >> i % 2 * 16);
      four[i] = half ? half_value(narrow) : float_from_bfloat16(narrow);
    }
  }
};

template <DType kDType>
class LogitReader {
 public:
  using Stored = StoredLogits<kDType>;
  using Four = typename Stored::Four;

  __device__ explicit LogitReader(const LogitRow& row) : row_(row), stored_(row.dtype) {
    aligned_ = reinterpret_cast<uintptr_t>(row.logits) % stored_.bytes_of_four() == 0;
  }

  // From now on the row reads as zeros: the law of a row without finite logit.
  __device__ void make_uniform() { uniform_ = true; }

  __device__ int64_t vocab() const { return row_.vocab; }
  __device__ int digits() const { return stored_.digits(); }

  // NaN is -inf, +inf the largest finite, -0 is +0; what the grammar forbids or lies past the vocabulary is -inf.
  __device__ float logit(int64_t token) const {
    if (token >= row_.vocab) return -kInfinity;
    return clean(stored_.at(row_.logits, token), allowed_four(token) & 1u);
  }

  // f(token, logits) with the logits of four tokens, for each group of four of this thread.
  template <typename F>
  __device__ __forceinline__ void each_four(F f) const {
    each_raw([&](int64_t token, float (&four)[4]) {
      clean_four(token, four);
      f(token, four);
    });
  }

  // The same with the logits as they stand in memory, unspecified past the vocabulary. The next groups are on their way
  // while f looks at one.
  template <typename F>
  __device__ __forceinline__ void each_raw(F f) const {
    constexpr int kAhead = kDType == kAnyDType ? 4 : 3;  // kernels of any dtype have fewer threads
    const int64_t threads = int64_t{ptx::cluster_size()} * blockDim.x, stride = 4 * threads;
    const int64_t begin = 4 * (int64_t{ptx::cluster_rank()} * blockDim.x + threadIdx.x);
    Four ahead[kAhead]{};
#pragma unroll 1
    for (int64_t token = begin - kAhead * stride; token < row_.vocab; token += stride) {
      const Four stored = ahead[0];
#pragma unroll
      for (int i = 0; i + 1 < kAhead; ++i) ahead[i] = ahead[i + 1];
      ahead[kAhead - 1] = load_four(token + kAhead * stride);
      if (token < begin) continue;
      float four[4];
      stored_.convert(stored, four);
      f(token, four);
    }
  }

  // Bit i: token + i, of a group of four, is in the vocabulary and the grammar allows it.
  __device__ uint32_t allowed_four(int64_t token) const {
    uint32_t bits = 15u;
    if (token + 4 > row_.vocab) bits >>= token + 4 - row_.vocab;
    if (uniform_) return bits;
    if (row_.allowed_words != nullptr) {
      bits &= static_cast<uint32_t>(row_.allowed_words[token / 32]) >> (token % 32);
    } else if (row_.allowed != nullptr) {
      for (int i = 0; i < 4; ++i) {
        if ((bits >> i & 1u) && !row_.allowed[token + i]) bits &= ~(1u << i);
      }
    }
    return bits;
  }

  __device__ float clean(float value, bool allowed) const {
    if (uniform_) value = 0.0f;
    return allowed && value > -kInfinity ? min_of(value, stored_.largest()) + 0.0f : -kInfinity;
  }
  __device__ __forceinline__ void clean_four(int64_t token, float (&four)[4]) const {
    const uint32_t allowed = allowed_four(token);
#pragma unroll
    for (int i = 0; i < 4; ++i) four[i] = clean(four[i], allowed >> i & 1u);
  }

  // As they stand in memory: zeros past the vocabulary.
  __device__ __forceinline__ Four load_four(int64_t token) const {
    if (aligned_ && token + 4 <= row_.vocab) return stored_.four_at(row_.logits, token);
    return stored_.some_at(row_.logits, token, row_.vocab - token);
  }
  __device__ void convert(const Four& loaded, float (&four)[4]) const { stored_.convert(loaded, four); }
  __device__ float raw(int64_t token) const { return stored_.at(row_.logits, token); }

 private:
  LogitRow row_;
  [[no_unique_address]] Stored stored_;
  bool aligned_;
  bool uniform_ = false;
};

// Larger values first, among equals the lower id: the order of these integers.
__device__ __forceinline__ uint64_t ranked(float value, int64_t id) {
  const uint64_t key = order_key<ScalarMath>(value + 0.0f);  // -0 ties with +0
  return key << 32 | static_cast<uint32_t>(~static_cast<uint32_t>(id));
}
__device__ __forceinline__ int64_t ranked_id(uint64_t rank) { return ~static_cast<uint32_t>(rank); }
__device__ __forceinline__ float ranked_value(uint64_t rank) {
  return logit_of_key<ScalarMath>(static_cast<uint32_t>(rank >> 32));
}

template <typename Reader>
__device__ __forceinline__ Peak find_peak(const Reader& row, BlockShared& shared) {
  float most = -kInfinity;
  int64_t first = 0;  // token with that logit, of this thread's
  bool nan = false;
  row.each_raw([&](int64_t token, const float (&four)[4]) {
    const uint32_t allowed = row.allowed_four(token);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float logit = row.clean(four[i], allowed >> i & 1u);
      if (logit > most) {
        most = logit;
        first = token + i;
      }
      nan = nan || (four[i] != four[i] && token + i < row.vocab());
    }
  });
  const uint64_t best = cluster_max(shared, ranked(most, first));
  return {.logit = ranked_value(best), .token = ranked_id(best), .has_nan = cluster_any(shared, nan)};
}

// The logits above -inf whose x is at least min_x, as the keys of a radix search.
template <typename Reader>
struct LogitItems {
  const Reader& row;
  Scale scale;
  float min_x;

  __device__ int64_t size() const { return row.vocab(); }
  __device__ int digits() const { return row.digits(); }
  __device__ uint32_t key_of(float logit) const {
    return logit > -kInfinity && scale(logit) >= min_x ? order_key<ScalarMath>(logit) : 0;
  }
  __device__ uint32_t key(int64_t token) const { return key_of(row.logit(token)); }
  template <typename F>
  __device__ __forceinline__ void each(F f) const {
    row.each_four([&](int64_t token, const float (&four)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t key = key_of(four[i]);
        if (key != 0) f(key, token + i);
      }
    });
  }
};

// The scores of an array, likewise.
struct ScoreItems {
  static constexpr int kDigits = kKeyDigits;
  const float* scores;
  int64_t count;
  bool with_absent;  // those of -inf too, behind all others

  __device__ int64_t size() const { return count; }
  __device__ uint32_t key(int64_t i) const {
    const float score = scores[i];
    if (!(score > -kInfinity) && !(with_absent && score == -kInfinity)) return 0;
    return order_key<ScalarMath>(score + 0.0f);  // -0 ties with +0
  }
  template <typename F>
  __device__ __forceinline__ void each(F f) const {
    for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
      const uint32_t of_item = key(i);
      if (of_item != 0) f(of_item, i);
    }
  }
};

template <typename Reader>
__device__ __forceinline__ Filter find_filter(const Reader& row, const Law& law, const Scale& scale,
                                              RadixShared& shared, RadixMasses& scratch) {
  Filter filter;
  filter.min_x = min_p_bound(law.min_p);
  const bool by_mass = law.top_p < 1.0f;
  const bool by_count = law.top_k > 0 && law.top_k < row.vocab();
  if (!by_mass && !by_count) return filter;

  // Only a count looks at tokens of no mass.
  constexpr float kWeightless = -23.0f;
  const float view_min_x = law.joint ? -kInfinity : filter.min_x;
  const LogitItems<Reader> items{row, scale, by_count ? view_min_x : max_of(view_min_x, kWeightless)};
  const auto weight = [&](uint32_t key) { return weight_of<ScalarMath>(scale(logit_of_key<ScalarMath>(key))); };
  RadixMasses* masses = by_mass ? &scratch : nullptr;
  tabulate(shared, masses, shared.first, items, weight, 0, 0);
  Totals left = sum_of_bins(shared, shared.first);
  // First by count, then by mass.
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    const bool mass_pass = pass == 1;
    if (mass_pass ? !by_mass : !(by_count && static_cast<uint64_t>(law.top_k) < left.count)) continue;
    const uint64_t needed = mass_pass ? top_p_mass(law.top_p, left.mass) : static_cast<uint64_t>(law.top_k);
    const Cut cut = find_cut(shared, masses, items, weight, items.digits(), mass_pass, needed);
    const float logit = logit_of_key<ScalarMath>(cut.key);
    if (!mass_pass) {
      filter.min_logit = logit;
      if (!law.joint) left = {cut.above.count + cut.at.count, cut.above.mass + cut.at.mass};
    } else if (logit >= filter.min_logit) {
      filter.min_logit = logit;
      const uint64_t ties = ceil_div(needed - cut.above.mass, cut.at.mass / cut.at.count);
      if (ties == cut.at.count) continue;
      filter.tie_end =
          end_of_first(shared.block, row.vocab(), ties, [&](int64_t token) { return row.logit(token) == logit; });
    }
  }
  return filter;
}

}  // namespace pagedtree::cuda
