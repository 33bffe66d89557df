// Instructions of cuda/tile/ptx_sm90.cuh on the machine. TMA, bulk copies and st.async arrive only when no thread can
// run; wgmma reads operands and writes results only at the wait. A kernel that does not wait sees no results.
#pragma once

#include <array>
#include <map>

#include "simt/ptx_simt.h"

namespace pagedtree::ptx {

// Arguments of cuTensorMapEncodeTiled with the 128-byte swizzle, in the size and alignment of a GPU's map.
struct alignas(128) TensorMap {
  const void* base;
  uint32_t element_bytes;
  uint64_t sizes[5];    // innermost first
  uint64_t strides[4];  // bytes, without the innermost
  uint32_t box[5];
};
static_assert(sizeof(TensorMap) == 128);

namespace detail {

struct Wgmma {
  float (*d)[4];
  int columns;
  bool accumulate;
  std::array<uint32_t, 4> a_registers;
  uint64_t a, b;  // descriptors
  bool a_in_registers, b_n_major;
  float (*to_float)(uint16_t);
  simt::Site site;
};

class HopperUnit : public simt::AsyncUnit {
 public:
  explicit HopperUnit(unsigned num_threads);
  ~HopperUnit() override;
  bool deliver(simt::Machine& machine) override;
  std::string unfinished(const simt::Thread& thread) const override;
  std::string unfinished() const override;

  struct MBarrier {
    uint32_t count, pending;
    int64_t bytes = 0;  // expected, not yet delivered
    uint32_t phase = 0;
    std::vector<unsigned> waiting;
  };
  // Bytes in flight: swizzled by TMA, of a bulk copy, or of st.async, which the generic proxy writes; or a thread's
  // arrival at a barrier after its copies.
  struct Transfer {
    enum Kind { kTma, kBulk, kTold, kArrival } kind;
    uint32_t to, barrier;
    std::vector<unsigned char> data;
    std::vector<simt::AsyncCopy> copies{};
  };
  struct ThreadGroups {
    std::vector<Wgmma> open;
    std::vector<std::vector<Wgmma>> groups;  // committed, oldest first
  };

  MBarrier& barrier_at(uint32_t address, const simt::Site& site);
  void end_phase_if_complete(MBarrier& barrier);

  // The generic proxy (stores, cp.async) and the async proxy (TMA, wgmma) have separate views of shared memory.
  // `async_view` is the async proxy's: TMA writes there too, and a fence updates it. A 16-byte chunk that differs from
  // shared memory is an unfenced generic write; wgmma must not read it, which is checked at issue.
  // Must detect, in every order of execution: no thread fences between a write and the wgmma. Must accept: fenced
  // writes, TMA writes. Cannot detect: a fence by a thread unrelated to the write; rewrites of equal bytes; generic
  // writes between issue and end of a wgmma, or under TMA loads, which are races.
  void fence_proxy();
  void check_is_fenced(uint32_t address, const simt::Site& site) const;
  std::vector<unsigned char> async_view;

  std::map<uint32_t, MBarrier> barriers;
  std::vector<Transfer> transfers;
  std::vector<ThreadGroups> wgmma;  // per thread

 private:
  unsigned char* const shared_;  // of the CTA
  void* context_ = nullptr;      // a separate thread for ThreadSanitizer
};

inline HopperUnit& hopper() { return simt::machine().async_unit<HopperUnit>(); }

void mbar_arrive(uint64_t* bar, uint32_t expected_bytes, const simt::Site& site);
void wgmma_issue(const Wgmma& operation);
void wgmma_wait(unsigned newest_left);

}  // namespace detail

// ---- mbarrier

inline void mbar_init(uint64_t* bar, uint32_t count) {
  const simt::Unwatched unwatched;
  detail::hopper().barriers[smem_addr(bar)] = {.count = count, .pending = count, .waiting = {}};
}
inline void fence_mbar_init() { detail::hopper().fence_proxy(); }  // also fences the proxies
inline void mbar_arrive(uint64_t* bar, Location at = Location::current()) {
  detail::mbar_arrive(bar, 0, {"mbarrier.arrive", at});
}
inline void mbar_arrive_expect(uint64_t* bar, uint32_t bytes, Location at = Location::current()) {
  detail::mbar_arrive(bar, bytes, {"mbarrier.arrive.expect_tx", at});
}
// Moves uncommitted copies to the barrier, so cp_async_wait does not wait for them. On a GPU the arrival also waits for
// committed copies; do not rely on that.
void cp_async_mbar_arrive(uint64_t* bar, Location at = Location::current());
void mbar_wait(uint64_t* bar, uint32_t parity, Location at = Location::current());

// ---- TMA

void tma_load_5d(void* to, const TensorMap* map, int x, int y, int z, int w, int v, uint64_t* bar,
                 Location at = Location::current());
void bulk_load(void* to, const void* from, uint32_t bytes, uint64_t* bar, Location at = Location::current());
void tell(uint64_t* place, uint64_t value, uint64_t* bar, uint32_t rank, Location at = Location::current());

inline void fence_proxy_async() { detail::hopper().fence_proxy(); }

// ---- wgmma

inline uint64_t matrix_descriptor(const void* p, uint32_t leading_offset, uint32_t stride_offset) {
  return uint64_t{smem_addr(p) >> 4 & 0x3fff} | uint64_t{leading_offset >> 4} << 16 |
         uint64_t{stride_offset >> 4} << 32 | uint64_t{1} << 62;
}
inline void wgmma_fence() {}
void wgmma_commit();
template <int kNewestLeft>
void wgmma_wait() {
  detail::wgmma_wait(kNewestLeft);
}
template <int N>
void wgmma_results(float (&)[N][4]) {}
template <int kRegisters>
void setmaxnreg_inc() {}
template <int kRegisters>
void setmaxnreg_dec() {}

template <typename T, int N>
void wgmma_ss(float (&d)[N / 8][4], uint64_t a, uint64_t b, bool accumulate, Location at = Location::current()) {
  static_assert(N == 64 || N == 128 || N == 256);
  const auto convert = [](uint16_t bits) { return detail::to_float(bits, T()); };
  detail::wgmma_issue({d, N, accumulate, {}, a, b, false, false, convert, {"wgmma", at}});
}
template <typename T, int N, bool kNMajor>
void wgmma_rs(float (&d)[N / 8][4], const uint32_t (&a)[4], uint64_t b, bool accumulate,
              Location at = Location::current()) {
  static_assert(N == 64 || N == 128 || N == 256);
  const auto convert = [](uint16_t bits) { return detail::to_float(bits, T()); };
  detail::wgmma_issue({d, N, accumulate, {a[0], a[1], a[2], a[3]}, 0, b, true, kNMajor, convert, {"wgmma", at}});
}

}  // namespace pagedtree::ptx
