"""`model.generate(**OURS)` returns the text, or the distribution, of `model.generate` alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

import transformers
from support.drafters import Oracle
from support.models import SAMPLING, VOCAB, sampled, tiny, words
from transformers import DynamicCache, dynamic_module_utils
from transformers.generation import MaxTimeCriteria, TopPLogitsWarper

from pagedtree import reference
from pagedtree.generation.drafters import NgramDrafter
from pagedtree.integrations.transformers import ModelDrafter, custom_generate, tree_generate
from pagedtree.integrations.transformers.logits_processors import read_processors

pytestmark = pytest.mark.usefixtures("one_thread")

COUNT = 14
GREEDY = {"max_new_tokens": COUNT, "do_sample": False}
OURS = {"custom_generate": tree_generate}
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def model():
    return tiny(0, pad_token_id=0)


@pytest.fixture(scope="module")
def batch():
    """Prompts of 12, 4 and 1 tokens, padded at the left."""
    torch.manual_seed(1)
    input_ids = torch.randint(1, VOCAB, (3, 12))
    mask = torch.ones_like(input_ids)
    mask[1, :8] = mask[2, :11] = 0
    return {"input_ids": input_ids.masked_fill(mask == 0, 0), "attention_mask": mask}


@pytest.fixture(scope="module")
def drafters(model, batch):
    text = model.generate(**batch, **GREEDY)
    rows = [row[start:].tolist() for row, start in zip(text, (batch["attention_mask"] == 0).sum(1), strict=True)]
    return {
        "none": lambda: None,
        "draft model": lambda: ModelDrafter(tiny(1, num_hidden_layers=1), num_nodes=10, depth=3, width=3),
        "oracle": lambda: Oracle(rows, hit=0.8),
    }


@pytest.mark.parametrize("name", ["none", "oracle"])
def test_greedy_matches_model_generate(model, batch, drafters, name):
    """Also with EOS tokens inside an accepted path, and with lengths."""
    text, records = model.generate(**batch, **GREEDY), []
    options = {"drafter": drafters[name](), "page_size": 7, "on_stats": records.append}
    assert torch.equal(model.generate(**batch, **GREEDY, **OURS, **options), text)
    assert records[0].num_tokens == 3 * COUNT and (name == "none" or records[0].mean_accepted > 1.0)
    eos = [int(text[0, 12 + 5]), int(text[2, 12 + 2])]
    for options in ({"eos_token_id": eos, "pad_token_id": 7, "max_length": 12 + COUNT}, {"max_new_tokens": 1}):
        options = {**batch, **options, "do_sample": False, "return_dict_in_generate": True}
        expected = model.generate(**options).sequences
        got = model.generate(**options, **OURS, drafter=drafters[name]()).sequences
        assert torch.equal(got, expected)


@pytest.mark.parametrize("name", ["none", "draft model"])
def test_sampled_text_is_that_of_the_seeds(model, batch, drafters, name):
    prompts = [ids[mask.bool()] for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    options = {"do_sample": True, "temperature": SAMPLING.temperature, "top_p": SAMPLING.top_p, "top_k": 0}
    ours = {**OURS, "drafter": drafters[name](), "seeds": [4, 5, 6]}
    text = model.generate(**batch, **options, max_new_tokens=COUNT, **ours)
    for row, seed, prompt in zip(text, (4, 5, 6), prompts, strict=True):
        assert row[12 - len(prompt) :].tolist() == sampled(model, prompt, seed, count=COUNT)


def test_seeds_come_from_torch(model, batch):
    def text(seed):
        torch.manual_seed(seed)
        options = {"max_new_tokens": COUNT, "do_sample": True, "num_return_sequences": 2}
        return model.generate(**batch, **options, **OURS, drafter=NgramDrafter(8))

    first = text(0)
    assert first.shape == (6, 12 + COUNT) and torch.equal(first, text(0))
    assert not torch.equal(first, text(1)) and not torch.equal(first[0], first[1])


FILTERS = [
    {"temperature": 0.7, "top_k": 0},
    {"top_k": 9},
    {"temperature": 1.3, "top_k": 30, "top_p": 0.8},
    {"top_k": 0, "top_p": 0.6, "min_p": 0.15},
    {"top_k": 12, "min_p": 0.3, "temperature": 1.7},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_the_distribution_is_that_of_transformers(model, batch, filters, monkeypatch):
    options = {**batch, **filters, "do_sample": True, "max_new_tokens": 1}
    out = model.generate(**options, return_dict_in_generate=True, output_scores=True, output_logits=True)
    calls = []
    function = custom_generate.generate
    monkeypatch.setattr(custom_generate, "generate", lambda *a, **k: calls.append(k) or function(*a, **k))
    model.generate(**options, **OURS)
    (keywords,) = calls
    params = read_processors(keywords["logits_processor"], [[1]], None, [], VOCAB).on_params(keywords["params"])
    sampling = {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p", "filter_order")}
    for logits, scores in zip(out.logits[0], out.scores[0], strict=True):
        expected = torch.softmax(scores.double(), -1).numpy()
        got = reference.distribution(reference.clean_logits(logits), **sampling)
        np.testing.assert_allclose(got, expected, atol=1e-6)
        assert (expected == 0).any() or filters == FILTERS[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "expected greedy search or sampling, got beam_search"),
        ({"prompt_lookup_num_tokens": 3}, "expected greedy search or sampling, got assisted_generation"),
        ({"no_repeat_ngram_size": 2}, "those that draft trees can follow .*, got NoRepeatNGramLogitsProcessor"),
        ({"sequence_bias": {(3, 4): 1.0}}, r"sequence_bias: expected single tokens, .* got 1.0 for \[3, 4\]"),
        ({"do_sample": True, "top_k": 0, "typical_p": 0.5}, "got TypicalLogitsWarper"),
        ({"do_sample": True, "top_k": 5, "top_p": 0.5, "min_p": 0.1}, "top_k, top_p, min_p: expected at most two"),
        ({"do_sample": True, "top_k": 5, "logits_processor": [TopPLogitsWarper(0.5)]}, "order, got TopP.*, TopK"),
        ({"stopping_criteria": [MaxTimeCriteria(9.0)]}, "length and EOS, got MaxTimeCriteria"),
        ({"return_dict_in_generate": True, "output_scores": True}, "sequences alone as output, got output_scores"),
        ({"inputs_embeds": torch.zeros(3, 12, 128)}, "tokens and a mask, got inputs_embeds"),
        ({"position_ids": torch.arange(12).expand(3, 12) + 1}, "position_ids: expected those that the attention mask"),
        ({"seeds": [1], "do_sample": True}, "seeds: expected 3 integers"),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(value),
)
def test_refuses_options_without_verification(model, batch, options, message):
    options = {"do_sample": False, "max_new_tokens": 4, "drafter": NgramDrafter(4), **options}
    with pytest.raises(ValueError, match=message):
        model.generate(**batch, **options, **OURS)


def test_streamers_work_and_other_objects_are_refused(model, batch):
    """Streamers work and end after a refusal; other objects are refused."""

    def run(custom, **kept):
        streamers.append(transformers.TextIteratorStreamer(words(VOCAB), skip_prompt=True, timeout=5))
        model.generate(batch["input_ids"][:1], **GREEDY, **kept, streamer=streamers[-1], custom_generate=custom)

    streamers = []
    for custom in (None, tree_generate, lambda *args, **kwargs: tree_generate(*args, **kwargs)):
        run(custom)
    assert len({"".join(streamer) for streamer in streamers}) == 1
    refused = {"past_key_values": DynamicCache(config=model.config), "assistant_model": tiny(1), "synced_gpus": True}
    for name, value in refused.items():
        with pytest.raises(ValueError, match=f"{name}: expected "):
            run(tree_generate, **{name: value})
        assert not "".join(streamers[-1])


def test_text_alone_of_a_vision_model(batch):
    """transformers then makes empty outputs of the vision encoder."""
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
    config = transformers.LlavaConfig(text_config=tiny(0).config.to_dict(), vision_config=vision)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    options = {**batch, **GREEDY, "pad_token_id": 0}
    assert torch.equal(model.generate(**options, **OURS), model.generate(**options))


def test_stop_strings(model, batch, tmp_path, monkeypatch):
    """transformers passes no tokenizer to decoding loops, except to a folder's function, so it has another name."""
    tokenizer = words(VOCAB)
    options = {**batch, **GREEDY}
    text = model.generate(**options)
    expected = text.clone()
    stops = {int(expected[0, 15]), int(expected[1, 18])}
    ends = [next((i + 1 for i in range(12, len(row)) if int(row[i]) in stops), len(row)) for row in expected]
    for row, end in zip(expected, ends, strict=True):
        row[end:] = 0  # pad tokens
    assert len(set(ends)) > 1 and min(ends) <= 16
    expected = expected[:, : max(ends)]
    options["stop_strings"] = [f"w{token}" for token in stops]
    ours = {**OURS, "drafter": NgramDrafter(4)}
    assert torch.equal(model.generate(**options, **ours, stop_tokenizer=tokenizer), expected)
    for keywords in ({}, {"tokenizer": tokenizer}):
        with pytest.raises(ValueError, match="stop_strings: expected stop_tokenizer="):
            model.generate(**options, **ours, **keywords)
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path))
    load, records = {"custom_generate": str(EXAMPLES), "trust_remote_code": True}, []
    assert torch.equal(model.generate(**options, **load, tokenizer=tokenizer), expected)
    del options["stop_strings"]
    for keywords in ({}, {"drafter": NgramDrafter(6)}):
        assert torch.equal(model.generate(**options, **load, **keywords, on_stats=records.append), text)
    assert all(max(stats.accepted_histogram) > 0 for stats in records)
