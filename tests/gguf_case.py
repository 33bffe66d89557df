"""Tiny models as GGUF files, written by gguf's own writer."""

from __future__ import annotations

import gguf
import torch
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

TEMPLATE = (
    "{% for message in messages %}<start>{{ message['role'] }} {{ message['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant {% endif %}"
)
# All bytes as GPT-2 spells them (a space is Ġ), two merges, and the special tokens.
TOKENS = ["<pad>", "<start>", "<end>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the"]
SPECIAL = 3
END = 2


def tiny_llama(seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=1024, rms_norm_eps=1e-5, initializer_range=0.2,
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=END, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def gguf_name(name):
    name = name.replace("model.layers.", "blk.")
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


def permuted(weight, num_heads):
    """Rows of a query or key projection as llama.cpp has them: its rotary pairs are neighbours."""
    heads = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, weight.shape[1])
    return heads.transpose(1, 2).reshape(weight.shape)


def write_gguf(path, model, kind, architecture="llama", leave_out=(), template=TEMPLATE):
    """The model as a file whose matrices are of one type, "F32", "F16", "BF16", "Q8_0" or "Q4_1"."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL] * SPECIAL + [gguf.TokenType.NORMAL] * (len(TOKENS) - SPECIAL))
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(END)
    writer.add_pad_token_id(0)
    if template:
        writer.add_chat_template(template)
    quantised = gguf.GGMLQuantizationType[kind]
    for name, tensor in model.state_dict().items():
        if name in leave_out:
            continue
        if "q_proj" in name or "k_proj" in name:
            tensor = permuted(tensor, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        value = tensor.float().numpy()
        if value.ndim == 1:
            writer.add_tensor(gguf_name(name), value)
        else:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(value, quantised), raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
