#include <elf.h>
#include <link.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "core/engine.h"
#include "cuda/engine.h"
#include "cuda/instructions.cuh"
#include "cuda/tile/known.h"

namespace pagedtree::cuda {
namespace {

#if defined(PAGEDTREE_HAS_SM90A)
constexpr bool kHasSm90a = true;
#else
constexpr bool kHasSm90a = false;
#endif
constexpr const char* kPassed = "verdict: passed\n";

// Returns a file's first bytes, or an empty string. C functions: docs/notes/first-gpu-run.md has the reason.
std::string beginning_of(const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "rb");
  if (file == nullptr) return "";
  char text[4096];
  const size_t count = std::fread(text, 1, sizeof(text), file);
  std::fclose(file);
  return {text, count};
}

void append_build_id(const char* notes, size_t bytes, std::string& to) {
  const auto aligned = [](size_t size) { return (size + 3) / 4 * 4; };
  for (size_t at = 0; at + sizeof(ElfW(Nhdr)) <= bytes;) {
    ElfW(Nhdr) note;
    std::memcpy(&note, notes + at, sizeof(note));
    const char* const name = notes + at + sizeof(note);
    const char* const content = name + aligned(note.n_namesz);
    if (note.n_type == NT_GNU_BUILD_ID && note.n_namesz == 4 && std::memcmp(name, "GNU", 4) == 0) {
      for (size_t i = 0; i < note.n_descsz; ++i) {
        const auto byte = static_cast<unsigned char>(content[i]);
        for (const int digit : {byte >> 4, byte & 15}) to += "0123456789abcdef"[digit];
      }
    }
    at += sizeof(note) + aligned(note.n_namesz) + aligned(note.n_descsz);
  }
}

// Returns the build id of the library with this function.
std::string build_id() {
  struct Search {
    uintptr_t here;
    std::string found;
  } search{reinterpret_cast<uintptr_t>(&append_build_id), ""};
  dl_iterate_phdr(
      [](dl_phdr_info* library, size_t, void* data) {
        auto& [here, found] = *static_cast<Search*>(data);
        bool is_here = false;
        for (int i = 0; i < library->dlpi_phnum; ++i) {
          const ElfW(Phdr) & part = library->dlpi_phdr[i];
          is_here = is_here || (part.p_type == PT_LOAD && here - library->dlpi_addr - part.p_vaddr < part.p_memsz);
        }
        for (int i = 0; is_here && i < library->dlpi_phnum; ++i) {
          const ElfW(Phdr) & part = library->dlpi_phdr[i];
          const auto* const notes = reinterpret_cast<const char*>(library->dlpi_addr + part.p_vaddr);
          if (part.p_type == PT_NOTE) append_build_id(notes, part.p_memsz, found);
        }
        return is_here ? 1 : 0;
      },
      &search);
  return search.found;
}

#if defined(__CUDACC__)
std::string device_name() {
  cudaDeviceProp properties{};
  check_cuda(cudaGetDeviceProperties(&properties, current_device()), "cudaGetDeviceProperties");
  return properties.name;
}
// Returns the driver's release, if the system has it, and CUDA version.
std::string driver_name() {
  int version = 0;
  check_cuda(cudaDriverGetVersion(&version), "cudaDriverGetVersion");
  const std::string release = beginning_of("/sys/module/nvidia/version");
  return release.substr(0, release.find('\n')) + " for CUDA " + std::to_string(version);
}
#else
std::string device_name() { return "simt"; }
std::string driver_name() { return "none"; }
#endif

std::string cache_folder() {
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value == nullptr ? "" : value);
  };
  if (const std::string own = variable("PAGEDTREE_CACHE"); !own.empty()) return own;
  if (const std::string caches = variable("XDG_CACHE_HOME"); !caches.empty()) return caches + "/pagedtree";
  const std::string home = variable("HOME");
  return home.empty() ? "" : home + "/.cache/pagedtree";
}

bool is_hopper(const DeviceLimits& limits) {
  return limits.capability / 10 == 9 && limits.max_shared_bytes >= kWgmmaSharedBytes;
}

// File with the verdict for the current device.
struct VerdictFile {
  std::string path;       // empty without a cache folder
  std::string beginning;  // of its text

  static VerdictFile of_current_device() {
    const std::string key = "pagedtree's self-test of wgmma, form 1\nGPU: " + device_name() +
                            "\ndriver: " + driver_name() + "\nbuild: " + build_id() + "\n";
    uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
    for (const char c : key) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
    const std::string folder = cache_folder();
    return {folder.empty() ? "" : folder + "/wgmma-" + std::to_string(hash) + ".txt", key};
  }
  bool says_passed() const { return !path.empty() && beginning_of(path) == beginning + kPassed; }
};

}  // namespace

std::string wgmma_needs(const DeviceLimits& limits) {
  if (!kHasSm90a) return "a build for 9.0a; this one has no code for it";
  if (is_hopper(limits)) return "";
  return "a GPU of compute capability 9.0 with 227 KB of shared memory for a block, got " +
         std::to_string(limits.capability / 10) + "." + std::to_string(limits.capability % 10) + " with " +
         std::to_string(limits.max_shared_bytes >> 10) + " KB";
}

MatrixEngine resolved_engine(MatrixEngine asked, const DeviceLimits& limits) {
  if (asked != MatrixEngine::kAuto) return asked;
  if (!kHasSm90a || !is_hopper(limits)) return MatrixEngine::kMmaSync;
  static Known<int, bool> has_passed;
  const bool passed = has_passed.at(current_device(), [] { return VerdictFile::of_current_device().says_passed(); });
  return passed ? MatrixEngine::kWgmma : MatrixEngine::kMmaSync;
}

// Facts for python/pagedtree/_engine.py. The thread's next call frees the texts.
struct EngineFacts {
  const char* error;  // message or null
  const char* needs;  // wgmma_needs()
  const char* path;   // as in VerdictFile
  const char* beginning;
  int32_t has_passed;  // as the file says now
};

extern "C" PT_EXPORT const EngineFacts* pagedtree_engine_facts() {
  static thread_local std::string needs;
  static thread_local VerdictFile file;
  static thread_local EngineFacts facts;
  file = {};
  const char* const error = error_of([] {
    needs = wgmma_needs(device_limits());
    if (needs.empty()) file = VerdictFile::of_current_device();
  });
  facts = {error, needs.c_str(), file.path.c_str(), file.beginning.c_str(), file.says_passed() ? 1 : 0};
  return &facts;
}

}  // namespace pagedtree::cuda
