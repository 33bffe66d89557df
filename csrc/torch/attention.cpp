#include "core/attention.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

#include "core/engine.h"
#include "core/head_dims.h"
#include "core/segments.h"
#include "torch/ops.h"
#include "torch/prepared.h"
#include "torch/values.h"

namespace pagedtree::ops {
namespace {

std::string alternatives(const std::vector<int64_t>& sizes) {
  std::string text;
  for (size_t i = 0; i < sizes.size(); ++i) {
    text += (i == 0 ? "" : i + 1 < sizes.size() ? ", " : " or ") + std::to_string(sizes[i]);
  }
  return text;
}

// Checks sizes of the arguments `k_name` and `v_name`.
void check_head_dims(const Check& check, int64_t k, int64_t v, const char* k_name, const char* v_name) {
  const auto fits = [&](const HeadDims& dims) { return dims.k == k && dims.v == v; };
  if (std::any_of(std::begin(kHeadDims), std::end(kHeadDims), fits)) return;
  std::vector<int64_t> of_k, of_v;
  for (const HeadDims& dims : kHeadDims) {
    if (std::find(of_k.begin(), of_k.end(), dims.k) == of_k.end()) of_k.push_back(dims.k);
    if (dims.k == k) of_v.push_back(dims.v);
  }
  if (of_v.empty()) check.fail(k_name, "head size " + alternatives(of_k), k);
  check.fail(v_name, "head size " + alternatives(of_v) + " with K's " + std::to_string(k), v);
}

PagedCache paged_cache(const Tensor& t) { return {t.const_data_ptr(), t.stride(0), t.stride(1), t.stride(2)}; }

void check_cache(const Check& check, const Tensor& q, const Tensor& t, int64_t head_dim, const char* name) {
  check.that(t.defined(), name, "a Tensor", "None");
  if (t.scalar_type() != q.scalar_type() && t.scalar_type() != ScalarType::Float8_e4m3fn) {
    check.fail(name, "q's dtype " + dtype_text(q.scalar_type()) + " or torch.float8_e4m3fn",
               dtype_text(t.scalar_type()));
  }
  check.tensor(t, name, {t.scalar_type()}, {"pages", "page_size", "Hkv", {"D", head_dim}}, Strides::kLastContiguous);
  if (t.size(1) < 1) check.fail(name, "a page size of at least 1", Check::text(t.sizes()));
  check.heads(t, name, "a number of heads that divides q's " + std::to_string(q.size(1)),
              [&](int64_t heads) { return heads >= 1 && q.size(1) % heads == 0; });
}

// Requires addresses and strides that are multiples of `bytes`.
void check_alignment(const Check& check, int64_t bytes, const Tensor& t, const char* name) {
  if (bytes == 1 || t.numel() == 0) return;
  bool aligned = reinterpret_cast<uintptr_t>(t.const_data_ptr()) % static_cast<uintptr_t>(bytes) == 0;
  for (int64_t d = 0; d < 3; ++d) {
    aligned = aligned && (t.size(d) == 1 || t.stride(d) * static_cast<int64_t>(t.element_size()) % bytes == 0);
  }
  if (aligned) return;
  check.fail(name, "an address and strides that are multiples of " + std::to_string(bytes) + " bytes",
             "strides " + Check::text(t.strides()) + " of " + std::to_string(t.element_size()) + " bytes");
}

// Checks a scale of an fp8 cache, one for all heads or one per head. Returns its stride.
int64_t check_scale(const Check& check, const OptionalTensor& scale, const Tensor& cache, const char* name) {
  if (!scale.has_value()) return 0;
  check.that(cache.scalar_type() == ScalarType::Float8_e4m3fn, name, "None for a cache that is not torch.float8_e4m3fn",
             "a tensor");
  if (scale->dim() == 0) {
    check.tensor(*scale, name, {ScalarType::Float}, {});
    return 0;
  }
  const int64_t heads = cache.size(2);
  check.that(scale->dim() == 1 && (scale->size(0) == heads || scale->size(0) == 1), name,
             "a scalar or of shape [" + std::to_string(heads) + "]", Check::text(scale->sizes()));
  check.tensor(*scale, name, {ScalarType::Float}, {"Hkv"});
  return scale->size(0) == 1 ? 0 : 1;
}

constexpr int64_t kMostSegmentBytes = int64_t{1} << 30;
constexpr float kDefaultScale = std::numeric_limits<float>::quiet_NaN();  // until the head size is known

// Arguments of a step, common to layers of a kind: references, or kept tensors.
template <typename Given, typename Optional>
struct StepOf {
  Given page_table, seq_lens, cu_seqlens_q;
  Optional tree_mask, tree_lens;
  std::optional<int64_t> max_seqlen_q;
  std::optional<double> scale;
  double softcap;
  int64_t window;
  Optional plan;
};
using StepArguments = StepOf<const Tensor&, const OptionalTensor&>;

struct LayerArguments {
  const Tensor &q, &k_cache, &v_cache;
  const OptionalTensor &sinks, &k_scale, &v_scale;
};

// Checks everything that determines the output's shape.
void check_queries(const Check& check, const Tensor& q, const Tensor& v_cache) {
  check.tensor(q, "q", {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16}, {"T", "Hq", "D"},
               Strides::kLastContiguous);
  check.that(v_cache.defined(), "v_cache", "a Tensor", "None");
  if (v_cache.dim() != 4) {
    check.fail("v_cache", "shape [pages, page_size, Hkv, Dv]", Check::text(v_cache.sizes()));
  }
}

Tensor empty_output(const Tensor& q, const Tensor& v_cache) {
  check_queries(Check("tree_attention", q), q, v_cache);
  return empty_on(q, {q.size(0), q.size(1), v_cache.size(3)}, q.scalar_type());
}

// Returns true if V is the first columns of K.
bool is_latent(const Tensor& k_cache, const Tensor& v_cache) {
  return k_cache.size(2) == 1 && v_cache.size(3) <= k_cache.size(3) &&
         k_cache.const_data_ptr() == v_cache.const_data_ptr() && k_cache.stride(0) == v_cache.stride(0) &&
         k_cache.stride(1) == v_cache.stride(1);
}

// Returns the step's params. num_tokens: the number of queries if known, else the mask's.
TreeAttentionParams step_params(const Check& check, const StepArguments& a, int64_t num_tokens) {
  TreeAttentionParams p{};
  p.batch = check.offsets(a.cu_seqlens_q, "cu_seqlens_q", p.cu_seqlens_q);
  p.table = page_table_of(check, a.page_table, p.batch, 0);
  p.seq_lens = check.read<int32_t>(a.seq_lens, "seq_lens", {{"B", p.batch}});
  p.num_tokens = num_tokens;
  if (a.tree_mask.has_value() && a.tree_mask->scalar_type() != ScalarType::Int) {
    check.fail("tree_mask", "dtype torch.int32 (mask_words makes it from booleans or biases)",
               dtype_text(a.tree_mask->scalar_type()));
  }
  p.tree_mask = check.read<int32_t>(a.tree_mask, "tree_mask", {{"T", num_tokens}, "W"}, Strides::kLastContiguous);
  if (a.tree_mask.has_value()) {
    p.num_tokens = a.tree_mask->size(0);
    p.mask_stride = a.tree_mask->stride(0);
    p.mask_words = static_cast<int32_t>(a.tree_mask->size(1));
  }
  p.tree_lens = check.read<int32_t>(a.tree_lens, "tree_lens", {{"B", p.batch}});
  check.that(a.max_seqlen_q.value_or(0) >= 0, "max_seqlen_q", "at least 0", a.max_seqlen_q.value_or(0));
  check.that(std::isfinite(a.scale.value_or(1.0)), "scale", "finite", a.scale.value_or(1.0));
  check.that(std::isfinite(a.softcap) && a.softcap >= 0.0, "softcap", "finite and at least 0 (0: none)", a.softcap);
  check.that(a.window >= 0, "window", "at least 0 (0: none)", a.window);
  if (a.plan.has_value()) {
    check.tensor(*a.plan, "plan", {ScalarType::Int}, {"plan"});
    const int64_t segment_tiles = a.plan->size(0) - kPlanSize;
    if (segment_tiles < 0 || segment_tiles > INT32_MAX / kKvTile) {
      check.fail("plan", "shape [" + std::to_string(kPlanSize) + " + segment / 64]", Check::text(a.plan->sizes()));
    }
    p.plan = mutable_pointer<int32_t>(*a.plan);
    p.segment = segment_tiles * kKvTile;
  }

  p.window = a.window;
  p.max_seqlen_q = a.max_seqlen_q.value_or(-1);
  p.scale = a.scale.has_value() ? static_cast<float>(*a.scale) : kDefaultScale;
  p.softcap = static_cast<float>(a.softcap);
  p.engine = engine_from_environment();
  return p;
}

// Adds a layer's params; its queries are checked.
void add_layer(const Check& check, const Backend& backend, const LayerArguments& a, TreeAttentionParams& p) {
  const int64_t num_tokens = a.q.size(0), num_heads = a.q.size(1), head_dim = a.q.size(2);
  const int64_t head_dim_v = a.v_cache.size(3);
  check_head_dims(check, head_dim, head_dim_v, "q", "v_cache");
  if (num_heads < 1) check.fail("q", "at least one head", Check::text(a.q.sizes()));
  if (p.num_tokens != kAnySize && p.num_tokens != num_tokens) {
    check.fail("tree_mask", "shape " + Check::text({{"T", num_tokens}, "W"}),
               Check::text(std::vector<int64_t>{p.num_tokens, p.mask_words}));
  }
  check_cache(check, a.q, a.k_cache, head_dim, "k_cache");
  check_cache(check, a.q, a.v_cache, head_dim_v, "v_cache");
  check.tensor(
      a.v_cache, "v_cache", {a.k_cache.scalar_type()},
      {{"pages", a.k_cache.size(0)}, {"page_size", a.k_cache.size(1)}, {"Hkv", a.k_cache.size(2)}, {"Dv", head_dim_v}},
      Strides::kLastContiguous);
  check_alignment(check, backend.support.cache_alignment, a.k_cache, "k_cache");
  check_alignment(check, backend.support.cache_alignment, a.v_cache, "v_cache");
  p.sinks = check.read<float>(a.sinks, "sinks", {{"Hq", num_heads}});
  const bool latent = is_latent(a.k_cache, a.v_cache);
  check.that(!latent || p.softcap == 0.0f, "softcap", "0 if v_cache is a view of k_cache", p.softcap);
  const OptionalTensor& v_scale = latent && !a.v_scale.has_value() ? a.k_scale : a.v_scale;
  p.k_scale_stride = check_scale(check, a.k_scale, a.k_cache, "k_scale");
  p.v_scale_stride = check_scale(check, v_scale, a.v_cache, "v_scale");

  p.q = a.q.const_data_ptr();
  p.k_cache = paged_cache(a.k_cache);
  p.v_cache = paged_cache(a.v_cache);
  p.table.page_size = a.k_cache.size(1);
  p.k_scale = optional_pointer<float>(a.k_scale);
  p.v_scale = optional_pointer<float>(v_scale);
  set_strides(a.q, p.q_token_stride, p.q_head_stride);
  p.num_tokens = num_tokens;
  p.num_pages = a.k_cache.size(0);
  if (p.max_seqlen_q < 0) p.max_seqlen_q = p.batch == 0 ? 0 : ceil_div(num_tokens, p.batch);
  p.num_kv_heads = static_cast<int32_t>(a.k_cache.size(2));
  p.group_size = static_cast<int32_t>(num_heads / a.k_cache.size(2));
  p.head_dim = static_cast<int32_t>(head_dim);
  p.head_dim_v = static_cast<int32_t>(head_dim_v);
  p.latent = latent;
  p.q_dtype = core_dtype(a.q);
  p.kv_dtype = core_dtype(a.k_cache);
  if (std::isnan(p.scale)) p.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim)));
}

// Checks offsets, lengths, page ids and mask width under PAGEDTREE_CHECK.
void check_values(const Check& check, const StepArguments& a, const TreeAttentionParams& p) {
  const auto offsets = host_values<int32_t>(a.cu_seqlens_q), seq_lens = host_values<int32_t>(a.seq_lens);
  const auto table = host_values<int32_t>(a.page_table);
  std::vector<int32_t> tree_lens;
  if (a.tree_lens.has_value()) tree_lens = host_values<int32_t>(*a.tree_lens);
  std::vector<int32_t> mask;
  if (p.tree_mask != nullptr) mask = host_values<int32_t>(*a.tree_mask);
  check_offsets(check, offsets, "cu_seqlens_q", p.num_tokens);
  for (int64_t b = 0; b < p.batch; ++b) {
    const int32_t n = offsets[b + 1] - offsets[b];
    const int32_t tree_len = tree_lens.empty() ? n : tree_lens[b];
    // Without a tree, queries need not be among the keys.
    const int32_t least = p.tree_mask != nullptr && tree_len == 0 ? 0 : n;
    check.that(seq_lens[b] >= least, at("seq_lens", b),
               "at least " + std::to_string(least) + ", the sequence's rows in cu_seqlens_q, which count as keys",
               seq_lens[b]);
    check_pages(check, table, p.table.max_pages, p.table.page_size, b, 0, seq_lens[b], p.num_pages);
    if (p.tree_mask == nullptr) {
      check.that(tree_lens.empty() || tree_len == -1, at("tree_lens", b), "-1 without a tree_mask", tree_len);
      continue;
    }
    check.that(tree_len >= -1 && tree_len <= seq_lens[b], at("tree_lens", b),
               "-1 (causal) or in 0.." + std::to_string(seq_lens[b]), tree_len);
    check.that(n == 0 || tree_len <= int64_t{p.mask_words} * kMaskWordBits, "tree_mask",
               "bits for the " + std::to_string(tree_len) + " nodes of sequence " + std::to_string(b),
               std::to_string(p.mask_words) + " words");
    for (int64_t row = offsets[b]; row < offsets[b + 1] && tree_len >= 0; ++row) {
      for (int32_t w = 0; w < p.mask_words; ++w) {
        const int32_t nodes = clamp_to(tree_len - w * kMaskWordBits, 0, kMaskWordBits);  // of the word
        const uint32_t beyond = nodes == kMaskWordBits ? 0 : ~0u << nodes;
        check.that((static_cast<uint32_t>(mask[row * p.mask_words + w]) & beyond) == 0, at("tree_mask", row),
                   "without bits at or beyond tree_lens[" + std::to_string(b) + "] = " + std::to_string(tree_len),
                   "word " + std::to_string(w) + " = " + std::to_string(mask[row * p.mask_words + w]));
      }
    }
  }
}

AttentionPlanParams plan_params(const TreeAttentionParams& p, const Tensor& plan) {
  AttentionPlanParams params{p, max_seq_len_of(p)};
  if (p.tree_mask == nullptr) params.tree_lens = nullptr;
  params.plan = mutable_pointer<int32_t>(plan);
  return params;
}

// Runs a call that lacks only its outputs; p.plan may be null.
void run_attention(const Check& check, const Backend& backend, TreeAttentionParams& p, const Tensor& q,
                   const Tensor& v_cache, Tensor& out) {
  check.tensor(out, "out", {q.scalar_type()}, {{"T", q.size(0)}, {"Hq", q.size(1)}, {"Dv", v_cache.size(3)}},
               Strides::kLastContiguous);
  // The maximum number of segments by scratch, or one, which needs none.
  const int64_t most = max_of<int64_t>(kMostSegmentBytes / max_of<int64_t>(segment_bytes(p), 1), 1);
  if (segments_of(p) > most) {
    const int64_t least = ceil_div(ceil_div(max_seq_len_of(p), most), int64_t{kKvTile}) * kKvTile;
    check.fail("segment", "at least " + std::to_string(least) + " in attention_plan, for scratch of at most 1 GiB",
               p.segment);
  }
  p.out = out.mutable_data_ptr();
  set_strides(out, p.out_token_stride, p.out_head_stride);
  const CallContext ctx = context_for(q);
  OptionalTensor plan;
  if (p.plan == nullptr) {
    plan = empty_on(q, {kPlanSize}, ScalarType::Int);
    backend.attention_plan(plan_params(p, *plan), ctx);
    p.plan = mutable_pointer<int32_t>(*plan);
  }
  Tensor scratch = empty_on(q, {backend.tree_attention_scratch(p, ctx)}, ScalarType::Byte);
  p.scratch = scratch.mutable_data_ptr();
  backend.tree_attention(p, ctx);
}

// Runs a call with checked queries and step; p: the step's params.
void attend(const Check& check, const StepArguments& step, TreeAttentionParams p, const LayerArguments& layer,
            Tensor& out, const OptionalTensor& lse) {
  const Backend& backend = backend_for(layer.q);
  add_layer(check, backend, layer, p);
  if (lse.has_value()) {
    check.tensor(*lse, "lse", {ScalarType::Float}, {{"T", layer.q.size(0)}, {"Hq", layer.q.size(1)}}, Strides::kAny);
    p.lse = mutable_pointer<float>(*lse);
    set_strides(*lse, p.lse_token_stride, p.lse_head_stride);
  }
  if (value_checks_enabled()) check_values(check, step, p);
  run_attention(check, backend, p, layer.q, layer.v_cache, out);
}

// Common to the three overloads of tree_attention.
#define PT_ATTENTION_PARAMETERS                                                                                    \
  const Tensor &q, const Tensor &k_cache, const Tensor &v_cache, const Tensor &page_table, const Tensor &seq_lens, \
      const Tensor &cu_seqlens_q, const OptionalTensor &tree_mask, const OptionalTensor &tree_lens,                \
      std::optional<int64_t> max_seqlen_q, std::optional<double> scale, double softcap, int64_t window,            \
      const OptionalTensor &sinks, const OptionalTensor &k_scale, const OptionalTensor &v_scale,                   \
      const OptionalTensor &plan

void tree_attention_out(PT_ATTENTION_PARAMETERS, Tensor out, OptionalTensor lse) {
  const Check check("tree_attention", q);
  check_queries(check, q, v_cache);
  const StepArguments step{page_table,   seq_lens, cu_seqlens_q, tree_mask, tree_lens,
                           max_seqlen_q, scale,    softcap,      window,    plan};
  attend(check, step, step_params(check, step, q.size(0)), {q, k_cache, v_cache, sinks, k_scale, v_scale}, out, lse);
}

// State from `_prepare_attention` for `_attend`.
struct PreparedStep : Prepared {
  StepOf<Tensor, OptionalTensor> step;
  TreeAttentionParams params;  // for the tensors at that time
  KeptTensors<false> tensors;  // of the step, without the plan
  KeptTensors<true> plan;

  PreparedStep(const StepArguments& a, const TreeAttentionParams& p)
      : step{a.page_table,   a.seq_lens, a.cu_seqlens_q, a.tree_mask, a.tree_lens,
             a.max_seqlen_q, a.scale,    a.softcap,      a.window,    a.plan},
        params(p),
        tensors(given(a)),
        plan(a.plan.has_value() ? std::vector<Tensor>{*a.plan} : std::vector<Tensor>{}) {}

  StepArguments arguments() const {
    return {step.page_table,   step.seq_lens, step.cu_seqlens_q, step.tree_mask, step.tree_lens,
            step.max_seqlen_q, step.scale,    step.softcap,      step.window,    step.plan};
  }
  bool are_unchanged() const { return tensors.are_unchanged() && plan.are_unchanged(); }

 private:
  static std::vector<Tensor> given(const StepArguments& a) {
    std::vector<Tensor> all{a.page_table, a.seq_lens, a.cu_seqlens_q};
    for (const auto* optional : {&a.tree_mask, &a.tree_lens}) {
      if (optional->has_value()) all.push_back(**optional);
    }
    return all;
  }
};

int64_t prepare_attention(const Tensor& page_table, const Tensor& seq_lens, const Tensor& cu_seqlens_q,
                          const OptionalTensor& tree_mask, const OptionalTensor& tree_lens,
                          std::optional<int64_t> max_seqlen_q, std::optional<double> scale, double softcap,
                          int64_t window, const OptionalTensor& plan) {
  const Check check("tree_attention", page_table);
  const StepArguments step{page_table,   seq_lens, cu_seqlens_q, tree_mask, tree_lens,
                           max_seqlen_q, scale,    softcap,      window,    plan};
  return keep_prepared(std::make_shared<PreparedStep>(step, step_params(check, step, kAnySize)));
}

void attend_out(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, int64_t step,
                const OptionalTensor& sinks, const OptionalTensor& k_scale, const OptionalTensor& v_scale, Tensor out) {
  const Check check("tree_attention", q);
  check_queries(check, q, v_cache);
  const auto kept = prepared<PreparedStep>(check, step, "step");
  check.device(kept->step.page_table, "page_table");
  const StepArguments arguments = kept->arguments();
  attend(check, arguments, kept->are_unchanged() ? kept->params : step_params(check, arguments, kAnySize),
         {q, k_cache, v_cache, sinks, k_scale, v_scale}, out, std::nullopt);
}

Tensor attend_prepared(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, int64_t step,
                       const OptionalTensor& sinks, const OptionalTensor& k_scale, const OptionalTensor& v_scale) {
  Tensor out = empty_output(q, v_cache);
  attend_out(q, k_cache, v_cache, step, sinks, k_scale, v_scale, out);
  return out;
}

std::tuple<Tensor, Tensor> tree_attention(PT_ATTENTION_PARAMETERS) {
  Tensor out = empty_output(q, v_cache);
  Tensor lse = empty_on(q, {q.size(0), q.size(1)}, ScalarType::Float);
  tree_attention_out(q, k_cache, v_cache, page_table, seq_lens, cu_seqlens_q, tree_mask, tree_lens, max_seqlen_q, scale,
                     softcap, window, sinks, k_scale, v_scale, plan, out, lse);
  return {out, lse};
}

Tensor tree_attention_without_lse(PT_ATTENTION_PARAMETERS) {
  Tensor out = empty_output(q, v_cache);
  tree_attention_out(q, k_cache, v_cache, page_table, seq_lens, cu_seqlens_q, tree_mask, tree_lens, max_seqlen_q, scale,
                     softcap, window, sinks, k_scale, v_scale, plan, out, std::nullopt);
  return out;
}

Tensor attention_plan(const Tensor& seq_lens, const Tensor& cu_seqlens_q, int64_t num_q_heads, int64_t num_kv_heads,
                      int64_t head_dim, int64_t page_size, int64_t max_seqlen_q, const OptionalTensor& tree_lens,
                      std::optional<int64_t> head_dim_v, bool latent, int64_t window, std::optional<int64_t> segment) {
  const Check check("attention_plan", seq_lens);
  AttentionPlanParams params{};
  params.batch = check.offsets(cu_seqlens_q, "cu_seqlens_q", params.cu_seqlens_q);
  params.seq_lens = check.read<int32_t>(seq_lens, "seq_lens", {{"B", params.batch}});
  check.that(num_kv_heads >= 1, "num_kv_heads", "at least 1", num_kv_heads);
  check.that(num_kv_heads <= INT32_MAX, "num_kv_heads", "below 2^31", num_kv_heads);
  check.that(num_q_heads >= 1 && num_q_heads % num_kv_heads == 0, "num_q_heads",
             "a multiple of num_kv_heads " + std::to_string(num_kv_heads), num_q_heads);
  check.that(num_q_heads <= INT32_MAX, "num_q_heads", "below 2^31", num_q_heads);
  check_head_dims(check, head_dim, head_dim_v.value_or(head_dim), "head_dim", "head_dim_v");
  check.that(!latent || num_kv_heads == 1, "num_kv_heads", "1 for a latent cache", num_kv_heads);
  check.that(page_size >= 1, "page_size", "at least 1", page_size);
  check.that(max_seqlen_q >= 0, "max_seqlen_q", "at least 0", max_seqlen_q);
  check.that(window >= 0, "window", "at least 0 (0: none)", window);
  params.segment = segment.value_or(0);
  const bool is_segment = params.segment > 0 && params.segment <= INT32_MAX && params.segment % kKvTile == 0;
  check.that(is_segment || !segment.has_value(), "segment", "a multiple of 64, at least 64 and below 2^31",
             params.segment);
  params.tree_lens = check.read<int32_t>(tree_lens, "tree_lens", {{"B", params.batch}});
  if (value_checks_enabled()) check_offsets(check, host_values<int32_t>(cu_seqlens_q), "cu_seqlens_q", INT32_MAX);

  Tensor plan = made(seq_lens, {plan_size(params.segment)}, params.plan);
  params.num_tokens = std::numeric_limits<int32_t>::max();
  params.max_seq_len = std::numeric_limits<int32_t>::max();
  params.window = window;
  params.max_seqlen_q = max_seqlen_q;
  params.num_kv_heads = static_cast<int32_t>(num_kv_heads);
  params.group_size = static_cast<int32_t>(num_q_heads / num_kv_heads);
  params.head_dim = static_cast<int32_t>(head_dim);
  params.head_dim_v = static_cast<int32_t>(head_dim_v.value_or(head_dim));
  params.latent = latent;
  params.engine = engine_from_environment();
  backend_for(seq_lens).attention_plan(params, context_for(seq_lens));
  return plan;
}

std::tuple<Tensor, Tensor> merge_states(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                                        const Tensor& lse_b) {
  const Check check("merge_states", out_a);
  MergeStatesParams params{};
  check.tensor(out_a, "out_a", {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16}, {"T", "H", "D"},
               Strides::kLastContiguous);
  const int64_t num_tokens = out_a.size(0), num_heads = out_a.size(1), head_dim = out_a.size(2);
  check.tensor(out_b, "out_b", {out_a.scalar_type()}, {{"T", num_tokens}, {"H", num_heads}, {"D", head_dim}},
               Strides::kLastContiguous);
  params.lse_a = check.read<float>(lse_a, "lse_a", {{"T", num_tokens}, {"H", num_heads}}, Strides::kAny);
  params.lse_b = check.read<float>(lse_b, "lse_b", {{"T", num_tokens}, {"H", num_heads}}, Strides::kAny);

  Tensor out = empty_on(out_a, {num_tokens, num_heads, head_dim}, out_a.scalar_type());
  Tensor lse = made(out_a, {num_tokens, num_heads}, params.lse);
  params.out_a = out_a.const_data_ptr();
  params.out_b = out_b.const_data_ptr();
  params.out = out.mutable_data_ptr();
  set_strides(out_a, params.a_token_stride, params.a_head_stride);
  set_strides(out_b, params.b_token_stride, params.b_head_stride);
  set_strides(lse_a, params.lse_a_token_stride, params.lse_a_head_stride);
  set_strides(lse_b, params.lse_b_token_stride, params.lse_b_head_stride);
  params.num_tokens = num_tokens;
  params.num_heads = num_heads;
  params.head_dim = head_dim;
  params.dtype = core_dtype(out_a);
  backend_for(out_a).merge_states(params, context_for(out_a));
  return {out, lse};
}

#define PT_ATTENTION_ARGUMENTS                                                                           \
  "Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor seq_lens, Tensor cu_seqlens_q,"   \
  " Tensor? tree_mask=None, *, Tensor? tree_lens=None, SymInt? max_seqlen_q=None, float? scale=None,"    \
  " float softcap=0.0, SymInt window=0, Tensor? sinks=None, Tensor? k_scale=None, Tensor? v_scale=None," \
  " Tensor? plan=None"
#define PT_LAYER_ARGUMENTS                                                                 \
  "Tensor q, Tensor k_cache, Tensor v_cache, SymInt step, Tensor? sinks, Tensor? k_scale," \
  " Tensor? v_scale"

constexpr Op kOps[] = {
    {"tree_attention", "(" PT_ATTENTION_ARGUMENTS ") -> (Tensor out, Tensor lse)", PT_BOX(&tree_attention)},
    {"tree_attention.out", "(" PT_ATTENTION_ARGUMENTS ", Tensor(a!) out, Tensor(b!)? lse=None) -> ()",
     PT_BOX(&tree_attention_out)},
    {"tree_attention.without_lse", "(" PT_ATTENTION_ARGUMENTS ") -> Tensor", PT_BOX(&tree_attention_without_lse)},
    {"_prepare_attention",
     "(Tensor page_table, Tensor seq_lens, Tensor cu_seqlens_q, Tensor? tree_mask=None, *, Tensor? tree_lens=None,"
     " SymInt? max_seqlen_q=None, float? scale=None, float softcap=0.0, SymInt window=0, Tensor? plan=None) -> SymInt",
     PT_BOX(&prepare_attention)},
    {"_attend", "(" PT_LAYER_ARGUMENTS ") -> Tensor", PT_BOX(&attend_prepared)},
    {"_attend.out", "(" PT_LAYER_ARGUMENTS ", Tensor(a!) out) -> ()", PT_BOX(&attend_out)},
    {"attention_plan",
     "(Tensor seq_lens, Tensor cu_seqlens_q, *, SymInt num_q_heads, SymInt num_kv_heads,"
     " SymInt head_dim, SymInt page_size, SymInt max_seqlen_q, Tensor? tree_lens=None,"
     " SymInt? head_dim_v=None, bool latent=False, SymInt window=0, SymInt? segment=None) -> Tensor",
     PT_BOX(&attention_plan)},
    {"merge_states", "(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor out, Tensor lse)",
     PT_BOX(&merge_states)},
};
#undef PT_ATTENTION_ARGUMENTS
#undef PT_LAYER_ARGUMENTS

}  // namespace

PT_OPS(kOps)

}  // namespace pagedtree::ops
