#include "core/kv_cache.h"

#include <algorithm>
#include <utility>

#include "torch/ops.h"
#include "torch/prepared.h"
#include "torch/values.h"

namespace pagedtree::ops {
namespace {

void check_slot_mapping_values(const Check& check, const SlotMappingParams& p, const Tensor& page_table,
                               const Tensor& seq_lens, const Tensor& cu_seqlens_q) {
  const auto offsets = host_values<int32_t>(cu_seqlens_q);
  const auto lengths = host_values<int32_t>(seq_lens);
  const auto table = host_values<int32_t>(page_table);
  check_offsets(check, offsets, "cu_seqlens_q", p.total_q);
  WritablePages written;
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t new_tokens = offsets[b + 1] - offsets[b];
    check.that(lengths[b] >= new_tokens, at("seq_lens", b), "at least its " + std::to_string(new_tokens) + " queries",
               lengths[b]);
    check_pages(check, table, p.table.max_pages, p.table.page_size, b, lengths[b] - new_tokens, lengths[b], INT32_MAX);
    written.add(check, table, p.table.max_pages, p.table.page_size, b, lengths[b] - new_tokens, lengths[b]);
  }
}

AppendSide append_side(const Check& check, const Tensor& rows, const Tensor& cache, const OptionalTensor& scale,
                       const std::string& name) {
  const int64_t num_kv_heads = rows.size(1);
  AppendSide side{};
  side.rows = rows.const_data_ptr();
  side.cache = cache.mutable_data_ptr();
  set_strides(rows, side.token_stride, side.head_stride);
  side.cache_page_stride = cache.stride(0);
  side.cache_slot_stride = cache.stride(1);
  side.cache_head_stride = cache.stride(2);
  side.head_dim = rows.size(2);
  if (!scale.has_value()) return side;
  check.that(rows.scalar_type() != cache.scalar_type(), name, "None if rows are copied without conversion",
             "a scale with a cache of dtype " + dtype_text(cache.scalar_type()));
  if (scale->dim() == 0) {
    side.scale = check.read<float>(*scale, name, {});
  } else if (scale->dim() == 1 && scale->size(0) == 1) {
    side.scale = check.read<float>(*scale, name, {{"Hkv", 1}});
  } else {
    side.scale = check.read<float>(*scale, name, {{"Hkv", num_kv_heads}});
    side.scale_stride = 1;
  }
  return side;
}

// Describes a row by few strided loops over contiguous runs, for any order of dimensions.
CacheView cache_view(const Check& check, const Tensor& cache, const std::string& name) {
  struct Dim {
    int64_t size, stride;
  };
  const auto element = static_cast<int64_t>(cache.element_size());
  CacheView view{};
  view.data = cache.mutable_data_ptr();
  view.page_stride = cache.stride(0) * element;
  view.slot_stride = cache.stride(1) * element;
  view.run_bytes = element;
  std::vector<Dim> dims;
  for (int64_t d = 2; d < cache.dim(); ++d) {
    if (cache.size(d) == 0) view.run_bytes = 0;
    if (cache.size(d) > 1 && cache.stride(d) != 0) dims.push_back({cache.size(d), cache.stride(d) * element});
  }
  std::stable_sort(dims.begin(), dims.end(), [](const Dim& a, const Dim& b) { return a.stride < b.stride; });
  std::vector<Dim> loops;
  for (const Dim& dim : dims) {
    if (loops.empty() && dim.stride == view.run_bytes) {
      view.run_bytes *= dim.size;
    } else if (!loops.empty() && dim.stride == loops.back().size * loops.back().stride) {
      loops.back().size *= dim.size;
    } else {
      loops.push_back(dim);
    }
  }
  if (loops.size() > 3) {
    check.fail(name, "rows with at most three strided dimensions", "strides " + Check::text(cache.strides()));
  }
  for (size_t i = 0; i < 3; ++i) {
    const bool used = i < loops.size();
    view.sizes[2 - i] = used ? loops[i].size : 1;
    view.strides[2 - i] = used ? loops[i].stride : 0;
  }
  return view;
}

std::vector<uint8_t> row_bytes(const Tensor& cache, const CompactKvParams& p, const std::vector<int32_t>& table,
                               int64_t b, int64_t position) {
  const int64_t page = table[b * p.table.max_pages + position / p.table.page_size];
  const Tensor row =
      host_copy(torch::stable::select(torch::stable::select(cache, 0, page), 0, position % p.table.page_size));
  const auto* bytes = const_pointer<uint8_t>(row);
  return {bytes, bytes + row.numel() * static_cast<int64_t>(row.element_size())};
}

// Returns true if a path was moved before: in all caches its last row is at its target and still at its source, which
// is no row's target. Zero rows prove nothing.
bool is_moved(const std::vector<Tensor>& caches, const CompactKvParams& p, const std::vector<int32_t>& table, int64_t b,
              int64_t from, int64_t to) {
  bool shows = false;
  for (const Tensor& cache : caches) {
    const std::vector<uint8_t> row = row_bytes(cache, p, table, b, from);
    if (row != row_bytes(cache, p, table, b, to)) return false;
    shows = shows || std::any_of(row.begin(), row.end(), [](uint8_t byte) { return byte != 0; });
  }
  return shows;
}

void check_compact_values(const Check& check, const CompactKvParams& p, const std::vector<Tensor>& caches,
                          const Tensor& page_table, const Tensor& start, const Tensor& accept_index,
                          const Tensor& num_accepted) {
  for (size_t i = 0; i < caches.size(); ++i) {
    const Tensor& cache = caches[i];
    check.that(cache.dim() < 5 || cache.size(0) >= cache.size(1), at("caches", static_cast<int64_t>(i)),
               "shape [pages, page_size, ...], one layer's K or V and no pool of several",
               Check::text(cache.sizes()) + ", more positions a page than pages");
  }
  const auto table = host_values<int32_t>(page_table);
  const auto starts = host_values<int32_t>(start);
  const auto nodes = host_values<int32_t>(accept_index);
  const auto accepted = host_values<int32_t>(num_accepted);
  WritablePages written;
  for (int64_t b = 0; b < p.batch; ++b) {
    check_path(check, nodes, p.path_width, b, accepted[b]);
    if (accepted[b] == 0 || p.num_pages == 0) continue;
    check.that(starts[b] >= 0, at("start", b), "a position", starts[b]);
    const int64_t last = nodes[b * p.path_width + accepted[b]], end = int64_t{starts[b]} + last + 1;
    check_pages(check, table, p.table.max_pages, p.table.page_size, b, starts[b], end, p.num_pages);
    for (int64_t i = 0; i < starts[b] / p.table.page_size; ++i) {  // -1: a page that left the window
      const int32_t page = table[b * p.table.max_pages + i];
      check.that(page < p.num_pages, "page_table[" + std::to_string(b) + ", " + std::to_string(i) + "]",
                 "a page id below " + std::to_string(p.num_pages) + ", the pages of caches[0]", page);
    }
    written.add(check, table, p.table.max_pages, p.table.page_size, b, starts[b], end);
    if (last == accepted[b]) continue;
    check.that(!is_moved(caches, p, table, b, starts[b] + last, int64_t{starts[b]} + accepted[b]), at("start", b),
               "that of a path that has not been moved yet",
               std::to_string(starts[b]) + ", behind which the path's rows are in place already");
  }
}

// Splits the caches into the params of one or more launches, without moves.
std::vector<CompactKvParams> compactions_of(const Check& check, const std::vector<Tensor>& caches) {
  const auto count = static_cast<int64_t>(caches.size());
  std::vector<CompactKvParams> launches(
      static_cast<size_t>(max_of<int64_t>(ceil_div<int64_t>(count, kMaxCompactTensors), 1)));
  for (int64_t i = 0; i < count; ++i) {
    const Tensor &cache = caches[static_cast<size_t>(i)], &first = caches[0];
    const std::string name = at("caches", i);
    check.device(cache, name);
    if (cache.dim() < 2) check.fail(name, "shape [pages, page_size, ...]", Check::text(cache.sizes()));
    if (cache.size(0) != first.size(0) || cache.size(1) != first.size(1)) {
      check.fail(
          name,
          "shape [" + std::to_string(first.size(0)) + ", " + std::to_string(first.size(1)) + ", ...] like caches[0]",
          Check::text(cache.sizes()));
    }
    check.memory(cache, name);
    CompactKvParams& launch = launches[static_cast<size_t>(i / kMaxCompactTensors)];
    launch.caches[launch.num_caches++] = cache_view(check, cache, name);
    launch.table.page_size = first.size(1);
    launch.num_pages = first.size(1) == 0 ? 0 : first.size(0);
  }
  return launches;
}

// State from `_prepare_compaction` for `_compact`.
struct PreparedCompaction : Prepared {
  KeptTensors<true> caches;
  std::vector<CompactKvParams> launches;  // for the caches at that time

  explicit PreparedCompaction(const std::vector<Tensor>& kept)
      : caches(kept), launches(compactions_of(Check("compact_kv", kept.front()), kept)) {}
};

// Params of the moves, without caches. The caches' room, most of the struct, is neither cleared nor copied.
CompactKvParams moves_of(const Check& check, const Tensor& page_table, const Tensor& start, const Tensor& accept_index,
                         const Tensor& num_accepted) {
  CompactKvParams p;
  p.start = check.read<int32_t>(start, "start", {"B"});
  p.batch = start.size(0);
  p.table = page_table_of(check, page_table, p.batch, 1);
  p.accept_index = check.read<int32_t>(accept_index, "accept_index", {{"B", p.batch}, "S"}, Strides::kLastContiguous);
  if (accept_index.size(1) > kMaxTreeNodes) {
    check.fail("accept_index", "at most 1024 columns", Check::text(accept_index.sizes()));
  }
  p.num_accepted = check.read<int32_t>(num_accepted, "num_accepted", {{"B", p.batch}});
  p.accept_stride = accept_index.stride(0);
  p.path_width = static_cast<int32_t>(accept_index.size(1));
  return p;
}

Tensor compact(const Check& check, const std::vector<Tensor>& caches, const std::vector<CompactKvParams>& launches,
               CompactKvParams& launch, const Tensor& page_table, const Tensor& start, const Tensor& accept_index,
               const Tensor& num_accepted) {
  Tensor seq_lens = made(page_table, {launch.batch}, launch.seq_lens);
  const Backend& backend = backend_for(page_table);
  const CallContext ctx = context_for(page_table);
  bool checks_values = value_checks_enabled();
  for (const CompactKvParams& prepared : launches) {
    std::copy_n(prepared.caches, prepared.num_caches, launch.caches);
    launch.num_caches = prepared.num_caches;
    launch.num_pages = prepared.num_pages;
    launch.table.page_size = max_of<int64_t>(prepared.table.page_size, 1);
    if (checks_values) check_compact_values(check, launch, caches, page_table, start, accept_index, num_accepted);
    checks_values = false;
    backend.compact_kv(launch, ctx);
  }
  return seq_lens;
}

Tensor slot_mapping(const Tensor& page_table, const Tensor& seq_lens, const Tensor& cu_seqlens_q, int64_t page_size,
                    int64_t total_q) {
  const Check check("slot_mapping", page_table);
  SlotMappingParams params{};
  params.batch = check.offsets(cu_seqlens_q, "cu_seqlens_q", params.cu_seqlens_q);
  params.table = page_table_of(check, page_table, params.batch, page_size);
  params.seq_lens = check.read<int32_t>(seq_lens, "seq_lens", {{"B", params.batch}});
  check.in(page_size, "page_size", 1, INT32_MAX);
  check.that(total_q >= 0, "total_q", "at least 0", total_q);

  params.total_q = total_q;
  if (value_checks_enabled()) check_slot_mapping_values(check, params, page_table, seq_lens, cu_seqlens_q);
  Tensor slots = made(page_table, {total_q}, params.slots);
  backend_for(page_table).slot_mapping(params, context_for(page_table));
  return slots;
}

// Checks all but k, whose dtype and three dimensions are checked.
AppendKvParams append_params(const Check& check, const Tensor& k, const OptionalTensor& v, const Tensor& k_cache,
                             const OptionalTensor& v_cache, const Tensor& slots, const OptionalTensor& k_scale,
                             const OptionalTensor& v_scale) {
  AppendKvParams params{};
  constexpr ScalarType kFp8 = ScalarType::Float8_e4m3fn;
  const int64_t num_tokens = k.size(0), num_kv_heads = k.size(1);
  if (!k_cache.defined() || k_cache.scalar_type() != kFp8) check.dtype(k_cache, "k_cache", {k.scalar_type(), kFp8});
  check.heads(k_cache, "k_cache", "k's " + std::to_string(num_kv_heads) + " heads",
              [&](int64_t heads) { return heads == num_kv_heads; });
  check.tensor(k_cache, "k_cache", {k_cache.scalar_type()},
               {"pages", "page_size", {"Hkv", num_kv_heads}, {"D", k.size(2)}}, Strides::kLastContiguous);
  const bool has_v = v.has_value();
  check.that(has_v || !v_cache.has_value(), "v", "a Tensor if v_cache is one", "None");
  check.that(!has_v || v_cache.has_value(), "v_cache", "a Tensor if v is one", "None");
  check.that(has_v || !v_scale.has_value(), "v_scale", "None where v is", "a Tensor");
  if (has_v) {
    check.tensor(*v, "v", {k.scalar_type()}, {{"T", num_tokens}, {"Hkv", num_kv_heads}, "Dv"},
                 Strides::kLastContiguous);
    check.tensor(
        *v_cache, "v_cache", {k_cache.scalar_type()},
        {{"pages", k_cache.size(0)}, {"page_size", k_cache.size(1)}, {"Hkv", num_kv_heads}, {"Dv", v->size(2)}},
        Strides::kLastContiguous);
  }
  params.slots = check.read<int64_t>(slots, "slots", {{"T", num_tokens}});

  params.sides[params.num_sides++] = append_side(check, k, k_cache, k_scale, "k_scale");
  if (has_v) params.sides[params.num_sides++] = append_side(check, *v, *v_cache, v_scale, "v_scale");
  params.num_tokens = num_tokens;
  params.num_kv_heads = num_kv_heads;
  params.num_pages = k_cache.size(0);
  params.page_size = k_cache.size(1);
  params.dtype = core_dtype(k);
  params.cache_dtype = core_dtype(k_cache);
  const int64_t num_slots = params.num_pages * params.page_size;
  if (value_checks_enabled()) check_range<int64_t>(check, slots, "slots", -1, num_slots - 1);
  return params;
}

void append_kv(const Tensor& k, const OptionalTensor& v, const Tensor& k_cache, const OptionalTensor& v_cache,
               const Tensor& slots, const OptionalTensor& k_scale, const OptionalTensor& v_scale) {
  const Check check("append_kv", k);
  check.tensor(k, "k", {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16, ScalarType::Float8_e4m3fn},
               {"T", "Hkv", "D"}, Strides::kLastContiguous);
  const AppendKvParams params = append_params(check, k, v, k_cache, v_cache, slots, k_scale, v_scale);
  backend_for(k).append_kv(params, context_for(k));
}

#define PT_ROPE_PARAMETERS                                                                                   \
  const Tensor &q, const Tensor &k, const OptionalTensor &v, const Tensor &positions, const Tensor &cos_sin, \
      const Tensor &k_cache, const OptionalTensor &v_cache, const Tensor &slots, bool interleaved,           \
      int64_t rotary_start, const OptionalTensor &k_scale, const OptionalTensor &v_scale

RopeAppendParams rope_params(const Check& check, PT_ROPE_PARAMETERS) {
  RopeAppendParams params{};
  check.tensor(q, "q", {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16}, {"T", "Hq", "D"},
               Strides::kLastContiguous);
  const int64_t num_tokens = q.size(0), head_dim = q.size(2);
  check.tensor(k, "k", {q.scalar_type()}, {{"T", num_tokens}, "Hkv", {"D", head_dim}}, Strides::kLastContiguous);
  params.positions = check.read<int64_t>(positions, "positions", {{"T", num_tokens}});
  if (q.scalar_type() == ScalarType::Float) {
    check.dtype(cos_sin, "cos_sin", {ScalarType::Float});
  } else {
    check.dtype(cos_sin, "cos_sin", {ScalarType::Float, q.scalar_type()});
  }
  check.tensor(cos_sin, "cos_sin", {cos_sin.scalar_type()}, {"P", "rotary_dim"}, Strides::kLastContiguous);
  const int64_t num_angle_rows = cos_sin.size(0), rotary_dim = cos_sin.size(1);
  check.that(num_angle_rows > 0 || num_tokens == 0, "cos_sin", "at least one row", Check::text(cos_sin.sizes()));
  check.that(rotary_dim % 2 == 0, "cos_sin", "an even number of columns", Check::text(cos_sin.sizes()));
  check.that(rotary_dim <= head_dim, "cos_sin", "at most " + std::to_string(head_dim) + " columns, the head size",
             Check::text(cos_sin.sizes()));
  check.that(rotary_start >= 0 && rotary_start <= head_dim - rotary_dim, "rotary_start",
             "0.." + std::to_string(head_dim - rotary_dim) + ", so that the " + std::to_string(rotary_dim) +
                 " columns are within a head",
             rotary_start);

  params.append = append_params(check, k, v, k_cache, v_cache, slots, k_scale, v_scale);
  params.q = q.const_data_ptr();
  params.cos_sin = cos_sin.const_data_ptr();
  set_strides(q, params.q_token_stride, params.q_head_stride);
  params.cos_sin_stride = cos_sin.stride(0);
  params.num_angle_rows = num_angle_rows;
  params.num_q_heads = q.size(1);
  params.head_dim = head_dim;
  params.rotary_start = rotary_start;
  params.rotary_dim = rotary_dim;
  params.cos_sin_dtype = core_dtype(cos_sin);
  params.interleaved = interleaved;
  if (value_checks_enabled()) check_range<int64_t>(check, positions, "positions", 0, num_angle_rows - 1);
  return params;
}

void run_rope_append(RopeAppendParams& params, const Tensor& q, const Tensor& q_out) {
  params.q_out = q_out.mutable_data_ptr();
  set_strides(q_out, params.out_token_stride, params.out_head_stride);
  backend_for(q).rope_append(params, context_for(q));
}

Tensor rope_append(PT_ROPE_PARAMETERS) {
  const Check check("rope_append", q);
  RopeAppendParams params = rope_params(check, q, k, v, positions, cos_sin, k_cache, v_cache, slots, interleaved,
                                        rotary_start, k_scale, v_scale);
  Tensor q_out = empty_on(q, {q.size(0), q.size(1), q.size(2)}, q.scalar_type());
  run_rope_append(params, q, q_out);
  return q_out;
}

void rope_append_out(PT_ROPE_PARAMETERS, const Tensor& q_out) {
  const Check check("rope_append", q);
  RopeAppendParams params = rope_params(check, q, k, v, positions, cos_sin, k_cache, v_cache, slots, interleaved,
                                        rotary_start, k_scale, v_scale);
  check.tensor(q_out, "q_out", {q.scalar_type()}, {{"T", q.size(0)}, {"Hq", q.size(1)}, {"D", q.size(2)}},
               Strides::kLastContiguous);
  run_rope_append(params, q, q_out);
}

Tensor compact_kv(const std::vector<Tensor>& caches, const Tensor& page_table, const Tensor& start,
                  const Tensor& accept_index, const Tensor& num_accepted) {
  const Check check("compact_kv", page_table);
  CompactKvParams moves = moves_of(check, page_table, start, accept_index, num_accepted);
  return compact(check, caches, compactions_of(check, caches), moves, page_table, start, accept_index, num_accepted);
}

int64_t prepare_compaction(const std::vector<Tensor>& caches) {
  return keep_prepared(std::make_shared<PreparedCompaction>(caches));
}

Tensor compact_prepared(const Tensor& page_table, const Tensor& start, const Tensor& accept_index,
                        const Tensor& num_accepted, int64_t caches) {
  const Check check("compact_kv", page_table);
  const auto kept = prepared<PreparedCompaction>(check, caches, "caches");
  check.device(kept->caches.tensors().front(), "caches");
  CompactKvParams moves = moves_of(check, page_table, start, accept_index, num_accepted);
  const auto run = [&](const std::vector<CompactKvParams>& launches) {
    return compact(check, kept->caches.tensors(), launches, moves, page_table, start, accept_index, num_accepted);
  };
  return kept->caches.are_unchanged() ? run(kept->launches) : run(compactions_of(check, kept->caches.tensors()));
}

#define PT_ROPE_ARGUMENTS                                                                                     \
  "Tensor q, Tensor k, Tensor? v, Tensor positions, Tensor cos_sin, Tensor(a!) k_cache, Tensor(b!)? v_cache," \
  " Tensor slots, *, bool interleaved=False, SymInt rotary_start=0, Tensor? k_scale=None, Tensor? v_scale=None"

constexpr Op kOps[] = {
    {"slot_mapping",
     "(Tensor page_table, Tensor seq_lens, Tensor cu_seqlens_q, SymInt page_size, *, SymInt total_q)"
     " -> Tensor",
     PT_BOX(&slot_mapping)},
    {"append_kv",
     "(Tensor k, Tensor? v, Tensor(a!) k_cache, Tensor(b!)? v_cache, Tensor slots, *, Tensor? k_scale=None,"
     " Tensor? v_scale=None) -> ()",
     PT_BOX(&append_kv)},
    {"rope_append", "(" PT_ROPE_ARGUMENTS ") -> Tensor", PT_BOX(&rope_append)},
    {"rope_append.out", "(" PT_ROPE_ARGUMENTS ", Tensor(c!) q_out) -> ()", PT_BOX(&rope_append_out)},
    {"compact_kv",
     "(Tensor(a!)[] caches, Tensor page_table, Tensor start, Tensor accept_index, Tensor num_accepted)"
     " -> Tensor",
     PT_BOX(&compact_kv)},
    {"_prepare_compaction", "(Tensor[] caches) -> SymInt", PT_BOX(&prepare_compaction)},
    {"_compact", "(Tensor page_table, Tensor start, Tensor accept_index, Tensor num_accepted, SymInt caches) -> Tensor",
     PT_BOX(&compact_prepared)},
};

}  // namespace

PT_OPS(kOps)

}  // namespace pagedtree::ops
