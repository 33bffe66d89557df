"""Tiny random models of full, hybrid and latent attention, and their own texts."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

from pagedtree import SamplingParams, sample
from pagedtree.generation.drafters import EagleHead, MedusaHeads
from pagedtree.integrations.transformers import generate

IS_5 = int(transformers.__version__.split(".")[0]) >= 5
VOCAB = 128
# No token ends, begins or pads a text.
NO_TOKENS = dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"))
NEW_TOKENS = 20
LENGTHS = (5, 17, 1, 33)
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.2,  # less, and greedy text repeats one token
    **NO_TOKENS,
}
SAMPLING = SamplingParams(temperature=0.8, top_p=0.95)

# Mistral's window; Gemma 2's softcap, alternating windows; gpt-oss's sinks, alternating windows.
MODELS = {
    "full": (LlamaForCausalLM, LlamaConfig, {}),
    "window": (MistralForCausalLM, MistralConfig, {"sliding_window": 9}),
    "softcap": (
        Gemma2ForCausalLM,
        Gemma2Config,
        {
            "sliding_window": 9,
            "query_pre_attn_scalar": 64,
            "attn_logit_softcapping": 3.0,
            "tie_word_embeddings": False,  # tied, every token predicts itself
            "attn_implementation": "eager",
        },
    ),
    "sinks": (
        GptOssForCausalLM,
        GptOssConfig,
        {
            "sliding_window": 9,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "attn_implementation": "eager",
        },
    ),
}


def tiny(seed: int, kind=LlamaForCausalLM, config=LlamaConfig, **options):
    torch.manual_seed(seed)
    return kind(config(**{**TINY, **options})).eval()


def gpt2(num_positions, seed=0):
    """Builds a model of `num_positions`."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCAB, "n_embd": 128, "n_layer": 2, "n_head": 2, "n_positions": num_positions}
    config = GPT2Config(**sizes, initializer_range=0.2, eos_token_id=None, bos_token_id=None)
    return GPT2LMHeadModel(config).eval()


def tiny_of(name: str, **options):
    """Builds one of MODELS with its own attention."""
    kind, config, fields = MODELS[name]
    model = tiny(0, kind, config, **fields, **options)
    if name == "sinks":
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks, std=2.0)
    return model


def tiny_eagle(model):
    """Builds a random EAGLE-3 head on two layers; it drafts even tokens."""
    torch.manual_seed(2)
    hidden = model.config.hidden_size
    sizes = {"hidden_size": hidden, "intermediate_size": 64, "num_attention_heads": hidden // 64, "vocab_size": VOCAB}
    head = EagleHead(sizes, model.model.embed_tokens, model.lm_head, (0, 1), torch.arange(0, VOCAB, 2))
    return head.to(model.lm_head.weight).eval()


def tiny_heads(model, num_heads=3, std=0.05):
    heads = MedusaHeads(model.config.hidden_size, num_heads, model.lm_head)
    torch.nn.init.normal_(heads.weight, std=std, generator=torch.Generator().manual_seed(3))
    return heads.to(model.lm_head.weight)


# ---- hybrid and latent attention

# Sizes of hybrid and latent models.
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "max_position_embeddings": 256,
    **NO_TOKENS,
}
KINDS = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
TINY_HYBRID: dict[str, Any] = {
    **SMALL,
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "tie_word_embeddings": False,
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
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
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
    """Builds one of HYBRIDS with its own attention, in fp32."""
    kind, fields = HYBRIDS[name]
    text = getattr(transformers, f"{kind}TextConfig", None)
    config = (text or getattr(transformers, f"{kind}Config"))(**{**TINY_HYBRID, **fields, **options})
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


TINY_LATENT: dict[str, Any] = {
    **SMALL,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 3,
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
LATENTS: dict[str, tuple[str, dict[str, Any]]] = {
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
    """Builds one of LATENTS with its own attention, in fp32."""
    kind, fields = LATENTS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**TINY_LATENT, **fields, **options})
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


# ---- texts


def words(count):
    """Builds a tokenizer of w0, w1, ... between blanks."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(count)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def prompts_of(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length,), generator=generator) for length in lengths]


def greedy(model, prompt, count=NEW_TOKENS, **options):
    return model.generate(prompt[None], max_new_tokens=count, do_sample=False, **options)[0].tolist()


def sampled(model, prompt, seed, params=SAMPLING, count=NEW_TOKENS):
    """Decodes by `sample` on the model's own attention; a list of seeds returns a list of texts."""
    seeds = torch.tensor(seed).view(-1)
    rows = prompt.expand(len(seeds), -1)
    for _ in range(count):
        with torch.no_grad():
            logits = model(rows).logits[:, -1]
        positions = torch.full_like(seeds, rows.shape[1] - 1)
        rows = torch.cat([rows, sample(logits, params, seeds=seeds, positions=positions)[:, None]], dim=1)
    return rows.tolist() if isinstance(seed, list) else rows[0].tolist()


def lists(sequences):
    return [sequence.tolist() for sequence in sequences]


def generated(model, drafter=None, prompts=None, count=NEW_TOKENS, **options):
    """Returns `generate`'s texts as lists, by default for LENGTHS, and statistics."""
    prompts = prompts_of(LENGTHS) if prompts is None else prompts
    sequences, stats = generate(model, prompts, drafter=drafter, max_new_tokens=count, **options)
    return lists(sequences), stats


def room_of(result):
    """Returns each sequence's greatest node depth: its last token is never read."""
    starts = result.start[: len(result.sequences)].tolist()  # without idle rows
    return [s.max_length - 2 - start for s, start in zip(result.sequences, starts, strict=True)]


def holds_in_a_child(check):
    """Returns check() of a forked, single-threaded process, within a minute."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        code = 1
        try:
            code = 0 if check() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
