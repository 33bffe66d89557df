"""transformers' continuous batching (`generate_batch`) over its own paged cache, with our attention in it."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from continuous_case import COUNT, IS_5, batched, configs, known_memory  # noqa: F401
from generate_case import MODELS, greedy, prompts_of, tiny_of
from transformers import AttentionInterface

from pagedtree.integrations.transformers import continuous_batching, continuous_cache
from pagedtree.integrations.transformers.continuous_batching import paged_attention_forward
from pagedtree.integrations.transformers.continuous_cache import attend_continuous

pytestmark = pytest.mark.usefixtures("one_thread")

STOCK = "paged|eager" if IS_5 else "eager_paged"
LENGTHS = (5, 17, 1, 33, 80)
SAMPLING = {"do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.9}


@pytest.fixture
def calls(monkeypatch):
    """The query's shape and the page size in every call of the op by continuous batching."""
    calls = []
    op = continuous_cache.tree_attention

    def recorded(q, k_cache, *args, **kwargs):
        calls.append((q.shape[0], k_cache.shape[1]))
        return op(q, k_cache, *args, **kwargs)

    monkeypatch.setattr(continuous_cache, "tree_attention", recorded)
    return calls


def stock(model, prompts, **options):
    previous = model.config._attn_implementation
    model.set_attn_implementation(STOCK)
    texts = batched(model, prompts, **options)
    model.set_attn_implementation(previous)
    return texts


@pytest.mark.parametrize(
    ("name", "page_size", "max_batch_tokens"),
    [
        *((name, 16, 64) for name in MODELS),
        *(pytest.param(name, 5, 23, marks=pytest.mark.slow) for name in MODELS),
    ],
)
def test_text_is_that_of_the_model(name, page_size, max_batch_tokens, calls):
    """Prompts of different lengths join, are read in chunks, and leave."""
    if not IS_5 and name == "softcap":
        pytest.skip("transformers 4.57 gives no text to compare with: a wrong window, and no softcap")
    model, prompts = tiny_of(name), prompts_of(LENGTHS)
    previous = model.config._attn_implementation
    sizes = {"page_size": page_size, "max_batch_tokens": max_batch_tokens}
    expected = [greedy(model, prompt, COUNT)[len(prompt) :] for prompt in prompts]
    if not IS_5 and name != "full":  # transformers 4.57 reads a window's ring buffer from a wrong slot on
        expected = stock(model, prompts, **sizes)
    elif name != "softcap":  # transformers' own paged attention leaves the softcap out
        assert expected == stock(model, prompts, **sizes)
    with continuous_batching(model):
        assert batched(model, prompts, **sizes) == expected
    assert model.config._attn_implementation == previous
    # Every layer, and pages in place where the layer sees everything.
    assert len(calls) % 2 == 0 and len(calls) >= 2 * COUNT
    assert {size for _, size in calls} == {"full": {page_size}, "window": {1}}.get(name, {1, page_size})
    assert max(tokens for tokens, _ in calls) <= max_batch_tokens


@pytest.mark.skipif(not IS_5, reason="transformers 4.57 shares no pages")
def test_requests_that_share_pages(calls):
    model = tiny_of("full")
    common, *ends = prompts_of((48, 3, 7, 1))
    prompts = [torch.cat([common, end]) for end in ends] + [common]
    options = {"max_batch_tokens": 60, "num_return_sequences": 2, **SAMPLING}
    expected = stock(model, prompts, **options)
    with continuous_batching(model):
        assert batched(model, prompts, **options) == expected
    rows = sum(tokens for tokens, _ in calls) // 2
    assert len(expected) == 8 and rows < sum(map(len, prompts)) + len(expected) * (COUNT - 1)


def test_the_name_is_lent(calls):
    """Outside the block, also after an error in it, transformers' own function has its name."""
    model = tiny_of("full")
    before, previous = AttentionInterface().get(STOCK), model.config._attn_implementation
    with pytest.raises(KeyError, match="mine"), continuous_batching(model):
        raise KeyError("mine")
    assert AttentionInterface().get(STOCK) is before and model.config._attn_implementation == previous
    stock(model, prompts_of((5,)))
    assert not calls


def test_blocks_that_overlap(calls):
    models, before = [tiny_of("full"), tiny_of("window")], AttentionInterface().get(STOCK)
    blocks = [continuous_batching(model) for model in models]
    for block in blocks:
        block.__enter__()
    blocks[0].__exit__(None, None, None)
    batched(models[1], prompts_of((5,)))
    assert len(calls) >= 2 * COUNT
    blocks[1].__exit__(None, None, None)
    assert AttentionInterface().get(STOCK) is before


@pytest.mark.skipif(not IS_5, reason="transformers 4.57 takes any name")
def test_the_name_taken_by_hand(calls):
    before = AttentionInterface()["paged|eager"]
    AttentionInterface.register("paged|eager", paged_attention_forward)
    try:
        model, prompts = tiny_of("full", attn_implementation="paged|eager"), prompts_of((5, 40))
        texts = batched(model, prompts)
    finally:
        AttentionInterface.register("paged|eager", before)
    assert len(calls) == 2 * COUNT
    assert texts == [greedy(tiny_of("full"), prompt, COUNT)[len(prompt) :] for prompt in prompts]


@pytest.mark.skipif(not IS_5, reason="transformers 4.57 takes any name")
def test_refused_by_transformers_without_the_block():
    model = tiny_of("full", attn_implementation="pagedtree")
    with pytest.raises(ValueError, match="pagedtree is not supported for continuous batching"):
        batched(model, prompts_of((5,)))


@pytest.mark.skipif(not IS_5, reason="transformers 4.57 needs no other name")
def test_ordinary_passes_under_the_paged_name_are_refused():
    model = tiny_of("full")
    with continuous_batching(model), pytest.raises(ValueError, match="expected a pass of continuous batching, got an"):
        model(torch.ones(1, 3, dtype=torch.int64))


def test_models_and_caches_that_are_refused():
    with pytest.raises(ValueError, match="expected evaluation mode"), continuous_batching(tiny_of("full").train()):
        pass
    states = torch.zeros(1, 2, 3, 64)
    with pytest.raises(ValueError, match=r"expected the cache of transformers 4.57 or 5.23, got .*object"):
        attend_continuous(0, states, states, states, 0, {}, {"cache": object()})
    with pytest.raises(ValueError, match="expected read and write indices, got a block_table"):
        attend_continuous(0, states, states, states, 0, {}, {"cache": object(), "block_table": states})
