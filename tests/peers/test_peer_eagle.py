"""EAGLE's tree buffers and posterior on its published tree, against `DraftTree` and the verify ops."""

from __future__ import annotations

import contextlib
import copy
import random

import pytest
import torch
from peer_source import PeerSource

from pagedtree import DraftTree, SamplingParams, TreeBatch, verify_greedy, verify_rejection

SOURCE = PeerSource("eagle")
KNOWN = {"torch": torch, "TOPK": 10, "copy": copy, "random": random, "Timer": lambda name: contextlib.nullcontext()}
KNOWN |= {"List": list}
THEIRS = SOURCE.take("eagle/model/utils.py", "pad_path", "generate_tree_buffers", "evaluate_posterior", known=KNOWN)
CHOICES = SOURCE.take("eagle/model/choices.py", "mc_sim_7b_63", known={})["mc_sim_7b_63"]
PATHS = sorted(map(tuple, CHOICES), key=lambda path: (len(path), path))
BUFFERS = THEIRS["generate_tree_buffers"]([list(path) for path in PATHS], device="cpu")


def case(seed: int) -> tuple[TreeBatch, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    trees = TreeBatch.from_trees([DraftTree.from_paths(PATHS)])
    tokens = torch.tensor([0, *(path[-1] for path in PATHS)])
    logits = torch.randn(len(tokens), 12, generator=generator)
    child = torch.arange(1, len(tokens))[torch.rand(len(PATHS), generator=generator) < 0.6]
    logits[trees.parents[child].long(), tokens[child]] += 4
    return trees, tokens, logits


def test_buffers() -> None:
    trees, _, _ = case(0)
    assert BUFFERS["tree_position_ids"].tolist() == trees.depths.tolist()
    bits = trees.mask[:, :, None] >> torch.arange(32, dtype=torch.int32) & 1
    assert torch.equal(BUFFERS["tree_attn_mask"][0, 0].int(), bits.flatten(1)[:, : len(PATHS) + 1])


@pytest.mark.parametrize("seed", range(200))
def test_greedy_posterior(seed) -> None:
    trees, tokens, logits = case(seed)
    paths = BUFFERS["retrieve_indices"]
    candidates = torch.cat([tokens, torch.tensor([-1])])[paths]
    best, length, _ = THEIRS["evaluate_posterior"](logits[paths], candidates, None)
    verdict = verify_greedy(logits, tokens, trees)
    assert int(verdict.num_accepted) == int(length)
    assert verdict.accept_index[0, : int(length) + 1].tolist() == paths[best, : int(length) + 1].tolist()


@pytest.mark.parametrize("coin", [0.02, 0.15, 0.4, 0.7, 0.95])
@pytest.mark.parametrize("seed", range(200))
def test_sampled_posterior(monkeypatch, seed, coin) -> None:
    """One coin per node equals EAGLE's coins per child if shrunk as the children are."""
    trees, tokens, logits = case(seed)
    paths = BUFFERS["retrieve_indices"]
    candidates = torch.cat([tokens, torch.tensor([-1])])[paths]
    probs, used = logits.softmax(-1), {}

    def draw() -> float:
        """Returns (u - before) / (1 - before) of the node's coin u after refused mass `before`."""
        node, before = used["node"], used["before"]
        child = used["children"].pop(0)
        p = float(probs[node, tokens[child]])
        result = (coin - before) / (1 - before)
        used["before"] = before + p
        if result <= p / (1 - before):
            enter(child)
        return result

    def enter(node: int) -> None:
        used.update(node=node, before=0.0, children=(trees.parents == node).nonzero().flatten().tolist())

    enter(0)
    monkeypatch.setattr(random, "random", draw)
    best, length, _ = THEIRS["evaluate_posterior"](logits[paths], candidates, lambda _, rows: rows)
    streams = dict.fromkeys(("seeds", "positions"), torch.zeros(1, dtype=torch.int64))
    coins = {"coins": torch.full((len(tokens),), coin), "final_coins": torch.tensor([0.5])}
    verdict = verify_rejection(logits, tokens, trees, SamplingParams(), draft_law="onehot", **streams, **coins)
    assert int(verdict.num_accepted) == int(length)
    assert verdict.accept_index[0, : int(length) + 1].tolist() == paths[int(best), : int(length) + 1].tolist()
