"""`generate` with models of recurrent and attention layers (Qwen3-Next, Kimi Linear, Nemotron-H ...): their own text.

In transformers a cache holds their states; here each sequence has an index of them, and no node of a tree has a state.
What they share with other models is in test_generate.py.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

pytest.importorskip("transformers")

from continuous_case import IS_5
from generate_case import (
    LENGTHS,
    NEW_TOKENS,
    SAMPLING,
    Oracle,
    greedy,
    lists,
    prompts_of,
    tiny,
)

if not IS_5:
    pytest.skip("transformers 4.57 writes these models otherwise", allow_module_level=True)

from hybrid_case import tiny_hybrid
from ranks import Ranks
from subject_case import SUBJECTS

from pagedtree import SamplingParams
from pagedtree.generation import recurrent_step
from pagedtree.generation.fixed_step import FixedStep
from pagedtree.generation.recurrent_states import RecurrentStates
from pagedtree.generation.recurrent_step import RecurrentStep
from pagedtree.integrations.transformers import (
    ModelDrafter,
    NgramDrafter,
    continuous_batching,
    generate,
    tensor_parallel,
)
from pagedtree.testing import backends, use_backend

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def model():
    return SUBJECTS["hybrid"].model


@pytest.fixture
def texts():
    return SUBJECTS["hybrid"].texts


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


def test_trees_that_are_chosen_by_time(model, texts):
    for name in ("oracle", "EAGLE"):
        sequences, _ = generate(
            model, prompts_of(LENGTHS), drafter=SUBJECTS["hybrid"].drafter(name), max_new_tokens=NEW_TOKENS, tree="auto"
        )
        assert lists(sequences) == texts


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_rules_that_weigh_drawn_drafts(model, rule):
    """The draws of a rule depend on the drafts: a second run gives the same, with other pages and evictions."""
    drafter = ModelDrafter(tiny(1, num_hidden_layers=1), law="swor", num_nodes=8, branching=[2, 2])
    options = {"drafter": drafter, "max_new_tokens": 12, "params": SamplingParams(temperature=1.5), "rule": rule}
    first, _ = generate(model, prompts_of(LENGTHS), page_size=16, **options)
    again, _ = generate(model, prompts_of(LENGTHS), page_size=3, **options)
    assert lists(first) == lists(again)


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


@pytest.mark.parametrize("name", ["qwen3_next", "nemotron_h", "falcon_h1"])
def test_continuous_batching_is_refused(name):
    with (
        pytest.raises(
            ValueError, match=r"continuous batching: expected full and sliding attention alone, got (lin|hyb)"
        ),
        continuous_batching(tiny_hybrid(name)),
    ):
        pass


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
    index = TAKE(states)
    for name, tensor in kept.items():
        if index < tensor.shape[0]:
            states[name][index] = tensor[index]
    return index


FORK, TAKE = RecurrentStates.fork, RecurrentStates._take


@pytest.mark.parametrize("broken", [late, dirty])
def test_states_begin_where_their_sequence_does(model, monkeypatch, broken):
    """Negative controls: outcomes get the states that another has by now, and states keep what was there before."""
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
