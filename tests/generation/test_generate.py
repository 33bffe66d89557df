"""`generate` returns the model's own text for any drafter, page size, batch and evictions.

The engine runs on the CPU backend in fp32; the ops have tests on every backend.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.drafters import DISTINCT, NAMES, SEEDS, SUBJECTS, Oracle, cases, kinds
from support.models import (
    HYBRIDS,
    LATENTS,
    LENGTHS,
    NEW_TOKENS,
    SAMPLING,
    generated,
    greedy,
    prompts_of,
    sampled,
    tiny,
    tiny_of,
)

from pagedtree.generation.drafters import NgramDrafter
from pagedtree.generation.fixed_step import FixedStep
from pagedtree.integrations.transformers import ModelDrafter, tree_generate

SUBJECT = "full"


@pytest.fixture
def subject(kind):
    return SUBJECTS[kind]


@cache
def other_model(kind, name):
    model = SUBJECTS[kind].make(name)
    return model, [greedy(model, prompt) for prompt in prompts_of(LENGTHS)]


def twice(texts):
    return [text for text in texts for _ in range(2)]


PAGE_SIZES = {"full": [1, 16], "hybrid": [1], "latent": [7]}  # tests below cover 7 with seeds and evictions


@pytest.mark.each_value
@pytest.mark.parametrize(("kind", "name", "page_size"), cases(NAMES, PAGE_SIZES))
def test_greedy_matches_model_generate(subject, name, page_size):
    texts, stats = generated(subject.model, subject.drafter(name), page_size=page_size)
    assert texts == subject.texts
    assert stats.num_tokens == NEW_TOKENS * len(LENGTHS)
    assert all(sequence.finish_reason == "length" for sequence in stats.sequences)
    if name in ("oracle", "itself"):
        assert stats.mean_accepted > 1.0 and stats.steps < NEW_TOKENS / 1.5
    if name in ("none", "never right"):
        assert stats.steps == NEW_TOKENS


@pytest.mark.parametrize(("kind", "name"), cases(DISTINCT))
def test_seeded_text_is_that_of_plain_sampling(subject, name):
    """Evicted texts are read again."""
    drafter = subject.drafter(name)
    num_pages = (max(LENGTHS) + NEW_TOKENS + getattr(drafter, "max_nodes", 11)) // 7 + 4
    few = {"page_size": 7, "num_pages": num_pages, "max_batch_tokens": 16}
    texts, stats = generated(subject.model, drafter, params=SAMPLING, **few)
    assert texts == subject.seeded_texts
    assert stats.evictions > 0 and stats.restored_tokens > 0
    assert stats.peak_pages <= num_pages == stats.num_pages
    if name == "oracle":
        assert stats.mean_accepted > 1.0


OTHERS = {
    "hybrid": [name for name in HYBRIDS if name != "qwen3_next"],
    "latent": [name for name in LATENTS if name not in ("deepseek_v3", "mistral4")],
}


@pytest.mark.parametrize(("kind", "name"), cases(OTHERS))
def test_text_of_other_models(kind, name):
    """Outcomes share pages, and evicted ones resume."""
    other, expected = other_model(kind, name)
    texts, stats = generated(other, Oracle(expected, 0.8), page_size=7, n=2, num_pages=14)
    assert texts == twice(expected) and stats.mean_accepted > 1.0
    assert stats.evictions > 0 and stats.restored_tokens > 0


FIXED = {"hybrid": ["qwen3_next", "nemotron_h", "falcon_h1", "lfm2"], "latent": ["deepseek_v3"]}


@pytest.mark.parametrize(("kind", "name"), cases(FIXED))
def test_a_step_in_fixed_buffers(kind, name, monkeypatch):
    """Evictions change the index of a sequence's states between steps."""
    monkeypatch.setattr(FixedStep, "captures", False)
    other, expected = other_model(kind, name)
    drafter = ModelDrafter(tiny(1, num_hidden_layers=1), num_nodes=12, depth=3, width=3)
    texts, stats = generated(other, drafter, cuda_graph=True, n=2, page_size=7, num_pages=14)
    assert texts == twice(expected) and stats.evictions > 0


@pytest.mark.parametrize("kind", kinds("full", "hybrid"))
@given(data=st.data())
@settings(max_examples=6)
def test_any_mix_of_settings(subject, kind, data):
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4), "lengths")
    names = [name for name in NAMES[kind] if name not in ("none", "oracle", "never right", "hostile")]
    name = data.draw(st.sampled_from(names), "drafter")
    page_size = data.draw(st.integers(1, 20), "page_size")
    count = data.draw(st.integers(1, 14), "max_new_tokens")
    n = data.draw(st.integers(1, 3), "n")
    prompts = prompts_of(lengths, seed=data.draw(st.integers(0, 3), "prompts"))
    params = data.draw(st.sampled_from([None, SAMPLING]), "params")
    options = {"count": count, "params": params, "n": n}
    model, drafter = subject.model, subject.drafter(name)
    num_pages = -(-(max(lengths) + count - 2 + drafter.max_nodes) // page_size) + data.draw(st.integers(0, 9), "pages")
    limits = {"page_size": page_size, "num_pages": num_pages, "share_prefix": data.draw(st.booleans(), "share_prefix")}
    limits["max_batch_tokens"] = data.draw(st.integers(1, 60), "max_batch_tokens")
    limits["max_sequences"] = data.draw(st.none() | st.integers(1, 4), "max_sequences")
    texts, stats = generated(model, drafter, prompts, **limits, **options)
    assert stats.peak_pages <= num_pages
    for b, prompt in enumerate(prompts):
        rows = range(b * n, (b + 1) * n)
        assert texts[rows.start : rows.stop] == generated(model, None, [prompt], seeds=rows, **options)[0]


SHARED = {"full": ["ngram tree", "EAGLE", "draft model", "block"], "hybrid": ["ngram tree"], "latent": ["oracle"]}


@pytest.mark.parametrize(("kind", "name"), cases(SHARED))
def test_sampled_outcomes_that_share_pages(subject, name):
    """Shared tokens are read once."""
    options = {"params": SAMPLING, "n": 3, "seeds": SEEDS, "page_size": 7, "share_prefix": True}
    texts, stats = generated(subject.model, subject.drafter(name), **options)
    assert texts == subject.outcomes and stats.shared_prefix_steps > 0


@pytest.mark.parametrize("drafter", [None, NgramDrafter(8)])
def test_prompt_that_never_fits(model, texts, drafter):
    nodes = 8 if drafter else 1
    least = -(-(33 + NEW_TOKENS - 2 + nodes) // 4)
    with pytest.raises(ValueError, match=rf"num_pages: expected at least {least} pages .* got {least - 1}"):
        generated(model, drafter, page_size=4, num_pages=least - 1)
    generated(model, drafter, page_size=4, num_pages=least)

    with pytest.raises(ValueError, match=r"num_pages: expected at least 16 pages .* a tree of 11 nodes"):
        generated(model, Oracle(texts, 1.0), page_size=4, num_pages=15)


@pytest.mark.parametrize("kind", kinds("full", "hybrid"))
def test_n_outcomes_share_the_prompts_pages(subject):
    model, page_size, length, n = subject.model, 8, 50, 4
    prompt = prompts_of([length], seed=5)
    texts, stats = generated(model, None, prompt, 10, n=n, params=SAMPLING, page_size=page_size)
    assert texts == [sampled(model, prompt[0], seed, count=10) for seed in range(n)]
    shared = (length - 1) // page_size
    total = -(-(length + 9) // page_size)
    # Each shared page is allocated and filled once; each outcome computes the tokens past it.
    assert stats.pages_taken == stats.peak_pages == shared + n * (total - shared)
    assert stats.packed_tokens == length + (n - 1) * (length - shared * page_size) + n * 9


def test_a_shared_prefix_is_read_once_where_that_is_asked_for(model, texts):
    for share_prefix in (True, False, None):
        found, stats = generated(model, Oracle(texts, 0.8), n=2, page_size=7, share_prefix=share_prefix)
        assert found == twice(texts) and (stats.shared_prefix_steps > 0) == (share_prefix is True)


@pytest.mark.parametrize("kind", ["window", "softcap", "sinks"])
def test_other_attention_layers(kind):
    """Windowed layers read all pages; the others share."""
    other = tiny_of(kind)
    expected = [greedy(other, prompt) for prompt in prompts_of(LENGTHS)]
    texts, stats = generated(other, Oracle(expected, 0.8), page_size=4, n=2, share_prefix=True)
    assert texts == twice(expected) and stats.shared_prefix_steps > 0


@pytest.mark.parametrize("kind", kinds(*SUBJECTS))
def test_model_is_restored(subject):
    """Also within a call, and after a failure."""
    model, tokens, outputs = subject.model, prompts_of((9,))[0][None], []

    @torch.no_grad()
    def callback(*_):
        outputs.append(model(tokens).logits)
        if len(outputs) == 3:
            raise KeyError("stop")

    callback()
    with pytest.raises(KeyError, match="stop"):
        generated(model, None, tokens, 4, callback=callback)
    callback()
    for logits in outputs:
        torch.testing.assert_close(logits, outputs[0], rtol=1e-4, atol=1e-4)
    assert not any({"forward", "expand_kv"} & vars(module).keys() for module in model.modules())


@pytest.mark.parametrize("kind", kinds("hybrid", "latent"))
def test_other_ways_to_generate(subject):
    """The model's own `generate` on our attention expands latents to keys of 192 columns and values of 128."""
    assert greedy(subject.model, prompts_of(LENGTHS)[1], custom_generate=tree_generate) == subject.texts[1]
    served = subject.make()
    served.set_attn_implementation("pagedtree")
    assert [greedy(served, prompt) for prompt in prompts_of(LENGTHS)] == subject.texts
    assert greedy(served, prompts_of(LENGTHS)[1], custom_generate=tree_generate) == subject.texts[1]
