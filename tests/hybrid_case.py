"""Tiny random models of recurrent and attention layers."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from generate_case import NO_TOKENS, VOCAB

KINDS = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    **NO_TOKENS,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DELTA = {
    "layer_types": KINDS,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 24, "mamba_n_groups": 2, "mamba_expand": 2}
LATENT = {
    "num_key_value_heads": 2,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "n_group": 1,
    "topk_group": 1,
}
# time_step_min: Nemotron-H bounds dt in prompts, not in generated tokens.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3Next", {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3_5": ("Qwen3_5", DELTA),
    "qwen3_5_moe": ("Qwen3_5Moe", {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 32}),
    "olmo_hybrid": ("OlmoHybrid", {**DELTA, "linear_num_key_heads": 4, "linear_allow_neg_eigval": True}),
    "kimi_linear": (
        "KimiLinear",
        {**EXPERTS, **LATENT, "layer_types": KINDS, "linear_head_dim": 16, "linear_num_heads": 3},
    ),
    "nemotron_h": (
        "NemotronH",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "mlp"],
            "num_hidden_layers": 5,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 24,
            "n_groups": 2,
            "time_step_min": 0.5,
            "n_routed_experts": 4,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
    "bamba": ("Bamba", {**MAMBA, "attn_layer_indices": [2]}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {**MAMBA, "layer_types": KINDS, "num_local_experts": 4, "shared_intermediate_size": 32},
    ),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "conv", "full_attention", "conv"], "conv_bias": True}),
    "falcon_h1": ("FalconH1", {**MAMBA, "mamba_d_ssm": 128}),
}


def tiny_hybrid(name: str = "qwen3_next", **options: Any) -> Any:
    """Builds one of MODELS with its own attention, in fp32."""
    kind, fields = MODELS[name]
    text = getattr(transformers, f"{kind}TextConfig", None)
    config = (text or getattr(transformers, f"{kind}Config"))(**{**TINY, **fields, **options})
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter.ndim > 1 and not parameter_name.endswith("A_log"):  # else greedy text repeats one token
            torch.nn.init.normal_(parameter, std=0.5 if "conv1d" in parameter_name else 0.2)
        elif parameter_name.endswith("A_log"):  # keeps states alive
            torch.nn.init.uniform_(parameter, -3.0, 0.0)
        elif parameter_name.endswith(("dt_bias", "bias", ".D")):
            torch.nn.init.normal_(parameter, std=0.5)
    return model
