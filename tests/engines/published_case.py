"""The packages that publish draft heads, without imports for training; import this before them."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from support.heads import SIZES as OF_A_HEAD
from torch import Tensor

from pagedtree.generation.drafters import BlockDrafter
from pagedtree.generation.scheduler import GeneratedSequence

# Imports of speculators for training and servers, unused here.
UNUSED = ("datasets", "hs_connectors", "openai", "openai.types", "openai.types.chat", "openai.types.completion")
SIZES = {**OF_A_HEAD, "rms_norm_eps": 1e-5, "max_position_embeddings": 512}

for module in UNUSED:
    spec = importlib.machinery.ModuleSpec(module, None)
    sys.modules.setdefault(module, MagicMock(__path__=[], __spec__=spec))


def dense(q, k, v, mask):
    """Attends with q [T, Hq, D] over [S, Hkv, D], mask bool [T, S]."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (
        q.transpose(0, 1),
        k.repeat_interleave(group, 1).transpose(0, 1),
        v.repeat_interleave(group, 1).transpose(0, 1),
    )
    scores = (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1)


def speculators_config(kind: str, steps: int, architecture: str = "LlamaForCausalLM") -> Any:
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    return SpeculatorsConfig(
        algorithm=kind,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=steps)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=[architecture]),
    )


def append_texts(drafter: BlockDrafter, texts: Sequence[Tensor], features: Sequence[Tensor]) -> None:
    """Appends texts whose last token alone has no features."""
    drafter.begin(page_size=4, sampling=SimpleNamespace(vocab_size=None))
    sequences = [GeneratedSequence(i, group=i, tokens=text.tolist(), max_length=99) for i, text in enumerate(texts)]
    drafter._append([(sequence, 0, rows) for sequence, rows in zip(sequences, features, strict=True)])
    drafter.select(sequences)
