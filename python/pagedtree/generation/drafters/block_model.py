"""The draft model of DFlash (Chen et al., 2026, arXiv 2602.06036): one pass drafts a block of mask tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pagedtree._arguments import refusal
from pagedtree.generation.drafters import checkpoint
from pagedtree.generation.drafters.block_config import NUM_LAYERS_READ, BlockDraftConfig
from pagedtree.generation.drafters.checkpoint_config import ConfigEntries
from pagedtree.generation.drafters.layers import DecoderLayer, RotaryAngles, Rotation, layer_shapes
from pagedtree.generation.drafters.rotary_config import Rotary
from pagedtree.generation.drafters.target import Target, call_shared

# Ignored tensors: copies of the target's weights, and t2d, which follows from d2t.
NOT_READ = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight", "t2d")

CODEBOOKS = ("predecessor", "successor")

# Layer, q [..., Hq, D], k and v [..., Hkv, D] of the block's tokens -> [..., Hq, D].
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class LocalConvolution(nn.Module):
    """DFlash 2's convolutions over the tokens of a block, before and after a part of a layer.

    Each channel of a token becomes a weighted sum of the same channel at this and earlier tokens of its block. A weight
    is a trained one plus one computed from the token, which `conv_group_size` channels share.
    """

    def __init__(self, config: BlockDraftConfig) -> None:
        super().__init__()
        kernel, group = config.conv_kernel_size, config.conv_group_size
        assert kernel is not None and group is not None
        self.block_size, self.kernel_size, self.num_groups = config.block_size, kernel, config.hidden_size // group
        self.base_kernel = nn.Parameter(torch.zeros(2, kernel, config.hidden_size, dtype=torch.get_default_dtype()))
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * kernel * self.num_groups, bias=False)

    def before(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Maps states [..., T, H] of whole blocks to the part's input; also returns the weights for `behind`."""
        shape = (2, self.kernel_size, self.num_groups)
        weights = cast(Tensor, self.kernel_projection(states)).unflatten(-1, shape)
        return self._convolved(states, weights[..., 0, :, :], self.base_kernel[0]), weights[..., 1, :, :]

    def behind(self, states: Tensor, weights: Tensor) -> Tensor:
        return self._convolved(states, weights, self.base_kernel[1])

    def _convolved(self, states: Tensor, weights: Tensor, base: Tensor) -> Tensor:
        blocks = states.unflatten(-2, (-1, self.block_size)).unflatten(-1, (self.num_groups, -1))
        own = weights.unflatten(-3, (-1, self.block_size))[..., None]  # [..., blocks, size, kernel, groups, 1]
        out = torch.zeros_like(blocks)
        for back in range(self.kernel_size):
            kernel = base[back].view(self.num_groups, -1) + own[..., back, :, :]
            out[..., back:, :, :] += kernel[..., back:, :, :] * blocks[..., : self.block_size - back, :, :]
        return out.view_as(states)


class CandidateSelector(nn.Module):
    """Scores of the likeliest tokens of a place given the token before it: a sum over `selector_rank` products."""

    def __init__(self, config: BlockDraftConfig) -> None:
        super().__init__()
        rank, top_k, vocab_size = config.selector_rank, config.selector_top_k, config.vocab_size
        assert rank is not None and top_k is not None and vocab_size is not None
        self.top_k = top_k
        rows = torch.zeros(vocab_size, rank, dtype=torch.get_default_dtype())
        self.predecessor_codebook, self.successor_codebook = nn.Parameter(rows), nn.Parameter(rows.clone())
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)

    def forward(self, states: Tensor, before: Tensor, candidates: Tensor, logits: Tensor) -> Tensor:
        """Returns scores [B, F, K] of a place's candidates, int64 [B, K] with logits [B, K], after each of the tokens
        `before`, int64 [B, F]. states: [B, H], the place's."""
        context = self.predecessor_codebook[before] * self.hidden_projection(states)[:, None]
        return logits[:, None] + context @ self.successor_codebook[candidates].transpose(1, 2)


class _Layer(DecoderLayer):
    def __init__(self, config: BlockDraftConfig) -> None:
        super().__init__(config, has_head_norms=True)
        self.attention_conv = self.mlp_conv = None
        if config.conv_kernel_size is not None:
            self.attention_conv, self.mlp_conv = LocalConvolution(config), LocalConvolution(config)

    def forward(self, states: Tensor, rotation: Rotation, attend: Callable[..., Tensor]) -> Tensor:
        if self.attention_conv is None or self.mlp_conv is None:
            return super().forward(states, rotation, attend)
        inputs, kernel = self.attention_conv.before(self.input_layernorm(states))
        states = states + self.attention_conv.behind(self.self_attn(inputs, rotation, attend), kernel)
        inputs, kernel = self.mlp_conv.before(self.post_attention_layernorm(states))
        return states + self.mlp_conv.behind(self.mlp(inputs), kernel)


class BlockDraftModel(nn.Module):
    """Transformer layers that draft a block of tokens in one pass, from the target's features of the text so far.

    The block is the newest token and block_size - 1 mask tokens. The context is keys and values only, which every layer
    computes from one state per token, a projection (`fc`, `hidden_norm`) of the outputs of some target layers. DFlash 2
    adds convolutions within a block around each layer's attention and MLP, and a selector that weighs a place's
    candidates by the token before it.

    `from_pretrained` reads DFlash's published checkpoints (`DFlashDraftModel`, github.com/z-lab/dflash), DFlash 2
    (`DFlash2DraftModel`), and speculators' versions of both, tested only with random weights. Refused: RoPE types that
    depend on the length, and attention sinks.

    embed: the target's input embeddings, with `weight` [V, hidden_size], ValueError for another width.
    lm_head: the target's output layer, hidden states [..., hidden_size] -> logits [..., V].
    """

    target_ids: Tensor | None

    def __init__(self, config: BlockDraftConfig, embed: nn.Module, lm_head: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.config = config
        tokens = cast(Tensor, embed.weight)
        if tokens.shape[1] != config.hidden_size or config.mask_token_id >= tokens.shape[0]:
            wanted = f"a weight of [more than mask_token_id {config.mask_token_id}, hidden_size {config.hidden_size}]"
            raise refusal("embed", wanted, [*tokens.shape])
        num_features = len(config.target_layer_ids) * config.hidden_size
        self.fc = nn.Linear(num_features, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        rotary = config.rotary or Rotary("default", config.rope_theta, {})
        self._angles = RotaryAngles(rotary.frequencies(config.head_dim))
        self.candidate_selector = None if config.selector_rank is None else CandidateSelector(config)
        # With a draft vocabulary: a separate output layer, and the target ids of its tokens.
        self.lm_head: nn.Linear | None = None
        self.register_buffer("target_ids", None, persistent=False)
        if config.draft_vocab_size is not None:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
            self.target_ids = torch.arange(config.draft_vocab_size, dtype=torch.int64)
        # In a tuple, so that the target's layers do not become submodules and are not saved.
        self._of_target = (embed, lm_head)

    @property
    def embeddings(self) -> Tensor:
        return cast(Tensor, self._of_target[0].weight)

    def check_target(self, hidden_size: int, vocab_size: int) -> None:
        """Raises ValueError unless the target has layers of `hidden_size` outputs and `vocab_size` tokens."""
        expected, (num_tokens, width) = self.fc.in_features, self.embeddings.shape
        num_features = hidden_size * len(self.config.target_layer_ids)
        if num_features != expected:
            raise refusal("drafter", f"a target with {expected} features of a token", num_features)
        if num_tokens < vocab_size or width != self.config.hidden_size:
            wanted = f"embeddings of the target's {vocab_size} tokens and of hidden_size {self.config.hidden_size}"
            raise refusal("drafter", wanted, [num_tokens, width])

    def context(self, features: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Returns each layer's keys and values of known tokens: features [..., len(target_layer_ids) * hidden_size] and
        positions int64 [...] -> (k, v), each [..., Hkv, D]."""
        weight = self.fc.weight
        states = self.hidden_norm(self.fc(features.to(weight.dtype)))
        rotation = self._angles.at(positions, weight.dtype)
        return [cast(DecoderLayer, layer).self_attn.keys_values(states, rotation) for layer in self.layers]

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Maps tokens of whole blocks and their positions, int64 [..., T], to the states [..., T, hidden_size] for
        `logits`. attend: a layer's attention over the context and the blocks' keys and values."""
        states = call_shared(lambda ids: F.embedding(ids, self.embeddings), tokens).to(self.fc.weight.dtype)
        if self.config.input_embedding_scale != 1.0:
            states = states * self.config.input_embedding_scale
        rotation = self._angles.at(positions, states.dtype)
        for i, layer in enumerate(self.layers):
            states = layer(states, rotation, lambda q, k, v, i=i: attend(i, q, k, v))
        return cast(Tensor, self.norm(states))

    def logits(self, states: Tensor) -> Tensor:
        """Maps a block's states [..., hidden_size] to logits [..., V] of the same places; with `sample_from_anchor`,
        of the next ones. With a draft vocabulary the columns are `target_ids`."""
        logits = call_shared(self._of_target[1], states) if self.lm_head is None else self.lm_head(states)
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return cap * torch.tanh(logits / cap) if cap else logits

    def save_pretrained(self, path: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
        config = {**self.config.to_dict(), "dtype": str(dtype).removeprefix("torch.")}
        ids = self.target_ids
        tensors = {} if ids is None else {"d2t": ids.cpu() - torch.arange(len(ids), dtype=torch.int64)}
        checkpoint.save_checkpoint(path, config, self.state_dict(), dtype, tensors)

    @classmethod
    def from_pretrained(cls, path: str | Path, model: Any) -> BlockDraftModel:
        """Returns a block drafter for `model` (its embeddings, output layer, device and dtype) from the folder `path`.

        Raises as `EagleHead.from_pretrained` does.
        """
        path, target = Path(path), Target.of(model)
        device, dtype = target.place
        entries = ConfigEntries.load(path)
        config = BlockDraftConfig._read(entries)
        tokens = cast(Tensor, target.embed_tokens.weight)
        num_tokens, width = tokens.shape
        if config.hidden_size != width:
            entries.refuse("hidden_size", f"the target's {width}")
        if config.mask_token_id >= num_tokens:
            entries.refuse("mask_token_id", f"one of the target's {num_tokens} tokens", config.mask_token_id)
        if max(config.target_layer_ids) >= target.num_layers:
            layers = f"layers of the target's 0..{target.num_layers - 1}"
            entries.refuse("target_layer_ids", layers, config.target_layer_ids)
        if "vocab_size" in entries:
            target.check(entries, "vocab_size", entries.integer("vocab_size"))
        stored = checkpoint.StoredTensors(path, (checkpoint.WEIGHTS_NAME, "*.safetensors"), _own_name)
        shapes = _shapes(config)
        if config.draft_vocab_size is not None and "d2t" not in stored:
            entries.refuse("draft_vocab_size", f"vocab_size {config.vocab_size}, or less with a tensor d2t")
        sizes = {**vars(config), NUM_LAYERS_READ: len(config.target_layer_ids)}
        if config.conv_group_size is not None:
            sizes["groups"] = config.hidden_size // config.conv_group_size
        stored.expect(shapes, sizes, integers=("d2t",), ignored=[n for n in NOT_READ if n not in shapes])
        ids = None
        if config.draft_vocab_size is not None:
            ids = checkpoint.draft_ids(stored, config.draft_vocab_size, target.lm_head.weight.shape[0])
        for name, weight in (("embed_tokens.weight", tokens), ("lm_head.weight", target.lm_head.weight)):
            if name in stored and name not in shapes and not checkpoint.have_same_values(stored.load(name), weight):
                raise refusal(f"{path}: {name}", "the target's values, which are used", "others")
        drafter = cls(config, target.embed_tokens, target.lm_head)
        drafter.target_ids = ids
        drafter.to(device, dtype)  # before loading: the default dtype would round the values
        drafter.load_state_dict({name: stored.load(name) for name in shapes if name != "d2t"})
        return drafter.eval()


def _shapes(config: BlockDraftConfig) -> dict[str, str]:
    layer = layer_shapes(bias=config.attention_bias, has_norms=True)
    if config.conv_kernel_size is not None:
        for name in ("attention_conv", "mlp_conv"):
            layer[f"{name}.base_kernel"] = "2, conv_kernel_size, hidden_size"
            layer[f"{name}.kernel_projection.weight"] = "2 * conv_kernel_size * groups, hidden_size"
    shapes = dict[str, str]()
    if config.selector_rank is not None:
        shapes |= {f"candidate_selector.{name}_codebook": "vocab_size, selector_rank" for name in CODEBOOKS}
        shapes["candidate_selector.hidden_projection.weight"] = "selector_rank, hidden_size"
    if config.draft_vocab_size is not None:
        shapes |= {"lm_head.weight": "draft_vocab_size, hidden_size", "d2t": "draft_vocab_size"}
    return {
        "fc.weight": f"hidden_size, {NUM_LAYERS_READ} * hidden_size",
        "hidden_norm.weight": "hidden_size",
        "norm.weight": "hidden_size",
        **{f"layers.{i}.{name}": shape for i in range(config.num_hidden_layers) for name, shape in layer.items()},
        **shapes,
    }


def _own_name(name: str) -> str:
    """Strips ".weight" of codebooks, which are embeddings in DFlash's code but bare tensors in its files."""
    is_codebook = (
        name.removesuffix(".weight").removeprefix("candidate_selector.").removesuffix("_codebook") in CODEBOOKS
    )
    return name.removesuffix(".weight") if is_codebook else name
