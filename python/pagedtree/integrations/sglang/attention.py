"""The attention backends: they pass SGLang's token pool and batches to `tree_attention` unchanged."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pagedtree import append_kv, attention_plan, tree_attention
from pagedtree._arguments import refusal
from pagedtree.integrations.indices import rows_of
from pagedtree.integrations.sglang.masks import TreeMaskMode, tree_mask_words

try:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
except ImportError:  # the class can be looked at and tested without SGLang
    AttentionBackend = object

LATENT = (512, 64)  # columns of a latent and of its rotary key, which are one row of the pool


@dataclass
class Step:
    """One forward pass, for all layers; arguments of `tree_attention`."""

    page_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    tree_mask: Tensor | None
    max_seqlen_q: int | None
    page_size: int
    plans: dict[int, Tensor] = field(default_factory=dict)  # by window
    over_rows: Step | None = None  # see of_rows

    def of_rows(self, count: int) -> Step:
        """Returns the step of `count` queries over keys that are their own rows, in pages of one slot."""
        if self.over_rows is None:
            offsets, width = self.cu_seqlens_q, self.max_seqlen_q or count
            table = offsets[:-1, None] + torch.arange(width, dtype=torch.int32, device=offsets.device)
            self.over_rows = Step(table, offsets.diff(), offsets, None, width, page_size=1)
        return self.over_rows


class PagedTreeBackend(AttentionBackend):
    """Decoding, chunked prefill and verification of draft trees of every shape, for any page size.

    Decoder attention, latent (DeepSeek's) too, with sliding windows in one pool, logit caps and sinks; unsupported
    features are refused by name.
    """

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        config = model_runner.model_config
        self.is_latent = model_runner.use_mla_backend
        if self.is_latent and (config.kv_lora_rank, config.qk_rope_head_dim) != LATENT:
            wanted = f"kv_lora_rank {LATENT[0]} and qk_rope_head_dim {LATENT[1]}"
            found = f"{config.kv_lora_rank} and {config.qk_rope_head_dim}"
            raise refusal("pagedtree's backend", wanted, found, NotImplementedError)
        if hasattr(model_runner.req_to_token_pool, "mamba_pool"):
            raise NotImplementedError(
                "pagedtree's backend: recurrent layers (a mamba_pool) are not supported: their states follow no trees"
            )
        if hasattr(model_runner.token_to_kv_pool, "translate_loc_from_full_to_swa"):
            raise NotImplementedError("pagedtree's backend: a pool of its own for sliding windows is not supported")
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.page_size = model_runner.page_size
        self.max_context_len = config.context_len
        self.forward_metadata: Step | None = None
        self.graph_tokens = 0  # of the largest captured batch
        self.graph_masks: dict[int, Tensor] = {}  # of captured verifications, by the nodes of a tree

    def init_forward_metadata(self, forward_batch: Any) -> None:
        tree_mask = None
        if _has_mask(forward_batch):
            spec = forward_batch.spec_info
            tree_mask = _mask_words(spec, forward_batch.seq_lens, forward_batch.batch_size)
        new = forward_batch.spec_info.draft_token_num if forward_batch.forward_mode.is_target_verify() else 0
        self._prepare(forward_batch, tree_mask, width_of(self, forward_batch, new))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.graph_tokens = max_num_tokens

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Writes a verification's mask where its graph reads it; the graph prepares the rest."""
        if forward_batch.forward_mode.is_extend_without_speculative():  # such a graph calls no preparation
            raise NotImplementedError("pagedtree's backend: --cuda-graph-backend-prefill full is not supported")
        if not _has_mask(forward_batch):
            return
        spec, n = forward_batch.spec_info, forward_batch.spec_info.draft_token_num
        if in_capture:
            if n not in self.graph_masks:
                words = torch.zeros(self.graph_tokens, -(-n // 32), dtype=torch.int32)
                self.graph_masks[n] = words.to(forward_batch.seq_lens.device)
        else:  # the requests that pad the batch have no mask
            requests = spec.draft_token.numel() // n
            words = _mask_words(spec, forward_batch.seq_lens[:requests], requests)
            self.graph_masks[n].zero_()[: requests * n].copy_(words)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        tree_mask = None
        if _has_mask(forward_batch):
            n = forward_batch.spec_info.draft_token_num
            tree_mask = self.graph_masks[n][: forward_batch.batch_size * n]
        self._prepare(forward_batch, tree_mask, self.max_context_len)

    def _prepare(self, forward_batch: Any, tree_mask: Tensor | None, width: int) -> None:
        """Makes the step; `width`: the most tokens of a request."""
        mode, seq_lens = forward_batch.forward_mode, forward_batch.seq_lens
        if mode.is_decode_or_idle():
            lens_q, max_q = torch.ones_like(seq_lens), 1
        elif mode.is_target_verify():
            max_q = forward_batch.spec_info.draft_token_num
            lens_q = torch.full_like(seq_lens, max_q)
            seq_lens = seq_lens + max_q
        else:
            lens_q, max_q = forward_batch.extend_seq_lens, None
            if forward_batch.extend_seq_lens_cpu is not None:
                max_q = max(forward_batch.extend_seq_lens_cpu, default=None)
        self.forward_metadata = Step(
            # Pages are aligned, so a page's first slot identifies the page.
            page_table=slots_of(self, forward_batch, width, self.page_size) // self.page_size,
            seq_lens=seq_lens.int(),
            cu_seqlens_q=torch.nn.functional.pad(lens_q.cumsum(0), (1, 0)).int(),
            tree_mask=tree_mask,
            max_seqlen_q=max_q,
            page_size=self.page_size,
        )

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Tensor:
        sinks = kwargs.pop("sinks", None)
        _check_layer(layer, kwargs)
        step = self.forward_metadata
        if step is None:
            raise refusal("pagedtree's backend", "init_forward_metadata before the first layer", kind=RuntimeError)
        heads, kv_heads = layer.tp_q_head_num, layer.tp_k_head_num
        head_dim, head_dim_v = layer.qk_head_dim, layer.v_head_dim
        k_cache = _pages(self.token_to_kv_pool.get_key_buffer(layer.layer_id), step.page_size)
        scales: dict[str, Any] = {}
        reads_latents = self.is_latent and head_dim == k_cache.shape[-1]
        if self.is_latent and not reads_latents:  # a prompt's own heads, whose latents SGLang has put into the pool
            _check_prompt(forward_batch, save_kv_cache)
            step = step.of_rows(q.shape[0])
            k_cache, v_cache = k.view(-1, 1, kv_heads, head_dim), v.view(-1, 1, kv_heads, head_dim_v)
        else:
            v_cache = _pages(self.token_to_kv_pool.get_value_buffer(layer.layer_id), step.page_size)
            v_cache = k_cache[..., :head_dim_v] if reads_latents else v_cache
            if k_cache.dtype == torch.float8_e4m3fn and layer.k_scale is not None:
                scales = {"k_scale": layer.k_scale, **({} if reads_latents else {"v_scale": layer.v_scale})}
            if save_kv_cache and k is not None:
                slots = forward_batch.out_cache_loc.long()
                k = k.view(-1, kv_heads, head_dim)[: slots.shape[0]]
                if reads_latents:
                    append_kv(k, None, k_cache, None, slots, **scales)
                else:
                    append_kv(k, v.view(-1, kv_heads, head_dim_v)[: slots.shape[0]], k_cache, v_cache, slots, **scales)
        window = layer.sliding_window_size + 1  # SGLang counts the keys behind the query's own
        if window not in step.plans:  # made for the first layer's heads; layers with other heads are only less balanced
            shape = {"num_q_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "head_dim_v": head_dim_v}
            longest = step.max_seqlen_q or max(1, -(-q.shape[0] // max(1, step.seq_lens.shape[0])))
            shape |= {"page_size": step.page_size, "max_seqlen_q": longest, "window": window}
            step.plans[window] = attention_plan(step.seq_lens, step.cu_seqlens_q, latent=reads_latents, **shape)
        out = tree_attention(
            q.view(-1, heads, head_dim),
            k_cache,
            v_cache,
            step.page_table,
            step.seq_lens,
            step.cu_seqlens_q,
            step.tree_mask,
            max_seqlen_q=step.max_seqlen_q,
            scale=layer.scaling,
            softcap=layer.logit_cap,
            window=window,
            sinks=None if sinks is None else sinks.float(),
            plan=step.plans[window],
            **scales,
        )
        assert isinstance(out, Tensor)
        return out.view(-1, heads * head_dim_v)

    forward_decode = forward_extend

    def support_triton(self) -> bool:
        return False


class PagedTreeDraftBackend:
    """Prepares EAGLE's drafting steps after the first, by `attn_backends[i]`: `topk` branches per request, which see
    the prefix and their own slots, as pages of one slot."""

    def __init__(self, model_runner: Any, topk: int, num_steps: int) -> None:
        self.topk, self.num_steps = topk, num_steps
        self.attn_backends = [PagedTreeBackend(model_runner) for _ in range(num_steps - 1)]

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        pass

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        pass

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        self._prepare(forward_batch, self.attn_backends[0].max_context_len)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self._prepare(forward_batch, width_of(self.attn_backends[0], forward_batch))

    def _prepare(self, forward_batch: Any, width: int) -> None:
        lens, topk = forward_batch.seq_lens.long(), self.topk
        prefix = slots_of(self.attn_backends[0], forward_batch, width)
        drafts = forward_batch.out_cache_loc.view(-1, topk, self.num_steps)  # in order of branches, then steps
        table = torch.nn.functional.pad(prefix, (0, self.num_steps)).repeat_interleave(topk, 0)
        lens = lens.repeat_interleave(topk)
        places = lens[:, None] + torch.arange(self.num_steps, device=lens.device, dtype=torch.int64)
        table = table.scatter(1, places, drafts.flatten(0, 1).to(table.dtype))
        offsets = torch.arange(table.shape[0] + 1, dtype=torch.int32, device=lens.device)
        for step, backend in enumerate(self.attn_backends):
            backend.forward_metadata = Step(
                page_table=table,
                seq_lens=(lens + step + 1).int(),
                cu_seqlens_q=offsets,
                tree_mask=None,
                max_seqlen_q=1,
                page_size=1,
            )


def width_of(backend: PagedTreeBackend, forward_batch: Any, new: int = 0) -> int:
    """Returns the most tokens of a request with `new` ones, as far as the host knows."""
    if forward_batch.seq_lens_cpu is None or not forward_batch.seq_lens_cpu.numel():
        return backend.max_context_len
    return min(backend.max_context_len, int(forward_batch.seq_lens_cpu.max()) + new)


def slots_of(backend: PagedTreeBackend, forward_batch: Any, width: int, step: int = 1) -> Tensor:
    """Returns every `step`-th of each request's first `width` slots, -1 for requests outside the pool."""
    return rows_of(backend.req_to_token_pool.req_to_token[:, :width:step], forward_batch.req_pool_indices)


def _has_mask(forward_batch: Any) -> bool:
    if not forward_batch.forward_mode.is_target_verify():
        return False
    mask = forward_batch.spec_info.custom_mask
    return mask is not None and mask.numel() > 0


def _mask_words(spec: Any, prefix_lens: Tensor, requests: int) -> Tensor:
    """Returns the words of a mask that SGLang made for so many requests."""
    n = spec.draft_token_num
    qlen_only = spec.custom_mask.numel() == requests * n * n
    layout = TreeMaskMode.QLEN_ONLY if qlen_only else TreeMaskMode.FULL_MASK
    return tree_mask_words(spec.custom_mask, prefix_lens, n, layout)


def _pages(buffer: Tensor, page_size: int) -> Tensor:
    """[slots, heads, head_dim] -> [pages, page_size, heads, head_dim], a view."""
    if buffer.dim() != 3:
        raise refusal("pagedtree's backend", "[slots, heads, dim]", [*buffer.shape], NotImplementedError)
    return buffer.unflatten(0, (-1, page_size))


def _check_prompt(forward_batch: Any, save_kv_cache: bool) -> None:
    if save_kv_cache or forward_batch.extend_prefix_lens_cpu is None or any(forward_batch.extend_prefix_lens_cpu):
        raise refusal("pagedtree's backend", "latents", "heads of them behind a prefix", NotImplementedError)


def _check_layer(layer: Any, options: dict[str, Any]) -> None:
    names = [name for name, value in options.items() if value is not None and value is not False]
    if names:
        raise NotImplementedError(f"pagedtree's backend: {', '.join(sorted(names))}: only sinks is supported")
    if layer.is_cross_attention or getattr(layer.attn_type, "value", layer.attn_type) != "decoder":
        raise refusal("pagedtree's backend", "decoder self-attention", layer.attn_type, NotImplementedError)
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        raise refusal("pagedtree's backend", "tanh capping", layer.logit_capping_method, NotImplementedError)
    if layer.xai_temperature_len > 0:
        raise NotImplementedError("pagedtree's backend: xai_temperature_len is not supported")
