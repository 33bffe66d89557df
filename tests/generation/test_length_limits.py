"""No node past its sequence's end or the model's last position is verified."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from support.architectures import KEPT, tiny_model
from support.drafters import Subject
from support.models import SAMPLING, generated, gpt2, greedy, prompts_of, room_of, tiny

from pagedtree.distributed import DraftGroup
from pagedtree.generation.drafters import CombinedDrafter, NgramDrafter
from pagedtree.generation.fixed_step import FixedStep
from pagedtree.integrations.transformers import ModelDrafter, tensor_parallel
from pagedtree.integrations.transformers.model import TransformersModel

# Architectures with a table of positions that produce the same text: first, tables that begin at position 0, at 2, at
# the padding's, and tables without weights.
TABLES_IN_CORE = ["bert", "ctrl", "opt", "roberta", "whisper"]
OF_BERT = ["bert-generation", "camembert", "data2vec-text", "electra", "ernie", "roberta-prelayernorm", "roc_bert"]
OTHERS = ["biogpt", "gpt2", "gpt-sw3", "gpt_bigcode", "xlm-roberta", "xlm-roberta-xl", "xmod"]
TABLES = [*TABLES_IN_CORE, *OF_BERT, *OTHERS]
SERVED = [
    name for name, outcome in json.loads(KEPT.read_text(encoding="utf-8"))["outcomes"].items() if outcome == "same"
]
NEW_TOKENS = 12


def repeated(length, width=7, seed=3):
    return prompts_of([width], seed)[0].repeat(length // width + 1)[:length]


def positions_read(model):
    positions = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: positions.append(int(kwargs["position_ids"].max())), with_kwargs=True
    )
    return positions


def check_depths(result):
    """For `on_step`: every node is within its sequence's limit."""
    offsets, depths = result.trees.cu_nodes.tolist(), result.trees.depths.tolist()
    for b, room in enumerate(room_of(result)):
        assert max(depths[offsets[b] : offsets[b + 1]], default=0) <= max(room, 0)


FULL = Subject(partial(tiny, 0))
DRAFTERS = {
    **{name: partial(FULL.drafter, name) for name in ("ngram tree", "draft model", "medusa", "EAGLE", "block")},
    "itself": lambda: ModelDrafter(FULL.model, num_nodes=6, depth=5, width=1),
    "drawn": lambda: ModelDrafter(tiny(1), law="swor", num_nodes=9, branching=[3, 2]),
    "coupled": lambda: ModelDrafter(tiny(1), law="coupled", num_nodes=9, branching=[3, 2]),
    "n-gram and itself": lambda: CombinedDrafter(
        ModelDrafter(FULL.model, num_nodes=8, depth=5), NgramDrafter(6, max_branches=1), min_match=1, costs=(0, 0)
    ),
}


@pytest.fixture
def model():
    return FULL.model


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("name", "tree", "is_fixed"),
    [
        *((name, tree, False) for name in DRAFTERS for tree in (None, "auto")),
        *((name, None, True) for name in ("draft model", "itself", "drawn", "coupled", "medusa")),
    ],
)
def test_no_node_is_deeper_than_its_sequence_may_grow(model, name, tree, is_fixed, monkeypatch):
    """A sequence far from its end keeps its whole tree."""
    monkeypatch.setattr(FixedStep, "captures", False)
    params = None if name not in ("drawn", "coupled") else SAMPLING
    prompts, sizes = [repeated(20), repeated(9, 5), repeated(14, 3)], []
    plain, _ = generated(model, None, prompts, NEW_TOKENS, params=params)
    positions = positions_read(model)

    def check(result):
        check_depths(result)
        sizes.append(max(result.trees.cu_nodes.diff().tolist()))

    for rule in ("auto", "rejection") if name == "drawn" and not is_fixed else ("auto",):
        options = {"params": params, "tree": tree, "on_step": check, "rule": rule, "cuda_graph": is_fixed}
        found, stats = generated(model, DRAFTERS[name](), prompts, NEW_TOKENS, **options)
        assert found == plain or rule == "rejection"
    assert not is_fixed or max(positions) == 20 + NEW_TOKENS - 2
    assert tree is not None or max(sizes) > 2
    assert name != "itself" or tree is not None or stats.mean_accepted > 1.0


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in TABLES_IN_CORE else pytest.mark.slow) for name in TABLES]
)
def test_up_to_the_last_position_of_a_table(name):
    """Drafts that would reach past the last position leave the text unchanged."""
    model = tiny_model(name)
    packed = TransformersModel(model)
    count = packed.num_positions
    assert packed.has_position_table
    prompts = [repeated(count - 8).clamp(min=4), repeated(count - 30, 5).clamp(min=4)]
    draft = gpt2(count - 3, seed=1)
    draft.resize_token_embeddings(model.get_input_embeddings().num_embeddings)
    # The last token is generated, but never read.
    expected = [greedy(model, prompt, count + 1 - len(prompt), pad_token_id=0) for prompt in prompts]
    with torch.no_grad(), pytest.raises((IndexError, RuntimeError)):  # no further position exists
        model(input_ids=torch.tensor([[5]]), position_ids=torch.tensor([[count]]), use_cache=False)
    positions, read_by_draft = positions_read(model), positions_read(draft)
    for drafter in (None, NgramDrafter(8), ModelDrafter(draft, num_nodes=8, depth=4, width=2)):
        with pytest.warns(UserWarning, match=f"max_new_tokens: prompt 0 of {count - 8} tokens gets at most 9 more, as"):
            found, stats = generated(model, drafter, prompts, 40, eos_token_id=[])
        assert found == expected
        assert [s.finish_reason for s in stats.sequences] == ["length", "length"]
    assert max(positions) == count - 1
    assert max(read_by_draft) == count - 4


def test_tables_are_of_architectures_that_are_served():
    assert set(TABLES) <= set(SERVED)


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED)
def test_models_with_position_tables(name):
    model = tiny_model(name)
    packed = TransformersModel(model)
    count = packed.num_positions
    assert packed.has_position_table == (name in TABLES)
    if count is not None and name not in TABLES:
        with torch.no_grad():
            model(input_ids=torch.tensor([[5]]), position_ids=torch.tensor([[count + 3]]), use_cache=False)


@pytest.mark.each_value
@pytest.mark.parametrize("is_fixed", [False, True], ids=["ordinary", "fixed"])
@pytest.mark.parametrize("law", ["topk", "coupled"])
def test_a_draft_model_with_fewer_positions(is_fixed, law, monkeypatch):
    """It drafts for one sequence while another is past its last position."""
    monkeypatch.setattr(FixedStep, "captures", False)
    model, draft = gpt2(96), gpt2(40, seed=1)
    params = None if law == "topk" else SAMPLING
    prompts = [repeated(30), repeated(60, 5), repeated(10, 3)]
    plain, _ = generated(model, None, prompts, 30, params=params)
    drafters = [ModelDrafter(draft, law=law, num_nodes=9, depth=4, width=2)]
    if not is_fixed and law == "topk":
        drafters.append(CombinedDrafter(ModelDrafter(draft, depth=4), min_match=2, costs=(0, 0)))
    for drafter in drafters:
        positions, drafted = positions_read(draft), []

        def check(result, drafted=drafted):
            check_depths(result)
            offsets, depths = result.trees.cu_nodes.tolist(), result.trees.depths.tolist()
            for b in range(result.num_read, len(result.sequences)):
                start = int(result.start[b])
                drafted += [start + depth for depth in depths[offsets[b] + 1 : offsets[b + 1]]]

        found, _ = generated(model, drafter, prompts, 30, params=params, cuda_graph=is_fixed, on_step=check)
        assert found == plain
        assert max(positions) == 39
        if isinstance(drafter, ModelDrafter):
            assert max(drafted) == 40  # its parent has the draft model's last position


def test_prompts_longer_than_the_table_are_refused():
    model = gpt2(32)
    with pytest.raises(ValueError, match=r"input_ids: expected prompts of at most 32 tokens, .* got 33 in prompt 1"):
        generated(model, None, [repeated(32), repeated(33)], 1)
    with pytest.warns(UserWarning, match="gets at most 1 more"):
        found, _ = generated(model, NgramDrafter(4), [repeated(32)], 5)
    assert found == [greedy(model, repeated(32), 1)]


def with_draft_group(group, texts):
    """Returns the largest position that a rank's draft model read."""
    model, draft = tiny(0), gpt2(40, seed=1)
    shards = tensor_parallel(model, group=group)
    drafts = DraftGroup(lambda _: ModelDrafter(draft, num_nodes=9, depth=4, width=2), 1, shards=shards)
    positions = positions_read(draft)
    prompts, options = [repeated(30), repeated(60, 5)], {"shards": shards, "on_step": check_depths}
    assert generated(model, drafts, prompts, NEW_TOKENS, **options)[0] == texts
    return max(positions, default=None)


@pytest.mark.slow
def test_a_draft_group_with_fewer_positions(model, ranks):
    texts = [greedy(model, prompt, NEW_TOKENS) for prompt in (repeated(30), repeated(60, 5))]
    assert ranks.run(with_draft_group, 2, texts) == [39, None]
