// The stack of a CUDA thread (a fiber), entered and left by explicit switches. x86-64 only.
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

  // Discards the contents. The next switch calls `entry`, which must call arrived() first and never return.
  void restart(void (*entry)());
  // Switches from the caller's stack `from` to `to`; returns on a switch back.
  static void switch_to(Stack& from, Stack& to);
  void arrived();

 private:
  void release_memory();

  void* stack_pointer_ = nullptr;
  unsigned char* memory_ = nullptr;  // null: the operating system's stack
  void* context_ = nullptr;          // ThreadSanitizer's fiber
  void* fake_stack_ = nullptr;
  const void* bottom_ = nullptr;
  size_t bytes_ = 0;
  Stack* came_from_ = nullptr;
};

}  // namespace pagedtree::simt
