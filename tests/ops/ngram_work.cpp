// Counts basic blocks of an n-gram search, by -fsanitize-coverage=trace-pc. Arguments: max_ngram, max_depth; standard
// input: the text, also the extra text.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "core/ngram.h"

using pagedtree::NgramProposeParams;

static volatile long num_blocks = 0;
extern "C" __attribute__((no_sanitize_coverage)) void __sanitizer_cov_trace_pc() { num_blocks = num_blocks + 1; }

int main(int, char** argv) {
  std::vector<int64_t> text;
  for (int64_t token; std::fread(&token, sizeof(token), 1, stdin) == 1;) text.push_back(token);
  constexpr int kNodes = 64;
  std::vector<int64_t> tokens(kNodes);
  std::vector<int32_t> links(4 * kNodes), places(2 * text.size());
  const int32_t length = static_cast<int32_t>(text.size());
  NgramProposeParams p{};
  p.history = p.extra = text.data();
  p.history_lens = &length;
  p.history_width = p.extra_width = length;
  p.trie_tokens = tokens.data();
  p.trie_links = links.data();
  p.places = places.data();
  p.max_nodes = kNodes;
  p.max_depth = std::atoi(argv[2]);
  p.min_ngram = 1;
  p.max_ngram = std::atoi(argv[1]);
  p.max_branches = 8;

  num_blocks = 0;
  propose_ngrams(p, 0);
  std::printf("%ld\n", num_blocks);
}
