"""Stop strings, callers and grammars end sequences; streamers get the text that stays."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.drafters import Oracle
from support.grammars import STOP, Brackets
from support.models import LENGTHS, NEW_TOKENS, VOCAB, generated, greedy, prompts_of
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from pagedtree import SamplingParams
from pagedtree.generation.drafters import NgramDrafter
from pagedtree.generation.fixed_step import FixedStep
from pagedtree.generation.stop_strings import StopStrings
from pagedtree.integrations.transformers import ModelDrafter, TokenOptions

SUBJECT, PROMPTS = "full", prompts_of(LENGTHS)


@pytest.fixture(scope="module")
def tokenizer():
    """Tokens have one or two letters."""
    letters = [chr(97 + i) for i in range(16)]
    pairs = [(letters[i // 16], letters[i % 16]) for i in range(16, VOCAB)]
    vocabulary = {token: i for i, token in enumerate([*letters, *map("".join, pairs)])}
    words = Tokenizer(models.BPE(vocabulary, pairs))
    words.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=words)


def drafter_of(name, texts):
    return {"none": None, "n-gram": NgramDrafter(8), "oracle": Oracle(texts, 1.0)}[name]


@pytest.mark.parametrize("drafts", ["none", "n-gram", "oracle"])
def test_text_ends_with_the_token_that_completes_a_stop_string(model, texts, tokenizer, drafts):
    """Texts end as in transformers, also within an accepted path or a token."""
    cut = compared = 0
    for b, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True)):
        letters = tokenizer.decode(text[len(prompt) :])
        for begin, length in ((2, 2), (5, 3), (11, 4), (14, 1)):
            stop = letters[begin : begin + length]
            ends = (
                end for end in range(len(prompt), len(text)) if stop in tokenizer.decode(text[len(prompt) : end + 1])
            )
            expected = text[: next(ends) + 1]
            start = tokenizer.decode(prompt)
            if (start + letters).find(stop) >= len(start):  # transformers also stops where it begins in the prompt
                compared += 1
                assert greedy(model, prompt, stop_strings=[stop, "zz"], tokenizer=tokenizer) == expected
            steps = []
            options = {"stop_strings": [stop, "zz"], "tokenizer": tokenizer, "on_step": steps.append}
            found, stats = generated(model, drafter_of(drafts, texts), PROMPTS[b : b + 1], **options)
            assert found == [expected]
            assert stats.sequences[0].finish_reason == "stop_string"
            assert stats.num_tokens == len(expected) - len(prompt)
            cut += sum(stats.sequences[0].accepted) < sum(int(step.verdict.num_accepted[0]) for step in steps)
    assert (cut > 4) == (drafts == "oracle") and compared > 8


def test_finish_reason_is_the_first_stop(model, texts, tokenizer):
    new = texts[0][LENGTHS[0] :]
    first = next(i for i in range(2, NEW_TOKENS) if new.index(new[i]) == i)  # the first occurrence of its token
    later = next(i for i in range(first + 1, NEW_TOKENS) if new.index(new[i]) == i)
    rows = (first, later, first, "eos"), (later, first, first, "stop_string"), (later, None, later, "eos")
    for eos, stop, end, reason in rows:
        stops = {"stop_strings": None if stop is None else tokenizer.decode([new[stop]]), "tokenizer": tokenizer}
        found, stats = generated(model, Oracle(texts, 1.0), PROMPTS[:1], eos_token_id=new[eos], **stops)
        assert found == [texts[0][: LENGTHS[0] + end + 1]]
        assert stats.sequences[0].finish_reason == reason


class Bytes:
    """Tokens are bytes, some of them parts of a character."""

    most = 0  # tokens decoded at once

    def decode(self, tokens, **options):
        self.most = max(self.most, len(tokens))
        return bytes(tokens).decode(errors="replace")


def test_stop_strings_in_a_long_text():
    """Only the end of the text is decoded, and the first of several stop strings counts."""
    first = "tomorrow, " + 20 * "\u00e9"  # 50 bytes in 30 letters
    tokenizer = Bytes()
    stops = StopStrings(["né", first], tokenizer)
    text = list(("a n\u00e8 " * 300 + first + ", né").encode())
    end = bytes(text).index(first.encode()) + len(first.encode())
    for step in (1, 2, 3, 7, 50):
        found = None
        for begin in range(0, len(text), step):
            found = stops.end(text[:begin], text[begin : begin + step])
            if found is not None:
                assert begin + found == end
                break
        assert found is not None
    assert stops.end(text[: end - 1], []) is None
    assert tokenizer.most <= 2 * 50 + 8


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_a_callback_ends_sequences(model, texts, monkeypatch, cuda_graph):
    monkeypatch.setattr(FixedStep, "captures", False)
    answers, ends = [[] for _ in PROMPTS], {1: torch.tensor(True), 3: 1}

    def callback(sequence, tokens):
        answers[sequence] += tokens
        return ends.get(sequence) if len(answers[sequence]) >= 5 else np.False_

    sequences, stats = generated(model, NgramDrafter(8), callback=callback, cuda_graph=cuda_graph)
    for b, (sequence, of) in enumerate(zip(sequences, stats.sequences, strict=True)):
        assert sequence == PROMPTS[b].tolist() + answers[b] == texts[b][: len(sequence)]
        assert of.finish_reason == ("callback" if b in (1, 3) else "length")
        assert of.num_tokens == len(answers[b])
        assert (5 <= len(answers[b]) < 5 + 8) == (b in (1, 3))
    assert stats.wall_time > 0.0


def test_an_eos_token_stays_the_reason(model, texts):
    eos = texts[0][LENGTHS[0]]
    _, stats = generated(model, None, PROMPTS[:1], 4, eos_token_id=eos, callback=lambda *_: True)
    assert stats.sequences[0].finish_reason == "eos"
    assert torch.is_grad_enabled()


# Streamers ------------------------------------------------------------------------------------------------------------


class Recorder:
    def __init__(self):
        self.puts, self.ends = [], 0

    def put(self, value):
        self.puts.append(value.tolist())

    def end(self):
        self.ends += 1


@pytest.mark.parametrize("drafts", ["none", "n-gram", "oracle"])
def test_streamer_gets_only_kept_tokens(model, texts, tokenizer, drafts):
    """A streamer gets the prompt and each token, but none that a stop string or an EOS token cuts off."""
    stop = tokenizer.decode(texts[1][LENGTHS[1] + 4 : LENGTHS[1] + 6])
    for options in ({}, {"stop_strings": stop, "tokenizer": tokenizer}, {"eos_token_id": texts[1][LENGTHS[1] + 6]}):
        streamer, theirs, seen = Recorder(), Recorder(), []
        watch = {"streamer": streamer, "callback": lambda _, tokens, seen=seen: seen.extend(tokens)}
        found, _ = generated(model, drafter_of(drafts, texts), PROMPTS[1:2], **watch, **options)
        text = greedy(model, PROMPTS[1], streamer=theirs, **options)
        assert found == [text] and streamer.puts == theirs.puts and streamer.ends == theirs.ends == 1
        assert streamer.puts[0] == [PROMPTS[1].tolist()] and seen == text[LENGTHS[1] :]
    assert len(seen) == 7


def test_streamers_are_of_one_sequence(model):
    for prompts, n in ((PROMPTS, 1), (PROMPTS[:1], 2)):
        streamer = Recorder()
        with pytest.raises(ValueError, match="streamer: expected one sequence, as in transformers, got"):
            generated(model, None, prompts, n=n, streamer=streamer)
        assert streamer.puts == [] and streamer.ends == 1  # a thread may wait for it


def test_a_streamer_ends_after_an_error(model):
    """Another thread may wait for it."""

    def callback(sequence, tokens):
        raise RuntimeError("no more")

    streamer = Recorder()
    with pytest.raises(RuntimeError, match="no more"):
        generated(model, None, PROMPTS[:1], streamer=streamer, callback=callback)
    assert streamer.ends == 1 and len(streamer.puts) == 2


# ---- grammars

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
