// The instructions of cuda/tile/ptx_sm90.cuh on the machine. TMA delivers only when no thread can go on; wgmma reads
// its operands and writes its results only at the wait. So a kernel that does not wait sees no results.
#pragma once

#include <array>
#include <map>

#include "simt/ptx_simt.h"

namespace pagedtree::ptx {

// The arguments of cuTensorMapEncodeTiled with the 128-byte swizzle.
struct TensorMap {
  const void* base;
  uint32_t element_bytes;
  uint64_t sizes[3];  // the innermost first, packed
  uint32_t box[3];
};

namespace detail {

// One wgmma of one thread.
struct Wgmma {
  float* d;
  int columns;
  bool accumulate;
  std::array<uint32_t, 4> a_registers;
  uint64_t a, b;        // descriptors
  bool a_in_registers;  // b is N-major then, else K-major
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
    int64_t bytes = 0;  // expected and not delivered yet
    uint32_t phase = 0;
    std::vector<unsigned> waiting;
  };
  struct Transfer {
    uint32_t to, barrier;
    std::vector<unsigned char> data;
  };
  struct ThreadGroups {
    std::vector<Wgmma> open;
    std::vector<std::vector<Wgmma>> groups;  // committed, oldest first
  };

  MBarrier& barrier_at(uint32_t address, const simt::Site& site);
  void end_phase_if_complete(MBarrier& barrier);

  std::map<uint32_t, MBarrier> barriers;
  std::vector<Transfer> transfers;
  std::vector<ThreadGroups> wgmma;  // by thread

 private:
  void* context_ = nullptr;  // the unit is one more thread to ThreadSanitizer
};

inline HopperUnit& hopper() { return simt::machine().async_unit<HopperUnit>(); }

void mbar_arrive(uint64_t* bar, uint32_t expected_bytes, const simt::Site& site);
void mbar_wait(uint64_t* bar, uint32_t parity, const simt::Site& site);
void tma_load(void* to, const TensorMap& map, const int (&at)[3], uint64_t* bar, const simt::Site& site);
void wgmma_issue(const Wgmma& operation);
void wgmma_commit();
void wgmma_wait(unsigned newest_left);

}  // namespace detail

// ---- mbarrier

inline void mbar_init(uint64_t* bar, uint32_t count) {
  const simt::Unwatched unwatched;
  detail::hopper().barriers[smem_addr(bar)] = {.count = count, .pending = count, .waiting = {}};
}
inline void fence_mbar_init() {}
inline void mbar_arrive(uint64_t* bar, Location at = Location::current()) {
  detail::mbar_arrive(bar, 0, {"mbarrier.arrive", at});
}
inline void mbar_arrive_expect(uint64_t* bar, uint32_t bytes, Location at = Location::current()) {
  detail::mbar_arrive(bar, bytes, {"mbarrier.arrive.expect_tx", at});
}
inline void mbar_wait(uint64_t* bar, uint32_t parity, Location at = Location::current()) {
  detail::mbar_wait(bar, parity, {"mbarrier wait", at});
}

// ---- TMA

inline void tma_load_3d(void* to, const TensorMap* map, int x, int y, int z, uint64_t* bar,
                        Location at = Location::current()) {
  detail::tma_load(to, *map, {x, y, z}, bar, {"TMA load", at});
}

// ---- wgmma

inline uint64_t matrix_descriptor(const void* p, uint32_t leading_offset, uint32_t stride_offset) {
  return uint64_t{smem_addr(p) >> 4 & 0x3fff} | uint64_t{leading_offset >> 4} << 16 |
         uint64_t{stride_offset >> 4} << 32 | uint64_t{1} << 62;
}
inline void wgmma_fence() {}
inline void wgmma_commit() { detail::wgmma_commit(); }
template <int kNewestLeft>
void wgmma_wait() {
  detail::wgmma_wait(kNewestLeft);
}
template <int kRegisters>
void setmaxnreg_inc() {}
template <int kRegisters>
void setmaxnreg_dec() {}

template <int N>
void wgmma_ss(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate, Location at = Location::current()) {
  detail::wgmma_issue({d, N, accumulate, {}, a, b, false, {"wgmma", at}});
}
template <int N>
void wgmma_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate,
              Location at = Location::current()) {
  detail::wgmma_issue({d, N, accumulate, {a[0], a[1], a[2], a[3]}, 0, b, true, {"wgmma", at}});
}

}  // namespace pagedtree::ptx
