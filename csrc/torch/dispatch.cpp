#include "torch/dispatch.h"

#include <atomic>
#include <stdexcept>
#include <vector>

namespace pagedtree::ops {
namespace {

std::vector<const Backend*> host_backends() { return {&cpu::backend()}; }

std::atomic<const Backend*>& host_backend() {
  static std::atomic<const Backend*> chosen{&cpu::backend()};
  return chosen;
}

}  // namespace

const Backend& backend_for(const Tensor& anchor) {
  if (anchor.is_cpu()) return *host_backend().load();
  throw std::runtime_error("pagedtree was built without a backend for this device; tensors must be on the CPU");
}

ExecContext context_for(const Tensor&) {
  ExecContext ctx;
  ctx.num_threads = static_cast<int>(torch::stable::get_num_threads());
  ctx.parallel_for = [](int64_t begin, int64_t end, int64_t grain_size, ExecContext::Body body, void* state) {
    torch::stable::parallel_for(begin, end, grain_size, [&](int64_t b, int64_t e) { body(b, e, state); });
  };
  return ctx;
}

std::string backends() {
  std::string names;
  for (const Backend* backend : host_backends()) names += (names.empty() ? "" : ",") + std::string(backend->name);
  return names;
}

std::string use_backend(std::string name) {
  for (const Backend* backend : host_backends()) {
    if (name == backend->name) return host_backend().exchange(backend)->name;
  }
  throw std::runtime_error("use_backend: `name` must be one of " + backends() + ", got " + name);
}

}  // namespace pagedtree::ops
