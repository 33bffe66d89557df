// Scheduler of the emulated threads, their barriers and cp.async (see machine.h).
#include "simt/machine.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <numeric>
#include <utility>

#include "core/common.h"
#include "simt/launch.h"

namespace pagedtree::simt {
namespace {

#if defined(__SANITIZE_THREAD__)
constexpr bool kDetectsRaces = true;
#else
constexpr bool kDetectsRaces = false;
#endif
// ThreadSanitizer supports about 8000 fibers, and is slow long before.
constexpr size_t kMaxWatchedThreads = 2048;

// Permutation of 0..total - 1 in the launch's order.
class LaunchOrder {
 public:
  LaunchOrder(const Order& order, uint64_t total, OrderDraws& random) : kind_(order.kind), total_(total) {
    if (kind_ != Order::kRandom) return;
    first_ = random() % total;
    do {
      step_ = random() % total + 1;
    } while (std::gcd(step_, total) != 1);
  }
  uint64_t operator[](uint64_t i) const {
    if (kind_ == Order::kReverse) return total_ - 1 - i;
    if (kind_ == Order::kRandom) return static_cast<uint64_t>((first_ + static_cast<__uint128_t>(i) * step_) % total_);
    return i;
  }

 private:
  Order::Kind kind_;
  uint64_t total_, first_ = 0, step_ = 1;
};

std::string text(const uint3& i) {
  return "(" + std::to_string(i.x) + "," + std::to_string(i.y) + "," + std::to_string(i.z) + ")";
}

void check_shape(const dim3& grid, const dim3& block, unsigned cluster, size_t shared_bytes) {
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > 1024 || block.z > 64) {
    throw Error("simt: a block of " + text({block.x, block.y, block.z}) + " threads cannot be launched");
  }
  if (grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535 || grid.x == 0 || grid.y == 0 || grid.z == 0) {
    throw Error("simt: a grid of " + text({grid.x, grid.y, grid.z}) + " blocks cannot be launched");
  }
  if (cluster == 0 || cluster > Machine::kMaxCluster || grid.x % cluster != 0) {
    throw Error("simt: a grid of " + text({grid.x, grid.y, grid.z}) + " blocks cannot be launched in clusters of " +
                std::to_string(cluster));
  }
  if (shared_bytes > Machine::kMaxSharedBytes) {
    throw Error("simt: a block has at most " + std::to_string(Machine::kMaxSharedBytes) +
                " bytes of shared memory, not " + std::to_string(shared_bytes));
  }
}

}  // namespace

Order order_from_environment() {
  const char* variable = std::getenv("PAGEDTREE_SIMT_ORDER");
  const std::string value = variable == nullptr ? "forward" : variable;
  if (value == "forward") return {Order::kForward};
  if (value == "reverse") return {Order::kReverse};
  const std::string random = "random";
  if (value == random) return {Order::kRandom};
  if (value.starts_with(random + ":")) {
    char* end = nullptr;
    const uint64_t seed = std::strtoull(value.c_str() + random.size() + 1, &end, 10);
    if (*end == '\0' && end != value.c_str() + random.size() + 1) return {Order::kRandom, seed};
  }
  throw Error("PAGEDTREE_SIMT_ORDER: expected forward, reverse, random or random:SEED, got " + value);
}

Device device_from_environment() {
  const char* variable = std::getenv("PAGEDTREE_SIMT_DEVICE");
  if (variable == nullptr) return {};
  int num_sms = 0, kilobytes = 0, cluster = 0, length = 0;
  const int max_kilobytes = static_cast<int>(Machine::kMaxSharedBytes >> 10);
  const int max_cluster = static_cast<int>(Machine::kMaxCluster);
  if (std::sscanf(variable, "%d:%d:%d%n", &num_sms, &kilobytes, &cluster, &length) != 3 || variable[length] != '\0' ||
      num_sms < 1 || num_sms > 1024 || kilobytes < 48 || kilobytes > max_kilobytes || cluster < 1 ||
      cluster > max_cluster) {
    throw Error("PAGEDTREE_SIMT_DEVICE: expected SMS:KILOBYTES:CLUSTER with 1..1024 SMs, 48.." +
                std::to_string(max_kilobytes) + " KB and clusters of 1.." + std::to_string(max_cluster) +
                " CTAs, got " + variable);
  }
  return {num_sms, kilobytes << 10, cluster};
}

Options& options() {
  static Options instance;
  return instance;
}

Statistics& statistics() {
  static Statistics instance;
  return instance;
}

Machine& machine() {
  static Machine instance;
  return instance;
}

Executor& executor() {
  static Executor instance = nullptr;
  return instance;
}

// Serves tests that load the library again.
extern "C" __attribute__((visibility("default"))) void pagedtree_simt_set_executor(Executor chosen) {
  executor() = chosen;
}

bool Site::operator==(const Site& other) const {
  const auto is_same = [](const char* a, const char* b) { return a == b || !std::strcmp(a, b); };
  return at.line() == other.at.line() && at.column() == other.at.column() && is_same(op, other.op) &&
         is_same(at.file_name(), other.at.file_name());
}

std::string Site::text() const {
  const char* name = std::strrchr(at.file_name(), '/');
  return std::string(op) + " at " + (name != nullptr ? name + 1 : at.file_name()) + ":" + std::to_string(at.line()) +
         ":" + std::to_string(at.column());
}

// ---- launch

void Machine::launch(dim3 grid, dim3 block, unsigned cluster, size_t shared_bytes, Kernel kernel, const void* params) {
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  check_shape(grid, block, cluster, shared_bytes);
  const Unwatched unwatched;
  order_ = options().order.value_or(order_from_environment());
  random_ = {order_.seed};
  statistics() = {};
  kernel_ = kernel;
  params_ = params;
  num_threads_ = size_t{block.x} * block.y * block.z;
  shared_bytes_ = shared_bytes;
  blockDim = block;
  gridDim = grid;
  blocks_.assign(cluster, {});
  warps_.assign(cluster * ((num_threads_ + 31) / 32), {});
  make_threads(block);
  release(&begin_);
  try {
    const uint64_t total = uint64_t{grid.x} * grid.y * grid.z / cluster;
    const LaunchOrder clusters(order_, total, random_);
    for (uint64_t i = 0; i < total; ++i) {
      const uint64_t b = clusters[i] * cluster;
      run_cluster({static_cast<unsigned>(b % grid.x), static_cast<unsigned>(b / grid.x % grid.y),
                   static_cast<unsigned>(b / grid.x / grid.y)});
    }
    acquire(&end_);
    const Statistics& s = statistics();
    if (s.ldmatrix_wavefronts > s.ldmatrix) {
      throw Error("simt: bank conflicts: ldmatrix takes " +
                  std::to_string(static_cast<double>(s.ldmatrix_wavefronts) / static_cast<double>(s.ldmatrix)) +
                  " wavefronts for each 8x8 matrix");
    }
  } catch (...) {
    async_units_.clear();
    free_shared_memory();
    throw;
  }
  async_units_.clear();
  free_shared_memory();
}

void Machine::free_shared_memory() {
  for (Block& b : blocks_) std::free(std::exchange(b.shared, nullptr));
}

void Machine::make_threads(dim3 block) {
  const size_t count = warps_.size() * 32;
  const auto threads_of_block = static_cast<unsigned>(count / blocks_.size());
  num_sets_ = kDetectsRaces ? clamp_to<size_t>(kMaxWatchedThreads / count, 2, kMaxThreadSets) : 1;
  for (size_t set = 0; set < num_sets_; ++set) {
    Threads& threads = thread_sets_[set];
    while (threads.size() < count) {
      threads.push_back(std::make_unique<Thread>());
      threads.back()->slot = static_cast<unsigned>(threads.size() - 1);
      threads.back()->stack.restart(thread_main);
    }
    for (unsigned slot = 0; slot < count; ++slot) {
      Thread& t = *threads[slot];
      t.rank = slot / threads_of_block;
      t.id = slot % threads_of_block;
      t.index = {t.id % block.x, t.id / block.x % block.y, t.id / (block.x * block.y)};
    }
  }
}

void Machine::run_cluster(uint3 first) {
  free_shared_memory();
  async_units_ = decltype(async_units_)(blocks_.size());
  cluster_barrier_ = {};
  has_met_ = false;
  set_ = (set_ + 1) % num_sets_;
  const size_t slots_of_block = warps_.size() / blocks_.size() * 32;
  for (size_t rank = 0; rank < blocks_.size(); ++rank) {
    Block& b = blocks_[rank];
    b = {.index = {first.x + static_cast<unsigned>(rank), first.y, first.z}, .num_alive = num_threads_, .barriers = {}};
    // Allocates exactly the launch's bytes, so that AddressSanitizer's red zone follows them.
    if (shared_bytes_ > 0) {
      void* memory = nullptr;
      if (posix_memalign(&memory, 1024, shared_bytes_) != 0) throw std::bad_alloc();
      b.shared = static_cast<unsigned char*>(memory);
      make_undefined(b.shared, shared_bytes_);
    }
    for (size_t i = 0; i < num_threads_; ++i) {
      const size_t slot = rank * slots_of_block + i;
      thread(slot).done = false;
      wake(static_cast<unsigned>(slot));
    }
  }
  warp_ = order_.kind == Order::kReverse ? warps_.size() - 1 : 0;
  error_.clear();
  self_ = &host_;
  switch_to(*next_ready());
  const auto is_alive = [](const Block& b) { return b.num_alive > 0; };
  if (error_.empty() && std::any_of(blocks_.begin(), blocks_.end(), is_alive)) error_ = "deadlock: " + who_waits();
  for (const auto& unit : async_units_) {
    if (error_.empty() && unit != nullptr) error_ = unit->unfinished();
  }
  if (error_.empty()) return;
  // Restarts unfinished threads; their destructors never run.
  for (size_t slot = 0; slot < warps_.size() * 32; ++slot) {
    Thread& t = thread(slot);
    t.waits_in = {};
    t.done = true;
    t.stack.restart(thread_main);
  }
  for (Warp& w : warps_) w = {};
  throw Error("simt: block " + text(first) + ": " + error_);
}

// ---- threads

void Machine::thread_main() {
  Machine& m = machine();
  Thread& thread = *m.self_;
  thread.stack.arrived();
  for (;;) {  // one iteration per CTA
    acquire(&m.begin_);
    {
      const Unwatched unwatched;
      thread.open_copies.clear();
      thread.copy_groups.clear();
    }
    try {
      m.kernel_(m.params_);
      const Unwatched unwatched;
      m.check_exit(thread);
    } catch (const std::exception& e) {
      const Unwatched unwatched;
      if (m.error_.empty()) m.error_ = e.what();
    }
    release(&m.end_);
    {
      const Unwatched unwatched;
      thread.done = true;
      --m.block().num_alive;
    }
    m.suspend();
  }
}

void Machine::check_exit(const Thread& thread) {
  bool in_flight = !thread.open_copies.empty();
  for (const auto& group : thread.copy_groups) in_flight = in_flight || !group.empty();
  if (in_flight) fail("exits with cp.async in flight");
  const Barrier& b = block().barriers[0];
  if (b.arrived > 0 && b.expected == num_threads_) fail("exits while others wait in " + b.site.text());
  if (cluster_barrier_.arrived > 0) fail("exits while others wait in " + cluster_barrier_.site.text());
  if (const AsyncUnit* unit = async_units_[thread.rank].get(); unit != nullptr) {
    if (const std::string left = unit->unfinished(thread); !left.empty()) fail("exits with " + left);
  }
}

bool Machine::deliver() {
  const size_t count = async_units_.size(), first = count > 1 ? pick(count) : 0;
  for (size_t i = 0; i < count; ++i) {
    const size_t rank = (first + i) % count;
    if (async_units_[rank] != nullptr && blocks_[rank].num_alive > 0 && async_units_[rank]->deliver(*this)) return true;
  }
  return false;
}

Thread* Machine::next_ready() {
  const size_t count = warps_.size(), step = order_.kind == Order::kReverse ? count - 1 : 1;
  for (;;) {
    if (order_.kind == Order::kRandom && random_() % 8 == 0) warp_ = random_() % count;
    for (size_t i = 0; i < count; ++i, warp_ = (warp_ + step) % count) {
      const uint32_t ready = warps_[warp_].ready;
      if (ready == 0) continue;
      int lane = order_.kind == Order::kReverse ? 31 - __builtin_clz(ready) : __builtin_ctz(ready);
      if (order_.kind == Order::kRandom) {
        const int shift = static_cast<int>(random_() % 32);
        lane = (__builtin_ctz(shift != 0 ? ready >> shift | ready << (32 - shift) : ready) + shift) % 32;
      }
      return &thread(warp_ * 32 + static_cast<size_t>(lane));
    }
    try {
      if (!deliver()) return nullptr;
    } catch (const Error& e) {
      error_ = e.what();
      return nullptr;
    }
  }
}

void Machine::switch_to(Thread& to) {
  Thread* from;
  {
    const Unwatched unwatched;
    from = std::exchange(self_, &to);
    threadIdx = to.index;
    if (&to != &host_) blockIdx = blocks_[to.rank].index;
    ++statistics().switches;
  }
  Stack::switch_to(from->stack, to.stack);
}

// Runs another thread, or the host if there is none or a fault.
void Machine::suspend() {
  Thread* to;
  Thread* from;
  {
    const Unwatched unwatched;
    from = self_;
    warps_[from->slot / 32].ready &= ~(1u << from->slot % 32);
    to = error_.empty() ? next_ready() : nullptr;
    if (to == nullptr) to = &host_;
  }
  if (to != from) switch_to(*to);
}

void Machine::wait(const Site& site) {
  self_->waits_in = site;
  suspend();
  self_->waits_in = {};
}

void Machine::fail(const std::string& what) { throw Error("thread " + text(self_->index) + " " + what); }

size_t Machine::pick(size_t count) {
  return order_.kind == Order::kRandom ? random_() % count : order_.kind == Order::kReverse ? count - 1 : 0;
}

std::string Machine::who_waits() const {
  std::string all;
  const Site* last = nullptr;
  for (size_t slot = 0; slot < warps_.size() * 32; ++slot) {
    const Thread& t = thread(slot);
    if (t.done || t.waits_in.op == nullptr || (last != nullptr && *last == t.waits_in)) continue;
    all += (all.empty() ? "thread " : ", thread ") + std::to_string(t.id) + ".. in " + t.waits_in.text();
    last = &t.waits_in;
  }
  return all;
}

// ---- barriers and collectives

Barrier& Machine::named_barrier(unsigned id, unsigned count, const Site& site) {
  if (id >= Block::kNumBarriers) fail(site, "there is no barrier " + std::to_string(id));
  if (count == 0 || count % 32 != 0 || count > (num_threads() + 31) / 32 * 32) {
    if (count != num_threads()) fail(site, std::to_string(count) + " threads are not whole warps of the block");
  }
  return block().barriers[id];
}

// At barrier 0 (__syncthreads) all threads come from one place. At others some may use barrier_arrive and exit.
unsigned Machine::barrier(unsigned id, unsigned count, const Site& site, unsigned value) {
  const Unwatched unwatched;
  Barrier& b = named_barrier(id, count, site);
  const bool is_whole = id == 0 && count == num_threads_;
  if (is_whole && block().num_alive != num_threads_) fail(site, "waits for threads that have exited");
  return meet(b, count, is_whole, site, value);
}

void Machine::barrier_arrive(unsigned id, unsigned count, const Site& site) {
  const Unwatched unwatched;
  arrive(named_barrier(id, count, site), count, false, site, 0);
}

void Machine::cluster_barrier(const Site& site) {
  const Unwatched unwatched;
  for (const Block& b : blocks_) {
    if (b.num_alive != num_threads_) fail(site, "waits for threads that have exited");
  }
  meet(cluster_barrier_, static_cast<unsigned>(num_threads_ * blocks_.size()), true, site, 0);
  has_met_ = true;
}

bool Machine::arrive(Barrier& b, unsigned count, bool is_whole, const Site& site, unsigned value) {
  if (b.arrived == 0) {
    b.site = site;
    b.expected = count;
  }
  if (b.expected != count) fail(site, "another number of threads than in " + b.site.text());
  if (is_whole && !(b.site == site)) fail(site, "barrier divergence, others are in " + b.site.text());
  release(&b.orders[b.phase % 2]);
  b.sum += value;
  if (++b.arrived < b.expected) return false;
  b.arrived = 0;
  ++b.phase;
  b.result = std::exchange(b.sum, 0);
  ++statistics().barriers;
  for (unsigned waiting : b.waiting) wake(waiting);
  b.waiting.clear();
  return true;
}

unsigned Machine::meet(Barrier& b, unsigned count, bool is_whole, const Site& site, unsigned value) {
  char* const order = &b.orders[b.phase % 2];
  if (!arrive(b, count, is_whole, site, value)) {
    b.waiting.push_back(self_->slot);
    wait(site);
  }
  acquire(order);
  return b.result;
}

Collective& Machine::join(uint32_t mask, const Site& site) {
  if (!(mask >> lane() & 1)) fail(site, "is not in the mask that it gives");
  Collective* found = nullptr;
  for (Collective& c : warp().pending) {
    if (c.arrived != 0 && c.mask != mask && (c.mask & mask) != 0) {
      fail(site, "warp divergence, other lanes with an overlapping mask are in " + c.site.text());
    }
    if (c.arrived != 0 ? c.mask == mask : found == nullptr) found = &c;
  }
  if (found == nullptr) fail(site, "more than four groups of a warp meet at once");
  if (found->arrived == 0) {
    found->mask = mask;
    found->site = site;
  }
  if (!(found->site == site)) fail(site, "warp divergence, other lanes are in " + found->site.text());
  return *found;
}

void Machine::order_warp_memory(bool before) { before ? release(&warp()) : acquire(&warp()); }

unsigned char* Machine::shared_at(uint32_t address, size_t bytes, uint32_t alignment, const Site& site) {
  if (address % alignment != 0) fail(site, "misaligned shared address " + std::to_string(address));
  if (address + bytes > shared_bytes_) fail(site, "outside shared memory");
  return shared_memory() + address;
}

unsigned char* Machine::shared_memory_of(uint32_t rank, const Site& site) {
  const Unwatched unwatched;
  if (rank >= blocks_.size()) fail(site, "there is no CTA " + std::to_string(rank) + " in the cluster");
  if (!has_met_) fail(site, "before the cluster met: CTA " + std::to_string(rank) + " may not have begun");
  if (blocks_[rank].num_alive == 0) fail(site, "CTA " + std::to_string(rank) + " has ended");
  return blocks_[rank].shared;
}

// ---- cp.async

// Reads and writes the bytes as the thread itself, for the sanitizers; the buffer is hidden.
void Machine::copy_async(unsigned char* to, const void* from) {
  AsyncCopy copy{to, {}};
  if (from != nullptr) std::memcpy(copy.data, from, sizeof(copy.data));  // detects a bad address
  make_undefined(to, sizeof(copy.data));
  const Unwatched unwatched;
  self_->open_copies.push_back(copy);
  ++statistics().cp_async;
}

void Machine::commit_copies() {
  const Unwatched unwatched;
  self_->copy_groups.push_back(std::exchange(self_->open_copies, {}));
}

std::vector<AsyncCopy> Machine::take_copies() { return std::exchange(self_->open_copies, {}); }

void Machine::wait_for_copies(unsigned newest_left) {
  auto& groups = self_->copy_groups;
  while (groups.size() > newest_left) {
    for (const AsyncCopy& copy : groups.front()) std::memcpy(copy.to, copy.data, sizeof(copy.data));
    const Unwatched unwatched;
    groups.erase(groups.begin());
  }
}

}  // namespace pagedtree::simt
