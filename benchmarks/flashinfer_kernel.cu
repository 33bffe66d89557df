// FlashInfer's FA2 paged prefill kernel behind C functions, from its headers alone: bf16, head size 128, a custom or
// causal mask. flashinfer_kernel.py compiles it and calls it through ctypes.
//
// Written for flashinfer-python 0.7 (flashinfer/data/include).

#include <cuda_bf16.h>

#include <cstdint>
#include <exception>
#include <flashinfer/attention/default_prefill_params.cuh>
#include <flashinfer/attention/mask.cuh>
#include <flashinfer/attention/prefill.cuh>
#include <flashinfer/attention/scheduler.cuh>
#include <flashinfer/attention/variants.cuh>
#include <flashinfer/pos_enc.cuh>
#include <flashinfer/quantization.cuh>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace {

using flashinfer::MaskMode;
using flashinfer::PrefillPlanInfo;
using Params = flashinfer::BatchPrefillPagedParams<nv_bfloat16, nv_bfloat16, nv_bfloat16, int32_t>;

constexpr uint32_t kHeadDim = 128;

std::string& last_error() {
  thread_local std::string text;
  return text;
}

// Returns 0, or 1 with a text in last_error(): exceptions stay in the library.
template <typename Call>
int guarded(Call call) {
  try {
    const cudaError_t status = call();
    if (status == cudaSuccess) return 0;
    last_error() = cudaGetErrorString(status);
  } catch (const std::exception& error) {
    last_error() = error.what();
  }
  return 1;
}

template <typename T>
T* at(void* base, int64_t offset) {
  return reinterpret_cast<T*>(static_cast<char*>(base) + offset);
}

template <MaskMode kMask>
cudaError_t run_masked(const Params& params, const PrefillPlanInfo& plan, nv_bfloat16* partial_out, float* partial_lse,
                       bool overlaps, cudaStream_t stream) {
  using Variant = flashinfer::DefaultAttention<kMask == MaskMode::kCustom, /*use_sliding_window=*/false,
                                               /*use_logits_soft_cap=*/false, /*use_alibi=*/false>;
  const auto run = [&](auto rows) {
    return flashinfer::BatchPrefillWithPagedKVCacheDispatched<
        /*SAME_KV_STRIDES=*/true, rows, kHeadDim, kHeadDim, flashinfer::PosEncodingMode::kNone,
        /*USE_FP16_QK_REDUCTION=*/false, kMask, Variant>(params, partial_out, partial_lse, overlaps, stream);
  };
  switch (plan.cta_tile_q) {  // rows of a tile in its plan
    case 16:
      return run(std::integral_constant<uint32_t, 16>());
    case 64:
      return run(std::integral_constant<uint32_t, 64>());
    case 128:
      return run(std::integral_constant<uint32_t, 128>());
    default:
      throw std::runtime_error("no tile of " + std::to_string(plan.cta_tile_q) + " rows was compiled");
  }
}

}  // namespace

extern "C" {

// Common arguments; pointers are device pointers except host ones.
struct FlashInferShape {
  int32_t batch, num_queries, num_heads, num_kv_heads, page_size;
  void *float_workspace, *int_workspace, *host_workspace;  // host_workspace is page-locked, of int_bytes
  uint64_t float_bytes, int_bytes;
  void* stream;
};

const char* flashinfer_last_error() { return last_error().c_str(); }

int64_t flashinfer_plan_bytes() { return sizeof(PrefillPlanInfo); }
int64_t flashinfer_shape_bytes() { return sizeof(FlashInferShape); }

// mask: a byte a pair, sequence b at mask_indptr[b]; packed: a bit a pair, sequence b at packed_indptr[b].
int flashinfer_pack_mask(const FlashInferShape* shape, bool* mask, uint8_t* packed, int32_t* mask_indptr,
                         int32_t* packed_indptr) {
  return guarded([&] {
    return flashinfer::quantization::SegmentPackBits(mask, packed, mask_indptr, packed_indptr, shape->batch,
                                                     flashinfer::quantization::BitOrder::kLittle,
                                                     static_cast<cudaStream_t>(shape->stream));
  });
}

// Splits a step's work on the host. query_indptr, page_indptr: host [batch + 1]. plan: host, flashinfer_plan_bytes().
int flashinfer_plan(const FlashInferShape* shape, int32_t* query_indptr, int32_t* page_indptr, void* plan) {
  return guarded([&] {
    auto& info = *new (plan) PrefillPlanInfo();
    return flashinfer::PrefillPlan<int32_t>(
        shape->float_workspace, shape->float_bytes, shape->int_workspace, shape->host_workspace, shape->int_bytes, info,
        query_indptr, page_indptr, shape->num_queries, shape->batch, shape->num_heads, shape->num_kv_heads, kHeadDim,
        kHeadDim, shape->page_size, /*enable_cuda_graph=*/false, sizeof(nv_bfloat16), /*window_left=*/-1,
        /*fixed_split_size=*/-1, /*disable_split_kv=*/false, /*num_colocated_ctas=*/0, /*uniform_q_len=*/0,
        static_cast<cudaStream_t>(shape->stream), sizeof(nv_bfloat16));
  });
}

// out, q: [num_queries, num_heads, 128]; k, v: [pages, page_size, num_kv_heads, 128]. packed_mask null: causal.
// overlaps: programmatic dependent launch, FlashInfer's default on sm_90 and later.
int flashinfer_run(const FlashInferShape* shape, const void* plan, void* q, void* k, void* v, void* out,
                   int32_t* query_indptr, int32_t* page_indptr, int32_t* page_indices, int32_t* last_page_len,
                   uint8_t* packed_mask, int32_t* packed_indptr, float scale, int overlaps) {
  return guarded([&] {
    const auto& info = *static_cast<const PrefillPlanInfo*>(plan);
    const auto bf16 = [](void* pointer) { return static_cast<nv_bfloat16*>(pointer); };
    flashinfer::paged_kv_t<nv_bfloat16, int32_t> cache(shape->num_kv_heads, shape->page_size, kHeadDim, shape->batch,
                                                       flashinfer::QKVLayout::kNHD, bf16(k), bf16(v), page_indices,
                                                       page_indptr, last_page_len);
    Params params(bf16(q), cache, packed_mask, query_indptr, packed_indptr, /*maybe_q_rope_offset=*/nullptr, bf16(out),
                  /*lse=*/nullptr, /*maybe_alibi_slopes=*/nullptr, shape->num_heads, shape->num_heads * kHeadDim,
                  kHeadDim, /*window_left=*/-1, /*logits_soft_cap=*/0.0f, scale, /*rope_scale=*/1.0f,
                  /*rope_theta=*/1.0f);
    void* ints = shape->int_workspace;
    params.request_indices = at<int32_t>(ints, info.request_indices_offset);
    params.qo_tile_indices = at<int32_t>(ints, info.qo_tile_indices_offset);
    params.kv_tile_indices = at<int32_t>(ints, info.kv_tile_indices_offset);
    params.o_indptr = at<int32_t>(ints, info.o_indptr_offset);
    params.kv_chunk_size_ptr = at<int32_t>(ints, info.kv_chunk_size_ptr_offset);
    params.padded_batch_size = info.padded_batch_size;
    params.max_total_num_rows = info.total_num_rows;
    nv_bfloat16* partial_out = nullptr;
    float* partial_lse = nullptr;
    if (info.split_kv) {
      params.merge_indptr = at<int32_t>(ints, info.merge_indptr_offset);
      partial_out = at<nv_bfloat16>(shape->float_workspace, info.v_offset);
      partial_lse = at<float>(shape->float_workspace, info.s_offset);
    }
    const auto run = packed_mask ? run_masked<MaskMode::kCustom> : run_masked<MaskMode::kCausal>;
    return run(params, info, partial_out, partial_lse, overlaps != 0, static_cast<cudaStream_t>(shape->stream));
  });
}

}  // extern "C"
