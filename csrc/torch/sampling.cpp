#include "torch/sampling.h"

#include "core/sampling.h"
#include "torch/options.h"

namespace pagedtree::ops {

DType logits_dtype(const Tensor& logits) {
  if (logits.scalar_type() == ScalarType::Float) return DType::kFloat32;
  return logits.scalar_type() == ScalarType::Half ? DType::kFloat16 : DType::kBFloat16;
}

LogitsParams rows_params(const Check& check, const Tensor& rows, const std::string& name, int64_t min_vocab) {
  const auto dtypes = {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16};
  check.tensor(rows, name, dtypes, {"N", "V"}, Strides::kLastContiguous);
  if (rows.size(1) < min_vocab) check.fail(name, "at least one column", Check::text(rows.sizes()));
  if (rows.size(1) > kMaxVocab) check.fail(name, "at most 2^20 columns", Check::text(rows.sizes()));
  LogitsParams params{};
  params.data = rows.const_data_ptr();
  params.num_rows = rows.size(0);
  params.vocab = rows.size(1);
  params.row_stride = rows.stride(0);
  params.dtype = logits_dtype(rows);
  return params;
}

void add_grammar_mask(const Check& check, const OptionalTensor& grammar_mask, LogitsParams& logits) {
  if (!grammar_mask.has_value()) return;
  const Tensor& mask = *grammar_mask;
  check.dtype(mask, "grammar_mask", {ScalarType::Bool, ScalarType::Int});
  const bool packed = mask.scalar_type() == ScalarType::Int;
  const int64_t width = packed ? ceil_div<int64_t>(logits.vocab, 32) : logits.vocab;
  check.tensor(mask, "grammar_mask", {mask.scalar_type()},
               {{"N", logits.num_rows}, {packed ? "ceil(V / 32)" : "V", width}}, Strides::kLastContiguous);
  if (packed) {
    logits.allowed_words = const_pointer<int32_t>(mask);
  } else {
    logits.allowed = const_pointer<uint8_t>(mask);
  }
  logits.allowed_stride = mask.stride(0);
}

bool is_joint(const Check& check, const std::string& filter_order, const std::string& prefix) {
  if (filter_order == "joint") return true;
  if (filter_order == "top_k_first") return false;
  check.fail(prefix + "filter_order", "\"top_k_first\" or \"joint\"", "\"" + filter_order + "\"");
}

SamplingParams sampling_params(const Check& check, PT_SAMPLING_PARAMETERS, int64_t batch, const std::string& prefix) {
  const auto stride = [&](const Tensor& t, const std::string& name, ScalarType dtype) {
    check.tensor(t, name, {dtype}, {"B"});
    check.one_or(batch, t, name);
    return t.size(0) == 1 ? 0 : 1;
  };
  SamplingParams params{};
  params.temperature_stride = stride(temperature, prefix + "temperature", ScalarType::Float);
  params.top_k_stride = stride(top_k, prefix + "top_k", ScalarType::Int);
  params.top_p_stride = stride(top_p, prefix + "top_p", ScalarType::Float);
  params.min_p_stride = stride(min_p, prefix + "min_p", ScalarType::Float);
  params.temperature = const_pointer<float>(temperature);
  params.top_k = const_pointer<int32_t>(top_k);
  params.top_p = const_pointer<float>(top_p);
  params.min_p = const_pointer<float>(min_p);
  params.joint = is_joint(check, filter_order, prefix);
  return params;
}

namespace {

Tensor sample(const Tensor& logits, PT_SAMPLING_PARAMETERS, const Tensor& seeds, const Tensor& positions,
              const OptionalTensor& grammar_mask PT_OPTION_PARAMETERS) {
  const Check check("sample", logits);
  SampleParams params{};
  params.logits = logits_params(check, logits, grammar_mask);
  const int64_t rows = params.logits.num_rows;
  params.sampling = sampling_params(check, PT_SAMPLING_ARGUMENTS, rows);
  params.seeds = check.read<int64_t>(seeds, "seeds", {{"R", rows}});
  params.positions = integers(check, positions, "positions", {"R", rows});
  params.options = options_params(check, PT_OPTION_TENSORS, rows, params.logits.vocab);
  params.options.positions = params.positions;
  const Backend& backend = backend_for(logits);
  const Tensor option_rows = add_option_rows(logits, backend, rows, params.logits.vocab, params.options);
  Tensor tokens = made(logits, {rows}, params.tokens);
  backend.sample(params, context_for(logits));
  return tokens;
}

constexpr Op kOps[] = {
    {"sample",
     "(Tensor logits, " PT_SAMPLING ", *,"
     " Tensor seeds, Tensor positions, Tensor? grammar_mask=None" PT_OPTIONS ") -> Tensor",
     PT_BOX(&sample)},
};

}  // namespace

PT_OPS(kOps)

}  // namespace pagedtree::ops
