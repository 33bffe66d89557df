"""Speculators' heads with random weights."""

from __future__ import annotations

from functools import partial

import torch
from generate_case import VOCAB
from torch.nn import functional as F

from pagedtree.integrations.transformers import EagleHead

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCAB,
}
LAYERS = (0, 2, 1)
EVERY_SECOND = torch.arange(1, VOCAB, 2)
SPECULATORS = {
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "somebody/their-model"},
    },
    "speculators_version": "0.9.0",
}


def randomised(module, seed=5):
    """Draws weights that survive rounding, and norms near 1."""
    torch.manual_seed(seed)
    for parameter in module.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.1)
        else:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return module.requires_grad_(False).eval()


def eagle_head(model, target_ids=EVERY_SECOND, **entries):
    """Builds a head on three of four layers."""
    config = {**SIZES, "rms_norm_eps": 1e-5, **entries}
    return randomised(EagleHead(config, model.model.embed_tokens, model.lm_head, LAYERS, target_ids))


def features_of(model, text, layers=LAYERS):
    """Returns these layers' states [T, F] in the target, by independent hooks."""
    found = {}

    def hook(_, args, out, *, layer):
        found[layer] = out[0] if isinstance(out, tuple) else out

    every = model.get_decoder().layers
    handles = [every[i].register_forward_hook(partial(hook, layer=i)) for i in layers]
    with torch.no_grad():
        model(torch.tensor([text]))
    for handle in handles:
        handle.remove()
    return torch.cat([found[i].view(len(text), -1) for i in layers], dim=-1)


def causal(q, k, v, layer=0):
    """Computes attention: q [T, Hq, D], k and v [T, Hkv, D]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def head_of_speculators(model, **more):
    """Builds two Qwen 3 layers with biases."""
    layer = {**SIZES, "model_type": "qwen3", "num_hidden_layers": 2, "attention_bias": True}
    config = {"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", **more}
    config = {**config, "transformer_layer_config": layer, **SPECULATORS}
    ids = torch.arange(0, VOCAB, 2)
    return randomised(EagleHead(config, model.model.embed_tokens, model.lm_head, (0, 1), ids))


def parallel_head(model):
    kind = {"speculators_model_type": "peagle", "architectures": ["PEagleDraftModel"]}
    return head_of_speculators(model, **kind, mask_token_id=3)
