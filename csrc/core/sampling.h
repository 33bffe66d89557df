// From logits to the sampled distribution: definitions on which all backends must agree.
// x = (logit - max) / T;  p(token) = exp(x) / sum of exp(x) over the kept tokens
#pragma once

#include "core/params.h"
#include "core/philox.h"

namespace pagedtree {

struct SampleParams {
  LogitsParams logits;      // R rows
  SamplingParams sampling;  // of R
  OptionsParams options;    // of R
  const int64_t* seeds;     // [R]
  Integers positions;       // [R]
  int64_t* tokens;          // [R] out
};

constexpr float kMaxFloat = 3.402823466e38f;
constexpr float kMaxFloat16 = 65504.0f;
constexpr float kMaxBFloat16 = 3.38953139e38f;
constexpr float kMinNormal = 1.175494351e-38f;

// Clamped to their ranges.
struct Sampling {
  float temperature;  // 0: greedy
  int32_t top_k;      // 0: off
  float top_p;        // 1: off
  float min_p;        // 0: off
  bool joint;
  PT_HOST_DEVICE bool cuts_by_count(int32_t vocab) const { return top_k > 0 && top_k < vocab; }
};

PT_HOST_DEVICE Sampling sampling_of(const SamplingParams& p, int64_t b) {
  Sampling sampling{0.0f, 0, 1.0f, 0.0f, p.joint};
  if (p.temperature == nullptr) return sampling;
  const float temperature = p.temperature[b * p.temperature_stride];
  const float top_p = p.top_p[b * p.top_p_stride];
  const float min_p = p.min_p[b * p.min_p_stride];
  sampling.temperature = temperature != temperature ? 1.0f : max_of(temperature, 0.0f);
  sampling.top_k = max_of(p.top_k[b * p.top_k_stride], 0);
  sampling.top_p = top_p != top_p ? 1.0f : clamp_to(top_p, 0.0f, 1.0f);
  sampling.min_p = min_p != min_p ? 0.0f : clamp_to(min_p, 0.0f, 1.0f);
  return sampling;
}

struct LogitRow {
  const void* logits;            // [V]
  const uint8_t* allowed;        // [V] or null
  const int32_t* allowed_words;  // [ceil(V / 32)] or null
  int32_t vocab;                 // V
  DType dtype;
};

PT_HOST_DEVICE LogitRow logit_row(const LogitsParams& p, int64_t row) {
  const int64_t bytes = p.dtype == DType::kFloat32 ? 4 : 2;
  return {
      .logits = static_cast<const char*>(p.data) + row * p.row_stride * bytes,
      .allowed = p.allowed == nullptr ? nullptr : p.allowed + row * p.allowed_stride,
      .allowed_words = p.allowed_words == nullptr ? nullptr : p.allowed_words + row * p.allowed_stride,
      .vocab = static_cast<int32_t>(p.vocab),
      .dtype = p.dtype,
  };
}

// Stays normal, and finite times log2(e), so x is never NaN: 0 at the maximum, -inf at -inf, at any temperature.
PT_HOST_DEVICE float inverse_temperature(float temperature) {
  return clamp_to(1.0f / temperature, kMinNormal, 0x1p127f);
}

struct Peak {
  float logit = -kInfinity;
  int32_t token = 0;    // lowest id that attains it
  uint8_t has_nan = 0;  // not bool: may come from a caller's memory (core/verify/shards.h)
};

struct Scale {
  float peak;
  float inverse_temperature;
  template <typename Float>
  PT_HOST_DEVICE Float operator()(Float logit) const {
    return (logit - peak) * inverse_temperature;
  }
};

// Smaller x have weight_of 0.
constexpr float kWeightless = -23.0f;

// Returns an integer mass, 2^31 at the maximum: sums do not depend on the split of a row.
template <typename M>
PT_HOST_DEVICE typename M::Uint weight_of(typename M::Float x) {
  return M::to_uint(M::fma(exp_exact<M>(x), M::splat(2147483648.0f), M::splat(0.5f)));
}

// Masses below e^-87 count as 0.
template <typename Float>
PT_HOST_DEVICE auto has_mass(Float x) {
  return x >= -87.0f;
}
template <typename M>
PT_HOST_DEVICE typename M::Float mass_of(typename M::Float x) {
  return M::select(has_mass(x), exp_exact<M>(x), M::splat(0.0f));
}

// Compares clean logits, so tokens tie exactly if their logits are equal; of ties at the threshold lower ids are kept.
struct Filter {
  float min_logit = -kInfinity;
  int32_t tie_end = INT32_MAX;
  float min_x = -kInfinity;

  PT_HOST_DEVICE bool keeps(int32_t token, float logit, float x) const {
    return x >= min_x && (logit > min_logit || (logit == min_logit && token < tie_end));
  }
};

// Expresses p >= min_p * p_max as a bound on x.
PT_HOST_DEVICE float min_p_bound(float min_p) { return min_p < kMinNormal ? -kInfinity : log_exact<ScalarMath>(min_p); }

// Returns the mass that the smallest prefix must reach, at least one token's.
PT_HOST_DEVICE uint64_t top_p_mass(float top_p, uint64_t total) {
  const double exact = static_cast<double>(top_p) * static_cast<double>(total);
  const uint64_t floor = static_cast<uint64_t>(exact);
  const uint64_t needed = floor + (static_cast<double>(floor) < exact);
  return clamp_to<uint64_t>(needed, 1, total);
}

// Maps logits to unsigned integers in the same order; equal floats have equal keys once -0 is +0.
template <typename M>
PT_HOST_DEVICE typename M::Uint order_key(typename M::Float logit) {
  const auto bits = M::template bits<typename M::Uint>(logit);
  const auto sign = M::template bits<typename M::Uint>(M::template bits<typename M::Int>(logit) >> 31);
  return bits ^ (sign | 0x80000000u);
}

template <typename M>
PT_HOST_DEVICE typename M::Float logit_of_key(typename M::Uint key) {
  const auto negative = (key >> 31) - 1u;
  return M::template bits<typename M::Float>(key ^ (negative | 0x80000000u));
}

struct RowDistribution {
  LogitRow row;
  Scale scale;
  Filter filter;
  int32_t best;  // lowest id of the likeliest tokens
  bool uniform;  // no finite logit: all read as zero
  bool bad;      // NaN, or no finite logit
};

// Calls find_filter(scale) only if a threshold can matter.
template <typename FindFilter>
PT_HOST_DEVICE RowDistribution row_distribution(const LogitRow& row, const Sampling& sampling, const Peak& peak,
                                                const FindFilter& find_filter) {
  const bool greedy = sampling.temperature == 0.0f, uniform = peak.logit == -kInfinity;
  RowDistribution found{row, {0.0f, 1.0f}, Filter{}, peak.token, uniform, uniform || peak.has_nan};
  if (uniform) {
    if (greedy) found.filter = {.min_logit = 0.0f, .tie_end = 1};
    return found;
  }
  found.scale = {peak.logit, greedy ? 1.0f : inverse_temperature(sampling.temperature)};
  found.filter = greedy ? Filter{.min_logit = peak.logit, .tie_end = peak.token + 1} : find_filter(found.scale);
  return found;
}

struct Draw {
  int32_t token;
  bool bad;
};

}  // namespace pagedtree
