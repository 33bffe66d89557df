"""Latent attention (MLA) over one cached vector a token: DeepSeek-V2 and V3, Kimi-K2, GLM-4.7-Flash and similar models.

Such a layer projects each token to a latent of 512 values, from which kv_b_proj makes all keys and values, and to 64
rotated values that all keys share. A packed pass caches these 576 values and multiplies the key half of kv_b_proj into
the queries, its value half into the output ("absorption", https://arxiv.org/abs/2405.04434, section 2.1).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from pagedtree._arguments import refusal
from pagedtree.generation.paged_step import PagedStep
from pagedtree.integrations.transformers.forwards import with_forwards

LATENT_DIM, ROPE_DIM = 512, 64


def latent_layers(model: nn.Module) -> list[nn.Module]:
    """Returns the layers that a packed pass runs over their latents, without layers of other sizes whose expanded keys
    and values are equally wide. Raises ValueError for the rest."""
    return [module for module in model.modules() if hasattr(module, "kv_b_proj") and _is_served(module)]


def _is_served(module: Any) -> bool:
    name = type(module).__name__
    if hasattr(module, "indexer"):
        raise refusal("model", f"latent attention to every token, but {name} chooses tokens by an indexer")
    sizes = getattr(module, "kv_lora_rank", None), getattr(module, "qk_rope_head_dim", None)
    if sizes != (LATENT_DIM, ROPE_DIM) or not hasattr(module, "expand_kv"):
        if getattr(module, "qk_head_dim", 0) == getattr(module, "v_head_dim", None):
            return False
        wanted = f"latent attention of kv_lora_rank {LATENT_DIM} and qk_rope_head_dim {ROPE_DIM}, as in transformers"
        raise refusal("model", wanted, f"{name} of kv_lora_rank {sizes[0]} and qk_rope_head_dim {sizes[1]}")
    linear = module.kv_b_proj
    weight = _weight(module)
    # The weight is used without the forward around it, so that may do nothing but multiply.
    is_plain = type(linear) is nn.Linear and linear.bias is None and type(weight) in (Tensor, nn.Parameter)
    if not is_plain or weight.is_meta or weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        wanted = "a kv_b_proj that is a torch.nn.Linear without bias, not quantised, offloaded or changed by an adapter"
        raise refusal("model", wanted, f"{type(linear).__name__} of {weight.dtype} on {weight.device} in {name}")
    return True


def absorbed(layers: Iterable[nn.Module]) -> AbstractContextManager[None]:
    return with_forwards(((layer, _latents) for layer in layers), "expand_kv")


def is_absorbed(module: nn.Module) -> bool:
    return getattr(module, "expand_kv", None) is _latents


def _latents(kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces expand_kv: latents [B, 1, T, 512] and rotated keys [B, 1, T, 64] become one head's keys and values."""
    keys = torch.cat([kv_nope, k_rot], dim=-1)
    return keys, keys[..., :LATENT_DIM]


def attend_latent(
    step: PagedStep, module: Any, query: Tensor, latents: Tensor, window: int, options: dict[str, Any]
) -> Tensor:
    """Computes attention of an absorbed layer: query [1, Hq, T, D], latents [1, 1, T, 576] -> [1, T, Hq, Dv]."""
    weight = _weight(module).view(query.shape[1], -1, LATENT_DIM)  # of this rank's heads
    to_keys, to_values = weight.split([module.qk_nope_head_dim, module.v_head_dim], dim=1)
    q_nope, q_rope = query[0].split([module.qk_nope_head_dim, ROPE_DIM], dim=-1)
    q = torch.cat([q_nope @ to_keys, q_rope], dim=-1)
    out = step.attend(
        module.layer_idx, q.transpose(0, 1), latents[0].transpose(0, 1), None, window, options, head_dim_v=LATENT_DIM
    )
    return (out.transpose(0, 1) @ to_values.mT).transpose(0, 1).unsqueeze(0)


def _weight(module: Any) -> Tensor:
    """Returns kv_b_proj's weight [Hq * (nope + v), 512]; of a tensor-parallel model, this rank's rows."""
    weight = module.kv_b_proj.weight
    return weight.to_local() if hasattr(weight, "to_local") else weight
