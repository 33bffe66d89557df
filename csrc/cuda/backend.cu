#include "cuda/backend.h"

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#include <dlfcn.h>

#include "cuda/driver.h"
#endif

namespace pagedtree {
namespace {

#if defined(__CUDACC__)
// Returns why no kernel can run, or an empty string. No driver means no GPU, which is no error.
std::string driver_error() {
  void* library = dlopen("libcuda.so.1", RTLD_LAZY);
  if (library == nullptr) return "";
  const auto get_version = reinterpret_cast<int (*)(int*)>(dlsym(library, "cuDriverGetVersion"));
  int driver = 0;
  if (get_version == nullptr || get_version(&driver) != 0) return "";
  return cuda::driver_error(driver, CUDART_VERSION);
}
#else
const char* driver_error() { return ""; }
#endif

}  // namespace

#if defined(__CUDACC__)
const Backend& cuda::backend() {
  static constexpr CudaBackend only("cuda");
  return only;
}
#define PT_THIS_BACKEND cuda::backend
#else
const Backend& simt::backend() {
  static constexpr cuda::CudaBackend only("simt");
  return only;
}
#define PT_THIS_BACKEND simt::backend
#endif

// For programs that load the library at run time.
extern "C" PT_EXPORT const Backend* pagedtree_backend() { return &PT_THIS_BACKEND(); }

// Returns why the backend cannot work on this machine, or an empty string.
extern "C" PT_EXPORT const char* pagedtree_backend_error() {
  static const auto error = driver_error();
  return &error[0];
}

}  // namespace pagedtree
