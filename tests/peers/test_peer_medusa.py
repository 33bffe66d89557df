"""Medusa's tree buffers and posterior on its published trees, against `DraftTree` and the verify ops."""

from __future__ import annotations

import pytest
import torch
from peer_source import PeerSource

from pagedtree import DraftTree, SamplingParams, TreeBatch, verify_greedy, verify_typical

SOURCE = PeerSource("medusa")
TREES = [
    *("mc_sim_7b_63", "vicuna_7b_stage2", "vicuna_7b_stage1_ablation", "vicuna_7b_stage1", "vicuna_13b_stage2"),
    *("vicuna_13b_stage1", "vicuna_33b_stage2", "vicuna_33b_stage1", "zephyr_stage2"),
]
KNOWN = {"torch": torch, "F": torch.nn.functional, "TOPK": 10}
THEIRS = SOURCE.take("medusa/model/utils.py", "pad_path", "generate_medusa_buffers", "evaluate_posterior", known=KNOWN)
CHOICES = SOURCE.take("medusa/model/medusa_choices.py", *TREES, known={})


def case(name: str, seed: int) -> tuple[dict, TreeBatch, torch.Tensor, torch.Tensor]:
    """Returns Medusa's buffers, our tree, tokens (a node's first is likely), and logits."""
    generator = torch.Generator().manual_seed(seed)
    choices = sorted(map(tuple, CHOICES[name]), key=lambda path: (len(path), path))
    buffers = THEIRS["generate_medusa_buffers"]([list(path) for path in choices], device="cpu")
    trees = TreeBatch.from_trees([DraftTree.from_paths(choices)])
    tokens = torch.tensor([0, *(path[-1] for path in choices)])  # siblings differ
    logits = torch.randn(len(choices) + 1, 40, generator=generator)
    child = torch.arange(1, len(tokens))[torch.rand(len(choices), generator=generator) < 0.6]
    logits[trees.parents[child].long(), tokens[child]] += 6
    return buffers, trees, tokens, logits


@pytest.mark.parametrize("name", TREES)
def test_buffers(name) -> None:
    buffers, trees, _, _ = case(name, 0)
    n = trees.depths.numel()
    assert buffers["medusa_position_ids"].tolist() == trees.depths.tolist()
    bits = trees.mask[:, :, None] >> torch.arange(32, dtype=torch.int32) & 1
    assert torch.equal(buffers["medusa_attn_mask"][0, 0].int(), bits.flatten(1)[:, :n])


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("temperature", [0, 0.7])
def test_posterior(name, seed, temperature) -> None:
    buffers, trees, tokens, logits = case(name, seed)
    paths = buffers["retrieve_indices"]
    padded = torch.cat([tokens, torch.tensor([-1])])
    candidates, rows = padded[paths], logits[paths]
    if temperature:
        candidates = candidates.clamp(min=0)
        rows = torch.where((paths < 0)[..., None], -torch.inf, rows).nan_to_num()
        # Medusa fills padded columns with a token that is never likely.
        candidates = torch.where(paths < 0, 39, candidates)
        logits[:, 39] = rows[..., 39] = -50
    best, length = THEIRS["evaluate_posterior"](
        rows, candidates, temperature, posterior_threshold=0.09, posterior_alpha=0.3
    )
    if temperature:
        verdict = verify_typical(
            logits, tokens, trees, SamplingParams(temperature=temperature), epsilon=0.09, delta=0.3
        )
    else:
        verdict = verify_greedy(logits, tokens, trees)
    assert int(verdict.num_accepted) == int(length)
    if not temperature:
        assert verdict.accept_index[0, : int(length) + 1].tolist() == paths[best, : int(length) + 1].tolist()
