"""What `generate` refuses, and its smallest inputs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from generate_case import tiny

from pagedtree import DraftTree, SamplingParams, TreeBatch, build_trees
from pagedtree.integrations.transformers import generate

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model():
    return tiny(0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: expected at least 1, got 0"),
        ({"n": 0}, "n: expected at least 1, got 0"),
        ({"page_size": 0}, "page_size: expected at least 1, got 0"),
        (
            {"rule": "lucky"},
            "rule: expected one of auto, greedy, sampled, rejection, block, traversal, typical, got 'lucky'",
        ),
        ({"rule": "sampled"}, 'rule: expected params for every rule but "greedy"'),
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

    class Rootless:
        def propose(self, tokens, lengths):
            cu_nodes = torch.tensor([0, 2, 2], dtype=torch.int32)
            trees = build_trees(torch.tensor([-1, 0], dtype=torch.int32), cu_nodes, max_nodes=2, max_depth=1)
            return torch.tensor([-1, 7]), trees, None

    with pytest.raises(ValueError, match="drafter: expected trees of at least a root, got none for sequence 1"):
        generate(model, [[1], [2]], drafter=Rootless(), max_new_tokens=4)
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
