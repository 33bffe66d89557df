"""DFlash models saved by speculators guess as its forward does."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from published_case import SIZES, append_texts, speculators_config
from support.heads import randomised
from support.models import VOCAB, tiny

from pagedtree.generation.drafters import BlockDrafter, BlockDraftModel

pytest.importorskip("speculators", reason="make test-engines ENGINE=speculators")

from speculators.models.dflash.config import DFlashSpeculatorConfig
from speculators.models.dflash.core import DFlashDraftModel
from speculators.models.dflash2.config import DFlash2SpeculatorConfig
from speculators.models.dflash2.core import DFlash2DraftModel
from transformers import Qwen3Config

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTH, BLOCK = 20, 5
MAKE = {"dflash": (DFlashDraftModel, DFlashSpeculatorConfig), "dflash2": (DFlash2DraftModel, DFlash2SpeculatorConfig)}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "use_sliding_window": True}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def model():
    return tiny(0, num_hidden_layers=4)


def saved(model, folder, kind, layer, **entries):
    make, config = MAKE[kind]
    sizes = Qwen3Config(**SIZES, **{"num_hidden_layers": 2, **layer})
    sizes._attn_implementation = "eager"
    if kind == "dflash2":
        entries = {"conv_kernel_size": 3, "selector_rank": 8, "selector_top_k": 6, **entries}
    theirs = make(
        config(
            transformer_layer_config=sizes,
            block_size=BLOCK,
            aux_hidden_state_layer_ids=[1, 4],
            mask_token_id=3,
            speculators_config=speculators_config(kind, BLOCK - 1),
            **{"draft_vocab_size": VOCAB, **entries},
        )
    )
    randomised(theirs)
    theirs.embed_tokens.weight.copy_(model.model.embed_tokens.weight)
    if theirs.use_draft_vocab:
        ids = torch.arange(1, VOCAB, 2)
        is_drafted = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
        theirs.load_vocab_mappings(is_drafted, ids - torch.arange(64))
    else:
        theirs.lm_head.weight.copy_(model.lm_head.weight)
    theirs.save_pretrained(folder)
    return theirs


CASES = {
    "dflash": ("dflash", {}, {}),
    "fewer tokens, llama3": ("dflash", {"attention_bias": True, "rope_parameters": LLAMA3}, {"draft_vocab_size": 64}),
    "windows": ("dflash", WINDOWS, {}),
    "windows to both sides": ("dflash", WINDOWS, {"sliding_window_non_causal": True}),
    "from the anchor": ("dflash", {}, {"sample_from_anchor": True}),
    "dflash2": ("dflash2", WINDOWS, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_drafts_match_speculators(model, tmp_path, name):
    kind, layer, entries = CASES[name]
    theirs = saved(model, tmp_path, kind, layer, **entries)
    ours = BlockDraftModel.from_pretrained(tmp_path, model)
    assert ours.config.target_layer_ids == (0, 3)
    torch.manual_seed(7)
    features, tokens = torch.randn(1, LENGTH, 2 * 128), torch.randint(VOCAB, (1, LENGTH))
    documents, last = torch.zeros(1, LENGTH, dtype=torch.long), torch.randn(1, LENGTH, 128)
    states, logits, _, _, places = theirs._backbone_forward(
        features, tokens, torch.ones(1, LENGTH), last, documents, max_anchors=6
    )
    anchors = places[::BLOCK].tolist()
    first = 0 if entries.get("sample_from_anchor") else 1
    states, logits = (x.view(len(anchors), BLOCK, -1)[:, first:] for x in (states, logits))
    drafter = BlockDrafter(ours, num_nodes=4)
    append_texts(drafter, [tokens[0, : n + 1] for n in anchors], [features[0, :n] for n in anchors])
    found = drafter._guess(tokens[0, anchors], torch.tensor(anchors), BLOCK - first)
    torch.testing.assert_close(found, states, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.logits(found), logits, rtol=1e-5, atol=1e-5)
    if kind == "dflash2":
        before = torch.randint(VOCAB, (len(anchors), 3))
        for level in range(BLOCK - first):
            args = logits[:, level, None].expand(-1, 3, -1), states[:, level, None].expand(-1, 3, -1), before
            candidates, expected = theirs.candidate_selector.select(*args)
            choices = candidates[:, 0], logits[:, level].gather(1, candidates[:, 0])
            scores = ours.candidate_selector(states[:, level], before, *choices)
            torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
