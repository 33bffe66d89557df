"""`generate` over a paged cache: the text is the model's own, whatever drafts, pages, batch and evictions do.

The engine runs here on the backend of the CPU in fp32; the ops have their own tests on every backend.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")

from block_case import block_model
from generate_case import (
    LENGTHS,
    NEW_TOKENS,
    SAMPLING,
    VOCAB,
    Hostile,
    Oracle,
    common_prefix,
    greedy,
    lists,
    prompts_of,
    seeded,
    tiny,
    tiny_eagle,
    tiny_of,
)

from pagedtree import SamplingParams
from pagedtree.generation import decode_step
from pagedtree.integrations.transformers import (
    BlockDrafter,
    CombinedDrafter,
    EagleDrafter,
    MedusaDrafter,
    MedusaHeads,
    ModelDrafter,
    NgramDrafter,
    PagedCache,
    generate,
    medusa_tree,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model():
    return tiny(0)


@pytest.fixture(scope="module")
def draft_model():
    return tiny(1, num_hidden_layers=1)


@pytest.fixture(scope="module")
def texts(model):
    return [greedy(model, prompt) for prompt in prompts_of(LENGTHS)]


@pytest.fixture(scope="module")
def seeded_texts(model):
    return [seeded(model, prompt, seed) for seed, prompt in enumerate(prompts_of(LENGTHS))]


@pytest.fixture(scope="module")
def drafters(model, draft_model, texts, seeded_texts):
    heads = MedusaHeads(128, 3, model.lm_head)
    torch.nn.init.normal_(heads.weight, std=0.05, generator=torch.Generator().manual_seed(3))
    block, known = block_model(model), [*texts, *seeded_texts]
    return {
        "none": lambda: None,
        "ngram chain": lambda: NgramDrafter(6, max_branches=1),
        "ngram tree": lambda: NgramDrafter(12, remember=4),
        "medusa": lambda: MedusaDrafter(heads, medusa_tree(3, 10)),
        "medusa, best first": lambda: MedusaDrafter(heads, 10),
        "EAGLE": lambda: EagleDrafter(tiny_eagle(model), num_nodes=10, depth=3, width=3),
        "draft model": lambda: ModelDrafter(draft_model, num_nodes=12, depth=3, width=3),
        "draft chain": lambda: ModelDrafter(draft_model, num_nodes=5, depth=4, width=1, max_batch_tokens=8),
        "block": lambda: BlockDrafter(block, num_nodes=12, width=4),
        "block chain": lambda: BlockDrafter(block, num_nodes=4, width=1),
        "combined": lambda: CombinedDrafter(
            ModelDrafter(draft_model, num_nodes=9, depth=3, width=2), NgramDrafter(6, max_branches=2), min_match=2
        ),
        "itself": lambda: ModelDrafter(model, num_nodes=12, depth=4, width=2),
        "oracle": lambda: Oracle(known, hit=0.8),
        "never right": lambda: Oracle(known, hit=0.0),
        "hostile": Hostile,
    }


NAMES = (
    "none", "ngram chain", "ngram tree", "medusa", "medusa, best first", "EAGLE", "draft model", "draft chain",
    "block", "block chain", "combined", "itself", "oracle", "never right", "hostile",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("page_size", [1, 7, 16])
def test_greedy_text_is_the_models_own(model, texts, drafters, name, page_size):
    sequences, stats = generate(
        model, prompts_of(LENGTHS), drafter=drafters[name](), max_new_tokens=NEW_TOKENS, page_size=page_size
    )
    assert lists(sequences) == texts
    assert stats.num_tokens == NEW_TOKENS * len(LENGTHS)
    assert all(sequence.finish_reason == "length" for sequence in stats.sequences)
    if name in ("oracle", "itself"):
        assert stats.mean_accepted > 1.0 and stats.steps < NEW_TOKENS / 1.5
    if name in ("none", "never right"):
        assert stats.steps == NEW_TOKENS


@pytest.mark.parametrize("name", NAMES)
def test_seeded_text_is_that_of_plain_sampling(model, seeded_texts, drafters, name):
    sequences, stats = generate(
        model, prompts_of(LENGTHS), drafter=drafters[name](), max_new_tokens=NEW_TOKENS, params=SAMPLING, page_size=7
    )
    assert lists(sequences) == seeded_texts
    if name == "oracle":
        assert stats.mean_accepted > 1.0


@given(data=st.data())
@settings(max_examples=15)
def test_any_mix_of_settings(model, drafters, data):
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4), "lengths")
    name = data.draw(st.sampled_from(NAMES[1:12]), "drafter")
    page_size = data.draw(st.integers(1, 20), "page_size")
    count = data.draw(st.integers(1, 14), "max_new_tokens")
    n = data.draw(st.integers(1, 3), "n")
    prompts = prompts_of(lengths, seed=data.draw(st.integers(0, 3), "prompts"))
    params = data.draw(st.sampled_from([None, SAMPLING]), "params")
    options = {"max_new_tokens": count, "params": params, "n": n}
    drafter = drafters[name]()
    num_pages = -(-(max(lengths) + count - 2 + drafter.max_nodes) // page_size) + data.draw(st.integers(0, 9), "pages")
    sequences, stats = generate(
        model, prompts, drafter=drafter, page_size=page_size, num_pages=num_pages,
        max_batch_tokens=data.draw(st.integers(1, 60), "max_batch_tokens"),
        max_sequences=data.draw(st.none() | st.integers(1, 4), "max_sequences"),
        share_prefix=data.draw(st.booleans(), "share_prefix"), **options,
    )  # fmt: skip
    assert stats.peak_pages <= num_pages
    for b, prompt in enumerate(prompts):
        plain, _ = generate(model, [prompt], seeds=range(b * n, (b + 1) * n), share_prefix=False, **options)
        assert lists(sequences[b * n : (b + 1) * n]) == lists(plain)


def test_slots_without_live_tokens_are_never_read(model, texts, seeded_texts, monkeypatch, drafters):
    layer = PagedCache.layer

    def poisoned(cache, index, k, v):
        is_new = index not in cache._layers
        pair = layer(cache, index, k, v)
        for tensor in pair if is_new else ():
            tensor.fill_(float("nan"))
        return pair

    monkeypatch.setattr(PagedCache, "layer", poisoned)
    for name in ("none", "ngram tree", "block", "itself", "oracle"):
        sequences, _ = generate(model, prompts_of(LENGTHS), drafter=drafters[name](), max_new_tokens=NEW_TOKENS, n=2)
        assert lists(sequences[::2]) == texts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_differs_only_where_logits_are_nearly_tied(dtype):
    half = tiny(0).to(dtype)
    prompts = prompts_of(LENGTHS)
    plain, _ = generate(half, prompts, max_new_tokens=NEW_TOKENS)
    drafted, stats = generate(half, prompts, drafter=Oracle(lists(plain), 0.9), max_new_tokens=NEW_TOKENS)
    assert stats.mean_accepted > 1.0
    for a, b in zip(lists(plain), lists(drafted), strict=True):
        same = common_prefix(a, b)
        if same < len(a):
            with torch.no_grad():
                top = half(torch.tensor([a[:same]])).logits[0, -1].float().topk(2).values
            assert top[0] - top[1] < 0.05 * top.abs().max()


def test_batch_composition_and_seeds(model, seeded_texts):
    prompts = prompts_of(LENGTHS)
    order = [2, 0, 3]
    sequences, _ = generate(
        model, [prompts[i] for i in order], drafter=NgramDrafter(8), max_new_tokens=NEW_TOKENS, params=SAMPLING,
        seeds=order,
    )  # fmt: skip
    assert lists(sequences) == [seeded_texts[i] for i in order]


def test_parameters_of_each_prompt(model):
    prompts = prompts_of(LENGTHS[:2])
    temperature = torch.tensor([0.0, 1.5])
    sequences, _ = generate(model, prompts, max_new_tokens=8, params=SamplingParams(temperature=temperature), n=2)
    expected = [
        seeded(model, prompts[i // 2], i, SamplingParams(temperature=float(temperature[i // 2])), 8) for i in range(4)
    ]
    assert lists(sequences) == expected


@pytest.mark.parametrize("name", NAMES)
def test_eviction_and_restoration_leave_the_text_alone(model, texts, drafters, name):
    drafter = drafters[name]()
    max_nodes = getattr(drafter, "max_nodes", 11)
    num_pages = (max(LENGTHS) + NEW_TOKENS + max_nodes) // 7 + 4
    sequences, stats = generate(
        model, prompts_of(LENGTHS), drafter=drafter, max_new_tokens=NEW_TOKENS, page_size=7, num_pages=num_pages,
        max_batch_tokens=16,
    )  # fmt: skip
    assert lists(sequences) == texts
    assert stats.evictions > 0 and stats.restored_tokens > 0
    assert stats.peak_pages <= num_pages == stats.num_pages


@pytest.mark.parametrize("name", NAMES)
def test_sequences_wait_for_a_place(model, texts, drafters, name):
    drafter, together = drafters[name](), []
    for count in (1, 2):
        sequences, stats = generate(
            model, prompts_of(LENGTHS), drafter=drafter, max_new_tokens=NEW_TOKENS, max_sequences=count,
            on_step=lambda step: together.append(len(step.sequences)),
        )  # fmt: skip
        assert lists(sequences) == texts
        assert max(together) == count and stats.evictions == 0
        outcomes, _ = generate(
            model, prompts_of(LENGTHS), drafter=drafter, max_new_tokens=NEW_TOKENS, max_sequences=count, n=2
        )
        assert lists(outcomes) == [text for text in texts for _ in range(2)]


def test_eviction_of_sampled_outcomes_that_share_pages(model, seeded_texts, drafters):
    prompts = prompts_of(LENGTHS)
    seeds = [0, 100, 101, 1, 102, 103, 2, 104, 105, 3, 106, 107]
    options = {"max_new_tokens": NEW_TOKENS, "params": SAMPLING, "n": 3, "seeds": seeds, "page_size": 7}
    plain, _ = generate(model, prompts, **options)
    assert lists(plain[::3]) == seeded_texts
    for name in ("none", "ngram tree", "draft model", "block"):
        sequences, stats = generate(model, prompts, drafter=drafters[name](), num_pages=18, **options)
        assert lists(sequences) == lists(plain)
        assert stats.evictions > 0


def test_sequences_restore_while_others_decode(model):
    prompts = prompts_of((9, 4, 13, 6, 8, 11, 3))
    mixed = []

    def watch(result):
        restored = any(sequence.was_evicted for sequence in result.sequences[: result.num_read])
        mixed.append(restored and result.num_read < len(result.sequences))

    options = {"drafter": NgramDrafter(4), "max_new_tokens": NEW_TOKENS, "page_size": 4}
    sequences, _ = generate(model, prompts, num_pages=17, on_step=watch, **options)
    assert any(mixed)
    assert lists(sequences) == lists(generate(model, prompts, **options)[0])


@pytest.mark.parametrize("drafter", [None, NgramDrafter(8)])
def test_prompt_that_never_fits(model, drafter):
    nodes = 8 if drafter else 1
    needed = -(-(33 + NEW_TOKENS - 2 + nodes) // 4)
    with pytest.raises(ValueError, match=rf"num_pages: expected at least {needed} pages .* got {needed - 1}"):
        generate(
            model, prompts_of(LENGTHS), drafter=drafter, max_new_tokens=NEW_TOKENS, page_size=4, num_pages=needed - 1
        )
    generate(model, prompts_of(LENGTHS), drafter=drafter, max_new_tokens=NEW_TOKENS, page_size=4, num_pages=needed)


def test_undeclared_trees_that_never_fit(model, texts):
    with pytest.raises(ValueError, match=r"num_pages: expected at least 16 pages .* a tree of 11 nodes"):
        generate(
            model, prompts_of(LENGTHS), drafter=Oracle(texts, 1.0), max_new_tokens=NEW_TOKENS, page_size=4,
            num_pages=15,
        )  # fmt: skip


@pytest.mark.parametrize("max_batch_tokens", [1, 8, 40])
def test_prompts_in_chunks(model, texts, max_batch_tokens):
    sequences, _ = generate(
        model, prompts_of(LENGTHS), drafter=NgramDrafter(4), max_new_tokens=NEW_TOKENS, page_size=3,
        max_batch_tokens=max_batch_tokens,
    )  # fmt: skip
    assert lists(sequences) == texts


@pytest.mark.parametrize("name", ["none", "oracle", "itself", "medusa"])
def test_eos_ends_a_sequence(model, texts, drafters, name):
    eos = [texts[0][5 + 7], texts[3][33 + 2]]
    sequences, stats = generate(
        model, prompts_of(LENGTHS), drafter=drafters[name](), max_new_tokens=NEW_TOKENS, eos_token_id=eos
    )
    for text, length, sequence, found in zip(texts, LENGTHS, lists(sequences), stats.sequences, strict=True):
        stop = next((i for i in range(length, len(text)) if text[i] in eos), None)
        assert sequence == (text if stop is None else text[: stop + 1])
        assert found.finish_reason == ("length" if stop is None else "eos")
        assert found.num_tokens == len(sequence) - length


def test_eos_of_the_generation_config_and_none(model, texts):
    eos = texts[1][17 + 3]
    model.generation_config.eos_token_id = eos
    try:
        sequences, _ = generate(model, prompts_of(LENGTHS)[1:2], max_new_tokens=NEW_TOKENS)
        unstopped, _ = generate(model, prompts_of(LENGTHS)[1:2], max_new_tokens=NEW_TOKENS, eos_token_id=[])
    finally:
        model.generation_config.eos_token_id = None
    assert lists(sequences) == [texts[1][: texts[1].index(eos, 17) + 1]]
    assert lists(unstopped) == [texts[1]]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("name", ["none", "oracle", "itself"])
def test_max_new_tokens_is_exact(model, texts, drafters, name, count):
    sequences, _ = generate(model, prompts_of(LENGTHS), drafter=drafters[name](), max_new_tokens=count)
    assert lists(sequences) == [text[: length + count] for text, length in zip(texts, LENGTHS, strict=True)]


def test_a_tensor_gives_what_the_model_gives(model):
    torch.manual_seed(7)
    input_ids = torch.randint(1, VOCAB, (3, 9))
    mask = torch.ones_like(input_ids)
    mask[0, :4] = mask[2, :1] = 0
    eos = greedy(model, input_ids[1], 5)[-1]
    options = {"attention_mask": mask, "max_new_tokens": 12, "eos_token_id": eos}
    expected = model.generate(input_ids, do_sample=False, pad_token_id=eos, **options)
    sequences, stats = generate(model, input_ids, drafter=NgramDrafter(8), **options)
    assert torch.equal(sequences, expected)
    assert stats.sequences[1].finish_reason == "eos"


def test_callback_streams_in_order(model, texts):
    events = []
    sequences, stats = generate(
        model, prompts_of(LENGTHS), drafter=Oracle(texts, 0.8), max_new_tokens=NEW_TOKENS,
        callback=lambda sequence, tokens: events.append((sequence, tokens)),
    )  # fmt: skip
    for b, sequence in enumerate(lists(sequences)):
        assert [token for index, tokens in events if index == b for token in tokens] == sequence[LENGTHS[b] :]
    assert all(tokens for _, tokens in events)
    descents = sum(1 for (a, _), (b, _) in pairwise(events) if b <= a)
    assert descents == stats.steps - 1


def test_n_outcomes_share_the_prompts_pages(model):
    page_size, length, n = 8, 50, 4
    prompt = prompts_of([length], seed=5)
    options = {"max_new_tokens": 10, "params": SAMPLING, "page_size": page_size}
    sequences, stats = generate(model, prompt, n=n, **options)
    assert lists(sequences) == [seeded(model, prompt[0], seed, count=10) for seed in range(n)]
    shared = (length - 1) // page_size
    total = -(-(length + 9) // page_size)
    # No page of the shared prompt is taken, or filled, more than once; the tokens past it are computed by each.
    assert stats.pages_taken == stats.peak_pages == shared + n * (total - shared)
    assert stats.packed_tokens == length + (n - 1) * (length - shared * page_size) + n * 9


@pytest.mark.parametrize("name", ["none", "ngram tree", "draft model", "oracle"])
def test_reading_the_shared_prefix_once_changes_nothing(model, drafters, texts, name):
    prompts = prompts_of(LENGTHS)
    options = {"max_new_tokens": NEW_TOKENS, "n": 3, "page_size": 7}
    for share_prefix in (True, False, None):
        sequences, stats = generate(model, prompts, drafter=drafters[name](), share_prefix=share_prefix, **options)
        assert lists(sequences) == [text for text in texts for _ in range(3)]
        assert (stats.shared_prefix_steps > 0) == (share_prefix is True)


@pytest.mark.parametrize("broken", ["compaction", "positions", "mask"])
def test_each_part_is_needed(model, texts, monkeypatch, broken):
    """Negative controls: an engine without one of its parts gives other text."""
    if broken == "compaction":
        monkeypatch.setattr(decode_step, "compact_kv", lambda *args: None)
    elif broken == "positions":
        prepare_step = decode_step.prepare_step

        def linear(trees, table, start, page_size, *, total_q):
            _, *rest = prepare_step(trees, table, start, page_size, total_q=total_q)
            sizes = trees.cu_nodes.diff()
            positions = [start[b] + torch.arange(int(sizes[b])) for b in range(len(sizes))]
            return torch.cat([*positions, torch.empty(0)]).long(), *rest

        monkeypatch.setattr(decode_step, "prepare_step", linear)
    else:
        paged_step = decode_step.PagedStep

        def causal(cache, table, seq_lens, cu_seqlens_q, slots, tree_mask, tree_lens, max_seqlen_q):
            return paged_step(cache, table, seq_lens, cu_seqlens_q, slots, None, None, max_seqlen_q)

        monkeypatch.setattr(decode_step, "PagedStep", causal)
    sequences, _ = generate(model, prompts_of(LENGTHS), drafter=Oracle(texts, 0.8), max_new_tokens=NEW_TOKENS)
    assert all(tokens != text for tokens, text in zip(lists(sequences)[:2], texts, strict=False))


@pytest.mark.parametrize("kind", ["window", "softcap", "sinks"])
@pytest.mark.parametrize("name", ["none", "ngram tree", "oracle"])
def test_other_attention_layers(kind, name):
    other = tiny_of(kind)
    prompts = prompts_of(LENGTHS)
    expected = [greedy(other, prompt) for prompt in prompts]
    drafter = {"none": None, "ngram tree": NgramDrafter(12), "oracle": Oracle(expected, 0.8)}[name]
    sequences, stats = generate(
        other, prompts, drafter=drafter, max_new_tokens=NEW_TOKENS, page_size=4, n=2, share_prefix=True
    )
    assert lists(sequences) == [text for text in expected for _ in range(2)]
    # Windowed layers read all pages themselves; those without one still share.
    assert stats.shared_prefix_steps > 0
