#include "simt/fiber.h"

#include <sys/mman.h>

#include <new>

#if !defined(__x86_64__)
#error "the simt backend switches stacks in x86-64 assembly"
#endif

// Saves callee-saved registers on the old stack and restores them from the new one.
extern "C" __attribute__((visibility("hidden"))) void pagedtree_simt_switch(void** save, void* load);
asm(R"(.pushsection .text
.hidden pagedtree_simt_switch
.globl pagedtree_simt_switch
.type pagedtree_simt_switch,@function
pagedtree_simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size pagedtree_simt_switch,.-pagedtree_simt_switch
.popsection)");

#define PT_UNWATCHED __attribute__((no_sanitize("thread")))

namespace pagedtree::simt {
namespace {
constexpr size_t kGuardBytes = 4096;
constexpr int kSavedRegisters = 6;
}  // namespace

Stack::~Stack() { release_memory(); }

void Stack::release_memory() {
  if (memory_ == nullptr) return;
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(memory_ + kGuardBytes, kBytes - kGuardBytes);
#endif
  munmap(memory_, kBytes);
  memory_ = nullptr;
}

PT_UNWATCHED void Stack::restart(void (*entry)()) {
#if defined(__SANITIZE_THREAD__)
  release_memory();  // newly mapped memory has no owner, like a new context
  context_ = __tsan_create_fiber(0);
#endif
  if (memory_ == nullptr) {
    void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    memory_ = static_cast<unsigned char*>(memory);
    mprotect(memory_, kGuardBytes, PROT_NONE);
    bottom_ = memory_;
    bytes_ = kBytes;
  }
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(memory_ + kGuardBytes, kBytes - kGuardBytes);
  fake_stack_ = nullptr;
#endif
  // Simulates a call of `entry` without a caller. Stack tops differ within the page, so that stacks do not share lines
  // of L1.
  static unsigned num_stacks = 0;
  auto** top = reinterpret_cast<void**>(memory_ + kBytes - 64 * (1 + num_stacks++ % 64));
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < kSavedRegisters; ++i) *--top = nullptr;
  stack_pointer_ = top;
}

PT_UNWATCHED void Stack::switch_to(Stack& from, Stack& to) {
  to.came_from_ = &from;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&from.fake_stack_, to.bottom_, to.bytes_);
#elif defined(__SANITIZE_THREAD__)
  if (from.memory_ == nullptr) from.context_ = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(to.context_, __tsan_switch_to_fiber_no_sync);
#endif
  pagedtree_simt_switch(&from.stack_pointer_, to.stack_pointer_);
  from.arrived();
}

PT_UNWATCHED void Stack::arrived() {
#if defined(__SANITIZE_ADDRESS__)
  const void* bottom;
  size_t bytes;
  __sanitizer_finish_switch_fiber(fake_stack_, &bottom, &bytes);
  if (came_from_->memory_ == nullptr) {  // operating system's stack: bounds are known only now
    came_from_->bottom_ = bottom;
    came_from_->bytes_ = bytes;
  }
#endif
}

}  // namespace pagedtree::simt
