"""Tests of vLLM's rejection samplers on the verify ops, and of its FlashAttention on the adapter.

Excluded: vLLM's random numbers (`sample_recovered_tokens`) and fixed acceptance rates ("synthetic").
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from peer_source import PeerSource, refusing
from torch import Tensor

from pagedtree import RequestOptions, SamplingParams, TreeBatch, build_trees, verify_rejection, verify_sampled
from pagedtree.integrations import flash_attn

SOURCE = PeerSource("vllm")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(1)


def chains(offsets: Tensor) -> tuple[TreeBatch, Tensor, Tensor]:
    """Makes chains with nodes from `offsets`; returns each node's sequence and depth, too."""
    sizes = offsets.diff()
    sequence = torch.arange(len(sizes)).repeat_interleave(sizes)
    depth = torch.arange(int(offsets[-1])) - offsets[:-1].long()[sequence]
    most = int(sizes.max())
    trees = build_trees((depth - 1).int(), offsets.int(), max_nodes=most, max_depth=most - 1)
    return trees, sequence, depth


class RejectionSampler:
    """Runner V1's class; tests mock the sampler of the bonus token."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __call__(self, metadata: Any, draft_probs: Tensor | None, logits: Tensor, sampling_metadata: Any) -> Any:
        counts = torch.tensor(metadata.num_draft_tokens)
        offsets = torch.nn.functional.pad((counts + 1).cumsum(0), (1, 0))
        trees, sequence, depth = chains(offsets)
        row = torch.arange(len(depth)) - sequence  # of the draft after the node; the last has none
        row = torch.where(depth < counts[sequence], row, len(logits))
        logits = torch.cat([logits, logits.new_zeros(1, logits.shape[1])])[row]
        tokens = torch.full_like(depth, -1)
        tokens[depth > 0] = metadata.draft_token_ids.flatten().long()
        settings = sampling_metadata
        seeds = torch.randint(2**62, (len(counts),))
        for b, generator in settings.generators.items():
            seeds[b] = generator.initial_seed()
        how = {"seeds": seeds, "positions": torch.zeros_like(seeds), "options": self.options(settings, logits.shape[1])}
        params = self.params(settings)
        if draft_probs is None:
            verdict = verify_sampled(logits, tokens, trees, params, **how)
        else:
            rows = {"draft_probs": draft_probs, "draft_rows": torch.where(row < len(draft_probs), row, -1)}
            verdict = verify_rejection(logits, tokens, trees, params, draft_law="iid", **rows, **how)
        found = verdict.tokens.clone()
        bonus = self.sampler().sampled_token_ids.flatten().to(found.dtype)
        places = counts[:, None]
        mask = verdict.num_accepted[:, None] == places
        found.scatter_(1, places, torch.where(mask, bonus[:, None], found.gather(1, places)))
        return SimpleNamespace(sampled_token_ids=found.int())

    @staticmethod
    def params(given: Any) -> SamplingParams:
        filters = {name: value for name in ("top_k", "top_p") if (value := getattr(given, name)) is not None}
        names = () if given.no_penalties else ("repetition", "presence", "frequency")
        penalties = {f"{name}_penalty": getattr(given, f"{name}_penalties") for name in names}
        return SamplingParams(temperature=0.0 if given.all_greedy else given.temperature, **filters, **penalties)

    @staticmethod
    def options(given: Any, vocab: int) -> RequestOptions | None:
        lists: dict[str, Any] = {}
        if not given.no_penalties:
            lists["prompts"] = given.prompt_token_ids.tolist()
        if given.output_token_ids:
            lists["outputs"] = given.output_token_ids
        if given.bad_words_token_ids:
            lists["bad_words"] = [given.bad_words_token_ids.get(b) for b in range(len(given.output_token_ids))]
        if given.allowed_token_ids_mask is not None:  # forbidden tokens
            lists["allowed"] = [(~row).nonzero().flatten().tolist() for row in given.allowed_token_ids_mask]
        return RequestOptions.from_lists(vocab, **lists) if lists else None


KNOWN = {"torch": torch, "F": torch.nn.functional, "np": np, "pytest": pytest, "Mock": Mock, "DEVICE_TYPE": "cpu"}
KNOWN |= {"PLACEHOLDER_TOKEN_ID": -1, "LogitsProcessors": list, "SamplingMetadata": SimpleNamespace, "Sampler": None}
KNOWN |= {"SamplerOutput": SimpleNamespace, "RejectionSampler": RejectionSampler, "dataclass": dataclass}
SOURCE.take("vllm/v1/spec_decode/metadata.py", "SpecDecodeMetadata", known=KNOWN)
SOURCE.take("tests/v1/sample/utils.py", "create_allowed_token_ids", known=KNOWN)
V1 = (
    *("rejection_sampler", "test_perfect_match", "test_early_mismatch", "test_multiple_sequences"),
    *("test_single_token_sequence", "test_empty_sequence", "test_multiple_mismatches", "test_parametrized_cases"),
    *("test_deterministic_when_seeded", "test_rejection_sampling_approximates_target_distribution", "test_top_k"),
    *("test_top_p", "test_frequency_penalties", "test_bad_words", "test_allowed_token_ids"),
)
HELPERS = (
    *("mock_sampler_output", "create_spec_decode_metadata", "create_logits_tensor", "create_sampling_metadata"),
    *("get_ratio_first_to_last", "estimate_rejection_sampling_pdf", "_test_masked_logits"),
)
taken = SOURCE.take("tests/v1/sample/test_rejection_sampler.py", *V1, *HELPERS, known=KNOWN)
globals().update({name: taken[name] for name in V1})


def rejection_sample(
    target_logits: Tensor, draft_logits: Tensor, draft_sampled: Tensor, cu_num_logits: Tensor, pos: Tensor,
    idx_mapping: Tensor, expanded_idx_mapping: Tensor, expanded_local_pos: Tensor, temperature: Tensor, seed: Tensor,
    num_speculative_steps: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Runner V2's function; logits are already divided by the temperature."""
    trees, sequence, depth = chains(cu_num_logits)
    row = sequence * num_speculative_steps + depth
    drafts, params = torch.where(depth > 0, draft_sampled, -1), SamplingParams(temperature=(temperature > 0).float())
    how = {"draft_law": "iid", "draft_probs": draft_logits.flatten(0, 1).softmax(-1), "seeds": seed}
    how |= {"draft_rows": torch.where(depth < num_speculative_steps, row, -1)}
    how |= {"positions": pos[cu_num_logits[:-1]].long()}
    verdict = verify_rejection(target_logits, drafts, trees, params, **how)
    return verdict.tokens, verdict.num_accepted + 1


V2 = "test_stochastic_rejection_sample", "test_greedy_rejection_sample"
KNOWN |= {"math": math, "rejection_sample": rejection_sample, "VOCAB_SIZE": 512}  # 4096 there: 5 GB of logits
HELPERS = "_build_rejection_sample_inputs", "_assert_distribution_match"
taken = SOURCE.take("tests/v1/spec_decode/test_rejection_sampler_utils.py", *V2, *HELPERS, known=KNOWN)
globals().update({name: taken[name] for name in V2})


def flash_attn_varlen_func(*, out: Tensor | None, fa_version: int, seqused_k: Tensor, **given: Any) -> Tensor:
    offsets = torch.nn.functional.pad(seqused_k.cumsum(0), (1, 0)).int()
    result = flash_attn.flash_attn_varlen_func(**given, cu_seqlens_k=offsets, seqused_k=seqused_k)
    return result if out is None else out.copy_(result)


FLASH = "test_varlen_with_paged_kv"
PATH = "tests/kernels/attention/test_flash_attn.py"
KNOWN |= {"flash_attn_varlen_func": flash_attn_varlen_func, "is_fa_version_supported": lambda version: True}
KNOWN |= {"set_random_seed": torch.manual_seed, "QDTYPES": [None], "NUM_BLOCKS": [2048]}
SIZES = "NUM_HEADS", "HEAD_SIZES", "BLOCK_SIZES", "DTYPES", "SOFT_CAPS", "SLIDING_WINDOWS"
SOURCE.take(PATH, FLASH, "ref_paged_attn", *SIZES, known=KNOWN)
test_varlen_with_paged_kv = refusing("head size")(KNOWN[FLASH])
