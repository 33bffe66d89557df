// What libcu++'s make_tma_descriptor says of caches: whether TMA can read them, and by which map. make_vectors.py
// compiles it twice: as a program, and with STANDS_FOR_DRIVER as the driver's library, which it opens and which has no
// GPU.
#include <cuda.h>

#include <cstdint>
#include <cstdio>
#include <cstring>

#if defined(STANDS_FOR_DRIVER)

extern "C" {

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
// One whose maps libcu++ does not mend.
CUresult cuDriverGetVersion(int* version) {
  *version = 13020;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int* count) {
  *count = 1;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}
// Of a Hopper GPU.
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      *value = 9;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      *value = 0;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
      *value = 227 << 10;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}
// Writes down what it is given instead of a map.
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void*,
                                const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  if (type != CU_TENSOR_MAP_DATA_TYPE_UINT16 || rank != 4 || swizzle != CU_TENSOR_MAP_SWIZZLE_128B) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  uint64_t words[11];
  std::memcpy(words, sizes, 4 * sizeof(uint64_t));
  std::memcpy(words + 4, strides, 3 * sizeof(uint64_t));
  for (int i = 0; i < 4; ++i) words[7 + i] = box[i];
  std::memcpy(map, words, sizeof(words));
  return CUDA_SUCCESS;
}

CUresult cuGetProcAddress_v2(const char* name, void** function, int, cuuint64_t,
                             CUdriverProcAddressQueryResult* found) {
  const struct {
    const char* name;
    void* function;
  } known[] = {{"cuInit", (void*)&cuInit},
               {"cuDriverGetVersion", (void*)&cuDriverGetVersion},
               {"cuDeviceGetCount", (void*)&cuDeviceGetCount},
               {"cuDeviceGet", (void*)&cuDeviceGet},
               {"cuDeviceGetAttribute", (void*)&cuDeviceGetAttribute},
               {"cuTensorMapEncodeTiled", (void*)&cuTensorMapEncodeTiled}};
  *found = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  for (const auto& one : known) {
    if (std::strcmp(one.name, name) != 0) continue;
    *function = one.function;
    *found = CU_GET_PROC_ADDRESS_SUCCESS;
  }
  return CUDA_SUCCESS;
}

}  // extern "C"

#else

#include <algorithm>
#include <cuda/tma>
#include <exception>

// Of CUDA's runtime libcu++ wants this alone.
extern "C" const char* cudaGetErrorString(cudaError_t) { return "an error"; }

// A cache of 16-bit numbers: sizes and strides, in numbers, of columns, slots, heads and pages; the slots of a box.
struct Cache {
  int64_t address, sizes[4], strides[4], slots;
};

// The words of the map, in the cache's order of dimensions; none if libcu++ refuses.
static bool map_of(const Cache& cache, uint64_t (&words)[11]) {
  // It wants larger strides first, and 0 where a size is 1 or the stride means nothing.
  int order[4] = {3, 2, 1, 0};
  const auto stride = [&](int i) { return cache.sizes[i] == 1 ? 0 : cache.strides[i]; };
  std::stable_sort(order, order + 3, [&](int a, int b) {
    return stride(a) == 0 || stride(b) == 0 ? stride(a) == 0 && stride(b) != 0 : stride(a) > stride(b);
  });
  int64_t sizes[4], strides[4];
  int box[4];
  for (int i = 0; i < 4; ++i) {
    const int from = order[i];
    sizes[i] = cache.sizes[from];
    strides[i] = from == 0 ? 1 : stride(from);
    box[i] = from == 0 ? 64 : from == 1 ? static_cast<int>(cache.slots) : 1;
  }
  const DLTensor tensor{reinterpret_cast<void*>(cache.address), {kDLCUDA, 0}, 4, {kDLUInt, 16, 1}, sizes, strides, 0};
  try {
    const CUtensorMap map = cuda::make_tma_descriptor(tensor, cuda::std::span<const int>(box, 4),
                                                      cuda::tma_interleave_layout::none, cuda::tma_swizzle::bytes128);
    uint64_t made[11];
    std::memcpy(made, &map, sizeof(made));
    for (int i = 0; i < 4; ++i) {
      words[order[i]] = made[3 - i];
      words[7 + order[i]] = made[10 - i];
      if (i < 3) words[3 + order[i]] = made[6 - i];
    }
    return true;
  } catch (const std::exception& refusal) {
    std::fprintf(stderr, "%s\n", refusal.what());
    return false;
  }
}

// Reads caches, and writes for each whether there is a map, and its words.
int main() {
  Cache cache;
  while (std::fread(&cache, sizeof(cache), 1, stdin) == 1) {
    uint64_t words[12] = {};
    uint64_t map[11] = {};
    words[0] = map_of(cache, map) ? 1 : 0;
    std::memcpy(words + 1, map, sizeof(map));
    std::fwrite(words, sizeof(words), 1, stdout);
  }
}

#endif
