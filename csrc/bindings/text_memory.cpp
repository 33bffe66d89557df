// Searches earlier texts (pagedtree.generation.drafters.TextMemory keeps them).
#include <algorithm>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/module.h"

namespace pagedtree {
namespace {

struct Place {
  int64_t number;
  int64_t equal;  // matching tokens up to here and at the text's end
  int32_t next;
  int votes;  // places with the same next token
};

// Returns int64 [n, max_ngram + length + 1], n <= most, best row last: the tokens around the places of a chain, then
// -1. tokens, before: [size], the ring, and each place's predecessor in its chain, which begins at `newest` and ends
// before `oldest`, at a negative place, or after max_places. end: the last tokens of a text, at least `context`.
Array<int64_t> former_continuations(const Array<int32_t>& tokens, const Array<int64_t>& before, int64_t newest,
                                    int64_t oldest, const std::vector<int64_t>& end, int64_t context, int64_t max_ngram,
                                    int64_t length, int64_t most, int64_t max_places) {
  expect_dims(tokens, "tokens", 1);
  expect_dims(before, "before", 1);
  const int64_t size = tokens.shape(0);
  if (before.shape(0) != size || size <= max_ngram + length) throw std::invalid_argument("before: expected the ring");
  // Places before the first token are at the end of the ring.
  const auto token_at = [&](int64_t place) { return tokens.data()[(place + size) % size]; };
  const int64_t compared = std::min<int64_t>(std::ssize(end), max_ngram);

  std::vector<Place> places;
  places.reserve(max_places);
  for (int64_t at = newest; at >= 0 && at >= oldest && std::ssize(places) < max_places; at = before.data()[at % size]) {
    __builtin_prefetch(&tokens.data()[at % size]);
    places.push_back({.number = at});
  }
  std::reverse(places.begin(), places.end());
  for (Place& place : places) {
    while (place.equal < compared && token_at(place.number - place.equal) == end[end.size() - 1 - place.equal]) {
      ++place.equal;
    }
    place.next = token_at(place.number + 1);
  }
  for (Place& place : places) {
    place.votes =
        std::count_if(places.begin(), places.end(), [&](const Place& other) { return other.next == place.next; });
  }
  // The newest of equals comes last.
  std::stable_sort(places.begin(), places.end(), [](const Place& a, const Place& b) {
    return a.equal != b.equal ? a.equal < b.equal : a.votes < b.votes;
  });
  if (std::ssize(places) > most) places.erase(places.begin(), places.end() - most);
  std::erase_if(places, [&](const Place& place) { return place.equal < context || place.next < 0; });

  Array<int64_t> rows({std::ssize(places), max_ngram + length + 1});
  int64_t* out = rows.mutable_data();
  for (const Place& place : places) {
    for (int64_t offset = 1 - max_ngram; offset <= length; ++offset) *out++ = token_at(place.number + offset);
    *out++ = -1;
  }
  return rows;
}

}  // namespace

void bind_text_memory(py::module_& m) {
  m.def("former_continuations", &former_continuations, py::arg("tokens"), py::arg("before"), py::arg("newest"),
        py::arg("oldest"), py::arg("end"), py::arg("context"), py::arg("max_ngram"), py::arg("length"), py::arg("most"),
        py::arg("max_places"),
        "What stands around the places where former texts end as a text does; see TextMemory.continuations.");
}

}  // namespace pagedtree
