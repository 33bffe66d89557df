// Runs CUDA kernels on the CPU, for tests. A CUDA thread is a fiber. CTAs run one after the other on the thread that
// launches, those of a cluster together, so that a run is the same every time. Launches of several host threads take
// turns.
//
// A run finds barriers and warp collectives that threads reach from different places or not at all, deadlocks, copies
// in flight at exit, bank conflicts of ldmatrix, and shared memory that is used before it is written (it starts as
// NaN). Built with a sanitizer it also finds accesses out of bounds, undefined behaviour, and races between CUDA
// threads. It does not find missing fences of memory (atomics are sequentially consistent); those between ordinary
// writes and Hopper's asynchronous reads it does (ptx_sm90_simt.h). A CTA that waits for a CTA of another cluster
// hangs.
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

// An operation at which threads meet, and the place from which it was called.
struct Site {
  const char* op = nullptr;
  Location at{};
  bool operator==(const Site& other) const;
  std::string text() const;
};

// 16 bytes on their way to shared memory.
struct AsyncCopy {
  unsigned char* to;
  alignas(16) unsigned char data[16];
};

struct Thread {
  Stack stack;
  uint3 index{};
  unsigned id = 0;    // in its CTA
  unsigned rank = 0;  // its CTA's rank in the cluster
  unsigned slot = 0;  // index among all running threads; a warp's are neighbours, from a multiple of 32 on
  bool done = true;
  Site waits_in;
  std::vector<AsyncCopy> open_copies;               // cp.async, not committed
  std::vector<std::vector<AsyncCopy>> copy_groups;  // committed, oldest first
};

// Some lanes of a warp that meet in one operation.
struct Collective {
  uint32_t mask = 0, arrived = 0;
  Site site;
  void* arguments[32];
};

struct Warp {
  uint32_t ready = 0;  // lanes that can go on
  Collective pending[4];
};

struct Barrier {
  unsigned arrived = 0, expected = 0;
  // What orders memory. There are two, used in turn: a thread that wakes late must not be ordered after what others did
  // meanwhile.
  char orders[2]{};
  unsigned phase = 0;
  unsigned sum = 0, result = 0;  // of the threads' values, as in __syncthreads_count
  Site site;
  std::vector<unsigned> waiting;
};

// A running CTA.
struct Block {
  static constexpr unsigned kNumBarriers = 16;
  uint3 index{};
  size_t num_alive = 0;
  unsigned char* shared = nullptr;
  Barrier barriers[kNumBarriers];
};

// Draws the orders of a launch: SplitMix64, because each switch of threads takes a draw and little time besides.
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

// Hardware that works beside the threads of a CTA; its results are visible only after a wait.
class AsyncUnit {
 public:
  virtual ~AsyncUnit() = default;
  // Called when no thread can go on: finishes one piece of work, or returns false if there is none.
  virtual bool deliver(Machine& machine) = 0;
  // The work that is not finished when a thread exits, or when all threads have exited; "" if there is none.
  virtual std::string unfinished(const Thread& thread) const = 0;
  virtual std::string unfinished() const = 0;
};

class Machine {
 public:
  static constexpr size_t kMaxSharedBytes = 227 << 10;
  static constexpr unsigned kMaxCluster = 16;

  using Kernel = void (*)(const void* params);
  // Launches clusters of `cluster` CTAs, neighbours along x, whose threads run at the same time.
  void launch(dim3 grid, dim3 block, unsigned cluster, size_t shared_bytes, Kernel kernel, const void* params);

  // ---- for the emulated instructions of the running thread
  Thread& self() { return *self_; }
  unsigned lane() const { return self_->id % 32; }
  unsigned num_threads() const { return static_cast<unsigned>(num_threads_); }
  [[noreturn]] void fail(const std::string& what);
  [[noreturn]] void fail(const Site& site, const std::string& what) { fail("in " + site.text() + ": " + what); }

  unsigned char* shared_memory() { return block().shared; }
  size_t shared_bytes() const { return shared_bytes_; }
  size_t cluster_size() const { return blocks_.size(); }
  // The shared memory of another CTA of the cluster.
  unsigned char* shared_memory_of(uint32_t rank, const Site& site);
  // Checks that an access to `bytes` bytes is inside shared memory and aligned.
  unsigned char* shared_at(uint32_t address, size_t bytes, uint32_t alignment, const Site& site);

  // Waits for `count` threads; returns the sum of their values.
  unsigned barrier(unsigned id, unsigned count, const Site& site, unsigned value = 0);
  // Counts the thread as one of them, without waiting.
  void barrier_arrive(unsigned id, unsigned count, const Site& site);
  void cluster_barrier(const Site& site);
  // Every lane of `mask` gives its arguments; the last lane to come calls `op` on all of them. This orders no memory.
  template <typename Arguments, typename Op>
  void collective(uint32_t mask, Arguments* arguments, const Site& site, Op op);
  void order_warp_memory(bool before);

  // Copies 16 bytes, zeros if `from` is null. They are read now, and delivered no sooner than by the wait.
  void copy_async(unsigned char* to, const void* from);
  void commit_copies();
  // The running thread's copies that it has not committed, taken from it: somebody else delivers them.
  std::vector<AsyncCopy> take_copies();
  void wait_for_copies(unsigned newest_left);

  // The unit of this CTA, made on first use, or of another one of the cluster.
  template <typename Unit>
  Unit& async_unit();
  template <typename Unit>
  Unit& async_unit_of(uint32_t rank, const Site& site);

  void wake(unsigned slot) { warps_[slot / 32].ready |= 1u << slot % 32; }
  void wait(const Site& site);
  // Picks one of `count` things according to the launch's order.
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
  // Meets `count` threads at `b`. With `is_whole` these are all threads of a CTA or cluster, which must come from the
  // same place.
  unsigned meet(Barrier& b, unsigned count, bool is_whole, const Site& site, unsigned value);
  // Counts the thread; returns whether it was the last, which ends the phase.
  bool arrive(Barrier& b, unsigned count, bool is_whole, const Site& site, unsigned value);
  Collective& join(uint32_t mask, const Site& site);

  // The current launch.
  Order order_;
  OrderDraws random_;
  Kernel kernel_ = nullptr;
  const void* params_ = nullptr;
  size_t num_threads_ = 0;  // per CTA
  size_t shared_bytes_ = 0;
  Thread host_;
  uint64_t begin_ = 0, end_ = 0;  // what orders host and CTAs for ThreadSanitizer

  // The running cluster. ThreadSanitizer sees races between clusters only if these run on different threads, so they
  // take turns on several sets of threads; each set has as many threads as any launch has had.
  using Threads = std::vector<std::unique_ptr<Thread>>;
  static constexpr size_t kMaxThreadSets = 8;
  Threads thread_sets_[kMaxThreadSets];
  size_t num_sets_ = 1, set_ = 0;
  std::vector<Warp> warps_;
  std::vector<Block> blocks_;
  Barrier cluster_barrier_;
  bool has_met_ = false;                                 // whether all threads of the cluster have met once
  std::vector<std::unique_ptr<AsyncUnit>> async_units_;  // of the CTAs
  Thread* self_ = nullptr;
  size_t warp_ = 0;  // the warp whose turn it is
  std::string error_;
};

// The only machine of the process.
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
  std::unique_ptr<AsyncUnit>& unit = async_units_[self_->rank];
  if (unit == nullptr) unit = std::make_unique<Unit>(num_threads());
  return static_cast<Unit&>(*unit);
}

template <typename Unit>
Unit& Machine::async_unit_of(uint32_t rank, const Site& site) {
  shared_memory_of(rank, site);  // checks that the CTA is there
  if (async_units_[rank] == nullptr) fail(site, "CTA " + std::to_string(rank) + " has initialised no mbarrier");
  return static_cast<Unit&>(*async_units_[rank]);
}

}  // namespace pagedtree::simt
