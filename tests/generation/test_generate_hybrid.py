"""`generate` with models of recurrent and attention layers (Qwen3-Next, Kimi Linear, Nemotron-H ...): their own text.

In transformers a cache holds their states; here each sequence has a slot, and no node of a tree has a state.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")

from continuous_case import IS_5
from generate_case import (
    LENGTHS,
    NEW_TOKENS,
    SAMPLING,
    VOCAB,
    Hostile,
    Oracle,
    check_the_model_is_as_it_was,
    common_prefix,
    greedy,
    lists,
    prompts_of,
    seeded,
    tiny,
)

if not IS_5:
    pytest.skip("transformers 4.57 writes these models otherwise", allow_module_level=True)

from hybrid_case import MODELS, tiny_hybrid
from ranks import Ranks

from pagedtree import SamplingParams
from pagedtree.generation import recurrent_step
from pagedtree.generation.drafters import EagleHead
from pagedtree.generation.fixed_step import FixedStep
from pagedtree.generation.recurrent_states import RecurrentStates
from pagedtree.generation.recurrent_step import RecurrentStep
from pagedtree.integrations.transformers import (
    EagleDrafter,
    MedusaDrafter,
    MedusaHeads,
    ModelDrafter,
    NgramDrafter,
    continuous_batching,
    generate,
    tensor_parallel,
    tree_generate,
)
from pagedtree.testing import backends, use_backend

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model():
    return tiny_hybrid()


@pytest.fixture(scope="module")
def texts(model):
    return [greedy(model, prompt) for prompt in prompts_of(LENGTHS)]


@pytest.fixture(scope="module")
def seeded_texts(model):
    return [seeded(model, prompt, seed) for seed, prompt in enumerate(prompts_of(LENGTHS))]


@pytest.fixture(scope="module")
def drafters(model, texts, seeded_texts):
    heads = MedusaHeads(64, 3, model.lm_head)
    torch.nn.init.normal_(heads.weight, std=0.05, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(2)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 1, "vocab_size": VOCAB}
    eagle = EagleHead(sizes, model.model.embed_tokens, model.lm_head, (0, 1), torch.arange(VOCAB)).eval()
    draft_model = tiny(1, num_hidden_layers=1)
    return {
        "none": lambda: None,
        "ngram chain": lambda: NgramDrafter(6, max_branches=1),
        "ngram tree": lambda: NgramDrafter(12, remember=4),
        "medusa": lambda: MedusaDrafter(heads, 10),
        "EAGLE": lambda: EagleDrafter(eagle, num_nodes=10, depth=3, width=3),
        "draft model": lambda: ModelDrafter(draft_model, num_nodes=12, depth=3, width=3),
        "oracle": lambda: Oracle([*texts, *seeded_texts], hit=0.8),
        "hostile": Hostile,
    }


NAMES = ("none", "ngram chain", "ngram tree", "medusa", "EAGLE", "draft model", "oracle", "hostile")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("page_size", [1, 7])
def test_text_is_the_models_own(model, texts, seeded_texts, drafters, name, page_size):
    options = {"max_new_tokens": NEW_TOKENS, "page_size": page_size}
    sequences, stats = generate(model, prompts_of(LENGTHS), drafter=drafters[name](), **options)
    assert lists(sequences) == texts
    sampled, _ = generate(model, prompts_of(LENGTHS), drafter=drafters[name](), params=SAMPLING, **options)
    assert lists(sampled) == seeded_texts
    if name == "oracle":
        assert stats.mean_accepted > 1.0


@pytest.mark.parametrize("name", [name for name in MODELS if name != "qwen3_next"])
def test_text_of_other_models(name):
    """Also after evictions, when prompts and generated tokens are read again, and with outcomes that share pages."""
    other, prompts = tiny_hybrid(name), prompts_of(LENGTHS)
    expected = [greedy(other, prompt) for prompt in prompts]
    options = {"max_new_tokens": NEW_TOKENS, "page_size": 7}
    sequences, stats = generate(other, prompts, drafter=Oracle(expected, 0.8), **options)
    assert lists(sequences) == expected
    assert stats.mean_accepted > 1.0
    sequences, stats = generate(other, prompts, drafter=NgramDrafter(12), n=2, num_pages=14, **options)
    assert lists(sequences) == [text for text in expected for _ in range(2)]
    assert stats.evictions > 0 and stats.restored_tokens > 0


@pytest.mark.parametrize("name", ["none", "ngram tree", "EAGLE", "draft model", "oracle"])
def test_eviction_and_restoration_leave_the_text_alone(model, texts, drafters, name):
    sequences, stats = generate(
        model, prompts_of(LENGTHS), drafter=drafters[name](), max_new_tokens=NEW_TOKENS, page_size=7, num_pages=13,
        max_batch_tokens=16,
    )  # fmt: skip
    assert lists(sequences) == texts
    assert stats.evictions > 0 and stats.restored_tokens > 0


@pytest.mark.parametrize("name", ["none", "ngram tree", "oracle"])
def test_outcomes_get_copies_of_the_prompts_states(model, seeded_texts, drafters, name):
    """The shared tokens are read once; with too few pages, outcomes are evicted and come back."""
    prompts = prompts_of(LENGTHS)
    seeds = [0, 100, 101, 1, 102, 103, 2, 104, 105, 3, 106, 107]
    options = {"max_new_tokens": NEW_TOKENS, "params": SAMPLING, "n": 3, "seeds": seeds, "page_size": 7}
    alone = [seeded(model, prompts[i // 3], seeds[i]) for i in (2, 4, 10)]
    sequences, _ = generate(model, prompts, drafter=drafters[name](), share_prefix=True, **options)
    assert lists(sequences[::3]) == seeded_texts
    assert [lists(sequences)[i] for i in (2, 4, 10)] == alone
    again, stats = generate(model, prompts, drafter=drafters[name](), num_pages=18, max_batch_tokens=9, **options)
    assert lists(again) == lists(sequences)
    assert stats.evictions > 0


def test_shared_tokens_are_read_once(model):
    page_size, length, n = 8, 50, 4
    options = {"max_new_tokens": 10, "params": SAMPLING, "page_size": page_size}
    _, stats = generate(model, prompts_of([length], seed=5), n=n, **options)
    shared = (length - 1) // page_size
    assert stats.packed_tokens == length + (n - 1) * (length - shared * page_size) + n * 9


@pytest.mark.parametrize("max_batch_tokens", [1, 8, 40])
def test_prompts_in_chunks(model, texts, max_batch_tokens):
    sequences, _ = generate(
        model, prompts_of(LENGTHS), drafter=NgramDrafter(4), max_new_tokens=NEW_TOKENS, page_size=3,
        max_batch_tokens=max_batch_tokens,
    )  # fmt: skip
    assert lists(sequences) == texts


@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear", "nemotron_h"])
def test_prompts_of_several_chunks(name):
    """Longer than the ops' chunks of 64 tokens and than a pass; evicted, so that texts are read again."""
    other, prompts = tiny_hybrid(name), prompts_of((64, 65, 200, 129))
    expected = [greedy(other, prompt, 40) for prompt in prompts]
    sequences, stats = generate(
        other, prompts, drafter=Oracle(expected, 0.8), max_new_tokens=40, num_pages=24, max_batch_tokens=70
    )
    assert lists(sequences) == expected
    assert stats.evictions > 0


@given(data=st.data())
@settings(max_examples=10)
def test_any_mix_of_settings(drafters, model, data):
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4), "lengths")
    name = data.draw(st.sampled_from(NAMES[1:6]), "drafter")
    page_size, count = data.draw(st.integers(1, 20), "page_size"), data.draw(st.integers(1, 14), "max_new_tokens")
    n = data.draw(st.integers(1, 3), "n")
    options = {"max_new_tokens": count, "params": data.draw(st.sampled_from([None, SAMPLING]), "params"), "n": n}
    prompts, drafter = prompts_of(lengths, seed=data.draw(st.integers(0, 3), "prompts")), drafters[name]()
    num_pages = -(-(max(lengths) + count - 2 + drafter.max_nodes) // page_size) + data.draw(st.integers(0, 9), "pages")
    sequences, stats = generate(
        model, prompts, drafter=drafter, page_size=page_size, num_pages=num_pages,
        max_batch_tokens=data.draw(st.integers(1, 60), "max_batch_tokens"),
        share_prefix=data.draw(st.booleans(), "share_prefix"), **options,
    )  # fmt: skip
    assert stats.peak_pages <= num_pages
    for b, prompt in enumerate(prompts):
        plain, _ = generate(model, [prompt], seeds=range(b * n, (b + 1) * n), share_prefix=False, **options)
        assert lists(sequences[b * n : (b + 1) * n]) == lists(plain)


def test_trees_that_are_chosen_by_time(model, texts, drafters):
    for name in ("oracle", "EAGLE"):
        sequences, _ = generate(
            model, prompts_of(LENGTHS), drafter=drafters[name](), max_new_tokens=NEW_TOKENS, tree="auto"
        )
        assert lists(sequences) == texts


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_rules_that_weigh_drawn_drafts(model, drafters, rule):
    """The draws of a rule depend on the drafts: a second run gives the same, with other pages and evictions."""
    drafter = ModelDrafter(tiny(1, num_hidden_layers=1), law="swor", num_nodes=8, branching=[2, 2])
    options = {"drafter": drafter, "max_new_tokens": 12, "params": SamplingParams(temperature=1.5), "rule": rule}
    first, _ = generate(model, prompts_of(LENGTHS), page_size=16, **options)
    again, _ = generate(model, prompts_of(LENGTHS), page_size=3, **options)
    assert lists(first) == lists(again)


@pytest.mark.parametrize("name", ["qwen3_next", "nemotron_h", "falcon_h1", "lfm2"])
def test_a_step_in_fixed_buffers(monkeypatch, name):
    """Without evictions and with them, when sequences change their slots between steps."""
    monkeypatch.setattr(FixedStep, "captures", False)
    other, prompts = tiny_hybrid(name), prompts_of(LENGTHS)
    expected = [greedy(other, prompt) for prompt in prompts]
    drafter = ModelDrafter(tiny(1, num_hidden_layers=1), num_nodes=12, depth=3, width=3)
    for options in ({"drafter": NgramDrafter(12)}, {"drafter": drafter, "n": 2, "page_size": 7, "num_pages": 14}):
        sequences, stats = generate(other, prompts, max_new_tokens=NEW_TOKENS, cuda_graph=True, **options)
        assert lists(sequences) == [text for text in expected for _ in range(options.get("n", 1))]
    assert stats.evictions > 0


def test_states_of_fixed_steps_keep_their_place():
    states = RecurrentStates(torch.device("cpu"))
    tensor = states.tensor((0, "state"), (2,), torch.float32)
    states.reserve(3)
    assert tensor.shape[0] == 0 and states[0, "state"].shape == (3, 2)
    assert sorted(states.state_index(sequence) for sequence in (7, 8, 9)) == [0, 1, 2]
    with pytest.raises(RuntimeError, match="expected at most 3 to be taken, got one more"):
        states.state_index(10)
    states.release(8)
    assert states.state_index(10) == 1


@pytest.mark.skipif(not {"simt", "cuda"} & set(backends()), reason="a build without simt")
@pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h", "lfm2"])
def test_the_cuda_kernels(monkeypatch, name):
    """On a GPU, or executed by simt, they give the text of the CPU's; also in fixed buffers."""
    monkeypatch.setattr(FixedStep, "captures", False)
    kinds = ["conv" if name == "lfm2" else "linear_attention", "full_attention"]
    options = {"num_hidden_layers": 2, "layers_block_type" if name == "nemotron_h" else "layer_types": kinds}
    half, prompts = tiny_hybrid(name, **options).to(torch.float16), [[3, 9, 4, 7, 3, 9, 4], [5, 3, 9, 4, 5, 3]]
    expected = lists(generate(half, prompts, max_new_tokens=4)[0])
    device, backend = ("cuda", nullcontext()) if "cuda" in backends() else ("cpu", use_backend("simt"))
    with backend:
        for more in ({"n": 2, "page_size": 4}, {"cuda_graph": True}):
            sequences, _ = generate(half.to(device), prompts, drafter=NgramDrafter(6), max_new_tokens=4, **more)
            assert lists(sequences) == [text for text in expected for _ in range(more.get("n", 1))]


def test_custom_generate(model, texts):
    assert greedy(model, prompts_of(LENGTHS)[1], custom_generate=tree_generate) == texts[1]


def test_attention_alone_of_the_models_own_generate(texts):
    served = tiny_hybrid()
    served.set_attn_implementation("pagedtree")
    assert [greedy(served, prompt) for prompt in prompts_of(LENGTHS)] == texts


@pytest.mark.parametrize("name", ["qwen3_next", "nemotron_h", "falcon_h1"])
def test_continuous_batching_is_refused(name):
    with (
        pytest.raises(
            ValueError, match=r"continuous batching: expected full and sliding attention alone, got (lin|hyb)"
        ),
        continuous_batching(tiny_hybrid(name)),
    ):
        pass


@pytest.mark.parametrize("name", ["qwen3_next", "nemotron_h"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_differs_only_where_logits_are_nearly_tied(name, dtype):
    half, prompts = tiny_hybrid(name).to(dtype), prompts_of(LENGTHS)
    plain, _ = generate(half, prompts, max_new_tokens=NEW_TOKENS)
    drafted, stats = generate(half, prompts, drafter=Oracle(lists(plain), 0.9), max_new_tokens=NEW_TOKENS)
    assert stats.mean_accepted > 1.0
    for a, b in zip(lists(plain), lists(drafted), strict=True):
        same = common_prefix(a, b)
        if same < len(a):
            with torch.no_grad():
                top = half(torch.tensor([a[:same]])).logits[0, -1].float().topk(2).values
            assert top[0] - top[1] < 0.05 * top.abs().max()


def test_the_model_is_as_it_was(model):
    check_the_model_is_as_it_was(model)
    assert not any("forward" in vars(module) for module in model.modules())


def on_a_rank(group, name, texts):
    """The text of a model whose attention is split over the ranks, while each has all states."""
    model = tiny_hybrid(name)
    shards = tensor_parallel(model, group=group)
    drafter = Oracle(texts, 0.8)
    return lists(
        generate(model, prompts_of(LENGTHS), drafter=drafter, max_new_tokens=NEW_TOKENS, shards=shards, n=2)[0]
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next", "nemotron_h"])
def test_two_ranks(name, tmp_path):
    whole = tiny_hybrid(name)
    texts = [greedy(whole, prompt) for prompt in prompts_of(LENGTHS)]
    processes = Ranks(tmp_path, num_ranks=2)
    try:
        outcomes = processes.run(on_a_rank, 2, name, texts)
    finally:
        processes.close()
    assert outcomes == [[text for text in texts for _ in range(2)]] * 2


def without_state(step, *path):
    """`RecurrentStep.advance` without the matrices: the convolutions alone."""
    step._advances = [each for each in step._advances if each[0] is recurrent_step.advance_conv]
    return ADVANCE(step, *path)


def without_convolution(step, *path):
    step._advances = [each for each in step._advances if each[0] is recurrent_step.advance_state]
    return ADVANCE(step, *path)


def root_alone(step, accept_index, num_accepted):
    return ADVANCE(step, accept_index, torch.zeros_like(num_accepted))


ADVANCE = RecurrentStep.advance


@pytest.mark.parametrize("broken", [without_state, without_convolution, root_alone])
def test_states_have_to_follow_the_accepted_path(model, texts, monkeypatch, broken):
    """Negative controls: matrices or inputs of convolutions that stay behind, or that follow the root alone."""
    monkeypatch.setattr(RecurrentStep, "advance", broken)
    sequences, _ = generate(model, prompts_of(LENGTHS), drafter=Oracle(texts, 0.8), max_new_tokens=NEW_TOKENS)
    assert all(tokens != text for tokens, text in zip(lists(sequences), texts, strict=True))


def late(states, source, sequence):
    states.keep_prefix(source)
    FORK(states, source, sequence)


def dirty(states):
    kept = {name: tensor.clone() for name, tensor in states._tensors.items()}
    slot = TAKE(states)
    for name, tensor in kept.items():
        if slot < tensor.shape[0]:
            states[name][slot] = tensor[slot]
    return slot


FORK, TAKE = RecurrentStates.fork, RecurrentStates._take


@pytest.mark.parametrize("broken", [late, dirty])
def test_states_begin_where_their_sequence_does(model, monkeypatch, broken):
    """Negative controls: outcomes get the states that another has by now, and slots keep what was there before."""
    options = {"max_new_tokens": NEW_TOKENS, "params": SAMPLING, "n": 3, "page_size": 7}
    expected, _ = generate(model, prompts_of(LENGTHS), **options)
    same, _ = generate(model, prompts_of(LENGTHS), num_pages=18, **options)
    monkeypatch.setattr(RecurrentStates, "fork" if broken is late else "_take", broken)
    other, _ = generate(model, prompts_of(LENGTHS), num_pages=18, **options)
    assert lists(same) == lists(expected)
    assert lists(other)[0] == lists(expected)[0] and lists(other) != lists(expected)


def test_tokens_keep_the_rule_by_which_they_were_read(monkeypatch):
    """Nemotron-H bounds dt in prompts alone: a text that is read again as a prompt would go on differently."""
    other, prompts = tiny_hybrid("nemotron_h"), prompts_of(LENGTHS)
    expected = [greedy(other, prompt) for prompt in prompts]
    options = {"max_new_tokens": NEW_TOKENS, "page_size": 7}
    of = RecurrentStep.of
    for all_generated in (True, False):
        rule = torch.ones_like if all_generated else torch.zeros_like

        def changed(*args, rule=rule):
            step = of(*args)
            step.is_generated = rule(step.is_generated)
            return step

        with monkeypatch.context() as patch:
            patch.setattr(RecurrentStep, "of", changed)
            sequences, _ = generate(other, prompts, **options)
        assert all(a != b for a, b in zip(lists(sequences)[:2], expected, strict=False))


def test_larger_trees_are_refused(model):
    with pytest.raises(ValueError, match="at most 256 nodes for a model with recurrent layers, got max_nodes 300"):
        generate(model, [[1, 2]], drafter=NgramDrafter(300), max_new_tokens=2)


def test_draft_models_with_recurrent_layers_are_refused(model):
    with pytest.raises(ValueError, match="draft model without recurrent layers, got Qwen3NextForCausalLM"):
        ModelDrafter(model)


def changed(**attributes):
    model = tiny_hybrid(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    for name, value in attributes.items():
        setattr(model.model.layers[0].linear_attn, name, value)
    return model


class OtherDeltaNet(torch.nn.Module):
    layer_idx = 0

    def forward(self, hidden_states, cache_params=None):
        return hidden_states


def of_another_kind():
    model = changed()
    model.model.layers[0].linear_attn = OtherDeltaNet()
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: changed(forward=lambda x: x), "Qwen3NextGatedDeltaNet as it was made, got one whose forward was"),
        (lambda: changed(activation="gelu"), "convolutions with silu in Qwen3NextGatedDeltaNet, got gelu"),
        (lambda: changed(head_v_dim=20), "head_v_dim of Qwen3NextGatedDeltaNet to be a multiple of 8 .*, got 20"),
        (lambda: changed(head_k_dim=264), "head_k_dim of Qwen3NextGatedDeltaNet .* up to 256, got 264"),
        (of_another_kind, "recurrent layers among Qwen3NextGatedDeltaNet, .*, got OtherDeltaNet"),
    ],
)
def test_layers_that_are_refused(make, message):
    with pytest.raises(ValueError, match=f"model: expected {message}"):
        generate(make(), [[1, 2]], max_new_tokens=2)
