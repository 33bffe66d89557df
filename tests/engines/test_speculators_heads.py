"""EAGLE-3, P-EAGLE, DFlash and MTP heads saved by speculators compute as its forward does."""

from __future__ import annotations

from functools import partial

import pytest
import torch

pytest.importorskip("transformers")

from published_case import SIZES, append_texts, dense, speculators_config
from support.heads import randomised, tiny_qwen
from support.models import VOCAB, tiny, tiny_hybrid

from pagedtree.generation.drafters import BlockDrafter, BlockDraftModel, EagleHead
from pagedtree.integrations.transformers import MtpHead

pytest.importorskip("speculators", reason="make test-engines ENGINE=speculators")

from speculators.losses import resolve_loss_config
from speculators.models.dflash.config import DFlashSpeculatorConfig
from speculators.models.dflash.core import DFlashDraftModel
from speculators.models.dflash2.config import DFlash2SpeculatorConfig
from speculators.models.dflash2.core import DFlash2DraftModel
from speculators.models.eagle3.config import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.models.mtp.config import MTPSpeculatorConfig
from speculators.models.mtp.core import MTPDraftModel
from speculators.models.peagle.config import PEagleSpeculatorConfig
from speculators.models.peagle.core import PEagleDraftModel
from speculators.models.peagle.data import generate_cod_sample_indices
from transformers import LlamaConfig, Qwen3Config

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK, STEPS, LENGTH = 5, 3, 20
MAKE = {
    "eagle3": (Eagle3DraftModel, Eagle3SpeculatorConfig),
    "peagle": (PEagleDraftModel, PEagleSpeculatorConfig),
    "dflash": (DFlashDraftModel, DFlashSpeculatorConfig),
    "dflash2": (DFlash2DraftModel, DFlash2SpeculatorConfig),
    "mtp": (MTPDraftModel, MTPSpeculatorConfig),
}


@pytest.fixture(scope="module")
def model():
    return tiny(0, num_hidden_layers=4)


def saved(model, folder, kind, layer, draft_vocab_size=None, **entries):
    """Saves a random head; those that draft from the target's own layers have its matrices."""
    make, config = MAKE[kind]
    if draft_vocab_size is not None:
        layer._attn_implementation = "eager"
        entries["draft_vocab_size"] = draft_vocab_size
    steps = BLOCK - 1 if "dflash" in kind else STEPS
    described = speculators_config(kind, steps, type(model).__name__)
    theirs = randomised(make(config(transformer_layer_config=layer, speculators_config=described, **entries)))
    if draft_vocab_size == VOCAB // 2:
        ids = torch.arange(1, VOCAB, 2)
        theirs.load_vocab_mappings(
            torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True), ids - torch.arange(64)
        )
    if "eagle" not in kind:
        theirs.embed_tokens.weight.copy_(model.get_input_embeddings().weight)
        if draft_vocab_size != VOCAB // 2:
            theirs.lm_head.weight.copy_(model.get_output_embeddings().weight)
    theirs.save_pretrained(folder)
    return theirs


# ---- EAGLE-3 and P-EAGLE

LAYER_IDS = {"eagle_aux_hidden_state_layer_ids": [1, 3, 2]}
LAYERS = {
    "llama": partial(LlamaConfig, num_hidden_layers=1),
    "qwen3": partial(Qwen3Config, num_hidden_layers=1),
    "qwen3 of two layers with biases": partial(Qwen3Config, num_hidden_layers=2, attention_bias=True),
}
FLAGS = [{}, {"norm_before_fc": True, "norm_before_residual": True}, {"fc_norm": True, "norm_output": True}]


def layer_of(name):
    return LAYERS[name](**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 5e5})


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
    theirs = saved(model, tmp_path, "eagle3", layer_of(layer), draft_vocab, **LAYER_IDS, **entries)
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
    theirs = saved(model, tmp_path, "peagle", layer_of(list(LAYERS)[2]), 64, **LAYER_IDS, fc_norm=True, mask_token_id=3)
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


# ---- DFlash

WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "use_sliding_window": True}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

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
    selector = {"conv_kernel_size": 3, "selector_rank": 8, "selector_top_k": 6} if kind == "dflash2" else {}
    form = {"block_size": BLOCK, "aux_hidden_state_layer_ids": [1, 4], "mask_token_id": 3, **selector}
    sizes = Qwen3Config(**SIZES, num_hidden_layers=2, **layer)
    theirs = saved(model, tmp_path, kind, sizes, **{"draft_vocab_size": VOCAB, **form, **entries})
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
    torch.testing.assert_close(ours.logits(found), logits, rtol=1e-5, atol=3e-5)
    if kind == "dflash2":
        before = torch.randint(VOCAB, (len(anchors), 3))
        for level in range(BLOCK - first):
            args = logits[:, level, None].expand(-1, 3, -1), states[:, level, None].expand(-1, 3, -1), before
            candidates, expected = theirs.candidate_selector.select(*args)
            choices = candidates[:, 0], logits[:, level].gather(1, candidates[:, 0])
            scores = ours.candidate_selector(states[:, level], before, *choices)
            torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)


# ---- multi-token prediction

TARGETS = {"qwen3": tiny_qwen, "qwen3_next": tiny_hybrid, "qwen3_5": lambda: tiny_hybrid("qwen3_5")}


@pytest.mark.parametrize("name", TARGETS)
def test_mtp(tmp_path, name):
    """Training passes start from states of the one before."""
    model = TARGETS[name]()
    theirs = saved(model, tmp_path, "mtp", model.config)
    head = MtpHead.from_pretrained(tmp_path, model)
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
