// How `python -m pagedtree check` (python/pagedtree/check) reaches kernels that run instructions by themselves.
#pragma once

#include <cstdint>
#include <exception>
#include <string>

namespace pagedtree::cuda {

struct Instruction {
  const char* name;
  // Returns null or what went wrong. `cluster` is the size of clusters, 1 if there are none.
  const char* (*run)(const uint32_t* in, uint32_t* out, void* stream, int32_t* cluster);
};

// `in` is [threads, in_words], `out` [ctas, threads, out_words].
struct Instructions {
  int32_t ctas, threads, in_words, out_words, count;
  const Instruction* items;
};

// Calls launch(); returns null or what it threw, as no exception may leave a function that C calls.
template <typename Launch>
const char* error_of(const Launch& launch) {
  static thread_local std::string error;
  try {
    launch();
    return nullptr;
  } catch (const std::exception& failure) {
    error = failure.what();
    return error.c_str();
  }
}

}  // namespace pagedtree::cuda
