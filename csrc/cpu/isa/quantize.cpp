// dst = e4m3(src / scale). Compiled once per instruction set: plain loops vectorise.
#include "core/numeric.h"

namespace pagedtree::cpu::PAGEDTREE_ISA {

void quantize_e4m3(const void* src, DType dtype, int64_t count, float scale, uint8_t* dst) {
  const auto* words = static_cast<const uint16_t*>(src);
  switch (dtype) {
    case DType::kFloat32: {
      const auto* values = static_cast<const float*>(src);
      for (int64_t i = 0; i < count; ++i) dst[i] = e4m3_from_float(values[i] / scale);
      break;
    }
    case DType::kFloat16:
      for (int64_t i = 0; i < count; ++i) dst[i] = e4m3_from_float(float_from_half(words[i]) / scale);
      break;
    case DType::kBFloat16:
      for (int64_t i = 0; i < count; ++i) dst[i] = e4m3_from_float(float_from_bfloat16(words[i]) / scale);
      break;
    case DType::kFloat8E4M3:
      break;  // copied, never converted
  }
}

}  // namespace pagedtree::cpu::PAGEDTREE_ISA
