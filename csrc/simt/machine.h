// Executes CUDA kernels on the CPU, for tests. Each CUDA thread is a fiber.
// for each cluster, in order: run the ready threads in turn until all exit; deliver async work if none is ready
// Runs are deterministic. Launches of several host threads are serialised.
//
// Detects: barriers and warp collectives reached from different places or not at all, deadlocks, copies in flight at
// exit, bank conflicts of ldmatrix, reads of unwritten shared memory (initially NaN); with a sanitizer also accesses
// out of bounds, undefined behaviour, races between CUDA threads. Misses: memory fences (atomics are sequentially
// consistent), except before Hopper's asynchronous reads (ptx_sm90_simt.h). A CTA that waits for another cluster hangs.
#pragma once

#include <vector_types.h>

#include <cstring>
#include <memory>
#include <source_location>
#include <string>
#include <vector>

#include "simt/fiber.h"
#include "simt/options.h"

namespace pagedtree::simt {

using Location = std::source_location;

// A synchronising operation and its source location.
struct Site {
  const char* op = nullptr;
  Location at{};
  bool operator==(const Site& other) const;
  std::string text() const;
};

// 16 bytes in flight to shared memory.
struct AsyncCopy {
  unsigned char* to;
  alignas(16) unsigned char data[16];
};

struct Thread {
  Stack stack;
  uint3 index{};
  unsigned id = 0;    // in its CTA
  unsigned rank = 0;  // its CTA's rank in the cluster
  unsigned slot = 0;  // index among all running threads; warps begin at multiples of 32
  bool done = true;
  Site waits_in;
  std::vector<AsyncCopy> open_copies;               // cp.async, uncommitted
  std::vector<std::vector<AsyncCopy>> copy_groups;  // committed, oldest first
};

// Lanes of a warp in one operation.
struct Collective {
  uint32_t mask = 0, arrived = 0;
  Site site;
  void* arguments[32];
};

struct Warp {
  uint32_t ready = 0;  // runnable lanes
  Collective pending[4];
};

struct Barrier {
  unsigned arrived = 0, expected = 0;
  // Two, in turn: a thread that wakes late must not be ordered after later operations of others.
  char orders[2]{};
  unsigned phase = 0;
  unsigned sum = 0, result = 0;  // of the threads' values, for __syncthreads_count
  Site site;
  std::vector<unsigned> waiting;
};

struct Block {
  static constexpr unsigned kNumBarriers = 16;
  uint3 index{};
  size_t num_alive = 0;
  unsigned char* shared = nullptr;
  Barrier barriers[kNumBarriers];
};

// SplitMix64, since every thread switch draws a number.
struct OrderDraws {
  uint64_t state = 0;
  uint64_t operator()() {
    state += 0x9e3779b97f4a7c15;
    uint64_t z = (state ^ state >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }
};

class Machine;

// Asynchronous hardware of a CTA; its results are visible only after a wait.
class AsyncUnit {
 public:
  virtual ~AsyncUnit() = default;
  // Finishes one operation when no thread can run; false if there is none.
  virtual bool deliver(Machine& machine) = 0;
  // Describes unfinished work at the exit of a thread, or of all; "" if none.
  virtual std::string unfinished(const Thread& thread) const = 0;
  virtual std::string unfinished() const = 0;
};

class Machine {
 public:
  static constexpr size_t kMaxSharedBytes = 227 << 10;
  static constexpr unsigned kMaxCluster = 16;

  using Kernel = void (*)(const void* params);
  // Clusters are neighbouring CTAs along x, whose threads run concurrently.
  void launch(dim3 grid, dim3 block, unsigned cluster, size_t shared_bytes, Kernel kernel, const void* params);

  // ---- for emulated instructions of the running thread
  Thread& self() { return *self_; }
  unsigned lane() const { return self_->id % 32; }
  unsigned num_threads() const { return static_cast<unsigned>(num_threads_); }
  [[noreturn]] void fail(const std::string& what);
  [[noreturn]] void fail(const Site& site, const std::string& what) { fail("in " + site.text() + ": " + what); }

  unsigned char* shared_memory() { return block().shared; }
  size_t shared_bytes() const { return shared_bytes_; }
  size_t cluster_size() const { return blocks_.size(); }
  unsigned char* shared_memory_of(uint32_t rank, const Site& site);
  // Fails on misaligned accesses or outside shared memory.
  unsigned char* shared_at(uint32_t address, size_t bytes, uint32_t alignment, const Site& site);

  // Waits for `count` threads. Returns the sum of values.
  unsigned barrier(unsigned id, unsigned count, const Site& site, unsigned value = 0);
  void barrier_arrive(unsigned id, unsigned count, const Site& site);
  void cluster_barrier(const Site& site);
  // Calls `op` on the arguments of all lanes in `mask` when the last arrives. Orders no memory.
  template <typename Arguments, typename Op>
  void collective(uint32_t mask, Arguments* arguments, const Site& site, Op op);
  void order_warp_memory(bool before);

  // Reads 16 bytes now (zeros if `from` is null) and delivers them no sooner than the wait.
  void copy_async(unsigned char* to, const void* from);
  void commit_copies();
  // Transfers the thread's uncommitted copies to the caller.
  std::vector<AsyncCopy> take_copies();
  void wait_for_copies(unsigned newest_left);

  // Returns the unit of this CTA, created on first use, or of another in the cluster.
  template <typename Unit>
  Unit& async_unit();
  template <typename Unit>
  Unit& async_unit_of(uint32_t rank, const Site& site);

  void wake(unsigned slot) { warps_[slot / 32].ready |= 1u << slot % 32; }
  void wait(const Site& site);
  size_t pick(size_t count);

 private:
  void run_cluster(uint3 first);
  void make_threads(dim3 block);
  void free_shared_memory();
  static void thread_main();
  void check_exit(const Thread& thread);
  bool deliver();
  Thread* next_ready();
  void switch_to(Thread& to);
  void suspend();
  std::string who_waits() const;
  Thread& thread(size_t slot) const { return *thread_sets_[set_][slot]; }
  Block& block() { return blocks_[self_->rank]; }
  Warp& warp() { return warps_[self_->slot / 32]; }
  Barrier& named_barrier(unsigned id, unsigned count, const Site& site);
  // With `is_whole` all threads of a CTA or cluster must come from one place.
  unsigned meet(Barrier& b, unsigned count, bool is_whole, const Site& site, unsigned value);
  // Returns true for the last thread, which ends the phase.
  bool arrive(Barrier& b, unsigned count, bool is_whole, const Site& site, unsigned value);
  Collective& join(uint32_t mask, const Site& site);

  Order order_;
  OrderDraws random_;
  Kernel kernel_ = nullptr;
  const void* params_ = nullptr;
  size_t num_threads_ = 0;  // per CTA
  size_t shared_bytes_ = 0;
  Thread host_;
  uint64_t begin_ = 0, end_ = 0;  // orders host and CTAs for ThreadSanitizer

  // ThreadSanitizer detects races between clusters only on different threads, so they alternate between sets of
  // threads, each as large as the largest launch so far.
  using Threads = std::vector<std::unique_ptr<Thread>>;
  static constexpr size_t kMaxThreadSets = 8;
  Threads thread_sets_[kMaxThreadSets];
  size_t num_sets_ = 1, set_ = 0;
  std::vector<Warp> warps_;
  std::vector<Block> blocks_;
  Barrier cluster_barrier_;
  bool has_met_ = false;                                 // all threads of the cluster have synchronised once
  std::vector<std::unique_ptr<AsyncUnit>> async_units_;  // per CTA
  Thread* self_ = nullptr;
  size_t warp_ = 0;  // current warp
  std::string error_;
};

Machine& machine();

template <typename Arguments, typename Op>
void Machine::collective(uint32_t mask, Arguments* arguments, const Site& site, Op op) {
  Unwatched unwatched;
  Collective& c = join(mask, site);
  c.arguments[lane()] = arguments;
  c.arrived |= 1u << lane();
  if (c.arrived != mask) return wait(site);
  Arguments* all[32];
  for (int i = 0; i < 32; ++i) all[i] = mask >> i & 1 ? static_cast<Arguments*>(c.arguments[i]) : nullptr;
  c.arrived = 0;
  op(all);
  warp().ready |= mask;
}

template <typename Unit>
Unit& Machine::async_unit() {
  const Unwatched unwatched;
  std::unique_ptr<AsyncUnit>& unit = async_units_[self_->rank];
  if (unit == nullptr) unit = std::make_unique<Unit>(num_threads());
  return static_cast<Unit&>(*unit);
}

template <typename Unit>
Unit& Machine::async_unit_of(uint32_t rank, const Site& site) {
  shared_memory_of(rank, site);  // checks the CTA
  if (async_units_[rank] == nullptr) fail(site, "CTA " + std::to_string(rank) + " has initialised no mbarrier");
  return static_cast<Unit&>(*async_units_[rank]);
}

}  // namespace pagedtree::simt
