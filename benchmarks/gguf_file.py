"""A Llama as a GGUF file."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf

__all__ = ["Vocabulary", "write_llama"]

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


@dataclass(frozen=True)
class Vocabulary:
    """A byte-level BPE tokenizer: tokens by id, special ones, merges as "a b", and a chat template."""

    tokens: list[str]
    special: Collection[str]
    merges: list[str]
    template: str | None = None


def write_llama(model: Any, vocabulary: Vocabulary, path: Path, kind: str) -> Path:
    """Writes matrices in a GGUF type ("F16", "BF16", "Q4_1") and norms in fp32."""
    config, types = model.config, gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(path.stem)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(vocabulary.tokens)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if token in vocabulary.special else normal for token in vocabulary.tokens])
    writer.add_token_merges(vocabulary.merges)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_add_bos_token(False)
    if config.pad_token_id is not None:
        writer.add_pad_token_id(config.pad_token_id)
    if vocabulary.template:
        writer.add_chat_template(vocabulary.template)
    for name, weight in model.named_parameters():
        weight = weight.detach().float().cpu()
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # GGUF's Llama rotates adjacent columns
            weight = weight.unflatten(0, (-1, 2, config.head_dim // 2)).transpose(1, 2).flatten(0, 2)
        data = weight.numpy()
        if weight.ndim == 1:
            writer.add_tensor(_name(name), data)
        else:
            writer.add_tensor(_name(name), gguf.quants.quantize(data, types[kind]), raw_dtype=types[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _name(name: str) -> str:
    module = name.removesuffix(".weight")
    if module.startswith("model.layers."):
        _, _, layer, rest = module.split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}.weight"
    return f"{NAMES[module]}.weight"
