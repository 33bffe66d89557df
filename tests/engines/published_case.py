"""The packages that publish draft heads, without what they only train with, and random weights for their models.

To be imported before them.
"""

from __future__ import annotations

import importlib.machinery
import sys
from unittest.mock import MagicMock

import torch
from generate_case import TINY, VOCAB

# Imported by speculators for training and for servers; nothing of it runs here.
UNUSED = ("datasets", "hs_connectors", "openai", "openai.types", "openai.types.chat", "openai.types.completion")
SIZES = {
    "hidden_size": TINY["hidden_size"],
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
}

for module in UNUSED:
    spec = importlib.machinery.ModuleSpec(module, None)
    sys.modules.setdefault(module, MagicMock(__path__=[], __spec__=spec))


def randomise(module, seed=5):
    """Values of a size with which nothing is lost in rounding, norms near 1."""
    torch.manual_seed(seed)
    for parameter in module.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.1)
        else:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return module.requires_grad_(False).eval()


def dense(q, k, v, mask):
    """Attention of [T, Hq, D] over [S, Hkv, D], mask bool [T, S]."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (
        q.transpose(0, 1),
        k.repeat_interleave(group, 1).transpose(0, 1),
        v.repeat_interleave(group, 1).transpose(0, 1),
    )
    scores = (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1)
