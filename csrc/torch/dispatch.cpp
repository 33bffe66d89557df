#include "torch/dispatch.h"

#include <dlfcn.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/stableivalue_conversions.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <stdexcept>
#include <vector>

#include "torch/ops.h"

namespace pagedtree::ops {
namespace {

struct Loaded {
  const Backend* backend = nullptr;
  std::string error;
};

// Loads a backend's library from the directory of this one.
Loaded load_backend(const std::string& file) {
  Dl_info here{};
  dladdr(reinterpret_cast<const void*>(&load_backend), &here);
  const std::string path = here.dli_fname;
  const size_t slash = path.rfind('/');
  void* library = dlopen(((slash == std::string::npos ? "" : path.substr(0, slash + 1)) + file).c_str(), RTLD_NOW);
  if (library == nullptr) return {nullptr, dlerror()};
  const auto table = reinterpret_cast<const Backend* (*)()>(dlsym(library, "pagedtree_backend"));
  const auto error = reinterpret_cast<const char* (*)()>(dlsym(library, "pagedtree_backend_error"));
  if (table == nullptr || error == nullptr) return {nullptr, dlerror()};
  if (*error() != '\0') return {nullptr, error()};
  return {table(), ""};
}

// Looked up when needed, because Torch's CPU builds lack this function of the stable ABI.
using CurrentCudaStream = AOTITorchError (*)(int32_t device_index, void** stream);
CurrentCudaStream current_cuda_stream() {
  static const auto function = [] {
    const char* name = "aoti_torch_get_current_cuda_stream";
    void* found = dlsym(RTLD_DEFAULT, name);
    if (found == nullptr) {
      if (void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD)) found = dlsym(library, name);
    }
    return reinterpret_cast<CurrentCudaStream>(found);
  }();
  return function;
}

const Loaded& cuda_backend() {
  static const Loaded loaded = current_cuda_stream() == nullptr ? Loaded{nullptr, "this torch has no CUDA"}
                                                                : load_backend("libpagedtree_cuda.so");
  return loaded;
}

const std::vector<const Backend*>& host_backends() {
  static const auto found = [] {
    std::vector<const Backend*> backends{&cpu::backend()};
    if (const Loaded simt = load_backend("libpagedtree_simt.so"); simt.backend != nullptr) {
      backends.push_back(simt.backend);
    }
    return backends;
  }();
  return found;
}

// Returns the backend of ops on CPU tensors; null if a test forbids them.
std::atomic<const Backend*>& host_backend() {
  static std::atomic<const Backend*> chosen{&cpu::backend()};
  return chosen;
}

}  // namespace

const Backend& backend_for(const Tensor& anchor) {
  const Backend* backend = host_backend().load();
  if (anchor.is_cuda()) {
    backend = cuda_backend().backend;
    if (backend == nullptr) {
      throw std::runtime_error("pagedtree has no backend for CUDA tensors: " + cuda_backend().error);
    }
  } else if (!anchor.is_cpu()) {
    throw std::runtime_error("pagedtree has no backend for this device; tensors must be on the CPU or a CUDA device");
  } else if (backend == nullptr) {
    throw std::runtime_error("this test is for the backend cuda, but the op's tensors are on the CPU");
  }
  return *backend;
}

CallContext context_for(const Tensor& anchor) {
  CallContext ctx;
  if (anchor.is_cuda()) {
    const int32_t device = anchor.get_device_index();
    ctx.guard.emplace(device);
    if (current_cuda_stream()(device, &ctx.stream) != AOTI_TORCH_SUCCESS) {
      throw std::runtime_error("torch gives no CUDA stream for device " + std::to_string(device));
    }
    return ctx;
  }
  ctx.num_threads = static_cast<int>(torch::stable::get_num_threads());
  ctx.parallel_for = [](int64_t begin, int64_t end, int64_t grain_size, ExecContext::Body body, void* state) {
    torch::stable::parallel_for(begin, end, grain_size, [&](int64_t b, int64_t e) { body(b, e, state); });
  };
  return ctx;
}

// Uses the function of Torch's compiled models: the dispatcher, behind torch::stable::empty, takes several times as
// long.
Tensor empty_on(const Tensor& anchor, std::initializer_list<int64_t> shape, ScalarType dtype) {
  std::vector<int64_t> strides(shape.size());
  int64_t elements = 1;
  bool fits = true;
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = elements;
    fits = fits && !__builtin_mul_overflow(elements, max_of<int64_t>(shape.begin()[i], 1), &elements);
  }
  const torch::stable::Device device = anchor.device();
  AtenTensorHandle made = nullptr;
  using torch::stable::detail::from, torch::stable::detail::to;
  if (fits && elements <= std::numeric_limits<int64_t>::max() / 8 &&
      aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.begin(), strides.data(),
                               to<int32_t>(from(dtype)), to<int32_t>(from(device.type())), device.index(),
                               &made) == AOTI_TORCH_SUCCESS) {
    return Tensor(made);
  }
  return torch::stable::empty(std::vector<int64_t>(shape), dtype, std::nullopt, device);  // raises the error
}

namespace {

// Returns the backends of this build, for CPU tensors first.
std::string backends() {
  std::string names;
  for (const Backend* backend : host_backends()) names += (names.empty() ? "" : ",") + std::string(backend->name);
  return cuda_backend().backend == nullptr ? names : names + ",cuda";
}

// Selects the backend for CPU tensors by its index in backends(), and returns the previous index; -1 forbids such
// tensors in GPU tests. Torch never frees a string that an op returns.
int64_t use_backend(int64_t index) {
  const std::vector<const Backend*>& known = host_backends();
  const auto size = static_cast<int64_t>(known.size());
  if (index < -1 || index >= size) {
    throw std::runtime_error("_use_backend: index: expected -1.." + std::to_string(size - 1) + ", got " +
                             std::to_string(index));
  }
  const Backend* previous = host_backend().exchange(index < 0 ? nullptr : known[static_cast<size_t>(index)]);
  return previous == nullptr ? -1 : std::find(known.begin(), known.end(), previous) - known.begin();
}

constexpr Op kOps[] = {
    {"_backends", "() -> str", PT_BOX(&backends)},
    {"_use_backend", "(SymInt index) -> SymInt", PT_BOX(&use_backend)},
};

}  // namespace

PT_OPS_WITHOUT_TENSORS(kOps)

}  // namespace pagedtree::ops
