"""The attention layers' part of a packed pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pagedtree import PreparedAttention, append_kv, attention_plan, merge_states, tree_attention
from pagedtree._arguments import refusal
from pagedtree.generation.paged_cache import PagedCache
from pagedtree.generation.recurrent_step import RecurrentStep

# Arguments of `tree_attention` that determine the visible keys.
KEYS_OF_PREFIX = ("page_table", "seq_lens", "cu_seqlens_q", "max_seqlen_q")
KEYS = (*KEYS_OF_PREFIX, "tree_mask", "tree_lens")


@dataclass
class PrefixPass:
    """Key sets for reading shared pages once: the shared prefixes, then each sequence's unshared pages.

    page_table, seq_lens, cu_seqlens_q, max_seqlen_q: one entry per run of neighbouring sequences of one prefix (length
    0 = none), all of which every query of the run sees. own_page_table, own_seq_lens: as in `PagedStep`, without it.
    """

    page_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    own_page_table: Tensor
    own_seq_lens: Tensor
    max_seqlen_q: int


@dataclass
class PagedStep:
    """One packed pass of a model over a paged cache, with the arguments of `pagedtree.tree_attention` and `append_kv`.

    Attributes:
        cache: receives and provides the pass's keys and values.
        page_table, seq_lens, cu_seqlens_q, tree_mask, tree_lens, max_seqlen_q: arguments of `tree_attention`.
        slots: for `append_kv`, one per token.
        prefix: set if shared pages are read once. recurrent: the same pass for recurrent layers, if any.
        layers_run: layer_idx of the layers that have run in this pass.
    """

    cache: PagedCache
    page_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    slots: Tensor
    tree_mask: Tensor | None
    tree_lens: Tensor | None
    max_seqlen_q: int
    prefix: PrefixPass | None = None
    recurrent: RecurrentStep | None = None
    layers_run: set[int] = field(default_factory=set)
    _plans: dict[Any, Tensor] = field(default_factory=dict)
    _calls: dict[Any, PreparedAttention] = field(default_factory=dict)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        window: int,
        options: dict[str, Any],
        *,
        head_dim_v: int | None = None,
    ) -> Tensor:
        """Computes attention of layer `layer`: q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv] -> [T, Hq, Dv].

        A latent layer has v None: its values are the first head_dim_v columns of k [T, 1, D]. Raises ValueError if a
        layer runs twice: the second run would overwrite the first.
        """
        if layer in self.layers_run:
            raise refusal("model", "each layer to run once in a pass", f"layer_idx {layer} again")
        self.layers_run.add(layer)
        k_cache, own_v_cache = self.cache.layer(layer, k, v)
        append_kv(k, v, k_cache, own_v_cache, self.slots)
        v_cache = k_cache[..., :head_dim_v] if own_v_cache is None else own_v_cache
        # Windows need positions from the start of the sequence, which the unshared pages lack.
        if self.prefix is not None and window == 0:
            return self._attend_in_parts(q, k_cache, v_cache, self.prefix, options)
        scale, softcap = options.get("scale"), options.get("softcap", 0.0)
        # Layers of a kind differ only in queries and caches.
        shape = _shape(q, k_cache, v_cache)
        kind = (*shape.values(), window, scale, softcap)
        if kind not in self._calls:
            keys = self._keys()
            plan = self._plan("all", keys, shape, window)
            self._calls[kind] = PreparedAttention(**keys, scale=scale, softcap=softcap, window=window, plan=plan)
        return self._calls[kind](q, k_cache, v_cache, sinks=options.get("sinks"))

    def _keys(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in KEYS}

    def _attend_in_parts(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, prefix: PrefixPass, options: dict[str, Any]
    ) -> Tensor:
        mask = self.tree_mask if self.tree_mask is not None else q.new_zeros((q.shape[0], 1), dtype=torch.int32)
        no_tree = torch.zeros_like(prefix.seq_lens)  # without a tree at its end, the whole prefix is visible
        shared = {**{name: getattr(prefix, name) for name in KEYS_OF_PREFIX}, "tree_mask": mask, "tree_lens": no_tree}
        own = {**self._keys(), "page_table": prefix.own_page_table, "seq_lens": prefix.own_seq_lens}
        shape, parts = _shape(q, k_cache, v_cache), list[Tensor]()
        for part, keys, of_part in (("prefix", shared, {**options, "sinks": None}), ("own", own, options)):
            plan = self._plan(part, keys, shape)
            parts += tree_attention(q, k_cache, v_cache, **keys, plan=plan, return_lse=True, **of_part)
        return merge_states(*parts)[0]

    def _plan(self, part: str, keys: dict[str, Any], shape: dict[str, Any], window: int = 0) -> Tensor:
        kind = part, *shape.values(), window
        if kind not in self._plans:
            planned = {name: keys[name] for name in ("seq_lens", "cu_seqlens_q", "tree_lens", "max_seqlen_q")}
            self._plans[kind] = attention_plan(**planned, **shape, window=window, segment=self.cache.segment)
        return self._plans[kind]


def _shape(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> dict[str, Any]:
    return {
        "num_q_heads": q.shape[1],
        "num_kv_heads": k_cache.shape[2],
        "head_dim": q.shape[2],
        "head_dim_v": v_cache.shape[3],
        "latent": v_cache.data_ptr() == k_cache.data_ptr(),  # values are columns of the keys
        "page_size": k_cache.shape[1],
    }
