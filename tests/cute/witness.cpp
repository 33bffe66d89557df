// Operands and results of instructions by NVIDIA's CuTe, an independent reading of the PTX manual that compiles for the
// host too. make_vectors.py runs it. Operands are small integers for exact sums; shared memory between them is NaN.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

static uintptr_t g_base;  // the host's shared memory
#define CUTE_CVTA_GENERIC_TO_SHARED_ACTIVATED 1
static inline size_t __cvta_generic_to_shared(const void* p) { return (uintptr_t)p - g_base; }

#include <cute/tensor.hpp>

using namespace cute;  // later headers need it

#include <cute/atom/copy_atom.hpp>
#include <cute/atom/mma_atom.hpp>

static std::string dir;
static uint32_t seed = 1;
static uint32_t rnd() {
  seed = seed * 1664525u + 1013904223u;
  return seed >> 8;
}
static int small_integer() { return int(rnd() >> 12 & 3) - 1; }
static void save(const std::string& name, const std::vector<uint32_t>& w) {
  FILE* f = fopen((dir + "/" + name + ".u32").c_str(), "wb");
  fwrite(w.data(), 4, w.size(), f);
  fclose(f);
}
template <class T>
static uint16_t bits16(float x) {
  T t(x);
  uint16_t b;
  memcpy(&b, &t, 2);
  return b;
}
static uint32_t bits32(float x) {
  uint32_t b;
  memcpy(&b, &x, 4);
  return b;
}

// ---- mma.sync: [64 threads, 12 words] = a4 b2 - - d4
template <class Op, class T>
static void mma_sync(const char* name, int a_vals, int b_vals) {
  using Tr = MMA_Traits<Op>;
  auto shape = typename Tr::Shape_MNK{};
  const int M = get<0>(shape), N = get<1>(shape), K = get<2>(shape);
  typename Tr::ALayout la;
  typename Tr::BLayout lb;
  typename Tr::CLayout lc;
  if (size<1>(la) != a_vals || size<1>(lb) != b_vals) abort();
  std::vector<uint32_t> in(64 * 12), out(64 * 4);
  for (int warp = 0; warp < 2; ++warp) {
    std::vector<float> A(M * K), B(N * K), C(M * N), D(M * N);
    for (auto& x : A) x = small_integer();
    for (auto& x : B) x = small_integer();
    for (auto& x : C) x = small_integer() * 1000;
    for (int m = 0; m < M; ++m)
      for (int n = 0; n < N; ++n) {
        float s = C[m + n * M];
        for (int k = 0; k < K; ++k) s += A[m + k * M] * B[n + k * N];
        D[m + n * M] = s;
      }
    for (int t = 0; t < 32; ++t) {
      uint32_t* w = &in[(warp * 32 + t) * 12];
      if (sizeof(T) == 2) {
        for (int v = 0; v < a_vals; ++v) w[v / 2] |= uint32_t(bits16<T>(A[la(t, v)])) << 16 * (v % 2);
        for (int v = 0; v < b_vals; ++v) w[4 + v / 2] |= uint32_t(bits16<T>(B[lb(t, v)])) << 16 * (v % 2);
      } else {
        for (int v = 0; v < a_vals; ++v) w[v] = bits32(A[la(t, v)]);
        for (int v = 0; v < b_vals; ++v) w[4 + v] = bits32(B[lb(t, v)]);
      }
      for (int v = 0; v < 4; ++v) w[8 + v] = bits32(C[lc(t, v)]), out[(warp * 32 + t) * 4 + v] = bits32(D[lc(t, v)]);
    }
  }
  save(std::string(name) + ".in", in);
  save(std::string(name) + ".out", out);
}

// ---- ldmatrix: words 0..3 of thread t's input are its row
template <class Op>
static void ldmatrix(const char* name) {
  using Tr = Copy_Traits<Op>;
  typename Tr::SrcLayout src;
  typename Tr::DstLayout dst;
  std::vector<uint32_t> in(64 * 12), out(64 * 4);
  for (auto& w : in) w = rnd() ^ rnd() << 12;
  std::vector<int> where(size(src));  // bit index -> thread * 128 + bit
  for (int t = 0; t < 32; ++t)
    for (int b = 0; b < 128; ++b) where[src(t, b)] = t * 128 + b;
  if (size<1>(dst) != 128) abort();
  for (int warp = 0; warp < 2; ++warp)
    for (int t = 0; t < 32; ++t)
      for (int b = 0; b < 128; ++b) {
        const int from = where[dst(t, b)];
        const uint32_t bit = in[(warp * 32 + from / 128) * 12 + from % 128 / 32] >> (from % 32) & 1;
        out[(warp * 32 + t) * 4 + b / 32] |= bit << (b % 32);
      }
  save(std::string(name) + ".in", in);
  save(std::string(name) + ".out", out);
}

// ---- wgmma. Four steps of 16 k: A [64, 64], B [N, 64] in shared memory of 80 KB.
constexpr int kImage = 80 * 1024;
struct alignas(1024) Image {
  unsigned char bytes[kImage];
};
static Image* image;

template <class T, int N, bool kRs, bool kNMajor>
static void wgmma(const char* name) {
  using namespace SM90::GMMA;
  constexpr auto kB = kNMajor ? Major::MN : Major::K;
  using SS = decltype(ss_op_selector<T, T, float, Shape<_64, Int<N>, _64>, Major::K, kB>());
  using RS = decltype(rs_op_selector<T, T, float, Shape<_64, Int<N>, _64>, Major::K, kB>());
  using Op = std::conditional_t<kRs, RS, SS>;
  using AAtom = Layout_K_SW128_Atom<T>;
  using BAtom = std::conditional_t<kNMajor, Layout_MN_SW128_Atom<T>, Layout_K_SW128_Atom<T>>;
  // As in kernels. K-major: blocks of 64 k; N-major: keys, then the next 64 columns.
  auto layoutA = tile_to_shape(AAtom{}, Shape<_64, _64>{});
  auto layoutB = [&] {
    if constexpr (kNMajor)
      return tile_to_shape(BAtom{}, Shape<Int<N>, _64>{}, Step<_2, _1>{});
    else
      return tile_to_shape(BAtom{}, Shape<Int<N>, _64>{});
  }();
  g_base = (uintptr_t)image->bytes;
  uint16_t* raw = (uint16_t*)image->bytes;
  for (int i = 0; i < kImage / 2; ++i) raw[i] = 0x7fff;  // NaN
  T* pa = (T*)image->bytes;
  T* pb = (T*)(image->bytes + 16 * 1024);
  Tensor sA = make_tensor(make_smem_ptr(pa), layoutA);
  Tensor sB = make_tensor(make_smem_ptr(pb), layoutB);
  std::vector<float> A(64 * 64), B(N * 64), D(64 * N);
  for (int m = 0; m < 64; ++m)
    for (int k = 0; k < 64; ++k) {
      A[m + k * 64] = small_integer();
      if (!kRs) sA(m, k) = T(A[m + k * 64]);
    }
  for (int n = 0; n < N; ++n)
    for (int k = 0; k < 64; ++k) {
      B[n + k * N] = small_integer();
      sB(n, k) = T(B[n + k * N]);
    }
  for (int m = 0; m < 64; ++m)
    for (int n = 0; n < N; ++n) {
      float s = 0;
      for (int k = 0; k < 64; ++k) s += A[m + k * 64] * B[n + k * N];
      D[m + n * 64] = s;
    }
  using Tr = MMA_Traits<Op>;
  typename Tr::CLayout lc;
  typename Tr::ALayout la;
  auto mma = make_tiled_mma(Op{});
  auto thr = mma.get_thread_slice(0);
  Tensor tB = thr.partition_B(sB);
  Tensor dB = thr.make_fragment_B(tB);  // descriptors
  Tensor dA = [&] {
    if constexpr (kRs)
      return dB;
    else
      return thr.make_fragment_A(thr.partition_A(sA));
  }();
  std::vector<uint32_t> numbers(128), own(128 * 16), out(128 * 128), words;
  const auto b0 = uint64_t((*dB(_, 0, 0).data()).desc_), a0 = kRs ? b0 : uint64_t((*dA(_, 0, 0).data()).desc_);
  numbers[1] = (a0 >> 16 & 0x3fff) * 16;
  numbers[2] = (a0 >> 32 & 0x3fff) * 16;
  numbers[3] = (b0 >> 16 & 0x3fff) * 16;
  numbers[4] = (b0 >> 32 & 0x3fff) * 16;
  for (int k = 0; k < 4; ++k) {
    const auto b = uint64_t((*dB(_, 0, k).data()).desc_), a = kRs ? 0 : uint64_t((*dA(_, 0, k).data()).desc_);
    // Steps differ only in their start.
    if (((b ^ b0) & ~0x3fffull) || (!kRs && ((a ^ a0) & ~0x3fffull))) abort();
    numbers[5 + 2 * k] = kRs ? 0 : (a & 0x3fff) * 16;
    numbers[6 + 2 * k] = (b & 0x3fff) * 16;
  }
  if constexpr (kRs) {
    for (int t = 0; t < 128; ++t)
      for (int k = 0; k < 4; ++k)
        for (int v = 0; v < 8; ++v) {
          const int mk = la(t, v), m = mk % 64, kk = mk / 64;
          own[(t * 4 + k) * 4 + v / 2] |= uint32_t(bits16<T>(A[m + (k * 16 + kk) * 64])) << 16 * (v % 2);
        }
  }
  for (int t = 0; t < 128; ++t)
    for (int v = 0; v < N / 2; ++v) out[t * 128 + v] = bits32(D[lc(t, v)]);
  words = numbers;
  words.insert(words.end(), own.begin(), own.end());
  words.resize(words.size() + kImage / 4);
  memcpy(&words[128 + 128 * 16], image->bytes, kImage);
  save(std::string(name) + ".in", words);
  save(std::string(name) + ".out", out);
}

// ---- a stage of 64 or 128 keys: steps' descriptors [start, leading, stride] in bytes, then each 16 bytes' address
struct Descriptor {
  uint32_t start, leading, stride;
};
template <class T>
static Descriptor descriptor_of(const T& given) {
  const auto bits = uint64_t(given.desc_);
  const auto bytes = [&](int shift) { return uint32_t(bits >> shift & 0x3fff) * 16; };
  return {bytes(0), bytes(16), bytes(32)};
}
template <class At>
static void save_panels(const std::string& name, const std::vector<Descriptor>& steps, int keys, int columns,
                        const At& at) {
  std::vector<uint32_t> words, chunks;
  for (int key = 0; key < keys; ++key)
    for (int c = 0; c < columns; c += 8) chunks.push_back(at(key, c) * 2);
  for (const Descriptor& s : steps) words.insert(words.end(), {s.start, s.leading, s.stride});
  save(name + ".steps", words);
  save(name + ".chunks", chunks);
}

// K as right operand [keys, columns], Q of 64 rows as left; chunks [keys, columns / 8]. kByPanels: all keys of 64
// columns at a time, else all columns of eight keys.
template <bool kByPanels, int Columns, int Keys = 64>
static void k_panels(const char* name) {
  using namespace SM90::GMMA;
  static auto* memory = (bfloat16_t*)aligned_alloc(1024, Keys * Columns * 2);
  g_base = (uintptr_t)memory;
  Tensor s = make_tensor(make_smem_ptr(memory),
                         tile_to_shape(Layout_K_SW128_Atom<bfloat16_t>{}, Shape<Int<Keys>, Int<Columns>>{},
                                       std::conditional_t<kByPanels, Step<_1, _2>, Step<_2, _1>>{}));
  using Op = decltype(ss_op_selector<bfloat16_t, bfloat16_t, float, Shape<_64, Int<Keys>, _64>, Major::K, Major::K>());
  auto thr = make_tiled_mma(Op{}).get_thread_slice(0);
  Tensor d = thr.make_fragment_B(thr.partition_B(s)), left = thr.make_fragment_A(thr.partition_A(s));
  std::vector<Descriptor> steps;
  for (int k = 0; k < size<2>(d); ++k) {
    steps.push_back(descriptor_of(*d(_, 0, k).data()));
    if (Keys == 64 && uint64_t((*d(_, 0, k).data()).desc_) != uint64_t((*left(_, 0, k).data()).desc_)) abort();
  }
  save_panels(name, steps, Keys, Columns, [&](int key, int c) { return uint32_t(&s(key, c) - memory); });
}

// V as right operand, N columns at a time; chunks as K's.
template <bool kByPanels, int Columns, int N, int Keys = 64>
static void v_panels(const char* name) {
  using namespace SM90::GMMA;
  static auto* memory = (bfloat16_t*)aligned_alloc(1024, Keys * Columns * 2);
  g_base = (uintptr_t)memory;
  Tensor s = make_tensor(make_smem_ptr(memory),
                         tile_to_shape(Layout_MN_SW128_Atom<bfloat16_t>{}, Shape<Int<Columns>, Int<Keys>>{},
                                       std::conditional_t<kByPanels, Step<_2, _1>, Step<_1, _2>>{}));
  using Op = decltype(ss_op_selector<bfloat16_t, bfloat16_t, float, Shape<_64, Int<N>, _64>, Major::K, Major::MN>());
  auto thr = make_tiled_mma(Op{}).get_thread_slice(0);
  Tensor d = thr.make_fragment_B(thr.partition_B(s));
  std::vector<Descriptor> steps;
  for (int n = 0; n < size<1>(d); ++n)
    for (int k = 0; k < size<2>(d); ++k) steps.push_back(descriptor_of(*d(_, n, k).data()));
  save_panels(name, steps, Keys, Columns, [&](int key, int c) { return uint32_t(&s(c, key) - memory); });
}

int main(int, char** argv) {
  dir = argv[1];
  image = (Image*)aligned_alloc(1024, sizeof(Image));
  mma_sync<SM80_16x8x16_F32BF16BF16F32_TN, bfloat16_t>("mma_m16n8k16_bf16", 8, 4);
  mma_sync<SM80_16x8x16_F32F16F16F32_TN, half_t>("mma_m16n8k16_fp16", 8, 4);
  mma_sync<SM80_16x8x8_F32TF32TF32F32_TN, float>("mma_m16n8k8_tf32", 4, 2);
  ldmatrix<SM75_U32x4_LDSM_N>("ldmatrix_x4");
  ldmatrix<SM75_U16x8_LDSM_T>("ldmatrix_x4_trans");
#define ALL(kind, is_rs, is_n_major)                                    \
  wgmma<bfloat16_t, 64, is_rs, is_n_major>("wgmma_" kind "_bf16_64");   \
  wgmma<bfloat16_t, 128, is_rs, is_n_major>("wgmma_" kind "_bf16_128"); \
  wgmma<bfloat16_t, 256, is_rs, is_n_major>("wgmma_" kind "_bf16_256"); \
  wgmma<half_t, 64, is_rs, is_n_major>("wgmma_" kind "_fp16_64");       \
  wgmma<half_t, 128, is_rs, is_n_major>("wgmma_" kind "_fp16_128");     \
  wgmma<half_t, 256, is_rs, is_n_major>("wgmma_" kind "_fp16_256");
  ALL("ss", false, false)
  ALL("rsK", true, false)
  ALL("rsN", true, true)
  k_panels<true, 64>("q_64");
  k_panels<true, 128>("q_128");
  k_panels<true, 256>("q_256");
  k_panels<true, 576>("q_576");
  k_panels<false, 64>("k_64");
  k_panels<false, 128>("k_128");
  k_panels<false, 64, 128>("k_64_128");
  k_panels<false, 128, 128>("k_128_128");
  k_panels<false, 256>("k_256");
  k_panels<true, 576>("k_576");
  v_panels<false, 64, 64>("v_64");
  v_panels<false, 128, 128>("v_128");
  v_panels<false, 64, 64, 128>("v_64_128");
  v_panels<false, 128, 128, 128>("v_128_128");
  v_panels<false, 256, 256>("v_256");
  v_panels<true, 512, 256>("v_512");
}
