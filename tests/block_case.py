"""Random block drafters, and their results by transformers' Qwen 3 layers."""

from __future__ import annotations

from dataclasses import replace

import torch
from eagle_case import SIZES, features_of
from generate_case import VOCAB
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding, rotate_half

from pagedtree.integrations.transformers import BlockDraftConfig, BlockDraftModel

LAYER = {name: size for name, size in SIZES.items() if name != "vocab_size"}
CONFIG = BlockDraftConfig(**LAYER, num_hidden_layers=2, block_size=6, mask_token_id=3, target_layer_ids=(0, 1))

DFLASH2 = replace(
    CONFIG,
    vocab_size=VOCAB,
    conv_kernel_size=2,
    conv_group_size=16,
    selector_rank=8,
    selector_top_k=6,
    layer_types=("sliding_attention", "full_attention"),
    sliding_window=4,
    is_causal=False,
)


def block_model(model, config=CONFIG, seed=4):
    torch.manual_seed(seed)
    drafter = BlockDraftModel(config, model.get_input_embeddings(), model.get_output_embeddings())
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.2)
    return drafter.to(model.lm_head.weight).eval()


@torch.no_grad()
def dense_logits(model, drafter, text):
    """Returns logits [block_size - 1, V] after `text`, without a cache."""
    config, count = drafter.config, len(text) - 1
    rotary = {"rope_type": "default", "rope_theta": config.rope_theta}
    sizes = {name: value for name, value in vars(config).items() if name in (*LAYER, "rms_norm_eps")}
    qwen = Qwen3Config(**sizes, rope_parameters=rotary)
    qwen.rope_theta = config.rope_theta  # for transformers 4
    features = features_of(model, text, config.target_layer_ids)[:count] if count else torch.empty(0, 2 * 128)
    states = model.get_input_embeddings()(torch.tensor([text[-1]] + [config.mask_token_id] * (config.block_size - 1)))
    context = drafter.hidden_norm(features @ drafter.fc.weight.T)
    positions = torch.arange(count + config.block_size)
    cos, sin = (part[0] for part in Qwen3RotaryEmbedding(qwen)(states, positions[None]))
    for i, module in enumerate(drafter.layers):
        layer = Qwen3DecoderLayer(qwen, layer_idx=0)
        layer.load_state_dict(module.state_dict())  # equal names
        attention, inputs = layer.self_attn, layer.input_layernorm(states)
        everything = torch.cat([context, inputs])
        projected = attention.q_proj(inputs), attention.k_proj(everything), attention.v_proj(everything)
        q, k, v = (x.unflatten(-1, (-1, config.head_dim)).transpose(0, 1) for x in projected)
        q, k = attention.q_norm(q), attention.k_norm(k)
        q = q * cos[count:] + rotate_half(q) * sin[count:]
        k = k * cos + rotate_half(k) * sin
        groups = config.num_attention_heads // config.num_key_value_heads
        k, v = (x.repeat_interleave(groups, dim=0) for x in (k, v))
        scores = q @ k.transpose(1, 2) * config.head_dim**-0.5
        distance = positions[count:, None] - positions
        window = config.window(i)
        if window is not None:
            scores = scores.masked_fill((distance < 0) | (distance >= (window or len(positions))), float("-inf"))
        out = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        states = states + attention.o_proj(out)
        states = states + layer.mlp(layer.post_attention_layernorm(states))
    return model.get_output_embeddings()(drafter.norm(states[1:]))
