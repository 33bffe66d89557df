// `Rows` of core/verify/rules.h on lists of kept tokens. Sums equal rules.cuh's bitwise: other tokens add zeros there.
// A row without a list leaves its tree to rules_kernel, and the rest of its walk is void.
#pragma once

#define PT_WITH_WALKS
#include "core/verify/table.h"
#include "cuda/logits/kept_tokens.cuh"
#include "cuda/logits/on_chip.h"
#include "cuda/verify/rules.cuh"

namespace pagedtree::cuda {

static_assert(KeptList::kMost == KeptCandidates::kMost);

struct KeptShared {
  BlockShared block;
  NodeDistributions distributions;  // at a node
  KeptCandidates notes;
  KeptList list;                                // in each CTA
  uint16_t first_of_block[kMaxMassBlocks + 1];  // first kept token per block
  NearTree tree;
  MassTable sums, drafts;
  double total;  // of the sums
  int32_t tried[kMaxTreeNodes];
  int16_t parents[kMaxTreeNodes];
  int16_t depths[kMaxTreeNodes];
};
static_assert(sizeof(KeptShared) <= 99 << 10);  // all GPUs from sm_80

// Not inlined: few drafts are logits.
inline __device__ __attribute__((noinline)) float draft_of(int32_t token) {
  return DraftMasses(ptx::shared<KeptShared>().distributions).at(token);
}

// The target's row, in memory.
template <DType kDType>
struct RowInMemory {
  RowSlice<kDType> slice;

  __device__ RowInMemory(KeptShared& shared, bool is_known)
      : slice{LogitReader<kDType>(shared.distributions.target.row), shared.block} {
    if (is_known) slice.row.apply(shared.distributions.target);
  }
};

// Finds the blocks of a list that all threads have written.
__device__ __forceinline__ void find_blocks(KeptShared& shared, int32_t vocab) {
  __syncthreads();
  const auto num_blocks = static_cast<uint32_t>(MassTable::num_blocks(vocab));
#pragma unroll 1
  for (uint32_t block = threadIdx.x; block <= num_blocks; block += blockDim.x)
    shared.first_of_block[block] =
        static_cast<uint16_t>(shared.list.place_of(static_cast<int32_t>(block) * kMassBlock));
  __syncthreads();
}

// Lists the tokens that sequence b keeps and writes the distribution (`again`: known). Returns false if it cannot.
template <typename Row>
__device__ __attribute__((noinline)) bool find_kept(const SamplingParams& p, int64_t b, bool again) {
  auto& shared = ptx::shared<KeptShared>();
  auto& [size, tokens, masses, drafts] = shared.list;
  KeptCandidates& notes = shared.notes;
  RowDistribution& target = shared.distributions.target;
  if (threadIdx.x == 0) size = notes.num_own = 0;
  __syncthreads();
  const int32_t vocab = target.row.vocab;
  Sampling sampling = sampling_of(p, b);
  if (sampling.temperature == 0.0f) sampling = {1.0f, 0, 0.0f, 0.0f, false};  // top-p keeps the first token alone
  if (!has_filter(sampling, vocab)) return false;
  Row row(shared, again);
  KeptTokens<decltype(row.slice)> kept{row.slice,
                                       notes,
                                       sampling,
                                       vocab,
                                       min_p_bound(sampling.min_p),
                                       {0.0f, inverse_temperature(sampling.temperature)}};
  uint64_t last = 0;
  if (again) {
    kept.scale = target.scale;
    kept.gather(0, target.filter.min_logit, false);
    if (kept.size > KeptCandidates::kMost) return false;
    last = ranked(target.filter.min_logit, target.filter.tie_end - 1);
  } else {
    bool bad = false;
    last = kept.last_of_row(0, bad);
    if (last == kept.kTooMany || last == kept.kNoneFinite) return false;
    if (threadIdx.x == 0)
      target = {target.row, kept.scale, {ranked_value(last), ranked_id(last) + 1, kept.min_x}, -1, false, bad};
  }
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < kept.size; i += blockDim.x) {
    if (notes.all[i] >= last) notes.own[atomicAdd(&size, 1u)] = notes.all[i];
  }
  __syncthreads();
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < size; i += blockDim.x) {
    const uint64_t rank = notes.own[i];
    uint32_t place = 0;
    bool is_best = true;
#pragma unroll 1
    for (uint32_t j = 0; j < size; ++j) {
      place += static_cast<uint32_t>(notes.own[j]) > static_cast<uint32_t>(rank);  // complements of tokens
      is_best &= notes.own[j] <= rank;
    }
    if (is_best) target.best = ranked_id(rank);
    tokens[place] = ranked_id(rank);
    masses[place] = mass_of<ScalarMath>(target.scale(ranked_value(rank)));
    drafts[place] = draft_of(ranked_id(rank));
  }
  find_blocks(shared, vocab);
  return true;
}

// max(m - c q, 0) per kept token, 0 if tried, see ResidualMasses.
struct KeptResiduals {
  const KeptShared& shared;
  float factor = 0.0f;
  bool with_draft, counts_drafts;
  TriedTokens tried;

  __device__ KeptResiduals(KeptShared& in, double c, int32_t num_tried, bool only_drafted)
      : shared(in), counts_drafts(only_drafted), tried{in.tried, num_tried} {
    with_draft = c != 0.0 && in.distributions.draft.row.logits != nullptr;
    if (with_draft) factor = draft_factor(in.distributions, c);
    if (counts_drafts && !with_draft) tried.size = 0;
  }
  __device__ __forceinline__ float operator()(uint32_t i) const {
    float left = shared.list.masses[i];
    const float q = with_draft ? shared.list.drafts[i] : 0.0f;
    if (with_draft) left = residual_mass<ScalarMath>(left, factor, q);
    if (tried.size > 0 && (!counts_drafts || q > 0.0f) && tried.contains(shared.list.tokens[i])) left = 0.0f;
    return left;
  }
};

// The draft's probabilities, 0 for tried tokens. Only the last tried token's block changes.
struct UntriedDrafts {
  static constexpr int kRows = 1, kBatch = 4, kSums = 1;

  DraftMasses draft;
  TriedTokens tried;
  int only_block;  // -1: all

  __device__ int32_t vocab() const { return draft.masses.vocab(); }
  template <int kCount>
  __device__ __forceinline__ void load(int token, Four* fours) const {
    draft.masses.load<kCount>(token, fours);
  }
  __device__ __forceinline__ void values(int token, const Four* loaded, float (&sums)[1][4]) const {
    draft.values(token, loaded[0], sums[0]);
    const uint32_t gone = tried_of_four(tried, token);
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[0][i] = gone >> i & 1u ? 0.0f : sums[0][i];
  }
};

// Sums value(i) of kept tokens per block and group. Two values commute; more are added in the order of sum_blocks().
template <typename Value>
__device__ __forceinline__ double sum_kept(KeptShared& shared, int32_t vocab, const Value& value) {
  const uint32_t lane = threadIdx.x % 32, num_blocks = static_cast<uint32_t>(MassTable::num_blocks(vocab));
  __syncthreads();
#pragma unroll 1
  for (uint32_t group = threadIdx.x / 32; group * kMassRadix < num_blocks; group += blockDim.x / 32) {
    const uint32_t block = group * kMassRadix + lane;
    const uint32_t begin = block < num_blocks ? shared.first_of_block[block] : 0;
    const uint32_t end = block < num_blocks ? shared.first_of_block[block + 1] : 0;
    float sum = 0.0f;
    for (uint32_t i = begin; i < min_of(end, begin + 2); ++i) sum += value(i);
#pragma unroll 1
    for (uint32_t lanes = __ballot_sync(~0u, end - begin > 2); lanes != 0; lanes &= lanes - 1) {
      const int of_lane = __ffs(static_cast<int>(lanes)) - 1;
      const uint32_t from = __shfl_sync(~0u, begin, of_lane), to = __shfl_sync(~0u, end, of_lane);
      float sums[4]{};
#pragma unroll 1
      for (uint32_t i = from; i < to; ++i) {
        const float mass = value(i);
        const uint32_t place = static_cast<uint32_t>(shared.list.tokens[i]) % kMassSums;
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j) {
          if (place == 4 * lane + j) sums[j] += mass;
        }
      }
      const float of_block = sum_of_block(sums);
      if (static_cast<int>(lane) == of_lane) sum = of_block;
    }
    shared.sums.blocks[block] = sum;
    double of_group = 0.0;
#pragma unroll 1
    for (uint32_t lanes = __ballot_sync(~0u, begin < end); lanes != 0; lanes &= lanes - 1) {
      of_group += static_cast<double>(__shfl_sync(~0u, sum, __ffs(static_cast<int>(lanes)) - 1));
    }
    if (lane == 0) shared.sums.groups[group] = of_group;
  }
  __syncthreads();
  const double total = shared.sums.total(vocab);
  if (threadIdx.x == 0) shared.total = total;
  return total;
}

// MassSearch::pick() over runs of `width` tokens, among kept tokens [begin, end); narrows both to the picked run.
template <typename Value>
__device__ __forceinline__ void pick_run(MassSearch& search, const KeptShared& shared, const Value& value,
                                         int32_t width, uint32_t& begin, uint32_t& end) {
  uint32_t picked = begin, picked_end = begin;
  double sum = search.before;
#pragma unroll 1
  for (uint32_t i = begin; i < end && !(sum > search.bound && picked_end > picked);) {
    const uint32_t first = i;
    const int32_t run = shared.list.tokens[i] / width;
    double mass = 0.0;
    for (; i < end && shared.list.tokens[i] / width == run; ++i) mass += static_cast<double>(value(i));
    if (!(mass > 0.0)) continue;
    picked = first;
    picked_end = i;
    search.before = sum;
    sum += mass;
  }
  begin = picked;
  end = picked_end;
}

// kSwor: sums of drafts may be needed.
template <typename Row, bool kSwor>
class KeptRows {
 public:
  __device__ KeptRows(const RatioParams& p, KeptShared& shared)
      : shared_(shared),
        tried_{shared.tried},
        counts_drafts_(p.law != DraftLaw::kOneHot),
        sums_drafts_(kSwor && p.law == DraftLaw::kSwor) {}

  static __device__ bool leads() { return leads_cluster(); }
  static __device__ bool leads_cta() { return threadIdx.x == 0; }
  static __device__ void sync() { ptx::meet_cluster(); }
  __device__ void begin(TreeWalk& walk) { begin_near(walk, shared_.tree); }
  __device__ void finish(TreeWalk& walk) const {
    if (failed_) walk.status = kLeftToOthers;
    if (leads()) walk.finish();
  }
  __device__ NodeDistributions& distributions() { return shared_.distributions; }
  __device__ AcceptedNodes accepted_nodes() { return {shared_.parents, shared_.depths}; }

  __device__ void open(const RatioParams& p, int64_t b, int64_t row, bool with_draft,
                       NodeDistributions& distributions) {
    clear_tried();
    find_both<false>(p, b, row, with_draft, distributions, [&](const SamplingParams& sampling) {
      find(sampling, b, false);
      if (failed_ && leads_cta()) distributions.target.bad = false;
      return sums(distributions, 0.0).residual;
    });
  }

  __device__ void open_again(const RatioParams& p, int64_t b, int64_t /*row*/) { find(p.verify.sampling, b, true); }

  __device__ double target(const NodeDistributions& /*distributions()*/, int32_t token) const {
    const int32_t at = place_of(token);
    return at < 0 ? 0.0 : static_cast<double>(shared_.list.masses[at]);
  }
  // 0 for dropped tokens: where target() is 0, no rule depends on it.
  __device__ double draft(const NodeDistributions& distributions, int32_t token) const {
    const int32_t at = place_of(token);
    return at < 0 ? 0.0 : static_cast<double>(shared_.list.drafts[at]) * distributions.draft_unit;
  }
  __device__ double residual(const NodeDistributions& distributions, double c, int32_t token) const {
    const int32_t at = place_of(token);
    if (at < 0) return 0.0;
    const float mass = shared_.list.masses[at];
    if (c == 0.0) return static_cast<double>(mass);
    return static_cast<double>(
        residual_mass<ScalarMath>(mass, draft_factor(distributions, c), shared_.list.drafts[at]));
  }

  __device__ MassSums sums(const NodeDistributions& distributions, double c) {
    MassSums all;
    if (failed_) return all;
    all.residual = sum_left(c, tried_.size, counts_drafts_);
    if (kSwor && sums_drafts_ && tried_.size > 0 && c != 0.0 && distributions.draft.row.logits != nullptr) {
      all.draft = sum_drafts(tried_.size, last_block_) * distributions.draft_unit;
      last_block_ = 0;
    }
    return all;
  }
  __device__ int32_t draw(const NodeDistributions& /*distributions()*/, double c, double u) {
    return failed_ ? 0 : draw_left(c, u, tried_.size, counts_drafts_);
  }
  __device__ double entropy(const NodeDistributions& distributions) {
    if (failed_) return 0.0;
    const KeptShared& shared = shared_;
    const double terms = sum_kept(shared_, distributions.target.row.vocab, [&shared](uint32_t i) {
      const float mass = shared.list.masses[i];
      return mass > 0.0f ? mass * log_exact<ScalarMath>(mass) : 0.0f;
    });
    return entropy_of(distributions.total, terms);
  }

  __device__ void clear_tried() { tried_.size = 0; }
  __device__ bool is_tried(int32_t token) const { return tried_.contains(token); }
  __device__ void mark_tried(int32_t token) {
    tried_.size = try_token(tried_.ids, token, tried_.size);
    if (last_block_ >= 0) last_block_ = static_cast<int32_t>(token / kMassBlock);
  }

  // Writes an open node.
  __device__ void write(ListedNode& node) const {
    if (ptx::cluster_rank() != 0) return;
    const auto& [size, tokens, masses, drafts] = shared_.list;
    if (leads_cta()) {
      node.distributions = shared_.distributions;
      node.list.size = failed_ ? 0 : size;
    }
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < size; i += blockDim.x) {
      node.list.tokens[i] = tokens[i];
      node.list.masses[i] = masses[i];
      node.list.drafts[i] = drafts[i];
    }
  }

 protected:
  // Returns a token's index in the list, or -1.
  __device__ int32_t place_of(int32_t token) const { return failed_ ? -1 : place_in_list(token); }
  static __device__ __attribute__((noinline)) int32_t place_in_list(int32_t token) {
    KeptList& list = ptx::shared<KeptShared>().list;
    const uint32_t at = list.place_of(token);
    return at < list.size && list.tokens[at] == token ? static_cast<int32_t>(at) : -1;
  }

  __device__ void find(const SamplingParams& sampling, int64_t b, bool again) {
    last_block_ = -1;
    failed_ = failed_ || !find_kept<Row>(sampling, b, again);
  }
  static __device__ __attribute__((noinline)) double sum_left(double c, int32_t num_tried, bool counts_drafts) {
    auto& shared = ptx::shared<KeptShared>();
    const int32_t vocab = shared.distributions.target.row.vocab;
    return sum_kept(shared, vocab, KeptResiduals(shared, c, num_tried, counts_drafts));
  }

  static __device__ __attribute__((noinline)) double sum_drafts(int32_t num_tried, int32_t only_block) {
    auto& shared = ptx::shared<KeptShared>();
    const DraftMasses draft(shared.distributions);
    sum_blocks(UntriedDrafts{draft, {shared.tried, num_tried}, only_block}, shared.drafts, shared.drafts);
    return shared.drafts.total(draft.masses.vocab());
  }

  static __device__ __attribute__((noinline)) int32_t draw_left(double c, double u, int32_t num_tried,
                                                                bool counts_drafts) {
    auto& shared = ptx::shared<KeptShared>();
    const int32_t vocab = shared.distributions.target.row.vocab;
    __syncthreads();
    MassSearch search{u * shared.total};
    const int32_t block = shared.sums.pick_block(vocab, search);
    uint32_t begin = shared.first_of_block[block], end = shared.first_of_block[block + 1];
    const KeptResiduals value(shared, c, num_tried, counts_drafts);
#pragma unroll 1
    for (int32_t width = kMassRadix; width > 0; width /= kMassRadix) pick_run(search, shared, value, width, begin, end);
    return begin < end ? shared.list.tokens[begin] : block * kMassBlock;
  }

  KeptShared& shared_;
  TriedTokens tried_;
  int32_t last_block_ = -1;  // of the last tried token; -1: the draft's row is not summed
  bool counts_drafts_, sums_drafts_, failed_ = false;
};

template <Rule kRule, typename Rows>
__device__ __forceinline__ void walk_by(const RatioParams& p, int64_t b, Rows rows) {
#define PT_WALK(op, Params, Name, walk, ...) \
  if constexpr (kRule == Rule::k##Name) walk(p, b, rows);
  PT_EACH_WALK(PT_WALK, PT_WALK)
#undef PT_WALK
}
// verify_block takes two kernels: clusters list all nodes, as no row depends on another; then CTAs walk the chains over
// the lists. Both are always launched, and the device decides: a node without a list (no filters, more than
// KeptList::kMost tokens, no finite logit; in memory a NaN; drafts' logits alike) leaves its chain, if the walk reaches
// it, to rules_kernel by kLeftToOthers.
template <Rule kRule>
constexpr bool kListsNodes = kRule == Rule::kBlock;

// `Rows` of listed nodes.
class ListedRows : public KeptRows<void, false> {
 public:
  using KeptRows::KeptRows;
  // Most loads do not wait for each other.
  __device__ void open(const RatioParams& p, int64_t /*b*/, int64_t row, bool /*with_draft*/,
                       NodeDistributions& /*distributions()*/) {
    clear_tried();
    __syncthreads();
    const ListedNode& node = p.nodes[row];
    auto& [size, tokens, masses, drafts] = shared_.list;
    const NodeDistributions distributions = node.distributions;
    const uint32_t count = node.list.size;
    uint32_t i = threadIdx.x;
#pragma unroll 1
    do {
      const int32_t token = node.list.tokens[i];
      const float mass = node.list.masses[i], draft = node.list.drafts[i];
      if (i < count) {
        tokens[i] = token;
        masses[i] = mass;
        drafts[i] = draft;
      }
      i += blockDim.x;
    } while (i < count);
    if (leads_cta()) {
      shared_.distributions = distributions;
      size = count;
    }
    failed_ = failed_ || count == 0;
    find_blocks(shared_, static_cast<int32_t>(p.verify.logits.vocab));
  }
  // Sums first: open() does not.
  __device__ int32_t draw(const NodeDistributions& distributions, double c, double u) {
    sums(distributions, c);
    return KeptRows::draw(distributions, c, u);
  }
};

template <Rule kRule, typename Row>
__device__ __forceinline__ void walk_kept(const RatioParams& p) {
  const int64_t at = ptx::cluster_index();
  KeptRows<Row, !kListsNodes<kRule>> rows(p, ptx::shared<KeptShared>());
  if constexpr (!kListsNodes<kRule>) {
    walk_by<kRule>(p, at, rows);
  } else if (const int64_t b = sequence_of_row(p.verify.cu_nodes, p.verify.batch, at); b >= 0) {
    ptx::meet_cluster();  // all CTAs have begun
    rows.open(p, b, at, p.law != DraftLaw::kOneHot && p.verify.first_child[at] >= 0, rows.distributions());
    rows.write(p.nodes[at]);
  }
}
// Returns the clusters of walk_kept().
template <Rule kRule>
int64_t count_kept(const RatioParams& p) {
  return kListsNodes<kRule> ? p.verify.logits.num_rows : p.verify.batch;
}

}  // namespace pagedtree::cuda
