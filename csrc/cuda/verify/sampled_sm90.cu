// Walks over rows on chip: greedy, or by temperature alone. One cluster per tree; while a level is worked on, the row
// of the first child is on its way.
#include "core/engine.h"
#include "core/verify/rules.h"
#include "cuda/engine.h"
#include "cuda/logits_slice.cuh"
#include "cuda/verify/near_tree.cuh"
#include "cuda/verify/sampled.h"

namespace pagedtree::cuda {
namespace {

constexpr int kChipCtas = 3;  // share an SM

struct ChipShared {
  SliceShared slice;
  uint32_t bound;  // an order_key
  NearTree tree;
  alignas(kWordBytes) uint4 words[1];  // of the buffers; then the least words of the groups' noise, one for each word
};

// The race among clean words of a slice. A warp looks at its word with the largest bound next, until none reaches the
// best score of the CTA.
template <DType kDType>
struct ChipRace {
  using Slice = LogitsSlice<kDType>;
  const Slice& slice;
  uint32_t* const least;
  const uint64_t seed;
  Scale scale;

  struct Bound {
    float best = -kInfinity;
    int word = 0;
  };

  __device__ __forceinline__ void draw_groups(int64_t position) const {
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
        const float bound = scale(Slice::largest_of(words[word])) + noise_bound<ScalarMath>(least[word]);
        const bool is_left = (bound < before.best) | ((bound == before.best) & (word > before.word));
        const bool takes = is_left & (bound > next.best);  // without branches
        next.best = takes ? bound : next.best;
        next.word = takes ? word : next.word;
      }
    });
    return next;
  }
  __device__ __forceinline__ uint64_t best_of_warp(const uint4* words, int64_t position, uint32_t& shared_bound) const {
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
      const float logit = stored.value(stored.bits(words + word, lane % Slice::kOfWord));
      const float noise = noise_of_word(seed, position, static_cast<uint32_t>(token), least[word]);
      const float score = lane < Slice::kOfWord ? scale(logit) + noise : -kInfinity;
      const uint32_t reached = __reduce_max_sync(~0u, order_key<ScalarMath>(score + 0.0f));
      if (lane == 0) atomicMax(&shared_bound, reached);
      if (score > -kInfinity) best = max_of(best, ranked(score, token));
      const Bound next = next_bound(words, bound);
      if (lane == from) bound = next;
    }
  }
};

// The children of a node, listed by the lanes of each warp while the row is on its way.
struct Children {
  const int32_t first;
  int32_t rest, own = -1, own_token = -1;  // `rest`: the first that no lane has
  int32_t status;                          // of the walk, if it follows the list to there

  __device__ __forceinline__ explicit Children(TreeWalk& walk) : first(walk.first_child()), rest(first) {
    const int32_t before = walk.status;
#pragma unroll 1
    for (uint32_t i = 0; rest >= 0 && i < 32; ++i) {
      if (threadIdx.x % 32 == i) {
        own = rest;
        own_token = walk.token_of(rest);
      }
      rest = walk.next_sibling(rest);
    }
    status = walk.status;
    walk.status = before;
  }
  // As TreeWalk::child_with().
  __device__ __forceinline__ int32_t with(int32_t token, TreeWalk& walk) {
    const uint32_t hits = __ballot_sync(~0u, own >= 0 && own_token == token);
    if (hits != 0) return __shfl_sync(~0u, own, __ffs(static_cast<int>(hits)) - 1);
    walk.status |= status;
    while (rest >= 0 && walk.token_of(rest) != token) rest = walk.next_sibling(rest);
    return rest;
  }
};

template <DType kDType, bool kSampled>
__global__ void __launch_bounds__(kRowThreads, kChipCtas)
    walk_sm90_kernel(const __grid_constant__ VerifyParams p, int buffers) {
  auto& shared = ptx::shared<ChipShared>();
  TreeWalk walk(p, static_cast<int64_t>(ptx::cluster_index()));
  const Sampling sampling = sampling_of(p.sampling, walk.b);
  const bool greedy = !kSampled || sampling.temperature == 0.0f;
  if (!greedy && has_filter(sampling, static_cast<int32_t>(p.logits.vocab))) {
    if (leads_cluster()) p.status[walk.b] = kLeftToOthers;
    return;
  }
  LogitsSlice<kDType> slice(shared.slice, shared.words, p.logits, buffers);
  ChipRace<kDType> race{slice,
                        reinterpret_cast<uint32_t*>(slice.words(buffers)),
                        greedy ? 0 : static_cast<uint64_t>(p.seeds[walk.b]),
                        {0.0f, greedy ? 1.0f : inverse_temperature(sampling.temperature)}};
  int at = 0;
  bool more = walk.num_nodes > 0;
  if (more) slice.copy(p.logits, walk.row(), at);
  begin_near(walk, shared.tree);
#pragma unroll 1
  while (more) {
    Children children(walk);
    const bool sends_ahead = buffers > 1 && children.first >= 0;
    if (sends_ahead) slice.copy(p.logits, walk.rows.begin + children.first, 1 - at);
    const int64_t position = greedy ? 0 : position_at(root_position_of(p, walk.b), walk.depth);
    if (!greedy) {
      race.draw_groups(position);
      if (threadIdx.x == 0) shared.bound = order_key<ScalarMath>(-kInfinity);
    }
    slice.wait(at);
    bool bad = false;
    uint64_t best = slice.best_of_row(at, bad);
    if (bad) walk.status |= kBadRow;
    if (!greedy) {
      race.scale.peak = ranked_value(best);
      best = slice.largest(race.best_of_warp(slice.words(at), position, shared.bound));
    }
    const int32_t token = ranked_id(best);
    if (leads_cluster()) walk.emit(token);
    const int32_t child = children.with(token, walk);
    more = walk.descend(child);
    if (sends_ahead && child == children.first) {
      at = 1 - at;
    } else if (more) {
      slice.copy(p.logits, walk.row(), at);
    }
  }
  for (int i = 0; i < 2; ++i) slice.wait(i);  // no copy arrives when its CTA has gone, nor is a CTA told anything then
  if (leads_cluster()) walk.finish();
  ptx::meet_cluster();
}

}  // namespace

bool walk_on_chip(const VerifyParams& p, const ExecContext& ctx) {
  const LogitsParams& logits = p.logits;
  const int64_t size = logits.dtype == DType::kFloat32 ? 4 : 2;
  const bool in_words = reinterpret_cast<uintptr_t>(logits.data) % kWordBytes == 0 &&
                        logits.vocab * size % kWordBytes == 0 && logits.row_stride * size % kWordBytes == 0;
  const bool has_grammar = logits.allowed != nullptr || logits.allowed_words != nullptr;
  const MatrixEngine engine = resolved_engine(engine_from_environment(), device_limits());
  if (device_limits().capability != 90 || engine != MatrixEngine::kWgmma) return false;
  if (!in_words || has_grammar || p.options.used) return false;
  bool walked = false;
  with_logit_dtype(logits.dtype, [&](auto dtype) {
    const bool sampled = p.sampling.temperature != nullptr;
    const auto kernel = sampled ? walk_sm90_kernel<dtype, true> : walk_sm90_kernel<dtype, false>;
    const auto most_bytes = static_cast<size_t>(device_limits().max_shared_bytes / 2 - 512);  // two CTAs share an SM
    const auto words = [&](unsigned ctas) { return LogitsSlice<dtype>::num_words(logits.vocab, ctas); };
    const auto bytes = [&](unsigned ctas, int buffers) {
      return sizeof(ChipShared) + static_cast<size_t>(words(ctas)) * (kWordBytes * buffers + (sampled ? 4 : 0));
    };
    unsigned ctas = ctas_of_row(kernel, p.batch, logits.vocab);
    const unsigned most_ctas = static_cast<unsigned>(max_cluster(kernel));
    while (bytes(ctas, 1) > most_bytes && 2 * ctas <= most_ctas) ctas *= 2;
    walked = bytes(ctas, 1) <= most_bytes;
    if (!walked) return;
    // Rows that no walk may need are read only where SMs would idle.
    const bool idle = ctas * p.batch <= device_limits().num_sms;
    const int buffers = idle && bytes(ctas, 2) <= most_bytes ? 2 : 1;
    const unsigned threads = static_cast<unsigned>(min_of(words(ctas) / LogitsSlice<dtype>::kBatch, kRowThreads));
    launch_clusters(kernel, dim3(static_cast<unsigned>(p.batch) * ctas), dim3(threads), ctas, bytes(ctas, buffers),
                    ctx.stream, p, buffers);
  });
  return walked;
}

}  // namespace pagedtree::cuda
