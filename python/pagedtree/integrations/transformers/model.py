"""Running a transformers model on packed tokens over a paged cache."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pagedtree._arguments import refusal
from pagedtree.generation import drafters
from pagedtree.generation.drafters.target import dtype_of
from pagedtree.generation.packed_model import PackedModel, PassOutput
from pagedtree.generation.paged_step import PagedStep
from pagedtree.integrations.transformers.attention import NAME, register
from pagedtree.integrations.transformers.forwards import uncompiled
from pagedtree.integrations.transformers.latent import absorbed, latent_layers
from pagedtree.integrations.transformers.packed_pass import PackedPass
from pagedtree.integrations.transformers.recurrent import RECURRENT_KINDS, on_trees, recurrent_layers
from pagedtree.integrations.transformers.whole_inputs import check_preparation, check_scales

# Layer kinds, by their config names: with attention, and without token mixing.
ATTENTION_KINDS = {"full_attention", "sliding_attention", "hybrid"}
OTHER_KINDS = {"mlp", "moe"}
# Config fields with the number of positions, and names of position tables: GPT-2, OPT and BioGPT, BERT, CTRL.
POSITIONS = ("max_position_embeddings", "max_target_positions")
POSITION_TABLES = ("wpe", "embed_positions", "position_embeddings", "pos_encoding")


def check_model(model: Any) -> None:
    """Raises ValueError, with the reason, for models that cannot run on packed tokens; TypeError for other objects.
    Layers refuse other masks and head sizes, and to run twice."""
    name, is_model = type(model).__name__, isinstance(model, nn.Module) and hasattr(model, "config")
    if not (is_model and hasattr(model, "can_generate")):
        hint = "; pass its .module" if isinstance(getattr(model, "module", None), nn.Module) else ""
        raise refusal("model", "a causal language model of transformers", f"{name}{hint}", TypeError)
    if not model.can_generate():
        raise refusal("model", "a causal language model with its output layer", name)
    if model.training:
        raise refusal("model", "evaluation mode", "training mode; call model.eval()")
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - ATTENTION_KINDS - RECURRENT_KINDS - OTHER_KINDS
    if kinds or model.config.is_encoder_decoder:
        what = ", ".join(sorted(kinds)) or "an encoder and a decoder"
        raise refusal("model", "a decoder of full or sliding attention layers", what)
    if not _has(model, lambda inner: inner._can_set_attn_implementation()):
        raise refusal("model", f"layers that use transformers' attention interface, {name} has its own")
    if not _takes_positions(model):
        raise refusal("model", f"a forward that takes position_ids, that of {name} does not")
    check_scales(model)
    check_preparation(model)
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        if layer is not None and not isinstance(getattr(layer, "weight", None), Tensor):
            raise refusal("model", "an embedding and an output layer with a weight", f"a {type(layer).__name__}")
        if layer is not None and layer.weight.dtype == torch.float64:
            raise refusal("model", "weights of torch.float32, float16 or bfloat16", "torch.float64")
    _check_devices(model)
    # transformers 4.57 hands the keys of one layer to another in its cache, which is not used here.
    if getattr(config, "num_kv_shared_layers", 0) and any(
        getattr(module, "kv_shared_layer_index", None) is not None for module in model.modules()
    ):
        raise refusal("model", "layers that share keys without transformers' cache, as in transformers 5.23")


def _check_devices(model: Any) -> None:
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    parts = (model.get_input_embeddings(), decoder, model.get_output_embeddings())
    devices = {str(device) for part in parts if part is not None for device in _devices(part)}
    if len(devices) > 1:
        raise refusal("model", "all layers on one device", f"{', '.join(sorted(devices))}; see its device_map")


def _devices(module: nn.Module, target: Any = None) -> Iterator[torch.device]:
    """Yields the devices where the weights are used; `target` for offloaded ones."""
    hook = getattr(module, "_hf_hook", None)  # accelerate's
    targets = (getattr(each, "execution_device", None) for each in getattr(hook, "hooks", (hook,)))
    target = next((device for device in targets if device is not None), target)
    for weight in module.parameters(recurse=False):
        is_offloaded = weight.is_meta and target is not None
        yield torch.empty(0, dtype=torch.uint8, device=target).device if is_offloaded else weight.device
    for child in module.children():
        yield from _devices(child, target)


def _has(model: nn.Module, property_of: Callable[[Any], bool]) -> bool:
    return any(property_of(inner) for inner in model.modules() if isinstance(inner, PreTrainedModel))


def _makes_masks(model: nn.Module) -> bool:
    """Returns whether the model builds its masks itself, as some of 4.57 do, from one 4-D mask."""
    if _has(model, lambda inner: hasattr(sys.modules.get(type(inner).__module__), "create_causal_mask")):
        return False
    return _has(model, lambda inner: inner._supports_sdpa)


def _takes_positions(model: nn.Module) -> bool:
    parameters = inspect.signature(model.forward).parameters
    hands_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return "position_ids" in parameters or (
        hands_on and _has(model, lambda inner: "position_ids" in inspect.signature(inner.forward).parameters)
    )


# By id of a config: the config, its own attention implementation, and the number of open blocks of `use_attention`,
# which need not close in order: drafters may share it.
_switched: dict[int, list[Any]] = {}


@contextmanager
def use_attention(model: Any) -> Iterator[None]:
    """Switches the model's text part to the attention implementation "pagedtree" inside the block."""
    register()
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    text = model.config.get_text_config()
    if text is not model.config:  # then the text model and the models around it: not a vision tower
        parts = [part for part in parts if _has(part, lambda inner: inner.config is text)] or parts
    configs = {id(part.config): part.config for part in parts if part._can_set_attn_implementation()}
    for key, config in configs.items():
        _switched.setdefault(key, [config, config._attn_implementation, 0])[2] += 1
        # Not by set_attn_implementation, which sets the parts, too, and asks whether they support the value.
        config._attn_implementation_internal = NAME
    try:
        yield
    finally:
        for key, config in configs.items():
            _switched[key][2] -= 1
            if _switched[key][2] == 0:
                config._attn_implementation_internal = _switched.pop(key)[1]


class TransformersModel(PackedModel):
    """A transformers model in the form that the engine and the drafters take. Raises as `check_model`,
    `latent.latent_layers` and `recurrent.recurrent_layers` do."""

    def __init__(self, model: Any) -> None:
        model = getattr(model, "_orig_mod", model)  # of torch.compile(model)
        check_model(model)
        self.model, self.latent_layers, self.recurrent_layers = model, latent_layers(model), recurrent_layers(model)
        self._watched = _Watched(model)
        embeddings, config = model.get_input_embeddings(), model.config.get_text_config()
        self.device = next(_devices(embeddings), embeddings.weight.device)
        # Adapters around an embedding have its weight alone; a quantised weight may have another shape.
        self.vocab_size = int(getattr(embeddings, "num_embeddings", None) or embeddings.weight.shape[0])
        self.num_logits = int((model.get_output_embeddings() or embeddings).weight.shape[0])
        self.hidden_size = int(getattr(config, "hidden_size", 0))  # BLT has several, and is refused in its first pass
        self.is_recurrent = bool(self.recurrent_layers)
        positions = (getattr(config, field, None) for field in POSITIONS)
        self.num_positions = next((value for value in positions if isinstance(value, int) and value > 0), None)
        weights = list(model.parameters())
        self.num_weights = sum(weight.numel() for weight in weights)
        # Weights of other types, such as DTensor, may hook into torch's autograd dispatch.
        tensors = (*weights, *model.buffers())
        self._is_plain = all(type(tensor) in (Tensor, nn.Parameter) for tensor in tensors)
        # Asked for here, as that takes 0.3 ms, which passes of a small model would notice.
        self._takes_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._makes_masks, self._dtype = _makes_masks(model), dtype_of(model)

    @property
    def has_position_table(self) -> bool:
        """Whether it cannot read other positions."""
        count = self.num_positions
        for module in self.model.modules():
            for name in POSITION_TABLES:
                table = getattr(module, name, None)
                weight = table if isinstance(table, Tensor) else getattr(table, "weight", None)
                if not isinstance(weight, Tensor) or weight.ndim != 2:
                    continue
                # OPT and BioGPT begin with some rows that are for no position; an adapter may be around the table.
                inner = table.modules() if isinstance(table, nn.Module) else ()
                offset: Any = next((inside.offset for inside in inner if hasattr(inside, "offset")), 0)
                if weight.shape[0] - offset == count:
                    return True
        return False

    @contextmanager
    def use(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(uncompiled(self.model))
            stack.enter_context(use_attention(self.model))
            stack.enter_context(on_trees(self.recurrent_layers))
            stack.callback(lambda: self._watched.stop())
            yield

    def run(
        self,
        input_ids: Tensor,
        positions: Tensor,
        step: PagedStep,
        rows: Tensor | None = None,
        needs_hidden: bool = False,
        feature_layers: Sequence[int] = (),
    ) -> PassOutput:
        model, packed = self.model, PackedPass(step)
        kwargs: dict[str, Any] = {}
        if rows is not None and self._takes_rows:
            kwargs["logits_to_keep"] = rows
        wanted = needs_hidden, tuple(feature_layers)
        if wanted != self._watched.wanted:
            self._watched.stop()
            self._watched = _Watched(model, *wanted)
        with packed.active(), absorbed(self.latent_layers), self._without_autograd():
            logits = model(
                input_ids=input_ids[None],
                position_ids=positions[None],
                attention_mask=packed.mask.of_all_layers if self._makes_masks else packed.mask.tokens,
                use_cache=False,
                **kwargs,
            ).logits[0]
        self._check_layers(packed)
        hidden, features = self._watched.take()
        if rows is not None and not kwargs:
            logits, hidden = logits[rows], hidden[rows] if hidden is not None else None
        if hidden is not None:  # an output layer of another dtype may get it converted
            hidden = hidden.to(self._dtype)
        return PassOutput(logits, hidden, features)

    def _without_autograd(self) -> AbstractContextManager[Any]:
        """Skips torch's autograd dispatch, 4 % of a small model's pass on a CPU. Tensors stay ordinary, unlike
        torch.inference_mode's."""
        if self._is_plain and not torch.is_grad_enabled():
            guard: AbstractContextManager[Any] = torch._C._AutoDispatchBelowAutograd()
            return guard
        return nullcontext()

    def new_hidden(self, num_rows: int) -> Tensor:
        width = self.model.get_output_embeddings().weight.shape[1]
        return torch.zeros((num_rows, width), dtype=self._dtype, device=self.device)

    @cached_property
    def _expected(self) -> tuple[int, int | None]:
        config = self.model.config.get_text_config()
        kinds = getattr(config, "layer_types", None)
        num_layers = config.num_hidden_layers - sum(kind not in ATTENTION_KINDS for kind in kinds or ())
        return num_layers, getattr(config, "sliding_window", None) if kinds is None else None

    def _check_layers(self, packed: PackedPass) -> None:
        (num_layers, window), name = self._expected, type(self.model).__name__
        layers_run = len(packed.step.layers_run)
        if layers_run != num_layers:
            wanted = f"{num_layers} layers to use transformers' attention interface, {layers_run} of {name} did"
            raise refusal("model", wanted)
        recurrent = packed.step.recurrent
        if recurrent is not None and len(recurrent.layers_run) != len(self.recurrent_layers):
            layers_run = len(recurrent.layers_run)
            wanted = f"{len(self.recurrent_layers)} recurrent layers to run in a pass, {layers_run} of {name} did"
            raise refusal("model", wanted)
        if window and not packed.mask.has_windows:
            wanted = f"masks of the config's sliding_window {window}, which transformers' cache keeps"
            raise refusal("model", wanted, f"masks without a window from {name}")


# The base class has the docstring.
class ModelDrafter(drafters.ModelDrafter):
    is_capturable = True

    def pack(self, model: Any) -> TransformersModel:
        return TransformersModel(model)


class _Watched:
    """Captures the output layer's input and decoder layers' outputs, as `wanted`, by hooks that stay until `stop`."""

    def __init__(self, model: Any, needs_hidden: bool = False, feature_layers: tuple[int, ...] = ()) -> None:
        self.wanted = needs_hidden, feature_layers
        self._kept: dict[int, Tensor] = {}  # by the layer's index, the output layer's is -1
        layers = decoder_layers(model, feature_layers)
        self._handles = [
            layer.register_forward_hook(partial(self._keep_output, i))
            for i, layer in zip(feature_layers, layers, strict=True)
        ]
        if needs_hidden:
            hook = partial(self._keep_input, -1)
            self._handles.append(model.get_output_embeddings().register_forward_pre_hook(hook))

    def take(self) -> tuple[Tensor | None, Tensor | None]:
        """Takes the last pass's results: hidden states of rows with logits, concatenated features of all tokens."""
        needs_hidden, feature_layers = self.wanted
        hidden = self._kept[-1] if needs_hidden else None
        features = torch.cat([self._kept[index] for index in feature_layers], dim=1) if feature_layers else None
        self._kept.clear()
        return hidden, features

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self.wanted, self._handles = (False, ()), []
        self._kept.clear()

    def _keep_input(self, index: int, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._kept[index] = args[0].reshape(-1, args[0].shape[-1])

    def _keep_output(self, index: int, layer: nn.Module, args: Any, output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        self._kept[index] = states.reshape(-1, states.shape[-1])


def decoder_layers(model: Any, indices: Sequence[int]) -> list[nn.Module]:
    """Returns the decoder layers with these indices; raises ValueError if the model lacks them."""
    if not indices:
        return []
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    count = model.config.get_text_config().num_hidden_layers
    # The first list of this length is the outermost: a layer's experts could be as many.
    lists = (module for module in decoder.modules() if isinstance(module, nn.ModuleList) and len(module) == count)
    layers = next(lists, None)
    if layers is None:
        raise refusal("feature_layers", f"a model with a list of its {count} layers", type(model).__name__)
    if not all(0 <= index < count for index in indices):
        raise refusal("feature_layers", f"layers of 0..{count - 1}", list(indices))
    return [layers[index] for index in indices]
