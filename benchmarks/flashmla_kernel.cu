// FlashMLA's bf16 decoding of latent rows on Hopper for latent_peers.py. Written for its sources of April 2026, where
// merging and scheduling are separate kernels.
#include "sm90/decode/dense/instantiations/bf16.cu"
#include "smxx/decode/combine/combine.cu"
#include "smxx/decode/get_decoding_sched_meta/get_decoding_sched_meta.cu"

constexpr int kRow = 576, kValues = 512, kPage = 64;  // fixed by its kernels

struct FlashMlaCall {
  int32_t batch, queries, heads, pages, table_stride, parts;
  int64_t page_stride, row_stride;
  void *q, *k, *out;
  float *lse, *lse_parts, *out_parts;  // parts: of batch + parts sequences
  int32_t *page_table, *lengths;
  DecodingSchedMeta* schedule;  // [parts]
  int32_t* splits;              // [batch + 1]
  cudaStream_t stream;
  float scale;
};

extern "C" void flashmla_plan(const FlashMlaCall* call) {
  GetDecodeSchedMetaParams params{};
  params.b = call->batch;
  params.s_q = call->queries;
  params.block_size_n = kPage;
  params.fixed_overhead_num_blocks = 5;  // its interface's value
  params.topk = params.extra_topk = -1;
  params.seqlens_k_ptr = call->lengths;
  params.tile_scheduler_metadata_ptr = call->schedule;
  params.num_splits_ptr = call->splits;
  params.num_sm_parts = call->parts;
  params.stream = call->stream;
  smxx::decode::run_get_decoding_sched_meta_kernel(params);
}

extern "C" void flashmla_run(const FlashMlaCall* call) {
  const int rows = call->queries * call->heads;
  DenseAttnDecodeParams params{};
  params.b = call->batch;
  params.s_q = call->queries;
  params.q_seq_per_hk = rows;
  params.d = kRow;
  params.d_v = kValues;
  params.h_q = params.q_head_per_hk = call->heads;
  params.h_k = 1;
  params.num_blocks = call->pages;
  params.is_causal = call->queries > 1;
  params.scale_softmax = call->scale;
  params.scale_softmax_log2 = static_cast<float>(call->scale * M_LOG2E);
  params.q_ptr = call->q;
  params.k_ptr = call->k;
  params.o_ptr = call->out;
  params.softmax_lse_ptr = call->lse;
  params.q_batch_stride = int64_t{rows} * kRow;
  params.k_batch_stride = call->page_stride;
  params.o_batch_stride = params.o_head_stride = int64_t{rows} * kValues;
  params.q_row_stride = params.q_head_stride = kRow;
  params.k_row_stride = params.k_head_stride = call->row_stride;
  params.o_row_stride = kValues;
  params.block_table = call->page_table;
  params.block_table_batch_stride = call->table_stride;
  params.page_block_size = kPage;
  params.seqlens_k_ptr = call->lengths;
  params.tile_scheduler_metadata_ptr = call->schedule;
  params.num_sm_parts = call->parts;
  params.num_splits_ptr = call->splits;
  params.total_num_splits = call->batch + call->parts;
  params.softmax_lseaccum_ptr = call->lse_parts;
  params.oaccum_ptr = call->out_parts;
  params.stream = call->stream;
  sm90::run_flash_splitkv_mla_kernel<cutlass::bfloat16_t>(params);

  CombineParams parts{};
  parts.b = call->batch;
  parts.s_q = call->queries;
  parts.h_q = call->heads;
  parts.d_v = kValues;
  parts.lse = call->lse;
  parts.out = call->out;
  parts.lse_accum = call->lse_parts;
  parts.o_accum = call->out_parts;
  parts.stride_lse_b = parts.stride_lse_accum_split = rows;
  parts.stride_lse_s_q = parts.stride_lse_accum_s_q = call->heads;
  parts.stride_o_b = parts.stride_o_accum_split = rows * kValues;
  parts.stride_o_s_q = parts.stride_o_accum_s_q = call->heads * kValues;
  parts.stride_o_h_q = parts.stride_o_accum_h_q = kValues;
  parts.tile_scheduler_metadata_ptr = call->schedule;
  parts.num_splits_ptr = call->splits;
  parts.num_sm_parts = call->parts;
  parts.stream = call->stream;
  smxx::decode::run_flash_mla_combine_kernel<cutlass::bfloat16_t>(parts);
}
