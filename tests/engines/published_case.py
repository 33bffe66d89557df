"""The packages that publish draft heads, without what they only train with.

To be imported before them.
"""

from __future__ import annotations

import importlib.machinery
import sys
from unittest.mock import MagicMock

import torch
from eagle_case import SIZES as OF_A_HEAD

# Imported by speculators for training and for servers; nothing of it runs here.
UNUSED = ("datasets", "hs_connectors", "openai", "openai.types", "openai.types.chat", "openai.types.completion")
SIZES = {**OF_A_HEAD, "rms_norm_eps": 1e-5, "max_position_embeddings": 512}

for module in UNUSED:
    spec = importlib.machinery.ModuleSpec(module, None)
    sys.modules.setdefault(module, MagicMock(__path__=[], __spec__=spec))


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
