// Hopper: draws the token of a row on chip: greedily, by a race of all tokens, or, under top-k and top-p, of the tokens
// that they keep. Of most rows these are few: every CTA lists them. A row with more is left to other kernels.
#pragma once

#include "core/backend.h"
#include "core/engine.h"
#include "cuda/engine.h"
#include "cuda/logits_slice.cuh"

namespace pagedtree::cuda {

constexpr int kChipCtas = 3;  // share an SM

struct DrawShared {
  SliceShared slice;
  uint32_t bound;    // of a race: an order_key
  uint32_t num_own;  // tokens of this CTA that were noted
};

// The race among clean words of a slice. A warp looks at its word with the largest bound next, until none reaches the
// best score of the CTA.
template <DType kDType>
struct ChipRace {
  using Slice = LogitsSlice<kDType>;
  const Slice& slice;
  uint32_t* const least;  // words of the groups' noise, one for each word
  const uint64_t seed;
  const int64_t position;
  Scale scale;
  const float min_x;  // tokens below do not take part

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
  // Of this lane's words the next one in the order of bounds.
  __device__ __forceinline__ Bound next_bound(const uint4* words, const Bound& before) const {
    Bound next;
    slice.each_batch([&](int first) {
#pragma unroll
      for (int i = 0; i < Slice::kBatch; ++i) {
        const int word = first + Slice::kApart * i;
        const float x = scale(Slice::largest_of(words[word])), bound = x + noise_bound<ScalarMath>(least[word]);
        const bool is_left = (bound < before.best) | ((bound == before.best) & (word > before.word));
        const bool takes = is_left & (bound > next.best) & (x >= min_x);  // without branches
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

// The likeliest tokens of a row, ranked().
struct KeptNotes {
  static constexpr uint32_t kMost = 512;
  uint64_t own[kMost], all[kMost];  // of the CTA, of the cluster
  uint32_t weights[kMost];          // of all

  struct Sums {
    uint32_t count;
    uint64_t mass;
  };
  // Of the tokens before this rank in the order of the filters. A warp adds them.
  static __device__ __attribute__((noinline)) Sums before(const KeptNotes& notes, uint32_t size, uint64_t rank) {
    uint32_t count = 0, lower = 0, upper = 0;  // halves of the masses
#pragma unroll 1
    for (uint32_t i = threadIdx.x % 32; i < size; i += 32) {
      if (notes.all[i] <= rank) continue;
      lower += notes.weights[i] & 0xffffu;
      upper += notes.weights[i] >> 16;
      ++count;
    }
    const uint32_t low = __reduce_add_sync(~0u, lower);
    return {__reduce_add_sync(~0u, count), (uint64_t{__reduce_add_sync(~0u, upper)} << 16) + low};
  }
};

// The race among the tokens that top-k and top-p keep of a row, and min-p with them.
template <DType kDType>
struct KeptRace {
  using Slice = LogitsSlice<kDType>;
  Slice& slice;
  KeptNotes& notes;
  uint32_t& num_own;
  const Sampling sampling;
  const uint64_t seed;
  const int64_t position;
  const int32_t vocab;
  const float min_x;
  Scale scale;

  static constexpr uint64_t kTooMany = 0, kNoneFinite = ~uint64_t{0};

  // Notes the tokens of a slice from `bound` on. Returns how many, and if `weighs` the mass of the slice times 2^16;
  // unless it is exact, the sum over a row errs by less than error_of().
  __device__ __forceinline__ uint64_t note(const uint4* words, float bound, bool weighs, bool exactly) const {
    const typename Slice::Stored stored(kDType);
    const float least_x = max_of(sampling.joint ? -kInfinity : min_x, kWeightless), factor = log2_scale(scale);
    uint32_t count = 0;
    uint64_t exact = 0;
    double rough = 0.0;
    slice.each_batch([&](int first) {
#pragma unroll 1
      for (int i = 0; i < Slice::kBatch; ++i) {
        const int word = first + Slice::kApart * i;
        const uint4 loaded = words[word];
        const float most = Slice::largest_of(loaded);
        const bool counts = weighs & (scale(most) >= least_x);
        if (counts & !exactly) {
          const uint32_t of_word[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
          float sum = 0.0f;
#pragma unroll
          for (int j = 0; j < Slice::kOfWord; ++j)
            sum += ptx::ex2((stored.value(number_of(stored, of_word, j)) - scale.peak) * factor);
          rough += static_cast<double>(sum);
        }
        if (!(most >= bound || (counts && exactly))) continue;
#pragma unroll 1
        for (int j = 0; j < Slice::kOfWord; ++j) {
          const float logit = stored.value(stored.bits(words + word, j)), x = scale(logit);
          if (counts && exactly) exact += weight_of<ScalarMath>(x >= least_x ? x : 2 * kWeightless);
          if (!(logit >= bound && x >= min_x)) continue;
          if (const uint32_t place = atomicAdd(&num_own, 1u); place < KeptNotes::kMost)
            notes.own[place] = ranked(logit, slice.token_of(word) + j);
          ++count;
        }
      }
    });
    return (exact + static_cast<uint64_t>(rough * 2147483648.0)) << 16 | count;
  }

  // The best score as ranked() gives it.
  __device__ __forceinline__ uint64_t best_of_row(int buffer, bool& bad) {
    constexpr uint64_t kFlag = 1u << 31, kIds = 0xffffffffu;
    const uint32_t lane = threadIdx.x % 32, ctas = ptx::cluster_size();
    const uint32_t first = ptx::cluster_rank() * (blockDim.x / 32) + threadIdx.x / 32, step = ctas * (blockDim.x / 32);
    const bool by_count = sampling.cuts_by_count(vocab), by_mass = sampling.top_p < 1.0f;
    // Of each part a token is noted, and of n parts n log n or so in all. Of CTAs the one with the fewest decides.
    uint32_t parts = clamp_to<uint32_t>(64u >> (__ffs(static_cast<int>(ctas)) - 1), 8, 32);
    const uint32_t most_parts = 2 * parts;
    if (by_count && sampling.top_k > 64) parts = most_parts;
    bool exactly = !sampling.joint && min_x > kWeightless;
#pragma unroll 1
    while (true) {
      if (threadIdx.x == 0) num_own = 0;
      const auto range = slice.range_of_row(buffer, parts, bad);
      if (range.peak <= order_key<ScalarMath>(-kInfinity)) return kNoneFinite;
      scale.peak = logit_of_key<ScalarMath>(range.peak);
      const float bound = max_of(logit_of_key<ScalarMath>(range.bound), -kMaxFloat);
      const bool has_all = bound <= -kMaxFloat || scale(bound) < min_x;
      const bool weighs = by_mass && (sampling.joint || !(by_count || has_all));
      const uint64_t of_cta = slice.exchange(note(slice.words(buffer), bound, weighs, exactly), Slice::Fold::kSum);
      const uint32_t count = static_cast<uint32_t>(of_cta) & 0xffffu, size = __reduce_add_sync(~0u, count);
      if (size > KeptNotes::kMost) return kTooMany;
      slice.gather(notes.own, __shfl_sync(~0u, count, static_cast<int>(ptx::cluster_rank())),
                   __reduce_add_sync(~0u, lane < ptx::cluster_rank() ? count : 0), size, notes.all);
#pragma unroll 1
      for (uint32_t i = threadIdx.x; i < size; i += blockDim.x)
        notes.weights[i] = weight_of<ScalarMath>(max_of(scale(ranked_value(notes.all[i])), 2 * kWeightless));
      __syncthreads();

      const auto all = notes.before(notes, size, 0);
      const auto top_k = static_cast<uint32_t>(sampling.top_k);
      bool suffices = has_all || (by_count && all.count >= top_k);
      uint64_t least = 0, mass = all.mass, needed = ~uint64_t{0}, needed_at_least = needed;
      if (by_count && all.count > top_k) {
        uint64_t of_warp = 0;  // the complement of the least that is kept
#pragma unroll 1
        for (uint32_t i = first; i < size; i += step) {
          const uint64_t rank = notes.all[i] | kIds;
          if (notes.before(notes, size, rank).count < top_k) of_warp = max_of(of_warp, ~rank);
        }
        least = ~slice.largest(of_warp) & ~kIds;
        if (!sampling.joint) mass = notes.before(notes, size, least).mass;
      }
      if (by_mass) {
        const uint64_t of_row = weighs ? warp_sum(of_cta >> 16) : mass;
        const uint64_t error = weighs && !exactly ? error_of(of_row, vocab) : 0;
        needed = top_p_mass(sampling.top_p, of_row + error);
        needed_at_least = top_p_mass(sampling.top_p, of_row - error);
        suffices |= weighs && all.mass >= needed;
      }
      if (!suffices) {
        if (parts == most_parts) return kTooMany;
        parts = most_parts;
        continue;
      }

      uint64_t best = 0, own = 0, flag = 0;  // the flag: the mass's error may decide
      uint32_t kept = 0;
#pragma unroll 1
      for (uint32_t i = first;; i += step) {
        if (i < size) {
          const uint64_t rank = notes.all[i];
          if (rank < least) continue;
          if (by_mass) {
            const uint64_t before = notes.before(notes, size, rank).mass;
            if (before >= needed) continue;
            if (before >= needed_at_least) flag = kFlag;
          }
          if (lane == kept) own = rank;
          ++kept;
        }
        if (kept < 32 && i < size) continue;
        if (lane < kept) {
          const auto token = static_cast<uint32_t>(ranked_id(own));
          const NoiseGroup group(seed, position, RandomUse::kGumbel, token / kNoiseGroup);
          best = max_of(best, ranked(scale(ranked_value(own)) + group.noise(token % kNoiseGroup), token));
        }
        kept = 0;
        if (i >= size) break;
      }
      best = slice.largest((best & ~kFlag) | flag);
      if ((best & kFlag) == 0) return best | kFlag;
      exactly = true;
    }
  }
};

// Draws from the rows of one sequence.
template <DType kDType, bool kSampled>
class ChipDraw {
 public:
  using Slice = LogitsSlice<kDType>;
  static constexpr int32_t kTooMany = -1;

  // Of shared memory behind the rows.
  static __host__ __device__ size_t bytes(int words_of_row) {
    return kSampled ? max_of(static_cast<size_t>(words_of_row) * 4, sizeof(KeptNotes)) : 0;
  }

  __device__ __forceinline__ ChipDraw(Slice& slice, DrawShared& shared, void* room, const Sampling& sampling,
                                      uint64_t seed, int32_t vocab)
      : slice_(slice), shared_(shared), room_(room), sampling_(sampling), seed_(seed), vocab_(vocab) {}

  __device__ bool greedy() const { return !kSampled || sampling_.temperature == 0.0f; }

  // The token of the row whose copy into the buffer was started last; kTooMany: more tokens may be kept than fit.
  __device__ __forceinline__ int32_t token(int buffer, int64_t position, bool& bad) {
    float min_x = -kInfinity;
    Scale scale{0.0f, 1.0f};
    if (!greedy()) {
      scale.inverse_temperature = inverse_temperature(sampling_.temperature);
      min_x = min_p_bound(sampling_.min_p);
      if (sampling_.top_p < 1.0f || sampling_.cuts_by_count(vocab_)) {
        slice_.wait(buffer);
        KeptRace<kDType> race{
            slice_, *static_cast<KeptNotes*>(room_), shared_.num_own, sampling_, seed_, position, vocab_, min_x, scale};
        const uint64_t best = race.best_of_row(buffer, bad);
        if (best == race.kTooMany) return kTooMany;
        if (best != race.kNoneFinite) return ranked_id(best);
      }
    }
    ChipRace<kDType> race{slice_, static_cast<uint32_t*>(room_), seed_, position, scale, min_x};
    if (!greedy()) {
      race.draw_groups();
      if (threadIdx.x == 0) shared_.bound = order_key<ScalarMath>(-kInfinity);
    }
    slice_.wait(buffer);
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

// Whether the kernels below may read these rows, where Hopper's kernels have passed their self-test (cuda/engine.h).
inline bool may_be_on_chip(const LogitsParams& logits, const OptionsParams& options) {
  const int64_t size = logits.dtype == DType::kFloat32 ? 4 : 2;
  const bool in_words = reinterpret_cast<uintptr_t>(logits.data) % kWordBytes == 0 &&
                        logits.vocab * size % kWordBytes == 0 && logits.row_stride * size % kWordBytes == 0;
  const bool has_grammar = logits.allowed != nullptr || logits.allowed_words != nullptr;
  return device_limits().capability == 90 && in_words && !has_grammar && !options.used &&
         resolved_engine(engine_from_environment(), device_limits()) == MatrixEngine::kWgmma;
}

// Launches one cluster for each of the rows or trees; `kernel` gets the number of buffers, at most so many. Returns
// whether rows fit.
template <typename Draw, typename Shared, typename Params>
bool launch_on_chip(void (*kernel)(Params, int), int64_t count, const LogitsParams& logits, int most_buffers,
                    const Params& p, const ExecContext& ctx) {
  const auto most_bytes = static_cast<size_t>(device_limits().max_shared_bytes / 2 - 512);  // two CTAs share an SM
  const auto words = [&](unsigned ctas) { return Draw::Slice::num_words(logits.vocab, ctas); };
  const auto bytes = [&](unsigned ctas, int buffers) {
    return sizeof(Shared) + static_cast<size_t>(words(ctas)) * kWordBytes * buffers + Draw::bytes(words(ctas));
  };
  unsigned ctas = ctas_of_row(kernel, count, logits.vocab);
  const unsigned most_ctas = static_cast<unsigned>(max_cluster(kernel));
  while (bytes(ctas, 1) > most_bytes && 2 * ctas <= most_ctas) ctas *= 2;
  if (bytes(ctas, 1) > most_bytes) return false;
  // Rows that may not be needed are read only where SMs would idle.
  const bool idle = ctas * count <= device_limits().num_sms;
  const int buffers = idle && bytes(ctas, most_buffers) <= most_bytes ? most_buffers : 1;
  const unsigned threads = static_cast<unsigned>(min_of(words(ctas) / Draw::Slice::kBatch, kRowThreads));
  launch_clusters(kernel, dim3(static_cast<unsigned>(count) * ctas), dim3(threads), ctas, bytes(ctas, buffers),
                  ctx.stream, p, buffers);
  return true;
}

}  // namespace pagedtree::cuda
