// What the sanitizers must know about fibers, and how memory becomes undefined again.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#elif defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

namespace pagedtree::simt {

// While an object lives, ThreadSanitizer does not watch this fiber: the machine's own state is not part of the kernel.
struct Unwatched {
#if defined(__SANITIZE_THREAD__)
  Unwatched() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~Unwatched() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
#else
  Unwatched() {}
#endif
  Unwatched(const Unwatched&) = delete;
};

// Happens-before edges for ThreadSanitizer; a switch between fibers orders nothing.
inline void release([[maybe_unused]] void* object) {
#if defined(__SANITIZE_THREAD__)
  __tsan_release(object);
#endif
}
inline void acquire([[maybe_unused]] void* object) {
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(object);
#endif
}

// Bytes that are NaN in every floating-point format. No memset: GCC expands it behind ThreadSanitizer's back.
inline void make_undefined(unsigned char* data, size_t bytes) {
  for (size_t i = 0; i + 4 <= bytes; i += 4) *reinterpret_cast<uint32_t*>(data + i) = ~0u;
  for (size_t i = bytes & ~size_t{3}; i < bytes; ++i) data[i] = 0xff;
}

}  // namespace pagedtree::simt
