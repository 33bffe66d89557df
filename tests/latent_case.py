"""Tiny random models of latent attention, latents of released width."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from generate_case import NO_TOKENS, VOCAB

TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 512,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "max_position_embeddings": 256,
    **NO_TOKENS,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}
# Every rotation, scale and projection; the first layer is dense, others have experts.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("DeepseekV3", {"num_hidden_layers": 4, "first_k_dense_replace": 1}),
    "deepseek_v3, halves": ("DeepseekV3", {"rope_interleave": False, "first_k_dense_replace": 1, "q_lora_rank": None}),
    "deepseek_v3, yarn": ("DeepseekV3", {"rope_parameters": YARN, "first_k_dense_replace": 1}),
    "deepseek_v2": (
        "DeepseekV2",
        {"first_k_dense_replace": 1, "rope_parameters": YARN, "topk_method": "group_limited_greedy"},
    ),
    "deepseek_v2, unscaled": ("DeepseekV2", {"first_k_dense_replace": 1, "q_lora_rank": None}),
    "glm4_moe_lite": ("Glm4MoeLite", {"qk_nope_head_dim": 192, "v_head_dim": 256}),
    "mistral4": ("Mistral4", {"kv_lora_rank": 256, "qk_nope_head_dim": 64}),
}


def tiny_latent(name: str = "deepseek_v3", **options: Any) -> Any:
    """Builds one of MODELS with its own attention, in fp32."""
    kind, fields = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**TINY, **fields, **options})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter.ndim > 1:  # else greedy text repeats one token
            torch.nn.init.normal_(parameter, std=0.2)
        elif "layernorm" in parameter_name:  # reveals an omitted norm
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            torch.nn.init.normal_(module.e_score_correction_bias, std=0.1)
    return model
