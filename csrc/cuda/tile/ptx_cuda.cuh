// The instructions of ptx.cuh for the GPU.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#define PT_DEVICE __device__ __forceinline__

namespace pagedtree::ptx {

// ---- shared memory

// The dynamic shared memory of the launch, as one struct.
template <typename T>
PT_DEVICE T& shared() {
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  return *reinterpret_cast<T*>(dynamic_shared);
}

PT_DEVICE uint32_t smem_addr(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// ---- cp.async

// Copies 16 bytes; zeros where not valid.
PT_DEVICE void cp_async_16(uint32_t to, const void* from, bool valid = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
PT_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kNewestLeft>
PT_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kNewestLeft) : "memory");
}

// ---- ldmatrix

PT_DEVICE void ldmatrix_x4(uint32_t (&d)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address)
               : "memory");
}
PT_DEVICE void ldmatrix_x4_trans(uint32_t (&d)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address)
               : "memory");
}

// ---- mma

// d += a b for a 16 x 16 row major and b 16 x 8 column major, both of T; d is fp32.
template <typename T>
PT_DEVICE void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    static_assert(std::is_same_v<T, __half>);
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// d += a b for a 16 x 8 row major and b 8 x 8 column major, of which the first 19 bits count (tf32): fp16 and bf16 are
// exact in it.
PT_DEVICE void mma_m16n8k8(float (&d)[4], const float (&a)[4], float b0, float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
        "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// ---- e4m3

// Two e4m3 codes, in the low 16 bits, as two halves; from sm_89 on.
PT_DEVICE uint32_t half2_from_e4m3(uint32_t codes) {
  uint32_t d;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(d) : "h"(static_cast<unsigned short>(codes)));
  return d;
}

// The nearest e4m3 codes of two numbers, ties to even, at most 448 in magnitude; NaN is 0x7f. From sm_89 on.
PT_DEVICE uint32_t e4m3_from_floats(float low, float high) {
  unsigned short d;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(high), "f"(low));
  return d;
}

// ---- maxima

// The larger of the numbers at each place of two registers: one float, or two of half or bfloat16. NaN wins; +0 is
// above -0.
template <typename T>
PT_DEVICE uint32_t max_nan(uint32_t a, uint32_t b) {
  uint32_t d;
  if constexpr (std::is_same_v<T, float>) {
    asm("{.reg .f32 x, y;\n\tmov.b32 x, %1;\n\tmov.b32 y, %2;\n\tmax.NaN.f32 x, x, y;\n\tmov.b32 %0, x;}"
        : "=r"(d)
        : "r"(a), "r"(b));
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  } else {
    static_assert(std::is_same_v<T, __half>);
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  }
  return d;
}

// ---- clusters: CTAs that run at the same time and reach each other's shared memory, from sm_90 on. In a launch
// without clusters, and on older GPUs, a CTA is alone.

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
PT_DEVICE uint32_t cluster_index() {
  uint32_t index;
  asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(index));
  return index;
}
PT_DEVICE uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
PT_DEVICE uint32_t cluster_size() {
  uint32_t size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}
// All threads of all CTAs of the cluster meet; what any of them wrote before is visible to all.
PT_DEVICE void cluster_sync() {
  if (cluster_size() == 1) return __syncthreads();  // the cluster's barrier also waits for memory, which costs time
  asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
}
// The same object in the shared memory of CTA `rank`.
template <typename T>
PT_DEVICE T* of_cta(T* shared, uint32_t rank) {
  uint64_t address;
  asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(shared), "r"(rank));
  return reinterpret_cast<T*>(address);
}
#else
PT_DEVICE uint32_t cluster_index() { return blockIdx.x; }
PT_DEVICE uint32_t cluster_rank() { return 0; }
PT_DEVICE uint32_t cluster_size() { return 1; }
PT_DEVICE void cluster_sync() { __syncthreads(); }
template <typename T>
PT_DEVICE T* of_cta(T* shared, uint32_t) {
  return shared;
}
#endif

// ---- launches that overlap, from sm_90 on: see launch_behind()

// When all CTAs have called it, the next kernel may start.
PT_DEVICE void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Waits until everything that earlier kernels wrote is visible.
PT_DEVICE void wait_for_kernels_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- others

// As atomicAdd, with release and acquire for the whole GPU: what the calling thread has written or seen before is
// visible to threads that add to the word, or load it with load_acquire(), later.
PT_DEVICE unsigned fetch_add(unsigned* word, unsigned value) {
  unsigned old;
  asm volatile("atom.acq_rel.gpu.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(word), "r"(value) : "memory");
  return old;
}
PT_DEVICE unsigned load_acquire(const unsigned* word) {
  unsigned value;
  asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

// threadIdx.x, read again: values computed from it are not kept in registers from before.
PT_DEVICE uint32_t thread_index() {
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// A named barrier; all threads give the same number, that of the threads that come, a multiple of 32.
PT_DEVICE void barrier_sync(unsigned id, unsigned num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}
// Comes to the barrier, and does not wait there.
PT_DEVICE void barrier_arrive(unsigned id, unsigned num_threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}
PT_DEVICE float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace pagedtree::ptx

#undef PT_DEVICE
