"""FlashAttention's `flash_attn_varlen_func`."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedtree import tree_attention
from pagedtree._arguments import checked, expect_dims, expect_shape
from pagedtree.integrations.flash_attn.arguments import refuse, refuse_gradients, scale_of, visibility


@checked(integers=("cu_seqlens_q", "cu_seqlens_k", "block_table", "seqused_k"))
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    attention_chunk: int = 0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """Computes attention of a ragged batch; forward only.

    Args:
        q: [T, H, D]; cu_seqlens_q, cu_seqlens_k: int32 [B + 1], offsets of queries and keys.
        k, v: [keys, Hkv, D], or pages [pages, page_size, Hkv, D] with a block_table int32 [B, max_pages]. V may have
            another width Dv, as for `flash_attn_with_kvcache`.
        max_seqlen_q: a hint; max_seqlen_k: at least the longest sequence's keys, without a block_table.
        softmax_scale, causal, window_size, softcap, k_descale, v_descale: as for `flash_attn_with_kvcache`.
        seqused_k: int32 [B], used keys per sequence; default all.
        deterministic, num_splits, pack_gqa, sm_margin: no effect, results always repeat bit by bit.

    Arguments after block_table are FlashAttention 3's. Returns out [T, H, Dv]. Refused with NotImplementedError:
    dropout_p other than 0, alibi_slopes, return_attn_probs, seqused_q, qv, q_descale, attention_chunk other than 0, and
    gradients. Raises ValueError for wrong shapes or dtypes.
    """
    refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes, return_attn_probs=return_attn_probs)
    refuse(seqused_q=seqused_q, qv=qv, q_descale=q_descale, attention_chunk=attention_chunk)
    refuse_gradients(q=q, k=k, v=v)
    expect_dims("[keys, heads, dim]" if block_table is None else "[pages, page_size, heads, dim]", k=k, v=v)
    expect_dims("[B + 1]", cu_seqlens_k=cu_seqlens_k)
    expect_dims("[B, max_pages]", block_table=block_table)
    seq_lens = cu_seqlens_k.diff().int()
    if seqused_k is not None:
        expect_shape(seq_lens.shape, seqused_k=seqused_k)
        seq_lens = torch.minimum(seq_lens, seqused_k.int()) if block_table is None else seqused_k.int()
    if block_table is None:  # pages of one row, each where it is
        max_seqlen_k = max(min(max_seqlen_k, k.shape[0]), 0)
        k, v = k.unsqueeze(1), v.unsqueeze(1)
        block_table = (cu_seqlens_k[:-1, None] + torch.arange(max_seqlen_k, device=q.device, dtype=torch.int64)).int()
    out = tree_attention(
        q,
        k,
        v,
        block_table,
        seq_lens,
        cu_seqlens_q,
        max_seqlen_q=max(max_seqlen_q, 1),
        scale=softmax_scale,
        softcap=softcap,
        k_scale=scale_of("k_descale", k_descale),
        v_scale=scale_of("v_descale", v_descale),
        **visibility(q.shape[0], cu_seqlens_q, seq_lens, block_table.shape[1] * k.shape[1], causal, window_size),
    )
    assert isinstance(out, Tensor)
    return out
