"""`generate` follows `model.generation_config` as `model.generate` does, field by field and with arguments."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from support.drafters import Oracle
from support.models import LENGTHS, NEW_TOKENS, VOCAB, generated, greedy, prompts_of, tiny
from transformers import CompileConfig, GenerationConfig, LogitsProcessorList, WatermarkingConfig
from transformers.generation import (
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
)

from pagedtree import SamplingParams, reference
from pagedtree.generation.drafters import NgramDrafter
from pagedtree.integrations.transformers import ModelDrafter, TokenOptions, tree_generate
from pagedtree.integrations.transformers.generation_config import IGNORED, config_fields

PROMPTS = prompts_of(LENGTHS)
NAMES = {name for name in vars(GenerationConfig()) if not name.startswith("_")}


@pytest.fixture(scope="module")
def model():
    return tiny(0, pad_token_id=0)


@pytest.fixture(scope="module")
def plain(model):
    """The texts, and the new tokens of the first."""
    texts = [greedy(model, prompt) for prompt in PROMPTS]
    return texts, texts[0][len(PROMPTS[0]) :]


@pytest.fixture
def configure(model, monkeypatch):
    empty = model.generation_config

    def configure(**fields):
        config = copy.deepcopy(empty)
        for name, value in fields.items():
            setattr(config, name, value)
        monkeypatch.setattr(model, "generation_config", config)

    return configure


class Words:
    """One letter per token."""

    def decode(self, tokens, **_):
        return "".join(chr(256 + token) for token in tokens)


# Together they have every field of transformers' GenerationConfig. A function makes its value from the first text's new
# tokens.
SERVED = {
    "repetition_penalty": 1.5,
    "sequence_bias": lambda new: [[[new[0]], -9.0], [[7], 4.0], [[new[2], new[3]], -math.inf]],
    "bad_words_ids": lambda new: [[new[1]], [new[3], new[4]]],
    "suppress_tokens": lambda new: [new[0], new[5], -1, VOCAB],
    "begin_suppress_tokens": lambda new: [new[0]],
    "eos_token_id": lambda new: [new[4], 5],
    "min_new_tokens": 12,
    "min_length": 16,
}
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.1}
SAMPLED_REFUSED = {"typical_p": 0.9, "epsilon_cutoff": 3e-4, "eta_cutoff": 3e-4, "top_h": 0.4}


def every(value, names):
    return dict.fromkeys(names.split(), value)


REFUSED = {
    **every(2, "num_beams no_repeat_ngram_size encoder_no_repeat_ngram_size"),
    **every(3, "num_return_sequences forced_bos_token_id forced_eos_token_id"),
    **every(1.5, "guidance_scale encoder_repetition_penalty penalty_alpha max_time assistant_ensemble_weight"),
    **every(True, "token_healing is_assistant"),
    **{"dola_layers": "high", "constraints": [1], "force_words_ids": [[3]], "cache_implementation": "quantized"},
    **{"exponential_decay_length_penalty": (3, 1.1), "watermarking_config": WatermarkingConfig()},
}
WITHOUT_EFFECT = {
    **every(3, "max_new_tokens bos_token_id decoder_start_token_id prompt_lookup_num_tokens max_matching_ngram_size"),
    **every(3, "assistant_early_exit assistant_lookbehind num_assistant_tokens target_lookbehind"),
    **every(True, "early_stopping low_memory return_legacy_cache disable_compile use_mtp output_attentions"),
    **every(True, "output_hidden_states output_logits output_scores return_dict_in_generate remove_invalid_values"),
    **every(4, "pad_token_id prefill_chunk_size"),
    **every(0.9, "assistant_confidence_threshold diversity_penalty length_penalty"),
    **{"max_length": 40, "num_beam_groups": 1, "use_cache": False, "max_cache_len": 99, "renormalize_logits": True},
    **{"cache_config": {"backend": "quanto"}, "compile_config": CompileConfig(), "continuous_batching_config": None},
    **{"num_assistant_tokens_schedule": "heuristic", "speculation_type": "dflash", "transformers_version": "4.0.0"},
}


def test_model_without_generation_config(model, plain, monkeypatch):
    """Without a config no sequence ends, and 0 pads."""
    monkeypatch.setattr(model, "generation_config", None)
    texts, new = plain
    for drafter in (None, NgramDrafter(8)):
        assert generated(model, drafter)[0] == texts
    batch, _ = generated(model, None, PROMPTS[0].expand(2, -1), eos_token_id=new[4])
    assert batch == [texts[0][: len(PROMPTS[0]) + new.index(new[4]) + 1]] * 2


def test_every_field_has_a_place():
    tables = (SERVED, SAMPLED, SAMPLED_REFUSED, REFUSED, WITHOUT_EFFECT, {"stop_strings": ""})
    fields = [name for table in tables for name in table]
    assert set(fields) >= NAMES and len(fields) == len(set(fields))
    assert set(WITHOUT_EFFECT) <= IGNORED and not IGNORED & {*SERVED, *SAMPLED, *REFUSED} - {"eos_token_id"}


@pytest.mark.parametrize("name", SERVED)
def test_a_served_field_gives_the_text_of_transformers(model, configure, plain, name):
    """Prompts of a batch get their text alone, also by `model.generate`'s processors."""
    texts, new = plain
    ends = {"eos_token_id": [new[4], 5]} if name.startswith("min") else {}
    value = SERVED[name](new) if callable(SERVED[name]) else SERVED[name]
    configure(**ends)
    without = [greedy(model, prompt) for prompt in PROMPTS] if ends else texts
    configure(**ends, **{name: value})
    expected = [greedy(model, prompt) for prompt in PROMPTS]
    assert expected[0] != without[0]
    drafter = Oracle(expected, 0.9)
    assert generated(model)[0] == generated(model, drafter)[0] == expected
    assert greedy(model, PROMPTS[0], custom_generate=tree_generate, drafter=drafter) == expected[0]
    assert name == "eos_token_id" or generated(model, generation_config=False)[0] == without


@pytest.mark.parametrize("names", [["min_length"], ["sequence_bias", "bad_words_ids", "suppress_tokens", "min_length"]])
def test_a_padded_batch(model, configure, plain, names):
    """The minimum counts padding (so does the penalty of transformers 4.57, which is absent)."""
    fields = {name: SERVED[name](plain[1]) if callable(SERVED[name]) else SERVED[name] for name in names}
    rows = [torch.nn.functional.pad(prompt[-12:], (12 - len(prompt[-12:]), 0)) for prompt in PROMPTS]
    mask = [torch.nn.functional.pad(torch.ones(min(len(p), 12)), (12 - min(len(p), 12), 0)) for p in PROMPTS]
    batch = {"input_ids": torch.stack(rows), "attention_mask": torch.stack(mask).long()}
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    early = model.generate(**batch, **options)[:, 13].tolist()  # the second new tokens
    configure(eos_token_id=early)
    assert model.generate(**batch, **options).shape[1] == 14
    configure(eos_token_id=early, **fields)
    late = model.generate(**batch, **options)[:, 17].tolist()  # more than 4 tokens: 16 less the width
    configure(eos_token_id=sorted({*early, *late}), **fields)
    expected = model.generate(**batch, **options)
    assert 16 < expected.shape[1] < 12 + NEW_TOKENS
    texts = [row[int((m == 0).sum()) :].tolist() for row, m in zip(expected, mask, strict=True)]
    drafter = Oracle(texts, 0.9)
    assert generated(model, drafter, batch)[0] == expected.tolist()
    output = model.generate(**batch, **options, custom_generate=tree_generate, drafter=drafter)
    assert torch.equal(output, expected)


def test_stop_strings(model, configure, plain):
    texts, new = plain
    stop = Words().decode(new[5:7])
    configure(stop_strings=[stop])
    shorter = texts[0][: len(PROMPTS[0]) + 7]
    for arguments, expected in (
        ({"tokenizer": Words()}, shorter),
        ({"tokenizer": Words(), "stop_strings": "x"}, texts[0]),
        ({"generation_config": False}, texts[0]),
    ):
        assert generated(model, None, PROMPTS[:1], **arguments)[0] == [expected]
    with pytest.raises(ValueError, match="generation_config: stop_strings: tokenizer: expected the model's tokenizer"):
        generated(model, None, PROMPTS[:1])


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_without_counterpart_is_refused_by_name(model, configure, plain, name):
    configure(**{name: REFUSED[name]})
    if name not in NAMES:
        pytest.skip("of another release of transformers")
    with pytest.raises(ValueError, match=rf"generation_config: expected fields that .*, got {name}=.*=False"):
        generated(model, count=2)
    text, _ = generated(model, None, PROMPTS[:1], 6, generation_config=False)
    assert text == [plain[0][0][: len(PROMPTS[0]) + 6]]


def test_values_with_which_a_field_does_nothing(model, configure, plain):
    configure(
        **every(1, "num_beams num_return_sequences guidance_scale encoder_repetition_penalty"),
        **every(1.0, "repetition_penalty typical_p"),
        **every(0, "no_repeat_ngram_size encoder_no_repeat_ngram_size penalty_alpha min_length"),
        **{"token_healing": False, "do_sample": False, "cache_implementation": "static"},
    )
    assert config_fields(model, given={}).values == {}
    assert generated(model)[0] == plain[0]
    configure(a_key_of_its_own="chatml", repetition_penalty=None)
    assert config_fields(model, given={}).values == {}


# Sampling -------------------------------------------------------------------------------------------------------------

SAMPLING = [
    ({}, SamplingParams(top_k=50)),
    ({"temperature": 0.6, "top_k": 20, "top_p": 0.8}, SamplingParams(temperature=0.6, top_k=20, top_p=0.8)),
    ({"top_k": 0, "top_p": 0.8, "min_p": 0.05}, SamplingParams(top_p=0.8, min_p=0.05, filter_order="joint")),
    ({"top_k": 9, "min_p": 0.1, "top_p": 1.0}, SamplingParams(top_k=9, min_p=0.1)),
    ({"top_k": 0, "repetition_penalty": 1.3}, SamplingParams(repetition_penalty=1.3)),
]


@pytest.mark.parametrize(("fields", "params"), SAMPLING)
def test_the_config_samples(model, configure, fields, params):
    """Probabilities equal transformers', the text a call's with equal params."""
    configure(do_sample=True, **fields)
    found = config_fields(model, given={}).params()
    assert vars(found) == vars(params)
    flags = every(True, "return_dict_in_generate output_scores output_logits")
    out = model.generate(PROMPTS[1][None], max_new_tokens=1, **flags)
    options = reference.clean_logits(out.logits[0][0]).astype(np.float64)
    for token in set(PROMPTS[1].tolist()):
        options[token] *= found.repetition_penalty if options[token] < 0 else 1 / found.repetition_penalty
    filters = {name: getattr(found, name) for name in ("temperature", "top_k", "top_p", "min_p", "filter_order")}
    expected = torch.softmax(out.scores[0][0].double(), -1).numpy()
    np.testing.assert_allclose(reference.distribution(options, **filters), expected, atol=1e-6)
    plain, _ = generated(model, n=2, params=params, generation_config=False)
    draft = ModelDrafter(tiny(1, num_hidden_layers=1), law="coupled", num_nodes=9, branching=[3, 2])
    for drafter in (None, draft):
        assert generated(model, drafter, n=2)[0] == plain


@pytest.mark.parametrize("name", SAMPLED_REFUSED)
def test_a_filter_without_counterpart_is_refused(model, configure, name):
    if name not in NAMES:
        pytest.skip("of another release of transformers")
    configure(do_sample=True, **{name: SAMPLED_REFUSED[name]})
    with pytest.raises(ValueError, match=f"generation_config: .*, got {name}="):
        generated(model, count=2)
    generated(model, count=2, params=SamplingParams())
    generated(model, count=2, rule="greedy")


TOGETHER = [
    ({"top_p": 0.5, "min_p": 0.1}, {}, r"generation_config: top_k, top_p, min_p: expected at most two .*=False"),
    (
        {"suppress_tokens": [3], "repetition_penalty": 1.1},
        {"rule": "typical", "drafter": NgramDrafter(4)},
        '"typical" takes .*generation_config sets repetition_penalty, suppress_tokens:',
    ),
]


@pytest.mark.parametrize(("fields", "arguments", "message"), TOGETHER)
def test_refuses_conflicting_fields(model, configure, fields, arguments, message):
    configure(do_sample=True, temperature=0.8, **fields)  # with top_k 50
    with pytest.raises(ValueError, match=message):
        generated(model, **arguments)


# Arguments of the call ------------------------------------------------------------------------------------------------


def calls(new):
    """Yields fields, a call's arguments, and an equal call's without the fields."""
    sampled = {"do_sample": True, "temperature": 0.3, "repetition_penalty": 2.0, "suppress_tokens": [new[0]]}
    params, suppressed = SamplingParams(temperature=0.9, presence_penalty=0.5), TokenOptions(bad_words=[[new[0]]])
    penalty, eos = SamplingParams(temperature=0.0, repetition_penalty=2.0), {"eos_token_id": [new[4]]}
    yield sampled, {"params": params}, {"params": params, "options": suppressed}
    yield sampled, {"rule": "greedy"}, {"params": penalty, "options": suppressed}
    for fields in ({"min_length": 16}, {"min_new_tokens": 12, "min_length": 3}):
        yield {**eos, **fields}, {"min_new_tokens": 0}, {"min_new_tokens": 0}
    fields = {"suppress_tokens": [new[0]], "begin_suppress_tokens": [new[2]], "sequence_bias": [[[9], 2.0]]}
    options = TokenOptions(bias={9: 1.0, 4: 1.0}, bad_words=[[new[1]]], begin_suppress_tokens=[3])
    together = TokenOptions(bias={9: 3.0, 4: 1.0}, bad_words=[[new[1]], [new[0]]], begin_suppress_tokens=[3, new[2]])
    yield {**fields, "repetition_penalty": 2.0}, {"options": options}, {"options": together, "params": penalty}


def test_arguments_of_the_call_replace_fields(model, configure, plain):
    """Params replace sampling and penalty, a rule sampling alone, a minimum both minima; options are added."""
    for fields, call, keywords in calls(plain[1]):
        configure(**fields)
        found, _ = generated(model, NgramDrafter(8), **call)
        assert found == generated(model, generation_config=False, **keywords)[0] != generated(model)[0], call


def test_logits_processors_replace_fields_of_their_type(model, configure, plain):
    new = plain[1]
    suppressed = {"suppress_tokens": [new[0]], "begin_suppress_tokens": [new[2]]}
    configure(repetition_penalty=1.2, sequence_bias=[[[9], 2.0]], **suppressed)
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(2.0), SequenceBiasLogitsProcessor({(4,): 3.0})])
    expected = [greedy(model, prompt, logits_processor=processors) for prompt in PROMPTS]
    assert generated(model, logits_processor=processors)[0] == expected
    configure(begin_suppress_tokens=[new[0]])
    first = [SuppressTokensAtBeginLogitsProcessor([new[3]], len(PROMPTS[0]))]
    assert greedy(model, PROMPTS[0], logits_processor=first) == plain[0][0]
    assert generated(model, None, PROMPTS[:1], logits_processor=first)[0] == plain[0][:1]


# Hostile values -------------------------------------------------------------------------------------------------------

NUMBERS = [None, True, -1, 0, 2, 2**63 - 1, 2**70, 0.5, -0.5, math.nan, math.inf]
LISTS = [[], [None], ["x"], [-1], [[]], [[-1]], [VOCAB], [[VOCAB]], [[3], 1.0], (1, 2)]
BIASES = [[[[3], 1.0]], [[[3], math.nan]], [[[VOCAB], 1.0]], {}, {(3,): math.inf}]
HOSTILE = [*NUMBERS, *LISTS, *BIASES, "x", b"x", object(), torch.ones(2)]


@pytest.mark.filterwarnings("ignore::UserWarning")  # transformers warns of such values
@pytest.mark.parametrize("name", [*SERVED, *SAMPLED, "stop_strings", *REFUSED, *SAMPLED_REFUSED])
def test_hostile_values_are_refused_by_name(model, configure, name):
    """A call returns model.generate's text or names the field."""
    for value in HOSTILE:
        fields = {} if name in (*SERVED, *REFUSED) else {"do_sample": True, "top_k": 0}
        configure(**{"eos_token_id": [5], **fields, name: value})
        try:
            text = generated(model, None, PROMPTS[:1], 3, tokenizer=Words())[0]
        except ValueError as error:
            assert name in str(error), value
            continue
        try:
            expected = [greedy(model, PROMPTS[0], 3)]
        except (ValueError, TypeError):
            continue
        assert "do_sample" in fields or text == expected, value
