"""MTP layers saved by speculators compute as its forward does."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from published_case import speculators_config
from support.heads import randomised, tiny_qwen
from support.models import VOCAB, tiny_hybrid

from pagedtree.integrations.transformers import MtpHead

pytest.importorskip("speculators", reason="make test-engines ENGINE=speculators")

from speculators.models.mtp.config import MTPSpeculatorConfig
from speculators.models.mtp.core import MTPDraftModel

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTH, STEPS = 14, 3
TARGETS = {"qwen3": tiny_qwen, "qwen3_next": tiny_hybrid, "qwen3_5": lambda: tiny_hybrid("qwen3_5")}


@pytest.fixture(scope="module", params=TARGETS)
def case(request, tmp_path_factory):
    model, folder = TARGETS[request.param](), tmp_path_factory.mktemp(request.param)
    config = MTPSpeculatorConfig(
        transformer_layer_config=model.config,
        speculators_config=speculators_config("mtp", STEPS, type(model).__name__),
    )
    theirs = randomised(MTPDraftModel(config))
    theirs.embed_tokens.weight.copy_(model.get_input_embeddings().weight)
    theirs.lm_head.weight.copy_(model.get_output_embeddings().weight)
    theirs.save_pretrained(folder)
    return model, theirs, folder


def test_logits(case):
    """Training passes start from states of the one before."""
    model, theirs, folder = case
    head = MtpHead.from_pretrained(folder, model)
    torch.manual_seed(7)
    hidden = model.config.get_text_config().hidden_size
    tokens, states = torch.randint(VOCAB, (LENGTH,)), torch.randn(LENGTH, hidden)
    expected, _, _ = theirs(tokens[None], states[None])
    assert len(expected) == STEPS
    count = expected[0].shape[1]
    states = states[:count]
    with torch.no_grad():
        for step, logits in enumerate(expected):
            states = head(tokens[step + 1 : step + 1 + count], states, torch.arange(count))
            assert (head.logits(states) - logits[0]).abs().max() <= 1e-5 * logits.abs().max()
