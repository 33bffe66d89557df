// CUDA's keywords, variables and device functions, for kernels compiled by a host compiler.
#pragma once

#include <vector_functions.h>
#include <vector_types.h>

#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>

#include "simt/machine.h"

// The toolkit's headers remove the other keywords. All CTAs of all instances would share a static __shared__ variable,
// so kernels use ptx::shared<T>().
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __shared__
#define __shared__ static_assert(false, "use ptx::shared<T>()");
// Not inlined: calls cost tests less than inlining costs the compiler.
#undef __forceinline__
#define __forceinline__ inline

inline constinit uint3 threadIdx{}, blockIdx{};  // of the running thread
inline constinit dim3 blockDim{}, gridDim{};
constexpr int warpSize = 32;

namespace pagedtree::simt {

template <typename T, typename Source>
T shuffle(uint32_t mask, T value, const Site& site, Source source) {
  struct Arguments {
    T in, out;
    uint32_t source;
  } mine{value, value, source(machine().lane())};
  machine().collective(mask, &mine, site, [&](Arguments** all) {
    for (int i = 0; i < 32; ++i) {
      if (all[i] == nullptr) continue;
      const uint32_t from = all[i]->source;
      if (!(mask >> from & 1)) machine().fail(site, "reads lane " + std::to_string(from) + ", which takes no part");
      all[i]->out = all[from]->in;
    }
  });
  return mine.out;
}

template <typename T, typename Fold>
T reduce(uint32_t mask, T value, const Site& site, Fold fold) {
  machine().collective(mask, &value, site, [&](T** all) {
    T result{};
    bool first = true;
    for (int i = 0; i < 32; ++i) {
      if (all[i] == nullptr) continue;
      result = first ? *all[i] : static_cast<T>(fold(result, *all[i]));
      first = false;
    }
    for (int i = 0; i < 32; ++i) {
      if (all[i] != nullptr) *all[i] = result;
    }
  });
  return value;
}

inline uint32_t segment_base(uint32_t lane, int width) { return lane & ~static_cast<uint32_t>(width - 1); }

template <typename T, typename Change>
T atomic_update(T* address, Change change) {
  const std::atomic_ref<T> cell(*address);
  T old = cell.load();
  while (!cell.compare_exchange_weak(old, change(old))) {
  }
  return old;
}

}  // namespace pagedtree::simt

#define PT_SIMT_AT pagedtree::simt::Location at = pagedtree::simt::Location::current()

// ---- barriers

inline void __syncthreads(PT_SIMT_AT) {
  auto& m = pagedtree::simt::machine();
  m.barrier(0, m.num_threads(), {"__syncthreads", at});
}
inline int __syncthreads_count(int predicate, PT_SIMT_AT) {
  auto& m = pagedtree::simt::machine();
  return static_cast<int>(m.barrier(0, m.num_threads(), {"__syncthreads_count", at}, predicate != 0));
}
inline int __syncthreads_or(int predicate, PT_SIMT_AT) {
  auto& m = pagedtree::simt::machine();
  return m.barrier(0, m.num_threads(), {"__syncthreads_or", at}, predicate != 0) != 0;
}
inline int __syncthreads_and(int predicate, PT_SIMT_AT) {
  auto& m = pagedtree::simt::machine();
  return m.barrier(0, m.num_threads(), {"__syncthreads_and", at}, predicate != 0) == m.num_threads();
}
inline void __syncwarp(uint32_t mask = ~0u, PT_SIMT_AT) {
  auto& m = pagedtree::simt::machine();
  char none;
  m.order_warp_memory(true);
  m.collective(mask, &none, {"__syncwarp", at}, [](char**) {});
  m.order_warp_memory(false);
}

// ---- shuffles, votes, reductions

template <typename T>
T __shfl_sync(uint32_t mask, T value, int lane, int width = 32, PT_SIMT_AT) {
  return pagedtree::simt::shuffle(mask, value, {"__shfl_sync", at}, [=](uint32_t me) {
    return pagedtree::simt::segment_base(me, width) + (static_cast<uint32_t>(lane) & static_cast<uint32_t>(width - 1));
  });
}
template <typename T>
T __shfl_xor_sync(uint32_t mask, T value, int bits, int width = 32, PT_SIMT_AT) {
  return pagedtree::simt::shuffle(mask, value, {"__shfl_xor_sync", at}, [=](uint32_t me) {
    const uint32_t from = me ^ static_cast<uint32_t>(bits);
    return from < pagedtree::simt::segment_base(me, width) + static_cast<uint32_t>(width) ? from : me;
  });
}
template <typename T>
T __shfl_down_sync(uint32_t mask, T value, unsigned delta, int width = 32, PT_SIMT_AT) {
  return pagedtree::simt::shuffle(mask, value, {"__shfl_down_sync", at}, [=](uint32_t me) {
    return me + delta < pagedtree::simt::segment_base(me, width) + static_cast<uint32_t>(width) ? me + delta : me;
  });
}
template <typename T>
T __shfl_up_sync(uint32_t mask, T value, unsigned delta, int width = 32, PT_SIMT_AT) {
  return pagedtree::simt::shuffle(mask, value, {"__shfl_up_sync", at}, [=](uint32_t me) {
    return me >= pagedtree::simt::segment_base(me, width) + delta ? me - delta : me;
  });
}
inline uint32_t __ballot_sync(uint32_t mask, int predicate, PT_SIMT_AT) {
  return pagedtree::simt::reduce(mask, static_cast<uint32_t>(predicate != 0) << pagedtree::simt::machine().lane(),
                                 {"__ballot_sync", at}, std::bit_or<uint32_t>());
}
inline int __any_sync(uint32_t mask, int predicate, PT_SIMT_AT) {
  return pagedtree::simt::reduce(mask, static_cast<int>(predicate != 0), {"__any_sync", at}, std::bit_or<int>());
}
template <typename T>
uint32_t __match_any_sync(uint32_t mask, T value, PT_SIMT_AT) {
  struct Arguments {
    T value;
    uint32_t same;
  } mine{value, 0};
  pagedtree::simt::machine().collective(mask, &mine, {"__match_any_sync", at}, [](Arguments** all) {
    for (int i = 0; i < 32; ++i) {
      for (int j = 0; j < 32 && all[i] != nullptr; ++j) {
        if (all[j] != nullptr && all[j]->value == all[i]->value) all[i]->same |= 1u << j;
      }
    }
  });
  return mine.same;
}
template <typename T>
T __reduce_add_sync(uint32_t mask, T value, PT_SIMT_AT) {
  return pagedtree::simt::reduce(mask, value, {"__reduce_add_sync", at}, std::plus<T>());
}
template <typename T>
T __reduce_max_sync(uint32_t mask, T value, PT_SIMT_AT) {
  return pagedtree::simt::reduce(mask, value, {"__reduce_max_sync", at}, [](T a, T b) { return a < b ? b : a; });
}
template <typename T>
T __reduce_min_sync(uint32_t mask, T value, PT_SIMT_AT) {
  return pagedtree::simt::reduce(mask, value, {"__reduce_min_sync", at}, [](T a, T b) { return b < a ? b : a; });
}
inline uint32_t __reduce_or_sync(uint32_t mask, uint32_t value, PT_SIMT_AT) {
  return pagedtree::simt::reduce(mask, value, {"__reduce_or_sync", at}, std::bit_or<uint32_t>());
}

#undef PT_SIMT_AT

// ---- atomics

template <typename T>
T atomicAdd(T* address, std::type_identity_t<T> value) {
  return std::atomic_ref<T>(*address).fetch_add(value);
}

template <typename T>
T atomicMax(T* address, std::type_identity_t<T> value) {
  return pagedtree::simt::atomic_update(address, [=](T old) { return old < value ? value : old; });
}

template <typename T>
T atomicExch(T* address, std::type_identity_t<T> value) {
  return std::atomic_ref<T>(*address).exchange(value);
}

// ---- arithmetic and bits

template <typename T>
T __ldg(const T* address) {
  return *address;
}
template <typename T>
T __ldcg(const T* address) {
  return *address;
}
template <typename T>
void __stwb(T* address, T value) {
  *address = value;
}
inline int __ffs(unsigned x) { return x == 0 ? 0 : std::countr_zero(x) + 1; }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  const unsigned long long both = static_cast<unsigned long long>(high) << 32 | low;
  return static_cast<unsigned>(both >> (shift % 32));
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long both = static_cast<unsigned long long>(b) << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned pick = selector >> 4 * i & 0xf;
    unsigned byte = static_cast<unsigned>(both >> 8 * (pick & 7)) & 0xff;
    if (pick & 8) byte = byte & 0x80 ? 0xff : 0;  // replicated sign
    result |= byte << 8 * i;
  }
  return result;
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  __extension__ typedef unsigned __int128 Wide;
  return static_cast<unsigned long long>((static_cast<Wide>(a) * b) >> 64);
}
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __fdividef(float a, float b) { return a / b; }
