// Hopper: a row of logits on chip. Each CTA of a cluster bulk-copies a slice to shared memory and replaces NaN, +inf
// and forbidden tokens there. CTAs exchange values by st.async with mbarriers instead of cluster barriers.
#pragma once

#include "cuda/logits/kept_tokens.cuh"
#include "cuda/tile/ptx_sm90.cuh"

namespace pagedtree::cuda {

constexpr int kRunTokens = kNoiseRun * kNoiseGroup;  // slices are whole runs: noise is drawn by blocks

struct SliceShared {
  uint64_t copied[2], exchanged[2], gathered;  // mbarriers
  uint64_t of_ctas[2][kMaxCluster], of_warps[2][kRowThreads / 32];
};

// Numbers of exchanges and lists; bit i of `copies`: parity of copies into buffer i.
struct SliceTurns {
  uint32_t exchanges = 0, lists = 0, copies = 0;
};

// A CTA's slice, with one or two row buffers.
template <DType kDType>
class LogitsSlice {
 public:
  using Stored = StoredLogits<kDType>;
  static constexpr int kOfWord = Stored::kWide ? 4 : 8, kBatch = kNoiseRun / 32;
  static constexpr int kLanes = kNoiseGroup / kOfWord;  // lanes of a group are neighbours
  static constexpr int kApart = 32 * kLanes;            // stride of a batch's words
  // Returns the words per slice. Those past the row are -inf.
  static __host__ __device__ int num_words(int64_t vocab, uint32_t ctas) {
    return ceil_div(static_cast<int>(vocab), kRunTokens * static_cast<int>(ctas)) * (kRunTokens / kOfWord);
  }

  __device__ __forceinline__ LogitsSlice(SliceShared& shared, uint4* words, int64_t vocab, const SliceTurns& turns = {})
      : shared_(shared),
        words_(words),
        size_(num_words(vocab, ptx::cluster_size())),
        first_(static_cast<int>(ptx::cluster_rank()) * size_),
        count_(clamp_to(static_cast<int>(vocab) / kOfWord - first_, 0, size_)),
        turns_(turns) {}
  __device__ const SliceTurns& turns() const { return turns_; }

  // Once. The cluster synchronizes before the first exchange.
  __device__ __forceinline__ void begin(int buffers) const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < 2; ++i) {
        ptx::mbar_init(&shared_.copied[i], 1);
        ptx::mbar_init(&shared_.exchanged[i], 1);
      }
      ptx::mbar_init(&shared_.gathered, 1);
      ptx::fence_mbar_init();
    }
    const uint32_t lowest = clean_bits(Stored(kDType), 0, false) * (Stored::kWide ? 1 : 0x10001);
    for (int word = count_ + static_cast<int>(threadIdx.x); word < size_; word += static_cast<int>(blockDim.x)) {
      for (int i = 0; i < buffers; ++i) words(i)[word] = {lowest, lowest, lowest, lowest};
    }
  }

  __device__ uint4* words(int buffer) const { return words_ + buffer * size_; }
  __device__ int token_of(int word) const { return (first_ + word) * kOfWord; }

  // Issues the copy of a row into a free buffer. wait() waits for the newest copy into it.
  __device__ __forceinline__ void copy(const LogitRow& row, int buffer) {
    if (threadIdx.x == 0) wait(buffer);  // for a copy without an earlier wait
    turns_.copies ^= 1u << buffer;
    if (threadIdx.x != 0) return;
    ptx::mbar_arrive_expect(&shared_.copied[buffer], static_cast<uint32_t>(count_) * kWordBytes);
    if (count_ == 0) return;
    ptx::bulk_load(words(buffer), static_cast<const uint4*>(row.logits) + first_,
                   static_cast<uint32_t>(count_) * kWordBytes, &shared_.copied[buffer]);
  }
  __device__ __forceinline__ void wait(int buffer) const {
    ptx::mbar_wait(&shared_.copied[buffer], ~(turns_.copies >> buffer) & 1u);
  }

  // Waits for row_of(), and forbids tokens by its grammar, if any row of `logits` has one, in place.
  template <typename Logits, typename RowOf>
  __device__ __forceinline__ void receive(int buffer, const Logits& logits, RowOf row_of) const {
    wait(buffer);
    if (logits.allowed != nullptr || logits.allowed_words != nullptr)
      forbid(words(buffer), count_, token_of(0), row_of());
  }

  // Returns CTA i's value to lane i, 0 past the last. Synchronizes each CTA.
  __device__ __forceinline__ uint64_t exchange(uint64_t value, Fold how) {
    return exchange_by_call(shared_, value, how, turns_.exchanges++);
  }
  __device__ __forceinline__ Sums exchange(const Sums& own) {
    const uint64_t of_cta = exchange(own.mass << 16 | own.count, Fold::kSum);  // fewer than 2^16 tokens
    return {static_cast<uint32_t>(of_cta) & 0xffffu, of_cta >> 16};
  }
  __device__ __forceinline__ uint64_t largest(uint64_t value) {
    return fold(exchange(value, Fold::kLargest), Fold::kLargest);
  }
  // Copies `own` to `all` of every CTA, after the preceding CTAs' values, `total` in all. Needs an exchange after the
  // last write of `own` and read of `all`. A separate mbarrier, as a CTA without tokens is not waited for.
  __device__ __forceinline__ void gather(const uint64_t* own, uint32_t count, uint32_t before, uint32_t total,
                                         uint64_t* all) {
    if (threadIdx.x == 0) ptx::mbar_arrive_expect(&shared_.gathered, 8 * total);
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) {
#pragma unroll 1
      for (uint32_t rank = 0; rank < ptx::cluster_size(); ++rank)
        ptx::tell(&all[before + i], own[i], &shared_.gathered, rank);
    }
    ptx::mbar_wait(&shared_.gathered, turns_.lists++ & 1u);
  }

  // Calls f(word) for the first words of this lane's batches, ascending: a CTA has a multiple of kLanes warps.
  template <typename F>
  __device__ __forceinline__ void each_batch(F f) const {
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) / 32; i < size_ / (32 * kBatch); i += static_cast<int>(blockDim.x) / 32)
      f(i / kLanes * kLanes * kNoiseRun + i % kLanes * 32 + static_cast<int>(threadIdx.x) % 32);
  }
  // Calls f(first token, largest logit, word) for this lane's words.
  template <typename HasAny, typename F>
  __device__ __forceinline__ void each_word(int buffer, HasAny /*has_any*/, F f) const {
    each_batch([&](int first) {
#pragma unroll 1
      for (int word = first; word < first + kBatch * kApart; word += kApart) {
        const uint4 numbers = words(buffer)[word];
        f(token_of(word), largest_of_word(numbers), numbers);
      }
    });
  }
  static __device__ int of_word() { return kOfWord; }
  static __device__ __forceinline__ float number(const uint4& word, int i) {
    const int at = Stored::kWide ? i : i / 2;
    const uint32_t first = at & 1 ? word.y : word.x, second = at & 1 ? word.w : word.z, bits = at & 2 ? second : first;
    return Stored::value(Stored::kWide ? bits : bits >> i % 2 * 16 & 0xffffu);
  }
  template <typename F>
  static __device__ __forceinline__ float sum_of_word(const uint4& word, F f) {
    const uint32_t registers[4] = {word.x, word.y, word.z, word.w};
    const Stored stored(kDType);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kOfWord; ++i) sum += f(stored.value(number_of(stored, registers, i)));
    return sum;
  }
  static __device__ __forceinline__ float largest_of_word(const uint4& word) {
    const uint32_t registers[4] = {word.x, word.y, word.z, word.w};
    return Stored::largest_of(registers);
  }

  // ---- the row as top_tokens.cuh reads it: a thread's words are blockDim.x apart

  struct Best {
    float logit;
    static constexpr bool nan = false;
  };
  // Returns this thread's largest logit, of a slice that has arrived and is clean.
  __device__ __forceinline__ Best best_of_words() const {
    wait(0);
#pragma unroll 1
    while (true) {
      float best = -kInfinity;
#pragma unroll 4
      for (int word = static_cast<int>(threadIdx.x); word < size_; word += own_stride())
        best = larger_or_nan(best, largest_of_word(words_[word]));
      if (!__syncthreads_or(!(best < kInfinity))) return {best};
      mend(words_, count_, false);
    }
  }
  static __device__ void apply(const Peak&) {}
  static __device__ int own_begin() { return static_cast<int>(threadIdx.x) / 32 * 32; }
  static __device__ int own_stride() { return static_cast<int>(blockDim.x); }
  __device__ int num_words() const { return size_; }
  __device__ uint4 clean_word_at(int word) const { return words_[word]; }
  static __device__ bool stands() { return true; }
  __device__ float raw(int token) const { return Stored::value(Stored::bits(words_, token - token_of(0))); }
  __device__ float logit(int token) const { return raw(token); }
  // Returns its blocks of `size` tokens, which divides runs.
  __device__ Blocks own_blocks(int size) const { return {token_of(0) / size, 1, ceil_div(token_of(count_), size)}; }

  // Returns the largest logit's first token, ranked(), once the row is clean. kByCall: the kernel has other exchanges.
  template <bool kByCall>
  __device__ __forceinline__ uint64_t best_of_row(int buffer, bool& bad) {
#pragma unroll 1
    while (true) {
      const uint64_t own = best_of_thread(words(buffer));
      const uint64_t of_cta =
          kByCall ? exchange(own, Fold::kLargest) : exchange_of(shared_, own, Fold::kLargest, turns_.exchanges++);
      const uint64_t best = fold(of_cta, Fold::kLargest);
      const bool is_bad = best == kHasNan || best == kNoneFinite;
      bad |= is_bad;
      if (!is_bad && ranked_value(best) < kInfinity) return best | kTokenBit;
      mend(words(buffer), count_, best == kNoneFinite);
    }
  }

  // Cleans a row with a known distribution, which has arrived in buffer 0.
  __device__ __forceinline__ void apply(const RowDistribution& known) const {
    if (known.bad || !(known.scale.peak < Stored::largest())) mend(words_, count_, known.uniform);
  }

  // Returns the range of a row, which is clean afterwards.
  __device__ __forceinline__ Range range_of_row(int buffer, uint32_t parts, bool& bad) {
#pragma unroll 1
    while (true) {
      float best = -kInfinity;
      each_batch([&](int word) { best = larger_or_nan(best, largest_of_batch(words(buffer) + word)); });
      const uint32_t key = best != best ? ~0u : order_key<ScalarMath>(best + 0.0f);
      const Range all(exchange(Range::of_thread(key, parts), Fold::kHalves));
      if (all.peak < order_key<ScalarMath>(kInfinity)) return all;
      bad |= all.peak == ~0u;
      mend(words(buffer), count_, false);
    }
  }

 private:
  static constexpr uint64_t kHasNan = ~uint64_t{0}, kNoneFinite = 0, kTokenBit = 0x80000000u;

  static __device__ __forceinline__ uint64_t exchange_of(SliceShared& shared, uint64_t value, Fold how, uint32_t turn) {
    const uint32_t lane = threadIdx.x % 32, at = turn & 1, ctas = ptx::cluster_size();
    value = fold(value, how);
    if (lane == 0) shared.of_warps[at][threadIdx.x / 32] = value;
    __syncthreads();
    if (threadIdx.x < 32) {
      value = fold(lane < blockDim.x / 32 ? shared.of_warps[at][lane] : 0, how);
      if (lane == 0) ptx::mbar_arrive_expect(&shared.exchanged[at], 8 * ctas);
      if (lane < ctas) ptx::tell(&shared.of_ctas[at][ptx::cluster_rank()], value, &shared.exchanged[at], lane);
    }
    ptx::mbar_wait(&shared.exchanged[at], turn >> 1 & 1);
    return lane < ctas ? shared.of_ctas[at][lane] : 0;
  }
  // Not inlined: most rows need several exchanges.
  static __device__ __attribute__((noinline)) uint64_t exchange_by_call(SliceShared& shared, uint64_t value, Fold how,
                                                                        uint32_t turn) {
    return exchange_of(shared, value, how, turn);
  }
  static __device__ __forceinline__ float largest_of_batch(const uint4* words) {
    float most[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) most[i] = largest_of_word(words[kApart * i]);
    return largest_or_nan(most);
  }

  // Returns this thread's largest logit if it is the warp's. Few lanes search its first token.
  __device__ __forceinline__ uint64_t best_of_thread(const uint4* words) const {
    float best = -kInfinity;
    int batch_of_best = static_cast<int>(threadIdx.x) % 32;
    each_batch([&](int word) {
      const float of_lane = largest_of_batch(words + word);
      if (of_lane <= best || best != best) return;
      best = of_lane;
      batch_of_best = word;
    });
    const uint32_t key = best != best ? ~0u : order_key<ScalarMath>(best + 0.0f);
    if (key != __reduce_max_sync(~0u, key) || best == -kInfinity) return kNoneFinite;
    if (best != best) return kHasNan;
#pragma unroll 1
    for (int word = batch_of_best;; word += kApart) {
      const uint4 loaded = words[word];
      if (largest_of_word(loaded) != best) continue;
      const uint32_t of_word[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
      const Stored stored(kDType);
      uint32_t equal = 0;
#pragma unroll
      for (int i = 0; i < kOfWord; ++i) equal |= uint32_t{stored.value(number_of(stored, of_word, i)) == best} << i;
      return ranked(best, token_of(word) + __ffs(static_cast<int>(equal)) - 1) & ~kTokenBit;
    }
  }

  // A NaN stays, even if forbidden, for the row is bad then.
  static __device__ __attribute__((noinline)) void forbid(uint4* words, int count, int first, LogitRow row) {
    const Stored stored(kDType);
    const uint32_t infinity = stored.infinity(), sign = Stored::kWide ? 0x80000000u : 0x8000u;
    const auto left = [&](uint32_t bits, bool allowed) {
      return allowed || (bits & ~sign) > infinity ? bits : infinity | sign;
    };
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) {
      const int token = first + i * kOfWord;
      uint32_t allowed = 0;
      if (row.allowed_words != nullptr) allowed = static_cast<uint32_t>(row.allowed_words[token / 32]) >> token % 32;
#pragma unroll 1
      for (int j = 0; j < kOfWord && row.allowed_words == nullptr; ++j)
        allowed |= uint32_t{row.allowed[token + j] != 0} << j;
      uint4 word = words[i];
#pragma unroll 1
      for (int j = 0; j < 4; ++j, allowed >>= kOfWord / 4) {  // rotates the registers
        const uint32_t kept = Stored::kWide
                                  ? left(word.x, allowed & 1u)
                                  : left(word.x & 0xffffu, allowed & 1u) | left(word.x >> 16, allowed & 2u) << 16;
        word = {word.y, word.z, word.w, kept};
      }
      words[i] = word;
    }
    ptx::fence_proxy_async();
    __syncthreads();
  }

  // Cleans the slice in place; zeros if no logit of the row is finite. Rare.
  static __device__ __attribute__((noinline)) void mend(uint4* words, int count, bool uniform) {
    const Stored stored(kDType);
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x))
      words[i] = clean_word(stored, uniform ? uint4{} : words[i], ~0u);
    ptx::fence_proxy_async();
    __syncthreads();
  }

  SliceShared& shared_;
  uint4* const words_;
  const int size_, first_, count_;
  SliceTurns turns_;
};

}  // namespace pagedtree::cuda
