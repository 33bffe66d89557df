// Drafts from the text itself: where its last tokens occur earlier, and the trie of what followed them. Written once
// for every backend.
#pragma once

#include "core/params.h"

namespace pagedtree {

struct NgramProposeParams {
  const int64_t* history;       // [num_histories, history_width], row stride history_stride
  const int32_t* history_lens;  // [num_histories]
  const int32_t* history_rows;  // [B] or null: sequence b has history b
  const int64_t* extra;         // [B, extra_width], row stride extra_stride; or null
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

// A place in a text: tokens [0, end) are before it, [end, size) after it.
struct TextPlace {
  const int64_t* text;
  int64_t size;
  int64_t end;
};

// What a trie holds.
struct TrieSize {
  int32_t num_nodes = 0;
  int32_t num_leaves = 0;
  int32_t num_open = 0;  // leaves above the greatest depth: a longer continuation may go on there
};

// A way down a trie: its last node, and how deep that is.
struct TriePath {
  int32_t node = 0;
  int32_t depth = 0;
};

// The trie of one sequence's continuations. Nodes are numbered in the order of insertion: parents precede children, and
// better continuations precede worse ones.
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

  // Starts the trie with its root.
  PT_HOST_DEVICE void plant(int64_t token) {
    size = {.num_nodes = 1};
    tokens[0] = token;
    parents[0] = first_child[0] = last_child[0] = next_sibling[0] = -1;
  }

  // False if no continuation whatever can add a node.
  PT_HOST_DEVICE bool can_grow() const {
    return size.num_nodes < max_nodes && max_depth > 0 && (size.num_leaves < max_branches || size.num_open > 0);
  }

  PT_HOST_DEVICE int32_t find_child(int32_t node, int64_t token) const {
    int32_t child = first_child[node];
    while (child >= 0 && tokens[child] != token) child = next_sibling[child];
    return child;
  }

  // The first child of a node opens no branch, except at the root.
  PT_HOST_DEVICE bool opens_branch(int32_t node) const { return node == 0 || first_child[node] >= 0; }

  // Whether the bounds allow one more child of this node. If they do not, they never will: nothing is removed.
  PT_HOST_DEVICE bool can_add(int32_t node) const {
    return size.num_nodes < max_nodes && (!opens_branch(node) || size.num_leaves < max_branches);
  }

  // The sizes when a path of `count` nodes below `parent` is added, the last one at depth `depth`.
  PT_HOST_DEVICE TrieSize size_with_path(int32_t parent, int32_t count, int32_t depth) const {
    const bool branch = opens_branch(parent);
    return {size.num_nodes + count, size.num_leaves + branch, size.num_open + (depth < max_depth) - !branch};
  }

  // Makes `node`, which has no sibling after it, the last child of `parent`.
  PT_HOST_DEVICE void link(int32_t parent, int32_t node) {
    const int32_t older = last_child[parent];
    (older < 0 ? first_child[parent] : next_sibling[older]) = node;
    last_child[parent] = node;
  }

  // Adds a child at depth `depth` to `parent`.
  PT_HOST_DEVICE int32_t add(int32_t parent, int64_t token, int32_t depth) {
    const int32_t node = size.num_nodes;
    size = size_with_path(parent, 1, depth);
    tokens[node] = token;
    parents[node] = parent;
    first_child[node] = last_child[node] = next_sibling[node] = -1;
    link(parent, node);
    return node;
  }

  // How many tokens after the place count.
  PT_HOST_DEVICE int32_t path_length(const TextPlace& place) const {
    return static_cast<int32_t>(min_of<int64_t>(place.size - place.end, max_depth));
  }

  // Follows the tokens after the place as far as there are nodes.
  PT_HOST_DEVICE void walk(const TextPlace& place, TriePath& path) const {
    for (const int32_t length = path_length(place); path.depth < length; ++path.depth) {
      const int32_t child = find_child(path.node, place.text[place.end + path.depth]);
      if (child < 0) break;
      path.node = child;
    }
  }

  // The token where the walk ended, -1 if no more count.
  PT_HOST_DEVICE int64_t token_after(const TextPlace& place, const TriePath& path) const {
    return path.depth < path_length(place) ? place.text[place.end + path.depth] : -1;
  }

  // Adds the path of the at most max_depth tokens after the place, up to the first negative one.
  PT_HOST_DEVICE void insert(const TextPlace& place) {
    TriePath path;
    walk(place, path);
    for (int64_t token; can_add(path.node) && (token = token_after(place, path)) >= 0; ++path.depth) {
      path.node = add(path.node, token, path.depth + 1);
    }
  }
};

// Where the last tokens of a sequence are looked for: in its history, then in the extra text. Their places have one
// numbering, in the order in which they count: most recent first.
struct NgramTexts {
  const int64_t* history;
  int64_t history_len;
  const int64_t* extra;
  int64_t extra_len;

  // How many last tokens there are, at most `max_ngram`.
  PT_HOST_DEVICE int32_t most_tokens(int32_t max_ngram) const {
    return static_cast<int32_t>(min_of<int64_t>(history_len, max_ngram));
  }

  // A place has a token before it and one after it.
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

// Where the places of sequence b begin in scratch.
PT_HOST_DEVICE int64_t first_place(const NgramProposeParams& p, int64_t b) {
  return b * (p.history_width + p.extra_width);
}

// A trie of sequence b in the arrays tokens [p.max_nodes] and links [4, capacity].
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

// The last tokens of a history, at most kMaxNgram.
struct NgramPattern {
  int64_t tokens[kMaxNgram];    // at the end of the array, the last token last
  int32_t overlaps[kMaxNgram];  // [i]: how many of the last tokens are also the last of those before the i last ones
  int32_t size;

  PT_HOST_DEVICE int64_t from_end(int64_t i) const { return tokens[kMaxNgram - 1 - i]; }

  // The tokens of `texts` that belong here; any thread may copy any of them.
  PT_HOST_DEVICE void copy_token(const NgramTexts& texts, int64_t i) {
    tokens[kMaxNgram - 1 - i] = texts.history[texts.history_len - 1 - i];
  }

  // Completes the pattern when its `count` tokens are there. It ends before a negative one.
  PT_HOST_DEVICE void complete(int32_t count);
};

// How much of the text before each place equals the pattern, for places from the end of the text to its beginning.
// A token that is known to equal the pattern's is not compared again (the Z algorithm, on the reversed text): of the
// comparisons for m places, at most m fail, and at most m + pattern.size succeed.
struct PatternMatcher {
  const NgramPattern& pattern;
  const int64_t* text;
  // The match that reaches furthest back: the tokens before place `match_end`, from `match_begin` on.
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

// The last place in (begin, end] after `token`; `begin` if there is none.
PT_HOST_DEVICE int64_t last_place_after(const int64_t* text, int64_t begin, int64_t end, int64_t token) {
  constexpr int64_t kTogether = 8;  // tokens whose loads are on their way at once
  for (; end - begin >= kTogether; end -= kTogether) {
    bool found = false;
    for (int64_t i = 1; i <= kTogether; ++i) found |= text[end - i] == token;
    if (found) break;
  }
  while (end > begin && text[end - 1] != token) --end;
  return end;
}

// visit(place, n) for the places of one text, whose numbers begin with `first_place`; false if visit stopped.
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

// Calls visit(place, n) for each place before which exactly n tokens equal the pattern's last n (n or more if
// n == pattern.size), n >= min_ngram, until it returns false.
template <typename Visit>
PT_HOST_DEVICE void match_places(const NgramTexts& texts, const NgramPattern& pattern, int32_t min_ngram, Visit visit) {
  if (pattern.size < min_ngram) return;
  const int64_t border = texts.num_history_places();
  if (!match_places_of(pattern, min_ngram, texts.history, texts.history_len, 0, visit)) return;
  match_places_of(pattern, min_ngram, texts.extra, texts.extra_len, border, visit);
}

// Lists of places, each in the order in which places were appended.
struct PlaceLists {
  int32_t* next;  // [number of places]: the place after this one in its list; after the last one, the first one
  int32_t last[kMaxNgram];  // of each list, -1 if it is empty

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

// Tells whether the continuation is that of the place before, which is settled and so can add nothing more. Where a
// text repeats itself, one period is compared for each place, not the whole continuation.
struct RepeatCheck {
  int64_t max_depth;
  TextPlace before = {};  // the place before
  int64_t apart = 0;      // the one before that was so far from it,
  bool same = false;      // with the same continuation

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

// Builds sequence b's trie in scratch, by one thread; returns its number of nodes.
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
  // The longest n-grams count first: they may fill the trie before all places have been looked at.
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
