// Runs CUDA kernels on the CPU, for tests. A CUDA thread is a fiber; CTAs, those of a cluster together, run one after
// the other on the thread that launches, so that a run is the same every time. Launches of several host threads take
// turns.
//
// A run itself finds: barriers and warp collectives that threads reach from different places or not at all, deadlock,
// copies in flight at exit, bank conflicts of ldmatrix, shared memory used before it was written (it starts as NaN).
// Built with a sanitizer it also finds accesses out of bounds, undefined behaviour, and races between CUDA threads.
// It does not see: a missing fence (atomics are sequentially consistent), and a CTA that waits for one of another
// cluster hangs.
#pragma once

#include <vector_types.h>

#include <cstring>
#include <memory>
#include <random>
#include <source_location>
#include <string>
#include <vector>

#include "simt/fiber.h"
#include "simt/options.h"

namespace pagedtree::simt {

using Location = std::source_location;

// An operation at which threads meet, and the place it was called from.
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
  unsigned rank = 0;  // of its CTA in the cluster
  unsigned slot = 0;  // among all threads that run; those of a warp are neighbours, from a multiple of 32 on
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
  // What orders memory. Two in turn: who wakes late must not be ordered behind what others did since.
  char orders[2]{};
  unsigned phase = 0;
  unsigned sum = 0, result = 0;  // of what threads hand in, as __syncthreads_count
  Site site;
  std::vector<unsigned> waiting;
};

// A CTA that runs.
struct Block {
  static constexpr unsigned kNumBarriers = 16;
  uint3 index{};
  size_t num_alive = 0;
  unsigned char* shared = nullptr;
  Barrier barriers[kNumBarriers];
};

class Machine;

// Hardware that works beside the threads of a CTA and is only seen when somebody waits for it.
class AsyncUnit {
 public:
  virtual ~AsyncUnit() = default;
  // No thread can go on: finishes one piece of work; false if there is none.
  virtual bool deliver(Machine& machine) = 0;
  // What is still under way when a thread exits, and when all have; "" if nothing.
  virtual std::string unfinished(const Thread& thread) const = 0;
  virtual std::string unfinished() const = 0;
};

class Machine {
 public:
  static constexpr size_t kMaxSharedBytes = 227 << 10;
  static constexpr unsigned kMaxCluster = 16;

  using Kernel = void (*)(const void* params);
  // Of `cluster` CTAs, neighbours along x, whose threads run at the same time.
  void launch(dim3 grid, dim3 block, unsigned cluster, size_t shared_bytes, Kernel kernel, const void* params);

  // ---- for the emulated instructions: of the thread that runs
  Thread& self() { return *self_; }
  unsigned lane() const { return self_->id % 32; }
  unsigned num_threads() const { return static_cast<unsigned>(num_threads_); }
  [[noreturn]] void fail(const std::string& what);
  [[noreturn]] void fail(const Site& site, const std::string& what) { fail("in " + site.text() + ": " + what); }

  unsigned char* shared_memory() { return block().shared; }
  size_t shared_bytes() const { return shared_bytes_; }
  size_t cluster_size() const { return blocks_.size(); }
  // Of another CTA of the cluster.
  unsigned char* shared_memory_of(uint32_t rank, const Site& site);
  // Checks an access of `bytes` at a multiple of `alignment`.
  unsigned char* shared_at(uint32_t address, size_t bytes, uint32_t alignment, const Site& site);

  // Waits for `count` threads; gives back the sum of what they handed in.
  unsigned barrier(unsigned id, unsigned count, const Site& site, unsigned value = 0);
  void cluster_barrier(const Site& site);
  // Every lane of `mask` hands in its arguments; the last one to come calls `op` on all of them. Orders no memory.
  template <typename Arguments, typename Op>
  void collective(uint32_t mask, Arguments* arguments, const Site& site, Op op);
  void order_warp_memory(bool before);

  // 16 bytes, zeros if `from` is null: read now, delivered by the wait and no sooner.
  void copy_async(unsigned char* to, const void* from);
  void commit_copies();
  void wait_for_copies(unsigned newest_left);

  // Of this CTA, which has no cluster; made on first use.
  template <typename Unit>
  Unit& async_unit();

  void wake(unsigned slot) { warps_[slot / 32].ready |= 1u << slot % 32; }
  void wait(const Site& site);
  // One of `count` things, as the launch's order has it.
  size_t pick(size_t count);

 private:
  void run_cluster(uint3 first);
  void make_threads(dim3 block);
  void free_shared_memory();
  static void thread_main();
  void check_exit(const Thread& thread);
  Thread* next_ready();
  void switch_to(Thread& to);
  void suspend();
  std::string who_waits() const;
  Thread& thread(size_t slot) const { return *thread_sets_[set_][slot]; }
  Block& block() { return blocks_[self_->rank]; }
  Warp& warp() { return warps_[self_->slot / 32]; }
  // Meets `count` threads at `b`; all of a CTA or cluster, where `is_whole`, must come to the same place.
  unsigned meet(Barrier& b, unsigned count, bool is_whole, const Site& site, unsigned value);
  Collective& join(uint32_t mask, const Site& site);

  // The launch
  Order order_;
  std::mt19937_64 random_;
  Kernel kernel_ = nullptr;
  const void* params_ = nullptr;
  size_t num_threads_ = 0;  // of a CTA
  size_t shared_bytes_ = 0;
  Thread host_;
  uint64_t begin_ = 0, end_ = 0;  // what orders host and CTAs for ThreadSanitizer

  // The cluster that runs
  // ThreadSanitizer sees races between clusters only if they run on different threads, so that they take turns on
  // several sets of them; each set has as many threads as any launch has had.
  using Threads = std::vector<std::unique_ptr<Thread>>;
  static constexpr size_t kMaxThreadSets = 8;
  Threads thread_sets_[kMaxThreadSets];
  size_t num_sets_ = 1, set_ = 0;
  std::vector<Warp> warps_;
  std::vector<Block> blocks_;
  Barrier cluster_barrier_;
  bool has_met_ = false;  // all of the cluster's threads, once
  std::unique_ptr<AsyncUnit> async_unit_;
  Thread* self_ = nullptr;
  size_t warp_ = 0;  // whose turn it is
  std::string error_;
};

// The one machine of the process.
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
  if (blocks_.size() > 1) fail("uses instructions that the machine does not know in clusters");
  if (async_unit_ == nullptr) async_unit_ = std::make_unique<Unit>(num_threads());
  return static_cast<Unit&>(*async_unit_);
}

}  // namespace pagedtree::simt
