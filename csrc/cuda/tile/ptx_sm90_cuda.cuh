// The instructions of ptx_sm90.cuh for the GPU.
#pragma once

#include <cuda.h>

#include "cuda/tile/ptx_cuda.cuh"

#define PT_DEVICE __device__ __forceinline__

namespace pagedtree::ptx {

// ---- mbarrier: a phase ends with its last arrival and the last of the bytes it expects

PT_DEVICE void mbar_init(uint64_t* bar, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_addr(bar)), "r"(count) : "memory");
}
PT_DEVICE void fence_mbar_init() {
  asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async;" ::: "memory");
}
PT_DEVICE void mbar_arrive(uint64_t* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_addr(bar)) : "memory");
}
PT_DEVICE void mbar_arrive_expect(uint64_t* bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_addr(bar)), "r"(bytes) : "memory");
}
// The calling thread's arrival, when the cp.async that it has issued before have arrived.
PT_DEVICE void cp_async_mbar_arrive(uint64_t* bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_addr(bar)) : "memory");
}
// Waits until the phase of this parity has ended. A build for debugging ends the kernel after 2^26 turns, seconds, in
// which no phase of ours takes that long: a lost arrival is an error then, not a kernel that never ends.
PT_DEVICE void mbar_wait(uint64_t* bar, uint32_t parity) {
#if defined(PAGEDTREE_TRAP_SPINS)
  asm volatile(
      "{.reg .pred p, late; .reg .u32 turns; mov.u32 turns, 0; "
      "L: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; add.u32 turns, turns, 1; "
      "setp.eq.and.u32 late, turns, 67108864, !p; @late trap; @!p bra L;}" ::"r"(smem_addr(bar)),
      "r"(parity)
      : "memory");
#else
  asm volatile(
      "{.reg .pred p; L: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra L;}" ::"r"(smem_addr(bar)),
      "r"(parity)
      : "memory");
#endif
}

// ---- TMA

// Of CUDA 13's alignment under CUDA 12 too, so that simt lays out parameters in the same way.
struct alignas(128) TensorMap {
  CUtensorMap map;
};
// A box of a tensor from (x, y, z, w, v) on; zeros outside the tensor.
PT_DEVICE void tma_load_5d(void* to, const TensorMap* map, int x, int y, int z, int w, int v, uint64_t* bar) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], "
      "[%7];" ::"r"(smem_addr(to)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v), "r"(smem_addr(bar))
      : "memory");
}

// Copies `bytes` from global to shared memory, all multiples of 16.
PT_DEVICE void bulk_load(void* to, const void* from, uint32_t bytes, uint64_t* bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem_addr(to)),
      "l"(from), "r"(bytes), "r"(smem_addr(bar))
      : "memory");
}

// Stores `value` at the same place of CTA `rank` of the cluster, whose barrier counts its 8 bytes.
PT_DEVICE void tell(uint64_t* place, uint64_t value, uint64_t* bar, uint32_t rank) {
  asm volatile(
      "{.reg .b32 to, of; mapa.shared::cluster.u32 to, %0, %3; mapa.shared::cluster.u32 of, %2, %3; "
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [to], %1, [of];}" ::"r"(smem_addr(place)),
      "l"(value), "r"(smem_addr(bar)), "r"(rank)
      : "memory");
}

// What the thread has written to shared memory, or knows to be written, is visible to wgmma and TMA.
PT_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- wgmma: d [64, N] += a [64, 16] b [16, N] by 128 threads, operands of T, fp32 sums. Thread t has
// rows t / 32 * 16 + t % 32 / 4 and that + 8: d[n] are columns 8 n + t % 4 * 2 and the next, of one row and of the
// other

// A matrix in shared memory with the 128-byte swizzle; the offsets count bytes.
PT_DEVICE uint64_t matrix_descriptor(const void* p, uint32_t leading_offset, uint32_t stride_offset) {
  return uint64_t{smem_addr(p) >> 4 & 0x3fff} | uint64_t{leading_offset >> 4} << 16 |
         uint64_t{stride_offset >> 4} << 32 | uint64_t{1} << 62;
}
PT_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
PT_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kNewestLeft>
PT_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kNewestLeft) : "memory");
}
// Follows the wait for what is in `d`: no use of it may be moved before the wait, which does not name it.
template <int N>
PT_DEVICE void wgmma_results(float (&d)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; ++n) asm volatile("" : "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])::"memory");
}
template <int kRegisters>
PT_DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
PT_DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// The registers of `d` as operands and as text, for 64, 128 and 256 columns: %0 and on.
#define PT_SUMS_8(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define PT_SUMS_32(n) PT_SUMS_8(n), PT_SUMS_8((n) + 1), PT_SUMS_8((n) + 2), PT_SUMS_8((n) + 3)
#define PT_SUMS_64 PT_SUMS_32(0), PT_SUMS_32(4)
#define PT_SUMS_128 PT_SUMS_64, PT_SUMS_32(8), PT_SUMS_32(12)
#define PT_SUMS_256 PT_SUMS_128, PT_SUMS_32(16), PT_SUMS_32(20), PT_SUMS_32(24), PT_SUMS_32(28)
#define PT_TEN(t) "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9, "
#define PT_SIXTY PT_TEN() PT_TEN(1) PT_TEN(2) PT_TEN(3) PT_TEN(4) PT_TEN(5)
#define PT_OTHER_SIXTY PT_TEN(6) PT_TEN(7) PT_TEN(8) PT_TEN(9) PT_TEN(10) PT_TEN(11)
#define PT_TEXT_64 PT_TEN() PT_TEN(1) PT_TEN(2) "%30, %31"
#define PT_TEXT_128 PT_SIXTY "%60, %61, %62, %63"
#define PT_TEXT_256 PT_SIXTY PT_OTHER_SIXTY "%120, %121, %122, %123, %124, %125, %126, %127"

// `accumulate` and `rest` are text with the numbers of the operands that follow those of d.
#define PT_WGMMA_OF(type, columns, accumulate, rest, ...)                                                    \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " accumulate ", 0; wgmma.mma_async.sync.aligned.m64n" #columns \
               "k16.f32." type "." type " {" PT_TEXT_##columns "}, " rest ";}"                               \
               : PT_SUMS_##columns                                                                           \
               : __VA_ARGS__                                                                                 \
               : "memory")
#define PT_WGMMA(T, columns, ...)                   \
  if constexpr (std::is_same_v<T, __nv_bfloat16>) { \
    PT_WGMMA_OF("bf16", columns, __VA_ARGS__);      \
  } else {                                          \
    static_assert(std::is_same_v<T, __half>);       \
    PT_WGMMA_OF("f16", columns, __VA_ARGS__);       \
  }
#define PT_INPUTS "l"(a), "l"(b), "r"(static_cast<int>(accumulate))

// Both operands are in shared memory, K-major. Without `accumulate`, d starts at 0.
template <typename T, int N>
PT_DEVICE void wgmma_ss(float (&d)[N / 8][4], uint64_t a, uint64_t b, bool accumulate) {
  static_assert(N == 64 || N == 128 || N == 256);
  if constexpr (N == 64) {
    PT_WGMMA(T, 64, "%34", "%32, %33, p, 1, 1, 0, 0", PT_INPUTS)
  } else if constexpr (N == 128) {
    PT_WGMMA(T, 128, "%66", "%64, %65, p, 1, 1, 0, 0", PT_INPUTS)
  } else {
    PT_WGMMA(T, 256, "%130", "%128, %129, p, 1, 1, 0, 0", PT_INPUTS)
  }
}

#undef PT_INPUTS
#define PT_INPUTS \
  "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kNMajor))

// a is in registers, b in shared memory, N-major or K-major.
template <typename T, int N, bool kNMajor>
PT_DEVICE void wgmma_rs(float (&d)[N / 8][4], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  static_assert(N == 64 || N == 128 || N == 256);
  if constexpr (N == 64) {
    PT_WGMMA(T, 64, "%37", "{%32, %33, %34, %35}, %36, p, 1, 1, %38", PT_INPUTS)
  } else if constexpr (N == 128) {
    PT_WGMMA(T, 128, "%69", "{%64, %65, %66, %67}, %68, p, 1, 1, %70", PT_INPUTS)
  } else {
    PT_WGMMA(T, 256, "%133", "{%128, %129, %130, %131}, %132, p, 1, 1, %134", PT_INPUTS)
  }
}

}  // namespace pagedtree::ptx

#undef PT_INPUTS
#undef PT_WGMMA
#undef PT_WGMMA_OF
#undef PT_TEXT_256
#undef PT_TEXT_128
#undef PT_TEXT_64
#undef PT_OTHER_SIXTY
#undef PT_SIXTY
#undef PT_TEN
#undef PT_SUMS_256
#undef PT_SUMS_128
#undef PT_SUMS_64
#undef PT_SUMS_32
#undef PT_SUMS_8
#undef PT_DEVICE
