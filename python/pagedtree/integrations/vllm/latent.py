"""The attention backend of models with latent attention (DeepSeek V2 and V3, GLM 4 MoE Lite).

Every query counts as decoding, none as prefill: one `tree_attention` call reads the latent cache.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionType, MLAAttentionImpl

from pagedtree import append_kv
from pagedtree._arguments import refusal
from pagedtree.integrations.vllm.attention import (
    LayerKind,
    PagedTreeBackend,
    PagedTreeMetadata,
    PagedTreeMetadataBuilder,
)


class PagedTreeLatentMetadata(PagedTreeMetadata):
    """One step, with the split between decoding and prefill that vLLM's layer needs."""

    num_prefills = 0

    @property
    def num_decodes(self) -> int:
        return int(self.seq_lens.shape[0])

    @property
    def num_decode_tokens(self) -> int:
        return self.num_actual_tokens

    @property
    def decode(self) -> PagedTreeLatentMetadata:
        return self


class PagedTreeLatentMetadataBuilder(PagedTreeMetadataBuilder):
    """Masks of trees are set as for ordinary heads."""

    metadata_class = PagedTreeLatentMetadata


class PagedTreeLatentBackend(PagedTreeBackend):
    """Latents of 512 columns and rotary keys of 64."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_impl_cls() -> Any:
        return PagedTreeLatentImpl

    @staticmethod
    def get_builder_cls() -> type[PagedTreeMetadataBuilder]:
        return PagedTreeLatentMetadataBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [576]

    @classmethod
    def is_mla(cls) -> bool:
        return True


class PagedTreeLatentImpl(MLAAttentionImpl[PagedTreeLatentMetadata]):
    """One layer, between the products of vLLM's `MLAAttention`."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        *,
        kv_lora_rank: int,
        indexer: object | None = None,
        **projections: Any,
    ) -> None:
        unsupported = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
            "indexer": indexer,
        }
        for name, value in unsupported.items():
            if value is not None:
                raise NotImplementedError(f"pagedtree's latent backend: {name} is not supported")
        if attn_type != AttentionType.DECODER:
            raise refusal("pagedtree's latent backend", "attn_type decoder", attn_type, NotImplementedError)
        if kv_lora_rank != 512:
            raise refusal("pagedtree's latent backend", "kv_lora_rank = 512", kv_lora_rank, NotImplementedError)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.latent_size = kv_lora_rank

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
    ) -> None:
        """Writes the step's latents and rotary keys [T, 1, 64] as one row each, before `forward_mqa`."""
        count = slot_mapping.shape[0]  # the others may be padded
        rows = torch.cat((kv_c_normed[:count, None], k_pe[:count]), dim=-1)
        append_kv(rows, None, kv_cache[:, :, None], None, slot_mapping)

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: PagedTreeLatentMetadata,
        layer: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """q: [T, heads, 576] in the latent space, or its two parts. Returns [T, heads, 512] and no lse."""
        if isinstance(q, tuple):
            q = torch.cat(q, dim=-1)
        step, cache = attn_metadata, kv_c_and_k_pe_cache[:, :, None]
        kind = LayerKind(self.num_heads, 1, self.head_size, cache.shape[1], self.scale, latent_dim=self.latent_size)
        return step.attention(kind)(q, cache, cache[..., : self.latent_size]), None
