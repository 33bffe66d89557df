#include "cpu/isa.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

#if defined(PAGEDTREE_X86)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace pagedtree::cpu {
namespace {

#if defined(PAGEDTREE_X86)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16");
}

bool has_amx() {
  if (!has_avx512()) return false;
  unsigned eax = 7, ebx = 0, ecx = 0, edx = 0;
  __asm__("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
  const bool tile = edx & (1u << 24), bf16 = edx & (1u << 22);
  if (!tile || !bf16) return false;
  // The kernel grants tile registers (XTILEDATA, feature 18) on request only.
  constexpr long kArchReqXcompPerm = 0x1023, kXfeatureXtiledata = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureXtiledata) == 0;
}
#endif

struct Available {
  const IsaKernels* tables[6] = {};
  int count = 0;
  std::string names;

  Available() {
    add(portable::kernels());
#if defined(PAGEDTREE_HAS_AVX512_EMULATED)
    add(avx512_emulated::kernels());
#endif
#if defined(PAGEDTREE_HAS_AMX_EMULATED)
    add(amx_emulated::kernels());
#endif
#if defined(PAGEDTREE_X86)
    if (has_avx2()) add(avx2::kernels());
    if (has_avx512()) add(avx512::kernels());
    if (has_amx()) add(amx::kernels());
#endif
  }

  void add(const IsaKernels& table) {
    tables[count++] = &table;
    names += (names.empty() ? "" : ",") + std::string(table.name);
  }
};

const Available& available() {
  static const Available found;
  return found;
}

}  // namespace

const IsaKernels& isa_kernels() {
  const Available& found = available();
  const char* forced = std::getenv("PAGEDTREE_CPU_ISA");
  if (forced == nullptr || *forced == '\0') return *found.tables[found.count - 1];
  for (int i = 0; i < found.count; ++i) {
    if (std::string(forced) == found.tables[i]->name) return *found.tables[i];
  }
  throw std::runtime_error("PAGEDTREE_CPU_ISA: expected one of " + found.names + " on this machine, got " + forced);
}

const char* available_isas() { return available().names.c_str(); }

}  // namespace pagedtree::cpu
