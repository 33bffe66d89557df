#include "cuda/backend.h"

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <string>
#endif

namespace pagedtree {
namespace {

#if defined(__CUDACC__)
// Why no kernel can run: the CUDA runtime is linked statically, and a driver supports runtimes of its own major version
// and of earlier ones. Empty if nothing is known to be wrong, and without a driver, as there is no GPU then.
std::string driver_error() {
  void* library = dlopen("libcuda.so.1", RTLD_LAZY);
  if (library == nullptr) return "";
  const auto get_version = reinterpret_cast<int (*)(int*)>(dlsym(library, "cuDriverGetVersion"));
  constexpr int runtime = CUDART_VERSION;
  int driver = 0;
  if (get_version == nullptr || get_version(&driver) != 0 || driver / 1000 >= runtime / 1000) return "";
  const auto text = [](int version) {
    return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
  };
  return "the NVIDIA driver is for CUDA " + text(driver) + ", but pagedtree is built with CUDA " + text(runtime) +
         ": update the driver to one for CUDA " + std::to_string(runtime / 1000) +
         ", or build pagedtree with nvcc of CUDA " + std::to_string(driver / 1000);
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

// Why the backend cannot work on this machine; empty if nothing is known to be wrong.
extern "C" PT_EXPORT const char* pagedtree_backend_error() {
  static const auto error = driver_error();
  return &error[0];
}

}  // namespace pagedtree
