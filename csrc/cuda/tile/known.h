// A cache of values that stay the same while the process runs.
#pragma once

#include <atomic>
#include <mutex>

namespace pagedtree::cuda {

// One value per key. Lookups of cached keys take no lock, and references stay valid.
template <typename Key, typename Value>
class Known {
 public:
  // Calls `find` once for a new key. If it throws, the next call tries again.
  template <typename Find>
  Value& at(const Key& key, Find find) {
    if (Entry* known = entry_of(key)) return known->value;
    const std::lock_guard lock(mutex_);
    if (Entry* known = entry_of(key)) return known->value;
    newest_.store(new Entry{key, find(), newest_.load()}, std::memory_order_release);
    return newest_.load()->value;
  }

 private:
  // Never freed: kernels may be launched until the process ends.
  struct Entry {
    const Key key;
    Value value;
    Entry* const older;
  };

  Entry* entry_of(const Key& key) const {
    Entry* entry = newest_.load(std::memory_order_acquire);
    while (entry != nullptr && !(entry->key == key)) entry = entry->older;
    return entry;
  }

  std::mutex mutex_;
  std::atomic<Entry*> newest_ = nullptr;
};

}  // namespace pagedtree::cuda
