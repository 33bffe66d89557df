"""JetSpec (github.com/hao-ai-lab/JetSpec): its attention, acceptance and cache compaction on pagedtree's ops.

`install()` replaces four functions of JetSpec 2c7b3fa, before or after its engine is made. Sampled requests draw from
torch's generator as JetSpec's do, but one seed a round.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
from torch import Tensor

from pagedtree._arguments import refusal
from pagedtree.attention import tree_attention
from pagedtree.kv_cache import compact_kv
from pagedtree.sampling_params import SamplingParams
from pagedtree.tree import TreeBatch, build_trees, mask_words
from pagedtree.verify import Verdict, verify_greedy, verify_sampled, verify_tokens

__all__ = ["gather", "gpu_tree_accept", "install", "paged_tree_attn", "tree_accept"]

MOST_NODES = 1024
_their_gather: Any = None


def install(*, attention: bool = True, acceptance: bool = True, compaction: bool = True) -> None:
    """Puts the functions of this module in place of JetSpec's in this process.

    attention: of the op `jetspec::paged_tree_attn` (JetSpec's attention backend "jetspec"). acceptance: of greedy and
    sampled trees. compaction: of the cache after a round. Raises ImportError without JetSpec.
    """
    global _their_gather
    package = "jetspec.inference_engine"
    if attention:
        kernel: Any = importlib.import_module(f"{package}.paged_tree_attn")
        kernel.paged_tree_attn = paged_tree_attn
    if acceptance:
        importlib.import_module("jetspec.tree")
        for name, ours in (("gpu_tree_accept", gpu_tree_accept), ("tree_accept", tree_accept)):
            theirs = getattr(sys.modules["jetspec.tree._core.accept"], name)
            for module in [m for key, m in sys.modules.items() if key.startswith("jetspec.")]:
                if getattr(module, name, None) is theirs:
                    setattr(module, name, ours)
    if compaction:
        cache = importlib.import_module(f"{package}.paged_kv_cache").PagedKVCache
        if cache.gather is not gather:
            _their_gather, cache.gather = cache.gather, gather


def paged_tree_attn(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, block_table: Tensor, cu_seqlens_q: Tensor, seq_lens_k: Tensor,
    qq_bias: Tensor | None, scale: float, num_queries_per_kv: int, block_size: int,
    logical_kv_slots: Tensor | None = None, logical_kv_starts: Tensor | None = None,
    logical_kv_lens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """JetSpec's function: returns [total_q, Hq, D], for the head sizes of `tree_attention`.

    qq_bias: [total_q, total_q] of 0 and -inf, or the words of `tree_attention`, int32 [total_q, W], made once for all
    layers. The slots of a window of logical positions are pages of one token over views of the pools.
    """
    mask = qq_bias
    if mask is not None and mask.dtype != torch.int32:
        # JetSpec's kernel is causal, too: rows of chains have no -inf.
        mask = mask_words((mask == 0).tril(), cu_seqlens_q)
    if logical_kv_slots is not None:
        assert logical_kv_starts is not None and logical_kv_lens is not None
        block_table = _slot_table(block_table, block_size, logical_kv_slots, logical_kv_starts, logical_kv_lens)
        k_pool, v_pool = (pool.flatten(0, 1).unsqueeze(1) for pool in (k_pool, v_pool))
    out = tree_attention(q, k_pool, v_pool, block_table, seq_lens_k, cu_seqlens_q, mask, scale=scale)
    assert isinstance(out, Tensor)
    return out


def _slot_table(table: Tensor, block_size: int, slots: Tensor, starts: Tensor, lens: Tensor) -> Tensor:
    """Returns the slots of all positions, int32 [B, blocks * block_size]; the window's are in `slots`."""
    positions = torch.arange(table.shape[1] * block_size, dtype=torch.int64, device=table.device)
    index = positions - starts[:, None]
    window = slots.gather(1, index.clamp(0, slots.shape[1] - 1).long())
    blocks = table[:, positions // block_size] * block_size + positions % block_size
    return torch.where((index >= 0) & (index < lens[:, None]), window, blocks).int()


def _tree_of(parents: Tensor, max_depth: int | None) -> TreeBatch:
    cu_nodes = torch.tensor([0, len(parents)], dtype=torch.int32, device=parents.device)
    depth = len(parents) - 1 if max_depth is None else max_depth
    return build_trees(parents.int(), cu_nodes, max_nodes=len(parents), max_depth=depth)


def gpu_tree_accept(
    tree_tokens: Tensor, greedy_targets: Tensor, parent_indices: Tensor, depths: Tensor, max_depth: int | None = None
) -> tuple[Tensor, int, Tensor]:
    """JetSpec's function: returns the accepted nodes, how many are drafts (the host waits for it), and the next token.

    The path takes the first of siblings with the same token, JetSpec's the last.
    """
    trees = _tree_of(parent_indices, max_depth)
    verdict = verify_tokens(greedy_targets.flatten()[: len(tree_tokens)], tree_tokens, trees)
    accepted = int(verdict.num_accepted.item())
    return verdict.accept_index[0, : accepted + 1].long(), accepted, verdict.tokens[0, accepted]


def tree_accept(
    tree: Any, target_logits: Tensor, temperature: float = 0.0, *, seeds: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[list[int], int, int]:  # fmt: skip
    """JetSpec's function, of a tree and logits [..., N, V].

    seeds, positions: int64 [1], as for `verify_sampled`; with a request's seed and its root's position its text does
    not depend on the drafts. Default: a seed from torch's generator.
    """
    logits = target_logits.flatten(0, -2)
    if len(logits) < tree.num_nodes:
        raise refusal("target_logits", f"at least {tree.num_nodes} rows", len(logits))
    logits, trees = logits[-tree.num_nodes :], _tree_of(tree.parent_indices, None)
    if temperature <= 0:
        verdict: Verdict = verify_greedy(logits, tree.token_ids, trees)
    else:
        seeds = torch.randint(2**62, (1,), device=logits.device) if seeds is None else seeds
        positions = torch.zeros_like(seeds) if positions is None else positions
        params = SamplingParams(temperature=temperature)
        verdict = verify_sampled(logits, tree.token_ids, trees, params, seeds=seeds, positions=positions)
    accepted = int(verdict.num_accepted)
    return verdict.accept_index[0, : accepted + 1].tolist(), accepted, int(verdict.tokens[0, accepted])


def gather(cache: Any, positions: Tensor, seq_id: int | None = None) -> None:
    """JetSpec's `PagedKVCache.gather`: keeps `positions`, in order; only rows that move are copied, within their pages.

    JetSpec's own also runs where a written page belongs to another sequence.
    """
    seq_id = cache._default_seq_id if seq_id is None else seq_id
    tables, kept = cache._seq_block_tables.get(seq_id, {}), positions.numel()
    path = positions.to(cache.device, torch.int32)
    still = (
        int((path == torch.arange(kept, dtype=torch.int32, device=path.device)).int().cumprod(0).sum()) if kept else 0
    )
    written = range(still // cache.block_size, -(-kept // cache.block_size)) if still < kept else range(0)
    is_shared = any(cache.refcount(table[page]) > 1 for table in tables.values() for page in written)
    if is_shared or (still == 0 < kept) or kept - still >= MOST_NODES:
        _their_gather(cache, positions, seq_id)
        return
    for layer, table in tables.items():
        if still < kept:
            start, count = (torch.tensor([n], dtype=torch.int32, device=path.device) for n in (still - 1, kept - still))
            pages = torch.tensor([table], dtype=torch.int32, device=path.device)
            compact_kv(list(cache.pool(layer)), pages, start, (path[None, still - 1 :] - (still - 1)), count)
    cache.crop(kept, seq_id=seq_id)
    cache._touch(seq_id)
