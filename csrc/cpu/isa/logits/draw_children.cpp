// Draws a draft node's children, and writes the filtered distribution.
#include "core/drafting.h"
#include "cpu/isa.h"
#include "cpu/isa/logits/masses.h"
#include "cpu/isa/logits/noise.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

// probability = mass / total. A token without mass is never drawn.
template <typename T>
struct Masses {
  const LogitRow& row;
  Scale scale;
  Filter filter;

  vuint at(int64_t t) const {
    const vfloat logit = load_logits<T>(row, t);
    const vfloat x = scale(logit);
    return weight_of<VectorMath>(x) & bits<vuint>(kept_lanes(filter, logit, x, t));
  }
};

template <typename T>
static inline uint64_t write_distribution(const Masses<T>& masses, float* probs) {
  const int64_t vocab = masses.row.vocab;
  WeightSum sum;
  for (int64_t t = 0; t < vocab; t += kLanes) sum.add(masses.at(t));
  const float scale = static_cast<float>(1.0 / static_cast<double>(sum.whole()));
  for (int64_t t = 0; t < vocab; t += kLanes) {
    const vfloat p = VectorMath::to_float(masses.at(t)) * scale;
    std::memcpy(probs + t, &p, static_cast<size_t>(min_of<int64_t>(kLanes, vocab - t)) * sizeof(float));
  }
  return sum.whole();
}

// Draws without replacement: the largest log-mass + Gumbel noise, best first (Kool et al., ICML 2019).
template <typename T>
static inline int32_t draw_distinct(const Masses<T>& masses, const ChildrenDraw& draw) {
  const int32_t count = draw.count;
  int32_t size = 0;
  Noise noise(draw.seed, draw.position, draw.use);
  const auto log_of = [](vfloat mass) { return select(mass > 0.0f, log_exact<VectorMath>(mass), splat(-kInfinity)); };
  for (int64_t begin = 0; begin < masses.row.vocab; begin += kGroupsTokens) {
    vfloat of_tokens[kNoiseGroup];
    for (int j = 0; j < kNoiseGroup; ++j) {
      const int64_t t = begin + j * kLanes;
      of_tokens[j] = t < masses.row.vocab ? VectorMath::to_float(masses.at(t)) : vfloat{};
    }
    const vfloat most = log_of(largest_of_groups(of_tokens));
    const auto least = [&] { return size == count ? draw.scores[count - 1] : -kInfinity; };
    if (lane_bits(most + kMaxNoise > least()) == 0) continue;
    const vfloat bounds = most + noise.bounds(begin);
    for (uint32_t lanes = lane_bits(bounds > least()); lanes != 0; lanes &= lanes - 1) {
      const int lane = __builtin_ctz(lanes);
      for (int at = lane * kNoiseGroup; at < (lane + 1) * kNoiseGroup && bounds[lane] > least(); ++at) {
        const float mass = of_tokens[at / kLanes][at % kLanes];
        if (mass == 0.0f) continue;
        const float score = log_exact<ScalarMath>(mass) + noise.of_token(begin + at);
        size = insert_ranked(draw.scores, draw.tokens, size, count, score, begin + at);
      }
    }
  }
  return size;
}

// Draws independently: the first token whose cumulative mass exceeds a random 64-bit fraction of the total.
template <typename T>
static inline int32_t draw_independent(const Masses<T>& masses, uint64_t total, const ChildrenDraw& draw) {
  uint64_t targets[kMaxTreeNodes];
  int32_t order[kMaxTreeNodes];
  for (int32_t r = 0; r < draw.count; ++r) {
    uint32_t words[4];
    philox<ScalarMath>(draw.seed, draw.position, static_cast<uint32_t>(r), draw.use, words);
    const uint64_t target = fraction_of(total, words[0], words[1]);
    int32_t at = r;
    for (; at > 0 && targets[at - 1] > target; --at) {
      targets[at] = targets[at - 1];
      order[at] = order[at - 1];
    }
    targets[at] = target;
    order[at] = r;
  }
  int32_t next = 0;
  uint64_t sum = 0;
  for (int64_t t = 0; t < masses.row.vocab && next < draw.count; t += kLanes) {
    const vuint mass = masses.at(t);
    for (int i = 0; i < kLanes; ++i) {
      sum += mass[i];
      for (; next < draw.count && targets[next] < sum; ++next) draw.tokens[order[next]] = t + i;
    }
  }
  return draw.count;
}

template <typename T>
static inline void draw_from(const Masses<T>& masses, const ChildrenDraw& draw) {
  const uint64_t total = write_distribution(masses, draw.probs);
  int32_t size = draw.law == GrowthLaw::kIid ? draw_independent(masses, total, draw) : draw_distinct(masses, draw);
  for (int32_t r = 0; r < size; ++r) draw.scores[r] = log_exact<ScalarMath>(draw.probs[draw.tokens[r]]);
  for (; size < draw.count; ++size) {
    draw.tokens[size] = -1;
    draw.scores[size] = -kInfinity;
  }
}

void draw_children(const LogitRow& row, const Sampling& sampling, const ChildrenDraw& draw, FilterScratch& scratch) {
  const RowDistribution found = find_distribution(row, sampling, scratch);
  with_logits(found, [&]<typename T>() { draw_from(Masses<T>{row, found.scale, found.filter}, draw); });
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
