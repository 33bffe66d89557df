"""`CombinedDrafter` chooses for each sequence, and both drafters keep their states; memories find continuations."""

from __future__ import annotations

import pickle
import random
import threading
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models import greedy, holds_in_a_child, lists, prompts_of, tiny

from pagedtree import Draft, DraftTree, TreeBatch
from pagedtree.generation.drafters import CombinedDrafter, Drafter, NgramDrafter, SuffixDrafter
from pagedtree.generation.drafters.text_memory import MAX_PLACES, TextMemory
from pagedtree.generation.scheduler import GeneratedSequence
from pagedtree.integrations.transformers import ModelDrafter, generate


class Recorder(Drafter):
    """Guesses token 7 once; records its texts."""

    max_nodes, max_depth, is_chain = 2, 1, True

    def __init__(self):
        self.asked, self.narrowed = [], []

    def propose(self, tokens, lengths):
        self.asked.append([row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)])
        trees = TreeBatch.from_trees([DraftTree.chain(1)] * len(tokens))
        return Draft(torch.full((2 * len(tokens),), 7), trees)

    def confidence(self):
        return torch.tensor([0.0, -0.25] * len(self.asked[-1]))

    def narrow(self, draft, rows):
        self.narrowed.append((draft, rows.tolist()))


def same_before(text: list[int], guess: int, most: int) -> int:
    """Counts the last tokens that also precede an earlier occurrence of the guess."""
    counts = [0]
    for place in range(1, len(text)):
        if text[place] == guess:
            equal = [a == b for a, b in zip(reversed(text[:place]), reversed(text), strict=False)]
            counts.append(min([*equal, False].index(False), most))
    return max(counts)


def padded(texts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, texts)) + 3
    rows = [[*text, *[99] * (width - len(text))] for text in texts]
    return torch.tensor(rows), torch.tensor([len(text) for text in texts], dtype=torch.int32)


def endless(texts: list[list[int]]) -> list[GeneratedSequence]:
    return [GeneratedSequence(i, i, text, max_length=1000) for i, text in enumerate(texts)]


def children_of_roots(draft: Draft) -> list[tuple[int, int]]:
    """Lists (tree, row) of each."""
    offsets = draft.trees.cu_nodes.tolist()
    depths = draft.trees.depths.tolist()
    return [(b, row) for b in range(len(offsets) - 1) for row in range(*offsets[b : b + 2]) if depths[row] == 1]


# Probability of a guess by the number of matching tokens before it; factor of another guess.
LIKELY, OTHERS = np.log([0.1, 0.3, 0.5, 0.65, 0.75, 0.9, 0.9, 0.9, 0.97]), np.log(0.3)
TEXTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=5)


@given(texts=TEXTS, most=st.integers(1, 6), branches=st.integers(1, 4))
def test_guesses_are_rated_by_the_text_before_them(texts, most, branches):
    drafter = NgramDrafter(10, max_branches=branches, max_ngram=most)
    draft = drafter.propose(*padded(texts))
    joint, firsts = drafter.confidence(), draft.trees.first_child.tolist()
    offsets, first = draft.trees.cu_nodes.tolist(), drafter.same_before()
    assert joint.shape == (offsets[-1],) and all(joint[offset] == 0 for offset in offsets[:-1])
    for b, row in children_of_roots(draft):
        count = same_before(texts[b], int(draft.draft_tokens[row]), most)
        is_first = firsts[offsets[b]] == row - offsets[b]
        assert count > 0 and (not is_first or first[b] == count)
        assert joint[row].item() == pytest.approx(LIKELY[min(count, len(LIKELY) - 1)] + (0 if is_first else OTHERS))
    for b, text in enumerate(texts):
        if firsts[offsets[b]] < 0:
            assert first[b] == 0 and text[-1] not in text[:-1]
    parents, depths = draft.trees.parents.tolist(), draft.trees.depths.tolist()
    for b in range(len(texts)):
        for row in range(*offsets[b : b + 2]):
            assert depths[row] <= 0 or joint[row] < joint[offsets[b] + parents[row]]


@given(texts=TEXTS, least=st.integers(1, 4))
def test_only_texts_that_do_not_repeat_themselves_are_guessed(texts, least):
    other, lookup = Recorder(), NgramDrafter(6, max_branches=1)
    drafter = CombinedDrafter(other, NgramDrafter(6, max_branches=1), min_match=least)
    drafter.select(endless(texts))
    draft = drafter.propose(*padded(texts))
    alone = [lookup.propose(*padded([text])) for text in texts]
    is_copied = [
        single.trees.max_nodes > 1
        and int(single.trees.cu_nodes[-1]) > 1
        and same_before(text, int(single.draft_tokens[1]), 4) >= least
        for text, single in zip(texts, alone, strict=True)
    ]
    guessed = [text for text, copied in zip(texts, is_copied, strict=True) if not copied]
    assert other.asked == ([guessed] if guessed else [])
    offsets, joint = draft.trees.cu_nodes.tolist(), drafter.confidence()
    assert bool(draft.trees.valid.all()) and len(joint) >= offsets[-1]
    for b, (copied, single) in enumerate(zip(is_copied, alone, strict=True)):
        begin, end = offsets[b : b + 2]
        size = int(single.trees.cu_nodes[-1])
        expected = single.draft_tokens[1:size].tolist() if copied else [7]
        assert draft.draft_tokens[begin + 1 : end].tolist() == expected
        assert draft.trees.parents[begin:end].tolist() == list(range(-1, len(expected)))
        if not copied:
            assert joint[begin:end].tolist() == [0.0, -0.25]


def test_the_other_drafter_is_told_which_of_its_nodes_are_verified():
    other = Recorder()
    drafter = CombinedDrafter(other, NgramDrafter(4, max_branches=1), min_match=2)
    texts = [[1, 2, 3, 1, 2], [1, 2, 3], [4, 5, 6, 4, 5], [3, 2, 1]]
    drafter.select(endless(texts))
    draft = drafter.propose(*padded(texts))
    assert draft.trees.cu_nodes.diff().tolist() == [4, 2, 4, 2]
    nodes = torch.tensor([0, 1, 4, 5, 6, 7, 10], dtype=torch.int32)  # the last tree keeps only its root
    trees = TreeBatch.from_trees([DraftTree.chain(count) for count in (1, 1, 1, 0)])
    drafter.narrow(Draft(draft.draft_tokens[nodes.long()], trees), nodes)
    part, rows = other.narrowed[0]
    assert rows == [0, 1, 2]
    assert part.trees.cu_nodes.tolist() == [0, 2, 3] and part.draft_tokens[1] == 7


def repeating(count: int) -> list[list[int]]:
    """Every second prompt repeats itself."""
    return [prompt.tolist() * (3 if i % 2 else 1) for i, prompt in enumerate(prompts_of((9, 7, 21, 5)[:count], seed=5))]


FREE = (0.0, 0.0)  # the drafters' networks are as large as the tiny target


class InTurn(CombinedDrafter):
    """Alternates, whatever the drafters' worth."""

    def _choose(self):
        return [(sequence.index + len(sequence.tokens)) // 3 % 2 for sequence in self._selected]


@pytest.mark.parametrize("tree", [{"num_nodes": 4, "width": 1}, {"num_nodes": 11, "width": 2}])
def test_draft_model_reads_copied_tokens(model, tree):
    """A wrong row in the draft model's cache would cause a rejection."""
    drafter = InTurn(ModelDrafter(model, depth=3, **tree), NgramDrafter(3, max_branches=1), min_match=1)
    checked, mixed = 0, 0

    def check(step):
        nonlocal checked, mixed
        decoded = step.sequences[step.num_read :]
        accepted = step.verdict.num_accepted[step.num_read :].tolist()
        bounds = list(pairwise(step.trees.cu_nodes.tolist()))[step.num_read :]
        depths = [int(step.trees.depths[begin:end].max()) for begin, end in bounds]
        members = [b for b, which in enumerate(drafter._chosen) if which == 0] if depths else []
        for b in members:
            if depths[b] > 0:  # 3, except at the text's end
                assert accepted[b] == depths[b]
                checked += depths[b] == 3
        mixed += 0 < len(members) < len(decoded)

    generate(model, repeating(4), drafter=drafter, max_new_tokens=60, on_step=check)
    assert checked > 20 and mixed > 3


class Reader(Drafter):
    max_nodes, max_depth, is_chain, grows_by_level = 4, 3, True, True

    def __init__(self, texts: list[list[int]], right: list[int]) -> None:
        self.texts, self.right, self.asked = texts, right, []

    def select(self, sequences):
        self.selected = sequences
        self.asked.append([sequence.index for sequence in sequences])

    def propose(self, tokens, lengths):
        drafts = []
        for sequence in self.selected:
            begin, right = len(sequence.tokens), self.right[sequence.index]
            after = [*self.texts[sequence.index][begin:], 0, 0, 0]
            drafts += [0, *(after[i] if i < right else (after[i] + 1) % 128 for i in range(3))]
        return Draft(torch.tensor(drafts), TreeBatch.from_trees([DraftTree.chain(3)] * len(self.selected)))


@pytest.mark.parametrize(
    ("costs", "asked"),
    [
        (FREE, (1, 0, 0, 1)),  # each sequence gets the better one
        ((0.0, 2.0), (0, 0, 0, 0)),  # 13 tokens instead of 8 do not repay three passes
        ((2.0, 0.0), (1, 1, 1, 1)),
    ],
)
def test_cheaper_of_equal_drafters_is_chosen(model, costs, asked):
    prompts = prompts_of((9, 7, 11, 5), seed=5)
    texts = [greedy(model, prompt, 60) for prompt in prompts]
    readers = [Reader(texts, right) for right in ([0, 2, 2, 0], [2, 1, 0, 3])]
    drafter, choices = CombinedDrafter(*readers, costs=costs), []

    def note(step):
        choices.append(tuple(drafter._chosen) if len(step.sequences) == 4 else None)

    found, _ = generate(model, prompts, drafter=drafter, max_new_tokens=60, tree=None, on_step=note)
    assert lists(found) == texts
    usual = [choice for choice in choices[9:] if choice is not None]
    assert len(usual) > 3 and all(choice == asked for choice in usual)


def test_rejected_drafter_is_tried_again(model):
    (prompt,) = prompts_of((9,), seed=5)
    texts = [greedy(model, prompt, 140)]
    readers = [Reader(texts, [1]), Reader(texts, [0])]
    drafter, steps = CombinedDrafter(*readers, costs=FREE), []

    def turn(step):
        steps.append(drafter._chosen[:1])
        readers[1].right = [3] if len(steps) > 12 else [0]

    generate(model, [prompt], drafter=drafter, max_new_tokens=140, tree=None, on_step=turn)
    first = next(i for i, numbers in enumerate(steps[12:]) if numbers == [1])
    assert 16 < first < 33 and steps[-10:].count([1]) > 7


def test_drawn_drafts_are_refused(model):
    drafter = ModelDrafter(model, law="swor", num_nodes=4, depth=2, width=2)
    with pytest.raises(ValueError, match='drafter: expected draft_law "onehot" beside n-grams, got "swor"'):
        CombinedDrafter(drafter)
    with pytest.raises(ValueError, match='drafter: expected draft_law "swor" beside ModelDrafter, got "onehot"'):
        CombinedDrafter(Recorder(), drafter)
    with pytest.raises(TypeError, match="drafter: expected an object with propose"):
        CombinedDrafter(np.zeros(3))


# ---- a memory over requests


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
