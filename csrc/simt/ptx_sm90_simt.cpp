// Hopper's asynchronous units: mbarriers, TMA and bulk copies, st.async, wgmma (see ptx_sm90_simt.h).
#include "simt/ptx_sm90_simt.h"

#include <algorithm>
#include <utility>

namespace pagedtree::ptx {
namespace detail {
namespace {

constexpr uint32_t kSwizzleBytes = 128;
constexpr const char* kTooManyArrivals = "more arrivals than the mbarrier was initialised for";

// Xors the 16-byte column within 128 bytes with the row.
uint32_t swizzled(uint32_t address) { return address ^ (address >> 3 & 0x70); }

// One instruction of one thread, for tests/kernels/test_panels.py.
struct Traced {
  enum Kind : uint64_t { kWgmma, kCommit, kTma, kCopy };
  uint64_t kind, thread;
  uint64_t numbers[4];
};

std::vector<Traced>* trace = nullptr;  // null: not tracing

void note(Traced::Kind kind, std::initializer_list<uint64_t> numbers) {
  if (trace == nullptr) return;
  trace->push_back({kind, simt::machine().self().id, {}});
  std::copy(numbers.begin(), numbers.end(), trace->back().numbers);
}

// Records a warpgroup, which acts as one, by its first thread.
void note_of_group(Traced::Kind kind, std::initializer_list<uint64_t> numbers) {
  if (simt::machine().self().id % 128 == 0) note(kind, numbers);
}

uint32_t element_address(uint64_t descriptor, int outer, int k, bool outer_major) {
  const auto field = [&](int shift) { return static_cast<uint32_t>(descriptor >> shift & 0x3fff) << 4; };
  const uint32_t start = field(0), leading = field(16), stride = field(32);
  const auto o = static_cast<uint32_t>(outer), i = static_cast<uint32_t>(k);
  return swizzled(outer_major ? start + o / 64 * leading + o % 64 * 2 + i / 8 * stride + i % 8 * kSwizzleBytes
                              : start + o / 8 * stride + o % 8 * kSwizzleBytes + i * 2);
}

float a_element(const Wgmma& w, int row, int k) {
  uint16_t bits;
  std::memcpy(&bits, simt::machine().shared_at(element_address(w.a, row, k, false), 2, 2, w.site), 2);
  return w.to_float(bits);
}

float b_element(const Wgmma& w, int column, int k) {
  uint16_t bits;
  std::memcpy(&bits, simt::machine().shared_at(element_address(w.b, column, k, w.b_n_major), 2, 2, w.site), 2);
  return w.to_float(bits);
}

int first_row() { return static_cast<int>(simt::machine().self().id / 32 % 4) * 16; }

// Threads share the check of a warp's operands, in chunks of 16 bytes (8 elements).
void check_operands_are_fenced(const Wgmma& w) {
  const HopperUnit& unit = hopper();
  for (int i = static_cast<int>(simt::machine().lane()); i < w.columns * 2; i += 32) {
    const uint32_t address =
        w.b_n_major ? element_address(w.b, i / 16 * 8, i % 16, true) : element_address(w.b, i / 2, i % 2 * 8, false);
    unit.check_is_fenced(address, w.site);
  }
  if (w.a_in_registers) return;
  const int i = static_cast<int>(simt::machine().lane());
  unit.check_is_fenced(element_address(w.a, first_row() + i / 2, i % 2 * 8, false), w.site);
}

// Shows ThreadSanitizer each thread's share of the operands; the multiplication is unwatched.
void touch_operands([[maybe_unused]] const Wgmma& w) {
#if defined(__SANITIZE_THREAD__)
  const int lane = static_cast<int>(simt::machine().lane());
  [[maybe_unused]] volatile float seen;
  for (int e = lane; e < w.columns * 16; e += 32) seen = b_element(w, e / 16, e % 16);
  for (int e = lane; e < 256 && !w.a_in_registers; e += 32) seen = a_element(w, first_row() + e / 16, e % 16);
#endif
}

// Computes a warp's 16 of the 64 rows.
void multiply(Wgmma& w) {
  touch_operands(w);
  simt::machine().collective(~0u, &w, w.site, [](Wgmma** lanes) {
    const Wgmma& any = *lanes[0];
    simt::statistics().mma += static_cast<uint64_t>(any.columns / 8);
    double a[16][16];
    for (int r = 0; r < 16; ++r) {
      for (int k = 0; k < 16; ++k) {
        const Wgmma& owner = *lanes[r % 8 * 4 + k % 8 / 2];
        const uint32_t word = owner.a_registers[static_cast<size_t>(r / 8 + k / 8 * 2)];
        a[r][k] = any.a_in_registers ? any.to_float(static_cast<uint16_t>(word >> k % 2 * 16))
                                     : a_element(any, first_row() + r, k);
      }
    }
    for (int c = 0; c < any.columns; ++c) {
      double b[16];
      for (int k = 0; k < 16; ++k) b[k] = b_element(any, c, k);
      for (int r = 0; r < 16; ++r) {
        double sum = 0;
        for (int k = 0; k < 16; ++k) sum += a[r][k] * b[k];
        const Wgmma& owner = *lanes[r % 8 * 4 + c % 8 / 2];
        float& d = owner.d[c / 8][r / 8 * 2 + c % 2];
        d = static_cast<float>(sum + (owner.accumulate ? double{d} : 0.0));
      }
    }
  });
}

}  // namespace

// ---- the unit

HopperUnit::HopperUnit(unsigned num_threads)
    : async_view((simt::machine().shared_bytes() + 15) / 16 * 16),
      wgmma(num_threads),
      shared_(simt::machine().shared_memory()) {
  simt::make_undefined(async_view.data(), async_view.size());  // like unwritten shared memory
#if defined(__SANITIZE_THREAD__)
  context_ = __tsan_create_fiber(0);
#endif
}

HopperUnit::~HopperUnit() {
#if defined(__SANITIZE_THREAD__)
  __tsan_destroy_fiber(context_);
#endif
}

void HopperUnit::fence_proxy() {
  const simt::Unwatched unwatched;
  std::memcpy(async_view.data(), simt::machine().shared_memory(), simt::machine().shared_bytes());
}

void HopperUnit::check_is_fenced(uint32_t address, const simt::Site& site) const {
  const unsigned char* now = simt::machine().shared_at(address, 16, 16, site);
  if (std::memcmp(now, &async_view[address], 16) == 0) return;
  simt::machine().fail(site, "no fence_proxy_async since the write to shared address " + std::to_string(address));
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
  const uint32_t piece = transfer.kind == Transfer::kTold ? 8 : 16;
  for (uint32_t at = 0; at < transfer.data.size(); at += piece) {
    const uint32_t to = transfer.kind == Transfer::kTma ? swizzled(transfer.to + at) : transfer.to + at;
    std::memcpy(shared_ + to, transfer.data.data() + at, piece);
    if (transfer.kind != Transfer::kTold) std::memcpy(&async_view[to], transfer.data.data() + at, piece);
  }
  for (const simt::AsyncCopy& copy : transfer.copies) std::memcpy(copy.to, copy.data, sizeof(copy.data));
  simt::release(&barrier);
#if defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(caller, __tsan_switch_to_fiber_no_sync);
#endif
  if (transfer.kind == Transfer::kArrival) {
    if (barrier.pending == 0) throw simt::Error(kTooManyArrivals);
    --barrier.pending;
  }
  barrier.bytes -= static_cast<int64_t>(transfer.data.size());
  end_phase_if_complete(barrier);
  return true;
}

std::string HopperUnit::unfinished(const simt::Thread& thread) const {
  const ThreadGroups& mine = wgmma[thread.id];
  return mine.open.empty() && mine.groups.empty() ? "" : "wgmma in flight";
}

std::string HopperUnit::unfinished() const {
  const auto is_arrival = [](const Transfer& t) { return t.kind == Transfer::kArrival; };
  if (transfers.empty()) return "";
  return std::all_of(transfers.begin(), transfers.end(), is_arrival)
             ? "all threads exit with cp.async in flight to an mbarrier"
             : "all threads exit with TMA loads in flight, or bulk copies, or told values";
}

// ---- mbarrier

void mbar_arrive(uint64_t* bar, uint32_t expected_bytes, const simt::Site& site) {
  const simt::Unwatched unwatched;
  HopperUnit& unit = hopper();
  HopperUnit::MBarrier& barrier = unit.barrier_at(smem_addr(bar), site);
  if (barrier.pending == 0) simt::machine().fail(site, kTooManyArrivals);
  barrier.bytes += expected_bytes;
  simt::release(&barrier);
  --barrier.pending;
  unit.end_phase_if_complete(barrier);
}

}  // namespace detail

using namespace detail;

void cp_async_mbar_arrive(uint64_t* bar, Location at) {
  const simt::Unwatched unwatched;
  HopperUnit& unit = hopper();
  unit.barrier_at(smem_addr(bar), {"cp.async.mbarrier.arrive", at});
  simt::release(&unit);
  unit.transfers.push_back({HopperUnit::Transfer::kArrival, 0, smem_addr(bar), {}, simt::machine().take_copies()});
  for (const simt::AsyncCopy& copy : unit.transfers.back().copies) {
    uint64_t data = 0;
    std::memcpy(&data, copy.data, sizeof(data));
    note(Traced::kCopy, {smem_addr(copy.to), data});
  }
}

void mbar_wait(uint64_t* bar, uint32_t parity, Location at) {
  const simt::Unwatched unwatched;
  const simt::Site site{"mbarrier wait", at};
  HopperUnit::MBarrier& barrier = hopper().barrier_at(smem_addr(bar), site);
  while ((barrier.phase & 1) == parity) {
    barrier.waiting.push_back(simt::machine().self().slot);
    simt::machine().wait(site);
  }
  simt::acquire(&barrier);
}

// ---- TMA

void tma_load_5d(void* to, const TensorMap* tensor, int x, int y, int z, int w, int v, uint64_t* bar, Location from) {
  simt::Machine& m = simt::machine();
  const simt::Site site{"TMA load", from};
  const TensorMap& map = *tensor;
  const int at[5] = {x, y, z, w, v};
  const uint32_t row = map.box[0] * map.element_bytes, rows = map.box[1] * map.box[2] * map.box[3] * map.box[4],
                 bytes = row * rows;
  const uint32_t target = smem_addr(to);
  if (row != kSwizzleBytes || target % 1024 != 0) {
    m.fail(site, "the 128-byte swizzle needs rows of 128 bytes, at a multiple of 1024 bytes");
  }
  m.shared_at(target, bytes, 1024, site);
  // Zeros outside the tensor.
  std::vector<unsigned char> data(bytes);
  const auto is_inside = [&](int dim, int64_t i) { return i >= 0 && i < static_cast<int64_t>(map.sizes[dim]); };
  const int64_t first = std::max(int64_t{at[0]}, int64_t{0});
  const int64_t end = std::min(int64_t{at[0]} + map.box[0], static_cast<int64_t>(map.sizes[0]));
  for (uint32_t r = 0; r < rows && first < end; ++r) {
    const char* from = static_cast<const char*>(map.base) + first * map.element_bytes;
    bool inside = true;
    for (int dim = 1, left = static_cast<int>(r); dim < 5; left /= static_cast<int>(map.box[dim++])) {
      const int64_t index = int64_t{at[dim]} + left % static_cast<int>(map.box[dim]);
      inside = inside && is_inside(dim, index);
      if (inside) from += index * static_cast<int64_t>(map.strides[dim - 1]);
    }
    if (!inside) continue;
    std::memcpy(&data[r * row + static_cast<size_t>(first - at[0]) * map.element_bytes], from,
                static_cast<size_t>(end - first) * map.element_bytes);
  }
  simt::make_undefined(static_cast<unsigned char*>(to), bytes);
  const simt::Unwatched unwatched;
  hopper().barrier_at(smem_addr(bar), site);
  simt::make_undefined(&hopper().async_view[target], bytes);
  simt::release(&hopper());
  hopper().transfers.push_back({HopperUnit::Transfer::kTma, target, smem_addr(bar), std::move(data)});
  const auto word = [](int number) { return static_cast<uint64_t>(static_cast<uint32_t>(number)); };
  note(Traced::kTma, {target, word(at[2]), word(at[3]), word(at[4])});
}

void bulk_load(void* to, const void* from, uint32_t bytes, uint64_t* bar, Location at) {
  simt::Machine& m = simt::machine();
  const simt::Site site{"bulk copy", at};
  const uint32_t target = smem_addr(to);
  if (bytes == 0 || bytes % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0) {
    m.fail(site, "copies multiples of 16 bytes from multiples of 16 bytes on");
  }
  m.shared_at(target, bytes, 16, site);
  const auto* const begin = static_cast<const unsigned char*>(from);
  std::vector<unsigned char> data(begin, begin + bytes);
  simt::make_undefined(static_cast<unsigned char*>(to), bytes);
  const simt::Unwatched unwatched;
  HopperUnit& unit = hopper();
  unit.barrier_at(smem_addr(bar), site);
  simt::make_undefined(&unit.async_view[target], bytes);
  simt::release(&unit);
  unit.transfers.push_back({HopperUnit::Transfer::kBulk, target, smem_addr(bar), std::move(data)});
}

void tell(uint64_t* place, uint64_t value, uint64_t* bar, uint32_t rank, Location at) {
  const simt::Unwatched unwatched;
  const simt::Site site{"st.async", at};
  simt::machine().shared_at(smem_addr(place), sizeof(value), sizeof(value), site);
  HopperUnit& unit = simt::machine().async_unit_of<HopperUnit>(rank, site);
  unit.barrier_at(smem_addr(bar), site);
  std::vector<unsigned char> data(sizeof(value));
  std::memcpy(data.data(), &value, sizeof(value));
  simt::release(&unit);
  unit.transfers.push_back({HopperUnit::Transfer::kTold, smem_addr(place), smem_addr(bar), std::move(data)});
}

// ---- wgmma

void detail::wgmma_issue(const Wgmma& operation) {
  const simt::Unwatched unwatched;
  check_operands_are_fenced(operation);
  const uint64_t forms = (operation.a_in_registers ? 1 : 0) | (operation.b_n_major ? 2 : 0);
  note_of_group(Traced::kWgmma, {operation.a, operation.b, static_cast<uint64_t>(operation.columns), forms});
  hopper().wgmma[simt::machine().self().id].open.push_back(operation);
}

void wgmma_commit() {
  const simt::Unwatched unwatched;
  note_of_group(Traced::kCommit, {});
  HopperUnit::ThreadGroups& mine = hopper().wgmma[simt::machine().self().id];
  mine.groups.push_back(std::exchange(mine.open, {}));
}

void detail::wgmma_wait(unsigned newest_left) {
  auto& groups = hopper().wgmma[simt::machine().self().id].groups;
  while (groups.size() > newest_left) {
    for (Wgmma& operation : groups.front()) multiply(operation);
    const simt::Unwatched unwatched;
    groups.erase(groups.begin());
  }
}

}  // namespace pagedtree::ptx

extern "C" __attribute__((visibility("default"))) void pagedtree_simt_refuse_maps(int refused) {
  pagedtree::simt::options().refuses_maps = refused != 0;
}

// Starts a trace of Hopper instructions, or ends and clears it.
extern "C" __attribute__((visibility("default"))) void pagedtree_simt_trace(int wanted) {
  using namespace pagedtree::ptx::detail;
  static std::vector<Traced> traced;
  traced.clear();
  trace = wanted != 0 ? &traced : nullptr;
}

// Returns the trace: six 8-byte words per instruction.
extern "C" __attribute__((visibility("default"))) size_t pagedtree_simt_traced(const void** words) {
  using namespace pagedtree::ptx::detail;
  *words = trace->data();
  return trace->size();
}
