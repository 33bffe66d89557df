// Hopper: samples a row on chip, greedily or by a Gumbel race. Rows with too many kept tokens go to other kernels.
#pragma once

#include "core/engine.h"
#include "core/ops.h"
#include "cuda/engine.h"
#include "cuda/logits/kept_tokens.cuh"
#include "cuda/logits/slice.cuh"

namespace pagedtree::cuda {

constexpr int kChipCtas = 3;  // per SM

struct DrawShared {
  SliceShared slice;
  uint32_t bound;  // of a race: an order_key
};

// Race over clean words of a slice: a warp scores its largest bound's word, until none reaches the CTA's best score.
template <DType kDType>
struct ChipRace {
  using Slice = LogitsSlice<kDType>;
  const Slice& slice;
  uint32_t* const least;  // noise of each word's group
  const uint64_t seed;
  const int64_t position;
  Scale scale;
  const float min_x;  // lower x have no score

  struct Bound {
    float best = -kInfinity;
    int word = 0;
  };

  __device__ __forceinline__ void draw_groups() const {
    slice.each_batch([&](int word) {
      uint32_t words[Slice::kBatch];
      const uint32_t group = static_cast<uint32_t>(slice.token_of(word)) / kNoiseGroup;
      philox<ScalarMath>(seed, position, run_block(group), RandomUse::kGumbel, words);
#pragma unroll
      for (int i = 0; i < Slice::kBatch; ++i) least[word + Slice::kApart * i] = words[i];
    });
  }
  // Returns this lane's next word in order of bounds.
  __device__ __forceinline__ Bound next_bound(const uint4* words, const Bound& before) const {
    Bound next;
    slice.each_batch([&](int first) {
#pragma unroll
      for (int i = 0; i < Slice::kBatch; ++i) {
        const int word = first + Slice::kApart * i;
        const float x = scale(Slice::largest_of_word(words[word])), bound = x + noise_bound<ScalarMath>(least[word]);
        const bool is_left = (bound < before.best) | ((bound == before.best) & (word > before.word));
        const bool takes = is_left & (bound > next.best) & (x >= min_x);  // branchless
        next.best = takes ? bound : next.best;
        next.word = takes ? word : next.word;
      }
    });
    return next;
  }
  __device__ __forceinline__ uint64_t best_of_warp(const uint4* words, uint32_t& shared_bound) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const typename Slice::Stored stored(kDType);
    const uint32_t none = order_key<ScalarMath>(-kInfinity);
    uint64_t best = 0;
    Bound bound = next_bound(words, {kInfinity, 0});
#pragma unroll 1
    while (true) {
      const uint32_t own_bound = order_key<ScalarMath>(bound.best);
      const uint32_t key = own_bound >= value_now(shared_bound) ? own_bound : none;
      const uint32_t most = __reduce_max_sync(~0u, key);
      if (most <= none) return best;
      const int from = __ffs(static_cast<int>(__ballot_sync(~0u, key == most))) - 1;
      const int word = __shfl_sync(~0u, bound.word, from);
      const int token = slice.token_of(word) + lane % Slice::kOfWord;
      const float x = scale(stored.value(stored.bits(words + word, lane % Slice::kOfWord)));
      const float noise = noise_of_word(seed, position, static_cast<uint32_t>(token), least[word]);
      const float score = (lane < Slice::kOfWord) & (x >= min_x) ? x + noise : -kInfinity;
      const uint32_t reached = __reduce_max_sync(~0u, order_key<ScalarMath>(score + 0.0f));
      if (lane == 0) atomicMax(&shared_bound, reached);
      if (score > -kInfinity) best = max_of(best, ranked(score, token));
      const Bound next = next_bound(words, bound);
      if (lane == from) bound = next;
    }
  }
};

template <DType kDType, bool kSampled>
class ChipDraw {
 public:
  using Slice = LogitsSlice<kDType>;
  static constexpr int32_t kTooMany = -1;

  static __host__ __device__ size_t bytes(int words_of_row) {
    return kSampled ? max_of(static_cast<size_t>(words_of_row) * 4, sizeof(KeptCandidates)) : 0;
  }

  __device__ __forceinline__ ChipDraw(Slice& slice, DrawShared& shared, void* room, const Sampling& sampling,
                                      uint64_t seed, int32_t vocab)
      : slice_(slice), shared_(shared), room_(room), sampling_(sampling), seed_(seed), vocab_(vocab) {}

  __device__ bool greedy() const { return !kSampled || sampling_.temperature == 0.0f; }

  // Samples row n, which was copied last into the buffer, or returns kTooMany.
  __device__ __forceinline__ int32_t token(const LogitsParams& logits, int64_t n, int buffer, int64_t position,
                                           bool& bad) {
    const auto receive = [&] { slice_.receive(buffer, logits, [&] { return logit_row(logits, n); }); };
    float min_x = -kInfinity;
    Scale scale{0.0f, 1.0f};
    if (!greedy()) {
      scale.inverse_temperature = inverse_temperature(sampling_.temperature);
      min_x = min_p_bound(sampling_.min_p);
      if (sampling_.top_p < 1.0f || sampling_.cuts_by_count(vocab_)) {
        receive();
        KeptTokens<Slice> kept{slice_, *static_cast<KeptCandidates*>(room_), sampling_, vocab_, min_x, scale};
        const uint64_t best = kept.best_of_row(buffer, seed_, position, bad);
        if (best == kept.kTooMany) return kTooMany;
        if (best != kept.kNoneFinite) return ranked_id(best);
      }
    }
    ChipRace<kDType> race{slice_, static_cast<uint32_t*>(room_), seed_, position, scale, min_x};
    if (!greedy()) {
      race.draw_groups();
      if (threadIdx.x == 0) shared_.bound = order_key<ScalarMath>(-kInfinity);
    }
    receive();
    uint64_t best = slice_.template best_of_row<kSampled>(buffer, bad);
    if (!greedy()) {
      race.scale.peak = ranked_value(best);
      best = slice_.largest(race.best_of_warp(slice_.words(buffer), shared_.bound));
    }
    return ranked_id(best);
  }

 private:
  Slice& slice_;
  DrawShared& shared_;
  void* const room_;
  const Sampling sampling_;
  const uint64_t seed_;
  const int32_t vocab_;
};

// True if the on-chip kernels can read the rows and Hopper's self-test has passed (cuda/engine.h).
inline bool may_be_on_chip(const LogitsParams& logits, const OptionsParams& options) {
  const int64_t size = logits.dtype == DType::kFloat32 ? 4 : 2;
  const bool in_words = reinterpret_cast<uintptr_t>(logits.data) % kWordBytes == 0 &&
                        logits.vocab * size % kWordBytes == 0 && logits.row_stride * size % kWordBytes == 0;
  return device_limits().capability == 90 && in_words && !options.used &&
         resolved_engine(engine_from_environment(), device_limits()) == MatrixEngine::kWgmma;
}

// Launches one cluster per row or tree; `kernel` gets the number of buffers, at most `most_buffers`. draw_bytes(words
// of a row) follow the rows. Returns false if rows do not fit.
template <DType kDType, typename Shared, typename Params>
bool launch_on_chip(
    void (*kernel)(Params, int), int64_t count, const LogitsParams& logits, int most_buffers, const Params& p,
    const ExecContext& ctx, size_t (*draw_bytes)(int) = [](int) -> size_t { return 0; }) {
  using Slice = LogitsSlice<kDType>;
  const auto most_bytes = static_cast<size_t>(device_limits().max_shared_bytes / 2 - 512);  // two CTAs per SM
  const auto words = [&](unsigned ctas) { return Slice::num_words(logits.vocab, ctas); };
  const auto bytes = [&](unsigned ctas, int buffers) {
    return sizeof(Shared) + static_cast<size_t>(words(ctas)) * kWordBytes * buffers + draw_bytes(words(ctas));
  };
  unsigned ctas = ctas_of_row(kernel, count, logits.vocab);
  const unsigned most_ctas = static_cast<unsigned>(max_cluster(kernel));
  while (bytes(ctas, 1) > most_bytes && 2 * ctas <= most_ctas) ctas *= 2;
  if (bytes(ctas, 1) > most_bytes) return false;
  // Prefetches rows only if SMs would idle.
  const bool idle = ctas * count <= device_limits().num_sms;
  const int buffers = idle && bytes(ctas, most_buffers) <= most_bytes ? most_buffers : 1;
  const unsigned threads = static_cast<unsigned>(min_of(words(ctas) / Slice::kBatch, kRowThreads));
  launch_clusters(kernel, dim3(static_cast<unsigned>(count) * ctas), dim3(threads), ctas, bytes(ctas, buffers),
                  ctx.stream, p, buffers);
  return true;
}

}  // namespace pagedtree::cuda
