"""xgrammar and llguidance on draft trees: masks equal a matcher's on one path, and matchers do not advance."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from support.grammars import EOS, VOCAB, bits, drafts_of, expected_rows, random_drafts, random_shapes, random_text

from pagedtree import DraftTree, TreeBatch
from pagedtree.grammars import GrammarMasks, GrammarMatcher

SCHEMA = """{"type": "object", "properties": {"name": {"enum": ["abc", "true", "null"]}, "ab": {"type": "integer"}},
"required": ["name", "ab"], "additionalProperties": false}"""
LARK = 'start: "{" /[a-e]+/ (":" /[0-9]+/)* "}"'
EBNF = 'root ::= "{" [a-e]+ (":" [0-9]+)* "}"'
FINITE = {"xgrammar": 'root ::= "ab" ("c" | "null") "12"', "llguidance": 'start: "ab" ("c" | "null") "12"'}


class Engine(NamedTuple):
    """Grammars are "letters", "json", or text in the engine's language."""

    name: str
    make: Callable[..., GrammarMatcher]
    after: Callable[[str, Sequence[int]], set[int] | None]

    def behind(self, grammar: str, text: Sequence[int]) -> GrammarMatcher:
        matcher = self.make(grammar)
        assert all(map(matcher.accept, text))
        return matcher


def xgrammar_engine() -> Engine:
    import xgrammar

    from pagedtree.integrations.xgrammar import XGrammarMatcher

    info = xgrammar.TokenizerInfo(VOCAB, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[EOS])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    compiled: dict[str, xgrammar.CompiledGrammar] = {}

    def raw(grammar: str, **options: object) -> xgrammar.GrammarMatcher:
        if grammar not in compiled:
            if grammar == "json":
                compiled[grammar] = compiler.compile_json_schema(SCHEMA)
            else:
                compiled[grammar] = compiler.compile_grammar(EBNF if grammar == "letters" else grammar)
        return xgrammar.GrammarMatcher(compiled[grammar], **options)

    def after(grammar: str, text: Sequence[int]) -> set[int] | None:
        matcher = raw(grammar)
        if not all(0 <= token < len(VOCAB) and matcher.accept_token(token) for token in text):
            return None
        if matcher.is_terminated():
            return set()
        row = xgrammar.allocate_token_bitmask(1, len(VOCAB))
        matcher.fill_next_token_bitmask(row)
        return bits(row[0])

    return Engine("xgrammar", lambda grammar, **options: XGrammarMatcher(raw(grammar, **options), len(VOCAB)), after)


def llguidance_engine() -> Engine:
    import llguidance
    from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

    from pagedtree.integrations.llguidance import LLGuidanceMatcher

    class Tokenizer:
        eos_token_id, bos_token_id, tokens, special_token_ids = EOS, None, VOCAB, (EOS,)

        def __call__(self, text: bytes) -> list[int]:
            # The longest token at each place: llguidance allows it alone where the grammar determines the bytes.
            tokens: list[int] = []
            while text:
                token = max((word for word in VOCAB if text.startswith(word)), key=len)
                tokens.append(VOCAB.index(token))
                text = text[len(token) :]
            return tokens

    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Tokenizer()))

    def raw(grammar: str) -> llguidance.LLMatcher:
        if grammar != "json":
            text = llguidance.LLMatcher.grammar_from_lark(LARK if grammar == "letters" else grammar)
            return llguidance.LLMatcher(tokenizer, text)
        schema = llguidance.LLMatcher.grammar_from_json_schema(SCHEMA, {"whitespace_flexible": False})
        return llguidance.LLMatcher(tokenizer, schema)

    def after(grammar: str, text: Sequence[int]) -> set[int] | None:
        matcher = raw(grammar)
        for token in text:
            if not 0 <= token < len(VOCAB) or matcher.is_stopped() or matcher.try_consume_tokens([token]) != 1:
                return None
        if matcher.is_stopped():
            return set()
        row = allocate_token_bitmask(1, len(VOCAB))
        fill_next_token_bitmask(matcher, row)
        return bits(row[0])

    return Engine("llguidance", lambda grammar: LLGuidanceMatcher(raw(grammar), tokenizer), after)


@pytest.fixture(scope="module", params=["xgrammar", "llguidance"])
def engine(request: pytest.FixtureRequest) -> Engine:
    pytest.importorskip(request.param)
    return {"xgrammar": xgrammar_engine, "llguidance": llguidance_engine}[request.param]()


@pytest.fixture
def xgrammar(engine: Engine):
    if engine.name != "xgrammar":
        pytest.skip("xgrammar's own")
    return importlib.import_module("xgrammar")


def ids(text: str) -> list[int]:
    return [VOCAB.index(bytes([byte])) for byte in text.encode()]


@pytest.mark.each_value
@pytest.mark.parametrize("grammar", ["json", "letters"])
@pytest.mark.parametrize("vocab", [len(VOCAB), 32, 100])
def test_masks(engine, grammar, vocab) -> None:
    rng = np.random.default_rng(vocab)

    def after(text: Sequence[int]) -> set[int] | None:
        return engine.after(grammar, text)

    trees = random_shapes(rng, 4)
    texts = [random_text(rng, after, int(rng.integers(12))) for _ in trees]
    drafts = [random_drafts(rng, after, text, tree) for text, tree in zip(texts, trees, strict=True)]
    tokens, batch = drafts_of(trees, drafts, padding=2)
    matchers = [engine.behind(grammar, text) for text in texts]
    with GrammarMasks([*matchers, None], vocab, threads=2) as masks:
        masks.matchers.pop()
        rows = masks.fill(tokens, batch).result()
        expected = [
            row
            for parts in zip(texts, trees, drafts, strict=True)
            for row in expected_rows(after, *parts, [EOS], vocab, len(VOCAB))
        ]
        assert [bits(row) for row in rows] == [*expected, *[set(range(vocab))] * 2]
        assert len({frozenset(row) for row in expected}) > 3  # masks differ
        # Again, and from the initial state.
        assert torch.equal(rows, masks.fill(tokens, batch).result())
        vocabulary = set(range(min(vocab, len(VOCAB))))
        for text, row in zip(texts, masks.fill_next().result(), strict=True):
            assert bits(row) == ((after(text) or {EOS}) & vocabulary or {EOS})


def test_masks_after_commit(engine) -> None:
    """Masks equal fresh matchers' of the whole text."""
    text, path = ids("{a"), ids("b:12}")
    with GrammarMasks([engine.behind("letters", text)], len(VOCAB)) as masks:
        trees = TreeBatch.from_trees([DraftTree.chain(2)])
        for begin in range(len(path)):
            draft = [-1, *path[begin : begin + 2], -1][:3]
            rows = masks.fill(torch.tensor(draft), trees).result()
            assert bits(rows[0]) == engine.after("letters", [*text, *path[:begin]])
            assert bits(rows[1]) == (engine.after("letters", [*text, *path[: begin + 1]]) or {EOS})
            assert masks.advance(torch.tensor([[path[begin], -1]])) == [True]
        assert masks.advance([[EOS]]) == [True] and masks.is_terminated() == [True]
        assert masks.advance([ids("}")]) == [True]  # tokens after the end are ignored
        assert bits(masks.fill_next().result()[0]) == {EOS}


def test_a_refused_token_changes_nothing(engine) -> None:
    matcher = engine.behind("letters", ids("{a"))
    for token in (VOCAB.index(b"{"), EOS, len(VOCAB) - 1, len(VOCAB), 10**6):
        assert not matcher.accept(token)
    masks = GrammarMasks([matcher], 100)
    assert masks.advance([[*ids("bc:"), 99]], strict=False) == [False]
    assert bits(masks.fill_next().result()[0]) == engine.after("letters", ids("{a"))
    assert matcher.accept(ids("}")[0])


def test_finished_grammar_allows_the_stop_token_alone(engine) -> None:
    """A finished grammar allows the stop token alone."""
    tree = DraftTree([-1, 0, 1, 2, 3, 2, 0])
    tokens = [-1, VOCAB.index(b"c"), VOCAB.index(b"12"), EOS, EOS, ids("a")[0], EOS]
    grammar = FINITE[engine.name]
    matcher = engine.behind(grammar, [VOCAB.index(b"ab")])
    rows = GrammarMasks([matcher], len(VOCAB)).fill(torch.tensor(tokens), TreeBatch.from_trees([tree])).result()
    every = set(range(len(VOCAB)))
    # llguidance ends at once where only the stop token can follow.
    below = {EOS} if engine.name == "xgrammar" else every
    after_c = engine.after(grammar, [VOCAB.index(b"ab"), VOCAB.index(b"c")])
    assert tokens[2] in after_c
    assert [bits(row) for row in rows][1:] == [after_c, {EOS}, below, every, every, every]


# xgrammar alone -------------------------------------------------------------------------------------------------------


def test_no_stop_token_needed(engine, xgrammar) -> None:
    grammar = FINITE["xgrammar"]
    matcher = engine.make(grammar, terminate_without_stop_token=True)
    masks = GrammarMasks([matcher], len(VOCAB))
    path = [VOCAB.index(word) for word in (b"ab", b"null", b"12")]
    tokens = torch.tensor([-1, *path, EOS])
    rows = masks.fill(tokens, TreeBatch.from_trees([DraftTree.chain(4)])).result()
    assert bits(rows[3]) == {EOS} and len(bits(rows[4])) == len(VOCAB)
    assert masks.advance([[*path, EOS]]) == [True] and masks.is_terminated() == [True]
    assert bits(masks.fill_next().result()[0]) == {EOS}


def test_xgrammar_refuses(engine, xgrammar) -> None:
    from pagedtree.integrations.xgrammar import XGrammarMatcher

    matcher = engine.make("json").matcher
    with pytest.raises(TypeError, match="matcher: expected a GrammarMatcher, got str"):
        XGrammarMatcher("{}", 8)
    with pytest.raises(TypeError, match="vocab_size: expected an integer, got None"):
        XGrammarMatcher(matcher, None)
    for wrong in (0, -1, 32 * -(-len(VOCAB) // 32) + 1, 10**6):
        with pytest.raises(ValueError, match=f"vocab_size: expected that of the grammar's TokenizerInfo, got {wrong}"):
            XGrammarMatcher(matcher, wrong)


# llguidance alone -----------------------------------------------------------------------------------------------------


def test_llguidance_refuses(engine) -> None:
    if engine.name != "llguidance":
        pytest.skip("llguidance's own")
    from pagedtree.integrations.llguidance import LLGuidanceMatcher

    with pytest.raises(TypeError, match="matcher: expected a LLMatcher, got str"):
        LLGuidanceMatcher("{}", None)
    with pytest.raises(TypeError, match="tokenizer: expected a LLTokenizer, got NoneType"):
        LLGuidanceMatcher(engine.make("json").matcher, None)
    with pytest.raises(ValueError, match=r"matcher: expected one without error, got \S"):
        engine.make("start: (")
    broken = engine.make("json")
    broken.matcher.consume_token(VOCAB.index(b"}"))  # an error state of llguidance
    with pytest.raises(RuntimeError, match="llguidance: "):
        GrammarMasks([broken], len(VOCAB)).fill_next().result()
