"""DFlash models saved by the package dflash draft as its forward does."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from published_case import SIZES, append_texts
from support.heads import randomised
from support.models import VOCAB, tiny

from pagedtree.generation.drafters import BlockDrafter, BlockDraftModel

pytest.importorskip("dflash", reason="make test-engines ENGINE=speculators")

from dflash.model import DFlash2DraftModel, DFlashDraftModel
from transformers import Qwen3Config

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK = 5
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3, "use_sliding_window": True}
SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 6}
CASES = {
    "dflash": (DFlashDraftModel, {}, {}),
    "logits": (DFlashDraftModel, {}, {"output_multiplier": 0.5, "final_logit_softcapping": 3.0}),
    "windows": (DFlashDraftModel, WINDOWS, {}),
    "all causal": (DFlashDraftModel, {**WINDOWS, "is_causal": True}, {}),
    "windows to both sides": (DFlashDraftModel, {**WINDOWS, "is_causal": False}, {}),
    "dflash2": (DFlash2DraftModel, {}, SELECTOR),
    "dflash2 with windows": (DFlash2DraftModel, {**WINDOWS, "is_causal": False}, SELECTOR),
}


@pytest.fixture(scope="module")
def model():
    return tiny(0, num_hidden_layers=6)


def saved(folder, name, layers=None):
    make, entries, inner = CASES[name]
    inner = {"mask_token_id": 3, "block_size": BLOCK, **inner}
    if layers is not None:
        inner["target_layer_ids"] = layers
    sizes = Qwen3Config(**SIZES, num_hidden_layers=2, num_target_layers=6, dflash_config=inner, **entries)
    theirs = randomised(make(sizes))
    theirs.save_pretrained(folder)
    return theirs


def drafted(ours, model, features, tokens, width):
    """Returns states and draft for a text whose last token has no features."""
    drafter = BlockDrafter(ours, num_nodes=BLOCK, width=width)
    append_texts(drafter, tokens, features)
    root = torch.tensor([tokens.shape[1] - 1])
    states = drafter._guess(tokens[0, -1:], root, BLOCK - 1)
    return states, drafter.propose(tokens, root.int() + 1)


@pytest.mark.parametrize("name", CASES)
def test_drafts(model, tmp_path, name):
    theirs = saved(tmp_path, name)
    ours = BlockDraftModel.from_pretrained(tmp_path, model)
    assert ours.config.target_layer_ids == tuple(theirs.target_layer_ids) == (1, 3)
    torch.manual_seed(7)
    for length in (1, 2, 9):
        features, tokens = torch.randn(1, length, 2 * 128), torch.randint(VOCAB, (1, length + 1))
        block = torch.cat([tokens[:, -1:], torch.full((1, BLOCK - 1), 3)], dim=1)
        expected = theirs(
            position_ids=torch.arange(length + BLOCK)[None],
            noise_embedding=model.model.embed_tokens(block),
            target_hidden=features,
        )[:, 1:]
        states, draft = drafted(ours, model, features, tokens, width=1)
        torch.testing.assert_close(states, expected, rtol=1e-5, atol=1e-5)
        logits = theirs.compute_logits(expected, model.lm_head)
        assert (ours.logits(states) - logits).abs().max() <= 1e-5 * logits.abs().max()
        if isinstance(theirs, DFlash2DraftModel):
            chain = theirs.propose(expected, tokens[:, -1], model.lm_head, 0.0)[0]
        else:
            chain = logits.argmax(-1)
        assert draft.draft_tokens[1:].tolist() == chain[0].tolist()
