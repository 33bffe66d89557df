"""EAGLE-3 and P-EAGLE heads saved by speculators compute as its forward does."""

from __future__ import annotations

from functools import partial

import pytest
import torch

pytest.importorskip("transformers")

from published_case import SIZES, dense, speculators_config
from support.heads import randomised
from support.models import VOCAB, tiny

from pagedtree.generation.drafters import EagleHead

pytest.importorskip("speculators", reason="make test-engines ENGINE=speculators")

from speculators.losses import resolve_loss_config
from speculators.models.eagle3.config import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.models.peagle.config import PEagleSpeculatorConfig
from speculators.models.peagle.core import PEagleDraftModel
from speculators.models.peagle.data import generate_cod_sample_indices
from transformers import LlamaConfig, Qwen3Config

pytestmark = pytest.mark.usefixtures("one_thread")

LAYER_IDS = [1, 3, 2]
LENGTH, STEPS = 12, 3
LAYERS = {
    "llama": partial(LlamaConfig, num_hidden_layers=1),
    "qwen3": partial(Qwen3Config, num_hidden_layers=1),
    "qwen3 of two layers with biases": partial(Qwen3Config, num_hidden_layers=2, attention_bias=True),
}
FLAGS = [{}, {"norm_before_fc": True, "norm_before_residual": True}, {"fc_norm": True, "norm_output": True}]


@pytest.fixture(scope="module")
def model():
    return tiny(0, num_hidden_layers=4)


def saved(model, folder, kind, layer, draft_vocab, **entries):
    make, config = {
        "eagle3": (Eagle3DraftModel, Eagle3SpeculatorConfig),
        "peagle": (PEagleDraftModel, PEagleSpeculatorConfig),
    }[kind]
    sizes = LAYERS[layer](**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    sizes._attn_implementation = "eager"
    head = make(
        config(
            transformer_layer_config=sizes,
            draft_vocab_size=draft_vocab,
            eagle_aux_hidden_state_layer_ids=LAYER_IDS,
            speculators_config=speculators_config(kind, STEPS),
            **entries,
        )
    )
    randomised(head)
    if draft_vocab < VOCAB:
        ids = torch.arange(1, VOCAB, 2)
        head.load_vocab_mappings(torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True), ids - torch.arange(64))
    head.save_pretrained(folder)
    return head


def logits_of(module, call):
    found = []
    handle = module.lm_head.register_forward_hook(lambda _, args, out: found.append(out[0]))
    call()
    handle.remove()
    return found


class Cached:
    """Attends to rows of earlier calls, too."""

    def __init__(self):
        self.known = {}

    def __call__(self, q, k, v, layer=0):
        before = self.known.get(layer)
        keys, values = (k, v) if before is None else (torch.cat([before[0], k]), torch.cat([before[1], v]))
        self.known[layer] = keys, values
        mask = torch.ones(len(q), len(keys), dtype=torch.bool).tril(len(keys) - len(q))
        return dense(q, keys, values, mask)


@pytest.mark.parametrize("entries", FLAGS, ids=lambda entries: ", ".join(entries) or "plain")
@pytest.mark.parametrize(("layer", "draft_vocab"), [("llama", 64), ("qwen3", VOCAB), (list(LAYERS)[2], 64)])
def test_eagle3(model, tmp_path, layer, draft_vocab, entries):
    """In each training pass a position drafts the text's tokens from its state."""
    theirs = saved(model, tmp_path, "eagle3", layer, draft_vocab, **entries)
    head = EagleHead.from_pretrained(tmp_path, model)
    assert head.feature_layers == (0, 2, 1) and head.vocab_size == draft_vocab
    torch.manual_seed(7)
    features, tokens = torch.randn(1, LENGTH, 3 * 128), torch.randint(VOCAB, (1, LENGTH))
    call = partial(theirs, features, tokens, torch.zeros(1, LENGTH, dtype=torch.long), ttt_steps=STEPS)
    expected = logits_of(theirs, call)
    assert len(expected) == STEPS
    for end in range(1, LENGTH - STEPS):
        attend, states = Cached(), head.fuse(features[0, :end])
        states = head(tokens[0, :end], states, torch.arange(end), attend)[-1:]
        for step in range(STEPS):
            torch.testing.assert_close(head.logits(states)[0], expected[step][end - 1], rtol=1e-5, atol=1e-5)
            place = torch.tensor([end + step])
            states = head(tokens[0, place], states, place, attend)


def test_peagle(model, tmp_path):
    """Unknown tokens follow many positions of a training pass."""
    theirs = saved(model, tmp_path, "peagle", list(LAYERS)[2], 64, fc_norm=True, mask_token_id=3)
    head = EagleHead.from_pretrained(tmp_path, model)
    torch.manual_seed(7)
    features, tokens = torch.randn(1, LENGTH, 3 * 128), torch.randint(VOCAB, (1, LENGTH))
    documents = torch.zeros(1, LENGTH, dtype=torch.long)
    call = partial(theirs, features, tokens, documents, verifier_last_hidden_states=torch.randn(1, LENGTH, 128))
    ratios = {"num_depths": STEPS, "down_sample_ratio": 1.0, "down_sample_ratio_min": 1.0}
    torch.manual_seed(8)  # its choice of positions
    (expected,) = logits_of(theirs, lambda: call(**ratios, loss_config=resolve_loss_config("kl_div", "eager")))
    torch.manual_seed(8)
    anchors, depths = generate_cod_sample_indices(LENGTH, torch.ones(1, LENGTH), **ratios)
    compared = 0
    for row, (anchor, depth) in enumerate(zip(anchors.tolist(), depths.tolist(), strict=True)):
        ids = torch.cat([tokens[0, : anchor + 1], torch.full((depth,), 3)])
        states = torch.cat([head.fuse(features[0, : anchor + 1]), head.unknown_state().expand(depth, -1)])
        out = head(ids, states, torch.arange(len(ids)), Cached())
        torch.testing.assert_close(head.logits(out[-1]), expected[row], rtol=1e-5, atol=1e-5)
        compared += depth > 0
    assert compared > LENGTH
