// A separate stack on which a CUDA thread runs, entered and left by explicit switches. x86-64 only.
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

  // Makes the next switch to the fiber call `entry`, which must call arrived() first and never return. The stack's old
  // contents are lost.
  void restart(void (*entry)());
  // Leaves `from`, on which the caller runs, for `to`; returns when another switch comes back.
  static void switch_to(Stack& from, Stack& to);
  void arrived();

 private:
  void release_memory();

  void* stack_pointer_ = nullptr;
  unsigned char* memory_ = nullptr;  // null: the operating system's own stack
  void* context_ = nullptr;          // ThreadSanitizer's handle of the fiber
  // For AddressSanitizer.
  void* fake_stack_ = nullptr;
  const void* bottom_ = nullptr;
  size_t bytes_ = 0;
  Stack* came_from_ = nullptr;
};

}  // namespace pagedtree::simt
