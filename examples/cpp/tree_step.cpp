// Calls pagedtree from an engine without Torch: raw pointers, the engine's own threads.
#include <pagedtree/core/backend.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <thread>
#include <vector>

namespace {

constexpr int kNumThreads = 2;

// Stands for the engine's thread pool: one thread a piece.
void run_in_parallel(int64_t begin, int64_t end, int64_t grain_size, pagedtree::ExecContext::Body body, void* state) {
  const int64_t piece = std::max(grain_size, pagedtree::ceil_div<int64_t>(end - begin, kNumThreads));
  std::vector<std::thread> threads;
  for (int64_t first = begin; first < end; first += piece) {
    threads.emplace_back(body, first, std::min(first + piece, end), state);
  }
  for (std::thread& thread : threads) thread.join();
}

struct Trees {
  std::vector<int32_t> parents, cu_nodes, depths, first_child, next_sibling, mask;
  std::unique_ptr<bool[]> valid;
};

Trees link_trees(const pagedtree::Backend& backend, const pagedtree::ExecContext& ctx, std::vector<int32_t> parents,
                 std::vector<int32_t> cu_nodes, int32_t max_nodes, int32_t max_depth) {
  const size_t rows = parents.size(), batch = cu_nodes.size() - 1;
  const int32_t words = pagedtree::ceil_div(max_nodes, pagedtree::kMaskWordBits);
  Trees trees{std::move(parents),
              std::move(cu_nodes),
              std::vector<int32_t>(rows),
              std::vector<int32_t>(rows),
              std::vector<int32_t>(rows),
              std::vector<int32_t>(rows * words),
              std::make_unique<bool[]>(batch)};
  pagedtree::BuildTreesParams params{};
  params.parents = trees.parents.data();
  params.cu_nodes = trees.cu_nodes.data();
  params.depths = trees.depths.data();
  params.first_child = trees.first_child.data();
  params.next_sibling = trees.next_sibling.data();
  params.mask = trees.mask.data();
  params.valid = trees.valid.get();
  params.batch = static_cast<int64_t>(batch);
  params.num_rows = static_cast<int64_t>(rows);
  params.max_nodes = max_nodes;
  params.max_depth = max_depth;
  params.mask_words = words;
  backend.build_trees(params, ctx);
  return trees;
}

}  // namespace

int main() {
  const pagedtree::Backend& backend = pagedtree::cpu::backend();
  pagedtree::ExecContext ctx;
  ctx.num_threads = kNumThreads;
  ctx.parallel_for = run_in_parallel;

  // Two sequences: a root with two children, the first of which has one more; and a chain.
  const Trees trees = link_trees(backend, ctx, {-1, 0, 0, 1, -1, 0, 1}, {0, 4, 7}, 4, 3);
  std::printf("backend %s\n", backend.name);
  for (size_t b = 0; b + 1 < trees.cu_nodes.size(); ++b) {
    std::printf("tree %zu, valid %d\n", b, trees.valid[b]);
    const int32_t size = trees.cu_nodes[b + 1] - trees.cu_nodes[b];
    for (int32_t i = 0; i < size; ++i) {
      const int32_t row = trees.cu_nodes[b] + i;
      std::printf("  node %d parent %2d depth %d sees ", i, trees.parents[row], trees.depths[row]);
      for (int32_t j = 0; j < size; ++j) std::printf("%d", trees.mask[row] >> j & 1);
      std::printf("\n");
    }
  }
  return 0;
}
