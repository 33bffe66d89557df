// Drafts from earlier text: a trie of the continuations of earlier matches of the last n tokens.
// for n = max_ngram .. min_ngram, for each place after a match of n tokens, latest first: insert(continuation)
#pragma once

#include "core/params.h"

namespace pagedtree {

struct NgramProposeParams {
  const int64_t* history;       // [num_histories, history_width]
  const int32_t* history_lens;  // [num_histories]
  const int32_t* history_rows;  // [B] or null: sequence b has history b
  const int64_t* extra;         // [B, extra_width] or null
  const uint8_t* active;        // [B] or null
  int64_t* draft_tokens;        // [B * max_nodes] out
  int32_t* parents;             // [B * max_nodes] out
  int32_t* cu_nodes;            // [B + 1] out
  int64_t* trie_tokens;         // [B, max_nodes] scratch
  int32_t* trie_links;          // [B, 4, max_nodes] scratch
  int32_t* trie_sizes;          // [B] scratch
  int32_t* places;              // [B, history_width + extra_width] scratch
  uint8_t* match_lengths;       // the same, for backends that search with many threads
  int64_t batch;
  int64_t num_histories, history_width, history_stride;
  int64_t extra_width, extra_stride;
  int32_t max_nodes;
  int32_t max_depth;
  int32_t min_ngram, max_ngram;
  int32_t max_branches;
};

// Position in a text: tokens [0, end) precede it.
struct TextPlace {
  const int64_t* text;
  int64_t size;
  int64_t end;
};

struct TrieSize {
  int32_t num_nodes = 0;
  int32_t num_leaves = 0;
  int32_t num_open = 0;  // leaves above max_depth, which may be extended
};

struct TriePath {
  int32_t node = 0;
  int32_t depth = 0;
};

// Nodes are numbered by insertion: parents precede children, better continuations precede worse ones.
struct DraftTrie {
  int64_t* tokens;   // [max_nodes]
  int32_t* parents;  // [max_nodes]
  int32_t* first_child;
  int32_t* last_child;
  int32_t* next_sibling;
  int32_t max_nodes;
  int32_t max_depth;
  int32_t max_branches;
  TrieSize size = {};

  PT_HOST_DEVICE void plant(int64_t token) {
    size = {.num_nodes = 1};
    tokens[0] = token;
    parents[0] = first_child[0] = last_child[0] = next_sibling[0] = -1;
  }

  PT_HOST_DEVICE bool can_grow() const {
    return size.num_nodes < max_nodes && max_depth > 0 && (size.num_leaves < max_branches || size.num_open > 0);
  }

  PT_HOST_DEVICE int32_t find_child(int32_t node, int64_t token) const {
    int32_t child = first_child[node];
    while (child >= 0 && tokens[child] != token) child = next_sibling[child];
    return child;
  }

  // Returns false for a node's first child, which extends a branch, except at the root.
  PT_HOST_DEVICE bool opens_branch(int32_t node) const { return node == 0 || first_child[node] >= 0; }

  // Stays false once false: nothing is removed.
  PT_HOST_DEVICE bool can_add(int32_t node) const {
    return size.num_nodes < max_nodes && (!opens_branch(node) || size.num_leaves < max_branches);
  }

  // Sizes after adding `count` nodes below `parent`, the last at `depth`.
  PT_HOST_DEVICE TrieSize size_with_path(int32_t parent, int32_t count, int32_t depth) const {
    const bool branch = opens_branch(parent);
    return {size.num_nodes + count, size.num_leaves + branch, size.num_open + (depth < max_depth) - !branch};
  }

  PT_HOST_DEVICE void link(int32_t parent, int32_t node) {
    const int32_t older = last_child[parent];
    (older < 0 ? first_child[parent] : next_sibling[older]) = node;
    last_child[parent] = node;
  }

  PT_HOST_DEVICE int32_t add(int32_t parent, int64_t token, int32_t depth) {
    const int32_t node = size.num_nodes;
    size = size_with_path(parent, 1, depth);
    tokens[node] = token;
    parents[node] = parent;
    first_child[node] = last_child[node] = next_sibling[node] = -1;
    link(parent, node);
    return node;
  }

  PT_HOST_DEVICE int32_t path_length(const TextPlace& place) const {
    return static_cast<int32_t>(min_of<int64_t>(place.size - place.end, max_depth));
  }

  PT_HOST_DEVICE void walk(const TextPlace& place, TriePath& path) const {
    for (const int32_t length = path_length(place); path.depth < length; ++path.depth) {
      const int32_t child = find_child(path.node, place.text[place.end + path.depth]);
      if (child < 0) break;
      path.node = child;
    }
  }

  PT_HOST_DEVICE int64_t token_after(const TextPlace& place, const TriePath& path) const {
    return path.depth < path_length(place) ? place.text[place.end + path.depth] : -1;
  }

  // Inserts at most max_depth tokens, up to the first negative one.
  PT_HOST_DEVICE void insert(const TextPlace& place) {
    TriePath path;
    walk(place, path);
    for (int64_t token; can_add(path.node) && (token = token_after(place, path)) >= 0; ++path.depth) {
      path.node = add(path.node, token, path.depth + 1);
    }
  }
};

// The history, then the extra text. One numbering covers all places, most recent first.
struct NgramTexts {
  const int64_t* history;
  int64_t history_len;
  const int64_t* extra;
  int64_t extra_len;

  PT_HOST_DEVICE int32_t most_tokens(int32_t max_ngram) const {
    return static_cast<int32_t>(min_of<int64_t>(history_len, max_ngram));
  }

  // Counts places with a token before and after them.
  PT_HOST_DEVICE int64_t num_history_places() const { return max_of<int64_t>(history_len - 1, 0); }
  PT_HOST_DEVICE int64_t num_places() const { return num_history_places() + max_of<int64_t>(extra_len - 1, 0); }

  PT_HOST_DEVICE TextPlace at(int64_t place) const {
    const int64_t in_extra = place - num_history_places();
    if (in_extra < 0) return {history, history_len, history_len - 1 - place};
    return {extra, extra_len, extra_len - 1 - in_extra};
  }
};

PT_HOST_DEVICE NgramTexts ngram_texts(const NgramProposeParams& p, int64_t b) {
  NgramTexts texts{};
  const int64_t row = row_in_pool(p.history_rows, p.num_histories, b);
  if (row >= 0) {
    texts.history = p.history + row * p.history_stride;
    texts.history_len = clamp_to<int64_t>(p.history_lens[row], 0, p.history_width);
  }
  if (p.extra != nullptr) {
    texts.extra = p.extra + b * p.extra_stride;
    texts.extra_len = p.extra_width;
  }
  return texts;
}

PT_HOST_DEVICE int64_t first_place(const NgramProposeParams& p, int64_t b) {
  return b * (p.history_width + p.extra_width);
}

// Uses tokens [p.max_nodes] and links [4, capacity].
PT_HOST_DEVICE DraftTrie draft_trie(const NgramProposeParams& p, int64_t* tokens, int32_t* links, int32_t capacity) {
  return {.tokens = tokens,
          .parents = links,
          .first_child = links + capacity,
          .last_child = links + 2 * capacity,
          .next_sibling = links + 3 * capacity,
          .max_nodes = p.max_nodes,
          .max_depth = p.max_depth,
          .max_branches = p.max_branches};
}

struct NgramPattern {
  int64_t tokens[kMaxNgram];    // right-aligned
  int32_t overlaps[kMaxNgram];  // [i]: common suffix of the pattern and the pattern without its last i tokens
  int32_t size;

  PT_HOST_DEVICE int64_t from_end(int64_t i) const { return tokens[kMaxNgram - 1 - i]; }

  PT_HOST_DEVICE void copy_token(const NgramTexts& texts, int64_t i) {
    tokens[kMaxNgram - 1 - i] = texts.history[texts.history_len - 1 - i];
  }

  // Requires `count` copied tokens. The pattern ends before a negative one.
  PT_HOST_DEVICE void complete(int32_t count);
};

// Returns match lengths before places, from the text's end down: the Z algorithm on the reversed text. m places cost at
// most m failing and m + pattern.size matching comparisons.
struct PatternMatcher {
  const NgramPattern& pattern;
  const int64_t* text;
  // The match that reaches furthest back.
  int64_t match_begin, match_end;

  PT_HOST_DEVICE PatternMatcher(const NgramPattern& pattern_, const int64_t* text_, int64_t size)
      : pattern(pattern_), text(text_), match_begin(size), match_end(size) {}

  PT_HOST_DEVICE int32_t match_length(int64_t end) {
    const int64_t known = max_of<int64_t>(end - match_begin, 0);
    int64_t n = 0;
    if (known > 0) {
      n = min_of<int64_t>(pattern.overlaps[match_end - end], known);
      if (n < known) return static_cast<int32_t>(n);
    }
    while (n < pattern.size && n < end && text[end - 1 - n] == pattern.from_end(n)) ++n;
    match_begin = end - n;
    match_end = end;
    return static_cast<int32_t>(n);
  }
};

PT_HOST_DEVICE void NgramPattern::complete(int32_t count) {
  size = 0;
  while (size < count && from_end(size) >= 0) ++size;
  PatternMatcher matcher(*this, tokens + kMaxNgram - size, size);
  for (int32_t i = 1; i < size; ++i) overlaps[i] = matcher.match_length(size - i);
}

// Returns the last place in (begin, end] after `token`, else `begin`.
PT_HOST_DEVICE int64_t last_place_after(const int64_t* text, int64_t begin, int64_t end, int64_t token) {
  constexpr int64_t kTogether = 8;  // independent loads in flight
  for (; end - begin >= kTogether; end -= kTogether) {
    bool found = false;
    for (int64_t i = 1; i <= kTogether; ++i) found |= text[end - i] == token;
    if (found) break;
  }
  while (end > begin && text[end - 1] != token) --end;
  return end;
}

// Matches of one text, numbered from `first_place`; false if visit stopped.
template <typename Visit>
PT_HOST_DEVICE bool match_places_of(const NgramPattern& pattern, int32_t min_ngram, const int64_t* text, int64_t size,
                                    int64_t first_place, Visit visit) {
  PatternMatcher matcher(pattern, text, size);
  for (int64_t at = size - 1; at > 0; --at) {
    if (at <= matcher.match_begin) {
      at = last_place_after(text, 0, at, pattern.from_end(0));
      if (at == 0) break;
    }
    const int32_t n = matcher.match_length(at);
    if (n >= min_ngram && !visit(first_place + size - 1 - at, n)) return false;
  }
  return true;
}

// Calls visit(place, n) for each place with exactly n >= min_ngram matching tokens before it (n or more if n ==
// pattern.size), until it returns false.
template <typename Visit>
PT_HOST_DEVICE void match_places(const NgramTexts& texts, const NgramPattern& pattern, int32_t min_ngram, Visit visit) {
  if (pattern.size < min_ngram) return;
  const int64_t border = texts.num_history_places();
  if (!match_places_of(pattern, min_ngram, texts.history, texts.history_len, 0, visit)) return;
  match_places_of(pattern, min_ngram, texts.extra, texts.extra_len, border, visit);
}

// Lists in order of insertion.
struct PlaceLists {
  int32_t* next;            // [number of places] circular
  int32_t last[kMaxNgram];  // -1 if empty

  PT_HOST_DEVICE void clear(int32_t count) {
    for (int32_t list = 0; list < count; ++list) last[list] = -1;
  }
  PT_HOST_DEVICE int32_t first(int32_t list) const { return last[list] < 0 ? -1 : next[last[list]]; }
  PT_HOST_DEVICE int32_t after(int32_t list, int32_t place) const { return place == last[list] ? -1 : next[place]; }
  PT_HOST_DEVICE void append(int32_t list, int32_t place) {
    const int32_t before = last[list];
    next[place] = before < 0 ? place : next[before];
    if (before >= 0) next[before] = place;
    last[list] = place;
  }
};

// True if a continuation equals the previous one and so adds nothing. In periodic text one period is compared per
// place.
struct RepeatCheck {
  int64_t max_depth;
  TextPlace before = {};
  int64_t apart = 0;  // between the last two places
  bool same = false;  // their continuations were equal

  PT_HOST_DEVICE bool repeats(const TextPlace& place) {
    const int64_t distance = before.end - place.end;
    const bool in_text = place.text == before.text && place.size == before.size;
    const bool periodic = same && in_text && distance == apart;
    const int64_t compared = periodic ? min_of(distance, max_depth) : max_depth;
    same = in_text && distance > 0 && before.end + max_depth <= place.size;
    for (int64_t i = 0; same && i < compared; ++i) same = place.text[place.end + i] == place.text[before.end + i];
    before = place;
    apart = distance;
    return same;
  }
};

// Builds sequence b's trie in scratch on one thread. Returns its size.
PT_HOST_DEVICE int32_t propose_ngrams(const NgramProposeParams& p, int64_t b) {
  const NgramTexts texts = ngram_texts(p, b);
  if (texts.history_len == 0 || (p.active != nullptr && !p.active[b])) return 0;
  NgramPattern pattern;
  const int32_t count = texts.most_tokens(p.max_ngram);
  for (int32_t i = 0; i < count; ++i) pattern.copy_token(texts, i);
  pattern.complete(count);
  DraftTrie trie = draft_trie(p, p.trie_tokens + b * p.max_nodes, p.trie_links + b * 4 * p.max_nodes, p.max_nodes);
  trie.plant(pattern.from_end(0));
  PlaceLists lists;
  lists.next = p.places + first_place(p, b);
  lists.clear(p.max_ngram - p.min_ngram);
  RepeatCheck check{.max_depth = p.max_depth};
  const auto insert = [&](int64_t place) {
    const TextPlace at = texts.at(place);
    if (!check.repeats(at)) trie.insert(at);
    return trie.can_grow();
  };
  if (!trie.can_grow()) return trie.size.num_nodes;
  // The longest n-grams may fill the trie first.
  match_places(texts, pattern, p.min_ngram, [&](int64_t place, int32_t n) {
    if (n == p.max_ngram) return insert(place);
    lists.append(n - p.min_ngram, static_cast<int32_t>(place));
    return true;
  });
  for (int32_t list = p.max_ngram - p.min_ngram - 1; list >= 0; --list) {
    int32_t place = trie.can_grow() ? lists.first(list) : -1;
    while (place >= 0) place = insert(place) ? lists.after(list, place) : -1;
  }
  return trie.size.num_nodes;
}

}  // namespace pagedtree
