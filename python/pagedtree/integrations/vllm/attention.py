"""The attention backend: passes vLLM's paged cache and batches to `tree_attention` unchanged."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
    max_decode_query_len,
)

from pagedtree import PreparedAttention, append_kv, attention_plan, rope_append
from pagedtree._arguments import refusal
from pagedtree._C import HEAD_DIMS
from pagedtree.integrations.vllm.limits import uses_trees
from pagedtree.integrations.vllm.own_worker import check_worker

FP8 = ("fp8", "fp8_e4m3")


@dataclass
class TreeMask:
    """Arguments of `tree_attention`: tree_mask int32 [T, W], tree_lens int32 [R], nodes of each tree, -1: none.
    num_reqs: R where it is known; the tensors may be longer."""

    tree_mask: Tensor
    tree_lens: Tensor
    num_reqs: int | None = None


class LayerKind(NamedTuple):
    """Properties of layers that share a step's calls. latent_dim: latent columns that are also values, else None."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    scale: float
    softcap: float = 0.0
    window: int = 0
    latent_dim: int | None = None


@dataclass
class PagedTreeMetadata(AttentionMetadata):
    """One step, for all layers of a KV cache group.

    Attributes:
        num_actual_tokens: T without padding.
        query_start_loc: int32 [R + 1]; seq_lens: int32 [R], this step's queries included.
        block_table: int32 [R, max_blocks].
        max_query_len: a hint.
        tree: None where every request is causal.
    """

    num_actual_tokens: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    max_query_len: int
    tree: TreeMask | None = None
    _calls: dict[LayerKind, PreparedAttention] = field(default_factory=dict)

    def attention(self, kind: LayerKind) -> PreparedAttention:
        """Returns such layers' attention, made in the step's first one, so that captured graphs replan each replay."""
        if kind not in self._calls:
            tree_mask, tree_lens = (None, None) if self.tree is None else (self.tree.tree_mask, self.tree.tree_lens)
            plan = attention_plan(
                self.seq_lens,
                self.query_start_loc,
                num_q_heads=kind.num_q_heads,
                num_kv_heads=kind.num_kv_heads,
                head_dim=kind.head_dim,
                page_size=kind.page_size,
                max_seqlen_q=self.max_query_len,
                tree_lens=tree_lens,
                head_dim_v=kind.latent_dim,
                latent=kind.latent_dim is not None,
                window=kind.window,
            )
            self._calls[kind] = PreparedAttention(
                self.block_table,
                self.seq_lens,
                self.query_start_loc,
                tree_mask,
                tree_lens=tree_lens,
                max_seqlen_q=self.max_query_len,
                scale=kind.scale,
                softcap=kind.softcap,
                window=kind.window,
                plan=plan,
            )
        return self._calls[kind]


class PagedTreeBackend(AttentionBackend):
    """Decoder attention for every cache layout and block size."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", *FP8]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # must be a member of vLLM's enumeration

    @staticmethod
    def get_impl_cls() -> type[PagedTreeImpl]:
        return PagedTreeImpl

    @staticmethod
    def get_builder_cls() -> type[PagedTreeMetadataBuilder]:
        return PagedTreeMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(1)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [k for k, v in HEAD_DIMS if k == v]

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    supports_sink = supports_non_causal = supports_kv_connector = supports_sliding_window


class PagedTreeMetadataBuilder(AttentionMetadataBuilder[PagedTreeMetadata]):
    """tree: set by V1's runner before each step that verifies trees, else None; by V2's once, with buffers for the
    largest batch."""

    metadata_class = PagedTreeMetadata

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        # On V1 the masks of trees are new tensors in each step, which a captured graph would not see.
        has_new_masks = uses_trees(vllm_config) and not vllm_config.use_v2_model_runner
        return AttentionCGSupport.NEVER if has_new_masks else AttentionCGSupport.UNIFORM_BATCH

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int | None:
        # The plan is made on the device, from the lengths there.
        return max_decode_query_len(vllm_config)

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if uses_trees(vllm_config):
            check_worker(vllm_config)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self.tree: TreeMask | None = None

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedTreeMetadata:
        common = common_attn_metadata
        tree, rows, starts = self.tree, common.num_actual_tokens, common.query_start_loc
        if common.causal is not True:  # vLLM's block drafters: all queries of a request see each other
            if getattr(self.kv_cache_spec, "sliding_window", None):
                raise NotImplementedError("pagedtree's backend: bidirectional attention with a window is not supported")
            full_mask = starts.new_full((rows, -(-common.max_query_len // 32)), -1)
            tree = TreeMask(full_mask, starts[1:] - starts[:-1])
        elif tree is not None:
            count = common.seq_lens.shape[0]
            if tree.num_reqs not in (None, count):
                raise refusal("draft trees", f"{tree.num_reqs} requests as in the batch", count, RuntimeError)
            tree = TreeMask(tree.tree_mask[:rows], tree.tree_lens[:count])
        return self.metadata_class(
            num_actual_tokens=common.num_actual_tokens,
            query_start_loc=starts,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            max_query_len=common.max_query_len,
            tree=tree,
        )


class PagedTreeImpl(AttentionImpl[PagedTreeMetadata]):
    """One layer. Keys and values are strided views of vLLM's cache."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if alibi_slopes is not None:
            raise NotImplementedError("pagedtree's backend: alibi_slopes are not supported")
        if attn_type != AttentionType.DECODER:
            raise refusal("pagedtree's backend", "attn_type decoder", attn_type, NotImplementedError)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype, self.sinks = num_kv_heads or num_heads, kv_cache_dtype, sinks
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        softcap, window = logits_soft_cap or 0.0, sliding_window or 0
        self._kind = LayerKind(num_heads, self.num_kv_heads, head_size, 0, self.scale, softcap, window)
        # The layer's cache, with its keys and values and the kind that it makes of the layer.
        self._views: tuple[Tensor, Tensor, Tensor, LayerKind] | None = None

    def do_kv_cache_update(
        self, layer: torch.nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Writes the step's keys and values, before `forward`."""
        count = slot_mapping.shape[0]
        if count < key.shape[0]:  # padded
            key, value = key[:count], value[:count]
        append_kv(key, value, *self._caches(kv_cache)[:2], slot_mapping, **self._scales(layer))

    def fused_rope_kvcache_supported(self) -> bool:
        return True

    def do_rope_and_kv_cache_update(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        cos_sin_cache: Tensor,
        is_neox: bool,
        kv_cache: Tensor,
        layer_slot_mapping: Tensor,
    ) -> None:
        """Rotates the queries in place, and caches the rotated keys and the values, for vLLM's pass
        fuse_rope_kvcache."""
        count = layer_slot_mapping.shape[0]
        query, key, value, positions = (rows[:count] for rows in (query, key, value, positions))
        caches, options = self._caches(kv_cache)[:2], {"interleaved": not is_neox, **self._scales(layer)}
        rope_append(query, key, value, positions, cos_sin_cache, *caches, layer_slot_mapping, q_out=query, **options)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: PagedTreeMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("pagedtree's backend: fused output quantisation is not supported")
        if attn_metadata is None:  # a run without a cache, by which vLLM measures memory or compiles
            return output.fill_(0)
        step, count = attn_metadata, attn_metadata.num_actual_tokens
        k_cache, v_cache, kind = self._caches(kv_cache)
        is_padded = count < query.shape[0]
        step.attention(kind)(
            query[:count] if is_padded else query,
            k_cache,
            v_cache,
            sinks=None if self.sinks is None else self.sinks.float(),  # anew, as weights may change
            **self._scales(layer),
            out=output[:count] if is_padded else output,
        )
        return output

    def _caches(self, kv_cache: Tensor) -> tuple[Tensor, Tensor, LayerKind]:
        """Returns keys and values; caches the views, which are slow to make."""
        if self._views is None or self._views[0] is not kv_cache:
            keys, values = kv_views(kv_cache, self.kv_cache_dtype)
            self._views = kv_cache, keys, values, self._kind._replace(page_size=keys.shape[1])
        return self._views[1:]

    def _scales(self, layer: Any) -> dict[str, Any]:
        if self.kv_cache_dtype not in FP8:
            return {}
        return {"k_scale": layer._k_scale, "v_scale": layer._v_scale}


def kv_views(kv_cache: Tensor, kv_cache_dtype: str) -> tuple[Tensor, Tensor]:
    """K and V [blocks, block_size, heads, head_size] of a layer's cache [blocks, heads, block_size, 2 * head_size]."""
    if kv_cache_dtype in FP8:
        kv_cache = kv_cache.view(torch.float8_e4m3fn)
    k_cache, v_cache = kv_cache.transpose(1, 2).chunk(2, dim=-1)
    return k_cache, v_cache
