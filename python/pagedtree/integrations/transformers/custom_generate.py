"""`generate` of this package as the decoding loop of `model.generate(custom_generate=tree_generate)`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.generation import EosTokenCriteria, GenerateDecoderOnlyOutput, MaxLengthCriteria
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from pagedtree import SamplingParams
from pagedtree._arguments import refusal
from pagedtree.generation.drafters import StepResult
from pagedtree.generation.stats import GenerationStats
from pagedtree.generation.token_options import TokenOptions
from pagedtree.grammars import GrammarMatcher
from pagedtree.integrations.transformers.generate import fed, generate, to_its_end

# Arguments of `model.generate` that transformers hands to its own decoding loops alone, and its cache.
KEPT = ("streamer", "assistant_model", "synced_gpus")
REFUSED = {
    "assistant_model": "None, and drafter=ModelDrafter(...) in its place",
    "synced_gpus": "False, where all ranks have the same prompts and seeds",
    "past_key_values": "None, as keys and values stay in a paged cache",
}
# Arguments that transformers prepares for its own cache and passes to any decoding loop; not used here.
PREPARED = {"attention_mask", "position_ids", "past_key_values", "cache_position", "use_cache", "logits_to_keep"}
OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def tree_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    *,
    drafter: Any = None,
    seeds: Tensor | Sequence[int] | None = None,
    rule: str = "auto",
    tree: str | None = "auto",
    page_size: int = 16,
    num_pages: int | None = None,
    max_batch_tokens: int = 4096,
    max_sequences: int | None = None,
    cuda_graph: bool = False,
    callback: Callable[[int, list[int]], object] | None = None,
    on_step: Callable[[StepResult], None] | None = None,
    on_stats: Callable[[GenerationStats], None] | None = None,
    options: TokenOptions | Sequence[TokenOptions | None] | None = None,
    grammars: Sequence[GrammarMatcher | None] | None = None,
    logprobs: int | None = None,
    logprobs_mode: str = "raw",
    stop_strings: str | Sequence[str] | None = None,
    stop_tokenizer: Any = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Decodes with draft trees over a paged cache: `model.generate(..., custom_generate=tree_generate, drafter=...)`.

    Prompts, attention mask, lengths, EOS, padding, sampling, logits processors and the streamer (of one sequence) come
    from `model.generate`'s arguments and generation config, the keyword arguments here are
    `pagedtree.integrations.transformers.generate`'s. Greedy text equals `model.generate` without custom_generate,
    sampled text follows the same distribution; seeds: one per returned row, default from torch's generator. on_stats:
    called with the `GenerationStats` at the end. stop_strings need the tokenizer as stop_tokenizer; they never match
    text that begins in a prompt.

    Returns int64 [B, length], or with return_dict_in_generate an output of `sequences`.
    Raises ValueError, naming the option, for beams, other logits processors (typical_p, ...), stopping criteria other
    than length and EOS, scores or states as output, past_key_values, synced_gpus, assistant_model (use drafter), and
    further inputs of the model.
    """
    given = _given(model, model_kwargs)
    streamer = given.get("streamer")
    with to_its_end(streamer):
        if stop_strings is not None and stop_tokenizer is None:
            raise refusal("stop_strings", "stop_tokenizer=, as transformers keeps tokenizer=", "None")
        _check_given(given, len(input_ids))
        mode = generation_config.get_generation_mode().value
        if mode not in ("greedy_search", "sample"):
            raise refusal("generation_config", "greedy search or sampling", mode)
        names = [name for name in OUTPUTS if getattr(generation_config, name, None)]
        if names:
            raise refusal("generation_config", "sequences alone as output", ", ".join(names))
        params = SamplingParams() if generation_config.do_sample else None
        max_length, eos_token_id = _limits(stopping_criteria)
        attention_mask = _attention_mask(input_ids, model_kwargs)
        if params is not None and seeds is None:
            seeds = torch.randint(2**63 - 1, (input_ids.shape[0],))
        result, stats = generate(
            model, input_ids, drafter=drafter, max_new_tokens=max_length - input_ids.shape[1], params=params,
            seeds=seeds, page_size=page_size, num_pages=num_pages, attention_mask=attention_mask,
            eos_token_id=eos_token_id, pad_token_id=generation_config.pad_token_id, rule=rule, tree=tree,
            max_batch_tokens=max_batch_tokens, max_sequences=max_sequences, cuda_graph=cuda_graph,
            callback=callback if streamer is None else fed(streamer, callback), on_step=on_step,
            stop_strings=stop_strings, tokenizer=stop_tokenizer, logits_processor=logits_processor,
            options=options, grammars=grammars, logprobs=logprobs, logprobs_mode=logprobs_mode,
            generation_config=False,  # the processors and criteria have all of it
        )  # fmt: skip
        if on_stats is not None:
            on_stats(stats)
        sequences: Any = result
        has_fields = generation_config.return_dict_in_generate
        return GenerateDecoderOnlyOutput(sequences=sequences) if has_fields else sequences


def _limits(criteria: Any) -> tuple[int, list[int]]:
    unknown = [type(c).__name__ for c in criteria if not isinstance(c, (MaxLengthCriteria, EosTokenCriteria))]
    if unknown:
        raise refusal("stopping_criteria", "none but length and EOS", ", ".join(unknown))
    lengths = [criterion.max_length for criterion in criteria if isinstance(criterion, MaxLengthCriteria)]
    eos = [criterion.eos_token_id for criterion in criteria if isinstance(criterion, EosTokenCriteria)]
    return min(lengths), [token for tokens in eos for token in tokens.tolist()]


def _attention_mask(input_ids: Tensor, model_kwargs: dict[str, Any]) -> Tensor | None:
    names = [name for name, value in model_kwargs.items() if name not in PREPARED and not _is_empty(value)]
    if names:
        raise refusal("model_kwargs", "no inputs but tokens and a mask", ", ".join(names))
    mask: Tensor | None = model_kwargs.get("attention_mask")
    positions = model_kwargs.get("position_ids")
    if positions is not None:
        kept = torch.ones_like(input_ids) if mask is None else mask.long()
        implied = ((kept.cumsum(-1) - 1) * kept).expand(*positions.shape[:-2], -1, -1)  # some have planes of positions
        if positions.shape != implied.shape or not torch.equal(positions * kept, implied):
            raise refusal("position_ids", "those that the attention mask implies", "others")
    return mask


def _is_empty(value: Any) -> bool:
    """Returns whether an input holds nothing, as transformers' own outputs of encoders do for text alone."""
    if isinstance(value, Mapping | list | tuple):
        return all(map(_is_empty, value.values() if isinstance(value, Mapping) else value))
    return value is None


def _given(model: Any, model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of the `model.generate` that calls: it hands some of them to its own loops alone."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        held = frame.f_locals if frame.f_globals.get("__name__") == GenerationMixin.__module__ else {}
        if frame.f_code.co_name == "generate" and held.get("self") is model:
            break
        frame = frame.f_back
    else:  # called by other means
        return model_kwargs
    given: dict[str, Any] = {**held["kwargs"], **{name: held[name] for name in KEPT}}
    if given["synced_gpus"] is None and (is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)):
        given["synced_gpus"] = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    return given


def _check_given(given: dict[str, Any], num_sequences: int) -> None:
    if given.get("streamer") is not None and num_sequences != 1:
        raise refusal("streamer", "one sequence", num_sequences)
    for name, expected in REFUSED.items():
        value = given.get(name)
        if value is not None and value is not False:
            raise refusal(name, expected, value if value is True else type(value).__name__)
