// A stack of its own, entered and left by hand: what a CUDA thread runs on. x86-64.
#pragma once

#include <cstddef>

#include "simt/sanitizers.h"

namespace pagedtree::simt {

class Stack {
 public:
  static constexpr size_t kBytes = 512 << 10;

  Stack() = default;
  Stack(const Stack&) = delete;
  ~Stack();

  // The next switch to it calls `entry`, which must call arrived() first and never return. What was on the stack is
  // forgotten.
  void restart(void (*entry)());
  // Leaves `from`, on which the caller runs, for `to`; returns when somebody switches back.
  static void switch_to(Stack& from, Stack& to);
  void arrived();

 private:
  void release_memory();

  void* stack_pointer_ = nullptr;
  unsigned char* memory_ = nullptr;  // null: the operating system's own stack
  void* context_ = nullptr;          // ThreadSanitizer's name for what runs here
  // AddressSanitizer's
  void* fake_stack_ = nullptr;
  const void* bottom_ = nullptr;
  size_t bytes_ = 0;
  Stack* came_from_ = nullptr;
};

}  // namespace pagedtree::simt
