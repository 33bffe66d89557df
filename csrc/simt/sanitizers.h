// Hooks for the sanitizers.
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

// Hides the machine's state, which is not the kernel's, from ThreadSanitizer during its lifetime.
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

// Happens-before edges for ThreadSanitizer; a fiber switch orders nothing.
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

// Fills with NaN of every floating-point format. No memset: GCC would expand it unseen by ThreadSanitizer.
inline void make_undefined(unsigned char* data, size_t bytes) {
  for (size_t i = 0; i + 4 <= bytes; i += 4) *reinterpret_cast<uint32_t*>(data + i) = ~0u;
  for (size_t i = bytes & ~size_t{3}; i < bytes; ++i) data[i] = 0xff;
}

}  // namespace pagedtree::simt
