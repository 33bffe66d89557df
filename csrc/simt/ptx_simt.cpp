#include "simt/ptx_simt.h"

#include <algorithm>

namespace pagedtree::ptx::detail {

void exchange_matrices(MatrixRow** lanes, bool transposed) {
  simt::statistics().ldmatrix += 4;
  for (int i = 0; i < 4; ++i) {
    int rows_in_column[8] = {};  // 16-byte columns of the 128 bytes per wavefront
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

namespace {

// Adds the products [16, 8] to lane l's sums d.
void add_products(int l, float* d, const double (&products)[16][8]) {
  for (int i = 0; i < 4; ++i) {
    const double exact = products[l / 4 + i / 2 * 8][l % 4 * 2 + i % 2] + double{d[i]};
    d[i] = static_cast<float>(exact);
    if (simt::options().mma_truncates && std::fabs(double{d[i]}) > std::fabs(exact)) d[i] = std::nextafter(d[i], 0.0f);
  }
}

template <int kDepth>
void multiply(const double (&a)[16][kDepth], const double (&b)[kDepth][8], double (&products)[16][8]) {
  ++simt::statistics().mma;
  for (int i = 0; i < 16; ++i) {
    for (int k = 0; k < kDepth; ++k) {
      for (int j = 0; j < 8; ++j) products[i][j] += a[i][k] * b[k][j];
    }
  }
}

}  // namespace

void multiply_fragments(MmaLane** lanes, float (*to_float)(uint16_t)) {
  double a[16][16], b[16][8], products[16][8] = {};
  for (int l = 0; l < 32; ++l) {
    const int row = l / 4, column = l % 4 * 2;
    const auto half = [&](uint32_t word, int h) { return double{to_float(static_cast<uint16_t>(word >> 16 * h))}; };
    for (int h = 0; h < 2; ++h) {
      for (int i = 0; i < 4; ++i) a[row + i % 2 * 8][column + i / 2 * 8 + h] = half(lanes[l]->a[i], h);
      for (int i = 0; i < 2; ++i) b[column + i * 8 + h][row] = half(lanes[l]->b[i], h);
    }
  }
  multiply(a, b, products);
  for (int l = 0; l < 32; ++l) add_products(l, lanes[l]->d, products);
}

void multiply_word_fragments(WordMmaLane** lanes) {
  const auto tf32 = [](float x) {
    return double{__builtin_bit_cast(float, __builtin_bit_cast(uint32_t, x) & 0xffffe000u)};
  };
  double a[16][8], b[8][8], products[16][8] = {};
  for (int l = 0; l < 32; ++l) {
    for (int i = 0; i < 4; ++i) a[l / 4 + i % 2 * 8][l % 4 + i / 2 * 4] = tf32(lanes[l]->a[i]);
    for (int i = 0; i < 2; ++i) b[l % 4 + i * 4][l / 4] = tf32(lanes[l]->b[i]);
  }
  multiply(a, b, products);
  for (int l = 0; l < 32; ++l) add_products(l, lanes[l]->d, products);
}

}  // namespace pagedtree::ptx::detail
