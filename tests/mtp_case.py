"""Multi-token prediction layers with random weights, in the forms in which models ship them."""

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

DEEPSEEK = {
    "token_norm": "enorm",
    "state_norm": "hnorm",
    "projection": "eh_proj",
    "final_norm": "shared_head.norm",
    "layer": "",
}
QWEN = {
    "token_norm": "pre_fc_norm_embedding",
    "state_norm": "pre_fc_norm_hidden",
    "projection": "fc",
    "final_norm": "norm",
    "layer": "layers.0.",
}
MIMO = {
    "token_norm": "token_layernorm",
    "state_norm": "hidden_layernorm",
    "projection": "input_proj",
    "final_norm": "final_layernorm",
    "layer": "",
}


def tiny_glm(**options):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 128,
        "hidden_size": 128,
        "intermediate_size": 96,
        "moe_intermediate_size": 48,
        "head_dim": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 256,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
        "use_qk_norm": True,
    }
    return _spread(Glm4MoeForCausalLM(Glm4MoeConfig(**{**sizes, **options})).eval())


def tiny_qwen(**options):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 128,
        "hidden_size": 128,
        "intermediate_size": 96,
        "head_dim": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    return _spread(Qwen3ForCausalLM(Qwen3Config(**{**sizes, **options})).eval())


def _spread(model):
    for parameter in model.parameters():
        if parameter.ndim > 1:  # otherwise greedy text repeats one token
            torch.nn.init.normal_(parameter, std=0.2)
    return model


# For each form: a target, the prefix of the layer's tensors, and their names.
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
    """A layer of the target's kind; that of MiMo reads the state first."""
    return randomised(MtpHead(model, is_state_first=name == "mimo")).requires_grad_(True)


def write_layer(model, head, name, folder):
    """A folder as the model's maker has it: config.json, tensors of the target, and those of the layer."""
    _, prefix, names = FORMS[name]
    tensors = {"model.norm.weight": model.get_decoder().norm.weight}
    for own, tensor in head.state_dict().items():
        part, _, rest = own.partition(".")
        tensors |= _one_by_one(
            f"{prefix}{names[part]}{rest}" if part == "layer" else f"{prefix}{names[part]}.{rest}", tensor
        )
    if names is DEEPSEEK:  # it repeats what it shares with the model
        tensors[f"{prefix}embed_tokens.weight"] = model.get_input_embeddings().weight
        tensors[f"{prefix}self_attn.rotary_emb.inv_freq"] = torch.ones(32)
        tensors[f"{prefix}shared_head.head.weight"] = model.get_output_embeddings().weight
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {key: tensor.detach().clone().contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors"
    )
    architecture = type(model).__name__
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], "num_nextn_predict_layers": 1}))


def _one_by_one(name, tensor):
    """The matrices of experts, which checkpoints have one by one."""
    if name.endswith("experts.gate_up_proj"):
        parts = [
            (f"{i}.{kind}", part)
            for i, each in enumerate(tensor)
            for kind, part in zip(("gate", "up"), each.chunk(2), strict=True)
        ]
    elif name.endswith("experts.down_proj"):
        parts = [(f"{i}.down", each) for i, each in enumerate(tensor)]
    else:
        return {name: tensor}
    base = name.rpartition(".")[0]
    return {f"{base}.{part}_proj.weight": each for part, each in parts}
