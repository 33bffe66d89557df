"""Proposals of the drafters of `generate`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.batches import paths_of
from support.heads import block_model
from support.models import VOCAB, prompts_of, room_of, tiny_heads

from pagedtree import DraftTree
from pagedtree.generation.drafters import (
    BlockDrafter,
    CombinedDrafter,
    MedusaDrafter,
    MedusaHeads,
    NgramDrafter,
    medusa_tree,
)
from pagedtree.generation.drafters.text_memory import TextMemory
from pagedtree.integrations.transformers import ModelDrafter, generate

LENGTHS = (5, 21, 1, 34)


def prompts():
    return prompts_of(LENGTHS, seed=3)


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 7, "num_pages": 14},
        {"n": 3, "page_size": 4, "num_pages": 30},
        {"max_batch_tokens": 6, "page_size": 3},
    ],
)
def test_a_model_that_drafts_for_itself_is_always_right(model, options):
    """A wrong row in the draft model's cache would cause a rejection."""
    most = options.get("max_batch_tokens", 4096)
    drafter = ModelDrafter(model, num_nodes=5, depth=4, width=1, max_batch_tokens=most)
    _, stats = generate(model, prompts(), drafter=drafter, max_new_tokens=31, **options)
    for sequence in stats.sequences:
        # The limit may cut the last pass.
        assert set(sequence.accepted[:-1]) == {4}
    if "num_pages" in options:
        assert stats.evictions > 0


def test_medusa_heads_see_the_last_accepted_state(model):
    """The heads read the output layer's input at the token before the root."""
    inputs = []

    def heads(states):
        inputs.append(states)
        return model.lm_head(states)[:, None].expand(-1, 2, -1)

    drafter = MedusaDrafter(heads, DraftTree.full([2, 2]))
    lengths, propose = [], drafter.propose

    def record(tokens, known):
        lengths.append([row[:length] for row, length in zip(tokens.tolist(), known.tolist(), strict=True)])
        return propose(tokens, known)

    drafter.propose = record
    generate(model, prompts()[:2], drafter=drafter, max_new_tokens=12)
    assert len(inputs) == len(lengths) > 3
    for states, rows in zip(inputs, lengths, strict=True):
        for state, row in zip(states, rows, strict=True):
            with torch.no_grad():
                expected = model.model(torch.tensor([row])).last_hidden_state[0, -2]
            torch.testing.assert_close(state, expected, rtol=1e-4, atol=1e-4)


def test_medusa_keeps_states_of_sequences_that_a_pass_leaves_out():
    def step(indices, states):
        sequences = [SimpleNamespace(index=index) for index in indices]
        ends = SimpleNamespace(accept_rows=torch.arange(len(indices))[:, None], num_accepted=torch.zeros(len(indices)))
        return SimpleNamespace(sequences=sequences, hidden=states, commit=ends)

    drafter, states = MedusaDrafter(lambda hidden: hidden[:, None], 2), torch.eye(6)
    drafter.observe(step([0, 2], states[:2]))
    drafter.observe(step([2, 4], states[2:4]))
    drafter.observe(step([2, 4], states[4:]))
    drafter.select([SimpleNamespace(index=index) for index in (4, 0, 2)])
    draft = drafter.propose(torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, dtype=torch.int32))
    # The heads guess the index of the nonzero entry.
    assert draft.draft_tokens[1::2].tolist() == [5, 0, 4]


def test_medusa_takes_the_best_tree_of_each_sequence(model):
    """The tree is the best among all paths of the heads' likeliest tokens."""
    heads = MedusaHeads(128, 3, model.lm_head)
    torch.nn.init.normal_(heads.weight, std=0.05, generator=torch.Generator().manual_seed(3))
    scores, trees, rooms = [], [], []

    class Kept(MedusaHeads):
        def forward(self, hidden):
            scores.append(super().forward(hidden).log_softmax(-1))
            return scores[-1]

    recorder = Kept(128, 3, model.lm_head)
    recorder.load_state_dict(heads.state_dict())
    drafter = MedusaDrafter(recorder.requires_grad_(False), 9)
    assert (drafter.max_nodes, drafter.max_depth, drafter.is_chain) == (9, 3, False)

    def collect(result):
        if len(result.sequences) > result.num_read:
            trees.append((result.draft_tokens.tolist(), result.trees.parents.tolist(), result.trees.cu_nodes.tolist()))
            rooms.append(room_of(result))

    prompts = prompts_of((5, 21), seed=3)
    generate(model, prompts, drafter=drafter, max_new_tokens=12, on_step=collect)
    assert len(scores) == len(trees) > 3
    shapes = set()
    for log_probs, (tokens, parents, cu_nodes), room in zip(scores, trees, rooms, strict=True):
        for levels, begin, end, most in zip(log_probs, cu_nodes, cu_nodes[1:], room, strict=False):
            paths = {(): 0.0}
            for level in levels.tolist():
                best = sorted(range(VOCAB), key=lambda token, level=level: -level[token])[:8]
                deepest = max(map(len, paths))
                longest = [path for path in paths if len(path) == deepest]
                longer = {(*path, token): paths[path] + level[token] for path in longest for token in best}
                paths |= dict(sorted(longer.items(), key=lambda item: -item[1])[:8])
            expected = sorted(paths, key=lambda path: -paths[path])[:9]
            found = paths_of(tokens[begin:end], parents[begin:end])
            assert set(found) == {path for path in expected if len(path) <= most}
            shapes.add(tuple(parents[begin:end]))
    assert len(shapes) > 1


def test_medusa_tree_takes_the_likeliest_paths():
    tree = medusa_tree(num_heads=2, num_nodes=6)
    # Costs: [0] 1; [1] 2, [0, 0] 2; then two of the four paths of cost 3.
    assert tree.num_nodes == 6 and tree.max_depth == 2
    assert sum(1 for depth in tree.depths if depth == 1) >= 2
    assert medusa_tree(4, 2).num_nodes == 2
    assert medusa_tree(3, 64).max_depth == 3


NETWORKS = {
    ModelDrafter: lambda model: [model],
    BlockDrafter: lambda model: [block_model(model)],
    MedusaDrafter: lambda model: [tiny_heads(model)],
    CombinedDrafter: lambda model: [ModelDrafter(model)],
}
REFUSED = [
    (NgramDrafter, {"num_nodes": 1}, "num_nodes: expected at least 2"),
    (MedusaDrafter, {"tree": 1}, "tree: expected at least 2 nodes"),
    *[
        (kind, {name: least - 1}, f"{name}: expected at least {least}, got {least - 1}")
        for kind in (ModelDrafter, BlockDrafter)
        for name, least in (("num_nodes", 2), ("depth", 1), ("width", 1))
    ],
    (BlockDrafter, {"depth": 6}, "depth: expected at most 5, the mask tokens of a block, got 6"),
    (ModelDrafter, {"law": "lucky"}, "law: expected one of topk, iid, swor, coupled, got 'lucky'"),
    (ModelDrafter, {"branching": [2]}, 'branching: expected None under law "topk"'),
    (ModelDrafter, {"law": "iid", "branching": []}, r"branching: expected levels of at least 1 child each, got \[\]"),
    (ModelDrafter, {"law": "iid", "branching": [2, 0]}, r"branching: expected levels of .*, got \[2, 0\]"),
    (CombinedDrafter, {"min_match": 0}, "min_match: expected 1 to the lookup's max_ngram, 8, got 0"),
    (CombinedDrafter, {"min_match": 5, "lookup": NgramDrafter(4)}, "to the lookup's max_ngram, 4, got 5"),
    (CombinedDrafter, {"costs": (0.1, -1.0)}, r"costs: expected None or two numbers from 0 on, got \(0.1, -1.0\)"),
    (TextMemory, {"max_tokens": 0}, "max_tokens: expected 1 to 1073741824, got 0"),
    (TextMemory, {"max_tokens": 9, "context": 0}, "context: expected 1 to 64, got 0"),
    (TextMemory, {"max_tokens": 9, "max_ngram": 3}, "max_ngram: expected 4 to 64, got 3"),
]


@pytest.mark.parametrize(("kind", "options", "message"), REFUSED)
def test_bad_arguments(model, kind, options, message):
    networks = NETWORKS[kind](model) if kind in NETWORKS else []
    with pytest.raises(ValueError, match=message):
        kind(*networks, **options)
