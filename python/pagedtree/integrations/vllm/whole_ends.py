"""A vLLM model's embedding and output layer, for heads that share them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from vllm.distributed import tensor_model_parallel_all_gather

from pagedtree._arguments import refusal


class WholeEnds:
    """Embedding and output layer of a vLLM model, whole on each rank, with transformers' interface. All tensor-parallel
    ranks create it together. Raises ValueError for quantized weights."""

    def __init__(self, model: Any, model_config: Any) -> None:
        language = model.get_language_model() if hasattr(model, "get_language_model") else model
        self.config = model_config.hf_config
        vocab_size = model_config.get_vocab_size()
        self._embedding = nn.Embedding.from_pretrained(
            _whole_rows("embed_tokens", language.model.embed_tokens, vocab_size)
        )
        rows = _whole_rows("lm_head", language.lm_head, vocab_size)
        self._output = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
        self._output.weight = nn.Parameter(rows, requires_grad=False)

    def get_input_embeddings(self) -> nn.Module:
        return self._embedding

    def get_output_embeddings(self) -> nn.Module:
        return self._output


def _whole_rows(name: str, layer: Any, vocab_size: int) -> Tensor:
    weight = getattr(layer, "weight", None)
    if weight is None or not weight.is_floating_point():
        raise refusal("head", f"a target whose {name} is not quantized", type(layer).__name__)
    rows: Tensor = tensor_model_parallel_all_gather(weight.detach(), dim=0)[:vocab_size]
    return rows
