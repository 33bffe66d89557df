"""Tiny random models of transformers' causal architectures, and `generate`'s outcome on each."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pagedtree.generation.drafters import NgramDrafter
from pagedtree.integrations.transformers import ModelDrafter, generate
from support.models import greedy, prompts_of, tiny

KEPT = Path(__file__).resolve().parents[2] / "docs" / "architectures.json"
NAMES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCAB = 128
NEW_TOKENS = 24
WINDOW = 9
LENGTHS = (12, 17, 33)  # beyond the window
# Closer logits tie: another order of sums may swap them.
TIE = 1e-3
REFUSALS = ("model: expected ", 'attention implementation "pagedtree": expected ')
MOST_PARAMETERS = 60_000_000

# Sizes by their config names.
SIZES: dict[str, Any] = {
    field: size
    for size, fields in (
        (128, "hidden_size n_embd d_model embed_dim dim embedding_size emb_dim hidden_size_global"),
        (2, "num_attention_heads n_head n_heads num_heads attention_heads"),
        (2, "decoder_attention_heads encoder_attention_heads depth"),
        (1, "num_key_value_heads multi_query_group_num swa_num_key_value_heads"),
        (64, "head_dim attention_head_dim d_kv swa_head_dim v_head_dim swa_v_head_dim"),
        # Latent attention: queries and keys exceed values; latents of released size.
        (64, "qk_nope_head_dim"),
        (32, "q_lora_rank image_size"),
        (16, "hidden_size_per_layer_input patch_size"),
        (96, "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner d_ff dff dim_ff inner_dim"),
        (96, "moe_intermediate_size shared_expert_intermediate_size intermediate_size_mlp shared_intermediate_size"),
        (96, "moe_shared_expert_intermediate_size"),
        (4, "num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts"),
        (2, "num_experts_per_tok num_experts_per_token moe_top_k top_k_experts moe_k"),
        (1, "n_shared_experts num_shared_experts n_group topk_group moe_topk"),
        (256, "max_position_embeddings n_positions n_ctx max_seq_len original_max_position_embeddings"),
        (WINDOW, "sliding_window sliding_window_size attention_window_size window_size"),
        (VOCAB, "vocab_size vocab_size_per_layer_input"),
        (0, "pad_token_id num_kv_shared_layers"),
        (1, "bos_token_id decoder_start_token_id sep_token_id cls_token_id"),
        (2, "eos_token_id"),
        (True, "use_sliding_window is_decoder"),
        (False, "tie_word_embeddings"),  # tied, every token predicts itself
    )
    for field in fields.split()
}
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers")
ROPE = {"rope_type": "default", "rope_theta": 1e4}
# Further arguments by model type.
MODELS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_expert_group": 2, "topk_group": 1},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 4},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "codegen": {"n_head": 4, "n_embd": 256},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 1, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "diffllama": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    # 512-column heads in full layers, K = V, shared KV layers.
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_n_heads": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"ffn_hidden_size": 96, "expert_ffn_hidden_size": 96, "zero_expert_num": 2, "moe_topk": 2},
    "mamba2": {"num_heads": 4, "n_groups": 1},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 64,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {"axial_pos_embds_dim": [64, 64], "axial_pos_shape": [16, 16]},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {"layers_block_type": ["mamba", "hybrid"]},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}


def shrunk(kind: Any) -> dict[str, Any]:
    """Returns `kind`'s arguments for a tiny model, one layer per default type."""
    base = kind()
    fields = base.to_dict()
    options = {name: value for name, value in SIZES.items() if name in fields}
    layers = next((fields[name] for name in LAYERS if isinstance(fields.get(name), int)), None)
    indices = [0, 1]
    types = fields.get("layer_types")
    if isinstance(types, (list, tuple)) and len(types) == layers:
        indices = sorted({types.index(label) for label in types})
        indices = indices if len(indices) > 1 else [*indices, indices[0] + 1]
    options |= {name: len(indices) for name in LAYERS if isinstance(fields.get(name), int)}
    for name, value in fields.items():
        if layers and isinstance(value, (list, tuple)) and len(value) == layers:
            options[name] = [value[i] for i in indices]
    for name in base.sub_configs:
        if fields.get(name) is not None:
            options[name] = shrunk(type(getattr(base, name)))
    if "kv_lora_rank" in fields:
        options["num_key_value_heads"] = options["num_attention_heads"]
    return options | MODELS.get(kind.model_type, {})


def tiny_model(name: str) -> Any:
    """Builds a random model of type `name`; raises transformers' errors."""
    kind = CONFIG_MAPPING[name]
    config = kind(**shrunk(kind))
    with torch.device("meta"):
        size = AutoModelForCausalLM.from_config(config).num_parameters()
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size} parameters")
    torch.manual_seed(0)
    # SDPA ignores a softcap; eager attention and ours do not.
    softcap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    options = {"attn_implementation": "eager"} if softcap else {}
    model = AutoModelForCausalLM.from_config(config, **options).float().eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter.ndim > 1 or "sink" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.2)
    for field in ("eos_token_id", "bos_token_id", "pad_token_id", "forced_eos_token_id", "forced_bos_token_id"):
        setattr(model.generation_config, field, None)
    return model


def outcome(name: str) -> str:
    """Returns "same", "refused: reason" or "not built: reason" for model type `name`.

    Raises AssertionError for another text; other exceptions escaped from `generate`.
    """
    try:
        model = tiny_model(name)
    except Exception as error:
        return f"not built: {_in_one_line(error)}"
    prompts = [prompt.clamp(min=4) for prompt in prompts_of(LENGTHS)]
    draft = tiny(1, num_hidden_layers=1, vocab_size=model.get_input_embeddings().num_embeddings)
    texts: dict[str, list[Any]] = {}
    failure: Exception | None = None
    try:
        for drafter in (None, NgramDrafter(8), ModelDrafter(draft, num_nodes=8, depth=3, width=2)):
            options = {"drafter": drafter, "max_new_tokens": NEW_TOKENS, "eos_token_id": []}
            texts[type(drafter).__name__], _ = generate(model, prompts, **options)
    except ValueError as error:
        if not texts and (told := str(error).removeprefix("generate: ")).startswith(REFUSALS):  # ours, by any drafter
            return f"refused: {told}"
        failure = error
    except Exception as error:
        failure = error
    try:
        expected = [greedy(model, prompt, NEW_TOKENS, pad_token_id=0) for prompt in prompts]
    except Exception as error:
        return f"not built: its own generate fails: {_in_one_line(error)}"
    if failure is not None:
        raise failure
    for drafter_name, answers in texts.items():
        for text, right in zip(answers, expected, strict=True):
            check_same(model, text.tolist(), right, f"{name}, {drafter_name}")
    return "same"


def _in_one_line(error: Exception) -> str:
    told = "a library is missing" if isinstance(error, ImportError) else " ".join(str(error).split())[:150]
    return f"{type(error).__name__}: {told}"


def check_same(model: Any, text: list[int], expected: list[int], what: str) -> None:
    """Asserts equal texts up to a tie of the model's logits."""
    if text == expected:
        return
    assert len(text) == len(expected), f"{what}: {len(text)} tokens, expected {len(expected)}"
    first = next(i for i, (a, b) in enumerate(zip(text, expected, strict=True)) if a != b)
    with torch.no_grad():
        logits = model(torch.tensor([expected[:first]])).logits[0, -1]
    margin = float((logits[expected[first]] - logits[text[first]]).abs())
    assert margin < TIE, f"{what}: another token at {first}, {margin:.3g} below the model's own"


def main() -> None:
    """Prints the outcomes of the named model types; writes the outcomes of all to the documents."""
    warnings.simplefilter("ignore")
    outcomes = {}
    for name in sys.argv[1:] or NAMES:
        outcomes[name] = outcome(name)
        print(f"{name}: {outcomes[name]}", flush=True)
    if len(outcomes) == len(NAMES):
        record = {"transformers": transformers.__version__, "outcomes": outcomes}
        KEPT.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
