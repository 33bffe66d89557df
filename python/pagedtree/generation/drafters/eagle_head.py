"""The head of EAGLE-3: one decoder layer on features of the target (Li et al., 2025, arXiv 2503.01840)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pagedtree._arguments import refusal
from pagedtree.generation.drafters import checkpoint
from pagedtree.generation.drafters.checkpoint_config import ConfigEntries
from pagedtree.generation.drafters.eagle_config import LAYER_IDS, NUM_LAYERS_READ, EagleConfig
from pagedtree.generation.drafters.layers import Attend, DecoderLayer, RotaryAngles, Rotation
from pagedtree.generation.drafters.target import SHARDED, Target, call_shared, check_attention

# Supported file names.
WEIGHTS_NAMES = (checkpoint.WEIGHTS_NAME, "*.safetensors", "pytorch_model.bin")
# Ignored tensors: copies of the target's weights, and t2d, which follows from d2t.
NOT_READ = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight")
OWN_PARTS = ("embed_tokens.weight", "lm_head.weight")


class EagleHead(nn.Module):
    """A Llama-style decoder layer that reads a token and a state at each position.

    Position t holds the target's token t + 1 and a state of token t. For known tokens `fuse` makes it from the target's
    features, the outputs of three layers; in a draft it is the layer's output at the parent node (with norm_output
    after the last norm). `logits` of the layer's output predicts token t + 2.

    EAGLE 3.1 adds norm_output, and norm_before_fc and fc_norm, which norm the features before fusing, together or per
    layer. A P-EAGLE head (Hui et al., 2026) has a state for unknown tokens, `mask_hidden`, and drafts all levels in one
    pass.

    Args:
        config: entries of config.json, as in SGLang and vLLM. ValueError for unknown or unsupported entries.
        embed_tokens, lm_head: the target's, used unless the head's checkpoint has others.
        feature_layers: see `Drafter.feature_layers`.
        target_ids: int64 [draft vocabulary], ascending; None = the target's whole vocabulary.
    """

    target_ids: Tensor

    def __init__(
        self,
        config: dict[str, Any],
        embed_tokens: nn.Module,
        lm_head: Any,
        feature_layers: tuple[int, ...],
        target_ids: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.config = EagleConfig.read(ConfigEntries(config))
        self.feature_layers = tuple(feature_layers)
        num_tokens = lm_head.weight.shape[0]
        if hasattr(lm_head.weight, "to_local"):  # rows of it are used without the layer
            raise refusal("model", *SHARDED)
        if target_ids is None:
            target_ids, rows = torch.arange(num_tokens, dtype=torch.int64), lm_head.weight
        else:
            checkpoint.check_ids("target_ids", target_ids, num_tokens)
            rows = lm_head.weight[target_ids.to(lm_head.weight.device)]
        self.register_buffer("target_ids", target_ids, persistent=False)
        sizes, width = self.config, len(self.feature_layers) * self.config.target_hidden_size
        self.input_norm = nn.RMSNorm(width, eps=sizes.rms_norm_eps) if sizes.norm_before_fc else None
        self.fc_norm: nn.ModuleList | None = None
        if sizes.fc_norm:
            self.fc_norm = nn.ModuleList(
                nn.RMSNorm(sizes.target_hidden_size, eps=sizes.rms_norm_eps) for _ in self.feature_layers
            )
        self.fc = nn.Linear(width, sizes.hidden_size, bias=False)
        unknown = torch.zeros(1, 1, width, dtype=self.fc.weight.dtype)
        self.mask_hidden = None if sizes.mask_token_id is None else nn.Parameter(unknown)
        self.midlayer = _Layer(sizes)
        # Numbered as in checkpoints, where the first layer may be layers.0.
        behind = range(1, sizes.num_hidden_layers)
        self.layers = nn.ModuleDict({str(i): DecoderLayer(sizes, has_head_norms=sizes.has_head_norms) for i in behind})
        self.norm = nn.RMSNorm(sizes.hidden_size, eps=sizes.rms_norm_eps)
        self.embed_tokens: nn.Embedding | None = None
        # In a tuple, so that the target's layer does not become a submodule and is not saved.
        self._embed_tokens = (embed_tokens,)
        # The target's rows, unless the head has an output layer.
        self.lm_head: nn.Linear | None = None
        self._rows = (rows.detach(),)
        self._angles = RotaryAngles(sizes.rotary.frequencies(sizes.head_dim))

    @property
    def vocab_size(self) -> int:
        return self.target_ids.shape[0]

    @property
    def embedding(self) -> nn.Module:
        return self._embed_tokens[0] if self.embed_tokens is None else self.embed_tokens

    @property
    def input_rows(self) -> Tensor:
        return cast(Tensor, self.embedding.weight)

    @property
    def output_rows(self) -> Tensor:
        """[draft vocabulary, hidden_size]."""
        return self._rows[0] if self.lm_head is None else self.lm_head.weight

    def check_attention(self) -> None:
        sizes = self.config
        check_attention(sizes.num_attention_heads, sizes.num_key_value_heads, sizes.head_dim)

    def check_target(self, hidden_size: int, vocab_size: int) -> None:
        size, num_inputs = self.config.hidden_size, self.fc.in_features
        if num_inputs != hidden_size * len(self.feature_layers):
            found = f"one that reads {num_inputs} features of {len(self.feature_layers)} layers"
            raise refusal("drafter", f"a head of the target's hidden size {hidden_size}", found)
        if self.input_rows.shape[0] < vocab_size or self.input_rows.shape[1] != size:
            wanted = f"[at least {vocab_size}, {size}] for the target's tokens and this head's hidden_size"
            raise refusal("embed_tokens.weight", wanted, [*self.input_rows.shape])
        if self.output_rows.shape != (self.vocab_size, size):
            wanted = f"{[self.vocab_size, size]} for the tokens of target_ids and this head's hidden_size"
            raise refusal("lm_head.weight", wanted, [*self.output_rows.shape])

    def fuse(self, features: Tensor) -> Tensor:
        """Maps the target's features [T, F] to states [T, H]."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        states: Tensor = self.fc(features)
        return states

    def unknown_state(self) -> Tensor:
        """Returns [1, H], an unknown token's state. Raises ValueError for heads of EAGLE-3."""
        if self.mask_hidden is None:
            raise refusal("head", "one of P-EAGLE, with mask_hidden", "one of EAGLE-3")
        return self.fuse(self.mask_hidden[0])

    def forward(self, tokens: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Maps the target's tokens, int64 [..., T], and states [..., T, H] to the next states. positions: int64,
        broadcast to tokens. attend: as in `layers`; later layers also pass their number, as `layer`."""
        rotation = self._angles.at(positions, states.dtype)
        embeds = call_shared(self.embedding, tokens).to(self.fc.weight.dtype)
        out: Tensor = self.midlayer(embeds, states, rotation, attend)
        for number, layer in self.layers.items():
            out = layer(out, rotation, partial(attend, layer=int(number)))
        return self.norm(out) if self.config.norm_output else out

    def logits(self, states: Tensor) -> Tensor:
        """Maps the result of `forward`, [..., H], to logits over the draft vocabulary."""
        states = states if self.config.norm_output else self.norm(states)
        if self.lm_head is not None:
            return cast(Tensor, self.lm_head(states))
        return F.linear(states.to(self.output_rows.dtype), self.output_rows)

    def save_pretrained(
        self, path: str | Path, dtype: torch.dtype = torch.bfloat16, *, needs_target: bool = False
    ) -> None:
        """Writes config.json and model.safetensors into the folder `path`, in the format of SGLang and vLLM.

        needs_target: omit an output layer that is the target's; only `from_pretrained` can then load it.
        """
        config, ids = self.config, self.target_ids.cpu()
        entries = config.to_entries() | {
            "draft_vocab_size": self.vocab_size,
            # SGLang names layers by their outputs, vLLM by their inputs.
            "eagle_config": {LAYER_IDS: list(self.feature_layers), "use_aux_hidden_state": True},
            LAYER_IDS: [layer + 1 for layer in self.feature_layers],
        }
        weights = self.state_dict()
        if self.lm_head is None and not needs_target:
            weights["lm_head.weight"] = self._rows[0]
        ids_and_mask = {
            "d2t": ids - torch.arange(len(ids), dtype=torch.int64),
            "t2d": torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True),
        }
        checkpoint.save_checkpoint(path, entries, weights, dtype, ids_and_mask)

    @classmethod
    def from_pretrained(cls, path: str | Path, model: Any) -> EagleHead:
        """Returns the head for `model`, on its device and in its dtype, from a folder of SGLang, vLLM or speculators.

        Without d2t the draft vocabulary is the target's, whose rows replace a missing embed_tokens.weight or
        lm_head.weight. Raises ValueError, naming the entry or tensor, for another architecture or target and unknown
        entries or tensors; OSError for unreadable files.
        """
        path, target = Path(path), Target.of(model)
        device, dtype = target.place
        entries = ConfigEntries.load(path)
        config = EagleConfig.read(entries)
        target.check(entries, "vocab_size", config.vocab_size)
        if config.target_hidden_size != target.hidden_size:
            entries.refuse("target_hidden_size", f"the target's {target.hidden_size}", config.target_hidden_size)
        layers = config.feature_layers(target.num_layers)
        stored = checkpoint.StoredTensors(path, WEIGHTS_NAMES, _own_name)
        draft_vocab = config.draft_vocab_size or stored.first_size("d2t") or config.vocab_size
        if draft_vocab > config.vocab_size or (draft_vocab < config.vocab_size and "d2t" not in stored):
            entries.refuse(
                "draft_vocab_size", f"vocab_size {config.vocab_size}, or less with a tensor d2t", draft_vocab
            )
        stored.expect(
            config.shapes(len(layers)),
            {**vars(config), NUM_LAYERS_READ: len(layers), "draft_vocab_size": draft_vocab},
            optional=(*OWN_PARTS, "d2t"),
            integers=("d2t",),
            ignored=NOT_READ,
        )
        parts = [name for name in OWN_PARTS if name in stored]
        is_tied = config.tie_word_embeddings and parts == ["embed_tokens.weight"]
        if is_tied:
            if draft_vocab != config.vocab_size:
                entries.refuse("tie_word_embeddings", f"false with {draft_vocab} of {config.vocab_size} tokens")
            parts = list(OWN_PARTS)
        for name, weight in zip(OWN_PARTS, (target.embed_tokens.weight, target.lm_head.weight), strict=True):
            if name not in parts and weight.shape[1] != config.hidden_size:
                wanted = f"it with hidden_size {config.hidden_size}, the target's has width {weight.shape[1]}"
                raise refusal(f"{path}: {name}", wanted)
        ids, num_rows = None, target.lm_head.weight.shape[0]
        if "d2t" in stored or draft_vocab != num_rows:  # without d2t the target may have padding after its tokens
            ids = checkpoint.draft_ids(stored, draft_vocab, num_rows)
        head = cls(config.to_entries(), target.embed_tokens, target.lm_head, layers, ids)
        if "embed_tokens.weight" in parts:
            head.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if "lm_head.weight" in parts:
            head.lm_head = nn.Linear(config.hidden_size, draft_vocab, bias=False)
        tensors = {name: stored.load(name) for name in stored.names if name not in (*NOT_READ, "d2t")}
        head.to(device, dtype)  # before loading: the default dtype would round the values
        head.load_state_dict({"lm_head.weight": tensors["embed_tokens.weight"], **tensors} if is_tied else tensors)
        return head.eval()


class _Layer(DecoderLayer):
    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config, 2 * config.hidden_size, has_head_norms=config.has_head_norms)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.is_residual_normed = config.norm_before_residual

    def forward(self, embeds: Tensor, states: Tensor, rotation: Rotation, attend: Attend) -> Tensor:  # type: ignore[override]
        normed = self.hidden_norm(states)
        inputs = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        return self.add_mlp((normed if self.is_residual_normed else states) + self.self_attn(inputs, rotation, attend))


def _own_name(name: str) -> str:
    """Maps layers.0, as vLLM writes it, to SGLang's midlayer, and drops the prefix "model."."""
    return name.removeprefix("model.").replace("layers.0.", "midlayer.")
