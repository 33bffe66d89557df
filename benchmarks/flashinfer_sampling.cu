// FlashInfer's sampling kernels behind C functions for sampling_peers.py, compiled by flashinfer_kernel.py.
//
// Written for flashinfer-python 0.7 (flashinfer/data/include), whose headers include curand's.

#include <cuda_bf16.h>

#include <cstdint>
#include <flashinfer/sampling.cuh>

namespace {

namespace sampling = flashinfer::sampling;
using Id = int32_t;

constexpr bool kDeterministic = true;  // FlashInfer's default

}  // namespace

// Each returns a cudaError_t. logits, probs: device [rows, vocab]; tokens, valid: device [rows].
extern "C" {

// work: for up to 128 rows, at least 8 bytes for each 8192 logits of a row.
int flashinfer_softmax(float* logits, float* probs, int rows, int vocab, float temperature, void* work,
                       uint64_t work_bytes, cudaStream_t stream) {
  return sampling::OnlineSoftmax<float>(logits, probs, rows, vocab, nullptr, temperature, work, work_bytes,
                                        /*enable_pdl=*/false, stream);
}

int flashinfer_from_logits_bf16(void* logits, Id* tokens, int rows, int vocab, uint64_t seed, cudaStream_t stream) {
  return sampling::SamplingFromLogits<__nv_bfloat16, Id>(static_cast<__nv_bfloat16*>(logits), tokens, nullptr, rows,
                                                         vocab, kDeterministic, nullptr, seed, nullptr, 0, stream);
}

int flashinfer_from_logits(float* logits, Id* tokens, int rows, int vocab, uint64_t seed, cudaStream_t stream) {
  return sampling::SamplingFromLogits<float, Id>(logits, tokens, nullptr, rows, vocab, kDeterministic, nullptr, seed,
                                                 nullptr, 0, stream);
}

int flashinfer_top_p(float* probs, Id* tokens, bool* valid, int rows, int vocab, float top_p, uint64_t seed,
                     cudaStream_t stream) {
  return sampling::TopPSamplingFromProb<float, Id>(probs, tokens, valid, nullptr, nullptr, rows, top_p, vocab,
                                                   kDeterministic, nullptr, seed, nullptr, 0, stream);
}

int flashinfer_top_k_top_p(float* probs, Id* tokens, bool* valid, int rows, int vocab, int top_k, float top_p,
                           uint64_t seed, cudaStream_t stream) {
  return sampling::TopKTopPSamplingFromProb<float, Id>(probs, nullptr, nullptr, tokens, valid, nullptr, rows, top_k,
                                                       top_p, vocab, kDeterministic, nullptr, seed, nullptr, 0, stream);
}

}  // extern "C"
