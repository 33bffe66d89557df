"""Rotary embeddings that change with the longest sequence of a pass: the text is the model's own, or it is refused."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from generate_case import greedy, lists, prompts_of, tiny
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM, PhimoeConfig, PhimoeForCausalLM
from transformers import __version__ as version

from pagedtree.generation.fixed_step import FixedStep
from pagedtree.integrations.transformers import ModelDrafter, NgramDrafter, generate
from pagedtree.integrations.transformers.rotary import _with_positions, rotary_limit, same_rotation

pytestmark = pytest.mark.usefixtures("one_thread")

LIMIT = 40
COUNT = 12
SHORT, LONG = (5, 17, 1 + LIMIT - COUNT), (41, 50, 44)
FACTORS = {"short_factor": [1.0] * 16 + [2.0] * 16, "long_factor": [3.0] * 16 + [8.0] * 16}
IS_5 = int(version.split(".")[0]) >= 5


def rotated(kind, config, rope, seed=0, **options):
    """A model with these rope parameters, as transformers 5 or 4.57 takes them."""
    limits = {name: rope[name] for name in rope if name == "original_max_position_embeddings"}
    if IS_5:
        rope = {"rope_parameters": {"rope_theta": 1e3, **rope}, **limits}
    else:
        rope = {"rope_theta": 1e3, "rope_scaling": {name: rope[name] for name in rope if name not in limits}, **limits}
    return tiny(seed, kind, config, **rope, **options)


def longrope(seed=0, **options):
    """A model of 128 positions, of which the first 40 have frequencies of their own."""
    name = "rope_type" if IS_5 else "type"
    rope = {name: "longrope", **FACTORS, "original_max_position_embeddings": LIMIT}
    options = {"hidden_size": 256, "max_position_embeddings": 128, **options}
    return rotated(Phi3ForCausalLM, Phi3Config, rope, seed, **options)


def phimoe():
    """This model's embedding looks at the longest sequence itself, too."""
    rope = {"rope_type": "longrope", **FACTORS, "short_mscale": 1.1, "long_mscale": 1.4}
    rope["original_max_position_embeddings"] = LIMIT
    options = {"hidden_size": 256, "max_position_embeddings": 128, "num_local_experts": 2, "num_experts_per_tok": 1}
    return rotated(PhimoeForCausalLM, PhimoeConfig, rope, **options)


def dynamic():
    rope = {"rope_type": "dynamic", "factor": 8.0}
    return rotated(LlamaForCausalLM, LlamaConfig, rope, max_position_embeddings=LIMIT + 1)


MODELS = {"longrope": longrope, "phimoe": phimoe, "dynamic": dynamic}
NAMES = [name for name in MODELS if IS_5 or name != "phimoe"]  # 4.57's has no attention interface


@pytest.mark.each_value
@pytest.mark.parametrize(("name", "lengths"), [(name, SHORT) for name in NAMES] + [(name, LONG) for name in NAMES[:-1]])
def test_text_is_that_of_each_sequence_alone(name, lengths):
    """The text is the model's own, also with chunks of long prompts and with nodes drafted past the limit."""
    model, prompts = MODELS[name](), prompts_of(lengths)
    expected = [greedy(model, prompt, COUNT) for prompt in prompts]
    assert max(map(len, expected)) - 1 == LIMIT or lengths is LONG
    greedy(model, prompts_of([70])[0], 2)  # leaves the frequencies of a long text
    draft = longrope(1, num_hidden_layers=1) if name == "longrope" else tiny(1, num_hidden_layers=1)
    for drafter in (None, NgramDrafter(8), ModelDrafter(draft, depth=3), ModelDrafter(model, depth=3)):
        sequences, stats = generate(model, prompts, drafter=drafter, max_new_tokens=COUNT, max_batch_tokens=32)
        assert lists(sequences) == expected
    assert stats.mean_accepted > 1.0  # the model's own drafts: it is rotated as itself


@pytest.mark.parametrize("name", ["longrope", "dynamic"])
def test_one_position_past_the_limit_changes_no_other(name):
    """A draft model reads levels of a tree past the end of one sequence, beside other sequences."""
    model = MODELS[name]()
    states, near, far = torch.zeros(1, 1, 1), torch.arange(LIMIT - 1)[None], torch.tensor([[LIMIT + 3]])

    def cosines(positions):
        return model.model.rotary_emb(states, positions)[0][:, : near.shape[1]]

    expected = cosines(near)
    with same_rotation(model, is_long=False):
        assert torch.equal(cosines(torch.cat([near, far], dim=1)), expected)
    assert not torch.equal(cosines(torch.cat([near, far], dim=1)), expected)


MIXED = [
    ("longrope", (30, 50), COUNT, r"at most 41 tokens, .* or only prompts of more than 40, .*longrope.*: 40\)"),
    ("longrope", (30,), COUNT, "got prompts of 30 to 30 tokens, and up to 42 with max_new_tokens"),
    ("dynamic", (45, 50), COUNT, r"at most 41 tokens, prompt and max_new_tokens, in each sequence, as its .*dynamic"),
    ("dynamic", (10, 40), 2, "max_position_embeddings"),
]


@pytest.mark.parametrize(("name", "lengths", "count", "message"), MIXED)
def test_what_would_change_on_the_way_is_refused(name, lengths, count, message):
    model, prompts = MODELS[name](), prompts_of(lengths)
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(ValueError, match="model: expected " + f".*{message}"):
        generate(model, prompts, max_new_tokens=count)
    with pytest.raises(ValueError, match="drafter: its model: expected " + f".*{message}"):
        generate(tiny(0), prompts, drafter=ModelDrafter(model), max_new_tokens=count)
    assert not calls


@pytest.mark.parametrize("name", ["longrope", "dynamic"])
def test_packed_by_others_they_are_refused(monkeypatch, name):
    """A captured step cannot ask which sequence is the longest."""
    model = MODELS[name]()
    message = f'expected rotary frequencies that never change, got rope type "{name}"'
    monkeypatch.setattr(FixedStep, "captures", False)
    for target, drafter, what in ((model, None, "model"), (tiny(0), ModelDrafter(model), "drafter")):
        with pytest.raises(ValueError, match=f"cuda_graph: {what}: {message}"):
            generate(target, prompts_of([5]), drafter=drafter, max_new_tokens=2, cuda_graph=True)


def test_limits():
    assert rotary_limit(tiny(0).config) is None
    assert (rotary_limit(longrope().config).num_tokens, rotary_limit(dynamic().config).num_tokens) == (LIMIT, LIMIT)
    by_layer = {"full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 9}, "other": {}}
    config = longrope().config
    config.rope_parameters = by_layer
    assert rotary_limit(config).num_tokens == 9
    config.rope_parameters = {**by_layer, "other": {"rope_type": "dynamic"}}
    assert rotary_limit(config)[::2] == (9, "several types")


@pytest.mark.parametrize("is_keyword", [False, True])
def test_positions_are_changed_wherever_they_stand(is_keyword):
    arguments = ((1,), {"position_ids": 2, "layer_type": 3}) if is_keyword else ((1, 2, 3), {})
    args, kwargs = _with_positions(lambda ids: ids + 10, None, *arguments)
    assert [*args, *kwargs.values()] == [1, 12, 3]
