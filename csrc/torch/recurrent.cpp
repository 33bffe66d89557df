#include "core/recurrent.h"

#include <cmath>

#include "torch/ops.h"
#include "torch/values.h"

namespace pagedtree::ops {
namespace {

// Arguments for the order of rows: a batch of trees, or the offsets of sequences.
struct Rows {
  const OptionalTensor& cu_nodes;
  const OptionalTensor& parents;
  const OptionalTensor& depths;
  int64_t max_nodes;
  const OptionalTensor& cu_seqlens;
};

struct Path {
  const OptionalTensor& accept_index;
  const OptionalTensor& num_accepted;
};

void check_recurrent_values(const Check& check, const RecurrentBatch& p, const Tensor& offsets,
                            const std::string& offsets_name, const Tensor& state_index, const Path* path) {
  check_offsets(check, host_values<int32_t>(offsets), offsets_name, p.num_rows);
  check_range<int32_t>(check, state_index, "state_index", -1, p.num_slots - 1);
  if (path == nullptr || !path->accept_index.has_value()) return;
  const auto nodes = host_values<int32_t>(*path->accept_index), accepted = host_values<int32_t>(*path->num_accepted);
  for (int64_t b = 0; b < p.batch; ++b) check_path(check, nodes, p.path_width, b, accepted[b]);
}

RecurrentBatch recurrent_batch(const Check& check, const Rows& rows, const Tensor& state_index, int64_t num_rows,
                               int64_t num_slots, const Path* path) {
  RecurrentBatch p{};
  const bool trees = rows.cu_nodes.has_value();
  check.that(trees != rows.cu_seqlens.has_value(), "cu_seqlens", "a Tensor if, and only if, there are no trees",
             trees ? "both" : "neither");
  const std::string name = trees ? "cu_nodes" : "cu_seqlens";
  const Tensor& offsets = trees ? *rows.cu_nodes : *rows.cu_seqlens;
  p.batch = check.offsets(offsets, name, p.cu_nodes);
  p.num_rows = num_rows;
  p.num_slots = num_slots;
  for (const auto& [part, given] : {std::pair{"parents", &rows.parents}, {"depths", &rows.depths}}) {
    check.that(given->has_value() == trees, part, trees ? "a Tensor with cu_nodes" : "None with cu_seqlens",
               trees ? "None" : "a Tensor");
    if (trees) check.tensor(**given, part, {ScalarType::Int}, {{"T", num_rows}});
  }
  const int32_t max_nodes = check.in(rows.max_nodes, "max_nodes", trees ? 1 : 0, kMaxRecurrentNodes);
  if (trees) {
    p.max_nodes = max_nodes;
    p.parents = given_pointer<int32_t>(*rows.parents);
    p.depths = given_pointer<int32_t>(*rows.depths);
  }
  p.state_index = check.read<int32_t>(state_index, "state_index", {{"B", p.batch}});
  if (path != nullptr) {
    for (const auto& [part, given] :
         {std::pair{"accept_index", &path->accept_index}, {"num_accepted", &path->num_accepted}}) {
      check.that(given->has_value() == trees, part, trees ? "a Tensor with trees" : "None without trees",
                 trees ? "None" : "a Tensor");
    }
  }
  if (path != nullptr && trees) {
    p.accept_index =
        check.read<int32_t>(path->accept_index, "accept_index", {{"B", p.batch}, "S"}, Strides::kLastContiguous);
    check.that(path->accept_index->size(1) <= kMaxTreeNodes, "accept_index", "at most 1024 columns",
               Check::text(path->accept_index->sizes()));
    p.num_accepted = check.read<int32_t>(path->num_accepted, "num_accepted", {{"B", p.batch}});
    p.accept_stride = path->accept_index->stride(0);
    p.path_width = static_cast<int32_t>(path->accept_index->size(1));
  }
  if (value_checks_enabled()) check_recurrent_values(check, p, offsets, name, state_index, path);
  return p;
}

void check_inputs(const Check& check, const Tensor& t, const std::string& name, std::initializer_list<Axis> shape) {
  if (t.defined()) check.device(t, name);
  if (t.defined() && backend_for(t).support.recurrent_float32) {
    check.tensor(t, name, {ScalarType::Half, ScalarType::BFloat16, ScalarType::Float}, shape, Strides::kLastContiguous);
  } else {
    check.tensor(t, name, {ScalarType::Half, ScalarType::BFloat16}, shape, Strides::kLastContiguous);
  }
}

// Fills all but q and out.
DeltaRuleParams delta_rule_params(const Check& check, const Tensor& k, const Tensor& v, const Tensor& g,
                                  const OptionalTensor& beta, const Tensor& state, const Tensor& state_index,
                                  const Rows& rows, const Path* path, bool l2norm, double l2norm_eps) {
  check_inputs(check, k, "k", {"T", "Hk", "Dk"});
  const int64_t num_rows = k.size(0), num_key_heads = k.size(1), key_dim = k.size(2);
  check.tensor(v, "v", {k.scalar_type()}, {{"T", num_rows}, "H", "Dv"}, Strides::kLastContiguous);
  const int64_t num_heads = v.size(1), value_dim = v.size(2);
  check.that(num_key_heads >= 1 && num_heads >= 1 && num_heads % num_key_heads == 0, "v",
             "a multiple of " + std::to_string(num_key_heads) + " heads, those of k", num_heads);
  for (const auto& [name, dim] : {std::pair{"k", key_dim}, {"v", value_dim}}) {
    check.that(dim >= 8 && dim <= kMaxRecurrentDim && dim % 8 == 0, name,
               "a head size that is a multiple of 8 up to 256", dim);
  }
  DeltaRuleParams p{};
  check.dtype(g, "g", {ScalarType::Float});
  p.channel_decay = g.dim() == 3;
  if (p.channel_decay) {
    p.g = check.read<float>(g, "g", {{"T", num_rows}, {"H", num_heads}, {"Dk", key_dim}}, Strides::kLastContiguous);
  } else {
    p.g = check.read<float>(g, "g", {{"T", num_rows}, {"H", num_heads}}, Strides::kAny);
  }
  p.beta = check.read<float>(beta, "beta", {{"T", num_rows}, {"H", num_heads}}, Strides::kAny);
  check.tensor(state, "state", {ScalarType::Float}, {"slots", {"H", num_heads}, {"Dk", key_dim}, {"Dv", value_dim}},
               Strides::kAny);
  p.tokens = recurrent_batch(check, rows, state_index, num_rows, state.size(0), path);
  p.l2norm = l2norm;
  p.l2norm_eps = static_cast<float>(l2norm_eps);
  check.that(p.l2norm_eps > 0.0f && std::isfinite(p.l2norm_eps), "l2norm_eps", "a positive fp32 number", l2norm_eps);
  p.k = k.const_data_ptr();
  p.v = v.const_data_ptr();
  set_strides(k, p.k_token_stride, p.k_head_stride);
  set_strides(v, p.v_token_stride, p.v_head_stride);
  set_strides(g, p.g_token_stride, p.g_head_stride);
  if (beta.has_value()) set_strides(*beta, p.beta_token_stride, p.beta_head_stride);
  for (int64_t i = 0; i < 4; ++i) p.state_strides[i] = state.stride(i);
  p.num_heads = static_cast<int32_t>(num_heads);
  p.group_size = static_cast<int32_t>(num_heads / num_key_heads);
  p.key_dim = static_cast<int32_t>(key_dim);
  p.value_dim = static_cast<int32_t>(value_dim);
  p.dtype = core_dtype(k);
  return p;
}

// Allocates the backend's scratch, which must live as long as the result.
Tensor add_scratch(const Tensor& k, const Backend& backend, DeltaRuleParams& p) {
  const bool needed = p.channel_decay && backend.max_option_rows > 0;
  return made(k, {needed ? k.size(0) : 0, p.num_heads, p.key_dim}, p.decays);
}

Tensor tree_delta_rule(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const OptionalTensor& beta,
                       const Tensor& state, const Tensor& state_index, const OptionalTensor& cu_nodes,
                       const OptionalTensor& parents, const OptionalTensor& depths, int64_t max_nodes,
                       const OptionalTensor& cu_seqlens, std::optional<double> scale, bool l2norm, double l2norm_eps) {
  const Check check("tree_delta_rule", q);
  check_inputs(check, q, "q", {"T", "Hk", "Dk"});
  check.tensor(k, "k", {q.scalar_type()}, {{"T", q.size(0)}, {"Hk", q.size(1)}, {"Dk", q.size(2)}},
               Strides::kLastContiguous);
  DeltaRuleParams params =
      delta_rule_params(check, k, v, g, beta, state, state_index, {cu_nodes, parents, depths, max_nodes, cu_seqlens},
                        nullptr, l2norm, l2norm_eps);
  params.state = const_cast<float*>(const_pointer<float>(state));  // only read, since there is an output
  params.q = q.const_data_ptr();
  set_strides(q, params.q_token_stride, params.q_head_stride);
  params.scale = static_cast<float>(scale.value_or(1.0 / std::sqrt(static_cast<double>(params.key_dim))));
  Tensor out = empty_on(q, {v.size(0), v.size(1), v.size(2)}, v.scalar_type());
  params.out = out.mutable_data_ptr();
  const Backend& backend = backend_for(q);
  const Tensor scratch = add_scratch(k, backend, params);
  backend.tree_delta_rule(params, context_for(q));
  return out;
}

void advance_state(const Tensor& state, const Tensor& state_index, const Tensor& k, const Tensor& v, const Tensor& g,
                   const OptionalTensor& beta, const OptionalTensor& cu_nodes, const OptionalTensor& parents,
                   const OptionalTensor& depths, const OptionalTensor& accept_index, const OptionalTensor& num_accepted,
                   int64_t max_nodes, const OptionalTensor& cu_seqlens, bool l2norm, double l2norm_eps) {
  const Check check("advance_state", state);
  check.tensor(state, "state", {ScalarType::Float}, {"slots", "H", "Dk", "Dv"}, Strides::kAny);
  const Path path{accept_index, num_accepted};
  DeltaRuleParams params =
      delta_rule_params(check, k, v, g, beta, state, state_index, {cu_nodes, parents, depths, max_nodes, cu_seqlens},
                        &path, l2norm, l2norm_eps);
  params.state = mutable_pointer<float>(state);
  const Backend& backend = backend_for(state);
  const Tensor scratch = add_scratch(k, backend, params);
  backend.advance_state(params, context_for(state));
}

// Fills all but weight, bias and out; `width` is W.
ConvParams conv_params(const Check& check, const Tensor& x, const Tensor& conv_state, int64_t width,
                       const Tensor& state_index, const Rows& rows, const Path* path) {
  check_inputs(check, x, "x", {"T", "C"});
  const int64_t channels = x.size(1);
  check.tensor(conv_state, "conv_state", {x.scalar_type()}, {"slots", {"C", channels}, {"W - 1", width - 1}},
               Strides::kAny);
  ConvParams p{};
  p.tokens = recurrent_batch(check, rows, state_index, x.size(0), conv_state.size(0), path);
  p.x = x.const_data_ptr();
  p.x_stride = x.stride(0);
  for (int64_t i = 0; i < 3; ++i) p.state_strides[i] = conv_state.stride(i);
  p.channels = channels;
  p.width = static_cast<int32_t>(width);
  p.dtype = core_dtype(x);
  return p;
}

Tensor tree_conv1d(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const Tensor& conv_state,
                   const Tensor& state_index, const OptionalTensor& cu_nodes, const OptionalTensor& parents,
                   const OptionalTensor& depths, int64_t max_nodes, const OptionalTensor& cu_seqlens,
                   const std::optional<std::string>& activation) {
  const Check check("tree_conv1d", x);
  check_inputs(check, x, "x", {"T", "C"});
  check.tensor(weight, "weight", {x.scalar_type(), ScalarType::Float}, {{"C", x.size(1)}, "W"}, Strides::kAny);
  const int64_t width = weight.size(1);
  check.that(width >= 1 && width <= kMaxConvWidth, "weight", "1 to 16 taps", width);
  if (bias.has_value()) check.tensor(*bias, "bias", {weight.scalar_type()}, {{"C", x.size(1)}}, Strides::kAny);
  check.that(!activation.has_value() || *activation == "silu", "activation", "None or \"silu\"",
             "\"" + activation.value_or("") + "\"");
  ConvParams params = conv_params(check, x, conv_state, width, state_index,
                                  {cu_nodes, parents, depths, max_nodes, cu_seqlens}, nullptr);
  params.conv_state = const_cast<void*>(conv_state.const_data_ptr());  // only read, since there is an output
  params.weight = weight.const_data_ptr();
  params.weight_dtype = core_dtype(weight);
  for (int64_t i = 0; i < 2; ++i) params.weight_strides[i] = weight.stride(i);
  if (bias.has_value()) {
    params.bias = bias->const_data_ptr();
    params.bias_stride = bias->stride(0);
  }
  params.silu = activation.has_value();
  Tensor out = empty_on(x, {x.size(0), x.size(1)}, x.scalar_type());
  params.out = out.mutable_data_ptr();
  backend_for(x).tree_conv1d(params, context_for(x));
  return out;
}

void advance_conv(const Tensor& conv_state, const Tensor& state_index, const Tensor& x, const OptionalTensor& cu_nodes,
                  const OptionalTensor& parents, const OptionalTensor& depths, const OptionalTensor& accept_index,
                  const OptionalTensor& num_accepted, int64_t max_nodes, const OptionalTensor& cu_seqlens) {
  const Check check("advance_conv", conv_state);
  check.dtype(conv_state, "conv_state", {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16});
  check.that(conv_state.dim() == 3 && conv_state.size(2) < kMaxConvWidth, "conv_state",
             "shape [slots, C, W - 1] with W at most 16", Check::text(conv_state.sizes()));
  const Path path{accept_index, num_accepted};
  ConvParams params = conv_params(check, x, conv_state, conv_state.size(2) + 1, state_index,
                                  {cu_nodes, parents, depths, max_nodes, cu_seqlens}, &path);
  params.conv_state = conv_state.mutable_data_ptr();
  backend_for(conv_state).advance_conv(params, context_for(conv_state));
}

#define PT_TREES "Tensor? cu_nodes, Tensor? parents, Tensor? depths"
#define PT_PATH PT_TREES ", Tensor? accept_index, Tensor? num_accepted"
#define PT_ROWS ", *, SymInt max_nodes=0, Tensor? cu_seqlens=None"

constexpr Op kOps[] = {
    {"tree_delta_rule",
     "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor? beta, Tensor state, Tensor state_index, " PT_TREES PT_ROWS
     ", float? scale=None, bool l2norm=False, float l2norm_eps=1e-06) -> Tensor",
     PT_BOX(&tree_delta_rule)},
    {"advance_state",
     "(Tensor(a!) state, Tensor state_index, Tensor k, Tensor v, Tensor g, Tensor? beta, " PT_PATH PT_ROWS
     ", bool l2norm=False, float l2norm_eps=1e-06) -> ()",
     PT_BOX(&advance_state)},
    {"tree_conv1d",
     "(Tensor x, Tensor weight, Tensor? bias, Tensor conv_state, Tensor state_index, " PT_TREES PT_ROWS
     ", str? activation=None) -> Tensor",
     PT_BOX(&tree_conv1d)},
    {"advance_conv", "(Tensor(a!) conv_state, Tensor state_index, Tensor x, " PT_PATH PT_ROWS ") -> ()",
     PT_BOX(&advance_conv)},
};

}  // namespace

PT_OPS(kOps)

}  // namespace pagedtree::ops
