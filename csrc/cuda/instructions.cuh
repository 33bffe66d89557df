// Entry points of `python -m pagedtree check` for single instructions.
#pragma once

#include <cstdint>
#include <exception>
#include <string>

namespace pagedtree::cuda {

struct Instruction {
  const char* name;
  // Returns null or an error. `cluster`: CTAs per cluster, or 1.
  const char* (*run)(const uint32_t* in, uint32_t* out, void* stream, int32_t* cluster);
};

// `in` is [threads, in_words], `out` [ctas, threads, out_words].
struct Instructions {
  int32_t ctas, threads, in_words, out_words, count;
  const Instruction* items;
};

// Returns null or the error that launch() threw: no exception may leave a C function.
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
