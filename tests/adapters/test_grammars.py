"""`pagedtree.grammars` on a toy grammar: masks, threads, commits and refusals."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from support.grammars import EOS, Parity, bits, drafts_of, expected_rows, random_drafts, random_shapes, random_text

from pagedtree import DraftTree, TreeBatch, build_trees
from pagedtree.grammars import GrammarMasks, GrammarMatcher, TokenTree


def parity_batch(rng: np.random.Generator, count: int, padding: int = 0):
    """Returns matchers, drafts, trees, and a function from vocabulary size to expected rows."""
    trees = random_shapes(rng, count)
    texts = [random_text(rng, Parity.after, int(rng.integers(7))) for _ in trees]
    tokens = [random_drafts(rng, Parity.after, text, tree) for text, tree in zip(texts, trees, strict=True)]
    flat, batch = drafts_of(trees, tokens, padding)

    def expected(vocab: int, without: int = -1) -> list[set[int]]:
        rows = []
        for b, parts in enumerate(zip(texts, trees, tokens, strict=True)):
            sets = expected_rows(Parity.after, *parts, Parity.stop_token_ids, vocab, Parity.vocab_size)
            rows += [set(range(vocab))] * len(sets) if b == without else sets
        return rows + [set(range(vocab))] * padding

    return [Parity(text) for text in texts], flat, batch, expected


@pytest.mark.parametrize("threads", [None, 1, 3])
@pytest.mark.parametrize("vocab", [40, 64, 33, 32, 7, 100])
def test_masks(vocab, threads) -> None:
    rng = np.random.default_rng(vocab)
    visited = 0
    for padding in (0, 3):
        matchers, tokens, trees, expected = parity_batch(rng, 5, padding)
        before = [list(matcher.text) for matcher in matchers]
        with GrammarMasks([*matchers[:3], None, matchers[4]], vocab, threads=threads) as masks:
            for dtype in (torch.int64, torch.int32):
                rows = masks.fill(tokens.clamp(-5, 10**7).to(dtype), trees).result()
                assert rows.dtype == torch.int32 and rows.shape == (len(tokens), -(-vocab // 32))
                assert [bits(row) for row in rows] == expected(vocab, without=3)
        assert [matcher.text for matcher in matchers] == before
        visited += sum(matcher.fills for matcher in matchers)
    assert visited > (30 if vocab > 30 else 15)  # many paths continue


def test_nodes_that_cannot_be_reached() -> None:
    # Wrong parents (two that Python counts from the end), a second root, too deep, past max_nodes; an empty tree; links
    # that mislead are unused.
    parents = [-1, 0, 7, -1, 1, 4, 5, 0, -11, -100, 0, *[-1, 0]]
    tokens = [5, 1, 1, 1, 2, 3, 4, 3, 2, 2, 5, *[5, 1]]
    offsets = torch.tensor([0, 11, 11, 13], dtype=torch.int32)
    built = build_trees(torch.tensor(parents, dtype=torch.int32), offsets, max_nodes=10, max_depth=3)
    wrong = torch.full_like(built.parents, 10**6)
    trees = TreeBatch(
        built.cu_nodes, built.parents, wrong, wrong, wrong, built.mask, built.valid, built.max_nodes, built.max_depth
    )
    matchers = [Parity(), Parity(), Parity([1])]
    rows = [bits(row) for row in GrammarMasks(matchers, 40).fill(torch.tensor(tokens), trees).result()]
    odd, even, every = set(range(1, 40, 2)), set(range(2, 40, 2)), set(range(40))
    chain = {1: even, 4: odd | {EOS}, 5: even, 7: even}
    assert rows == [chain.get(node, every) if node else odd for node in range(11)] + [even, every]
    assert not built.valid[0] and matchers[1].fills == 0


def test_drafts_of_other_vocabularies() -> None:
    """A token outside either vocabulary never reaches the matcher."""

    class Hears(Parity):
        def fill_tree(self, tree: TokenTree, mask: np.ndarray) -> None:
            assert set(tree.tokens.tolist()) == {-1, 39}
            super().fill_tree(tree, mask)

    trees = TreeBatch.from_trees([DraftTree([-1, 0, 0, 0, 2])])
    for vocab in (45, 40):
        rows = GrammarMasks([Hears()], vocab).fill(torch.tensor([44, 39, 40, 44, 2]), trees).result()
        assert bits(rows[1]) == {1} and [len(bits(row)) for row in rows[2:]] == [40] * 3
    rows = GrammarMasks([Parity()], 39).fill(torch.tensor([44, 39, 40, 44, 2]), trees).result()
    assert [len(bits(row)) for row in rows] == [19, 39, 39, 39, 39]


def test_no_sequence_and_no_node() -> None:
    none = GrammarMasks([], 70)
    empty = TreeBatch.from_trees([])
    assert none.fill(torch.zeros(0, dtype=torch.int64), empty).result().shape == (0, 3)
    assert none.fill_next().result().shape == (0, 3) and none.advance([]) == []
    padding = TreeBatch.from_trees([], capacity=2)
    assert [len(bits(row)) for row in none.fill(torch.zeros(2, dtype=torch.int64), padding).result()] == [70, 70]


def test_the_end_of_a_grammar() -> None:
    # After 1, 2: drafts 0 (the end), 0, 3; on another branch 3, 4.
    trees = TreeBatch.from_trees([DraftTree([-1, 0, 1, 1, 0, 4])])
    tokens = torch.tensor([2, EOS, EOS, 3, 3, 4])
    masks = GrammarMasks([Parity([1, 2])], 40)
    rows = [bits(row) for row in masks.fill(tokens, trees).result()]
    odd, even, every = set(range(1, 40, 2)), set(range(2, 40, 2)), set(range(40))
    assert rows == [odd | {EOS}, {EOS}, every, every, even, odd | {EOS}]
    assert masks.advance([[EOS, 3, EOS]]) == [True] and masks.is_terminated() == [True]
    assert masks.advance([[7]]) == [True] and masks.matchers[0].text == [1, 2, EOS]
    assert [bits(row) for row in masks.fill(tokens, trees).result()] == [{EOS}, *[every] * 5]
    assert bits(masks.fill_next().result()[0]) == {EOS}
    # A grammar without a next token also allows the stop token.
    dead = Parity([1, 2, 1, 2, 1, 2, 1])
    assert not dead.allowed() and bits(GrammarMasks([dead], 40).fill_next().result()[0]) == {EOS}


def test_draft_to_target() -> None:
    trees = TreeBatch.from_trees([DraftTree([-1, 0, 0, 0, 0, 1])])
    tokens, ids = torch.tensor([9, 0, 1, 3, -1, 2]), torch.tensor([5, 2, 4])
    mapped = torch.tensor([9, 5, 2, -1, -1, 4])
    masks = GrammarMasks([Parity()], 40)
    rows = masks.fill(tokens, trees, draft_to_target=ids).result()
    assert torch.equal(rows, masks.fill(mapped, trees).result())
    assert bits(rows[1]) == set(range(2, 40, 2)) and bits(rows[5]) == {EOS, *range(1, 40, 2)}


def test_advance() -> None:
    matchers = [Parity(), None, Parity([1])]
    masks = GrammarMasks(matchers, 40)
    assert masks.advance([[1, 2], [7], [2, -1, 5]]) == [True] * 3
    assert [matcher.text for matcher in (matchers[0], matchers[2])] == [[1, 2], [1, 2]]
    verdict = torch.tensor([[3, 4, 9, -1], [0, 0, 0, 0], [5, 6, -1, -1]])
    assert masks.advance(verdict, torch.tensor([2, 4, 1], dtype=torch.int32)) == [True] * 3
    assert masks.advance(np.array([[], [], []]).tolist(), [1, -5, 3]) == [True] * 3
    assert [matcher.text for matcher in (matchers[0], matchers[2])] == [[1, 2, 3, 4], [1, 2, 5]]
    # A refused token stops all matchers, without strict its own.
    with pytest.raises(ValueError, match=r"tokens: expected what the grammars allow, got 4 as tokens\[2\]\[1\]"):
        masks.advance([[5], [], [6, 4]])
    assert matchers[0].text == [1, 2, 3, 4] and matchers[2].text == [1, 2, 5]
    assert masks.advance([[5], [], [6, 8]], strict=False) == [True, True, False]
    assert matchers[0].text == [1, 2, 3, 4, 5] and matchers[2].text == [1, 2, 5]
    assert masks.advance([[10**9], [10**9], []], strict=False) == [False, True, True]
    assert masks.advance([torch.tensor([6, -1]), [], np.array([6])]) == [True] * 3 and matchers[0].text[-1] == 6


def test_close_lets_a_fill_end() -> None:
    masks = GrammarMasks([Parity([1]), Parity()], 40, threads=1)
    fill = masks.fill_next()
    masks.close()
    assert [len(bits(row)) for row in fill.result()] == [19, 20]
    with pytest.raises(RuntimeError, match="after shutdown"):
        masks.fill_next()


def test_work_goes_on_beside_the_caller() -> None:
    """Threads fill two sequences at once, and only `result` waits."""
    go, together, threads = threading.Event(), threading.Barrier(2, timeout=30), set()

    def on_fill() -> None:
        threads.add(threading.get_ident())
        go.wait(30)
        together.wait()

    matchers = [Parity([1], on_fill), Parity([], on_fill)]
    tokens, trees = torch.tensor([5, 2, 5, 1]), TreeBatch.from_trees([DraftTree([-1, 0])] * 2)
    with GrammarMasks(matchers, 40, threads=2) as masks:
        fill = masks.fill(tokens, trees)
        assert not fill.done() and fill.waited is None
        go.set()
        rows = fill.result()
        assert fill.done() and fill.result() is rows
        assert [len(bits(row)) for row in rows] == [19, 21, 20, 19]
        assert len(threads) == 2 and threading.get_ident() not in threads
        assert fill.waited >= 0 and fill.filled > 0


def test_fill_ignores_later_changes() -> None:
    go = threading.Event()
    tokens, trees = torch.tensor([5, 2, 5, 2]), TreeBatch.from_trees([DraftTree([-1, 0])] * 2)
    matchers = [Parity([1], lambda: go.wait(30)), Parity([1])]
    with GrammarMasks(matchers, 40, threads=1) as masks:
        fill = masks.fill(tokens, trees)
        masks.matchers[1] = None
        for tensor in (tokens, trees.parents, trees.cu_nodes):
            tensor.fill_(7)
        go.set()
        assert [len(bits(row)) for row in fill.result()] == [19, 21] * 2


@pytest.mark.parametrize("call", ["advance", "is_terminated", "fill"])
def test_a_running_fill_is_waited_for(call) -> None:
    go = threading.Event()
    matcher = Parity([1], lambda: go.wait(30))
    with GrammarMasks([matcher], 40) as masks:
        tokens, trees = torch.tensor([5, 2]), TreeBatch.from_trees([DraftTree([-1, 0])])
        fill = masks.fill(tokens, trees)
        threading.Timer(0.05, go.set).start()
        {
            "advance": lambda: masks.advance([[2]]),
            "is_terminated": masks.is_terminated,
            "fill": lambda: masks.fill(tokens, trees),
        }[call]()
        assert fill.done()
        assert [len(bits(row)) for row in fill.result()] == [19, 21]


def test_a_matcher_that_fails() -> None:
    class Fails(Parity):
        def fill_row(self, row: np.ndarray) -> None:
            if len(self.text) == 3:
                raise RuntimeError("no row")
            super().fill_row(row)

    matchers = [Fails([1]), Parity([1])]
    with GrammarMasks(matchers, 40) as masks:
        fill = masks.fill(torch.tensor([5, 2, 3] * 2), TreeBatch.from_trees([DraftTree.chain(2)] * 2))
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no row"):
                fill.result()
        assert fill.done() and [matcher.text for matcher in matchers] == [[1], [1]]
        assert len(bits(masks.fill_next().result()[0])) == 19


def test_result_into_a_tensor(device) -> None:
    masks = GrammarMasks([Parity(), None], 40, device=device)
    out = torch.zeros(2, 2, dtype=torch.int32, device=device)
    fill = masks.fill_next()
    assert fill.result(out) is out and torch.equal(out, masks.fill_next().result())
    assert out.tolist() == [[sum(1 << x for x in range(1, 31, 2)) - 2**31, 170], [-1, 255]]
    for wrong in (out[:1], out.long(), torch.zeros(2, 2, dtype=torch.int32, device="meta")):
        with pytest.raises(ValueError, match=r"out: expected int32 \[2, 2\] on"):
            masks.fill_next().result(wrong)


TREES = TreeBatch.from_trees([DraftTree.chain(1)])
TOKENS = torch.tensor([5, 1])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: GrammarMasks([Parity()], 0), ValueError, "vocab_size: expected 1..1048576, got 0"),
        (lambda: GrammarMasks([Parity()], True), TypeError, "vocab_size: expected an integer, got True"),
        (lambda: GrammarMasks([Parity()], 40, threads=0), ValueError, "threads: expected 1..1024, got 0"),
        (lambda: GrammarMasks([Parity()], 40, threads=1.0), TypeError, "threads: expected an integer, got 1.0"),
        (lambda: GrammarMasks(Parity(), 40), TypeError, "matchers: expected a sequence of matchers"),
        (lambda: GrammarMasks(["x"], 40), TypeError, r"matchers\[0\]: expected a GrammarMatcher or None, got str"),
        (lambda: GrammarMasks([Parity()] * 2, 40), ValueError, r"matchers\[1\]: expected a matcher of its own"),
        (lambda: masks().fill([1, 2], TREES), TypeError, "draft_tokens: expected a Tensor, got list"),
        (lambda: masks().fill(TOKENS, [DraftTree.chain(1)]), TypeError, "trees: expected a TreeBatch, got list"),
        (lambda: masks().fill(TOKENS[:1], TREES), ValueError, r"draft_tokens: expected shape \[2\], got \[1\]"),
        (lambda: masks().fill(TOKENS.float(), TREES), ValueError, "draft_tokens: expected int32 or int64"),
        (lambda: masks().fill(TOKENS.to("meta"), TREES), ValueError, "draft_tokens: expected a tensor with values"),
        (lambda: masks(2).fill(TOKENS, TREES), ValueError, "matchers: expected 1, one per tree or None, got 2"),
        (lambda: masks().fill(TOKENS, TREES, draft_to_target=TOKENS[None]), ValueError, "draft_to_target: expected"),
        (lambda: masks().fill(TOKENS, TREES, draft_to_target=[1]), TypeError, "draft_to_target: expected a"),
        (lambda: masks().advance([[1], [1]]), ValueError, "tokens: expected 1 entries, one per sequence, got 2"),
        (lambda: masks().advance("a"), TypeError, "tokens: expected a tensor or a sequence, got str"),
        (lambda: masks().advance([["a"]]), TypeError, r"tokens\[0\]: expected integers"),
        (lambda: masks().advance([1]), TypeError, r"tokens\[0\]: expected integers, got 1"),
        (lambda: masks().advance(torch.zeros(1, 2)), ValueError, r"tokens: expected integers \[B, S\] with B = 1"),
        (lambda: masks().advance(TOKENS), ValueError, r"tokens: expected integers \[B, S\] with B = 1"),
        (lambda: masks().advance([[1]], [1, 2]), ValueError, "counts: expected 1 entries, one per sequence, got 2"),
        (lambda: masks().advance([[1]], ["a"]), TypeError, r"counts\[0\]: expected an integer, got 'a'"),
        (lambda: masks().advance([[1]], TOKENS), ValueError, r"counts: expected integers \[B\] with B = 1"),
        (lambda: masks().advance([[2]]), ValueError, r"tokens: expected what the grammars allow, got 2"),
    ],
)
def test_grammar_mask_refusals(make, error, message) -> None:
    with pytest.raises(error, match=message):
        make()


def masks(count: int = 1) -> GrammarMasks:
    return GrammarMasks([Parity() for _ in range(count)], 40)


@pytest.mark.parametrize("offsets", [[1, 2], [0, 3], [0, 2, 1], [0, -1, 2]])
def test_offsets_that_do_not_ascend(offsets) -> None:
    batch, cu_nodes = len(offsets) - 1, torch.tensor(offsets, dtype=torch.int32)
    trees = TreeBatch(cu_nodes, *[TREES.parents] * 4, TREES.mask, torch.ones(batch, dtype=torch.bool), 2, 1)
    with pytest.raises(ValueError, match="cu_nodes: expected offsets that ascend from 0 to at most 2"):
        masks(batch).fill(TOKENS, trees).result()


def test_protocol() -> None:
    assert isinstance(Parity(), GrammarMatcher) and not isinstance(object(), GrammarMatcher)
