"""Tiny models as GGUF files, written by gguf's own writer."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from gguf_file import Vocabulary, write_llama

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
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "max_position_embeddings": 1024}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "tie_word_embeddings": False}
    tokens = {"vocab_size": len(TOKENS), "bos_token_id": 1, "eos_token_id": END, "pad_token_id": 0}
    config = LlamaConfig(rms_norm_eps=1e-5, initializer_range=0.2, **sizes, **heads, **tokens)
    return LlamaForCausalLM(config).eval()


def write_gguf(path, model, kind, template=TEMPLATE, **broken):
    """The model as a file whose matrices are of one type, "F32", "F16", "BF16", "Q8_0" or "Q4_1"."""
    vocabulary = Vocabulary(TOKENS, TOKENS[:SPECIAL], ["t h", "th e"], template)
    return write_llama(model, vocabulary, Path(path), kind, **broken)
