#include "torch/prepared.h"

#include <mutex>
#include <unordered_map>

namespace pagedtree::ops {
namespace {

struct Registry {
  std::mutex mutex;
  std::unordered_map<int64_t, std::shared_ptr<const Prepared>> calls;
  int64_t last = 0;
};

// Never destroys the registry: threads may call during process exit.
Registry& registry() {
  static auto* const all = new Registry;
  return *all;
}

}  // namespace

int64_t keep_prepared(std::shared_ptr<const Prepared> prepared) {
  Registry& all = registry();
  const std::scoped_lock lock(all.mutex);
  all.calls.emplace(++all.last, std::move(prepared));
  return all.last;
}

std::shared_ptr<const Prepared> find_prepared(int64_t number) {
  Registry& all = registry();
  const std::scoped_lock lock(all.mutex);
  const auto found = all.calls.find(number);
  return found == all.calls.end() ? nullptr : found->second;
}

}  // namespace pagedtree::ops

// Releases for ctypes: an op would be traced while Python collects garbage.
extern "C" PT_EXPORT void pagedtree_release_prepared(int64_t number) {
  std::shared_ptr<const pagedtree::ops::Prepared> released;  // destroyed after the unlock: it may free tensors
  auto& all = pagedtree::ops::registry();
  const std::scoped_lock lock(all.mutex);
  if (auto call = all.calls.extract(number)) released = std::move(call.mapped());
}
