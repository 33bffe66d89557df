"""The attention implementation "pagedtree" of transformers models.

It serves two callers. Inside `generate` of this package a packed batch runs over a paged cache: the pass publishes a
`PagedStep`, which every layer reads. Elsewhere (`model.generate`, `model(...)`) the dense keys and values are read
where they lie, each sequence as one page.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from pagedtree import append_kv, attention_plan, merge_states, tree_attention
from pagedtree.integrations.transformers.paged_cache import PagedCache

__all__ = ["NAME", "PagedStep", "PrefixPass", "register"]

NAME = "pagedtree"
HEAD_DIMS = (64, 96, 128, 192, 256)


def register() -> None:
    """Makes `attn_implementation="pagedtree"` known to transformers; importing this package does it. Idempotent."""
    AttentionInterface.register(NAME, attention_forward)
    # Ordinary forward passes get SDPA's masks: None where causal, else bool.
    AttentionMaskInterface.register(NAME, sdpa_mask)


@dataclass
class PrefixPass:
    """Key sets for reading pages that several sequences share once: the shared prefixes, then each one's own pages.

    Attributes:
        page_table, seq_lens, cu_seqlens_q: one entry a run of neighbouring sequences of one prefix (length 0 = none);
            every query of the run sees all of it.
        own_page_table, own_seq_lens: as in `PagedStep`, without the pages read through the prefix.
        max_seqlen_q: hint for the prefix part.
    """

    page_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    own_page_table: Tensor
    own_seq_lens: Tensor
    max_seqlen_q: int


@dataclass
class PagedStep:
    """One packed pass of a model over a paged cache, as `pagedtree.tree_attention` and `append_kv` take it.

    Attributes:
        cache: where the pass writes and reads keys and values.
        page_table, seq_lens, cu_seqlens_q, tree_mask, tree_lens, max_seqlen_q: arguments of `tree_attention`.
        slots: of `append_kv`, one a token.
        prefix: set where shared pages are to be read once.
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
    layers_run: int = 0
    _plans: dict[Any, Tensor] = field(default_factory=dict)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Passes of "pagedtree" models inside the block belong to this step."""
        token = _current_step.set(self)
        try:
            yield
        finally:
            _current_step.reset(token)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int, options: dict[str, Any]) -> Tensor:
        """Attention of layer `layer`: q [T, Hq, D], k and v [T, Hkv, D] of the packed tokens -> [T, Hq, D]."""
        self.layers_run += 1
        k_cache, v_cache = self.cache.layer(layer, k)
        append_kv(k, v, k_cache, v_cache, self.slots)
        # A window counts positions from the start of the sequence, which the own pages do not hold.
        if self.prefix is not None and window == 0:
            return self._attend_in_parts(q, k_cache, v_cache, self.prefix, options)
        plan = self._plan("all", self.seq_lens, self.cu_seqlens_q, self.tree_lens, self.max_seqlen_q, q, k_cache)
        out = tree_attention(
            q, k_cache, v_cache, self.page_table, self.seq_lens, self.cu_seqlens_q, self.tree_mask,
            tree_lens=self.tree_lens, max_seqlen_q=self.max_seqlen_q, window=window, plan=plan, **options,
        )  # fmt: skip
        return cast(Tensor, out)

    def _attend_in_parts(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, prefix: PrefixPass, options: dict[str, Any]
    ) -> Tensor:
        mask = self.tree_mask if self.tree_mask is not None else q.new_zeros((q.shape[0], 1), dtype=torch.int32)
        no_tree = torch.zeros_like(prefix.seq_lens)  # with no tree at its end all of a prefix is visible
        plan = self._plan("prefix", prefix.seq_lens, prefix.cu_seqlens_q, no_tree, prefix.max_seqlen_q, q, k_cache)
        shared = tree_attention(
            q, k_cache, v_cache, prefix.page_table, prefix.seq_lens, prefix.cu_seqlens_q, mask,
            tree_lens=no_tree, max_seqlen_q=prefix.max_seqlen_q, plan=plan, return_lse=True,
            **{**options, "sinks": None},
        )  # fmt: skip
        plan = self._plan("own", prefix.own_seq_lens, self.cu_seqlens_q, self.tree_lens, self.max_seqlen_q, q, k_cache)
        own = tree_attention(
            q, k_cache, v_cache, prefix.own_page_table, prefix.own_seq_lens, self.cu_seqlens_q, self.tree_mask,
            tree_lens=self.tree_lens, max_seqlen_q=self.max_seqlen_q, plan=plan, return_lse=True, **options,
        )  # fmt: skip
        return merge_states(*shared, *own)[0]

    def _plan(
        self,
        part: str,
        seq_lens: Tensor,
        cu_seqlens_q: Tensor,
        tree_lens: Tensor | None,
        max_seqlen_q: int,
        q: Tensor,
        k_cache: Tensor,
    ) -> Tensor:
        """One plan serves all layers of the same heads."""
        shape = (q.shape[1], k_cache.shape[2], q.shape[2])
        if (part, shape) not in self._plans:
            self._plans[part, shape] = attention_plan(
                seq_lens, cu_seqlens_q, num_q_heads=shape[0], num_kv_heads=shape[1], head_dim=shape[2],
                page_size=k_cache.shape[1], max_seqlen_q=max_seqlen_q, tree_lens=tree_lens,
            )  # fmt: skip
        return self._plans[part, shape]


_current_step: ContextVar[PagedStep | None] = ContextVar("pagedtree_step", default=None)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each attention layer: query [B, Hq, T, D], key, value [B, Hkv, S, D] -> [B, T, Hq, D].

    softcap (Gemma 2), s_aux (the sinks of gpt-oss) and sliding_window come from the model. attention_mask: None
    (causal, or everything visible where the layer is not causal), bool [B, 1, T, >= S], or the same as zeros and very
    negative numbers. Raises ValueError for what the op lacks: other head sizes, dropout, training, attention weights
    as output, a position bias.
    """
    _refuse_unsupported(module, query, value, dropout, kwargs)
    options = {
        "scale": scaling if scaling is not None else query.shape[-1] ** -0.5,
        "softcap": softcap or 0.0,
        "sinks": s_aux.detach().float() if s_aux is not None else None,
    }
    window = sliding_window if sliding_window is not None else getattr(module, "sliding_window", None)
    step = _current_step.get()
    if step is not None:
        q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
        layer: Any = module.layer_idx
        return step.attend(layer, q, k, v, window or 0, options).unsqueeze(0), None
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    return _attend_dense(query, key, value, attention_mask, is_causal, window or 0, options), None


def _refuse_unsupported(
    module: nn.Module, query: Tensor, value: Tensor, dropout: float, kwargs: dict[str, Any]
) -> None:
    def refuse(what: str) -> None:
        raise ValueError(f'attention implementation "{NAME}": {what}; choose another attn_implementation')

    if query.shape[-1] not in HEAD_DIMS or value.shape[-1] != query.shape[-1]:
        dims = ", ".join(map(str, HEAD_DIMS))
        refuse(f"expected a head_dim in {dims}, got {query.shape[-1]} (values {value.shape[-1]})")
    if dropout > 0.0:
        refuse(f"expected no attention dropout, got {dropout}")
    if module.training and torch.is_grad_enabled():
        refuse("it has no backward pass, but the model is in training mode")
    if kwargs.get("output_attentions"):
        refuse("attention weights cannot be returned (output_attentions)")
    if kwargs.get("position_bias") is not None:
        refuse("a position bias is not supported")


def _attend_dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    is_causal: bool,
    window: int,
    options: dict[str, Any],
) -> Tensor:
    """Dense keys and values [B, Hkv, S, D] are a pool of B pages of S slots; no copy of them is made."""
    batch, num_heads, num_queries, head_dim = query.shape
    kv_len = key.shape[2]
    index = torch.arange(batch + 1, dtype=torch.int32, device=query.device)
    seq_lens = torch.full_like(index[:-1], kv_len)
    tree_mask = tree_lens = None
    if attention_mask is not None:
        tree_mask, tree_lens, window = _pack_mask(attention_mask, batch, num_queries, kv_len), seq_lens, 0
    elif not is_causal:
        tree_mask, tree_lens = seq_lens.new_zeros((batch * num_queries, 1)), torch.zeros_like(seq_lens)
    out = tree_attention(
        query.transpose(1, 2).reshape(batch * num_queries, num_heads, head_dim),
        key.transpose(1, 2),
        value.transpose(1, 2),
        index[:-1, None],
        seq_lens,
        index * num_queries,
        tree_mask,
        tree_lens=tree_lens,
        max_seqlen_q=num_queries,
        window=window,
        **options,
    )
    return cast(Tensor, out).view(batch, num_queries, num_heads, head_dim)


def _pack_mask(mask: Tensor, batch: int, num_queries: int, kv_len: int) -> Tensor:
    """A 4-D mask of transformers as int32 [B * T, ceil(S / 32)]: bit j % 32 of word j // 32 = key j is visible."""
    if mask.ndim != 4 or mask.shape[1] != 1:
        raise ValueError(
            f'attention implementation "{NAME}": `attention_mask` must be [B, 1, T, S], got {list(mask.shape)}'
        )
    visible = mask[:, 0, :, :kv_len].expand(batch, num_queries, kv_len)
    if visible.dtype != torch.bool:
        hidden = visible <= torch.finfo(visible.dtype).min / 2
        if bool(((visible != 0) & ~hidden).any()):
            raise ValueError(
                f'attention implementation "{NAME}": `attention_mask` must be bool, or 0 and very negative, got a bias'
            )
        visible = ~hidden
    num_bytes = (kv_len + 31) // 32 * 4
    bits = torch.zeros((batch * num_queries, num_bytes, 8), dtype=torch.uint8, device=mask.device)
    bits.view(batch, num_queries, -1)[:, :, :kv_len] = visible
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=mask.device)
    return (bits * weights).sum(-1, dtype=torch.uint8).view(torch.int32)
