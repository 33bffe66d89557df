// Reads a row of logits in its dtype, by a CTA or in parts by a cluster.
#pragma once

#include "core/noise.h"
#include "cuda/logits/stored.cuh"
#include "cuda/tile/block.cuh"
#include "cuda/tile/launch.cuh"

namespace pagedtree::cuda {

// Two CTAs per SM: a GPC of a Hopper GPU may lack SMs for two large clusters, and the second would wait for the first.
// Fewer threads also issue less code that runs once.
constexpr int kRowThreads = 256, kRowCtas = 2;

// Returns the threads per row; few for short rows.
inline unsigned threads_of_row(int64_t vocab, int most = kRowThreads) {
  return static_cast<unsigned>(clamp_to<int64_t>(ceil_div<int64_t>(vocab, 16 * 32) * 32, 32, most));
}

// Returns the CTAs per row: enough to occupy idle SMs, each with enough work.
template <typename... Params>
unsigned ctas_of_row(void (*kernel)(Params...), int64_t num_rows, int64_t vocab) {
  constexpr int64_t kLeastTokens = 4096;  // per CTA
  const int64_t most = min_of<int64_t>(max_cluster(kernel), vocab / kLeastTokens);
  unsigned ctas = 1;
  while (2 * ctas <= most && 2 * ctas * num_rows <= device_limits().num_sms) ctas *= 2;
  return ctas;
}

// Launches one cluster per row; ptx::cluster_index() is the row.
template <typename... Params, typename... Arguments>
void launch_rows(void (*kernel)(Params...), int64_t num_rows, int64_t vocab, int most_threads, size_t shared_bytes,
                 void* stream, Arguments&&... arguments) {
  const unsigned ctas = ctas_of_row(kernel, num_rows, vocab);
  launch_clusters(kernel, dim3(static_cast<unsigned>(num_rows) * ctas),
                  dim3(threads_of_row(ceil_div<int64_t>(vocab, ctas), most_threads)), ctas, shared_bytes, stream,
                  std::forward<Arguments>(arguments)...);
}

// Returns call(integral constant) for the dtype.
template <typename Call>
auto with_logit_dtype(DType dtype, Call call) {
  switch (dtype) {
    case DType::kFloat16:
      return call(std::integral_constant<DType, DType::kFloat16>());
    case DType::kBFloat16:
      return call(std::integral_constant<DType, DType::kBFloat16>());
    default:
      return call(std::integral_constant<DType, DType::kFloat32>());
  }
}

// A CTA's blocks of tokens of a row.
struct Blocks {
  int first, step, end;
};

// A row as words of 16 bytes, from its first logit. Loads are aligned; a misaligned word combines two loads, the second
// of which waits until the word is cleaned. Words whose loads would leave the row are read logit by logit. Loads bypass
// the read-only cache: the kernel itself writes rows under request options.
template <DType kDType>
class LogitReader {
 public:
  static constexpr int kBatch = 4;  // words in flight

  __device__ explicit LogitReader(const LogitRow& row)
      : stored_(row.dtype), vocab_(row.vocab), is_packed_(row.allowed_words != nullptr) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(row.logits);
    skew_ = static_cast<uint32_t>(address % kWordBytes);
    loads_ = reinterpret_cast<const uint4*>(address - skew_);
    whole_end_ = word_of(vocab_ + static_cast<int>(skew_) / bytes_of_one(stored_));
    if (skew_ != 0) whole_end_ = max_of(whole_end_ - 1, 1);
    grammar_ = is_packed_ ? static_cast<const void*>(row.allowed_words) : row.allowed;
  }

  // Assumes neither NaN nor +inf until the peak is known.
  __device__ void presume_clean() { clean_ = true; }
  // Applies find_peak(): a row without NaN and +inf needs no cleaning.
  __device__ void apply(const Peak& peak) { clean_ = !peak.has_nan && peak.logit < stored_.largest(); }
  __device__ void apply(const RowDistribution& distribution) {
    uniform_ = distribution.uniform;
    clean_ = !distribution.bad && distribution.scale.peak < stored_.largest();
  }

  __device__ int vocab() const { return vocab_; }
  __device__ int digits() const { return stored_.digits(); }
  __device__ float largest() const { return stored_.largest(); }
  __device__ int of_word() const { return kWordBytes / bytes_of_one(stored_); }
  __device__ int word_of(int token) const { return token >> (stored_.wide() ? 2 : 3); }
  __device__ int num_words() const { return word_of(vocab_ + of_word() - 1); }
  __device__ int token_of(int word) const { return word * of_word(); }
  __device__ Blocks own_blocks(int size) const {
    return {static_cast<int>(ptx::cluster_rank()), static_cast<int>(ptx::cluster_size()), ceil_div(vocab_, size)};
  }

  // Returns a clean logit: NaN, forbidden tokens, and tokens past the vocabulary become -inf, +inf the largest number.
  __device__ float logit(int token) const {
    if (token >= vocab_) return -kInfinity;
    const bool allowed = uniform_ || grammar_ == nullptr ||
                         (is_packed_ ? static_cast<const uint32_t*>(grammar_)[token / 32] >> token % 32 & 1u
                                     : static_cast<const uint8_t*>(grammar_)[token]);
    return stored_.value(clean_bits(stored_, uniform_ ? 0u : stored_.bits(logits(), token), allowed));
  }
  // True if the stored logits need no cleaning (no NaN, no +inf, no grammar).
  __device__ bool stands() const { return clean_ && grammar_ == nullptr; }
  __device__ float raw(int token) const { return stored_.value(stored_.bits(logits(), token)); }

  // Calls f(token, four) for the thread's groups of four clean logits, also past the row's end. Skips as each_word().
  template <typename HasAny, typename F>
  __device__ __forceinline__ void each_group_where(HasAny has_any, F f) const {
    each_own_word(has_any, [&](int word, const uint4& numbers) {
      Four four = numbers;
#pragma unroll 1
      for (int j = 0; j < of_word(); j += 4) {
        f(word * of_word() + j, four);
        four.x = four.z;
        four.y = four.w;
      }
    });
  }
  __device__ float largest_of(const Four& four) const { return stored_.largest_of_four(four); }
  __device__ float first_of(const uint4& word) const {
    return stored_.value(stored_.wide() ? word.x : word.x & 0xffffu);
  }
  __device__ uint4 without_first(const uint4& word) const {
    if (stored_.wide()) return {word.y, word.z, word.w, 0};
    return {__funnelshift_r(word.x, word.y, 16), __funnelshift_r(word.y, word.z, 16),
            __funnelshift_r(word.z, word.w, 16), word.w >> 16};
  }
  __device__ void convert(const Four& group, float (&four)[4]) const { convert_four(stored_, group, four); }
  // Returns the sum of f(logit) over a word, in token order.
  template <typename F>
  __device__ __forceinline__ float sum_of_word(const uint4& word, F f) const {
    float sum = 0.0f;
    Four group = word;
    for (int j = 0; j < of_word(); j += 4) {
      float four[4];
      convert(group, four);
      for (float& one : four) one = f(one);
      sum += (four[0] + four[1]) + (four[2] + four[3]);
      group.x = group.z;
      group.y = group.w;
    }
    return sum;
  }

  // Loads groups of four stored logits, `apart` tokens apart, if one load per group can. `token` is a multiple of four.
  template <int kCount>
  __device__ __forceinline__ bool load_whole_fours(int token, int apart, Four* fours) const {
    const int bytes = bytes_of_one(stored_);
    if (skew_ % (4 * bytes) != 0 || token + (kCount - 1) * apart + 4 > vocab_) return false;
    const char* from = static_cast<const char*>(logits()) + token * bytes;
#pragma unroll
    for (int i = 0; i < kCount; ++i, from += apart * bytes) {
      if (stored_.wide()) {
        fours[i] = __ldcg(reinterpret_cast<const uint4*>(from));
      } else {
        const uint2 pairs = __ldcg(reinterpret_cast<const uint2*>(from));
        fours[i] = {pairs.x, pairs.y, 0, 0};
      }
    }
    return true;
  }
  // Loads four logits in any case, zeros past the vocabulary. Not inlined: rare but for row ends.
  static __device__ __attribute__((noinline)) Four load_four(LogitReader row, int token) {
    Four four{};
    if (token >= row.vocab_ || row.template load_whole_fours<1>(token, 0, &four)) return four;
    uint32_t bits[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) bits[i] = token + i < row.vocab_ ? row.stored_.bits(row.logits(), token + i) : 0;
    if (row.stored_.wide()) return {bits[0], bits[1], bits[2], bits[3]};
    return {bits[0] | bits[1] << 16, bits[2] | bits[3] << 16, 0, 0};
  }
  __device__ __forceinline__ void clean_four(int token, const Four& loaded, float (&four)[4]) const {
    convert(loaded, four);
    const uint32_t allowed = allowed_of_word(word_of(token)) >> (token & (of_word() - 1));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float value = uniform_ ? 0.0f : four[i];
      four[i] = (allowed >> i & 1u) && value > -kInfinity ? min_of(value, stored_.largest()) : -kInfinity;
    }
  }

  // Calls f(index, words) with clean words `stride` apart, from `first` + lane. Words past the row are -inf.
  template <typename F>
  __device__ __forceinline__ void with_batch(int lane, int first, int stride, F f) const {
    uint4 words[kBatch];
    load(first + lane, stride, words);
    clean_batch(lane, first, stride, words);
    f(first + lane, words);
  }
  // Calls use(index, stride, see(words)) per batch, whose words' noise shares one block (core/noise.h) if the row
  // begins with a block. see() precedes the next loads, and gets any NaN of a row presumed clean.
  template <typename See, typename Use>
  __device__ __forceinline__ void each_noise_batch(See see, Use use) const {
    static_assert(kBatch == kNoiseRun / 32);
    const int warps = own_stride() / 32, lane = own_lane(), stride = noise_stride();
    const auto first_of = [&](int i) { return first_of_noise_batch(i); };
    uint4 words[2][kBatch]{};
    decltype(see(words[0])) seen[2];
    // The first iteration only loads: one copy of that code.
#pragma unroll 1
    for (int next = own_begin() / 32, at = next - 2 * warps; first_of(at) < num_words(); next += 2 * warps) {
#pragma unroll 1
      for (int i = at; i < next; i += warps) {
        seen[0] = seen[1];
        if (at >= 0 && first_of(i) < num_words()) {
          clean_batch(lane, first_of(i), stride, words[0]);
          seen[1] = see(words[0]);
        }
#pragma unroll
        for (int j = 0; j < kBatch; ++j) words[0][j] = words[1][j];
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (const int first = first_of(next + i * warps); first < num_words()) load(first + lane, stride, words[i]);
      }
#pragma unroll 1
      for (; at < next && first_of(at) < num_words(); at += warps) {
        if (at >= 0) use(first_of(at) + lane, stride, seen[0]);
        seen[0] = seen[1];
      }
    }
  }
  __device__ int noise_stride() const { return 32 * (kNoiseGroup / of_word()); }  // lanes of a group are neighbours
  __device__ int first_of_noise_batch(int i) const {
    const int lanes = kNoiseGroup / of_word();
    return i / lanes * kNoiseRun * lanes + i % lanes * 32;
  }
  // The shuffle makes the result warp-uniform for the compiler.
  __device__ int own_begin() const {
    return __shfl_sync(~0u, static_cast<int>(ptx::cluster_rank() * blockDim.x + threadIdx.x) / 32, 0) * 32;
  }
  __device__ int own_stride() const { return static_cast<int>(ptx::cluster_size() * blockDim.x); }
  static __device__ int own_lane() { return static_cast<int>(threadIdx.x % 32); }

  // Calls f(index, word) for clean words `stride` apart from `begin` + lane, by whole warps until lane 0 reaches `end`.
  // Skips batches for which has_any(largest logit), called by whole warps, is false.
  template <typename HasAny, typename F>
  __device__ __forceinline__ void each_word(int begin, int stride, int end, HasAny has_any, F f) const {
#pragma unroll 1
    for (int of_batch = begin; of_batch < end; of_batch += kBatch * stride) {
      with_batch(own_lane(), of_batch, stride, [&](int first, uint4(&words)[kBatch]) {
        if (!has_any(largest_of_words(words))) return;
#pragma unroll 1
        for (int i = 0; i < kBatch && first - own_lane() < end; ++i, first += stride) {
          f(first, words[0]);
#pragma unroll
          for (int j = 0; j + 1 < kBatch; ++j) words[j] = words[j + 1];
        }
      });
    }
  }
  template <typename HasAny, typename F>
  __device__ __forceinline__ void each_own_word(HasAny has_any, F f) const {
    each_word(own_begin(), own_stride(), num_words(), has_any, f);
  }

  __device__ __forceinline__ uint4 clean_word_at(int word) const {
    uint4 loaded[1];
    load(word, 0, loaded);
    return made_clean(*this, word, loaded[0]);
  }

  // ---- the peak

  struct Best {
    float logit = -kInfinity;
    int word = -1;  // first word of the batch
    bool nan = false;
  };

  // Returns the best of this thread's words. A warp with NaN or +inf reads them again.
  __device__ __forceinline__ Best best_of_words() {
    Best best;
#pragma unroll 1
    for (clean_ = true;; clean_ = false) {
      best = {.nan = best.nan};
#pragma unroll 1
      for (int of_batch = own_begin(); of_batch < num_words(); of_batch += kBatch * own_stride()) {
        with_batch(own_lane(), of_batch, own_stride(), [&](int first, const uint4(&words)[kBatch]) {
          const float most = largest_of_words(words);
          if (most <= best.logit || best.logit != best.logit) return;
          best.logit = most;
          best.word = first;
        });
      }
      if (!clean_) return best;
      best.nan = best.logit != best.logit;
      if (!__any_sync(~0u, !(best.logit < stored_.largest()))) return best;
    }
  }
  __device__ __forceinline__ int token_of(const Best& best) const {
#pragma unroll 1
    for (int word = best.word; word >= 0 && word < num_words(); word += own_stride()) {
      const uint32_t equal = reaching(clean_word_at(word), best.logit);
      if (equal != 0) return word * of_word() + __ffs(static_cast<int>(equal)) - 1;
    }
    return 0;
  }

  // Returns the bits i of logits >= `logit` in a clean word.
  __device__ __forceinline__ uint32_t reaching(const uint4& word, float logit) const {
    const uint32_t words[4] = {word.x, word.y, word.z, word.w};
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < of_word() && stored_.value(number_of(stored_, words, i)) >= logit) bits |= 1u << i;
    }
    return bits;
  }
  // Returns logit i of a word by selects: an index would move the word to local memory.
  __device__ __forceinline__ float number(const uint4& word, int i) const {
    const int at = stored_.wide() ? i : i / 2;
    const uint32_t first = at & 1 ? word.y : word.x, second = at & 1 ? word.w : word.z;
    const uint32_t bits = at & 2 ? second : first;
    return stored_.value(stored_.wide() ? bits : bits >> i % 2 * 16 & 0xffffu);
  }
  __device__ float largest_of_word(const uint4& word) const {
    const uint32_t words[4] = {word.x, word.y, word.z, word.w};
    return stored_.largest_of(words);
  }
  template <int kCount>
  __device__ __forceinline__ float largest_of_words(const uint4 (&loaded)[kCount]) const {
    uint32_t registers[4 * kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      registers[4 * i] = loaded[i].x;
      registers[4 * i + 1] = loaded[i].y;
      registers[4 * i + 2] = loaded[i].z;
      registers[4 * i + 3] = loaded[i].w;
    }
    return stored_.largest_of(registers);
  }

 private:
  __device__ int whole_begin() const { return skew_ == 0 ? 0 : 1; }
  __device__ bool is_whole(int word) const { return word >= whole_begin() && word < whole_end_; }

  // Loads words `stride` apart from `word`. Partial words load another, valid word.
  template <int kCount>
  __device__ __forceinline__ void load(int word, int stride, uint4 (&loaded)[kCount]) const {
    if (whole_end_ == whole_begin()) return;
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      loaded[i] = __ldcg(loads_ + clamp_to(word + i * stride, whole_begin(), whole_end_ - 1));
  }
  __device__ __forceinline__ void clean_batch(int lane, int first, int stride, uint4 (&words)[kBatch]) const {
    if (skew_ == 0 && stands() && first + (kBatch - 1) * stride + 32 <= whole_end_) return;
#pragma unroll 1
    for (int i = 0; i < kBatch; ++i) shift_in(words, made_clean(*this, first + lane + i * stride, words[0]));
  }

  __device__ const void* logits() const { return reinterpret_cast<const char*>(loads_) + skew_; }

  // Returns a word at an end of the row, zeros past the vocabulary.
  __device__ __forceinline__ uint4 word_of_ends(int word) const {
    uint32_t words[4]{};
    const int token = word * of_word();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i >= of_word() || token + i >= vocab_) continue;
      const uint32_t bits = stored_.bits(logits(), token + i);
      if (stored_.wide()) {
        words[i % 4] = bits;
      } else {
        words[i / 2] |= bits << i % 2 * 16;
      }
    }
    return {words[0], words[1], words[2], words[3]};
  }

  // Returns the bits i of a word's logits that are in the vocabulary and allowed.
  __device__ __forceinline__ uint32_t allowed_of_word(int word) const {
    const int token = word * of_word();
    uint32_t bits = ((1u << of_word()) - 1) >> max_of(token - vocab_ + of_word(), 0);
    if (uniform_ || grammar_ == nullptr) return bits;  // the grammar ends with the vocabulary
    if (is_packed_) return bits & static_cast<const uint32_t*>(grammar_)[token / 32] >> token % 32;
#pragma unroll 1
    for (int i = 0; i < of_word(); ++i) {
      if ((bits >> i & 1u) && !static_cast<const uint8_t*>(grammar_)[token + i]) bits &= ~(1u << i);
    }
    return bits;
  }

  // Not inlined: rare but for the last batch, which may be mostly past the end. Keeps a NaN in a row presumed clean.
  static __device__ __attribute__((noinline)) uint4 made_clean(LogitReader row, int word, uint4 loaded) {
    const uint32_t lowest = clean_bits(row.stored_, 0, false) * (row.stored_.wide() ? 1 : 0x10001);
    if (word * row.of_word() >= row.vocab_) return {lowest, lowest, lowest, lowest};
    const uint4 as_stored = !row.is_whole(word) ? row.word_of_ends(word)
                            : row.skew_ == 0    ? loaded
                                                : bytes_from(loaded, __ldcg(row.loads_ + word + 1), row.skew_);
    const uint32_t allowed = row.allowed_of_word(word);
    if (row.clean_ && allowed == (1u << row.of_word()) - 1) return as_stored;
    uint4 clean = clean_word(row.stored_, row.uniform_ ? uint4{} : as_stored, allowed);
    const float most = row.largest_of_word(as_stored);
    if (row.clean_ && most != most) clean.x = ~0u;
    return clean;
  }

  template <int kCount>
  static __device__ __forceinline__ void shift_in(uint4 (&words)[kCount], const uint4& word) {
#pragma unroll
    for (int i = 0; i + 1 < kCount; ++i) words[i] = words[i + 1];
    words[kCount - 1] = word;
  }

  // Chosen to save registers.
  [[no_unique_address]] StoredLogits<kDType> stored_;
  const uint4* loads_;   // aligned, contain the row
  const void* grammar_;  // bits if packed, else bytes; null: no grammar
  uint32_t skew_;        // bytes before the row
  int vocab_;
  int whole_end_;  // words before it load within the row
  bool is_packed_;
  bool uniform_ = false;  // no finite logit: reads as zeros
  bool clean_ = false;    // no NaN, no +inf
};

}  // namespace pagedtree::cuda
