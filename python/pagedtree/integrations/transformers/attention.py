"""The attention implementation "pagedtree" of transformers models.

Inside `generate` of this package a `PackedPass` runs over a paged cache.
Elsewhere (`model.generate`, `model(...)`) dense keys and values are read in place, each sequence as one page.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from pagedtree import tree_attention
from pagedtree._arguments import argument_error, refusal
from pagedtree._C import HEAD_DIMS
from pagedtree.bits import packed
from pagedtree.integrations.masks import all_visible
from pagedtree.integrations.transformers.latent import attend_latent, is_absorbed
from pagedtree.integrations.transformers.packed_pass import running_pass

NAME = "pagedtree"
IMPLEMENTATION = f'attention implementation "{NAME}"'


def register() -> None:
    """Registers `attn_implementation="pagedtree"`, as importing this package does. Idempotent."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, _mask)


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Returns a pass's mask, called by transformers: ordinary passes get SDPA's, None if causal, else bool."""
    packed = running_pass()
    if packed is None:
        return sdpa_mask(*args, **kwargs)
    return packed.mask.of_layers(kwargs["mask_function"], kwargs.get("local_size"))


# Stands for a keyword that a model leaves out, which is not the same as None.
_LEFT_OUT: Any = object()


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = _LEFT_OUT,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attends in a layer, called by transformers: query [B, Hq, T, D], key, value [B, Hkv, S, D] -> [B, T, Hq, D].

    s_aux: the sinks of gpt-oss. sliding_window: None = no window; left out: the module's.
    attention_mask: None (causal, or everything visible where the layer is not causal), bool [B, 1, T, >= S], or the
    same as zeros and numbers of at most -10000; in a packed pass the pass's own. Raises ValueError for other masks
    there, other head sizes, dropout, training, attention weights as output, a position bias, and continuous batching.
    """
    _refuse_unsupported(module, key, value, dropout, kwargs)
    options = {
        "scale": scaling if scaling is not None else query.shape[-1] ** -0.5,
        "softcap": softcap or 0.0,
        "sinks": s_aux.detach().float() if s_aux is not None else None,
    }
    layer: Any = getattr(module, "layer_idx", None)
    packed = running_pass()
    if (dtype := autocast_dtype(query.device)) is not None:
        states = (query, key, value)
        query, key, value = (state if state.dtype == torch.float64 else state.to(dtype) for state in states)
    if packed is not None:
        seen = packed.mask.window_of(attention_mask)
        if is_absorbed(module):
            return attend_latent(packed.step, module, query, key, seen, options), None
        q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
        return packed.step.attend(layer, q, k, v, seen, options).unsqueeze(0), None
    window = (getattr(module, "sliding_window", None) if sliding_window is _LEFT_OUT else sliding_window) or 0
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    return _attend_dense(query, key, value, attention_mask, is_causal, window, options), None


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Returns the dtype in which torch.autocast computes attention now, if it does."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):  # which does not know meta
        return None
    return torch.get_autocast_dtype(device.type)


def _refuse_unsupported(module: nn.Module, key: Tensor, value: Tensor, dropout: float, kwargs: dict[str, Any]) -> None:
    def refuse(what: str) -> None:
        raise argument_error(IMPLEMENTATION, f"{what}; choose another attn_implementation")

    k_dim, v_dim = key.shape[-1], value.shape[-1]
    if (k_dim, v_dim) not in HEAD_DIMS:
        dims = ", ".join(str(k) for k, v in HEAD_DIMS if k == v)
        refuse(f"expected a head_dim in {dims}, or 192 for k and 128 for v, got {k_dim} for k and {v_dim} for v")
    if dropout > 0.0:
        refuse(f"expected no attention dropout, got {dropout}")
    if module.training and torch.is_grad_enabled():
        refuse("it has no backward pass, but the model is in training mode")
    if kwargs.get("output_attentions"):
        refuse("attention weights cannot be returned (output_attentions)")
    if kwargs.get("position_bias") is not None:
        refuse("a position bias is not supported")
    if kwargs.get("cache") is not None:  # transformers 4.57 asks any implementation
        refuse("continuous batching is not supported")


def _attend_dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    is_causal: bool,
    window: int,
    options: dict[str, Any],
) -> Tensor:
    """Attends to dense keys and values [B, Hkv, S, D] as B pages of S slots, without a copy."""
    batch, num_heads, num_queries, head_dim = query.shape
    kv_len = key.shape[2]
    if attention_mask is None and is_causal and num_queries > 1:
        kv_len = num_queries  # transformers gives no mask for a prompt, be it the first one of a longer, static cache
    index = torch.arange(batch + 1, dtype=torch.int32, device=query.device)
    seq_lens = torch.full_like(index[:-1], kv_len)
    masks: dict[str, Any] = {}
    if attention_mask is not None:
        words = _mask_words(attention_mask, batch, num_queries, kv_len)
        masks, window = {"tree_mask": words, "tree_lens": seq_lens}, 0
    elif not is_causal:
        masks = all_visible(batch * num_queries, seq_lens)
    out = tree_attention(
        query.transpose(1, 2).reshape(batch * num_queries, num_heads, head_dim),
        key.transpose(1, 2),
        value.transpose(1, 2),
        index[:-1, None],
        seq_lens,
        index * num_queries,
        max_seqlen_q=num_queries,
        window=window,
        **masks,
        **options,
    )
    return cast(Tensor, out).unflatten(0, (batch, num_queries))


def _mask_words(mask: Tensor, *sizes: int) -> Tensor:
    if torch.compiler.is_compiling() or mask.is_inference():  # where nobody could tell that it was written to
        return _pack_mask(mask, *sizes)
    made_for, words = getattr(mask, "_pagedtree_words", (None, None))
    if words is None or made_for != (mask._version, sizes):
        words = _pack_mask(mask, *sizes)
        mask._pagedtree_words = (mask._version, sizes), words  # type: ignore[attr-defined]
    return words


def _pack_mask(mask: Tensor, batch: int, num_queries: int, kv_len: int) -> Tensor:
    """Returns a 4-D transformers mask as int32 [B * T, ceil(S / 32)]: bit j % 32 of word j // 32 = key j is visible."""
    if mask.ndim != 4 or mask.shape[1] != 1:
        raise refusal(f"{IMPLEMENTATION}: attention_mask", "[B, 1, T, S]", list(mask.shape))
    visible = mask[:, 0, :, :kv_len].expand(batch, num_queries, kv_len)
    if visible.dtype != torch.bool:
        hidden = visible <= -10000  # as old scripts hide keys in fp16
        if bool(((visible != 0) & ~hidden).any()):
            raise refusal(f"{IMPLEMENTATION}: attention_mask", "bool, or 0 and at most -10000", "a bias")
        visible = ~hidden
    return packed(visible).flatten(0, 1)
