"""A memory over requests finds the continuations of an exhaustive search and never changes the text."""

from __future__ import annotations

import pickle
import random
import threading

import pytest

pytest.importorskip("transformers")

from support.models import greedy, holds_in_a_child, lists, prompts_of, tiny

from pagedtree.generation.drafters import CombinedDrafter, SuffixDrafter
from pagedtree.generation.drafters.text_memory import MAX_PLACES, TextMemory
from pagedtree.integrations.transformers import ModelDrafter, generate

pytestmark = pytest.mark.usefixtures("one_thread")


def everywhere(text, end, context, max_ngram, length):
    """Finds the rows of `continuations` by comparison."""
    rows, padded = [], [-1] * max_ngram + text + [-1] * length
    for place in range(len(text) - 1):
        equal = 0
        while equal < min(max_ngram, len(end)) and place >= equal and text[place - equal] == end[-1 - equal]:
            equal += 1
        if equal >= context and text[place + 1] >= 0:
            rows.append([*padded[place + 1 : place + 1 + max_ngram + length], -1])
    return rows


SIZES = [(50, 3, 3), (1000, 3, 6), (64, 1, 12), (7, 2, 3), (1, 1, 2)]


@pytest.mark.parametrize("factor", [1, 50_021])  # factor of the tokens' numbers
@pytest.mark.parametrize(("size", "context", "words"), SIZES)
def test_continuations_match_plain_search(size, context, words, factor):
    rng, memory, text, compared = random.Random(0), TextMemory(size, context=context, max_ngram=8), [], 0
    for _ in range(80):
        new = [factor * rng.randrange(words) for _ in range(rng.randrange(60))]
        memory.add(new)
        if len(new) >= context and size > 1:
            text = [*text, -1, *new[-(size - 1) :]][-size:]
        assert len(memory) == len(text)
        end = [factor * rng.randrange(words) for _ in range(rng.randrange(10))]
        expected = everywhere(text, end, context, 8, 4)
        found = memory.continuations(end, 4, 100).tolist()
        if len(expected) < MAX_PLACES - 8:  # other texts of the same hash also occupy places
            assert sorted(found) == sorted(expected)
            compared += len(expected)
    assert compared > 10 or size < 10


def test_continuations_are_ordered_by_match_and_frequency():
    memory = TextMemory(1000, context=2, max_ngram=4)
    for text in ([9, 1, 2, 3, 50], [1, 2, 3, 60], [8, 2, 3, 70], [7, 2, 3, 70], [6, 2, 3, 80]):
        memory.add(text)
    rows = memory.continuations([9, 1, 2, 3], 1, 5)
    # Ordered by equal tokens, then frequency; newer after older.
    assert rows[:, -2].tolist() == [80, 70, 70, 60, 50]
    assert memory.continuations([9, 1, 2, 3], 1, 2)[:, -2].tolist() == [60, 50]
    assert memory.continuations([1, 9], 1, 5).shape == (0, 6) and memory.continuations([3], 1, 5).shape == (0, 6)


def test_threads_share_a_memory():
    """Reads during writes return real texts, each of one token."""
    memory, wrong = TextMemory(400, context=2, max_ngram=4), []

    def write(token):
        for _ in range(300):
            memory.add([token] * 30)

    def look(token):
        for _ in range(300):
            for row in memory.continuations([token] * 4, 3, 8).tolist():
                wrong.extend(t for t in row[3:5] if t != token)

    threads = [threading.Thread(target=call, args=(t,)) for t in range(1, 4) for call in (write, look)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(memory) == 400


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_copies_have_whole_texts(monkeypatch):
    """Pickled and forked copies have whole texts while another thread is within `add`."""
    memory, stored, forked, threads = TextMemory(400, context=2, max_ngram=4), [], [], []
    text, hashes = [1, 2, 3, 4, 1, 2, 9], TextMemory._hashes
    memory.add([5] * 30)

    def found(other):
        return other.continuations([8, 1, 2], 1, 4)[:, -2].tolist()

    def in_the_middle(self, tokens):
        store = threading.Thread(target=lambda: stored.append(pickle.loads(pickle.dumps(memory))))
        fork = threading.Thread(target=lambda: forked.append(holds_in_a_child(lambda: found(memory) == [3, 9])))
        threads.extend([store, fork])
        for thread in threads:
            thread.start()
            thread.join(timeout=0.1)  # lets it continue, if it may
        return hashes(self, tokens)

    with monkeypatch.context() as patch:
        patch.setattr(TextMemory, "_hashes", in_the_middle)
        memory.add(text)
    for thread in threads:
        thread.join()
    assert found(memory) == found(stored[0]) == [3, 9] and forked == [True]
    stored[0].add([8, 1, 2, 7])
    assert found(memory) == [3, 9] and 7 in found(stored[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens: expected 1 to 1073741824, got 0"),
        ({"max_tokens": 9, "context": 0}, "context: expected 1 to 64, got 0"),
        ({"max_tokens": 9, "max_ngram": 3}, "max_ngram: expected 4 to 64, got 3"),
    ],
)
def test_bad_sizes(options, message):
    with pytest.raises(ValueError, match=message):
        TextMemory(**options)


def test_combined_with_a_draft_model(model):
    """The model drafts only where neither the text nor an earlier answer has a continuation."""
    prompts, sizes = prompts_of((5, 12)), []
    other = ModelDrafter(tiny(1, num_hidden_layers=1), num_nodes=6)
    propose = other.propose
    other.propose = lambda tokens, lengths, *rest: (sizes.append(len(tokens)), propose(tokens, lengths, *rest))[1]
    drafter = CombinedDrafter(other, SuffixDrafter(10_000, num_nodes=12))
    texts, counts = [greedy(model, prompt, 40) for prompt in prompts], []
    for _ in range(2):
        sizes.clear()
        sequences, _ = generate(model, prompts, drafter=drafter, max_new_tokens=40, tree=None)
        assert lists(sequences) == texts
        counts.append(sum(sizes))
    assert counts[1] < counts[0] / 3
