#include "simt/ptx_simt.h"

#include <algorithm>

namespace pagedtree::ptx::detail {

void exchange_matrices(MatrixRow** lanes, bool transposed) {
  simt::statistics().ldmatrix += 4;
  for (int i = 0; i < 4; ++i) {
    int rows_in_column[8] = {};  // 16-byte columns of the 128 bytes that the banks deliver at once
    int wavefronts = 0;
    for (int r = 0; r < 8; ++r) {
      wavefronts = std::max(wavefronts, ++rows_in_column[lanes[8 * i + r]->address / 16 % 8]);
    }
    simt::statistics().ldmatrix_wavefronts += static_cast<uint64_t>(wavefronts);
    for (int l = 0; l < 32; ++l) {
      const int row = l / 4, column = l % 4 * 2;
      const auto element = [&](int c) -> uint32_t {
        return transposed ? lanes[8 * i + c]->elements[row] : lanes[8 * i + row]->elements[c];
      };
      lanes[l]->out[i] = element(column + 1) << 16 | element(column);
    }
  }
}

void multiply_fragments(MmaLane** lanes, float (*to_float)(uint16_t)) {
  ++simt::statistics().mma;
  double a[16][16], b[16][8], sum[16][8] = {};
  for (int l = 0; l < 32; ++l) {
    const int row = l / 4, column = l % 4 * 2;
    const auto half = [&](uint32_t word, int h) { return double{to_float(static_cast<uint16_t>(word >> 16 * h))}; };
    for (int h = 0; h < 2; ++h) {
      for (int i = 0; i < 4; ++i) a[row + i % 2 * 8][column + i / 2 * 8 + h] = half(lanes[l]->a[i], h);
      for (int i = 0; i < 2; ++i) b[column + i * 8 + h][row] = half(lanes[l]->b[i], h);
    }
  }
  for (int i = 0; i < 16; ++i) {
    for (int k = 0; k < 16; ++k) {
      for (int j = 0; j < 8; ++j) sum[i][j] += a[i][k] * b[k][j];
    }
  }
  for (int l = 0; l < 32; ++l) {
    for (int i = 0; i < 4; ++i) {
      float& d = lanes[l]->d[i];
      const double exact = sum[l / 4 + i / 2 * 8][l % 4 * 2 + i % 2] + double{d};
      d = static_cast<float>(exact);
      if (simt::options().mma_truncates && std::fabs(double{d}) > std::fabs(exact)) d = std::nextafter(d, 0.0f);
    }
  }
}

}  // namespace pagedtree::ptx::detail
