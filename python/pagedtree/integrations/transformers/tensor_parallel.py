"""A transformers model over the ranks of a group; its output layer gives each rank its columns of the logits."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn

from pagedtree._arguments import refusal
from pagedtree.distributed import VocabShards


@torch.no_grad()
def tensor_parallel(model: Any, *, group: dist.ProcessGroup | None = None, gather_logits: bool = False) -> VocabShards:
    """Reduces a model that all ranks of the group have loaded to each rank's part, in place.

    The parts follow the model's tensor-parallel plan (transformers 5.19 or later), but the output layer's columns stay
    on their ranks. Tied weights are separated. If there are more ranks than key and value heads, these are repeated.

    group: a torch.distributed group; default all ranks. Its size divides the query heads, and is a multiple of the key
    and value heads or divides them. gather_logits: every rank gets all columns, for draft models. Returns the
    `VocabShards` of the output layer, of no use with gather_logits.

    Raises ValueError for a model without a plan, heads that do not divide, or more ranks than key and value heads where
    these differ by layer (Gemma 4); ImportError for an older transformers.
    """
    from torch.distributed.device_mesh import DeviceMesh

    try:
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism
    except ImportError as error:
        raise refusal("transformers", "5.19 or later", transformers.__version__, ImportError) from error

    size = dist.get_world_size(group)
    if not model.tp_plan:
        raise refusal("model", "one with a tensor-parallel plan (tp_plan)", type(model).__name__)
    _repeat_kv_heads(model, size)
    output, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if output.weight is embeddings.weight:
        output.weight = nn.Parameter(output.weight.clone(), requires_grad=False)
        model.config.tie_word_embeddings = False
    name = next(name for name, module in model.named_modules() if module is output)
    plan = dict(model.tp_plan) | ({} if gather_logits else {name: "colwise"})
    device = embeddings.weight.device
    if size > 1:
        ranks = group if group is not None else dist.group.WORLD
        assert ranks is not None
        mesh = DeviceMesh.from_group(ranks, device.type, mesh_dim_names=("tp",))
        # transformers 5.23 wants an entry for each layer, those before it read the plan as it is.
        expand = getattr(model, "_expand_parallel_plan", dict)
        apply_tensor_parallelism(model, mesh, expand(plan))
    columns = output.weight.to_local() if hasattr(output.weight, "to_local") else output.weight
    return VocabShards(columns.shape[0], group=group, device=device)


def _repeat_kv_heads(model: Any, size: int) -> None:
    config = model.config.get_text_config()
    layers = [
        (layer.num_attention_heads, layer.num_key_value_heads, getattr(layer, "head_dim", None))
        for layer in config.per_layer_config
    ]
    heads, kv_heads, head_dim = layers[0]
    if len(set(layers)) > 1:
        if any(count % size for layer in layers for count in layer[:2]):
            found = f"{size} for (query heads, key and value heads, head_dim) of {sorted(set(layers))}"
            raise refusal("group", "a size that divides the heads of each layer, as these differ", found)
        return
    if heads % size or (kv_heads % size and size % kv_heads):
        wanted = f"a size that divides {heads} query heads, and divides {kv_heads} KV heads or is a multiple of them"
        raise refusal("group", wanted, size)
    times = max(size // kv_heads, 1)
    if times == 1:
        return
    head_dim = head_dim or config.hidden_size // heads
    old, new = model.config, copy.deepcopy(model.config)
    new.get_text_config().num_key_value_heads = kv_heads * times
    for module in model.modules():
        config = getattr(module, "config", None)  # layers look there for the attention implementation
        if config is old or config is old.get_text_config():
            module.config = new if config is old else new.get_text_config()
        if not (hasattr(module, "k_proj") and hasattr(module, "v_proj")):
            continue
        module.num_key_value_groups = heads // (kv_heads * times)
        for projection in (module.k_proj, module.v_proj):
            for name, parameter in list(projection.named_parameters(recurse=False)):
                by_head = parameter.view(kv_heads, head_dim, *parameter.shape[1:])
                repeated = by_head.repeat_interleave(times, dim=0).flatten(0, 1)
                setattr(projection, name, nn.Parameter(repeated, requires_grad=False))
            projection.out_features = kv_heads * times * head_dim
