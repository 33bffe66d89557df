"""Random multi-token prediction layers in released forms."""

from __future__ import annotations

import json

import torch
from eagle_case import randomised
from generate_case import tiny
from hybrid_case import tiny_hybrid
from latent_case import tiny_latent
from safetensors.torch import save_file
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, Qwen3Config, Qwen3ForCausalLM

from pagedtree.integrations.transformers import MtpHead

PARTS = ("token_norm", "state_norm", "projection", "final_norm", "layer")
DEEPSEEK = dict(zip(PARTS, ("enorm", "hnorm", "eh_proj", "shared_head.norm", ""), strict=True))
QWEN = dict(zip(PARTS, ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.0."), strict=True))
MIMO = dict(zip(PARTS, ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", ""), strict=True))
SIZES = {"intermediate_size": 96, "num_hidden_layers": 3, "max_position_embeddings": 256}
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
    return tiny(0, Glm4MoeForCausalLM, Glm4MoeConfig, **SIZES, **EXPERTS)


def tiny_qwen():
    return tiny(0, Qwen3ForCausalLM, Qwen3Config, **SIZES)


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
