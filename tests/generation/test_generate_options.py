"""Penalties, token options and log-probabilities are the same with draft trees as in plain decoding.

Dense arithmetic on the model's own attention checks log-probabilities.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.drafters import Oracle
from support.grammars import Brackets
from support.models import LENGTHS, NEW_TOKENS, VOCAB, generated, prompts_of, tiny
from transformers import LogitsProcessorList
from transformers.generation import (
    LogitNormalization,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from pagedtree import SamplingParams, reference
from pagedtree.generation.drafters import NgramDrafter
from pagedtree.generation.fixed_step import FixedStep
from pagedtree.integrations.transformers import ModelDrafter, TokenOptions, tensor_parallel

EOS = [93, 106, 53]
PROMPTS = prompts_of(LENGTHS)


@pytest.fixture(scope="module")
def model():
    return tiny(0, pad_token_id=0)


@pytest.fixture(scope="module")
def draft_model():
    return tiny(1, num_hidden_layers=1)


# Options of requests; names are elements of subsets below.
PENALTIES = {
    "repetition": {"repetition_penalty": 1.4},
    "presence": {"presence_penalty": torch.tensor([0.0, 1.5, -2.0, 0.5])},
    "frequency": {"frequency_penalty": 0.7},
}
TOKENS = {
    "bias": {"bias": {3: 2.5, 63: -math.inf, 77: 4.0, 93: 1.0}},
    "allowed": {"allowed_tokens": [*range(10, 112), 3]},
    "bad words": {"bad_words": [[63], [52, 15], [64, 67, 52], [84, 118, 102], [77, 77]]},
    "first": {"begin_suppress_tokens": [52, 34, 18]},
    "outputs alone": {"penalize_prompt": False},
}


def asked(names, temperature, top_k=0):
    """The second prompt has no token options."""
    on = {name: value for part in names if part in PENALTIES for name, value in PENALTIES[part].items()}
    params = SamplingParams(temperature=temperature, top_k=top_k, **on) if on or temperature else None
    options = TokenOptions(**{name: value for part in names if part in TOKENS for name, value in TOKENS[part].items()})
    return {
        "params": params,
        "options": [options, None, options, options],
        "min_new_tokens": 1 + 8 * ("minimum" in names and "first" not in names),
        "eos_token_id": EOS,
    }


def of_prompt(arguments, b):
    """Narrows arguments to one prompt."""
    params = arguments["params"]
    if params is not None and isinstance(params.presence_penalty, torch.Tensor):
        params = replace(params, presence_penalty=float(params.presence_penalty[b]))
    return {**arguments, "params": params, "options": arguments["options"][b]}


def drafter_of(name, draft_model, texts):
    return {
        "n-gram": lambda: NgramDrafter(8),
        "draft model": lambda: ModelDrafter(draft_model, num_nodes=10, depth=3, width=3),
        "coupled": lambda: ModelDrafter(draft_model, law="coupled", num_nodes=9, branching=[3, 2]),
        "oracle": lambda: Oracle(texts, 0.8),
    }[name]()


def check_any_subset(model, draft_model, data):
    subset = data.draw(st.sets(st.sampled_from([*PENALTIES, *TOKENS, "minimum"])), "options")
    temperature = data.draw(st.sampled_from([0.0, 0.9]), "temperature")
    arguments = asked(sorted(subset), temperature, data.draw(st.sampled_from([0, 30]), "top_k"))
    arguments |= {"count": data.draw(st.integers(9, 16), "max_new_tokens"), "n": data.draw(st.integers(1, 2), "n")}
    n, page_size = arguments["n"], data.draw(st.integers(1, 17), "page_size")
    plain = []
    for b, prompt in enumerate(PROMPTS):
        seeds = range(b * n, (b + 1) * n)
        plain += generated(model, prompts=[prompt], seeds=seeds, share_prefix=False, **of_prompt(arguments, b))[0]
    names = ["n-gram", "draft model", "oracle", *(["coupled"] if arguments["params"] is not None else [])]
    drafter = drafter_of(data.draw(st.sampled_from(names), "drafter"), draft_model, plain)
    nodes = getattr(drafter, "max_nodes", Oracle.tree.num_nodes)
    pages = -(-(max(LENGTHS) + arguments["count"] - 2 + nodes) // page_size) + data.draw(st.integers(0, 9))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FixedStep, "captures", False)
        is_fixed = bool(getattr(drafter, "is_capturable", False)) and data.draw(st.booleans(), "fixed")
        arguments |= {"page_size": page_size, "num_pages": pages, "cuda_graph": is_fixed}
        most = data.draw(st.integers(1, 60), "max_batch_tokens")
        assert generated(model, drafter, max_batch_tokens=most, **arguments)[0] == plain


@given(data=st.data())
@settings(max_examples=6)
def test_any_subset_gives_the_text_of_plain_decoding(model, draft_model, data):
    check_any_subset(model, draft_model, data)


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=300)
def test_any_subset_gives_the_text_of_plain_decoding_long(model, draft_model, data):
    check_any_subset(model, draft_model, data)


EVERYTHING = [*PENALTIES, "bias", "allowed", "bad words", "minimum"]


def test_a_list_of_processors(model):
    """Processors combine with params and options."""
    changing = [SequenceBiasLogitsProcessor({(9,): 3.0}), RepetitionPenaltyLogitsProcessor(1.3)]
    forbidding = [NoBadWordsLogitsProcessor([[77], [3, 60]]), SuppressTokensLogitsProcessor([50])]
    warpers = [TemperatureLogitsWarper(0.7), TopKLogitsWarper(20), LogitNormalization()]
    processors = LogitsProcessorList([*changing, *forbidding, *warpers])
    params, options = SamplingParams(presence_penalty=0.5), TokenOptions(bias={9: -1.0, 4: 1.0}, bad_words=[[8]])
    texts, _ = generated(model, NgramDrafter(8), params=params, logits_processor=processors, options=options)
    params = replace(params, temperature=0.7, top_k=20, repetition_penalty=1.3)
    options = TokenOptions(bias={9: 2.0, 4: 1.0}, bad_words=[[8], [77], [3, 60], [50]])
    assert texts == generated(model, params=params, options=options)[0]
    batch, rules = PROMPTS[1][None, :12], [RepetitionPenaltyLogitsProcessor(1.3, prompt_ignore_length=12)]
    expected = model.generate(batch, max_new_tokens=NEW_TOKENS, do_sample=False, logits_processor=rules)
    assert generated(model, prompts=batch, logits_processor=rules)[0] == expected.tolist()


# Log-probabilities ----------------------------------------------------------------------------------------------------


def dense(logits, prompt, outputs, each, params, least):
    """Returns the next token's distribution, by numpy in float64."""
    x = logits.double().numpy().copy()
    forbidden = set(range(VOCAB)) - set(each.allowed_tokens if each.allowed_tokens is not None else range(VOCAB))
    text = [*prompt, *outputs]
    for word in each.bad_words or ():
        if text[len(text) - len(word) + 1 :] == list(word[:-1]) if len(word) > 1 else True:
            forbidden.add(word[-1])
    if len(outputs) < least:
        forbidden |= set(EOS)
    x[list(forbidden)] = -np.inf
    for token, bias in (each.bias or {}).items():
        x[token] += bias
    for token in range(VOCAB):
        count = outputs.count(token)
        if count or token in prompt:
            x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        x[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    probs = reference.distribution(x, temperature=params.temperature, top_k=params.top_k)
    with np.errstate(divide="ignore"):
        return np.log(probs)


@pytest.mark.each_value
@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("is_fixed", [False, True])
def test_logprobs(model, monkeypatch, mode, is_fixed):
    """Accepted drafts and bonus tokens have log-probabilities; evictions and EOS leave no gap."""
    monkeypatch.setattr(FixedStep, "captures", False)
    arguments = asked(EVERYTHING, 0.8, top_k=40)
    (plain, _), streams = generated(model, **arguments), [[] for _ in PROMPTS]
    drafter = ModelDrafter(model, num_nodes=12, depth=4, width=3) if is_fixed else Oracle(plain, 0.9)
    few = {"page_size": 4, "num_pages": 17, "cuda_graph": is_fixed, "callback": lambda b, new: streams[b].extend(new)}
    texts, stats = generated(model, drafter, logprobs=3, logprobs_mode=mode, **few, **arguments)
    assert texts == plain and stats.evictions > 0 and stats.mean_accepted > 0.1
    for b, (prompt, text) in enumerate(zip(PROMPTS, plain, strict=True)):
        found, at = stats.sequences[b].logprobs, len(prompt)
        new = text[at:]
        assert len(found.logprobs) == len(found.ranks) == len(found.top_tokens) == len(found.top_logprobs) == len(new)
        assert new == streams[b]
        with torch.no_grad():
            logits = model(torch.tensor([text])).logits[0, at - 1 : -1]
        request = of_prompt(arguments, b)
        for i, token in enumerate(new):
            if mode == "raw":
                row = logits[i].double().log_softmax(0).numpy()
            else:
                options, least = request["options"] or TokenOptions(), request["min_new_tokens"]
                row = dense(logits[i], prompt.tolist(), new[:i], options, request["params"], least)
            assert found.logprobs[i] == pytest.approx(row[token], abs=2e-4)
            assert found.ranks[i] == int((row >= row[token] - 1e-9).sum())
            top = np.argsort(-row, kind="stable")[:3]
            assert found.top_tokens[i] == top.tolist()
            np.testing.assert_allclose(found.top_logprobs[i], row[top], atol=2e-4)


def test_processed_logprobs_of_greedy_text(model):
    """Greedy log-probabilities follow the options alone, also next to a sampled sequence."""
    texts, plain = generated(model, prompts=PROMPTS[:2], count=6, logprobs=2)
    mixture = SamplingParams(temperature=torch.tensor([0.0, 2.0]), top_k=5, presence_penalty=torch.tensor([0.0, 1.0]))
    for params in (None, SamplingParams(temperature=0.0), mixture):
        options = {"params": params, "logprobs": 2, "logprobs_mode": "processed"}
        again, stats = generated(model, Oracle(texts, 1.0), PROMPTS[:2], 6, **options)
        one, other = plain.sequences[0].logprobs, stats.sequences[0].logprobs
        assert again[0] == texts[0]
        np.testing.assert_allclose(one.top_logprobs, other.top_logprobs, atol=1e-4)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
    assert -math.log(5) <= max(stats.sequences[1].logprobs.logprobs) < 0.0


# A vocabulary in parts ------------------------------------------------------------------------------------------------


def on_a_rank(group, texts, rule):
    model = tiny(0, pad_token_id=0)
    shards = tensor_parallel(model, group=group)
    arguments = {**asked(EVERYTHING, 0.8, top_k=40), "shards": shards}
    grammars = [Brackets(), None, None, Brackets()]
    bracketed, _ = generated(model, NgramDrafter(8), grammars=grammars, rule=rule, **arguments)
    with pytest.raises(ValueError, match="logprobs: expected None with shards"):
        generated(model, logprobs=1, **arguments)
    found, stats = generated(model, Oracle(texts, 0.9), page_size=4, num_pages=16, rule=rule, **arguments)
    return found, bracketed, stats.evictions, stats.mean_accepted


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*no finite one")  # a bracket closes, and options forbid the stop token
def test_two_ranks(model, ranks):
    """Two ranks produce the text of one; "rejection" produces the same on both."""
    arguments = asked(EVERYTHING, 0.8, top_k=40)
    texts, _ = generated(model, **arguments)
    bracketed, _ = generated(model, grammars=[Brackets(), None, None, Brackets()], **arguments)
    sampled, rejection = (ranks.run(on_a_rank, 2, texts, rule) for rule in ("sampled", "rejection"))
    for text, other, evictions, accepted in sampled:
        assert text == texts and other == bracketed != texts and evictions > 0 and accepted > 0.5
    assert rejection[0] == rejection[1]
    assert all(Brackets().accept(rejection[0][1][b][LENGTHS[b]]) for b in (0, 3))
