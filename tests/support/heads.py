"""Draft heads with random weights: EAGLE, block drafters, multi-token prediction."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import torch
from safetensors.torch import save_file
from torch.nn import functional as F
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding, rotate_half

from pagedtree.generation.drafters import BlockDraftConfig, BlockDraftModel, EagleHead
from pagedtree.integrations.transformers import MtpHead
from support.models import VOCAB, tiny, tiny_hybrid, tiny_latent

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


def causal_attention(q, k, v, layer=0):
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


# ---- block drafters, and their results by transformers' Qwen 3 layers

LAYER = {name: size for name, size in SIZES.items() if name != "vocab_size"}
DFLASH = BlockDraftConfig(**LAYER, num_hidden_layers=2, block_size=6, mask_token_id=3, target_layer_ids=(0, 1))

DFLASH2 = replace(
    DFLASH,
    vocab_size=VOCAB,
    conv_kernel_size=2,
    conv_group_size=16,
    selector_rank=8,
    selector_top_k=6,
    layer_types=("sliding_attention", "full_attention"),
    sliding_window=4,
    is_causal=False,
)


def block_model(model, config=DFLASH, seed=4):
    torch.manual_seed(seed)
    drafter = BlockDraftModel(config, model.get_input_embeddings(), model.get_output_embeddings())
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.2)
    return drafter.to(model.lm_head.weight).eval()


@torch.no_grad()
def dense_block_logits(model, drafter, text):
    """Returns logits [block_size - 1, V] after `text`, without a cache."""
    config, count = drafter.config, len(text) - 1
    rotary = {"rope_type": "default", "rope_theta": config.rope_theta}
    sizes = {name: value for name, value in vars(config).items() if name in (*LAYER, "rms_norm_eps")}
    qwen = Qwen3Config(**sizes, rope_parameters=rotary)
    qwen.rope_theta = config.rope_theta  # for transformers 4
    features = features_of(model, text, config.target_layer_ids)[:count] if count else torch.empty(0, 2 * 128)
    states = model.get_input_embeddings()(torch.tensor([text[-1]] + [config.mask_token_id] * (config.block_size - 1)))
    context = drafter.hidden_norm(features @ drafter.fc.weight.T)
    positions = torch.arange(count + config.block_size)
    cos, sin = (part[0] for part in Qwen3RotaryEmbedding(qwen)(states, positions[None]))
    for i, module in enumerate(drafter.layers):
        layer = Qwen3DecoderLayer(qwen, layer_idx=0)
        layer.load_state_dict(module.state_dict())  # equal names
        attention, inputs = layer.self_attn, layer.input_layernorm(states)
        everything = torch.cat([context, inputs])
        projected = attention.q_proj(inputs), attention.k_proj(everything), attention.v_proj(everything)
        q, k, v = (x.unflatten(-1, (-1, config.head_dim)).transpose(0, 1) for x in projected)
        q, k = attention.q_norm(q), attention.k_norm(k)
        q = q * cos[count:] + rotate_half(q) * sin[count:]
        k = k * cos + rotate_half(k) * sin
        groups = config.num_attention_heads // config.num_key_value_heads
        k, v = (x.repeat_interleave(groups, dim=0) for x in (k, v))
        scores = q @ k.transpose(1, 2) * config.head_dim**-0.5
        distance = positions[count:, None] - positions
        window = config.window(i)
        if window is not None:
            scores = scores.masked_fill((distance < 0) | (distance >= (window or len(positions))), float("-inf"))
        out = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        states = states + attention.o_proj(out)
        states = states + layer.mlp(layer.post_attention_layernorm(states))
    return model.get_output_embeddings()(drafter.norm(states[1:]))


# ---- multi-token prediction layers in released forms

PARTS = ("token_norm", "state_norm", "projection", "final_norm", "layer")
DEEPSEEK = dict(zip(PARTS, ("enorm", "hnorm", "eh_proj", "shared_head.norm", ""), strict=True))
QWEN = dict(zip(PARTS, ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.0."), strict=True))
MIMO = dict(zip(PARTS, ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", ""), strict=True))
MTP_SIZES = {"intermediate_size": 96, "num_hidden_layers": 3, "max_position_embeddings": 256}
EXPERTS = {
    "moe_intermediate_size": 48,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "use_qk_norm": True,
}


def tiny_glm():
    return tiny(0, Glm4MoeForCausalLM, Glm4MoeConfig, **MTP_SIZES, **EXPERTS)


def tiny_qwen():
    return tiny(0, Qwen3ForCausalLM, Qwen3Config, **MTP_SIZES)


# Form -> target, prefix and names of the layer's tensors.
FORMS = {
    "deepseek_v3": (lambda: tiny_latent("deepseek_v3"), "model.layers.4.", DEEPSEEK),
    "glm4_moe": (tiny_glm, "model.layers.3.", DEEPSEEK),
    "glm4_moe_lite": (lambda: tiny_latent("glm4_moe_lite"), "model.layers.3.", DEEPSEEK),
    "qwen3_next": (tiny_hybrid, "mtp.", QWEN),
    "qwen3_5": (lambda: tiny_hybrid("qwen3_5"), "mtp.", QWEN),
    "qwen3_5_moe": (lambda: tiny_hybrid("qwen3_5_moe"), "mtp.", QWEN),
    "mimo": (lambda: tiny(0), "model.mtp_layers.0.", MIMO),
}


def random_head(model, name=""):
    """Builds the target's kind of layer; MiMo's reads the state first."""
    return randomised(MtpHead(model, is_state_first=name == "mimo")).requires_grad_(True)


def write_layer(model, head, name, folder):
    """Writes a released folder: config.json, tensors of target and layer."""
    _, prefix, names = FORMS[name]
    tensors = {"model.norm.weight": model.get_decoder().norm.weight}
    for label, tensor in head.state_dict().items():
        part, _, suffix = label.partition(".")
        tensors |= _one_by_one(f"{prefix}{names[part]}{'' if part == 'layer' else '.'}{suffix}", tensor)
    if names is DEEPSEEK:  # repeats shared tensors
        tensors[f"{prefix}embed_tokens.weight"] = model.get_input_embeddings().weight
        tensors[f"{prefix}self_attn.rotary_emb.inv_freq"] = torch.ones(32)
        tensors[f"{prefix}shared_head.head.weight"] = model.get_output_embeddings().weight
    folder.mkdir(parents=True, exist_ok=True)
    copies = {key: tensor.detach().clone().contiguous() for key, tensor in tensors.items()}
    save_file(copies, folder / "model.safetensors")
    architecture = type(model).__name__
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], "num_nextn_predict_layers": 1}))


def _one_by_one(name, tensor):
    """Splits experts' matrices as checkpoints do."""
    base, _, kind = name.rpartition(".")
    if not base.endswith("experts"):
        return {name: tensor}
    kinds = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}[kind]
    parts = [zip(kinds, matrix.chunk(len(kinds)), strict=True) for matrix in tensor]
    return {f"{base}.{i}.{kind}_proj.weight": part for i, expert in enumerate(parts) for kind, part in expert}
