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

from generate_case import (
    LENGTHS,
    NEW_TOKENS,
    SAMPLING,
    VOCAB,
    Oracle,
    check_the_model_is_as_it_was,
    common_prefix,
    greedy,
    lists,
    prompts_of,
    seeded,
    tiny,
    tiny_of,
)
from hybrid_case import MODELS as HYBRIDS
from latent_case import MODELS as LATENTS
from subject_case import NAMES, SEEDS, SUBJECTS, cases, kinds

from pagedtree import SamplingParams
from pagedtree.generation import decode_step
from pagedtree.generation.fixed_step import FixedStep
from pagedtree.integrations.transformers import ModelDrafter, NgramDrafter, PagedCache, generate, tree_generate

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def subject(kind):
    return SUBJECTS[kind]


@pytest.fixture
def model():
    return SUBJECTS["full"].model


@pytest.fixture
def texts():
    return SUBJECTS["full"].texts


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("kind", "name", "page_size"), cases(NAMES, {"full": [1, 16], "hybrid": [1], "latent": [7]})
)  # pages of 7: also with seeds and with evictions, below
def test_greedy_text_is_the_models_own(subject, name, page_size):
    sequences, stats = generate(
        subject.model, prompts_of(LENGTHS), drafter=subject.drafter(name), max_new_tokens=NEW_TOKENS,
        page_size=page_size,
    )  # fmt: skip
    assert lists(sequences) == subject.texts
    assert stats.num_tokens == NEW_TOKENS * len(LENGTHS)
    assert all(sequence.finish_reason == "length" for sequence in stats.sequences)
    if name in ("oracle", "itself"):
        assert stats.mean_accepted > 1.0 and stats.steps < NEW_TOKENS / 1.5
    if name in ("none", "never right"):
        assert stats.steps == NEW_TOKENS


@pytest.mark.parametrize(("kind", "name"), cases(NAMES))
def test_seeded_text_is_that_of_plain_sampling(subject, name):
    sequences, stats = generate(
        subject.model, prompts_of(LENGTHS), drafter=subject.drafter(name), max_new_tokens=NEW_TOKENS, params=SAMPLING,
        page_size=7,
    )  # fmt: skip
    assert lists(sequences) == subject.seeded_texts
    if name == "oracle":
        assert stats.mean_accepted > 1.0


@pytest.mark.parametrize(
    ("kind", "name"),
    cases(
        {
            "hybrid": [name for name in HYBRIDS if name != "qwen3_next"],
            "latent": [name for name in LATENTS if name not in ("deepseek_v3", "mistral4")],
        }
    ),
)
def test_text_of_other_models(subject, name):
    """Also after evictions, when prompts and generated tokens are read again, and with outcomes that share pages."""
    other, prompts = subject.make(name), prompts_of(LENGTHS)
    expected = [greedy(other, prompt) for prompt in prompts]
    options = {"max_new_tokens": NEW_TOKENS, "page_size": 7}
    sequences, stats = generate(other, prompts, drafter=Oracle(expected, 0.8), **options)
    assert lists(sequences) == expected
    assert stats.mean_accepted > 1.0
    sequences, stats = generate(other, prompts, drafter=NgramDrafter(12), n=2, num_pages=14, **options)
    assert lists(sequences) == [text for text in expected for _ in range(2)]
    assert stats.evictions > 0 and stats.restored_tokens > 0


@pytest.mark.parametrize(
    ("kind", "name"),
    cases({"hybrid": ["qwen3_next", "nemotron_h", "falcon_h1", "lfm2"], "latent": ["deepseek_v3"]}),
)
def test_a_step_in_fixed_buffers(subject, name, monkeypatch):
    """Without evictions and with them, when sequences change the index of their states between steps."""
    monkeypatch.setattr(FixedStep, "captures", False)
    other, prompts = subject.make(name), prompts_of(LENGTHS)
    expected = [greedy(other, prompt) for prompt in prompts]
    drafter = ModelDrafter(tiny(1, num_hidden_layers=1), num_nodes=12, depth=3, width=3)
    for options in ({"drafter": NgramDrafter(12)}, {"drafter": drafter, "n": 2, "page_size": 7, "num_pages": 14}):
        sequences, stats = generate(other, prompts, max_new_tokens=NEW_TOKENS, cuda_graph=True, **options)
        assert lists(sequences) == [text for text in expected for _ in range(options.get("n", 1))]
    assert stats.evictions > 0


@pytest.mark.parametrize("kind", kinds("full", "hybrid"))
@given(data=st.data())
@settings(max_examples=8)
def test_any_mix_of_settings(subject, kind, data):
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4), "lengths")
    names = [name for name in NAMES[kind] if name not in ("none", "oracle", "never right", "hostile")]
    name = data.draw(st.sampled_from(names), "drafter")
    page_size = data.draw(st.integers(1, 20), "page_size")
    count = data.draw(st.integers(1, 14), "max_new_tokens")
    n = data.draw(st.integers(1, 3), "n")
    prompts = prompts_of(lengths, seed=data.draw(st.integers(0, 3), "prompts"))
    params = data.draw(st.sampled_from([None, SAMPLING]), "params")
    options = {"max_new_tokens": count, "params": params, "n": n}
    model, drafter = subject.model, subject.drafter(name)
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


def test_slots_without_live_tokens_are_never_read(model, texts, monkeypatch):
    layer = PagedCache.layer

    def poisoned(cache, index, k, v):
        is_new = index not in cache._layers
        pair = layer(cache, index, k, v)
        for tensor in pair if is_new else ():
            tensor.fill_(float("nan"))
        return pair

    monkeypatch.setattr(PagedCache, "layer", poisoned)
    for name in ("none", "ngram tree", "block", "itself", "oracle"):
        sequences, _ = generate(
            model, prompts_of(LENGTHS), drafter=SUBJECTS["full"].drafter(name), max_new_tokens=NEW_TOKENS, n=2
        )
        assert lists(sequences[::2]) == texts


@pytest.mark.parametrize(
    ("kind", "name"), cases({"full": [0], "hybrid": ["qwen3_next", "nemotron_h"], "latent": ["deepseek_v3, halves"]})
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_differs_only_where_logits_are_nearly_tied(subject, name, dtype):
    half = subject.make(name).to(dtype)
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


def test_batch_composition_and_seeds(model):
    prompts = prompts_of(LENGTHS)
    order = [2, 0, 3]
    sequences, _ = generate(
        model, [prompts[i] for i in order], drafter=NgramDrafter(8), max_new_tokens=NEW_TOKENS, params=SAMPLING,
        seeds=order,
    )  # fmt: skip
    assert lists(sequences) == [SUBJECTS["full"].seeded_texts[i] for i in order]


def test_parameters_of_each_prompt(model):
    prompts = prompts_of(LENGTHS[:2])
    temperature = torch.tensor([0.0, 1.5])
    sequences, _ = generate(model, prompts, max_new_tokens=8, params=SamplingParams(temperature=temperature), n=2)
    expected = [
        seeded(model, prompts[i // 2], i, SamplingParams(temperature=float(temperature[i // 2])), 8) for i in range(4)
    ]
    assert lists(sequences) == expected


EVICTED = {
    "full": NAMES["full"],
    "hybrid": ["none", "ngram tree", "EAGLE", "draft model", "oracle"],
    "latent": ["ngram tree", "oracle"],
}


@pytest.mark.parametrize(("kind", "name"), cases(EVICTED))
def test_eviction_and_restoration_leave_the_text_alone(subject, name):
    drafter = subject.drafter(name)
    max_nodes = getattr(drafter, "max_nodes", 11)
    num_pages = (max(LENGTHS) + NEW_TOKENS + max_nodes) // 7 + 4
    sequences, stats = generate(
        subject.model, prompts_of(LENGTHS), drafter=drafter, max_new_tokens=NEW_TOKENS, page_size=7,
        num_pages=num_pages, max_batch_tokens=16,
    )  # fmt: skip
    assert lists(sequences) == subject.texts
    assert stats.evictions > 0 and stats.restored_tokens > 0
    assert stats.peak_pages <= num_pages == stats.num_pages


SHARED = {
    "full": ["none", "ngram tree", "suffix", "EAGLE", "P-EAGLE", "draft model", "block", "combined"],
    "hybrid": ["none", "ngram tree", "oracle"],
    "latent": ["ngram tree", "oracle"],
}


@pytest.mark.parametrize(("kind", "name"), cases(SHARED))
def test_sampled_outcomes_that_share_pages(subject, name):
    """The shared tokens are read once; with too few pages, outcomes are evicted and come back."""
    options = {"max_new_tokens": NEW_TOKENS, "params": SAMPLING, "n": 3, "seeds": SEEDS, "page_size": 7}
    for more in ({"share_prefix": True}, {"num_pages": 18, "max_batch_tokens": 9}):
        sequences, stats = generate(
            subject.model, prompts_of(LENGTHS), drafter=subject.drafter(name), **options, **more
        )
        assert lists(sequences) == subject.outcomes
        assert (stats.shared_prefix_steps if "share_prefix" in more else stats.evictions) > 0


@pytest.mark.parametrize(
    "name", ["none", "ngram tree", "medusa", "EAGLE", "draft model", "block", "combined", "itself"]
)
def test_sequences_wait_for_a_place(model, texts, name):
    drafter, together = SUBJECTS["full"].drafter(name), []
    for count in (1, 2):
        sequences, stats = generate(
            model, prompts_of(LENGTHS), drafter=drafter, max_new_tokens=NEW_TOKENS, max_sequences=count, n=count,
            on_step=lambda step: together.append(len(step.sequences)),
        )  # fmt: skip
        assert lists(sequences) == [text for text in texts for _ in range(count)]
        assert max(together) == count and stats.evictions == 0


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


@pytest.mark.parametrize(("kind", "max_batch_tokens"), cases({"full": [1, 8, 40], "hybrid": [1, 8, 40]}))
def test_prompts_in_chunks(subject, max_batch_tokens):
    sequences, _ = generate(
        subject.model, prompts_of(LENGTHS), drafter=NgramDrafter(4), max_new_tokens=NEW_TOKENS, page_size=3,
        max_batch_tokens=max_batch_tokens,
    )  # fmt: skip
    assert lists(sequences) == subject.texts


@pytest.mark.parametrize("name", ["none", "oracle", "itself", "medusa"])
def test_eos_ends_a_sequence(model, texts, name):
    eos = [texts[0][5 + 7], texts[3][33 + 2]]
    sequences, stats = generate(
        model, prompts_of(LENGTHS), drafter=SUBJECTS["full"].drafter(name), max_new_tokens=NEW_TOKENS, eos_token_id=eos
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
def test_max_new_tokens_is_exact(model, texts, name, count):
    sequences, _ = generate(model, prompts_of(LENGTHS), drafter=SUBJECTS["full"].drafter(name), max_new_tokens=count)
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


@pytest.mark.parametrize("kind", kinds("full", "hybrid"))
def test_n_outcomes_share_the_prompts_pages(subject):
    model, page_size, length, n = subject.model, 8, 50, 4
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
def test_reading_the_shared_prefix_once_changes_nothing(model, texts, name):
    prompts = prompts_of(LENGTHS)
    options = {"max_new_tokens": NEW_TOKENS, "n": 3, "page_size": 7}
    for share_prefix in (True, False, None):
        sequences, stats = generate(
            model, prompts, drafter=SUBJECTS["full"].drafter(name), share_prefix=share_prefix, **options
        )
        assert lists(sequences) == [text for text in texts for _ in range(3)]
        assert (stats.shared_prefix_steps > 0) == (share_prefix is True)


@pytest.mark.parametrize("broken", ["compaction", "positions", "mask"])
def test_each_part_is_needed(model, texts, monkeypatch, broken):
    """Negative controls: an engine without one of its parts gives other text."""
    if broken == "compaction":
        monkeypatch.setattr(decode_step.DecodeStep, "compact", lambda self: None)
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


@pytest.mark.parametrize("kind", kinds(*SUBJECTS))
def test_the_model_is_as_it_was(subject):
    check_the_model_is_as_it_was(subject.model)
    assert not any({"forward", "expand_kv"} & vars(module).keys() for module in subject.model.modules())


@pytest.mark.parametrize("kind", kinds("hybrid", "latent"))
def test_other_ways_to_generate(subject):
    """`custom_generate`, and the model's own `generate` on our attention alone, whose keys of 192 columns and values of
    128 a latent model expands.
    """
    assert greedy(subject.model, prompts_of(LENGTHS)[1], custom_generate=tree_generate) == subject.texts[1]
    served = subject.make()
    served.set_attn_implementation("pagedtree")
    assert [greedy(served, prompt) for prompt in prompts_of(LENGTHS)] == subject.texts
    assert greedy(served, prompts_of(LENGTHS)[1], custom_generate=tree_generate) == subject.texts[1]
