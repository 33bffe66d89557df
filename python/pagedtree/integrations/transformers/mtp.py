"""Multi-token prediction: extra layers that models ship for drafting (DeepSeek-V3, 2024)."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from pagedtree._arguments import refusal
from pagedtree.generation import drafters
from pagedtree.generation.drafters import Drafter, EagleDrafter
from pagedtree.generation.drafters.checkpoint import WEIGHTS_NAME, StoredTensors, have_same_values
from pagedtree.generation.drafters.target import Target, call_shared, check_attention, is_offloaded
from pagedtree.generation.packed_model import PackedModel
from pagedtree.generation.paged_step import PagedStep
from pagedtree.integrations.transformers.attention import NAME
from pagedtree.integrations.transformers.latent import absorbed, latent_layers
from pagedtree.integrations.transformers.model import ATTENTION_KINDS, decoder_layers
from pagedtree.integrations.transformers.packed_pass import PackedPass

WEIGHTS_NAMES = (WEIGHTS_NAME, "*.safetensors")
# Embedding and output layer in a checkpoint: behind the prefix of the MTP layer, then among the model's own tensors.
ENDS = (
    ["{}embed_tokens.weight", *(f"{outer}embed_tokens.weight" for outer in ("", "model.", "model.language_model."))],
    ["{}shared_head.head.weight", "lm_head.weight", "language_model.lm_head.weight"],
)
FROM_CONFIG = "self_attn.rotary_emb.inv_freq"  # follows from the target's


class Layout(NamedTuple):
    """The names of a layer's tensors in a checkpoint, after `prefix`; `layer`: prefix of the decoder layer's own names.
    is_state_first: whether the projection reads the state in front of the token's embedding."""

    prefix: str
    token_norm: str
    state_norm: str
    projection: str
    final_norm: str
    layer: str = ""
    is_state_first: bool = False


# Of DeepSeek-V3, GLM-4.5 and GLM-4.7-Flash the layer stands behind the model's last one.
AMONG_LAYERS = Layout("model.layers.{}.", "enorm", "hnorm", "eh_proj", "shared_head.norm")
LAYOUTS = (
    Layout("mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.0."),  # Qwen3-Next and 3.5
    Layout("model.mtp_layers.0.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", "", True),
    # speculators', in a folder without the model
    Layout("mtp_layers.0.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
)


class MtpHead(nn.Module):
    """A decoder layer of the target's architecture that maps a token's embedding and a state to the next state.

    Position t holds the target's token t + 1 and the state of token t: the target's last or, in a draft, this layer's
    at the previous node.

        joined = projection(cat([token_norm(embed(token)), state_norm(state)]))   # MiMo: the state first
        state = final_norm(layer(joined))

    The layer has the architecture of the target's last full-attention layer. It shares the target's rotary embedding,
    and its embedding and output layer unless a checkpoint has others.

    model: the target, whose decoder has `norm` and `rotary_emb`.
    """

    target_ids: Tensor

    def __init__(self, model: Any, *, is_state_first: bool = False) -> None:
        super().__init__()
        target, decoder = Target.of(model), model.get_decoder()
        norm, rotary = getattr(decoder, "norm", None), getattr(decoder, "rotary_emb", None)
        if norm is None or rotary is None:
            raise refusal("model", "a decoder with norm and rotary_emb", type(decoder).__name__)
        self.is_state_first = is_state_first
        self.feature_layers = (target.num_layers - 1,)
        self.token_norm, self.state_norm, self.final_norm = (copy.deepcopy(norm) for _ in range(3))
        hidden, (device, dtype) = target.hidden_size, target.place
        self.projection = nn.Linear(2 * hidden, hidden, bias=False, device=device, dtype=dtype)
        self.layer, self._config = _copied_layer(model)
        self._latent = latent_layers(self.layer)
        ids = torch.arange(target.lm_head.weight.shape[0], dtype=torch.int64)
        self.register_buffer("target_ids", ids.to(device), persistent=False)
        # In a tuple, so that the target's modules do not become submodules.
        self._of_target = (target.embed_tokens, target.lm_head, norm, rotary)

    @property
    def vocab_size(self) -> int:
        return self.target_ids.shape[0]

    @property
    def device(self) -> torch.device:
        return self.projection.weight.device

    def check_attention(self) -> None:
        """Raises ValueError for a layer that no paged pass supports."""
        attention: Any = getattr(self.layer, "self_attn", None)
        if not self._latent and hasattr(attention, "head_dim"):
            groups = getattr(attention, "num_key_value_groups", 1)
            num_heads = attention.q_proj.out_features // attention.head_dim
            check_attention(num_heads, max(num_heads // groups, 1), attention.head_dim)

    def check_target(self, hidden_size: int, vocab_size: int) -> None:
        num_features = self.projection.out_features
        if num_features != hidden_size or self.vocab_size < vocab_size:
            wanted = f"MTP layers of the target's hidden size {hidden_size} and {vocab_size} tokens"
            raise refusal("drafter", wanted, f"{num_features} and {self.vocab_size}")

    def fuse(self, features: Tensor) -> Tensor:
        return cast(Tensor, self._of_target[2](features))

    def forward(self, tokens: Tensor, states: Tensor, positions: Tensor, step: PagedStep | None = None) -> Tensor:
        """Maps tokens and positions, int64 [T], with states [T, H], to the next states. step: the pass over a paged
        cache. None: one text, read by transformers' own attention, as for training."""
        embed, _, _, rotary = self._of_target
        parts = [self.token_norm(call_shared(embed, tokens).to(self.projection.weight.dtype)), self.state_norm(states)]
        joined = self.projection(torch.cat(parts[::-1] if self.is_state_first else parts, dim=-1))[None]
        arguments: dict[str, Any] = {
            "position_ids": positions[None],
            "position_embeddings": rotary(joined, positions[None]),
            "past_key_values": None,
        }
        self._config._attn_implementation = "sdpa" if step is None else NAME
        if step is None:
            out = self.layer(joined, attention_mask=None, **arguments)
        else:
            packed = PackedPass(step)
            with packed.active(), absorbed(self._latent):
                out = self.layer(joined, attention_mask=packed.mask.of_all_layers, **arguments)
        return cast(Tensor, self.final_norm(out[0] if isinstance(out, tuple) else out)[0])

    def logits(self, states: Tensor) -> Tensor:
        return call_shared(self._of_target[1], states)

    @classmethod
    def from_pretrained(cls, path: str | Path, model: Any) -> MtpHead:
        """Returns the first MTP layer for `model` from the model's checkpoint, or from a folder that speculators wrote.

        Raises as `EagleHead.from_pretrained` does.
        """
        path = Path(path)
        stored = StoredTensors(path, WEIGHTS_NAMES)
        layout = _layout_of(stored, model.config.get_text_config().num_hidden_layers)
        if layout is None:
            tensors = "tensors mtp.*, model.mtp_layers.0.* or those of a layer behind its last one"
            raise refusal(path, f"a draft head, or a model with MTP layers ({tensors})", "neither")
        head = cls(model, is_state_first=layout.is_state_first)
        state = head.state_dict()
        names = {name: _stored_names(layout, name, tensor, stored) for name, tensor in state.items()}
        shapes = {name: shape for parts in names.values() for name, shape in parts.items()}
        embed, output, *rest = head._of_target
        ends = [(embed, _found(ENDS[0], layout, stored)), (output, _found(ENDS[1], layout, stored))]
        if ends[1][1] is None and output.weight is embed.weight:  # then they are tied in the checkpoint, too
            ends[1] = output, ends[0][1]
        # Padding may add rows.
        shapes |= {name: (stored.first_size(name) or 0, end.weight.shape[1]) for end, name in ends if name is not None}
        sizes = {str(size): size for shape in shapes.values() for size in shape}
        prefixes = ("mtp_layers.", "verifier_") if layout == LAYOUTS[-1] else ("",)
        ignored = [n for n in stored.names if n.startswith(prefixes) and not n.startswith(layout.prefix)]
        ignored += [layout.prefix + FROM_CONFIG, *(name.format(layout.prefix) for name, *_ in ENDS)]
        stored.expect({name: ", ".join(map(str, shape)) for name, shape in shapes.items()}, sizes, ignored=ignored)
        # One after the other, into their places: of a large model the experts are most of it.
        for name, tensor in state.items():
            _fill(tensor, names[name], stored)
        head._of_target = (*(_end(*pair, stored) for pair in ends), *rest)
        return head.eval()


class MtpDrafter(EagleDrafter):
    """Trees of the most likely tokens of the target's multi-token prediction layer.

    It drafts as `EagleDrafter` does, with the same sizes and a separate cache (of latents if the target's is). The
    first of several such layers drafts all levels.

    head: `MtpHead.from_pretrained`, of the target that `generate` gets.
    """

    is_capturable = True

    def __init__(self, head: MtpHead, *, num_nodes: int = 16, depth: int = 3, width: int = 4) -> None:
        super().__init__(cast(Any, head), num_nodes=num_nodes, depth=depth, width=width)

    def check_target(self, model: PackedModel) -> None:
        head = cast(MtpHead, self.head)
        if head.device != model.device:
            raise refusal("drafter", f"MTP layers on the target's device {model.device}", head.device)
        head.check_target(model.hidden_size, model.vocab_size)

    def _run(self, tokens: Tensor, states: Tensor, positions: Tensor, step: PagedStep) -> Tensor:
        return cast(MtpHead, self.head)(tokens, states, positions, step)


def _copied_layer(model: Any) -> tuple[nn.Module, Any]:
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    fits = [i for i, kind in enumerate(kinds) if kind in ATTENTION_KINDS and kind != "sliding_attention"]
    if not fits:
        raise refusal("model", "a layer with full attention", "none")
    (layer,) = decoder_layers(model, fits[-1:])
    if is_offloaded(layer):
        raise refusal("model", "a layer in memory, which MTP layers copy", "an offloaded one (device meta)")
    attention = next((module for module in layer.modules() if hasattr(module, "layer_idx")), None)
    if attention is None or not hasattr(attention, "config"):
        raise refusal("model", "layers of transformers' attention interface", type(layer).__name__)
    # The config stays the same for all modules of the copy, and is not the model's.
    copied: Any = copy.deepcopy(layer)
    for module in copied.modules():
        if hasattr(module, "layer_idx"):
            module.layer_idx = 0
            own = module.config
    return copied, own


def _layout_of(stored: StoredTensors, num_layers: int) -> Layout | None:
    behind = AMONG_LAYERS._replace(prefix=AMONG_LAYERS.prefix.format(num_layers))
    for layout in (behind, *LAYOUTS):
        if f"{layout.prefix}{layout.projection}.weight" in stored:
            return layout
    return None


def _stored_names(layout: Layout, name: str, tensor: Tensor, stored: StoredTensors) -> Mapping[str, tuple[int, ...]]:
    """Returns the file's tensors, with shapes, of a tensor of `MtpHead`: one, or one per expert."""
    part, _, rest = name.partition(".")
    if part != "layer":
        return {f"{layout.prefix}{getattr(layout, part)}.{rest}": tuple(tensor.shape)}
    full_name = f"{layout.prefix}{layout.layer}{rest}"
    experts, is_of_experts, kind = full_name.rpartition(".experts.")
    if full_name in stored or not is_of_experts or kind not in ("gate_up_proj", "down_proj"):
        return {full_name: tuple(tensor.shape)}
    # transformers has the experts' matrices in one tensor, checkpoints one by one.
    count, rows, columns = tensor.shape
    kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    shape = rows // len(kinds), columns
    return {f"{experts}.experts.{i}.{matrix}.weight": shape for i in range(count) for matrix in kinds}


def _found(names: Iterable[str], layout: Layout, stored: StoredTensors) -> str | None:
    return next((name for pattern in names if (name := pattern.format(layout.prefix)) in stored), None)


def _end(end: nn.Module, name: str | None, stored: StoredTensors) -> nn.Module:
    """Returns the target's embedding or output layer, or a copy with the checkpoint's values if these differ."""
    if name is None:
        return end
    tensor, weight = stored.load(name), cast(Tensor, end.weight)
    if have_same_values(tensor, weight):
        return end
    if tensor.shape != weight.shape:
        raise refusal(f"{stored.folder}: {name}", f"{len(weight)} rows as the target's", len(tensor))
    return copy.deepcopy(end, {id(weight): nn.Parameter(tensor.to(weight), requires_grad=False)})


@torch.no_grad()
def _fill(tensor: Tensor, names: Mapping[str, tuple[int, ...]], stored: StoredTensors) -> None:
    if len(names) == 1:
        tensor.copy_(stored.load(next(iter(names))))
        return
    rows = tensor.view(-1, tensor.shape[-1])
    for part, name in zip(rows.split([shape[0] for shape in names.values()]), names, strict=True):
        part.copy_(stored.load(name))


def load_drafter(folder: str | Path, target: Any, **sizes: int) -> Drafter:
    """Returns the drafter for the draft head in a folder.

    As `pagedtree.generation.drafters.load_drafter`, and for multi-token prediction layers (`MtpDrafter`).
    """
    return drafters.load_drafter(folder, target, of_models=_of_model, **sizes)


def _of_model(folder: Path, target: Any, **sizes: int) -> Drafter:
    return MtpDrafter(MtpHead.from_pretrained(folder, target), **sizes)
