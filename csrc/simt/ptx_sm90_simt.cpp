#include "simt/ptx_sm90_simt.h"

#include <utility>

namespace pagedtree::ptx::detail {
namespace {

constexpr uint32_t kSwizzleBytes = 128;

// The swizzle of a shared address: the 16-byte column within 128 bytes is xored with the row of 128 bytes.
uint32_t swizzled(uint32_t address) { return address ^ (address >> 3 & 0x70); }

// A bf16 element of an operand in shared memory.
float element(uint64_t descriptor, int outer, int k, bool outer_major, const simt::Site& site) {
  const auto field = [&](int shift) { return static_cast<uint32_t>(descriptor >> shift & 0x3fff) << 4; };
  const uint32_t start = field(0), leading = field(16), stride = field(32);
  const auto o = static_cast<uint32_t>(outer), i = static_cast<uint32_t>(k);
  const uint32_t address = outer_major ? start + o / 64 * leading + o % 64 * 2 + i / 8 * stride + i % 8 * kSwizzleBytes
                                       : start + o / 8 * stride + o % 8 * kSwizzleBytes + i * 2;
  uint16_t bits;
  std::memcpy(&bits, simt::machine().shared_at(swizzled(address), 2, 2, site), 2);
  return to_float(bits, __nv_bfloat16());
}

// ThreadSanitizer sees each thread read a share of the operands; the multiplication itself is unwatched.
void touch_operands([[maybe_unused]] const Wgmma& w) {
#if defined(__SANITIZE_THREAD__)
  const int lane = static_cast<int>(simt::machine().lane());
  const int first_row = static_cast<int>(simt::machine().self().id / 32 % 4) * 16;
  [[maybe_unused]] volatile float seen;
  for (int e = lane; e < w.columns * 16; e += 32) seen = element(w.b, e / 16, e % 16, w.a_in_registers, w.site);
  for (int e = lane; e < 256 && !w.a_in_registers; e += 32) {
    seen = element(w.a, first_row + e / 16, e % 16, false, w.site);
  }
#endif
}

// A warp's 16 of the 64 rows.
void multiply(const Wgmma& w) {
  touch_operands(w);
  struct Lane {
    const Wgmma* w;
  } mine{&w};
  simt::machine().collective(~0u, &mine, w.site, [](Lane** lanes) {
    const Wgmma& any = *lanes[0]->w;
    simt::statistics().mma += static_cast<uint64_t>(any.columns / 8);
    const int first_row = static_cast<int>(simt::machine().self().id / 32 % 4) * 16;
    double a[16][16];
    for (int r = 0; r < 16; ++r) {
      for (int k = 0; k < 16; ++k) {
        const Wgmma& owner = *lanes[r % 8 * 4 + k % 8 / 2]->w;
        const uint32_t word = owner.a_registers[static_cast<size_t>(r / 8 + k / 8 * 2)];
        a[r][k] = any.a_in_registers ? to_float(static_cast<uint16_t>(word >> k % 2 * 16), __nv_bfloat16())
                                     : element(any.a, first_row + r, k, false, any.site);
      }
    }
    for (int c = 0; c < any.columns; ++c) {
      double b[16];
      for (int k = 0; k < 16; ++k) b[k] = element(any.b, c, k, any.a_in_registers, any.site);
      for (int r = 0; r < 16; ++r) {
        double sum = 0;
        for (int k = 0; k < 16; ++k) sum += a[r][k] * b[k];
        const Wgmma& owner = *lanes[r % 8 * 4 + c % 8 / 2]->w;
        float& d = owner.d[c / 8 * 4 + r / 8 * 2 + c % 2];
        d = static_cast<float>(sum + (owner.accumulate ? double{d} : 0.0));
      }
    }
  });
}

}  // namespace

// ---- the unit

HopperUnit::HopperUnit(unsigned num_threads) : wgmma(num_threads) {
#if defined(__SANITIZE_THREAD__)
  context_ = __tsan_create_fiber(0);
#endif
}

HopperUnit::~HopperUnit() {
#if defined(__SANITIZE_THREAD__)
  __tsan_destroy_fiber(context_);
#endif
}

HopperUnit::MBarrier& HopperUnit::barrier_at(uint32_t address, const simt::Site& site) {
  const auto found = barriers.find(address);
  if (found == barriers.end()) simt::machine().fail(site, "mbarrier not initialised");
  return found->second;
}

void HopperUnit::end_phase_if_complete(MBarrier& barrier) {
  if (barrier.pending > 0 || barrier.bytes != 0) return;
  barrier.pending = barrier.count;
  ++barrier.phase;
  for (unsigned waiting : barrier.waiting) simt::machine().wake(waiting);
  barrier.waiting.clear();
}

bool HopperUnit::deliver(simt::Machine& machine) {
  if (transfers.empty()) return false;
  const auto chosen = transfers.begin() + static_cast<std::ptrdiff_t>(machine.pick(transfers.size()));
  const Transfer transfer = std::move(*chosen);
  transfers.erase(chosen);
  MBarrier& barrier = barriers.at(transfer.barrier);
#if defined(__SANITIZE_THREAD__)
  void* const caller = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(context_, __tsan_switch_to_fiber_no_sync);
#endif
  simt::acquire(this);
  for (uint32_t at = 0; at < transfer.data.size(); at += 16) {
    std::memcpy(machine.shared_memory() + swizzled(transfer.to + at), transfer.data.data() + at, 16);
  }
  simt::release(&barrier);
#if defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(caller, __tsan_switch_to_fiber_no_sync);
#endif
  barrier.bytes -= static_cast<int64_t>(transfer.data.size());
  end_phase_if_complete(barrier);
  return true;
}

std::string HopperUnit::unfinished(const simt::Thread& thread) const {
  const ThreadGroups& mine = wgmma[thread.id];
  return mine.open.empty() && mine.groups.empty() ? "" : "wgmma in flight";
}

std::string HopperUnit::unfinished() const {
  return transfers.empty() ? "" : "all threads exit with TMA loads in flight";
}

// ---- mbarrier

void mbar_arrive(uint64_t* bar, uint32_t expected_bytes, const simt::Site& site) {
  const simt::Unwatched unwatched;
  HopperUnit& unit = hopper();
  HopperUnit::MBarrier& barrier = unit.barrier_at(smem_addr(bar), site);
  if (barrier.pending == 0) simt::machine().fail(site, "more arrivals than the mbarrier was initialised for");
  barrier.bytes += expected_bytes;
  simt::release(&barrier);
  --barrier.pending;
  unit.end_phase_if_complete(barrier);
}

void mbar_wait(uint64_t* bar, uint32_t parity, const simt::Site& site) {
  const simt::Unwatched unwatched;
  HopperUnit::MBarrier& barrier = hopper().barrier_at(smem_addr(bar), site);
  while ((barrier.phase & 1) == parity) {
    barrier.waiting.push_back(simt::machine().self().slot);
    simt::machine().wait(site);
  }
  simt::acquire(&barrier);
}

// ---- TMA

void tma_load(void* to, const TensorMap& map, const int (&at)[3], uint64_t* bar, const simt::Site& site) {
  simt::Machine& m = simt::machine();
  const uint32_t row = map.box[0] * map.element_bytes, bytes = row * map.box[1] * map.box[2], target = smem_addr(to);
  if (row != kSwizzleBytes || target % 1024 != 0) {
    m.fail(site, "the 128-byte swizzle needs rows of 128 bytes, at a multiple of 1024 bytes");
  }
  m.shared_at(target, bytes, 1024, site);
  std::vector<unsigned char> data(bytes);
  for (uint32_t z = 0; z < map.box[2]; ++z) {
    for (uint32_t y = 0; y < map.box[1]; ++y) {
      const int64_t j = int64_t{at[1]} + y, k = int64_t{at[2]} + z;
      if (j < 0 || k < 0 || j >= static_cast<int64_t>(map.sizes[1]) || k >= static_cast<int64_t>(map.sizes[2])) {
        continue;  // zeros outside the tensor
      }
      const uint64_t offset = (static_cast<uint64_t>(k) * map.sizes[1] + static_cast<uint64_t>(j)) * map.sizes[0] +
                              static_cast<uint64_t>(at[0]);
      std::memcpy(&data[(z * map.box[1] + y) * row], static_cast<const char*>(map.base) + offset * map.element_bytes,
                  row);
    }
  }
  simt::make_undefined(static_cast<unsigned char*>(to), bytes);
  const simt::Unwatched unwatched;
  hopper().barrier_at(smem_addr(bar), site);
  simt::release(&hopper());
  hopper().transfers.push_back({target, smem_addr(bar), std::move(data)});
}

// ---- wgmma

void wgmma_issue(const Wgmma& operation) {
  const simt::Unwatched unwatched;
  hopper().wgmma[simt::machine().self().id].open.push_back(operation);
}

void wgmma_commit() {
  const simt::Unwatched unwatched;
  HopperUnit::ThreadGroups& mine = hopper().wgmma[simt::machine().self().id];
  mine.groups.push_back(std::exchange(mine.open, {}));
}

void wgmma_wait(unsigned newest_left) {
  auto& groups = hopper().wgmma[simt::machine().self().id].groups;
  while (groups.size() > newest_left) {
    for (const Wgmma& operation : groups.front()) multiply(operation);
    const simt::Unwatched unwatched;
    groups.erase(groups.begin());
  }
}

}  // namespace pagedtree::ptx::detail
