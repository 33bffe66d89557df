#include "core/step.h"

#include <algorithm>

#include "torch/ops.h"
#include "torch/values.h"

namespace pagedtree::ops {
namespace {

void check_step_values(const Check& check, const PrepareStepParams& p, const Tensor& cu_nodes, const Tensor& page_table,
                       const Tensor& start) {
  const auto offsets = host_values<int32_t>(cu_nodes);
  const auto table = host_values<int32_t>(page_table);
  const auto starts = host_values<int32_t>(start);
  check_offsets(check, offsets, "cu_nodes", p.num_rows);
  WritablePages written;
  for (int64_t b = 0; b < p.batch; ++b) {
    if (starts[b] < 0) continue;
    const int64_t end = int64_t{starts[b]} + offsets[b + 1] - offsets[b];
    check_pages(check, table, p.table.max_pages, p.table.page_size, b, starts[b], end, INT32_MAX);
    written.add(check, table, p.table.max_pages, p.table.page_size, b, starts[b], end);
  }
}

void check_commit_values(const Check& check, const CommitParams& p, const Tensor& accept_index,
                         const Tensor& num_accepted, const Tensor& cu_nodes, const OptionalTensor& history,
                         const OptionalTensor& history_lens, const OptionalTensor& history_rows) {
  const auto nodes = host_values<int32_t>(accept_index);
  const auto accepted = host_values<int32_t>(num_accepted);
  const auto offsets = host_values<int32_t>(cu_nodes);
  check_offsets(check, offsets, "cu_nodes", p.num_rows);
  for (int64_t b = 0; b < p.batch; ++b) {
    check_path(check, nodes, p.path_width, b, accepted[b]);
    if (p.path_width == 0) continue;
    const int32_t last = nodes[b * p.path_width + accepted[b]], size = offsets[b + 1] - offsets[b];
    check.that(last < size, "accept_index[" + std::to_string(b) + ", " + std::to_string(accepted[b]) + "]",
               "a node of a tree of " + std::to_string(size), last);
  }
  if (!history.has_value()) return;
  std::vector<int64_t> rows = check_histories(check, *history, *history_lens, history_rows);
  std::sort(rows.begin(), rows.end());
  const auto twice = std::adjacent_find(rows.begin(), rows.end(), [](auto a, auto b) { return a >= 0 && a == b; });
  if (twice != rows.end())
    check.fail("history_rows", "another row for each sequence", std::to_string(*twice) + " twice");
}

std::tuple<Tensor, Tensor, Tensor, Tensor> prepare_step(const Tensor& cu_nodes, const Tensor& depths,
                                                        const Tensor& page_table, const Tensor& start,
                                                        int64_t page_size, int64_t total_q) {
  const Check check("prepare_step", cu_nodes);
  PrepareStepParams params{};
  params.batch = check.offsets(cu_nodes, "cu_nodes", params.cu_nodes);
  const int64_t batch = params.batch;
  params.depths = check.read<int32_t>(depths, "depths", {"N"});
  params.table = page_table_of(check, page_table, batch, page_size);
  params.start = check.read<int32_t>(start, "start", {{"B", batch}});
  check.in(page_size, "page_size", 1, INT32_MAX);
  check.that(total_q >= 0, "total_q", "at least 0", total_q);

  params.num_rows = min_of(depths.size(0), total_q);
  params.total_q = total_q;
  if (value_checks_enabled()) check_step_values(check, params, cu_nodes, page_table, start);
  Tensor positions = made(cu_nodes, {total_q}, params.positions);
  Tensor seq_lens = made(cu_nodes, {batch}, params.seq_lens);
  Tensor cu_seqlens_q = made(cu_nodes, {batch + 1}, params.cu_seqlens_q);
  Tensor slots = made(cu_nodes, {total_q}, params.slots);
  backend_for(cu_nodes).prepare_step(params, context_for(cu_nodes));
  return {positions, seq_lens, cu_seqlens_q, slots};
}

using CommitResult = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

CommitResult commit(const Tensor& accept_index, const Tensor& num_accepted, const Tensor& tokens,
                    const Tensor& cu_nodes, const Tensor& start, const OptionalTensor& history,
                    const OptionalTensor& history_lens, const OptionalTensor& eos_ids, const OptionalTensor& node_map,
                    const OptionalTensor& output_counts, const OptionalTensor& tokens_left,
                    const OptionalTensor& history_rows) {
  const Check check("commit", accept_index);
  CommitParams params{};
  params.accept_index = check.read<int32_t>(accept_index, "accept_index", {"B", "S"}, Strides::kLastContiguous);
  const int64_t batch = accept_index.size(0), path_width = accept_index.size(1);
  params.num_accepted = check.read<int32_t>(num_accepted, "num_accepted", {{"B", batch}});
  params.tokens = check.read<int64_t>(tokens, "tokens", {{"B", batch}, {"S", path_width}}, Strides::kLastContiguous);
  params.cu_nodes = check.read<int32_t>(cu_nodes, "cu_nodes", {{"B + 1", batch + 1}});
  params.start = check.read<int32_t>(start, "start", {{"B", batch}});
  check.that(history.has_value() == history_lens.has_value(), "history_lens",
             "a Tensor if, and only if, history is one", history.has_value() ? "None" : "a tensor");

  params.history_rows = check.read<int32_t>(history_rows, "history_rows", {{"B", batch}});
  check.that(history.has_value() || !history_rows.has_value(), "history_rows", "None without history", "a tensor");
  params.tokens_left = check.read<int32_t>(tokens_left, "tokens_left", {{"B", batch}});

  params.num_rows = INT32_MAX;
  if (history.has_value()) {
    const Axis histories = history_rows.has_value() ? Axis("P") : Axis("B", batch);
    check.tensor(*history, "history", {ScalarType::Long}, {histories, "H"}, Strides::kLastContiguous);
    check.tensor(*history_lens, "history_lens", {ScalarType::Int}, {{histories.name, history->size(0)}});
    params.num_histories = history->size(0);
    params.history = mutable_pointer<int64_t>(*history);
    params.history_lens = mutable_pointer<int32_t>(*history_lens);
    params.history_width = history->size(1);
    params.history_stride = history->stride(0);
  }
  if (output_counts.has_value()) {
    check.tensor(*output_counts, "output_counts", {ScalarType::Int}, {{"B", batch}, "V"}, Strides::kLastContiguous);
    params.output_counts = mutable_pointer<int32_t>(*output_counts);
    params.counts_width = output_counts->size(1);
    params.counts_stride = output_counts->stride(0);
  }
  if (eos_ids.has_value() && eos_ids->dim() == 1) {
    params.eos_ids = check.read<int64_t>(eos_ids, "eos_ids", {"E"});
    params.num_eos = eos_ids->size(0);
  } else if (eos_ids.has_value()) {
    params.eos_ids = check.read<int64_t>(eos_ids, "eos_ids", {{"B", batch}, "E"}, Strides::kLastContiguous);
    params.num_eos = eos_ids->size(1);
    params.eos_stride = eos_ids->stride(0);
  }
  params.node_map = check.read<int32_t>(node_map, "node_map", {"N"});
  if (node_map.has_value()) params.num_rows = node_map->size(0);
  params.batch = batch;
  params.accept_stride = accept_index.stride(0);
  params.tokens_stride = tokens.stride(0);
  params.path_width = static_cast<int32_t>(path_width);
  if (value_checks_enabled()) {
    check_commit_values(check, params, accept_index, num_accepted, cu_nodes, history, history_lens, history_rows);
  }

  const int64_t mapped = node_map.has_value() ? batch : 0;
  Tensor new_start = made(start, {batch}, params.new_start);
  Tensor last_token = made(start, {batch}, params.last_token);
  Tensor finished = made(start, {batch}, params.finished);
  Tensor out_num_accepted = made(start, {batch}, params.out_num_accepted);
  Tensor num_tokens = made(start, {batch}, params.num_tokens);
  Tensor accept_rows = made(start, {batch, path_width}, params.accept_rows);
  Tensor draft_accept_index = made(start, {mapped, path_width}, params.draft_accept_index);
  Tensor draft_num_accepted = made(start, {mapped}, params.draft_num_accepted);
  Tensor draft_missing = made(start, {mapped, path_width}, params.draft_missing);
  Tensor draft_num_missing = made(start, {mapped}, params.draft_num_missing);
  backend_for(start).commit(params, context_for(start));
  return {new_start,   last_token,         finished,           out_num_accepted, num_tokens,
          accept_rows, draft_accept_index, draft_num_accepted, draft_missing,    draft_num_missing};
}

constexpr Op kOps[] = {
    {"prepare_step",
     "(Tensor cu_nodes, Tensor depths, Tensor page_table, Tensor start, SymInt page_size, *,"
     " SymInt total_q) -> (Tensor positions, Tensor seq_lens, Tensor cu_seqlens_q, Tensor slots)",
     PT_BOX(&prepare_step)},
    {"commit",
     "(Tensor accept_index, Tensor num_accepted, Tensor tokens, Tensor cu_nodes, Tensor start, *,"
     " Tensor(a!)? history=None, Tensor(b!)? history_lens=None, Tensor? eos_ids=None, Tensor? node_map=None,"
     " Tensor(c!)? output_counts=None, Tensor? tokens_left=None, Tensor? history_rows=None)"
     " -> (Tensor new_start, Tensor last_token, Tensor finished, Tensor new_num_accepted, Tensor num_tokens,"
     " Tensor accept_rows, Tensor draft_accept_index, Tensor draft_num_accepted, Tensor draft_missing,"
     " Tensor draft_num_missing)",
     PT_BOX(&commit)},
};

}  // namespace

PT_OPS(kOps)

}  // namespace pagedtree::ops
