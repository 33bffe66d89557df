"""`generate` over a paged cache: the text is the model's own, whatever drafts, pages, batch and evictions do.

The engine runs here on the backend of the CPU in fp32; the ops have their own tests on every backend.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

pytest.importorskip("transformers")

from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from pagedtree import DraftTree, SamplingParams, TreeBatch, build_trees, sample
from pagedtree.integrations.transformers import (
    MedusaDrafter,
    MedusaHeads,
    ModelDrafter,
    NgramDrafter,
    engine,
    generate,
    medusa_tree,
)

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB = 128
NEW_TOKENS = 20
LENGTHS = (5, 17, 1, 33)
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.2,  # or greedy text repeats one token
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
SAMPLING = SamplingParams(temperature=0.8, top_p=0.95)


def tiny(seed: int, kind=LlamaForCausalLM, config=LlamaConfig, **options):
    torch.manual_seed(seed)
    return kind(config(**{**TINY, **options})).eval()


def prompts_of(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length,), generator=generator) for length in lengths]


def greedy(model, prompt, count=NEW_TOKENS, **options):
    return model.generate(prompt[None], max_new_tokens=count, do_sample=False, **options)[0].tolist()


def seeded(model, prompt, seed, params=SAMPLING, count=NEW_TOKENS):
    """Plain decoding with `sample`, on the model's own attention."""
    tokens = prompt.tolist()
    for _ in range(count):
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, -1:]
        position = torch.tensor([len(tokens) - 1])
        tokens.append(int(sample(logits, params, seeds=torch.tensor([seed]), positions=position)))
    return tokens


def lists(sequences):
    return [sequence.tolist() for sequence in sequences]


class Oracle:
    """Knows the texts; hides the right token at the last child of every node with probability `hit`."""

    tree = DraftTree.full([2, 2, 1])

    def __init__(self, texts, hit):
        self.texts, self.hit = texts, hit
        self.generator = torch.Generator().manual_seed(1)

    def propose(self, tokens, lengths):
        draft_tokens = []
        for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True):
            text = max(self.texts, key=lambda text: _common_prefix(text, row[:length]))
            guess = torch.randint(VOCAB, (self.tree.num_nodes,), generator=self.generator).tolist()
            node = 0
            for token in text[length : length + self.tree.max_depth]:
                node = max(i for i in range(self.tree.num_nodes) if self.tree.parents[i] == node)
                if torch.rand((), generator=self.generator) < self.hit:
                    guess[node] = token
            draft_tokens += guess
        trees = TreeBatch.from_trees([self.tree] * lengths.shape[0])
        return torch.tensor(draft_tokens, dtype=torch.int32), trees, None


def _common_prefix(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Hostile:
    """Malformed trees of tokens outside the vocabulary, a different shape every time; the roots are in order."""

    max_nodes = 8

    def __init__(self):
        self.generator = torch.Generator().manual_seed(2)

    def propose(self, tokens, lengths):
        sizes = torch.randint(1, self.max_nodes + 1, lengths.shape, generator=self.generator)
        parents = torch.cat([torch.randint(-2, 6, (size,), generator=self.generator) for size in sizes.tolist()])
        cu_nodes = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
        parents[cu_nodes[:-1]] = -1
        trees = build_trees(parents.int(), cu_nodes.int(), max_nodes=self.max_nodes, max_depth=3)
        return torch.randint(-5, 2 * VOCAB, parents.shape, generator=self.generator), trees, None


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
    known = [*texts, *seeded_texts]
    return {
        "none": lambda: None,
        "ngram chain": lambda: NgramDrafter(6, max_branches=1),
        "ngram tree": lambda: NgramDrafter(12, remember=4),
        "medusa": lambda: MedusaDrafter(heads, medusa_tree(3, 10)),
        "draft model": lambda: ModelDrafter(draft_model, num_nodes=12, depth=3, width=3),
        "draft chain": lambda: ModelDrafter(draft_model, num_nodes=5, depth=4, width=1, max_batch_tokens=8),
        "itself": lambda: ModelDrafter(model, num_nodes=12, depth=4, width=2),
        "oracle": lambda: Oracle(known, hit=0.8),
        "never right": lambda: Oracle(known, hit=0.0),
        "hostile": Hostile,
    }


NAMES = (
    "none", "ngram chain", "ngram tree", "medusa", "draft model", "draft chain", "itself", "oracle", "never right",
    "hostile",
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


def test_eviction_of_sampled_outcomes_that_share_pages(model, seeded_texts, drafters):
    prompts = prompts_of(LENGTHS)
    seeds = [0, 100, 101, 1, 102, 103, 2, 104, 105, 3, 106, 107]
    options = {"max_new_tokens": NEW_TOKENS, "params": SAMPLING, "n": 3, "seeds": seeds, "page_size": 7}
    plain, _ = generate(model, prompts, **options)
    assert lists(plain[::3]) == seeded_texts
    for name in ("none", "ngram tree", "draft model"):
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
        monkeypatch.setattr(engine, "compact_kv", lambda *args: None)
    elif broken == "positions":
        prepare_step = engine.prepare_step

        def linear(trees, table, start, page_size, *, total_q):
            _, *rest = prepare_step(trees, table, start, page_size, total_q=total_q)
            sizes = trees.cu_nodes.diff()
            positions = [start[b] + torch.arange(int(sizes[b])) for b in range(len(sizes))]
            return torch.cat([*positions, torch.empty(0)]).long(), *rest

        monkeypatch.setattr(engine, "prepare_step", linear)
    else:
        paged_step = engine.PagedStep

        def causal(cache, table, seq_lens, cu_seqlens_q, slots, tree_mask, tree_lens, max_seqlen_q):
            return paged_step(cache, table, seq_lens, cu_seqlens_q, slots, None, None, max_seqlen_q)

        monkeypatch.setattr(engine, "PagedStep", causal)
    sequences, _ = generate(model, prompts_of(LENGTHS), drafter=Oracle(texts, 0.8), max_new_tokens=NEW_TOKENS)
    assert all(tokens != text for tokens, text in zip(lists(sequences)[:2], texts, strict=False))


@pytest.mark.parametrize("kind", ["sliding window", "softcap", "sinks"])
@pytest.mark.parametrize("name", ["none", "ngram tree", "oracle"])
def test_other_attention_layers(kind, name):
    """Mistral's window, Gemma 2's softcap and alternating windows, the sinks of gpt-oss."""
    if kind == "sliding window":
        other = tiny(0, MistralForCausalLM, MistralConfig, sliding_window=9)
    elif kind == "softcap":
        other = tiny(0, Gemma2ForCausalLM, Gemma2Config, sliding_window=9, query_pre_attn_scalar=64)
    else:
        other = tiny(
            0, GptOssForCausalLM, GptOssConfig, sliding_window=9, num_local_experts=2, num_experts_per_tok=1,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4}, attn_implementation="eager",
        )  # fmt: skip
        for layer in other.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks, std=2.0)
    prompts = prompts_of(LENGTHS)
    expected = [greedy(other, prompt) for prompt in prompts]
    drafter = {"none": None, "ngram tree": NgramDrafter(12), "oracle": Oracle(expected, 0.8)}[name]
    sequences, stats = generate(
        other, prompts, drafter=drafter, max_new_tokens=NEW_TOKENS, page_size=4, n=2, share_prefix=True
    )
    assert lists(sequences) == [text for text in expected for _ in range(2)]
    # Windowed layers read all pages themselves; those without one still share.
    assert stats.shared_prefix_steps > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: expected at least 1, got 0"),
        ({"n": 0}, "n: expected at least 1, got 0"),
        ({"page_size": 0}, "page_size: expected at least 1, got 0"),
        ({"rule": "lucky"}, "rule: expected one of auto, greedy, sampled, got 'lucky'"),
        ({"rule": "sampled"}, 'rule: expected params for "sampled"'),
        ({"seeds": [1, 2]}, r"seeds: expected 1 integers, got torch.int64 \[2\]"),
        ({"seeds": [0.5]}, "seeds: expected 1 integers, got torch.float32"),
        ({"input_ids": [[]]}, r"input_ids: expected at least one token .* got \[\] as prompt 0"),
        ({"input_ids": torch.zeros(3, dtype=torch.int64)}, r"input_ids: expected integers \[B, L\]"),
        ({"input_ids": torch.zeros(1, 3)}, r"input_ids: expected integers \[B, L\], got torch.float32"),
        ({"attention_mask": torch.ones(1, 3)}, "attention_mask: expected none with a list"),
        ({"params": SamplingParams(top_p=torch.ones(3))}, r"params: expected top_p of 1 prompts, got \[3\]"),
    ],
)
def test_bad_arguments(model, change, message):
    arguments = {"input_ids": [[1, 2, 3]], "max_new_tokens": 4, **change}
    with pytest.raises(ValueError, match=message):
        generate(model, arguments.pop("input_ids"), **arguments)


def test_bad_drafters(model):
    class Short:
        def propose(self, tokens, lengths):
            return torch.tensor([-1]), TreeBatch.from_trees([DraftTree.chain(0)]), None

    with pytest.raises(TypeError, match="drafter: expected an object with propose"):
        generate(model, [[1]], drafter=3, max_new_tokens=4)
    with pytest.raises(ValueError, match="drafter: expected 2 trees and a token a node, got 1 trees"):
        generate(model, [[1], [2]], drafter=Short(), max_new_tokens=4)
    # The model is as it was, also after a failure.
    assert model.config._attn_implementation != "pagedtree"


def test_bad_models(model):
    with pytest.raises(ValueError, match=r"evaluation mode.*model.eval\(\)"):
        generate(tiny(0).train(), [[1]], max_new_tokens=4)
    with pytest.raises(ValueError, match="expected a head_dim in 64, 96, 128, 192, 256, got 32"):
        generate(tiny(0, head_dim=32), [[1]], max_new_tokens=4)


def test_no_prompts(model):
    assert generate(model, [], max_new_tokens=4)[0] == []
    assert generate(model, torch.zeros((0, 3), dtype=torch.int64), max_new_tokens=4)[0].shape == (0, 3)


def test_not_finite_logits_are_reported():
    broken = tiny(0)
    broken.lm_head.weight.data.fill_(float("nan"))
    with pytest.warns(UserWarning, match="sequence 0: the model's logits have NaN"):
        generate(broken, [[1]], max_new_tokens=2)
