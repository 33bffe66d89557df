"""`generate(grammars=...)` emits only tokens of the grammar, and draft trees leave the text unchanged."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from support.drafters import Oracle
from support.grammars import STOP, Brackets
from support.models import LENGTHS, generated, prompts_of

from pagedtree import SamplingParams
from pagedtree.generation.drafters import NgramDrafter
from pagedtree.generation.fixed_step import FixedStep
from pagedtree.integrations.transformers import ModelDrafter, TokenOptions

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = prompts_of(LENGTHS)
COUNT = 24


def matchers(count, **options):
    """The second sequence has no grammar."""
    return [None if i == 1 else Brackets(**options) for i in range(count)]


def is_valid(text):
    """Returns flags of a prefix and of a complete text."""
    matcher = Brackets()
    return all(matcher.accept(token) for token in text), matcher.is_terminated()


SAMPLING = SamplingParams(temperature=1.2)
DRAFTERS = {
    "n-gram": lambda model, texts: NgramDrafter(8),
    "itself": lambda model, texts: ModelDrafter(model, num_nodes=12, depth=3, width=3),
    "oracle": lambda model, texts: Oracle(texts, 0.8),
}


@pytest.mark.parametrize(
    ("name", "params"),
    [("itself", None), ("oracle", None), ("oracle", SAMPLING), ("n-gram", SAMPLING)],
    ids=lambda value: value if isinstance(value, str) else "greedy" if value is None else "sampled",
)
def test_text_is_that_of_plain_decoding(model, name, params):
    tokens = TokenOptions(bias={50: 2.0, 90: -3.0}, bad_words=[[11], [12, 13]])
    options = {"count": COUNT, "params": params, "n": 2, "eos_token_id": STOP, "min_new_tokens": 3, "options": tokens}
    plain, _ = generated(model, grammars=matchers(8), **options)
    drafter, grammars = DRAFTERS[name](model, plain), matchers(8)
    drafted, stats = generated(model, drafter, grammars=grammars, page_size=4, num_pages=17, **options)
    assert drafted == plain
    assert name != "oracle" or (stats.evictions > 0 and stats.mean_accepted > 0.5)
    assert stats.grammar_wait > 0.0 and 0.0 < stats.grammar_time < stats.wall_time
    assert "grammars: " in stats.summary()
    reasons = []
    for i, (text, matcher) in enumerate(zip(drafted, grammars, strict=True)):
        new = text[len(PROMPTS[i // 2]) :]
        is_right, is_whole = is_valid(new)
        assert is_right == (i != 1)
        if matcher is not None:
            assert matcher.text == new
            assert is_whole == (stats.sequences[i].finish_reason == "eos")
            reasons.append(stats.sequences[i].finish_reason)
    assert "eos" in reasons


@pytest.mark.parametrize("drafts", [False, True])
def test_a_text_ends_with_its_grammar(model, drafts):
    """A text ends without a stop token, within an accepted path, and at a stop token that is no EOS token."""
    options = {"count": 40, "params": SAMPLING}
    plain, stats = generated(model, grammars=matchers(4), eos_token_id=[], **options)
    answers = [text[len(prompt) :] for text, prompt in zip(plain, PROMPTS, strict=True)]
    for i in (0, 2, 3):
        assert answers[i][-1] == STOP and stats.sequences[i].finish_reason == "grammar"
    for eos in ([], STOP):
        drafter = Oracle([[*text, 3, 4, 5] for text in plain], 1.0) if drafts else None
        texts, stats = generated(model, drafter, grammars=matchers(4, needs_stop=False), eos_token_id=eos, **options)
        for i in (0, 2, 3):
            assert texts[i][LENGTHS[i] :] == answers[i][:-1]
            assert stats.sequences[i].finish_reason == "grammar"


def test_text_ends_without_allowed_tokens(model):
    options = TokenOptions(allowed_tokens=[*range(10), 120])
    with pytest.warns(UserWarning, match="no finite one"):
        texts, stats = generated(model, None, PROMPTS[:1], 9, grammars=[Brackets()], options=options)
    new = texts[0][LENGTHS[0] :]
    assert len(new) == 3 and max(new) < 10 and stats.sequences[0].finish_reason == "grammar"


def test_logprobs_are_those_behind_the_grammar(model):
    options = {"params": SAMPLING, "logprobs": 100, "logprobs_mode": "processed"}
    text, plain = generated(model, None, PROMPTS[:1], 12, grammars=[Brackets()], **options)
    _, drafted = generated(model, Oracle(text, 1.0), PROMPTS[:1], 12, grammars=[Brackets()], **options)
    one, two = plain.sequences[0].logprobs, drafted.sequences[0].logprobs
    torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(two.logprobs), atol=1e-4, rtol=0.0)
    assert one.ranks == two.ranks and drafted.mean_accepted > 0.5
    matcher, new = Brackets(), text[0][LENGTHS[0] :]
    for token, logprobs, top in zip(new, two.top_logprobs, two.top_tokens, strict=True):
        finite = {other for other, value in zip(top, logprobs, strict=True) if value > -torch.inf}
        assert finite == matcher.allowed()
        assert float(torch.tensor(logprobs).exp().sum()) == pytest.approx(1.0, abs=1e-4)
        matcher.accept(token)


def test_captured_steps_refuse_grammars(model, monkeypatch):
    monkeypatch.setattr(FixedStep, "captures", False)
    with pytest.raises(ValueError, match="grammars: expected None with cuda_graph, whose step cannot wait"):
        generated(model, None, PROMPTS[:1], 2, grammars=[Brackets()], cuda_graph=True)


# Documents of a schema, by xgrammar -----------------------------------------------------------------------------------
